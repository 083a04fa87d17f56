"""The saved state: its round trip, and every way in which one can be refused."""

import collections
import dataclasses
import json
import re
import types

import numpy as np
import pytest

from tokenloader._state import VERSION, LoaderState, check_same_run, from_dict

STATE = LoaderState(
    step=7,
    sample=224,
    batch_size=32,
    since_step=0,
    seq_len=1024,
    plan="ShuffledEpochs(seed=0)",
    data="uint16:10248871837:0123456789abcdef",
)


def test_a_state_survives_json():
    assert from_dict(json.loads(json.dumps(STATE.to_dict()))) == STATE


def test_a_state_is_small_however_long_the_run():
    largest = dataclasses.replace(
        STATE,
        step=10**12,
        sample=10**15,
        batch_size=10**5,
        plan=f"ShuffledEpochs(seed={2**64 - 1})",
    )
    assert len(json.dumps(largest.to_dict())) < 250


def test_a_state_holds_plain_values_and_its_version():
    state = STATE.to_dict()
    assert state["version"] == VERSION == 1
    assert {type(value) for value in state.values()} == {int, str}


def test_from_dict_does_not_change_its_argument():
    state = STATE.to_dict()
    before = dict(state)
    from_dict(state)
    assert state == before


@pytest.mark.parametrize("kind", [types.MappingProxyType, collections.OrderedDict])
def test_any_mapping_is_read(kind):
    assert from_dict(kind(STATE.to_dict())) == STATE


@pytest.mark.parametrize("state", [None, 3, "state", [("step", 0)], STATE])
def test_what_is_no_mapping_is_a_type_error(state):
    with pytest.raises(TypeError, match=rf"state is of type {type(state).__name__}; needed is"):
        from_dict(state)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_an_error_that_names_both(version):
    with pytest.raises(
        ValueError, match=f"state has version {version}; this tokenloader reads version 1"
    ):
        from_dict({**STATE.to_dict(), "version": version})


def test_a_dict_without_version_is_an_error():
    with pytest.raises(ValueError, match="state has version None"):
        from_dict({})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LoaderState)])
def test_a_missing_field_is_an_error_that_shows_what_is_there_and_needed(field):
    state = STATE.to_dict()
    del state[field]
    with pytest.raises(ValueError, match="state has the fields") as caught:
        from_dict(state)
    needed = sorted(STATE.to_dict().keys() - {"version"})
    there = [name for name in needed if name != field]
    assert f"state has the fields {there}; needed are {needed}" in str(caught.value)


@pytest.mark.parametrize("key", ["epoch", 1])
def test_an_unknown_field_is_an_error_that_names_it(key):
    with pytest.raises(ValueError, match=r"state has the fields") as caught:
        from_dict({**STATE.to_dict(), key: 3})
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize("field", ["step", "sample", "batch_size", "seq_len"])
@pytest.mark.parametrize("value", [-1, 1.5, 7.0, "7", None])
def test_a_count_of_the_wrong_type_is_an_error_that_shows_it(field, value):
    with pytest.raises(
        ValueError, match=re.escape(f"state: {field} is {value!r}; needed is an integer")
    ):
        from_dict({**STATE.to_dict(), field: value})


@pytest.mark.parametrize("field", ["plan", "data"])
@pytest.mark.parametrize("value", [None, 5, ["uint16", 5, "0"]])
def test_a_name_of_the_wrong_type_is_a_value_error_that_names_the_field(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        check_same_run(from_dict({**STATE.to_dict(), field: value}), STATE)
    assert str(value) in str(caught.value)


def test_the_position_and_batch_size_may_differ():
    check_same_run(dataclasses.replace(STATE, step=0, sample=0, batch_size=1), STATE)


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        (
            {"plan": "RandomWindows(seed=1)"},
            "plan: saved RandomWindows(seed=1), here ShuffledEpochs(seed=0): "
            "the windows come in another order",
        ),
        ({"seq_len": 512}, "seq_len: saved 512, here 1024: the windows are cut elsewhere"),
        (
            {"data": "uint32:10248871837:0123456789abcdef"},
            "data: saved uint32:10248871837:0123456789abcdef, "
            "here uint16:10248871837:0123456789abcdef: the dtype differ",
        ),
        (
            {"data": "uint16:5:0123456789abcdef"},
            "data: saved uint16:5:0123456789abcdef, "
            "here uint16:10248871837:0123456789abcdef: the number of tokens differ",
        ),
        (
            {"data": "uint16:10248871837:ff"},
            "data: saved uint16:10248871837:ff, "
            "here uint16:10248871837:0123456789abcdef: the tokens themselves differ",
        ),
        (
            {"data": "uint8:5:0123456789abcdef"},
            "data: saved uint8:5:0123456789abcdef, here uint16:10248871837:0123456789abcdef: "
            "the dtype and the number of tokens differ",
        ),
    ],
)
def test_each_difference_is_named_with_both_values_and_what_it_means(difference, line):
    with pytest.raises(ValueError, match="this state is of another run") as caught:
        check_same_run(dataclasses.replace(STATE, **difference), STATE)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[1].strip() == line
    assert "begin anew without set_state" in lines[2]


def test_all_differences_are_listed_at_once():
    other = LoaderState(1, 1, 1, 0, seq_len=8, plan="p", data="uint8:1:0")
    with pytest.raises(ValueError, match="another run") as caught:
        check_same_run(other, STATE)
    fields = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]]
    assert fields == ["plan", "seq_len", "data"]


def test_the_integers_of_numpy_are_integers_and_a_batch_of_none_is_not():
    state = LoaderState(3, 12, 4, 0, 9, "plan", "data")
    fields = {k: np.int64(v) if isinstance(v, int) else v for k, v in state.to_dict().items()}
    read = from_dict(fields | {"version": 1})
    assert read == state
    assert json.dumps(read.to_dict()) == json.dumps(state.to_dict())
    with pytest.raises(ValueError, match="batch_size is 0; needed is an integer of 1 or more"):
        from_dict(state.to_dict() | {"batch_size": 0})
