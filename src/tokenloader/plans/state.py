"""The saved state of a run: a small flat dict of integers and strings, and what it must agree with.

The position is counted in samples and the plan is a function of the sample number, so batch size,
prefetch, residency, sharding and the split into files may all differ between saving and resuming.
What decides which tokens a sample is may not: plan, seq_len and data.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tokenloader.formats.quoting import shown
from tokenloader.plans.cursor import MAX_CHANGES, BatchSizeSchedule, Cursor, Stretch, probe
from tokenloader.plans.mixture import BoundMixture, Mixture
from tokenloader.plans.names import MOST_SHOWN, plan_named
from tokenloader.plans.plan import BoundPlan

VERSION = 2

# The batches of any run end below; as many again may follow before int64 overflows.
_LIMIT = 2**62

_REMEDY = "pass what get_state() returned, whole"


@dataclass(frozen=True)
class RunState:
    """Where a run is, after the last batch handed out."""

    step: int  # batches handed out since the run began, whatever their sizes
    sample: int  # the first of the next batch
    schedule: BatchSizeSchedule
    seq_len: int
    plan: str  # the plan's key up to the sample
    probe: str  # a hash of windows before the sample
    data: str  # the tokens' fingerprint, "DTYPE:NUM_TOKENS:HASH"

    @classmethod
    def of_run(cls, cursor: Cursor, *, seq_len: int, data: str) -> RunState:
        """Returns the state of a run that is where its cursor is."""
        plan, step, sample = cursor.plan, cursor.step, cursor.sample
        return cls(step, sample, cursor.schedule, seq_len, plan.key(sample), probe(plan, sample), data)

    def to_dict(self) -> dict[str, int | str]:
        """Returns the state as `get_state` gives it; batch_sizes has STEP:SAMPLE:BATCH_SIZE a change."""
        return {
            "version": VERSION,
            "step": self.step,
            "sample": self.sample,
            "batch_sizes": self.schedule.text,
            "seq_len": self.seq_len,
            "plan": self.plan,
            "probe": self.probe,
            "data": self.data,
        }


def from_dict(state: Mapping[str, Any]) -> RunState:
    """Reads what to_dict wrote. Integers may have become arrays, as checkpointers make them.

    Raises TypeError if state is not a mapping; ValueError if its version is another one, a field is not as
    to_dict writes it, or step, sample and batch_sizes contradict each other.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state is of type {type(state).__name__}; expected the dict that get_state() returned"
        )
    fields = dict(state)
    version = fields.pop("version", None)
    if _index(version) != VERSION:
        raise ValueError(
            f"state has version {version!r:.100}; this tokenloader reads version {VERSION}: "
            f"use the release that saved it, or a newer one"
        )
    expected = {"step", "sample", "batch_sizes", "seq_len", "plan", "probe", "data"}
    if fields.keys() != expected:
        raise ValueError(
            f"state has the fields {sorted(map(str, fields))!s:.300}; expected {sorted(expected)}: "
            f"{_REMEDY}"
        )
    for name in ("plan", "probe", "data", "batch_sizes"):
        if not isinstance(fields[name], str):
            raise ValueError(f"state: {name} is {fields[name]!r:.200}; expected a string")
    for name, least in (("step", 0), ("sample", 0), ("seq_len", 1)):
        fields[name] = _integer(name, fields[name], least)
    read = RunState(schedule=_schedule(fields.pop("batch_sizes")), **fields)
    _check_position(read)
    return read


def differences(saved: RunState, plan: BoundPlan, *, seq_len: int, data: str) -> list[str]:
    """Returns a line for each difference between a saved run and one here: both values, and the effect."""
    lines = []
    key = plan.key(saved.sample)
    plan_here = shown(key, MOST_SHOWN)
    if saved.plan != key:
        effect = (
            "the windows come in another order, so some would be trained on a second time, and others not "
            "at all"
        )
        if (saved.seq_len, saved.data) == (seq_len, data) and isinstance(plan, BoundMixture):
            effect = _effect_of_weights(saved, plan) or effect
        lines.append(f"plan: saved {shown(saved.plan, MOST_SHOWN)}, here {plan_here}: {effect}")
    if saved.seq_len != seq_len:
        lines.append(
            f"seq_len: saved {saved.seq_len}, here {seq_len}: the windows are cut elsewhere; the run "
            f"would go on after {saved.sample * seq_len:,} inputs, and has seen "
            f"{saved.sample * saved.seq_len:,}"
        )
    if saved.data != data:
        lines.append(data_difference(saved.data, data))
    # A plan that ends before the saved position, of fewer epochs say, has no windows to compare.
    ended = plan.num_samples is not None and saved.sample > plan.num_samples
    if not lines and not ended and saved.probe != (here := probe(plan, saved.sample)):
        lines.append(
            f"probe: saved {shown(saved.probe)}, here {here}: {plan_here} draws other windows here "
            f"than where the state was saved; is it another release, or does the plan's key hide what "
            f"decides its windows?"
        )
    return lines


def _effect_of_weights(saved: RunState, plan: BoundMixture) -> str | None:
    """Returns what becomes of the windows where two mixtures differ in their weights alone."""
    before = plan_named(saved.plan)
    if not isinstance(before, Mixture) or before.ranges != plan.mixture.ranges:
        return None
    weights: dict[Any, int] = dict(zip(before.ranges, before.weights, strict=True))
    bound = Mixture(weights, plan.mixture.plan).bind(before.ranges[-1].stop, saved.seq_len)
    if bound.key(saved.sample) != saved.plan:
        return None
    return plan.effect_of_going_on_from(before.weights, saved.sample)


def data_difference(saved: str, here: str) -> str:
    """Returns the line of `differences` for two fingerprints that are not equal."""
    names = ("another dtype", "another number of tokens", "other contents")
    parts = zip(names, saved.split(":"), here.split(":"), strict=False)
    differing = [name for name, a, b in parts if a != b] or [names[2]]
    moved = names[1] in differing
    effect = (
        f"the same {'sample numbers are windows at other places' if moved else 'windows hold other tokens'}"
    )
    return f"data: saved {shown(saved)}, here {here}: {' and '.join(differing)}, so {effect}"


def _schedule(text: str) -> BatchSizeSchedule:
    """Reads a schedule by making its changes again: what they give is what was read."""
    if (num_changes := text.count(" ")) > MAX_CHANGES:
        raise ValueError(
            f"state: batch_sizes has {num_changes:,} changes; expected at most {MAX_CHANGES:,}: {_REMEDY}"
        )
    with suppress(TypeError, ValueError):
        stretches = [Stretch(*map(int, change.split(":"))) for change in text.split(" ")]
        schedule = BatchSizeSchedule.constant(1)
        for step, _, batch_size in stretches:
            schedule = schedule.changed(step, batch_size)
        is_in_range = all(step >= 0 and 0 < size < _LIMIT for step, _, size in stretches)
        if is_in_range and schedule.text == text:
            return schedule
    raise ValueError(
        f"state: batch_sizes is {text!r:.200}; expected STEP:SAMPLE:BATCH_SIZE for each change, from "
        f"0:0 on, with rising steps and the samples that those batches have: {_REMEDY}"
    )


def _check_position(state: RunState) -> None:
    """Raises ValueError unless step, sample and batch_sizes agree."""
    last = state.schedule.last
    if last.step > state.step:
        raise ValueError(
            f"state: batch_sizes goes on to step {last.step}, and step is {state.step}: {_REMEDY}"
        )
    sample = state.schedule.samples(state.step).start
    if sample != state.sample:
        raise ValueError(
            f"state: sample is {state.sample}, and {state.step} steps of these batch_sizes are "
            f"{sample} samples: {_REMEDY}"
        )


def _integer(name: str, value: Any, least: int) -> int:
    number = _index(value)
    if number is None or not least <= number < _LIMIT:
        raise ValueError(
            f"state: {name} is {value!r:.100}; expected an integer of {least} or more, below 2**62"
        )
    return number


def _index(value: Any) -> int | None:
    """Returns the integer that a value is; None if it is none, a bool for one."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
