"""Steps: the windows of each step of a run, computed from its cursor, many steps at a time. No jax."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.plans.cursor import Cursor
from tokenloader.plans.plan import checked_window_starts

# A sample's plan arithmetic in blocks of 32 costs some fifty times what it does in blocks of 4,096.
PLANNED_SAMPLES = 4096


class Step(NamedTuple):
    """The rows of a step that this process's devices hold, n of them."""

    number: int
    window_starts: NDArray[np.int64]  # [n]
    valid_targets: NDArray[np.int32] | None  # [n]


def plan_steps(
    cursor: Cursor, rows: NDArray[np.int64], planned_samples: int = PLANNED_SAMPLES
) -> Iterator[Step]:
    """Yields the steps from a cursor on, each with these rows of the global batch, int64 [n]."""
    plan, batch_size = cursor.plan, cursor.schedule.last.batch_size
    step, sample = cursor.step, cursor.sample
    while cursor.stop_step is None or step < cursor.stop_step:
        num_steps = max(1, planned_samples // len(rows))
        if cursor.stop_step is not None:
            num_steps = min(num_steps, cursor.stop_step - step)
        first = np.arange(sample, sample + num_steps * batch_size, batch_size, dtype=np.int64)
        samples = (first[:, None] + rows).reshape(-1)
        starts = checked_window_starts(plan, samples).reshape(num_steps, len(rows))
        valid, counts = None, plan.valid_targets(samples)
        if counts is not None:
            valid = np.asarray(counts).astype(np.int32).reshape(num_steps, len(rows))
        for i in range(num_steps):
            yield Step(step + i, starts[i], None if valid is None else valid[i])
        step, sample = step + num_steps, sample + num_steps * batch_size
