"""Checking: whether the tokens of a file are what a training run takes them for.

One pass over all tokens (`counts`), a small sample before it to see how they are stored, and a second look
only at those documents that may be there twice (`repeats`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.check.counts import Counts, Limits, count_tokens
from tokenloader.check.dtype_sniffing import sniff_dtype, take_sample
from tokenloader.check.judgement import counted, find_wrong_eos, find_wrong_ids
from tokenloader.check.repeats import Repeats, duplicates, shared
from tokenloader.tokens.token_array import TokenArray

# End-of-text ids that can hardly be a common token of another tokenizer: GPT-2, one past it (a wrong id
# that is met), cl100k, Llama 3, Qwen, o200k. Others (0 in Pythia, 2 in Llama 2) are for the caller to say.
KNOWN_EOS_IDS = (50256, 50257, 100257, 128001, 151643, 199999)

DEFAULT_LIMITS = Limits()
_MANY_DUPLICATES = 0.01  # of the documents


@dataclass(frozen=True)
class Report:
    """What `check` has found.

    Attributes:
        counts: what was counted in the pass over all tokens.
        repeated: documents that repeat an earlier one; None: there are no documents.
        shared: documents that the other tokens have too; None: there are no others.
        compared_one_in: one document in so many was compared with the rest; 1: all were.
        problems: a sentence for each thing that is wrong; empty when nothing is.
        notes: a sentence for each thing that is worth knowing and need not be wrong.
    """

    counts: Counts
    repeated: Repeats | None
    shared: Repeats | None
    compared_one_in: int
    problems: list[str]
    notes: list[str]


def check(
    tokens: TokenArray,
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    against: TokenArray | None = None,
    progress: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Report:
    """Looks at every token once, and says what is wrong.

    Args:
        vocab_size: ids are expected below it; None: this is not checked.
        eos_id: the id between documents; None: the one of KNOWN_EOS_IDS that is there, or
            without one the document index of the files, where they have it.
        against: tokens that should have no document in common with these.

    Raises:
        OSError: a file cannot be read.
    """
    sample = take_sample(tokens)
    if eos_id is None:
        eos_id = _find_eos_id(sample)
    count = partial(count_tokens, eos_id=eos_id, progress=progress, limits=limits)
    counts, kept = count(tokens, title="checking", vocab_size=vocab_size)
    suspected = sniff_dtype(sample)
    problems = [suspected] if suspected else []
    problems += find_wrong_ids(counts, vocab_size) + find_wrong_eos(counts)
    repeated, in_both, one_in, notes = None, None, kept.one_in, []
    if eos_id is None:
        notes.append(
            f"no end-of-text id was found (looked for {', '.join(map(str, KNOWN_EOS_IDS))}), so "
            f"{'documents are those of the index' if counts.has_index else 'there are no documents'}; "
            f"--eos-id says which it is"
        )
    if eos_id is not None or counts.has_index:
        documents = kept.documents()
        repeated = duplicates(tokens, documents)
        if repeated.documents > _MANY_DUPLICATES * len(documents.keys):
            share = repeated.documents / len(documents.keys)
            problems.append(f"{share:.1%} of the documents repeat an earlier one")
        if against is not None:
            other_counts, other_kept = count(against, title="reading the other")
            if not other_counts.num_documents:
                lacking = "document index" if eos_id is None else f"end-of-text id {eos_id}"
                problems.append(f"the other tokens have no {lacking}, so no documents to compare")
            one_in = max(one_in, other_kept.one_in)
            others = other_kept.documents().sample(one_in)
            in_both = shared(tokens, documents.sample(one_in), against, others)
            if in_both.documents:
                problems.append(
                    f"{counted(in_both.documents, 'document')} of {in_both.tokens:,} tokens "
                    f"{'is' if in_both.documents == 1 else 'are'} in the other tokens too"
                )
    elif against is not None:
        problems.append("without an end-of-text id or a document index there are no documents to compare")
    if one_in > 1:
        notes.append(f"documents were compared by a sample, 1 in {one_in}: multiply by it")
    return Report(counts, repeated, in_both, one_in, problems, notes)


def _find_eos_id(sample: NDArray[Any]) -> int | None:
    """The id of KNOWN_EOS_IDS that occurs most often, if any does."""
    counts = {end: int(np.count_nonzero(sample == end)) for end in KNOWN_EOS_IDS}
    likely = max(counts, key=lambda end: counts[end])
    return likely if counts[likely] else None
