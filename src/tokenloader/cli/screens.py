"""Screens: what the command line prints of the values that the commands return, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:  # a command's screen needs no other command's room, nor jax
    from tokenloader.check.bench import Bench, Speed
    from tokenloader.check.check import Report
    from tokenloader.check.devices import Device
    from tokenloader.check.info import Info
    from tokenloader.check.repeats import Repeats
    from tokenloader.check.replay import Replayed
    from tokenloader.prepare.tokenize import Tokenized

_WIDTH = 79
_LABEL = 16
_BAR = 36
_MOST_FILES = _MOST_TENSORS = 6  # listed by name


def info_screen(info: Info, devices: Sequence[Device] | None) -> str:
    """What `tokenloader info` prints."""
    lines = []
    for file in info.files[:_MOST_FILES]:
        lines += _row("file" if file is info.files[0] else "", file.path)
    if (more := len(info.files) - _MOST_FILES) > 0:
        lines += _row("", f"and {more:,} more")
    lines += _row("format", ", ".join(dict.fromkeys(file.format for file in info.files)))
    for tensor in info.tensors[:_MOST_TENSORS]:
        lines += _row("tensors" if tensor is info.tensors[0] else "", tensor)
    if (more := len(info.tensors) - _MOST_TENSORS) > 0:
        lines += _row("", f"and {more:,} more")
    lines += _row("dtype", info.dtype)
    lines += _row("tokens", f"{info.num_tokens:,}")
    lines += _row("bytes", f"{info.num_bytes:,} ({size(info.num_bytes)})")
    shape = f"batch size {info.batch_size:,}, sequence length {info.seq_len:,}"
    if info.windows_per_epoch is None:
        lines += _row("windows", f"none: fewer tokens than a window of {info.seq_len + 1:,}")
    else:
        lines += _row("windows", f"{info.windows_per_epoch:,} an epoch")
        lines += _row("steps", f"{info.steps_per_epoch:,} an epoch ({shape})")
    if info.cached_share is None:
        lines += _row("page cache", "the system does not tell")
    else:
        about = "about " if info.cache_sampled else ""
        cached = size(info.cached_share * info.num_bytes)
        lines += _row("page cache", f"{about}{info.cached_share:.0%} cached ({cached})")
    for device in devices or ():
        memory = "memory not told" if device.memory_bytes is None else size(device.memory_bytes)
        default = "  <- batches land here" if device.default else ""
        name = f"{device.name} ({device.kind})" if device.kind != device.backend else device.name
        lines += _row(device.backend, f"{name}, {memory}{default}")
    return "\n".join(lines)


def check_screen(report: Report, blocks: str = "█") -> str:
    """What `tokenloader check` prints. blocks: the character of the histogram's bars."""
    lines = _row("tokens", f"{report.counts.num_tokens:,} {report.counts.dtype}")
    lines += _row("ids", f"{report.counts.lowest_id:,} to {report.counts.highest_id:,}")
    if report.counts.num_eos:
        rate = report.counts.num_tokens / report.counts.num_eos
        count = f"{_counted(report.counts.num_eos, 'time')}, one in {rate:,.1f} tokens"
        lines += _row("end of text", f"id {report.counts.eos_id}, {count}")
    else:
        lines += _row("end of text", "none found")
    if report.counts.num_documents:
        empty = f", and {report.counts.num_empty:,} empty" if report.counts.num_empty else ""
        index = ", by the document index" if report.counts.has_index else ""
        lines += _row("documents", f"{report.counts.num_documents:,}{empty}{index}")
    lines += _row("runs", _runs(report))
    if report.repeated is not None:
        lines += _row("duplicates", _repeats(report.repeated, "that repeat an earlier one"))
        lines += _examples(report.repeated)
    if report.shared is not None:
        lines += _row("shared", _repeats(report.shared, "that the other tokens have too"))
        lines += _examples(report.shared)
    if report.counts.num_documents:
        lines += [
            "",
            "length of documents, tokens (median "
            f"{report.counts.median_length:,}, longest {report.counts.longest_length:,})",
        ]
        lines += _histogram(report.counts.lengths, blocks)
    lines.append("")
    for note in report.notes:
        lines += _sentence("note", note)
    for problem in report.problems:
        lines += _sentence("WRONG", problem)
    if not report.problems:
        lines.append("nothing wrong found")
    return "\n".join(lines)


def bench_screen(bench: Bench) -> str:
    """What `tokenloader bench` prints."""
    shape = f"{bench.batch_size:,} x {bench.seq_len:,} tokens, random windows"
    lines = _row("batches", f"{shape}, on {bench.device}")
    if bench.cold is None:
        lines += _row("cold", f"not measured: {bench.why_not_cold}")
    else:
        lines += _speed("cold", bench.cold)
    lines += _speed("warm", bench.warm)
    return "\n".join(lines)


def tokenized_screen(done: Tokenized, path: str) -> str:
    """What `tokenloader tokenize` prints."""
    per_token = done.text_bytes / max(1, done.num_tokens - done.num_documents)
    lines = _row("file", path)
    lines += _row("documents", f"{done.num_documents:,} ({size(done.text_bytes)} of text)")
    lines += _row("tokens", f"{done.num_tokens:,} {done.dtype}, {per_token:.2f} bytes of text each")
    lines += _row("end of text", f"id {done.eos_id}, after each document")
    return "\n".join(lines)


@dataclass(frozen=True)
class ReplayedRow:
    """A row of a batch.

    Attributes:
        sample: its number in the run.
        start: of its window, a token position.
        documents: [begin, end) of each document's part in it; None: the end-of-text id was not said.
        text: of the window; None: there was no tokenizer.
    """

    sample: int
    start: int
    documents: list[list[int]] | None
    text: str | None


def replayed_rows(
    found: Replayed, decode: Callable[[NDArray[Any]], str] | None
) -> list[ReplayedRow]:
    """The rows of a step."""
    return [
        ReplayedRow(
            int(found.samples[i]),
            int(found.starts[i]),
            None if found.documents is None else found.documents[i].tolist(),
            None if decode is None else decode(found.tokens[i]),
        )
        for i in range(len(found.samples))
    ]


def replay_screen(step: int, rows: Sequence[ReplayedRow]) -> str:
    """What `tokenloader replay` prints."""
    lines = [f"step {step:,}: {len(rows):,} windows", ""]
    lines.append(f"{'sample':>14} {'first token':>16} {'documents':>10}".rstrip())
    for row in rows:
        count = "" if row.documents is None else f"{len(row.documents):,}"
        text = ""
        if row.text is not None:
            text = "  " + textwrap.shorten(row.text, 36, placeholder="...")
        lines.append(f"{row.sample:>14,} {row.start:>16,} {count:>10}{text}".rstrip())
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of 1 or more.

    Example:
        >>> size(20_497_743_674)
        '19.09 GiB'
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.2f} {unit}"
    return f"{num_bytes / 1024:.2f} TiB"


def _row(label: str, text: str) -> list[str]:
    """A label and what it is, wrapped beside it; a path that is too long stays whole."""
    wrapped = textwrap.wrap(text, _WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False)
    return [f"{label if i == 0 else '':<{_LABEL}}{line}".rstrip() for i, line in enumerate(wrapped)]


def _sentence(kind: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{kind}: {text}", _WIDTH, subsequent_indent=" " * (len(kind) + 2), break_on_hyphens=False
    )


def _runs(report: Report) -> str:
    if not report.counts.num_runs:
        return "none: no token 64 times or more in a row"
    longest = report.counts.longest_runs[0]
    return (
        f"{report.counts.num_runs:,} of one token 64 times or more, {report.counts.run_tokens:,} tokens; the longest: "
        f"id {longest.token} {longest.length:,} times from token {longest.start:,} on"
    )


def _repeats(repeats: Repeats, what: str) -> str:
    if not repeats.documents:
        return f"none {what}"
    tokens = _counted(repeats.tokens, "token")
    return f"{_counted(repeats.documents, 'document')} {what}, {tokens}"


def _examples(repeats: Repeats) -> Iterable[str]:
    for one in repeats.examples:
        times = f"{one.count:,} times" if one.count > 1 else "once"
        other = "" if one.other_start is None else f", there at {one.other_start:,}"
        yield from _row(
            "", f"{_counted(one.length, 'token')} {times}, first at token {one.start:,}{other}"
        )


def _counted(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def _histogram(lengths: Sequence[int], blocks: str) -> list[str]:
    first = next(i for i, count in enumerate(lengths) if count)
    most = max(lengths)
    return [
        f"{1 << i:>13,} - {(2 << i) - 1:<13,} "
        f"{blocks * max(bool(count), round(_BAR * count / most)):<{_BAR}} {count:>11,}"
        for i, count in list(enumerate(lengths))[first:]
    ]


def _speed(label: str, speed: Speed) -> list[str]:
    rate = f"{speed.tokens_per_second / 1e6:,.1f} million tokens/s"
    lines = _row(label, f"{rate} ({_counted(speed.batches, 'batch')} in {speed.seconds:.1f} s)")
    return lines + _row("", f"limited by {speed.limit}")
