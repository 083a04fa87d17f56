"""The log of a run: progress lines on screen, metrics.jsonl, and a plot of the losses.

metrics.jsonl has a JSON object a line and a line for each logged step. A resumed run first drops the
lines past the checkpoint it goes on from, so that the file has each step once, and a last line that was
cut off, as by a full disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenloader as tl

Row = dict[str, Any]  # step, loss, learning_rate, ..., tokens_per_second, wait_share, val_loss


class Stopwatch:
    """Measures how fast a loop consumes a loader, and what share of its time it waits for data."""

    def __init__(self, loader: tl.TokenLoader) -> None:
        self._loader = loader
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now."""
        self._began, self._before = time.perf_counter(), self._loader.stats

    def rates(self) -> Row:
        """Tokens a second and the share of waiting since the interval began; begins the next one."""
        began, before = self._began, self._before
        self.restart()
        seconds, now = self._began - began, self._before
        return {
            "tokens_per_second": (now.tokens - before.tokens) / seconds,
            "wait_share": (now.wait_seconds - before.wait_seconds) / seconds,
        }


def progress_line(row: Row, num_steps: int) -> str:
    """A row as a line for a person to read."""
    line = (
        f"step {row['step']:>{len(str(num_steps))}}/{num_steps}"
        f"   loss {row['loss']:.4f}   lr {row['learning_rate']:.2e}"
        f"   {row['tokens_per_second']:>9,.0f} tokens/s   waiting for data {row['wait_share']:.1%}"
    )
    return line + (f"   val_loss {row['val_loss']:.4f}" if "val_loss" in row else "")


def append(path: Path, row: Row) -> None:
    """Append a row to the file."""
    with _naming(path), path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[Row]:
    """Read all rows of the file but a last one that was cut off; none where there is no file yet.

    Raises: ValueError if another line is not a row.
    """
    rows: list[Row] = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is not JSON; remove it") from None
            print(f"{path}: dropped line {number}, the last, which was cut off")
    return rows


def drop_after(path: Path, step: int) -> None:
    """Keep the rows up to `step`, itself included. Raises as `read` does."""
    kept = [row for row in read(path) if row["step"] <= step]
    # Write under a temporary name, then rename: a kill at this moment loses nothing. The name is always
    # the same, so that the next run takes away what a killed one left.
    temporary = path.with_suffix(".tmp")
    try:
        with _naming(temporary):
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors: where the disk is full, the system's own does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def plot(rows: list[Row], path: Path, baseline: tuple[str, float] | None = None) -> None:
    """Draw training and validation loss against the step; `baseline` is a label and a loss."""
    from matplotlib.figure import Figure  # takes a second, and only the end needs it

    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).add_subplot()
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], lw=1, label="training")
    evaluated = [row for row in rows if "val_loss" in row]
    if evaluated:
        steps, losses = zip(*((row["step"], row["val_loss"]) for row in evaluated), strict=True)
        axes.plot(steps, losses, "o-", label=f"validation, last {losses[-1]:.3f}")
    if baseline:
        label, loss = baseline
        axes.axhline(loss, ls="--", color="gray", label=f"{label}, {loss:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
