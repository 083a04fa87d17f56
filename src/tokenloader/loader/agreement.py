"""Agreement: the meetings of a loader with the loaders that other processes make for the same sharding.

They meet in the constructor, in set_state(), and in the first next() after either and in a new pass. What
one of them was given, or refuses, or fails in, is an error on all.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from tokenloader.loader.meetings import Meeting
from tokenloader.loader.notes import notes
from tokenloader.loader.sharding import members_of
from tokenloader.plans.cursor import Cursor
from tokenloader.storage.coordination import in_words, telling_of_errors

_said: set[str] = set()  # warnings that come once in a process


class Agreement:
    """The meetings of one loader, and the notes that it writes.

    Attributes:
        members: the processes of the sharding, ascending; [] where this one is alone, or its sharding is
            not one.
        notes: what other processes write to this one; None in a program of one process.
        local_key: names the loader, where this process makes it alone, by the batches that it draws.
        is_due: whether the next `next()` is to meet.
    """

    def __init__(self, sharding: object) -> None:
        self.members = members_of(sharding)
        self.notes = notes()
        self.local_key: str | None = None
        self.is_due = False
        self._meets = bool(self.members) and self.notes is not None
        self._name = ""  # equal in all members, once they have met
        self._meeting: Meeting | None = None  # of next(), while it lasts
        self._note: str | None = None  # of a next() that has failed
        if self.members and self.notes is None:
            _warn_once(
                f"this program has {jax.process_count()} processes without jax.distributed.initialize(): "
                f"arguments, states and positions are not compared between them, and none hears of an "
                f"error in another. Call it before anything else of jax",
                stacklevel=4,
            )

    @contextmanager
    def on_arguments(self) -> Iterator[dict[str, Any]]:
        """Compares what processes were given: at the end of the block each waits until all are there.

        An error in the block is compared too: what one process alone refuses must not leave the others
        waiting. Yields a dict to fill with the values to compare, by name; JSON can hold each.

        Raises:
            ValueError, OtherProcessError, TimeoutError: on every process, as `Meeting.finish` describes.
            Exception: the block's own error, if it raised one in every process.
        """
        if self._meets:
            with self._met("TokenLoader()", "arguments for TokenLoader") as given:
                yield given
        else:
            with telling_of_errors("TokenLoader()"):  # whom it should meet is not known
                yield (given := {})
            if self.notes is not None and not self.members:
                self._tell_of_local_loader(given)

    @contextmanager
    def on_state(self) -> Iterator[dict[str, Any]]:
        """Compares states, as `on_arguments` does arguments."""
        self._leave()
        with self._met("set_state()", "states for set_state") as given:
            yield given
        self.tell_of_success()

    def begin_pass(self) -> None:
        """Has the next `next()` meet: the position is the beginning again, in all members alike."""
        self._leave()
        self.is_due = self._meets

    def on_position(self, cursor: Cursor) -> None:
        """Compares positions in next(). Called again after Ctrl-C it goes on waiting."""
        if self._meeting is None:
            given = {"step": cursor.step, "sample": cursor.sample}
            self._meeting = self._meeting_in("next()", "positions in next()", given)
        try:
            self._meeting.finish()
        except Exception:
            self._leave()
            raise
        self.is_due = False
        self._leave()

    def raise_due(self) -> None:
        """Raises OtherProcessError if another member has failed, or this process was given up."""
        if self.notes is not None and self.notes.due:
            self.notes.raise_due(self.members, self.local_key)

    def tell_of_failure(self, step: int, error: Exception) -> None:
        """Lets the other members know that next() has failed here."""
        if self._meets and self.notes is not None and self._note is None:
            way = self.notes.way
            with suppress(Exception):  # the error itself says more
                self._note = self.notes.write(
                    f"process {way.here} of {way.count} failed in next() at step {step}: "
                    f"{in_words(error)}\nBatches from that step on need it. Mend that, and call next() "
                    f"again in each process, which goes on from the same position; or end all, and begin "
                    f"again from a checkpoint"
                )

    def tell_of_success(self) -> None:
        """Withdraws the note of tell_of_failure, if there is one."""
        if self._note is not None and self.notes is not None:
            self.notes.withdraw(self._note)
            self._note = None

    @contextmanager
    def _met(self, call: str, what: str) -> Iterator[dict[str, Any]]:
        given: dict[str, Any] = {}
        if not self._meets:
            yield given
            return
        raised: Exception | None = None
        try:
            yield given
        except Exception as error:
            raised, given = error, {"error": in_words(error)}
        meeting = self._meeting_in(call, what, given)
        try:
            try:
                self._name = meeting.finish() or self._name
            except Exception as error:
                raise error from raised
            finally:
                meeting.leave()
            if raised is not None:
                raise raised
        finally:
            del raised  # the error holds this frame; without the cycle both are freed at once
        self.is_due = True

    def _leave(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.leave()

    def _meeting_in(self, call: str, what: str, given: dict[str, Any]) -> Meeting:
        assert self.notes is not None
        local_key = _local_key(given) if call == "TokenLoader()" and "error" not in given else None
        return Meeting(self.notes, self.members, self._name, call, what, given, local_key)

    def _tell_of_local_loader(self, given: dict[str, Any]) -> None:
        assert self.notes is not None
        way = self.notes.way
        self.local_key = _local_key(given)
        sharding = given["sharding"].partition(", order of devices")[0]
        way.put(
            f"places/{way.here}/{self.local_key}",
            f"made a TokenLoader of the same tokens, plan, batch_size and seq_len for itself, with "
            f"sharding={sharding}; expected the same sharding in every process",
        )
        _warn_once(
            f"this TokenLoader is on devices of process {way.here} of {way.count} alone: its batches are "
            f"not divided between processes: each that makes one of the same tokens and plan gets the same "
            f"samples. To give each process rows of one global batch, pass a sharding over the devices of "
            f'all: NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data")). '
            f"To give each batches of its own, divide the tokens by jax.process_index(): tokens.view()",
            stacklevel=6,
        )


def _local_key(given: dict[str, Any]) -> str:
    """Returns a name for a loader, also of one process, that draws the same batches."""
    same = [given[name] for name in ("tokens", "plan", "batch_size", "seq_len")]
    return f"local/{hashlib.blake2b(json.dumps(same).encode(), digest_size=8).hexdigest()}"


def _warn_once(text: str, *, stacklevel: int) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=stacklevel)
