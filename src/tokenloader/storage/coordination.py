"""Coordination: what the processes of one program tell each other, through jax's coordination service.

The service is a store of texts by name, in process 0, which jax.distributed.initialize() starts. Calls to
it wait for no device and no collective, and every one ends: so it can say who is missing. jax has no public
interface to it; all use of the internal one is here. This does not import jax: a program of several
processes has done so.
"""

import atexit
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

_ROOT = "tokenloader"
_MAX_ERROR_CHARACTERS = 1000

_imported_in = os.getpid()  # the process that tells of its end; a fork of it does not
_has_failed = False  # whether the others can read of an error in `telling_of_errors`


@dataclass(frozen=True)
class Coordination:
    """The store that all processes of a program share, as one of them reaches it."""

    client: Any  # jaxlib's DistributedRuntimeClient
    here: int  # this process, from 0
    count: int  # processes of the program

    def put(self, name: str, value: Any) -> None:
        """Stores a value that JSON can hold, in the place of an older one."""
        text = json.dumps(value, sort_keys=True)
        self.client.key_value_set(f"{_ROOT}/{name}", text, allow_overwrite=True)

    def wait_for(self, name: str, seconds: float) -> Any:
        """Returns a value once it is stored; None if it is not within so many seconds."""
        try:
            text = self.client.blocking_key_value_get(f"{_ROOT}/{name}", max(1, int(seconds * 1000)))
        except Exception as error:  # of a type that has another name in each release
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return json.loads(text)

    def entries(self, folder: str) -> dict[str, Any]:
        """Returns all values whose names begin with `folder/`, by the rest of their names."""
        prefix = f"{_ROOT}/{folder}/"
        found = self.client.key_value_dir_get(prefix)
        return {name.removeprefix(prefix): json.loads(text) for name, text in found}

    def delete(self, name: str) -> None:
        """Removes a value, or a folder of them, if there is one."""
        self.client.key_value_delete(f"{_ROOT}/{name}")


def coordination() -> Coordination | None:
    """Returns the way to the other processes; None in a program of one process, or without the service."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if state is None or state.client is None or state.num_processes == 1:
        return None
    # jax numbers processes by their devices; before it knows those, as initialize() was told.
    bridge: Any = sys.modules["jax._src.xla_bridge"]
    here = bridge.process_index() if bridge.backends_are_initialized() else state.process_id
    _register()
    return Coordination(state.client, here, state.num_processes)


@contextmanager
def telling_of_errors(call: str) -> Iterator[None]:
    """Publishes an error in a call that has no meeting, until the next such call, for those who wait."""
    global _has_failed  # noqa: PLW0603
    way = coordination()
    if way is not None and _has_failed:
        way.delete(f"places/{way.here}/failed")
        _has_failed = False
    try:
        yield
    except Exception as error:
        if way is not None:
            with suppress(Exception):  # the error itself says more
                way.put(f"places/{way.here}/failed/{call}", f"{call} raised {in_words(error)}")
                _has_failed = True
        raise


def in_words(error: BaseException) -> str:
    """Returns an error's type and text, cut to a length that a message can hold."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return text if len(text) <= _MAX_ERROR_CHARACTERS else text[:_MAX_ERROR_CHARACTERS] + "..."


def _register() -> None:
    """Registers the exit handler anew: what is registered last runs first, before jax ends its client."""
    atexit.unregister(_tell_of_the_end)
    atexit.register(_tell_of_the_end)


def _tell_of_the_end() -> None:
    way = coordination()
    if way is None or _imported_in != os.getpid():
        return
    # What the interpreter has printed as it ended the program; in a session it went on after that.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    with suppress(Exception):
        way.delete(f"places/{way.here}/in")
        way.put(f"places/{way.here}/ended", in_words(error) if error is not None else "")
        if error is not None:
            text = (
                f"process {way.here} of {way.count} ended by {in_words(error)}\n"
                f"Mend that, and begin again in all processes, from a checkpoint"
            )
            way.put(f"notes/{way.here}/end", {"from": way.here, "to": None, "final": True, "text": text})
            # jax.devices() waits for minutes for the devices of each process: with these, who is there goes
            # on to a call that tells it. Nobody does who has ended otherwise.
            ended = [text for name, text in way.entries("places").items() if name.endswith("/ended")]
            if all(ended):
                sys.modules["jax._src.xla_bridge"].backends()


_register()  # a program may end before it opens anything
