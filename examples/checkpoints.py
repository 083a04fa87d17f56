"""Checkpoints of a run: the training state together with the loader's state, which is a small dict.

Both states are saved after the same step, so a run that was killed goes on with the batch that follows
its last checkpoint: no batch is trained on twice, and none is left out.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import tokenloader as tl
from training import State

Settings = dict[str, Any]  # JSON-able: what decides the outcome of a run


def open_checkpoints(out: Path) -> ocp.CheckpointManager:
    """Open the checkpoints of the run in folder `out`; the last two are kept.

    A save that a kill or a full disk cut off is no checkpoint, and is removed. Closing the manager waits
    for a save under way.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    return ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)


def save(
    checkpoints: ocp.CheckpointManager,
    step: int,
    state: State,
    loader: tl.TokenLoader,
    settings: Settings,
) -> None:
    """Save the states after `step`: copied off the devices now, written in the background."""
    items = ocp.args.Composite(
        train=ocp.args.StandardSave(state),
        loader=ocp.args.JsonSave(loader.get_state()),
        settings=ocp.args.JsonSave(settings),
    )
    checkpoints.save(step, args=items)


def restore(
    checkpoints: ocp.CheckpointManager, state: State, loader: tl.TokenLoader, settings: Settings
) -> tuple[State, int]:
    """The state of the last checkpoint, and its step; the loader is moved there as well.

    The given state tells the shapes of the arrays and the devices they belong on. Where there is no
    checkpoint, it is returned as it is, with step 0.

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
