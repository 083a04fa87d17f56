"""`tokenloader bench`: how fast a token file gives batches."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from tokenloader.check.check import counted
from tokenloader.cli.console import print_out, row
from tokenloader.cli.options import Sources, as_json, reads_tokens, takes_batches

if TYPE_CHECKING:  # loads jax
    from tokenloader.check.bench import Bench, Speed

_GAIN = 1.2  # two measurements of one thing differ by less


def _finite(_: click.Context, __: click.Parameter, seconds: float) -> float:
    if not math.isfinite(seconds):  # a range takes nan
        raise click.BadParameter(f"{seconds} never ends; expected a number of seconds")
    return seconds


@click.command("bench")
@reads_tokens
@takes_batches
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=2.0,
    callback=_finite,
    help="Time of each measurement.",
)
@as_json
def command(sources: Sources, batch_size: int, seq_len: int, seconds: float, as_json: bool) -> None:
    """Measure how fast a token file gives batches.

    Random windows go through TokenLoader to the default device: first cold, after this file (and no
    other) has been dropped from the page cache, which needs no privileges; then the same windows
    warm. At last, cold again, the plan ShuffledBlocks, which makes large reads. A sentence says what
    limits each.

    \b
    Examples:
      tokenloader bench train.safetensors
      tokenloader bench --batch-size 256 --seconds 10 train.safetensors
      JAX_PLATFORMS=cpu tokenloader bench train.safetensors
    """
    from tokenloader.check.bench import bench

    measured = bench(sources.open, batch_size=batch_size, seq_len=seq_len, seconds=seconds)
    print_out(asdict(measured) if as_json else bench_screen(measured))


def bench_screen(bench: Bench) -> str:
    """What `tokenloader bench` prints."""
    shape = f"{bench.batch_size:,} x {bench.seq_len:,} tokens, random windows"
    lines = row("batches", f"{shape}, on {bench.device}")
    for label, speed in (("cold", bench.cold), ("warm", bench.warm)):
        if speed is None:
            lines += row(label, f"not measured: {bench.why_not_cold}")
        else:
            lines += row(label, f"{_rate(speed)} ({_extent(speed)})")
            lines += row("", f"limited by {speed.limit}")
    if bench.cold is None or bench.shuffled_blocks is None:
        lines += row("ShuffledBlocks", f"not measured: {bench.why_not_shuffled_blocks}")
    else:
        speed = bench.shuffled_blocks
        gain = speed.tokens_per_second / bench.cold.tokens_per_second
        times = f"{gain:.0f}" if gain >= 10 else f"{gain:.1f}"
        told = "" if gain >= _GAIN else "no gain: "
        lines += row("ShuffledBlocks", f"{_rate(speed)} cold, {told}{times} times random windows")
        lines += row("", f"({_extent(speed)}, after {bench.opening_seconds:.1f} s for its first blocks)")
        lines += row("", f"limited by {speed.limit}")
    return "\n".join(lines)


def _rate(speed: Speed) -> str:
    return f"{speed.tokens_per_second / 1e6:,.1f} million tokens/s"


def _extent(speed: Speed) -> str:
    return f"{counted(speed.batches, 'batch')} in {speed.seconds:.1f} s"
