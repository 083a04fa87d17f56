"""Meetings: calls that the processes of a loader make together, each waiting until all are there.

Every member stores its place: which call it is in, and a hash of its arguments. The lowest member that is
there compares, once all are there, and stores a verdict for each: some six calls of the service for a
member. Meanwhile that member looks for what keeps the missing ones: they have ended; or failed in making a
loader; or made loaders of their own instead, of which they are warned; or wait in another call for a
process that waits. One that has failed in opening tokens may be fetching them: that is said in the log.

A member that is interrupted keeps its place: `finish` again goes on waiting, or finds the verdict.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from tokenloader.loader.notes import Notes, OtherProcessError
from tokenloader.loader.sharding import processes_in_words

# When to say who is missing, and when to give up.
LOG_SECONDS, GIVE_UP_SECONDS = 60.0, 600.0
# For so long what seems to keep a missing process may be something that it does before it comes.
PATIENCE_SECONDS = 10.0
_SLICE_SECONDS = 0.5  # between two looks at notes; Ctrl-C waits as long
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.001, 0.05  # of the lowest member, between looks

_ORDER = (
    "Every process of a sharding makes the same loaders, and calls set_state() and the first next() after "
    "it in the same order; is there a checkpoint, or a file, that some of them do not find?"
)
_MEND = "Mend that, and begin again in all processes"
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, OtherProcessError, TimeoutError)
}
_logger = logging.getLogger("tokenloader")
_serials = count()


_Place = dict[str, Any]  # of a process in a meeting, as it is stored; see Meeting.__init__
_Decision = tuple[dict[str, Any], dict[int, _Place]]  # a verdict, and whom it is for: places by process


class Places(NamedTuple):
    """The places of processes, as one look at the store finds them."""

    meeting: dict[int, _Place]  # by process: the place of each that waits in a meeting, the newest
    there: dict[int, _Place]  # by process: the places in one meeting
    other: dict[int, dict[str, Any]]  # by process: "ended", "failed" and "local/HASH" of each


class Meeting:
    """One process's part in a meeting.

    Args:
        notes: of this process.
        members: the processes that meet, ascending.
        subject: a name of what they meet about, equal in all: that of a loader, or "" before it has one.
        call: what this process calls, as in "set_state()".
        what: what it gives to the call, for the error where that differs.
        given: the same, by name, as JSON can hold it; {"error": text} where the call has failed already.
        local_key: what `places` would call a loader of one process alone that was given the same; or None.
    """

    def __init__(
        self,
        notes: Notes,
        members: Sequence[int],
        subject: str,
        call: str,
        what: str,
        given: dict[str, Any],
        local_key: str | None = None,
    ) -> None:
        self._notes, self._way, self._members = notes, notes.way, list(members)
        self._what, self._given, self._local_key = what, given, local_key
        self._serial = next(_serials)
        text = json.dumps(given, sort_keys=True).encode()
        self._place = {
            "serial": self._serial,
            "members": None if len(self._members) == self._way.count else self._members,  # None: all
            "subject": subject,
            "call": call,
            "hash": hashlib.blake2b(text, digest_size=16).hexdigest(),
            "failed": "error" in given,
        }
        self._is_there = False
        self._decided: _Decision | None = None
        self._verdict: dict[str, Any] | None = None
        self._suspected: dict[str, float] = {}  # when each reason that keeps others was first found

    def finish(self) -> str | None:
        """Waits for all members; returns a name for the meeting, equal in all. None: all have failed.

        Raises:
            ValueError: on every member, if one was given something else, or is in another call.
            OtherProcessError: a missing member has ended or failed.
            TimeoutError: a member is missing after GIVE_UP_SECONDS.
        """
        if not self._is_there:
            if self._local_key is not None:
                self._notes.heed(self._local_key)
            self._way.put(self._name("given"), self._given)
            self._way.put(self._name("places", "in/"), self._place)
            self._is_there = True
        verdict = self._verdict = self._verdict or self._wait()
        if verdict["error"] is not None:
            raise _ERRORS[verdict["error"]](verdict["text"])
        name: str | None = verdict["text"]
        return name

    def leave(self) -> None:
        """Gives up the place, after the meeting or before its end."""
        self._way.delete(self._name("places", "in/"))
        self._way.delete(self._name("given"))
        self._way.delete(self._name("verdicts"))

    def _wait(self) -> dict[str, Any]:
        here, pause, logged = self._way.here, _FIRST_PAUSE_SECONDS, False
        missing: list[int] = []
        began = time.monotonic()
        interval = 1.0 + len(self._members) / 50
        look_at = began if here == self._members[0] else began + interval
        while True:
            self._send_verdicts()
            if self._decided is not None:
                return self._decided[0]
            self._notes.raise_due(missing)
            now = time.monotonic()
            if now >= look_at:
                places = self._look()
                missing = [member for member in self._members if member not in places.there]
                failed = any(_failures(places.other.get(member, {})) for member in missing)
                if not logged and missing and now - began >= (PATIENCE_SECONDS if failed else LOG_SECONDS):
                    logged = True
                    _logger.warning("%s", self._absence(places, missing, now - began))
                is_lowest = here == min(places.there, default=-1)
                if is_lowest and (decided := self._judge(places, missing, now - began)):
                    self._decided = decided
                    continue
                look_at = now + (pause if is_lowest else interval)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
            seconds = min(_SLICE_SECONDS, look_at - time.monotonic())
            if (found := self._way.wait_for(self._name("verdicts"), seconds)) is not None:
                return dict(found)

    def _look(self) -> Places:
        places = Places({}, {}, {})
        for name, value in self._way.entries("places").items():
            process, kind = name.split("/", 1)
            if not kind.startswith("in/"):
                places.other.setdefault(int(process), {})[kind] = value
                continue
            for found in (places.meeting, places.there) if _same(value, self._place) else (places.meeting,):
                if value["serial"] >= found.get(int(process), value)["serial"]:
                    found[int(process)] = value
        return places

    def _judge(self, places: Places, missing: list[int], waited: float) -> _Decision | None:
        """Returns the verdict, once there is one."""
        if not missing:
            return self._compare(places.there), places.there
        stuck = _stuck(places.meeting, self._way.count)
        if found := self._reason(places, missing, stuck):
            self._notes.look()  # who has ended may have said why, to this process too
            self._notes.raise_due(missing)
            error, reason = found
            text = f"{reason}\n{_MEND if error is OtherProcessError else _ORDER}"
        elif waited >= GIVE_UP_SECONDS:
            error, text = TimeoutError, self._absence(places, missing, waited)
        else:
            return None
        told = places.there | (stuck if stuck.keys() & missing else {})
        ended = {process for process, other in places.other.items() if "ended" in other}
        if untold := sorted(set(missing) - told.keys() - ended):
            self._notes.write(f"{self._in_vain(places)}: {text}", untold)
        return {"error": error.__name__, "text": text}, told

    def _compare(self, there: dict[int, _Place]) -> dict[str, Any]:
        calls = {process: place["call"] for process, place in there.items()}
        if len(set(calls.values())) > 1:
            return {"error": "ValueError", "text": f"{_in_different_calls(calls)}\n{_ORDER}"}
        if all(place["failed"] for place in there.values()):
            return {"error": None, "text": None}
        hashes = {process: place["hash"] for process, place in there.items()}
        if len(set(hashes.values())) == 1:
            return {"error": None, "text": f"{self._way.here}-{self._serial}"}
        given: dict[str, dict[str, Any]] = {}  # by hash: of those that have one, it is asked of the first
        for process, place in there.items():
            if place["hash"] not in given:
                name = f"given/{process}/{place['serial']}"
                given[place["hash"]] = self._way.wait_for(name, _SLICE_SECONDS) or {"error": "it has left"}
        described = {process: given[hashed] for process, hashed in sorted(hashes.items())}
        return {"error": "ValueError", "text": differences_in_words(described, self._what)}

    def _reason(
        self, places: Places, missing: list[int], stuck: dict[int, _Place]
    ) -> tuple[type[Exception], str] | None:
        """Returns the error, and why a missing member will not come, once that is certain."""
        found: list[tuple[type[Exception], str]] = []
        suspects: dict[int, str] = {}  # by process: of which loader it must be warned
        own = places.other.get(self._way.here, {})
        for member in missing:
            other, where = places.other.get(member, {}), f"process {member} of {self._way.count}"
            if "ended" in other:
                how = f" by {other['ended']}" if other["ended"] else ""
                reasons = [*_failures(other), *filter(None, [other.get(str(self._local_key))])]
                why = "" if how else "".join(f"; {reason}" for reason in reasons)
                return OtherProcessError, f"{where} ended{how}, before its {self._place['call']}{why}"
            if "failed/TokenLoader()" in other:
                reason = f"on {where}, {other['failed/TokenLoader()']}; it has not come since"
                found.append((OtherProcessError, reason))
            if self._local_key in other and self._local_key not in own:
                suspects[member] = f"{where} {other[str(self._local_key)]}"
            if member in stuck:
                calls = {
                    process: f"{place['call']} of {processes_in_words(_members(place, self._way.count))}"
                    for process, place in stuck.items()
                }
                found.append((ValueError, _in_different_calls(calls)))
        now = time.monotonic()
        for error, reason in found:
            if now - self._suspected.setdefault(reason, now) >= PATIENCE_SECONDS:
                return error, reason
        for member, reason in suspects.items():
            since = self._suspected.setdefault(reason, now)
            if now - since >= PATIENCE_SECONDS:
                self._suspected[reason] = math.inf  # once is enough
                waiting = [process for process in self._members if process != member]
                text = f"{self._in_vain(places)}: {reason}\n{_ORDER}"
                self._notes.warn(member, str(self._local_key), text, waiting)
        return None

    def _in_vain(self, places: Places) -> str:
        return f"{processes_in_words(sorted(places.there))} waited in {self._place['call']} in vain"

    def _absence(self, places: Places, missing: list[int], waited: float) -> str:
        who, call = processes_in_words(missing), self._place["call"]
        have = "has" if len(missing) == 1 else "have"
        failures = "".join(
            f"\nOn process {member}, {text}"
            for member in missing
            for text in _failures(places.other.get(member, {}))
        )
        return (
            f"process {self._way.here} of {self._way.count} has waited {waited:.0f} s in {call} for {who}, "
            f"which {have} not called it: slow, stuck, or on another way?{failures}\n{_ORDER}"
        )

    def _send_verdicts(self) -> None:
        """Stores the verdict for each member that is there. Idempotent: Ctrl-C may come in between."""
        if self._decided is not None:
            verdict, told = self._decided
            for process, place in told.items():
                self._way.delete(f"places/{process}/in/{place['serial']}")
            for process, place in told.items():
                if process != self._way.here:
                    self._way.put(f"verdicts/{process}/{place['serial']}", verdict)

    def _name(self, folder: str, kind: str = "") -> str:
        return f"{folder}/{self._way.here}/{kind}{self._serial}"


def differences_in_words(described: dict[int, dict[str, Any]], what: str) -> str:
    """Returns the error's text: for each name that differs, which processes have which value."""
    failed = any("error" in given for given in described.values())
    names = ["error"] if failed else next(iter(described.values()))
    lines = []
    for name in names:
        values = {process: str(given.get(name, "none")) for process, given in described.items()}
        if len(set(values.values())) > 1:
            lines.append(f"  {name}: {_holders(values)}")
    return f"the processes of this run have different {what}:\n" + "\n".join(lines)


def _failures(other: dict[str, Any]) -> list[str]:
    """Returns what a process has failed in, and has not tried again since."""
    return [text for kind, text in other.items() if kind.startswith("failed/")]


def _in_different_calls(calls: dict[int, str]) -> str:
    return f"the processes of this run are in different calls, and wait for each other: {_holders(calls)}"


def _holders(values: dict[int, str]) -> str:
    holders: dict[str, list[int]] = {}
    for process, value in sorted(values.items()):
        holders.setdefault(value, []).append(process)
    return "; ".join(f"{value} on {processes_in_words(found)}" for value, found in holders.items())


def _stuck(meeting: dict[int, _Place], count: int) -> dict[int, _Place]:
    """Returns the places of all that wait, of `count` processes, for one that waits for them in turn."""
    free = set(range(count)) - meeting.keys()  # may come; so may whoever waits for such alone
    while more := {
        process
        for process, place in meeting.items()
        if process not in free
        and all(member in free or _same(meeting[member], place) for member in _members(place, count))
    }:
        free |= more
    return {process: place for process, place in meeting.items() if process not in free}


def _same(place: _Place, other: _Place) -> bool:
    """Whether two places are in one meeting."""
    return all(place[part] == other[part] for part in ("members", "subject"))


def _members(place: _Place, count: int) -> list[int]:
    return list(range(count)) if place["members"] is None else place["members"]
