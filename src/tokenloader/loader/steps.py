"""Steps: the windows and reads of each step of a run, computed from its cursor, many at a time. No jax."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.plans.cursor import Cursor
from tokenloader.plans.plan import checked_reads, checked_window_starts

# A sample's plan arithmetic in blocks of 32 costs some fifty times what it does in blocks of 4,096.
PLANNED_SAMPLES = 4096
# Each computation looks at all blocks that are open: 1,024 in 4,096 samples take 0.3 us a sample, in 16,384
# 0.2.
PLANNED_READS = 1 << 14
# More than the blocks that a plan has open, 1,024 by default: each is needed once in as many samples.
REMEMBERED_SAMPLES = 1 << 16


class Step(NamedTuple):
    """The rows of a step that this process's devices hold, n of them."""

    number: int
    window_starts: NDArray[np.int64]  # [n]
    valid_targets: NDArray[np.int32] | None  # [n]


class Read(NamedTuple):
    """Tokens [start, stop) to be read as a whole before a step."""

    step: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class StepReads(NamedTuple):
    """The reads of consecutive steps that none before them needed, in the order of their steps."""

    stop_step: int  # the first step after them
    reads: list[Read]


def plan_steps(
    cursor: Cursor, rows: NDArray[np.int64], planned_samples: int = PLANNED_SAMPLES
) -> Iterator[Step]:
    """Yields the steps from a cursor on, each with these rows of the global batch, int64 [n]."""
    plan = cursor.plan
    for step, samples in _samples_of_steps(cursor, rows, planned_samples):
        starts = checked_window_starts(plan, samples).reshape(-1, len(rows))
        valid, counts = None, plan.valid_targets(samples)
        if counts is not None:
            valid = np.asarray(counts).astype(np.int32).reshape(-1, len(rows))
        for i in range(len(starts)):
            yield Step(step + i, starts[i], None if valid is None else valid[i])


def plan_reads(
    cursor: Cursor, rows: NDArray[np.int64], num_tokens: int, planned_samples: int = PLANNED_READS
) -> Iterator[StepReads]:
    """Yields the plan's reads from a cursor on, some steps at a time.

    A read comes again where no sample of the last REMEMBERED_SAMPLES needed it. Ends with the plan; at
    once, if the plan has each window read by itself.
    """
    recent: dict[tuple[int, int], int] = {}  # when it was needed, in samples; the least recent one first
    now = 0
    for step, samples in _samples_of_steps(cursor, rows, planned_samples):
        reads = checked_reads(cursor.plan, samples, num_tokens)
        if reads is None:
            return
        order = np.lexsort((reads[:, 1], reads[:, 0]))  # equal ones in the order of their samples
        ordered = reads[order]
        first = np.sort(order[np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))])
        new = []
        for row, (start, stop) in zip(first.tolist(), reads[first].tolist(), strict=True):
            if (start, stop) in recent:
                del recent[start, stop]  # and to the end
            else:
                new.append(Read(step + row // len(rows), start, stop))
            recent[start, stop] = now
        yield StepReads(step + len(samples) // len(rows), new)
        # What these samples needed stays, however many they are.
        while recent[oldest := next(iter(recent))] < now - REMEMBERED_SAMPLES:
            del recent[oldest]
        now += len(samples)


def _samples_of_steps(
    cursor: Cursor, rows: NDArray[np.int64], planned_samples: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields a step, and the samples of it and of some that follow: int64 [num_steps * n]."""
    batch_size, step, sample = cursor.schedule.last.batch_size, cursor.step, cursor.sample
    while cursor.stop_step is None or step < cursor.stop_step:
        num_steps = max(1, planned_samples // len(rows))
        if cursor.stop_step is not None:
            num_steps = min(num_steps, cursor.stop_step - step)
        first = np.arange(sample, sample + num_steps * batch_size, batch_size, dtype=np.int64)
        yield step, (first[:, None] + rows).reshape(-1)
        step, sample = step + num_steps, sample + num_steps * batch_size
