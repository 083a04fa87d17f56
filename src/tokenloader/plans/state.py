"""The saved state of a loader: a small JSON-able dict, and what it must agree with to be resumed.

The position is counted in samples and the plan is a function of the sample number, so batch size,
prefetch, residency, sharding and the split into files may all differ between saving and resuming.
What decides which tokens a sample is may not: plan, seq_len and data.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tokenloader.plans.batch_size_schedule import History

VERSION = 1

_REMEDY = "pass what get_state() returned, whole"


@dataclass(frozen=True)
class LoaderState:
    """Where a run is, after the last batch handed out.

    Args:
        step: batches handed out since the run began, whatever their sizes.
        sample: the next batch begins with this global sample.
        history: the batch sizes of the steps so far, and of those to come.
        seq_len: inputs in a window.
        plan: the plan's name.
        data: the tokens' fingerprint, "DTYPE:NUM_TOKENS:HASH".
    """

    step: int
    sample: int
    history: History
    seq_len: int
    plan: str
    data: str

    def to_dict(self) -> dict[str, Any]:
        """The state as `get_state` gives it: integers, strings, and lists of integers."""
        fields = asdict(self)
        del fields["history"]
        sizes = [list(change) for change in self.history.changes]
        return {"version": VERSION, **fields, "batch_sizes": sizes}


def from_dict(state: Mapping[str, Any]) -> LoaderState:
    """Reads what to_dict wrote.

    Checkpointers may have made tuples or arrays of its lists, and arrays of its integers.

    Raises:
        TypeError: it is not a mapping.
        ValueError: the version is another one, a field is missing, unknown or not as to_dict writes
            it, or step, sample and batch_sizes contradict each other.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state is of type {type(state).__name__}; needed is the dict of get_state()"
        )
    fields = dict(state)
    version = fields.pop("version", None)
    if version != VERSION:
        raise ValueError(
            f"state has version {version}; this tokenloader reads version {VERSION}: "
            f"use the release that saved it, or a newer one"
        )
    needed = {"step", "sample", "batch_sizes", "seq_len", "plan", "data"}
    if fields.keys() != needed:
        raise ValueError(
            f"state has the fields {sorted(map(str, fields))}; needed are {sorted(needed)}: "
            f"{_REMEDY}"
        )
    for name in ("plan", "data"):
        if not isinstance(fields[name], str):
            raise ValueError(f"state: {name} is {fields[name]!r}; needed is a string")
    read = LoaderState(
        step=_integer("step", fields["step"], 0),
        sample=_integer("sample", fields["sample"], 0),
        history=_history(fields["batch_sizes"]),
        seq_len=_integer("seq_len", fields["seq_len"], 1),
        plan=fields["plan"],
        data=fields["data"],
    )
    _check_position(read)
    return read


def differences(saved: LoaderState, here: LoaderState) -> list[str]:
    """A line for each field in which two runs differ: both values, and what going on would mean."""
    lines = []
    if saved.plan != here.plan:
        lines.append(
            f"plan: saved {saved.plan}, here {here.plan}: the windows come in another order, so some "
            f"would be trained on a second time, and others not at all"
        )
    if saved.seq_len != here.seq_len:
        lines.append(
            f"seq_len: saved {saved.seq_len}, here {here.seq_len}: the windows are cut elsewhere; the run "
            f"would go on after {saved.sample * here.seq_len:,} inputs, and has seen "
            f"{saved.sample * saved.seq_len:,}"
        )
    if saved.data != here.data:
        lines.append(data_difference(saved.data, here.data))
    return lines


def data_difference(saved: str, here: str) -> str:
    """The line of `differences` for two fingerprints that are not equal."""
    names = ("another dtype", "another number of tokens", "other contents")
    parts = zip(names, saved.split(":"), here.split(":"), strict=False)
    differing = [name for name, a, b in parts if a != b] or [names[2]]
    if names[1] in differing:
        effect = "the same sample numbers are windows at other places"
    else:
        effect = "the same windows hold other tokens"
    return f"data: saved {saved}, here {here}: {' and '.join(differing)}, so {effect}"


def _history(value: Any) -> History:
    needed = "needed is a list of [first step, batch_size], from step 0, with rising steps"
    try:
        changes = tuple(
            (operator.index(step), operator.index(batch_size)) for step, batch_size in value
        )
    except (TypeError, ValueError):
        raise ValueError(f"state: batch_sizes is {value!r}; {needed}") from None
    steps, sizes = [step for step, _ in changes], [size for _, size in changes]
    rising = steps[:1] == [0] and steps == sorted(set(steps))
    if not rising or not all(0 < size < 2**63 for size in sizes):
        raise ValueError(f"state: batch_sizes is {value!r}; {needed}")
    return History(changes)


def _check_position(state: LoaderState) -> None:
    """Raises ValueError unless step, sample and batch_sizes agree."""
    sizes = [list(change) for change in state.history.changes]
    if state.history.last_change > state.step:
        raise ValueError(
            f"state: batch_sizes is {sizes}, which goes on to step {state.history.last_change}, and step "
            f"is {state.step}: {_REMEDY}"
        )
    sample = state.history.samples_of(state.step).start
    if sample != state.sample:
        raise ValueError(
            f"state: sample is {state.sample}, and {state.step} steps of batch_sizes {sizes} are "
            f"{sample} samples: {_REMEDY}"
        )


def _integer(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not least <= number < 2**63:
        raise ValueError(
            f"state: {name} is {value!r}; needed is an integer of {least} or more, below 2**63"
        )
    return number
