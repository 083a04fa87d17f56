"""The saved state of a loader: a small JSON-able dict, and what it must agree with to be resumed.

The position is counted in samples and the plan is a function of the sample number, so batch size,
prefetch, residency, sharding and the split into files may all differ between saving and resuming.
What decides which tokens a sample is may not: plan, seq_len and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

VERSION = 1


@dataclass(frozen=True)
class LoaderState:
    """Where a run is, after the last batch handed out.

    Args:
        step: batches handed out since the run began, whatever their sizes.
        sample: the next batch begins with this global sample.
        batch_size: of the run that saved it; to tell what earlier steps were.
        since_step: the first step of that batch_size in a row up to this one.
        seq_len: inputs in a window.
        plan: the plan's name.
        data: the tokens' fingerprint, "DTYPE:NUM_TOKENS:HASH".
    """

    step: int
    sample: int
    batch_size: int
    since_step: int
    seq_len: int
    plan: str
    data: str

    def to_dict(self) -> dict[str, Any]:
        """The state as `get_state` gives it."""
        return {"version": VERSION, **asdict(self)}


def from_dict(state: Mapping[str, Any]) -> LoaderState:
    """Reads what to_dict wrote.

    Raises:
        TypeError: it is not a mapping.
        ValueError: a field is missing or unknown, or the version is a newer one.
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
    needed = LoaderState.__dataclass_fields__.keys()
    if fields.keys() != needed:
        raise ValueError(
            f"state has the fields {sorted(map(str, fields))}; needed are {sorted(needed)}: "
            f"pass what get_state() returned, whole"
        )
    for name, value in fields.items():
        if name in ("plan", "data"):
            if not isinstance(value, str):
                raise ValueError(f"state: {name} is {value!r}; needed is a string")
        else:
            least = 1 if name in ("batch_size", "seq_len") else 0
            # Some checkpointers give numpy's integers back.
            if not isinstance(value, (int, np.integer)) or value < least:
                raise ValueError(
                    f"state: {name} is {value!r}; needed is an integer of {least} or more"
                )
            fields[name] = int(value)
    return LoaderState(**fields)


def check_same_run(saved: LoaderState, here: LoaderState) -> None:
    """Raises ValueError unless `saved` can go on here; names each difference and what it means."""
    differences = []
    if saved.plan != here.plan:
        differences.append(
            f"plan: saved {saved.plan}, here {here.plan}: the windows come in another order"
        )
    if saved.seq_len != here.seq_len:
        differences.append(
            f"seq_len: saved {saved.seq_len}, here {here.seq_len}: the windows are cut elsewhere"
        )
    if saved.data != here.data:
        differences.append(
            f"data: saved {saved.data}, here {here.data}: {_what_differs(saved.data, here.data)}"
        )
    if differences:
        raise ValueError(
            "this state is of another run, and going on would train on other samples, some of them a "
            "second time:\n  "
            + "\n  ".join(differences)
            + "\nOpen what the state was saved with, or "
            "begin anew without set_state"
        )


def _what_differs(saved: str, here: str) -> str:
    names = ("the dtype", "the number of tokens", "the tokens themselves")
    parts = zip(names, saved.split(":"), here.split(":"), strict=False)
    return " and ".join(name for name, a, b in parts if a != b) + " differ"
