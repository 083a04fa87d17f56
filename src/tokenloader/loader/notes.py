"""Notes: errors of other processes, for the loaders of this one to raise.

A thread looks at the notes about once a second, and keeps those that are due where `next()` reads them for
nothing. A note of a failed `next()` is due when it is still there at the second look: who tries again at
once, and succeeds, withdraws it, and the others never hear of it. What no `next()` has raised for some ten
seconds, because the program waits in a collective perhaps, the thread says in the log.

A warning is a note for one process that has made a loader for itself, for which others wait: it may come
yet, and withdraw it. If it uses that loader instead, it raises the warning, and so do the others.
"""

import atexit
import logging
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from tokenloader.storage.coordination import Coordination, coordination

LOOK_SECONDS = 1.0
_LOG_LOOKS = 10  # at which a note is said in the log, if nobody has raised it
_JOIN_SECONDS = 2.0
_logger = logging.getLogger("tokenloader")


class OtherProcessError(RuntimeError):
    """Another process has failed, or has given this one up."""


class Notes:
    """The notes of all processes, as one process sees them.

    Each is a dict: "from", the process that wrote it; "to", the processes it is for, or None for all that
    share a loader with the writer; "final", due at once; and "text". A warning has "loader", the key of
    the loader that it is about, and "waiting", the processes to tell when it is raised.
    """

    def __init__(self, way: Coordination) -> None:
        self.way = way
        self.due: tuple[tuple[str, dict[str, Any]], ...] = ()  # by name; empty nearly always
        self._seen: Counter[str] = Counter()  # looks at which each was there
        self._raised: set[str] = set()
        self._serials = count()
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="tokenloader notes", daemon=True)

    def write(self, text: str, to: Sequence[int] | None = None) -> str:
        """Stores a note to the processes named, or to all that share loaders; returns its name."""
        name = f"{self.way.here}/{next(self._serials)}"
        note = {"from": self.way.here, "to": to, "final": to is not None, "text": text}
        self.way.put(f"notes/{name}", note)
        return name

    def withdraw(self, name: str) -> None:
        """Removes a note, whose writer goes on."""
        self.way.delete(f"notes/{name}")

    def warn(self, process: int, local_key: str, text: str, waiting: Sequence[int]) -> None:
        """Warns a process that others wait for it; see above."""
        note = {"from": self.way.here, "to": [process], "final": True, "text": text}
        self.way.put(f"notes/{process}/{local_key}", note | {"loader": local_key, "waiting": waiting})

    def heed(self, local_key: str) -> None:
        """Withdraws the warning of a loader: this process comes."""
        self.withdraw(f"{self.way.here}/{local_key}")

    def raise_due(self, processes: Collection[int], local_key: str | None = None) -> None:
        """Raises OtherProcessError, once for a note: to this process, or by one of `processes` to all.

        local_key names the loader of this process alone that asks: warnings are for it only.
        """
        for name, note in self.due:
            mine = self.way.here in note["to"] if note["to"] is not None else note["from"] in processes
            if not mine or name in self._raised:
                continue
            if "loader" in note:
                if note["loader"] != local_key or name not in self.way.entries("notes"):
                    continue
                self.withdraw(name)
                self.write(note["text"], note["waiting"])
            else:
                self._raised.add(name)
            self.due = tuple(other for other in self.due if other[0] != name)
            raise OtherProcessError(note["text"])

    def look(self) -> None:
        """Finds the notes that are due. The thread calls this."""
        found = self.way.entries("notes")
        self._seen.update(found.keys())
        self.due = tuple(
            (name, note)
            for name, note in found.items()
            if (note["final"] or self._seen[name] > 1)
            and name not in self._raised
            and note["from"] != self.way.here
        )
        for name, note in self.due:
            if self._seen[name] == _LOG_LOOKS:
                _logger.warning(
                    "%s\nThis process has called no next() since; where it waits in a collective of the "
                    "training step, end it",
                    note["text"],
                )

    def start(self) -> None:
        """Starts the thread."""
        self.thread.start()
        atexit.register(self.stop)  # before jax ends its client

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self.thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        with suppress(Exception):  # the service has ended: who meets then is told by that
            while not self._stopping.wait(LOOK_SECONDS + self.way.count / 500):
                self.look()


_notes: Notes | None = None


def notes() -> Notes | None:
    """Returns the notes of this process, which it looks at from now on; None where `coordination` is."""
    global _notes  # noqa: PLW0603
    way = coordination()
    if way is None:
        return None
    if _notes is None or _notes.way.client is not way.client:  # jax.distributed was begun anew
        if _notes is not None:
            _notes.stop()
        _notes = Notes(way)
        _notes.start()
    return _notes
