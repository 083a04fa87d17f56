"""`tokenloader check`: whether something is wrong with a token file."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace

import click

from tokenloader.check.check import Report, check, counted
from tokenloader.check.fingerprint import full_fingerprint, is_full_fingerprint
from tokenloader.check.repeats import Repeats
from tokenloader.cli.console import WRONG, on_terminal, print_out, row, sentence
from tokenloader.cli.options import POSITIVE, Sources, as_json, reads_tokens, takes_delimiter

_BAR = 36  # columns
_SIDES = {  # a label and a remark for each place of the id between documents
    "after": ("end of text", "after each document: segment_documents(eos_id={})"),
    "before": ("begin of text", "before each document: segment_documents(bos_id={})"),
    None: ("end of text", "after each document or before it: the files do not tell"),
}


@click.command("check")
@reads_tokens
@click.option("--vocab-size", type=POSITIVE, help="Number of ids; each is expected below it.")
@takes_delimiter
@click.option("--against", multiple=True, metavar="SOURCE", help="Tokens that should share no document.")
@click.option("--fingerprint", is_flag=True, help="Hash every token instead, and print the hash.")
@click.option("--expect-fingerprint", metavar="HASH", help="Hash likewise; another hash is wrong.")
@as_json
def command(
    sources: Sources,
    vocab_size: int | None,
    eos_id: int | None,
    bos_id: int | None,
    against: tuple[str, ...],
    fingerprint: bool,
    expect_fingerprint: str | None,
    as_json: bool,
) -> None:
    """Tell whether something is wrong with a token file.

    Every token is read once, to find ids outside the vocabulary, a wrong byte order or width, how
    documents end and how long they are, runs of one token, and documents that occur twice or in
    other tokens too. Without --eos-id or --bos-id, the ids of GPT-2, Llama, Gemma, Qwen and OpenAI's
    encodings are looked for; where the id stands, after each document or before it, is told.

    With --fingerprint, every token is hashed instead, at the speed of the disk. Hosts that print the
    same hold the same tokens, in whatever format and files.

    The exit status is 1 if something is wrong. Duplicates are wrong when they are over 1% of the
    documents; a document shared with --against always is.

    \b
    Examples:
      tokenloader check --vocab-size 50257 train.safetensors
      tokenloader check validation.safetensors --against train.safetensors
      tokenloader check --eos-id 2 --json llama2.npy
      tokenloader check --fingerprint train.safetensors
    """
    if fingerprint or expect_fingerprint is not None:
        if vocab_size is not None or eos_id is not None or bos_id is not None or against:
            raise click.UsageError(
                "with --fingerprint tokens are hashed and not checked; give --vocab-size, --eos-id, "
                "--bos-id and --against in a run of their own"
            )
        _print_fingerprint(sources, expect_fingerprint, as_json)
        return
    with (
        sources.open() as tokens,
        replace(sources, names=against).open() if against else nullcontext() as others,
    ):
        report = check(
            tokens,
            vocab_size=vocab_size,
            eos_id=eos_id,
            bos_id=bos_id,
            against=others,
            progress=on_terminal(),
        )
    if as_json:
        values = asdict(report)
        print_out(values.pop("counts") | values)
    else:
        encoding = (sys.stdout.encoding or "").lower()
        print_out(check_screen(report, "█" if encoding.startswith("utf") else "#"))
    if report.problems:
        sys.exit(WRONG)


def _print_fingerprint(sources: Sources, expected: str | None, as_json: bool) -> None:
    if expected is not None and not is_full_fingerprint(expected):
        raise click.UsageError(
            f"--expect-fingerprint is {expected!r}; expected what check --fingerprint prints, "
            f"DTYPE:NUM_TOKENS:HASH with 64 hex digits"
        )
    with sources.open() as tokens:
        found = full_fingerprint(tokens, progress=on_terminal())
    problems = [f"these are not the tokens of {expected}"] if expected not in (None, found) else []
    if as_json:
        print_out({"fingerprint": found, "problems": problems})
    else:
        print_out("\n".join([found, *(f"WRONG: {problem}" for problem in problems)]))  # no hash is wrapped
    if problems:
        sys.exit(WRONG)


def check_screen(report: Report, bar: str) -> str:
    """What `tokenloader check` prints, the histogram's bars made of the character `bar`."""
    counts = report.counts
    lines = row("tokens", f"{counts.num_tokens:,} {counts.dtype}")
    lines += row("ids", f"{counts.lowest_id:,} to {counts.highest_id:,}")
    if counts.num_eos:
        rate = f"one in {counts.num_tokens / counts.num_eos:,.1f} tokens"
        label, where = _SIDES[report.eos_side]
        lines += row(label, f"id {counts.eos_id}, {counted(counts.num_eos, 'time')}, {rate}")
        lines += row("", where.format(counts.eos_id))
    else:
        lines += row("end of text", "none found")
    if counts.num_documents:
        empty = f", and {counts.num_empty:,} empty" if counts.num_empty else ""
        index = ", by the document index" if counts.has_index else ""
        lines += row("documents", f"{counts.num_documents:,}{empty}{index}")
    if counts.num_runs:
        longest = counts.longest_runs[0]
        lines += row(
            "runs",
            f"{counts.num_runs:,} of one token 64 times or more, {counts.run_tokens:,} tokens; "
            f"the longest: id {longest.token} {longest.length:,} times from token {longest.start:,} on",
        )
    else:
        lines += row("runs", "none: no token 64 times or more in a row")
    if report.repeated is not None:
        lines += _repeats("duplicates", report.repeated, "that repeat an earlier one")
    if report.shared is not None:
        lines += _repeats("shared", report.shared, "that the other tokens have too")
    if counts.num_documents:
        average = f"median {counts.median_length:,}, longest {counts.longest_length:,}"
        lines += ["", f"length of documents, tokens ({average})"]
        lines += _histogram(counts.lengths, bar)
    lines.append("")
    for note in report.notes:
        lines += sentence("note", note)
    for problem in report.problems:
        lines += sentence("WRONG", problem)
    if not report.problems:
        lines.append("nothing wrong found")
    return "\n".join(lines)


def _repeats(label: str, repeats: Repeats, what: str) -> list[str]:
    if not repeats.documents:
        return row(label, f"none {what}")
    tokens = counted(repeats.tokens, "token")
    lines = row(label, f"{counted(repeats.documents, 'document')} {what}, {tokens}")
    for example in repeats.examples:
        times = f"{example.count:,} times" if example.count > 1 else "once"
        other = "" if example.other_start is None else f", there at {example.other_start:,}"
        where = f"first at token {example.start:,}{other}"
        lines += row("", f"{counted(example.length, 'token')} {times}, {where}")
    return lines


def _histogram(lengths: Sequence[int], bar: str) -> list[str]:
    """A line for each power of two from the first length that occurs."""
    first = next(i for i, count in enumerate(lengths) if count)
    most = max(lengths)
    return [
        f"{1 << i:>13,} - {(2 << i) - 1:<13,} "
        f"{bar * max(bool(count), round(_BAR * count / most)):<{_BAR}} {count:>11,}"
        for i, count in list(enumerate(lengths))[first:]
    ]
