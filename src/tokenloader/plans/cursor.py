"""Cursor: where a run is, and which samples any of its steps is made of. No jax, no tokens."""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.plans.plan import BoundPlan, checked_window_starts, masks_targets

# Changes of batch size that a run may have: each is 10 to 20 characters in every state saved after it.
MAX_CHANGES = 1000


class Stretch(NamedTuple):
    """Steps of one batch size: step and sample number go up together from the first of them on."""

    step: int
    sample: int
    batch_size: int


@dataclass(frozen=True)
class BatchSizeSchedule:
    """The batch sizes of a run, each from a step on.

    Example:
        >>> schedule = BatchSizeSchedule.constant(32).changed(step=1000, batch_size=64)
        >>> schedule.samples(999), schedule.samples(1000), schedule.samples(10**6)
        (range(31968, 32000), range(32000, 32064), range(63968000, 63968064))
    """

    stretches: tuple[Stretch, ...]  # in order, from step 0 on; the last has no end

    @classmethod
    def constant(cls, batch_size: int) -> BatchSizeSchedule:
        """Returns the schedule of a run that keeps its batch size."""
        return cls((Stretch(0, 0, batch_size),))

    @property
    def last(self) -> Stretch:
        """The stretch without an end."""
        return self.stretches[-1]

    @cached_property
    def text(self) -> str:
        """The schedule as a state has it: STEP:SAMPLE:BATCH_SIZE for each stretch."""
        return " ".join(":".join(map(str, stretch)) for stretch in self.stretches)

    def samples(self, step: int) -> range:
        """Returns the sample numbers of a step, 0 or later."""
        index = bisect_right(self.stretches, step, key=lambda stretch: stretch.step) - 1
        stretch = self.stretches[index]
        first = stretch.sample + (step - stretch.step) * stretch.batch_size
        return range(first, first + stretch.batch_size)

    def changed(self, step: int, batch_size: int) -> BatchSizeSchedule:
        """Returns the schedule in which batch_size holds from `step` on.

        A change at a later step is dropped: that step was never handed out. Raises ValueError if the run
        had MAX_CHANGES before.
        """
        past = self.stretches[: bisect_left(self.stretches, step, key=lambda stretch: stretch.step)]
        if past and past[-1].batch_size == batch_size:
            return BatchSizeSchedule(past)
        if len(past) > MAX_CHANGES:
            raise ValueError(
                f"batch_size={batch_size} from step {step} on would be change {len(past):,} of this run's "
                f"batch size, and a state holds {MAX_CHANGES:,}; go on with "
                f"batch_size={past[-1].batch_size}, as before that step"
            )
        return BatchSizeSchedule((*past, Stretch(step, self.samples(step).start, batch_size)))


class Cursor(NamedTuple):
    """Where a run is: a plan, the batch sizes of its steps, and the next step. Made by `Cursor.begin`.

    A value: to move is to make another, so no interrupt finds one half moved.
    """

    plan: BoundPlan
    schedule: BatchSizeSchedule  # of all steps, past and to come
    step: int  # the next to hand out
    stop_step: int | None  # the first that the plan has no batch for; None: it never ends

    @classmethod
    def begin(cls, plan: BoundPlan, batch_size: int) -> Cursor:
        """Returns the cursor of a run that begins; ValueError if it ends before its first full batch."""
        cursor = cls.at(plan, BatchSizeSchedule.constant(batch_size), 0)
        if cursor.ended:
            raise ValueError(
                f"{plan.key(0)} ends after {plan.num_samples:,} windows of these tokens, before the first "
                f"batch of batch_size={batch_size} is full; use a smaller batch_size"
            )
        return cursor

    @classmethod
    def at(cls, plan: BoundPlan, schedule: BatchSizeSchedule, step: int) -> Cursor:
        """Returns the cursor of a run that is at a step, of the schedule's last stretch."""
        num_samples, (first, sample, batch_size) = plan.num_samples, schedule.last
        if num_samples is None:
            return cls(plan, schedule, step, None)
        left = num_samples - sample
        # A plan that masks targets has its last batch filled, with samples that count for nothing.
        num_steps = -(-left // batch_size) if masks_targets(plan) else left // batch_size
        return cls(plan, schedule, step, first + max(0, num_steps))

    @property
    def sample(self) -> int:
        """The first sample of the next step."""
        return self.schedule.samples(self.step).start

    @property
    def ended(self) -> bool:
        """Whether the plan has no further batch."""
        return self.stop_step is not None and self.step >= self.stop_step

    def sample_range(self, step: int) -> range:
        """Returns the sample numbers of any step of the run, past or to come.

        Raises ValueError if the step is negative or past the plan's end, TypeError if it is no integer.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step {step} is negative; steps are counted from 0")
        samples = self.schedule.samples(step)
        if samples.stop > 2**63:
            raise ValueError(f"step {step} begins with sample {samples.start}; samples end at 2**63")
        if self.stop_step is not None and step >= self.stop_step:
            raise ValueError(f"step {step} is past the end: {self.plan.key(samples.start)} ends before it")
        return samples

    def samples(self, step: int) -> NDArray[np.int64]:
        """Returns `sample_range` as an array: int64 [batch size then]."""
        samples = self.sample_range(step)
        return np.arange(samples.start, samples.stop, dtype=np.int64)

    def window_starts(self, step: int) -> NDArray[np.int64]:
        """Returns where a step's windows begin: int64 [batch size then]. Raises as `sample_range`."""
        return checked_window_starts(self.plan, self.samples(step))

    def advance(self) -> Cursor:
        """Returns the cursor behind the next step."""
        return Cursor(self.plan, self.schedule, self.step + 1, self.stop_step)

    def restore(self, schedule: BatchSizeSchedule, step: int) -> Cursor:
        """Returns the cursor where another run stopped, with this cursor's batch size from there on."""
        batch_size = self.schedule.last.batch_size
        return Cursor.at(self.plan, schedule.changed(step, batch_size), step)


def probe(plan: BoundPlan, until_sample: int) -> str:
    """Returns a hash of the windows of up to 100 samples before until_sample: 16 hex digits.

    Two plans, releases or machines that have equal keys and other windows have other probes.
    """
    powers = (2**k + offset for k in range(63) for offset in (-1, 0))
    chosen = {sample for sample in (*powers, until_sample - 1) if 0 <= sample < until_sample}
    samples = np.array(sorted(chosen), np.int64)
    starts = checked_window_starts(plan, samples) if chosen else samples
    return hashlib.blake2b(starts.astype("<i8").tobytes(), digest_size=8).hexdigest()
