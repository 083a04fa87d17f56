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
    from tokenloader.check.bench import Bench


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
    warm. A sentence says what limits each.

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
            rate = f"{speed.tokens_per_second / 1e6:,.1f} million tokens/s"
            lines += row(label, f"{rate} ({counted(speed.batches, 'batch')} in {speed.seconds:.1f} s)")
            lines += row("", f"limited by {speed.limit}")
    return "\n".join(lines)
