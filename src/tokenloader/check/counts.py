"""Counts: what one pass over all tokens counts of ids, documents and runs."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.check.documents import (
    MOST_DOCUMENTS,
    DocumentCounter,
    Documents,
    KeptDocuments,
    document_keys,
)
from tokenloader.check.first_occurrences import NUM_SLOTS, FirstOccurrences
from tokenloader.check.runs import Run, Runs, runs_in
from tokenloader.check.scan import SCAN_CHUNK_TOKENS, scan
from tokenloader.storage.progress import progress_bar
from tokenloader.tokens.reader import Reader
from tokenloader.tokens.token_array import TokenArray

# GPT-2's end-of-text, and the id one past its vocabulary, which is written for it by mistake.
OTHER_EOS_ID = {50256: 50257, 50257: 50256}


@dataclass(frozen=True)
class Limits:
    """Sizes that bound the memory of a pass."""

    chunk_tokens: int = SCAN_CHUNK_TOKENS  # tokens that a thread looks at together
    first_occurrences: int = NUM_SLOTS  # documents remembered for finding copies, at most; a power of two
    most_documents: int = MOST_DOCUMENTS  # kept for comparing, at most


@dataclass(frozen=True)
class Counts:
    """What is counted in one pass over tokens."""

    num_tokens: int
    dtype: str  # name of the numpy dtype of one token
    lowest_id: int
    highest_id: int
    num_out_of_vocab: int  # ids that are not below the vocabulary's size, where it is known
    first_out_of_vocab: int | None  # position of the first of them
    eos_id: int | None  # the id between documents; None: none was found
    num_eos: int  # tokens with this id
    num_other_eos: int  # tokens 50257 where 50256 ends documents, and the reverse
    has_index: bool  # whether documents are those of the files' document index, used without an eos_id
    num_documents: int  # documents that are not empty; 0 without eos_id and index
    num_empty: int  # documents without tokens, as between two end-of-text ids in a row
    median_length: int  # in tokens, of the documents kept for comparing
    longest_length: int  # tokens in the longest document
    lengths: list[int]  # number of documents of length [2**i, 2**(i + 1)), for each i from 0
    num_runs: int  # stretches of one id, 64 times or more in a row
    run_tokens: int  # tokens in them
    longest_runs: list[Run]  # at most 3


def count_tokens(
    tokens: TokenArray,
    *,
    title: str,  # before the progress bar
    eos_id: int | None,
    vocab_size: int | None = None,
    progress: bool,
    limits: Limits,
) -> tuple[Counts, KeptDocuments]:
    """Counts everything in one pass; returns also the documents, for comparing them.

    Documents end with eos_id; if that is None, they are those of the index, where there is one. Raises
    OSError where a file cannot be read.
    """
    index = tokens.documents if eos_id is None else None
    ends, num_empty = None, 0
    if index is not None:
        ends = np.unique(index)[1:]
        num_empty = len(index) - 1 - len(ends)
    runs, lowest_ids, highest_ids = Runs(), [], []
    first_out_of_vocab, num_out_of_vocab, num_other_eos = None, 0, 0
    with Reader(tokens) as reader, progress_bar(title, tokens.nbytes, shown=progress) as bar:
        counter = DocumentCounter(reader, 1 if ends is None else 0, limits.most_documents)
        firsts = FirstOccurrences(reader, limits.first_occurrences)
        look = partial(_look_at_chunk, eos_id=eos_id, ends=ends, vocab_size=vocab_size, firsts=firsts)
        for start, stop, chunk in scan(tokens, look, limits.chunk_tokens):
            lowest_ids.append(chunk.lowest_id)
            highest_ids.append(chunk.highest_id)
            num_out_of_vocab += chunk.num_out_of_vocab
            if first_out_of_vocab is None:
                first_out_of_vocab = chunk.first_out_of_vocab
            num_other_eos += chunk.num_other_eos
            counter.append(chunk.stops, chunk.inside)
            runs.append(chunk.runs)
            bar.done_bytes += (stop - start) * tokens.dtype.itemsize
        counter.finish(len(tokens))
        runs.finish()
    counts = Counts(
        num_tokens=len(tokens),
        dtype=tokens.dtype.name,
        lowest_id=min(lowest_ids),
        highest_id=max(highest_ids),
        num_out_of_vocab=num_out_of_vocab,
        first_out_of_vocab=first_out_of_vocab,
        eos_id=eos_id,
        num_eos=counter.num_stops if index is None else 0,
        num_other_eos=num_other_eos,
        has_index=index is not None,
        num_documents=counter.num_documents,
        num_empty=counter.num_empty + num_empty,
        median_length=counter.median_length,
        longest_length=counter.longest_length,
        lengths=counter.lengths,
        num_runs=runs.count,
        run_tokens=runs.tokens,
        longest_runs=runs.longest,
    )
    return counts, counter.kept


class _Chunk(NamedTuple):
    """What is found in one chunk of a scan; of its ids, as in Counts."""

    lowest_id: int
    highest_id: int
    num_out_of_vocab: int
    first_out_of_vocab: int | None
    num_other_eos: int
    stops: NDArray[np.int64]  # [n], positions where documents end
    inside: Documents  # between two of them, and not empty
    runs: list[Run]  # from `runs_in`


def _look_at_chunk(
    ids: NDArray[Any],
    start: int,
    *,
    eos_id: int | None,
    ends: NDArray[np.int64] | None,  # where documents end by the index, ascending; None: no index
    vocab_size: int | None,
    firsts: FirstOccurrences,
) -> _Chunk:
    highest_id = int(ids.max())
    num_out_of_vocab, first_out_of_vocab = 0, None
    if vocab_size is not None and highest_id >= vocab_size:
        out_of_vocab = ids >= vocab_size
        num_out_of_vocab = int(np.count_nonzero(out_of_vocab))
        first_out_of_vocab = start + int(out_of_vocab.argmax())
    stops, gap_tokens = np.empty(0, np.int64), 0
    if ends is not None:
        first, last = np.searchsorted(ends, [start, start + len(ids)], side="right")
        stops = ends[first:last] - start
    elif eos_id is not None:
        stops, gap_tokens = np.flatnonzero(ids == eos_id), 1
    begins = stops[:-1] + gap_tokens
    lengths = stops[1:] - begins
    begins, lengths = begins[lengths > 0], lengths[lengths > 0]
    unknown = np.full(len(begins), -1)
    inside = Documents(document_keys(ids, begins, lengths), begins + start, lengths, unknown)
    other = None if eos_id is None else OTHER_EOS_ID.get(eos_id)
    return _Chunk(
        lowest_id=int(ids.min()),
        highest_id=highest_id,
        num_out_of_vocab=num_out_of_vocab,
        first_out_of_vocab=first_out_of_vocab,
        num_other_eos=0 if other is None else int(np.count_nonzero(ids == other)),
        stops=stops + start,
        inside=inside._replace(copy_of=firsts.find(ids, start, inside)),
        runs=runs_in(ids, start),
    )
