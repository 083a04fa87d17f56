"""The saved state: its round trip, and every way in which one can be refused."""

import collections
import dataclasses
import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from tokenloader import Mixture, RandomWindows, ShuffledEpochs
from tokenloader.plans.cursor import MAX_CHANGES, BatchSizeSchedule, Cursor, Stretch, probe
from tokenloader.plans.state import VERSION, RunState, differences, from_dict

NUM_TOKENS, DATA = 10_248_871_837, "uint16:10248871837:0123456789abcdef"
PLAN = ShuffledEpochs(seed=0).bind(NUM_TOKENS, 1024)
STATE = RunState.of_run(Cursor.at(PLAN, BatchSizeSchedule.constant(32), 7), seq_len=1024, data=DATA)
CHANGED = dataclasses.replace(STATE, schedule=BatchSizeSchedule((Stretch(0, 0, 20), Stretch(4, 80, 48))))


@pytest.mark.parametrize("state", [STATE, CHANGED])
def test_a_state_survives_json(state):
    assert from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_a_state_is_small_however_long_the_run():
    largest = dataclasses.replace(
        STATE,
        step=10**12,
        sample=10**17,
        schedule=BatchSizeSchedule.constant(10**5),
        plan=f"ShuffledEpochs(seed={2**64 - 1})",
    )
    assert len(json.dumps(largest.to_dict())) < 280


def test_a_state_holds_plain_values_and_its_version():
    assert CHANGED.to_dict() == {
        "version": 2,
        "step": 7,
        "sample": 224,
        "batch_sizes": "0:0:20 4:80:48",
        "seq_len": 1024,
        "plan": "ShuffledEpochs(seed=0)",
        "probe": probe(PLAN, 224),
        "data": DATA,
    }
    assert CHANGED.to_dict()["version"] == VERSION


@pytest.mark.parametrize(
    "changed", [np.asarray, np.int64, jnp.asarray], ids=["arrays", "numpy integers", "jax arrays"]
)
def test_what_checkpointers_make_of_integers_is_read(changed):
    state = {k: v if isinstance(v, str) else changed(v) for k, v in CHANGED.to_dict().items()}
    read = from_dict(state)
    assert read == CHANGED
    assert json.dumps(read.to_dict()) == json.dumps(CHANGED.to_dict())


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
    with pytest.raises(TypeError, match=rf"state is of type {type(state).__name__}; expected"):
        from_dict(state)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None, True, [2, 2]])
def test_another_version_is_an_error_that_names_both(version):
    with pytest.raises(
        ValueError, match=re.escape(f"state has version {version!r}; this tokenloader reads version 2")
    ):
        from_dict({**STATE.to_dict(), "version": version})


def test_a_dict_without_version_is_an_error():
    with pytest.raises(ValueError, match="state has version None"):
        from_dict({})


@pytest.mark.parametrize("field", sorted(STATE.to_dict().keys() - {"version"}))
def test_a_missing_field_is_an_error_that_shows_what_is_there_and_needed(field):
    state = STATE.to_dict()
    del state[field]
    with pytest.raises(ValueError, match="state has the fields") as caught:
        from_dict(state)
    expected = sorted(STATE.to_dict().keys() - {"version"})
    there = [name for name in expected if name != field]
    assert f"state has the fields {there}; expected {expected}" in str(caught.value)


@pytest.mark.parametrize("key", ["epoch", 1])
def test_an_unknown_field_is_an_error_that_names_it(key):
    with pytest.raises(ValueError, match=r"state has the fields") as caught:
        from_dict({**STATE.to_dict(), key: 3})
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize(("field", "least"), [("step", 0), ("sample", 0), ("seq_len", 1)])
@pytest.mark.parametrize("value", [-1, 1.5, 7.0, "7", None, True, 2**62, 10**30, [7], np.float32(7)])
def test_a_count_of_the_wrong_type_or_size_is_an_error_that_shows_it(field, least, value):
    message = f"state: {field} is {value!r}; expected an integer of {least} or more, below 2**62"
    with pytest.raises(ValueError, match=re.escape(message)):
        from_dict({**STATE.to_dict(), field: value})


@pytest.mark.parametrize(
    "value",
    [
        "",
        "32",
        "0:32",
        "0:0:32:1",
        "0:0:32.0",
        "0:0:a",
        "0:0:0",
        "0:0:-1",
        f"0:0:{2**62}",
        "0:0:+32",
        "-1:-1:5",
        "0:0:3_2",
        "0:0:32 5:160:32",
        "1:0:32",
        "0:5:32",
        "0:0:32 0:0:16",
        "0:0:32 4:128:32",
        "0:0:32 5:160:16 3:96:64",
        "0:0:32 5:161:16",
        "0:0:32, 5:160:16",
        "0:0:32  5:160:16",
    ],
)
def test_batch_sizes_of_the_wrong_form_are_an_error_that_shows_them(value):
    message = f"state: batch_sizes is {value!r}; expected STEP:SAMPLE:BATCH_SIZE for each change"
    with pytest.raises(ValueError, match=re.escape(message)):
        from_dict({**STATE.to_dict(), "batch_sizes": value})


def test_a_sample_that_contradicts_the_batch_sizes_is_an_error_that_shows_both():
    message = "state: sample is 225, and 7 steps of these batch_sizes are 224 samples"
    with pytest.raises(ValueError, match=message):
        from_dict({**CHANGED.to_dict(), "sample": 225})


def test_batch_sizes_that_go_on_past_the_step_are_an_error_that_shows_both():
    with pytest.raises(ValueError, match="batch_sizes goes on to step 4, and step is 3"):
        from_dict({**CHANGED.to_dict(), "step": 3, "sample": 60})


@pytest.mark.parametrize("field", ["plan", "probe", "data", "batch_sizes"])
@pytest.mark.parametrize("value", [None, 5, ["uint16", 5, "0"]])
def test_a_name_of_the_wrong_type_is_an_error_that_shows_it(field, value):
    message = f"state: {field} is {value!r}; expected a string"
    with pytest.raises(ValueError, match=re.escape(message)):
        from_dict({**STATE.to_dict(), field: value})


def test_the_position_and_batch_sizes_may_differ():
    moved = dataclasses.replace(CHANGED, step=5, sample=128, probe=probe(PLAN, 128))
    assert differences(moved, PLAN, seq_len=1024, data=DATA) == []


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        (
            {"plan": "RandomWindows(seed=1)"},
            "plan: saved RandomWindows(seed=1), here ShuffledEpochs(seed=0): the windows come in another "
            "order, so some would be trained on a second time, and others not at all",
        ),
        (
            {"seq_len": 512},
            "seq_len: saved 512, here 1024: the windows are cut elsewhere; the run would go on after "
            "229,376 inputs, and has seen 114,688",
        ),
        (
            {"data": "uint32:10248871837:0123456789abcdef"},
            "data: saved uint32:10248871837:0123456789abcdef, here uint16:10248871837:0123456789abcdef: "
            "another dtype, so the same windows hold other tokens",
        ),
        (
            {"data": "uint16:5:0123456789abcdef"},
            "data: saved uint16:5:0123456789abcdef, here uint16:10248871837:0123456789abcdef: "
            "another number of tokens, so the same sample numbers are windows at other places",
        ),
        (
            {"data": "uint16:10248871837:ff"},
            "data: saved uint16:10248871837:ff, here uint16:10248871837:0123456789abcdef: "
            "other contents, so the same windows hold other tokens",
        ),
        (
            {"data": "uint8:5:0123456789abcdef"},
            "data: saved uint8:5:0123456789abcdef, here uint16:10248871837:0123456789abcdef: another dtype "
            "and another number of tokens, so the same sample numbers are windows at other places",
        ),
        (
            {"data": "my own"},
            "data: saved my own, here uint16:10248871837:0123456789abcdef: another dtype, so the same "
            "windows hold other tokens",
        ),
        (
            {"data": "uint16"},
            "data: saved uint16, here uint16:10248871837:0123456789abcdef: other contents, so the same "
            "windows hold other tokens",
        ),
    ],
)
def test_each_difference_is_named_with_both_values_and_what_it_means(difference, line):
    saved = dataclasses.replace(STATE, **difference)
    assert differences(saved, PLAN, seq_len=1024, data=DATA) == [line]


def test_all_differences_are_listed_at_once():
    saved = dataclasses.replace(STATE, seq_len=8, plan="p", data="uint8:1:0")
    found = differences(saved, PLAN, seq_len=1024, data=DATA)
    assert [line.split(":")[0] for line in found] == ["plan", "seq_len", "data"]


def test_a_plan_of_the_same_key_that_draws_other_windows_is_found_by_the_probe():
    class Rewritten(type(PLAN)):
        def window_starts(self, samples):
            return super().window_starts(samples) // 2

    rewritten = Rewritten(PLAN.plan, PLAN.epochs)
    assert rewritten.key(224) == PLAN.key(224)
    (line,) = differences(STATE, rewritten, seq_len=1024, data=DATA)
    here = probe(rewritten, 224)
    assert line.startswith(f"probe: saved {STATE.probe}, here {here}: ShuffledEpochs(seed=0) draws other")


def test_a_state_past_the_end_of_a_shorter_plan_differs_in_nothing():
    shorter = ShuffledEpochs(0, num_epochs=1).bind(100, 9)
    longer = ShuffledEpochs(0, num_epochs=3).bind(100, 9)
    saved = RunState.of_run(Cursor.at(longer, BatchSizeSchedule.constant(5), 6), seq_len=9, data="d")
    assert differences(saved, shorter, seq_len=9, data="d") == []


def test_a_run_at_its_beginning_is_told_from_others_by_its_key():
    begun = RunState.of_run(Cursor.begin(PLAN, 32), seq_len=1024, data=DATA)
    other = RandomWindows(seed=1).bind(NUM_TOKENS, 1024)
    assert [line[:5] for line in differences(begun, other, seq_len=1024, data=DATA)] == ["plan:"]


@pytest.mark.parametrize("field", sorted(STATE.to_dict()))
@pytest.mark.parametrize("kind", [str, list, dict])
def test_a_large_value_is_refused_or_compared_in_a_short_printable_message(field, kind):
    large = "\x1b[2J" + "x" * 10**6
    value = large if kind is str else [large] * 3 if kind is list else {large: 1}
    state = {**STATE.to_dict(), field: value}
    try:
        (message,) = differences(from_dict(state), PLAN, seq_len=1024, data=DATA)
    except ValueError as error:
        message = str(error)
    assert len(message) < 1500
    assert message.isprintable()
    assert message.startswith((f"state: {field} is ", f"state has {field} ", f"{field}: saved "))


def test_a_large_field_name_is_refused_in_a_short_message():
    with pytest.raises(ValueError, match=r"state has the fields \['batch_sizes', ") as caught:
        from_dict({**STATE.to_dict(), "x" * 10**6: 1})
    assert len(str(caught.value)) < 600


def test_as_many_changes_of_batch_size_are_read_as_a_run_may_have():
    # Two steps of each size; a million characters are read in a moment, and refused.
    def state(num_changes):
        stretches = [Stretch(0, 0, 1)]
        for _ in range(num_changes):
            step, sample, size = stretches[-1]
            stretches.append(Stretch(step + 2, sample + 2 * size, size + 1))
        schedule = BatchSizeSchedule(tuple(stretches))
        last = schedule.last
        return dataclasses.replace(STATE, schedule=schedule, step=last.step, sample=last.sample)

    assert from_dict(state(MAX_CHANGES).to_dict()) == state(MAX_CHANGES)
    assert len(json.dumps(state(MAX_CHANGES).to_dict())) < 20_000
    for num_changes in (MAX_CHANGES + 1, 60_000):
        told = (
            f"state: batch_sizes has {num_changes:,} changes; expected at most 1,000: pass what get_state"
        )
        with pytest.raises(ValueError, match=re.escape(told)):
            from_dict(state(num_changes).to_dict())


# Mixtures of other weights


SOURCES = [range(600), range(600, 1000), range(1000, 3000)]


@pytest.mark.parametrize(
    ("weights", "other", "sample"),
    [((3, 1), (1, 1), 40), ((1, 1), (3, 1), 41), ((1, 2, 3), (3, 2, 1), 70), ((1, 99, 1), (99, 1, 1), 9)],
)
def test_other_weights_of_a_mixture_say_exactly_what_comes_twice_and_what_never_does(
    weights, other, sample
):
    inner = ShuffledEpochs(0, num_epochs=50)
    old, new = (
        Mixture(dict(zip(SOURCES, each, strict=False)), inner).bind(3000, 4) for each in (weights, other)
    )
    saved = RunState.of_run(Cursor.at(old, BatchSizeSchedule.constant(1), sample), seq_len=4, data="d")
    (line,) = differences(saved, new, seq_len=4, data="d")
    assert line.startswith(f"plan: saved {old.key(0)}, here {new.key(0)}: the sources go on where")
    told = re.search(
        r"of the next (\d+) windows (\d+) were trained on .* and (\d+) others are left out", line
    )
    horizon, num_repeated, num_left_out = map(int, told.groups())
    trained = set(old.window_starts(np.arange(sample)).tolist())
    following = new.window_starts(np.arange(sample, sample + horizon)).tolist()
    repeated = trained.intersection(following)
    assert len(repeated) == num_repeated > 0
    assert following[-1] in repeated  # the last that is
    # What the new weights would have trained on before, and the old ones have not.
    never = set(new.window_starts(np.arange(sample)).tolist()) - trained
    assert len(never) == num_left_out
    for source in SOURCES[: len(weights)]:
        for starts, where in ((repeated, line.split("left out")[0]), (never, line.split("left out")[1])):
            count = len(starts.intersection(source))
            assert (f"{count} of {source}" in where) == (count > 0)


def test_half_of_the_next_windows_come_again_where_three_to_one_becomes_one_to_one():
    old, new = (
        Mixture({range(10**6): first, range(10**6, 2 * 10**6): 1}, RandomWindows(0)).bind(2 * 10**6, 9)
        for first in (3, 1)
    )
    saved = RunState.of_run(Cursor.at(old, BatchSizeSchedule.constant(4), 100), seq_len=9, data="d")
    (line,) = differences(saved, new, seq_len=9, data="d")
    assert line.endswith(
        "so of the next 199 windows 100 were trained on before (100 of range(0, 1000000)), and 100 others "
        "are left out (100 of range(1000000, 2000000))"
    )


def test_other_weights_that_have_moved_no_source_say_so():
    old, new = (
        Mixture({range(600): first, range(600, 1000): 1}, RandomWindows(0)).bind(1000, 9)
        for first in (2, 1)
    )
    saved = RunState.of_run(Cursor.begin(old, 4), seq_len=9, data="d")
    (line,) = differences(saved, new, seq_len=9, data="d")
    assert line.endswith("the proportions change from here on; no window comes twice or is left out")


@pytest.mark.parametrize(
    ("other", "seq_len"),
    [
        (Mixture({range(600): 1, range(600, 1000): 1}, RandomWindows(1)), 9),
        (Mixture({range(500): 1, range(500, 1000): 1}, RandomWindows(0)), 9),
        (Mixture({range(600): 1, range(600, 1000): 1}, RandomWindows(0)), 8),
        (RandomWindows(0), 9),
    ],
    ids=["other order", "other sources", "other seq_len", "no mixture"],
)
def test_mixtures_that_differ_in_more_than_weights_say_what_any_plans_do(other, seq_len):
    old = Mixture({range(600): 3, range(600, 1000): 1}, RandomWindows(0)).bind(1000, 9)
    saved = RunState.of_run(Cursor.at(old, BatchSizeSchedule.constant(4), 7), seq_len=9, data="d")
    found = differences(saved, other.bind(1000, seq_len), seq_len=seq_len, data="d")
    assert found[0].endswith("so some would be trained on a second time, and others not at all")
