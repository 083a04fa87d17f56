"""The way to other processes; tests/loader/test_processes.py goes it between real ones."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import KeyValueStore

import tokenloader as tl
from tokenloader.storage.coordination import Coordination, coordination, in_words


@pytest.fixture
def program(monkeypatch):
    """A program of three processes, of which this is number 1, without jax's own service."""
    store = KeyValueStore()
    state = SimpleNamespace(client=store, process_id=1, num_processes=3)
    bridge = SimpleNamespace(backends_are_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", SimpleNamespace(global_state=state))
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    return store, state, bridge


def test_a_program_of_one_process_has_no_others():
    assert coordination() is None


@pytest.mark.parametrize("lacking", [{"client": None}, {"num_processes": 1}])
def test_without_the_service_or_other_processes_there_is_no_way(program, lacking):
    vars(program[1]).update(lacking)
    assert coordination() is None


def test_processes_are_numbered_by_their_devices_once_jax_knows_these(program):
    store, _, bridge = program
    assert coordination() == Coordination(store, 1, 3)
    bridge.backends_are_initialized, bridge.process_index = lambda: True, lambda: 2
    assert coordination() == Coordination(store, 2, 3)


def test_values_are_stored_listed_waited_for_and_removed():
    way = Coordination(KeyValueStore(), 0, 2)
    way.put("a/1/x", {"b": [1, None, "\ud800"]})
    way.put("a/1/x", 5)
    way.put("a/12", "y")
    assert way.entries("a") == {"1/x": 5, "12": "y"}
    assert way.wait_for("a/12", 1) == "y"
    assert way.wait_for("a/13", 0) is None
    way.delete("a/1")
    assert way.entries("a") == {"12": "y"}
    way.client.blocking_key_value_get = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        way.wait_for("a/12", 1)


def test_the_others_can_read_of_an_open_that_failed_until_the_next(program, tmp_path):
    way = coordination()
    with pytest.raises(FileNotFoundError):
        tl.open_tokens(tmp_path / "absent.npy")
    (text,) = way.entries("places/1").values()
    assert text.startswith(f"open_tokens() raised FileNotFoundError: {tmp_path / 'absent.npy'}")
    tl.open_tokens(np.arange(5))
    assert way.entries("places") == {}


def test_an_error_in_words_is_short():
    assert in_words(KeyError()) == "KeyError"
    assert in_words(ValueError("no")) == "ValueError: no"
    assert len(in_words(ValueError("x" * 5000))) == 1003
