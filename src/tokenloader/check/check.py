"""Checking: whether the tokens of a file are what a training run takes them for.

One pass over all tokens (`_scan`), a small sample before it to see how they are stored, and a
second look at those documents only that may be there twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tokenloader.check.documents import Documents, Keys, join, keys_of, probes
from tokenloader.check.dtype_sniffing import suspicion
from tokenloader.check.repeats import Firsts, Repeats, duplicates, shared
from tokenloader.check.runs import Run, Runs, runs_in
from tokenloader.check.scan import scan
from tokenloader.tokens.reader import Reader
from tokenloader.tokens.token_array import TokenArray

# Of tokenizers whose end-of-text id can hardly be another's common token: GPT-2, one past it (a wrong id
# that is met), cl100k, Llama 3, Qwen, o200k. Others (0 in Pythia, 2 in Llama 2) are for the caller to say.
KNOWN_EOS_IDS = (50256, 50257, 100257, 128001, 151643, 199999)

_SAMPLE_PIECES, _SAMPLE_TOKENS = 64, 1 << 14
_HOLE_TOKENS = 1 << 16  # a run so long is no text
_MANY_DUPLICATES = 0.01  # of the documents


@dataclass
class Report:
    """What `check` has found.

    Attributes:
        problems: what is wrong, a sentence each; empty when nothing is.
        notes: what is worth knowing, and need not be wrong.
        num_tokens, dtype: of the tokens.
        lowest_id, highest_id: of all tokens.
        num_past: ids past the vocabulary, where its size is known.
        first_past: the position of the first of them.
        eos_id: the id between documents; None: none was found.
        num_eos: how many there are.
        num_other_eos: how many there are of 50257 where 50256 ends documents, and the reverse.
        has_index: whether documents are those of the files' document index: where there is no eos_id.
        num_documents: that are not empty. 0 without eos_id and index.
        num_empty: documents of no token: of two end-of-text ids in a row, for one.
        median_length, longest_length: of documents, tokens; the median of those kept for comparing.
        lengths: documents of length [2**i, 2**(i + 1)), for each i from 0.
        num_runs, run_tokens, longest_runs: of one token, 64 times or more in a row.
        compared_one_in: duplicates were looked for in one of so many documents; 1: in all.
        repeated: documents that repeat an earlier one.
        shared: documents that the other tokens have too; None where there are no others.
    """

    num_tokens: int
    dtype: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lowest_id: int = 0
    highest_id: int = 0
    num_past: int = 0
    first_past: int | None = None
    eos_id: int | None = None
    num_eos: int = 0
    num_other_eos: int = 0
    has_index: bool = False
    num_documents: int = 0
    num_empty: int = 0
    median_length: int = 0
    longest_length: int = 0
    lengths: list[int] = field(default_factory=list)
    num_runs: int = 0
    run_tokens: int = 0
    longest_runs: list[Run] = field(default_factory=list)
    compared_one_in: int = 1
    repeated: Repeats | None = None
    shared: Repeats | None = None


def check(
    tokens: TokenArray,
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    against: TokenArray | None = None,
    progress: bool = False,
) -> Report:
    """Looks at every token once.

    Args:
        vocab_size: ids must be below it; None: this is not checked.
        eos_id: the id between documents; None: the one of KNOWN_EOS_IDS that is there, or
            without one the document index of the files, where they have it.
        against: tokens that should have no document in common with these.

    Raises:
        OSError: a file cannot be read.
    """
    sample = _sample(tokens)
    if eos_id is None:
        eos_id = _likely_eos_id(sample)
    report, keys = _pass(tokens, eos_id, vocab_size, "checking", progress)
    problems, notes = report.problems, report.notes
    if suspected := suspicion(sample):
        problems.append(suspected)
    _judge_ids(report, vocab_size)
    _judge_eos(report)
    if eos_id is not None or report.has_index:
        documents = keys.documents()
        repeated = report.repeated = duplicates(tokens, documents)
        if repeated.documents > _MANY_DUPLICATES * len(documents.keys):
            problems.append(
                f"{repeated.documents / len(documents.keys):.1%} of the documents repeat an earlier one"
            )
        if against is not None:
            other, other_keys = _pass(against, eos_id, None, "reading the other", progress)
            if not other.num_documents:
                lacking = "document index" if eos_id is None else f"end-of-text id {eos_id}"
                problems.append(f"the other tokens have no {lacking}, so no documents to compare")
            one_in = report.compared_one_in = max(keys.one_in, other_keys.one_in)
            found = report.shared = shared(
                tokens, documents.sample(one_in), against, other_keys.documents().sample(one_in)
            )
            if found.documents:
                problems.append(
                    f"{_count(found.documents, 'document')} of {found.tokens:,} tokens "
                    f"{'is' if found.documents == 1 else 'are'} in the other tokens too"
                )
    elif against is not None:
        problems.append(
            "without an end-of-text id or a document index there are no documents to compare"
        )
    if report.compared_one_in > 1:
        notes.append(
            f"documents were compared by a sample, 1 in {report.compared_one_in}: multiply by it"
        )
    return report


def _pass(
    tokens: TokenArray,
    eos_id: int | None,
    vocab_size: int | None,
    title: str,
    progress: bool,
) -> tuple[Report, Keys]:
    index = tokens.documents if eos_id is None else None
    report = Report(len(tokens), tokens.dtype.name, eos_id=eos_id, has_index=index is not None)
    borders = None
    if index is not None:
        borders = np.unique(index)[1:]
        report.num_empty = len(index) - 1 - len(borders)
    runs = Runs()
    lowest, highest = [], []
    with (
        Reader(tokens) as reader,
        tqdm(
            total=tokens.nbytes,
            desc=title,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not progress,
            leave=False,
        ) as bar,
    ):
        documents = _DocumentCounter(reader, report)
        firsts = Firsts(reader)

        def look(ids: NDArray[Any], start: int) -> _Block:
            within = None
            if borders is not None:
                first, last = np.searchsorted(borders, [start, start + len(ids)], side="right")
                within = borders[first:last] - start
            return _look(ids, start, eos_id, within, vocab_size, firsts)

        for start, stop, block in scan(tokens, look):
            lowest.append(block.lowest)
            highest.append(block.highest)
            report.num_other_eos += block.num_other
            report.num_past += block.num_past
            if report.first_past is None:
                report.first_past = block.first_past
            runs.append(block.runs)
            documents.append(block)
            bar.update((stop - start) * tokens.dtype.itemsize)
        documents.finish()
    runs.finish()
    report.lowest_id, report.highest_id = min(lowest), max(highest)
    report.num_runs, report.run_tokens, report.longest_runs = runs.count, runs.tokens, runs.longest
    report.compared_one_in = documents.keys.one_in
    return report, documents.keys


@dataclass(frozen=True, eq=False)
class _Block:
    """What is found in one block.

    Attributes:
        num_past, first_past: how many ids are past the vocabulary, and where the first of them is.
        stops, nexts: int64 [n], where documents stop and the next ones begin: an end-of-text later, or,
            by an index, there.
        documents: those that begin and stop here and are not empty.
        head, tail: the exclusive or of the ids before the first stop, and from the last next on; without
            one, all is head.
    """

    lowest: int
    highest: int
    num_past: int
    first_past: int | None
    stops: NDArray[np.int64]
    nexts: NDArray[np.int64]
    num_other: int
    documents: Documents
    head: int
    tail: int
    runs: list[Run]


def _look(
    ids: NDArray[Any],
    start: int,
    eos_id: int | None,
    borders: NDArray[np.int64] | None,  # [n], after `start`, each once; None: without an index
    vocab_size: int | None,
    firsts: Firsts,
) -> _Block:
    lowest, highest = int(ids.min()), int(ids.max())
    num_past, first_past = 0, None
    if vocab_size is not None and highest >= vocab_size:
        past = ids >= vocab_size
        num_past, first_past = int(np.count_nonzero(past)), start + int(past.argmax())
    stops = nexts = np.empty(0, np.int64) if borders is None else borders
    num_other = 0
    if eos_id is not None and eos_id <= np.iinfo(ids.dtype).max:
        stops = np.flatnonzero(ids == ids.dtype.type(eos_id))
        nexts = stops + 1
        other = _OTHER.get(eos_id)
        if other is not None and other <= np.iinfo(ids.dtype).max:
            num_other = int(np.count_nonzero(ids == ids.dtype.type(other)))
    begins = np.append(0, nexts)
    xors = np.bitwise_xor.reduceat(ids, begins[begins < len(ids)])
    if eos_id is not None:
        xors[: len(stops)] ^= ids[stops]
    tail = int(xors[-1]) if 0 < len(stops) < len(xors) else 0
    starts, lengths = nexts[:-1], stops[1:] - nexts[:-1]
    there = lengths > 0
    starts, lengths = starts[there], lengths[there]
    keys = keys_of(ids[probes(starts, lengths)], lengths, xors[1 : len(stops)][there])
    documents = Documents(keys, starts + start, lengths, np.full(len(keys), -1))
    documents = replace(documents, copied=firsts.copied(ids, start, documents))
    return _Block(
        lowest=lowest,
        highest=highest,
        num_past=num_past,
        first_past=first_past,
        stops=stops + start,
        nexts=nexts + start,
        num_other=num_other,
        documents=documents,
        head=int(xors[0]),
        tail=tail,
        runs=runs_in(ids, start),
    )


_OTHER = {50256: 50257, 50257: 50256}


class _DocumentCounter:
    """Counts the documents of the blocks in order, also those that straddle blocks."""

    def __init__(self, reader: Reader, report: Report) -> None:
        self._reader, self._report = reader, report
        self._begun = 0  # where the document begins that stops next
        self._xor = 0  # of its ids so far
        self._by_bits = np.zeros(64, np.int64)
        self.keys = Keys()

    def append(self, block: _Block) -> None:
        self._xor ^= block.head
        if not len(block.stops):
            return
        first, num_between = int(block.stops[0]), len(block.stops) - 1
        if not self._report.has_index:
            self._report.num_eos += len(block.stops)
        self._report.num_empty += num_between - len(block.documents.keys)
        # An end-of-text id before the first document (llm.c writes it so) ends no empty document.
        if first == self._begun > 0:
            self._report.num_empty += 1
        self._count(join([self._straddling(first), block.documents]))
        self._begun, self._xor = int(block.nexts[-1]), block.tail

    def finish(self) -> None:
        """There are no more tokens; what follows the last end-of-text is a document too."""
        report = self._report
        if report.num_eos or report.has_index:
            self._count(self._straddling(report.num_tokens))
        by_bits = self._by_bits.tolist()
        report.lengths = by_bits[: max((i + 1 for i, n in enumerate(by_bits) if n), default=0)]
        kept = self.keys.documents().lengths
        report.median_length = int(np.median(kept)) if len(kept) else 0

    def _straddling(self, stop: int) -> Documents:
        """The document from where one has begun to `stop`, if it has tokens."""
        if stop <= self._begun:
            return join([])
        start = np.array([self._begun], np.int64)
        length = np.array([stop - self._begun], np.int64)
        probed = np.empty((1, probes(start, length).size), self._reader.dtype)
        # Read, not mapped: each page touched would bring its neighbours into the process's memory.
        for i, position in enumerate(probes(start, length)[0].tolist()):
            self._reader.read(position, probed[0, i : i + 1])
        xor = np.array([self._xor]).astype(probed.dtype)  # as the others': ids may be negative
        return Documents(keys_of(probed, length, xor), start, length, np.array([-1]))

    def _count(self, documents: Documents) -> None:
        lengths = documents.lengths
        if not len(lengths):
            return
        self._report.num_documents += len(lengths)
        self._report.longest_length = max(self._report.longest_length, int(lengths.max()))
        bits = np.frexp(lengths.astype(np.float64))[1] - 1  # exact: the exponent of an integer
        self._by_bits += np.bincount(bits, minlength=64)
        self.keys.append(documents)


def _judge_ids(report: Report, vocab_size: int | None) -> None:
    """Says what is wrong with the ids and their runs, if anything."""
    if report.lowest_id < 0:
        report.problems.append(f"the lowest id is {report.lowest_id:,}; ids are 0 or more")
    if vocab_size is not None and report.highest_id >= vocab_size:
        report.problems.append(
            f"{_count(report.num_past, 'id')} of {vocab_size:,} or more, the first at token "
            f"{report.first_past:,}, the highest {report.highest_id:,}: the vocabulary ends at "
            f"{vocab_size - 1:,}"
        )
    for run in report.longest_runs:
        if run.length >= _HOLE_TOKENS:
            report.problems.append(
                f"token {run.token} fills {run.length:,} positions from {run.start:,} on; is a part of "
                f"the file missing?"
            )


def _judge_eos(report: Report) -> None:
    """Says what is wrong with how documents end, if anything."""
    end, count = report.eos_id, report.num_eos
    if end is None:
        instead = (
            "documents are those of the index" if report.has_index else "there are no documents"
        )
        report.notes.append(
            f"no end-of-text id was found (looked for {', '.join(map(str, KNOWN_EOS_IDS))}), so "
            f"{instead}; --eos-id says which it is"
        )
    elif not count:
        report.problems.append(f"there is no end-of-text id {end} in these tokens")
    elif report.num_other_eos:
        report.problems.append(
            f"{end} ends documents, and {_OTHER[end]} is there {report.num_other_eos:,} times too; "
            f"GPT-2's end-of-text is 50256, and its ids end there"
        )
    elif end == 50257:
        report.problems.append(
            "50257 ends documents, which is one past GPT-2's end-of-text 50256: a model of 50,257 ids "
            "has no embedding for it"
        )


def _sample(tokens: TokenArray) -> NDArray[Any]:
    """Evenly spread pieces of an even number of tokens, from even positions, end to end."""
    if len(tokens) <= _SAMPLE_PIECES * _SAMPLE_TOKENS:
        return np.asarray(tokens[: max(1, len(tokens) // 2 * 2)])
    starts = np.linspace(0, len(tokens) - _SAMPLE_TOKENS, _SAMPLE_PIECES).astype(np.int64) // 2 * 2
    tokens.prefetch(starts, _SAMPLE_TOKENS)
    return tokens.gather(starts, _SAMPLE_TOKENS).reshape(-1)


def _likely_eos_id(sample: NDArray[Any]) -> int | None:
    counts = {end: int(np.count_nonzero(sample == end)) for end in KNOWN_EOS_IDS}
    likely = max(counts, key=lambda end: counts[end])
    return likely if counts[likely] else None


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
