"""What processes write to each other when something has failed. Here they are objects of one test."""

import pytest
from helpers import KeyValueStore, eventually

from tokenloader.loader import notes as notes_module
from tokenloader.loader.notes import Notes, OtherProcessError
from tokenloader.storage.coordination import Coordination


def processes(count):
    store = KeyValueStore()
    return [Notes(Coordination(store, here, count)) for here in range(count)]


def test_a_failure_is_due_at_the_second_look_and_raised_once_by_those_that_share_a_loader():
    zero, one, two = processes(3)
    one.write("process 1 of 3 failed")
    zero.look()
    zero.raise_due([0, 1])
    zero.look()
    zero.raise_due([0, 2])  # a loader without process 1
    with pytest.raises(OtherProcessError, match="process 1 of 3 failed"):
        zero.raise_due([0, 1])
    zero.look()
    zero.raise_due([0, 1])
    two.look()
    two.look()
    with pytest.raises(RuntimeError):
        two.raise_due([0, 1, 2])


def test_a_failure_that_was_mended_meanwhile_is_never_heard_of():
    zero, one = processes(2)
    name = one.write("process 1 of 2 failed")
    zero.look()
    one.withdraw(name)
    zero.look()
    zero.raise_due([0, 1])
    one.write("process 1 of 2 failed again")
    zero.look()
    zero.look()
    with pytest.raises(OtherProcessError, match="again"):
        zero.raise_due([0, 1])


def test_a_process_does_not_hear_of_itself():
    _, one = processes(2)
    one.write("process 1 of 2 failed")
    one.look()
    one.look()
    one.raise_due([0, 1])
    assert one.due == ()


def test_what_is_for_some_processes_is_due_at_once_and_for_them_alone():
    zero, one, two = processes(3)
    zero.write("given up", [2])
    one.look()
    one.raise_due([0, 1, 2])
    two.look()
    with pytest.raises(OtherProcessError, match="given up"):
        two.raise_due([])


def test_a_failure_that_no_next_has_raised_is_said_in_the_log_once(caplog):
    zero, one, two = processes(3)
    one.write("process 1 of 3 failed")
    for _ in range(20):
        zero.look()
        two.look()
        if two.due:
            with pytest.raises(OtherProcessError):
                two.raise_due([0, 1, 2])
    (message,) = caplog.messages
    assert message.startswith("process 1 of 3 failed\nThis process has called no next() since")


def test_the_thread_looks_by_itself_and_ends_when_it_is_stopped(monkeypatch):
    monkeypatch.setattr(notes_module, "LOOK_SECONDS", 0.01)
    zero, one = processes(2)
    zero.start()
    one.write("process 1 of 2 failed")
    assert eventually(lambda: zero.due)
    zero.stop()
    assert not zero.thread.is_alive()


def test_the_thread_ends_quietly_when_the_service_does(monkeypatch):
    monkeypatch.setattr(notes_module, "LOOK_SECONDS", 0.01)
    (zero,) = processes(1)
    zero.way.client.key_value_dir_get = None
    zero.start()
    assert eventually(lambda: not zero.thread.is_alive())
    zero.stop()
