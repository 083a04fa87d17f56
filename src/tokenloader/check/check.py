"""Checking: whether the tokens of a file are what a training run takes them for.

One pass over all tokens (`counts`), a small sample before it to see how they are stored, and a second look
only at those documents that may be there twice (`repeats`).
"""

from dataclasses import dataclass
from functools import partial

from tokenloader.check.counts import OTHER_EOS_ID, Counts, Limits, count_tokens
from tokenloader.check.delimiters import KNOWN_IDS, Side, find_delimiter, find_side
from tokenloader.check.dtype_sniffing import sniff_files
from tokenloader.check.repeats import Repeats, duplicates, shared
from tokenloader.check.samples import take_sample
from tokenloader.tokens.token_array import TokenArray

DEFAULT_LIMITS = Limits()
_MANY_DUPLICATES = 0.01  # share of the documents
_HOLE_TOKENS = 1 << 16  # a run so long is no text


@dataclass(frozen=True)
class Report:
    """What `check` has found."""

    counts: Counts  # in the pass over all tokens
    eos_side: Side | None  # where eos_id stands at a document; None: not to be told, or there is none
    repeated: Repeats | None  # documents that repeat an earlier one; None: there are no documents
    shared: Repeats | None  # documents that the other tokens have too; None: there are no others
    compared_one_in: int  # one document in so many was compared with the rest; 1: all were
    problems: list[str]  # a sentence for each thing that is wrong; empty when nothing is
    notes: list[str]  # a sentence for each thing that is worth knowing and need not be wrong


def check(
    tokens: TokenArray,
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
    against: TokenArray | None = None,
    progress: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Report:
    """Looks at every token once, and says what is wrong. Raises OSError where a file cannot be read.

    Args:
        vocab_size: ids are expected below it; None: this is not checked.
        eos_id: the id after each document, or bos_id: the one before it. Neither: the known one that is
            there, or without one the document index of the files, where they have it.
        against: tokens that should have no document in common with these.
    """
    sample = take_sample(tokens)
    side: Side | None = None if eos_id is None else "after"
    if bos_id is not None:
        eos_id, side = bos_id, "before"
    if eos_id is None:
        eos_id = find_delimiter(sample)
    if eos_id is not None:
        side = find_side(tokens, eos_id) or side
    count = partial(count_tokens, eos_id=eos_id, progress=progress, limits=limits)
    counts, kept = count(tokens, title="checking", vocab_size=vocab_size)
    suspected = sniff_files(tokens, sample)
    problems = [suspected] if suspected else []
    problems += _find_wrong(counts, vocab_size, side)
    notes = []
    if eos_id is None:
        notes.append(
            f"no end-of-text id was found (looked for {', '.join(map(str, KNOWN_IDS))}), so "
            f"{'documents are those of the index' if counts.has_index else 'there are no documents'}; "
            f"--eos-id or --bos-id says which it is"
        )
    repeated, in_both, one_in = None, None, kept.one_in
    if eos_id is not None or counts.has_index:
        documents = kept.documents()
        repeated = duplicates(tokens, documents)
        if against is not None:
            other_counts, other_kept = count(against, title="reading the other")
            if not other_counts.num_documents:
                lacking = "document index" if eos_id is None else f"end-of-text id {eos_id}"
                problems.append(f"the other tokens have no {lacking}, so no documents to compare")
            one_in = max(one_in, other_kept.one_in)
            others = other_kept.documents().sample(one_in)
            in_both = shared(tokens, documents.sample(one_in), against, others)
        problems += _find_copies(repeated, len(documents.keys), in_both)
    elif against is not None:
        problems.append("without an end-of-text id or a document index there are no documents to compare")
    if one_in > 1:
        notes.append(f"documents were compared by a sample, 1 in {one_in}: multiply by it")
    return Report(counts, side if counts.num_eos else None, repeated, in_both, one_in, problems, notes)


def _find_copies(repeated: Repeats, num_documents: int, in_both: Repeats | None) -> list[str]:
    """Says what is wrong with documents that are there twice, or in the other tokens too."""
    problems = []
    if repeated.documents > _MANY_DUPLICATES * num_documents:
        problems.append(f"{repeated.documents / num_documents:.1%} of the documents repeat an earlier one")
    if in_both is not None and in_both.documents:
        problems.append(
            f"{counted(in_both.documents, 'document')} of {in_both.tokens:,} tokens "
            f"{'is' if in_both.documents == 1 else 'are'} in the other tokens too"
        )
    return problems


def _find_wrong(counts: Counts, vocab_size: int | None, side: Side | None) -> list[str]:
    """Says what is wrong with the ids, their runs, and the id between documents."""
    problems = []
    if counts.lowest_id < 0:
        problems.append(f"the lowest id is {counts.lowest_id:,}; expected 0 or more")
    if vocab_size is not None and counts.num_out_of_vocab:
        problems.append(
            f"{counted(counts.num_out_of_vocab, 'id')} of {vocab_size:,} or more, the first at token "
            f"{counts.first_out_of_vocab:,}, the highest {counts.highest_id:,}; expected ids below "
            f"--vocab-size {vocab_size}"
        )
    problems += [
        f"id {run.token} fills {run.length:,} positions from token {run.start:,} on; is a part of the "
        f"file missing?"
        for run in counts.longest_runs
        if run.length >= _HOLE_TOKENS
    ]
    end, does = counts.eos_id, "begins" if side == "before" else "ends"
    if end is not None and not counts.num_eos:
        problems.append(f"id {end} is nowhere in these tokens; is --eos-id or --bos-id right?")
    elif end is not None and counts.num_other_eos:
        problems.append(
            f"{end} {does} documents, and {OTHER_EOS_ID[end]} is there {counts.num_other_eos:,} times too; "
            f"GPT-2's end-of-text is 50256, its highest id"
        )
    elif end == 50257:
        problems.append(
            f"50257 {does} documents, one past GPT-2's end-of-text 50256: a model of 50,257 ids has no "
            f"embedding for it"
        )
    return problems


def counted(number: int, noun: str) -> str:
    """A number with its noun, which is in the singular for 1."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"
