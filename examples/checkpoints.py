"""Checkpoints of a run: the training state, and with it the loader's, which is a small dict.

Both are those after the same step, so a run that was killed goes on with the batch that follows its
last checkpoint: none is trained on twice, and none is left out.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import tokenloader as tl
from update import State

Settings = dict[str, Any]  # JSON-able: what decides the outcome of a run


def open_checkpoints(out: Path) -> ocp.CheckpointManager:
    """Of the run in folder `out`. The last two are kept; closing it waits for a save under way."""
    return ocp.CheckpointManager(
        (out / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )


def save(
    checkpoints: ocp.CheckpointManager,
    step: int,
    state: State,
    loader: tl.TokenLoader,
    settings: Settings,
) -> None:
    """Save what is after `step`. Copies it off the device, and writes it in the background."""
    items = ocp.args.Composite(
        train=ocp.args.StandardSave(state),
        loader=ocp.args.JsonSave(loader.get_state()),
        settings=ocp.args.JsonSave(settings),
    )
    checkpoints.save(step, args=items)


def restore(
    checkpoints: ocp.CheckpointManager, state: State, loader: tl.TokenLoader, settings: Settings
) -> tuple[State, int]:
    """The state after the last checkpoint's step, and that step; moves the loader there as well.

    Where there is no checkpoint, the given state and 0. The given state otherwise says of what
    shape and on which devices the arrays are.

    Raises: ValueError if the run was begun with other settings or other data.
    """
    step = checkpoints.latest_step()
    if step is None:
        return state, 0
    json = ocp.args.JsonRestore
    saved = checkpoints.restore(step, args=ocp.args.Composite(loader=json(), settings=json()))
    _check_same(saved.settings, settings)
    loader.set_state(saved.loader)
    train = ocp.args.StandardRestore(state)
    return checkpoints.restore(step, args=ocp.args.Composite(train=train)).train, step


def delete(out: Path) -> None:
    """Delete all checkpoints of the run in folder `out`, if there are any."""
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


def _check_same(saved: Settings, here: Settings) -> None:
    differences = [
        f"{name} is {saved.get(name)} there and {here.get(name)} here"
        for name in sorted(saved.keys() | here.keys())
        if saved.get(name) != here.get(name)
    ]
    if differences:
        raise ValueError(f"the run was begun with other settings: {', '.join(differences)}")
