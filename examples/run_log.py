"""The log of a run: progress lines on screen, metrics.jsonl, and a plot of the losses.

metrics.jsonl has a JSON object a line and a line for each logged step. A resumed run first drops the
lines past the checkpoint it goes on from, so that the file has each step once.
"""

from __future__ import annotations

import json
import os
import time
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
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[Row]:
    """Read all rows of the file; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def drop_after(path: Path, step: int) -> None:
    """Keep the rows up to `step`, itself included."""
    kept = [row for row in read(path) if row["step"] <= step]
    # Write under a temporary name, then rename: a kill at this moment loses nothing.
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    temporary.replace(path)


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
