"""Meetings of processes that are threads here; test_failing_processes.py has real ones."""

import itertools
import logging
import threading

import pytest
from helpers import KeyValueStore, eventually, interrupted

from tokenloader.loader import meetings
from tokenloader.loader.meetings import Meeting, differences_in_words
from tokenloader.loader.notes import Notes, OtherProcessError
from tokenloader.storage.coordination import Coordination


class Program:
    """Processes that share a store."""

    def __init__(self, count):
        self.store = KeyValueStore()
        self.notes = [Notes(Coordination(self.store, here, count)) for here in range(count)]

    def meeting(self, here, given=None, *, members=None, subject="", call="set_state()", local_key=None):
        members = range(len(self.notes)) if members is None else members
        given = {"step": 0} if given is None else given
        return Meeting(self.notes[here], members, subject, call, "states", given, local_key)

    def put(self, process, kind, value):
        self.notes[0].way.put(f"places/{process}/{kind}", value)

    def outcomes(self, meetings):
        """What each meeting's finish() returned, or the error that it raised."""
        found = [None] * len(meetings)

        def finish(i):
            try:
                found[i] = meetings[i].finish()
            except Exception as error:
                found[i] = error
            meetings[i].leave()

        threads = [threading.Thread(target=finish, args=(i,), daemon=True) for i in range(len(meetings))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(meetings, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(meetings, "GIVE_UP_SECONDS", 5.0)


@pytest.mark.parametrize("count", [2, 3, 8, 50])
def test_members_with_equal_values_go_on_with_one_name_and_leave_nothing_behind(count):
    program = Program(count)
    names = set()
    for _ in range(3):
        found = program.outcomes([program.meeting(here) for here in range(count)])
        assert len(set(found)) == 1
        names.add(found[0])
        assert program.store.values == {}
    assert len(names) == 3
    assert all(isinstance(name, str) for name in names)


def test_a_value_that_differs_is_an_error_on_all_that_says_who_has_what():
    program = Program(4)
    found = program.outcomes([program.meeting(here, {"step": here // 2, "b": 1}) for here in range(4)])
    assert {type(error) for error in found} == {ValueError}
    assert {str(error) for error in found} == {
        "the processes of this run have different states:\n  step: 0 on processes 0, 1; 1 on processes 2, 3"
    }


def test_an_error_of_one_is_an_error_on_all_and_an_error_of_all_is_left_to_each():
    program = Program(3)
    given = [{"step": 1}, {"error": "TypeError: no state"}, {"step": 2}]
    found = program.outcomes([program.meeting(here, given[here]) for here in range(3)])
    assert {str(error) for error in found} == {
        "the processes of this run have different states:\n"
        "  error: none on processes 0, 2; TypeError: no state on process 1"
    }
    given = [{"error": "a"}, {"error": "b"}, {"error": "c"}]
    assert program.outcomes([program.meeting(here, given[here]) for here in range(3)]) == [None] * 3


def test_some_of_the_processes_meet_without_the_others():
    program = Program(5)
    found = program.outcomes([program.meeting(here, members=[1, 2, 4]) for here in (1, 2, 4)])
    assert len(set(found)) == 1
    assert isinstance(found[0], str)


def test_members_in_different_calls_of_one_loader_are_an_error_on_all_at_once():
    program = Program(3)
    calls = ["set_state()", "next()", "set_state()"]
    found = program.outcomes([program.meeting(here, subject="a", call=calls[here]) for here in range(3)])
    for error in found:
        assert type(error) is ValueError
        assert "set_state() on processes 0, 2; next() on process 1\nEvery process" in str(error)


def test_members_that_wait_for_each_other_in_calls_of_different_loaders_are_an_error_on_all():
    program = Program(4)
    found = program.outcomes(
        [
            program.meeting(0, subject="a", call="next()"),
            program.meeting(1, subject="a", call="next()"),
            program.meeting(2, call="TokenLoader()"),
            program.meeting(3, members=[2, 3], call="TokenLoader()"),
        ]
    )
    for error in found:
        assert type(error) is ValueError
        assert (
            "next() of processes 0, 1, 2, 3 on processes 0, 1; TokenLoader() of processes 0, 1, 2, 3 on "
            "process 2; TokenLoader() of processes 2, 3 on process 3"
        ) in str(error)


def test_a_member_that_waits_for_others_first_is_waited_for():
    program = Program(3)
    late = threading.Timer(0.5, lambda: program.outcomes([program.meeting(2, members=[1, 2])]))
    late.start()
    first = program.meeting(1, members=[1, 2])
    waiting = threading.Thread(target=lambda: outcomes.extend(program.outcomes([program.meeting(0)])))
    outcomes = []
    waiting.start()
    assert isinstance(first.finish(), str)
    assert outcomes == []
    found = program.outcomes([program.meeting(here) for here in (1, 2)])
    waiting.join(5)
    assert set(found) == set(outcomes)
    late.join()


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (
            "OSError: a.bin: none",
            "process 1 of 3 ended by OSError: a.bin: none, before its set_state()",
        ),
        ("", "process 1 of 3 ended, before its set_state(); open_tokens() raised OSError: b.bin"),
    ],
)
def test_a_member_that_has_ended_is_named_with_its_error(ended, words):
    program = Program(3)
    program.put(1, "failed/open_tokens()", "open_tokens() raised OSError: b.bin")
    program.put(1, "ended", ended)
    found = program.outcomes([program.meeting(here) for here in (0, 2)])
    for error in found:
        assert type(error) is OtherProcessError
        assert words in str(error)
        assert "begin again in all processes" in str(error)


def test_a_member_that_failed_before_is_named_once_it_has_not_come_for_a_while_and_told_itself():
    program = Program(3)
    program.put(1, "failed/TokenLoader()", "TokenLoader() raised TypeError: sharding")
    found = program.outcomes([program.meeting(here) for here in (0, 2)])
    for error in found:
        assert type(error) is OtherProcessError
        assert "on process 1 of 3, TokenLoader() raised TypeError: sharding; it has not" in str(error)
    program.notes[1].look()
    with pytest.raises(OtherProcessError, match=r"^processes 0, 2 waited in set_state\(\) in vain: on"):
        program.notes[1].raise_due([])


def test_a_member_that_failed_before_and_comes_is_met():
    program = Program(2)
    program.put(1, "failed/TokenLoader()", "TokenLoader() raised OSError: once")
    assert len(set(program.outcomes([program.meeting(here) for here in (0, 1)]))) == 1


def test_a_member_that_cannot_open_tokens_is_named_in_the_log_and_waited_for(caplog):
    program = Program(2)
    program.put(1, "failed/open_tokens()", "open_tokens() raised FileNotFoundError: a.bin")
    late = threading.Timer(0.5, lambda: program.outcomes([program.meeting(1)]))
    late.start()
    with caplog.at_level(logging.WARNING, logger="tokenloader"):
        (found,) = program.outcomes([program.meeting(0)])
    assert isinstance(found, str)
    (message,) = caplog.messages
    assert "in set_state() for process 1" in message
    assert "\nOn process 1, open_tokens() raised FileNotFoundError: a.bin\n" in message


def alone(program, process):
    """Has a process made a loader for itself, of which others make one together."""
    program.put(process, "local/x", "made a TokenLoader for itself")
    return lambda: eventually(lambda: program.notes[process].look() or program.notes[process].due)


def test_a_member_that_uses_the_same_loader_for_itself_is_an_error_on_all():
    program = Program(3)
    is_warned = alone(program, 1)
    told = []

    def use():
        assert is_warned()
        program.notes[1].raise_due([], "local/other")  # of which nobody waits for it
        with pytest.raises(OtherProcessError) as caught:
            program.notes[1].raise_due([], "local/x")
        told.append(str(caught.value))
        program.notes[1].raise_due([], "local/x")
        program.notes[0].look(), program.notes[2].look()

    user = threading.Thread(target=use)
    user.start()
    found = program.outcomes([program.meeting(here, local_key="local/x") for here in (0, 2)])
    user.join()
    for error in found:
        assert type(error) is OtherProcessError
        assert "waited in set_state() in vain: process 1 of 3 made a TokenLoader for itself" in str(error)
        assert told == [str(error)]


def test_a_member_that_made_the_same_loader_for_itself_and_is_slow_is_waited_for():
    program = Program(3)
    is_warned = alone(program, 1)
    found = []

    def come():
        assert is_warned()
        found.extend(program.outcomes([program.meeting(1, local_key="local/x")]))
        program.notes[1].raise_due([], "local/x")  # as it was at the last look, withdrawn since

    late = threading.Thread(target=come)
    late.start()
    found += program.outcomes([program.meeting(here, local_key="local/x") for here in (0, 2)])
    late.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert isinstance(found[0], str)


def test_a_missing_member_is_named_in_the_log_and_given_up_in_the_end(monkeypatch, caplog):
    monkeypatch.setattr(meetings, "LOG_SECONDS", 0.1)
    monkeypatch.setattr(meetings, "GIVE_UP_SECONDS", 1.5)
    program = Program(4)
    with caplog.at_level(logging.WARNING, logger="tokenloader"):
        found = program.outcomes([program.meeting(here) for here in (0, 1)])
    assert len(caplog.messages) == 2
    assert all("s in set_state() for processes 2, 3" in message for message in caplog.messages)
    for error in found:
        assert type(error) is TimeoutError
        assert "s in set_state() for processes 2, 3, which have not called it" in str(error)
    program.notes[3].look()
    with pytest.raises(OtherProcessError, match=r"processes 0, 1 waited in set_state\(\) in vain"):
        program.notes[3].raise_due([])


def test_a_member_whose_next_has_failed_is_heard_of_while_it_is_waited_for():
    program = Program(2)
    program.notes[1].write("process 1 of 2 failed")
    program.notes[0].look()
    program.notes[0].look()
    (error,) = program.outcomes([program.meeting(0)])
    assert (type(error), str(error)) == (OtherProcessError, "process 1 of 2 failed")


@pytest.mark.parametrize("here", [0, 1])
def test_a_member_interrupted_anywhere_finds_the_verdict_when_it_finishes_again(here):
    for point in itertools.count():
        program = Program(2)
        meeting, outcomes = program.meeting(here), []
        other = threading.Thread(
            target=lambda program=program, outcomes=outcomes: outcomes.extend(
                program.outcomes([program.meeting(1 - here)])
            )
        )
        other.start()
        if here:  # so that the verdict is there, and one run is as long as the next
            assert eventually(lambda program=program: any("/in/" in key for key in program.store.values))
        was_interrupted = interrupted(meeting.finish, point * 7)
        name = meeting.finish()
        other.join(5)
        assert outcomes == [name]
        if not was_interrupted:
            break
    assert point > 10


def test_a_member_that_was_interrupted_and_leaves_is_waited_for_until_it_comes_again():
    program = Program(2)
    left = program.meeting(1, {"step": 1})
    assert interrupted(left.finish, 100)
    left.leave()
    found = program.outcomes([program.meeting(here) for here in (0, 1)])
    assert len(set(found)) == 1
    assert isinstance(found[0], str)


def test_the_calls_of_the_service_grow_with_the_members_and_not_with_their_square():
    calls = {}
    for count in (4, 40):
        program = Program(count)
        numbers = itertools.count()

        def counted(call, numbers=numbers):
            return lambda *args, **kwargs: (next(numbers), call(*args, **kwargs))[1]

        for name in ("key_value_set", "key_value_delete", "key_value_dir_get"):
            setattr(program.store, name, counted(getattr(program.store, name)))
        program.outcomes([program.meeting(here) for here in range(count)])
        calls[count] = next(numbers)
    assert calls[40] < 15 * calls[4]


def test_each_field_that_differs_has_a_line_with_who_has_what():
    described = {
        0: {"a": 1, "b": "x", "c": None},
        1: {"a": 2, "b": "x", "c": None},
        5: {"a": 1, "b": "y", "c": None},
    }
    assert differences_in_words(described, "arguments") == (
        "the processes of this run have different arguments:\n"
        "  a: 1 on processes 0, 5; 2 on process 1\n"
        "  b: x on processes 0, 1; y on process 5"
    )


def test_of_many_processes_the_first_are_named():
    described = {process: {"a": process != 50} for process in range(100)}
    assert differences_in_words(described, "states").splitlines()[1] == (
        "  a: True on processes 0, 1, 2, 3, 4, 5, 6, 7, ...; False on process 50"
    )


def test_where_one_has_failed_its_error_is_what_differs():
    described = {0: {"a": 1}, 1: {"error": "ValueError: too short"}, 2: {"a": 2}}
    assert differences_in_words(described, "arguments").splitlines()[1:] == [
        "  error: none on processes 0, 2; ValueError: too short on process 1"
    ]


def test_what_a_process_was_told_is_raised_before_the_end_of_another_that_was_told_it_too():
    program = Program(3)
    program.notes[1].write("process 1 made a loader of its own", [0, 2])
    program.put(2, "ended", "")  # it has read that already; process 0 has not looked for notes yet
    (error,) = program.outcomes([program.meeting(0)])
    assert type(error) is OtherProcessError
    assert str(error) == "process 1 made a loader of its own"
