"""Contents: equal for what is equal, others for all that may differ; and the plans that they name."""

import dataclasses
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from enum import Enum

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import NAMED_PLANS, PLANS, BoundListed, Listed, changed

import tokenloader as tl
from tokenloader.plans.contents import contents, named_plan
from tokenloader.plans.cursor import BatchSizeSchedule, Cursor
from tokenloader.plans.state import RunState, differences


def refuse(value):
    raise TypeError(f"{value} has no contents")


@dataclass
class Pair:
    left: object
    right: object = None


class Color(Enum):
    RED = 1
    BLUE = 2


STARTS = np.arange(0, 20_000, 10)  # printed with ... in the middle
HOLDS_ITSELF = [1]
HOLDS_ITSELF.append(HOLDS_ITSELF)

VALUES = [
    None, ..., True, 1, 1.0, "1", b"1", 1j, 2**70, float("nan"), range(3), slice(3), Color.RED, Color.BLUE,
    Pair, Pair(1), Pair(2), Pair([1]), Pair((1,)), Pair(Pair(1)), (), [], {}, set(), (1, 2), (2, 1),
    ((1,), 2), ("1", 2), ("12",), {1: 2}, {2: 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {1, 2},
    STARTS, changed(STARTS, 700, 7), STARTS.astype(np.int32), STARTS.reshape(2, -1), STARTS / 3,
    np.float32(1), np.float64(1), np.array([None, 1]), np.array([None, "1"]), np.zeros((0, 3)),
    np.datetime64("2026-11-21"), jnp.float32(1), jnp.arange(3), HOLDS_ITSELF, "\ud800",
]  # fmt: skip


def test_all_values_have_contents_of_their_own():
    found = [contents(value, refuse) for value in VALUES]
    assert len(set(found)) == len(VALUES)
    assert {len(each) for each in found} == {32}


def test_equal_values_have_equal_contents_whatever_their_order_and_layout():
    for a, b in [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        (STARTS, STARTS.copy()),
        (np.asfortranarray(STARTS.reshape(4, -1)), STARTS.reshape(4, -1)),
        (Pair(STARTS, {1: [Pair(2)]}), Pair(STARTS.copy(), {1: [Pair(2)]})),
        ([STARTS, STARTS], [STARTS, STARTS.copy()]),
    ]:
        assert contents(a, refuse) == contents(b, refuse)


def test_contents_are_equal_in_every_process():
    code = (
        "from tokenloader.plans.contents import contents; print(contents(({'a', 'b', 'c'}, [1.5]), None))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == contents(({"a", "b", "c"}, [1.5]), None) + "\n"


def test_what_has_no_contents_is_told_by_what_stands_in_for_it():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"lock object.* has no contents"):
        contents([Pair({"deep": lock})], refuse)
    assert contents(lock, lambda _: 1) != contents(lock, lambda _: 2)
    shapes = [contents(array, lambda a: a.shape, most_array_bytes=100) for array in (STARTS, STARTS + 1)]
    assert shapes[0] == shapes[1]


# Plans


class PlainListed(BoundListed):
    """The same, no dataclass of its own, with its address for a name."""

    def key(self, until_sample):
        return f"<Listed at 0x{id(self):x}>"


@pytest.mark.parametrize("plan", [*PLANS, *NAMED_PLANS, Listed(range(7))], ids=repr)
def test_a_plan_whose_key_tells_all_is_left_as_it_is(plan):
    bound = plan.bind(997, 20)
    assert named_plan(bound) is bound


@pytest.mark.parametrize(
    ("starts", "shown"),
    [
        (STARTS, "Listed(starts=<contents "),
        (np.arange(3), "Listed(starts=<contents "),  # whose floats, say, would be rounded
        (jnp.arange(3), "Listed(starts=<contents "),
        ("0\u20269", "Listed(starts='0<contents "),
        ([np.arange(3)], "Listed(starts=[<contents "),
        ({"a": np.arange(3)}, "Listed(starts={'a': <contents "),
        (Pair(np.arange(3)), "Listed(starts=Pair(left=<contents "),
        ("a" * 500 + "...", "Listed(starts='" + "a" * 185 + "<contents "),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_plan_whose_key_shows_an_array_is_named_by_its_contents(starts, shown):
    bound = Listed(starts).bind(997, 20)
    named = named_plan(bound)
    assert re.fullmatch(re.escape(shown) + r"[0-9a-f]{32}>", named.key(0))
    assert named_plan(Listed(starts).bind(997, 20)).key(7) == named.key(0)
    assert named_plan(Listed([starts]).bind(997, 20)).key(0).split()[-1] != named.key(0).split()[-1]
    assert repr(named) == repr(bound)


def test_a_named_plan_draws_what_the_plan_draws():
    named = named_plan(Listed(STARTS).bind(20_100, 20))
    samples = np.array([3, 2001])
    assert named.window_starts(samples).tolist() == [30, 10]
    assert (named.num_samples, named.valid_targets(samples), named.reads(samples)) == (None, None, None)


def test_a_named_plan_is_read_as_the_plan_is():
    class InBlocks(BoundListed):
        def reads(self, samples):
            starts = self.window_starts(samples) // 100 * 100
            return np.stack([starts, starts + 120], axis=1)

    named = named_plan(InBlocks(Listed(STARTS)))
    assert named.reads(np.array([3, 57])).tolist() == [[0, 120], [500, 620]]


def test_a_plan_named_by_an_address_is_named_alike_in_every_process():
    one, other = (named_plan(PlainListed(Listed(STARTS.copy()))) for _ in range(2))
    assert one.key(0) == other.key(0)
    assert re.fullmatch(r"<Listed<contents [0-9a-f]{32}>", one.key(0))


def test_one_start_among_thousands_makes_another_run():
    plan, other = (named_plan(Listed(each).bind(20_100, 20)) for each in (STARTS, changed(STARTS, 700, 7)))
    schedule = BatchSizeSchedule.constant(100)
    saved = RunState.of_run(Cursor.at(plan, schedule, 20), seq_len=20, data="d")
    assert differences(saved, plan, seq_len=20, data="d") == []
    (line,) = differences(saved, other, seq_len=20, data="d")
    assert line.startswith(f"plan: saved {plan.key(0)}, here {other.key(0)}: ")


def test_a_mixture_of_a_plan_that_is_named_by_contents_is_too():
    mixtures = [
        tl.Mixture({range(9000): 1, range(9000, 20_100): 1}, Listed(each))
        for each in (STARTS, STARTS.copy(), changed(STARTS, 700, 7))
    ]
    one, alike, other = (named_plan(mixture.bind(20_100, 20)).key(0) for mixture in mixtures)
    assert one.startswith("Mixture({range(0, 9000): 1, range(9000, 20100): 1}, Listed(starts=<contents ")
    assert one == alike != other


def test_a_plan_that_hides_what_has_no_contents_is_refused_with_what_to_do():
    bound = Listed(np.arange(3), more=threading.Lock()).bind(997, 20)
    with pytest.raises(ValueError, match="whose contents have no name; expected a text that") as caught:
        named_plan(bound)
    message = str(caught.value)
    assert message.startswith("BoundListed: key returned Listed(starts=array([0, 1, 2]), more=<unlocked")
    assert "in which 'array(' hides what decides the windows, and the plan has a lock, " in message
    assert message.endswith("of an array, blake2b(array.tobytes()).hexdigest()")


def test_a_key_that_is_no_text_is_a_type_error():
    class Numbered(BoundListed):
        def key(self, until_sample):
            return 7

    with pytest.raises(TypeError, match=r"Numbered: key returned 7; expected a string"):
        named_plan(Numbered(Listed(STARTS)))


def test_a_plan_that_binds_to_nothing_is_a_type_error():
    class Forgetful(tl.Plan):
        def bind(self, num_tokens, seq_len):
            BoundListed(self)

    with pytest.raises(
        TypeError, match=r"bind returned None; expected an instance of tokenloader.BoundPlan"
    ):
        tl.TokenLoader(tl.open_tokens(STARTS), 2, 20, plan=Forgetful())


def test_a_loader_refuses_the_state_of_other_starts():
    tokens = tl.open_tokens(np.arange(20_100, dtype=np.uint16))
    with tl.TokenLoader(tokens, 100, 20, plan=Listed(STARTS)) as loader:
        state = loader.get_state()
        assert len(state["plan"]) < 100
    with tl.TokenLoader(tokens, 50, 20, plan=Listed(STARTS.copy())) as loader:
        loader.set_state(state)
    with (
        tl.TokenLoader(tokens, 100, 20, plan=Listed(changed(STARTS, 700, 7))) as loader,
        pytest.raises(ValueError, match=re.escape(f"plan: saved {state['plan']}, here Listed(starts=<c")),
    ):
        loader.set_state(state)
    with pytest.raises(ValueError, match="BoundListed: key returned"):
        tl.TokenLoader(tokens, 2, 20, plan=dataclasses.replace(Listed(STARTS), more=threading.Lock()))
