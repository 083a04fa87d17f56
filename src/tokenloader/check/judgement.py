"""Judgement: which of the counts are wrong, each in a sentence."""

from __future__ import annotations

from tokenloader.check.counts import OTHER_EOS_ID, Counts

_HOLE_TOKENS = 1 << 16  # a run so long is no text


def find_wrong_ids(counts: Counts, vocab_size: int | None) -> list[str]:
    """Says what is wrong with the ids and their runs."""
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
    return problems


def find_wrong_eos(counts: Counts) -> list[str]:
    """Says what is wrong with how documents end, where an end-of-text id is known."""
    end = counts.eos_id
    if end is None:
        return []
    if not counts.num_eos:
        return [f"there is no end-of-text id {end} in these tokens; is --eos-id right?"]
    if counts.num_other_eos:
        return [
            f"{end} ends documents, and {OTHER_EOS_ID[end]} is there {counts.num_other_eos:,} times too; "
            f"GPT-2's end-of-text is 50256, its highest id"
        ]
    if end == 50257:
        return [
            "50257 ends documents, one past GPT-2's end-of-text 50256: a model of 50,257 ids has no "
            "embedding for it"
        ]
    return []


def counted(number: int, noun: str) -> str:
    """A number with its noun, which is in the singular for 1."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"
