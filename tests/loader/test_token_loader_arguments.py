"""The arguments of a loader, and what users bring: plans and transforms of their own."""

import json
import pickle
import traceback
import warnings
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest
from helpers import PLANS, planned_rows, random_tokens

import tokenloader as tl

TOKENS = random_tokens()
N = len(TOKENS)
rows_of = partial(planned_rows, TOKENS)


class WithStarts:
    """What was a plan once, by its methods."""

    num_samples = None

    def starts(self, samples, *, num_tokens, seq_len):
        return np.asarray(samples) % (num_tokens - seq_len)

    def __repr__(self):
        return "WithStarts()"


@pytest.mark.parametrize("wrong", [TOKENS, "train.bin", None, [1, 2, 3]])
def test_tokens_of_another_type_are_a_type_error(wrong):
    with pytest.raises(
        TypeError, match=rf"tokens is of type {type(wrong).__name__}; expected a TokenArray: open_"
    ):
        tl.TokenLoader(wrong, 2, 4)


@pytest.mark.parametrize(
    "plan",
    [tl.RandomWindows, tl.ShuffledEpochs, tl.SequentialWindows, "shuffled", None, 0, WithStarts()],
    ids=repr,
)
def test_what_is_no_plan_is_a_type_error_also_the_class_of_one(tokens, plan):
    with pytest.raises(TypeError, match=r"expected an instance of tokenloader\.Plan, for") as caught:
        tl.TokenLoader(tokens, 2, 4, plan=plan)
    assert repr(plan) in str(caught.value)


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "prefetch"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_below_1_is_an_error(tokens, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}; expected 1 or more"):
        tl.TokenLoader(tokens, **{"batch_size": 2, "seq_len": 4, "prefetch": 2, name: value})


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "prefetch"])
@pytest.mark.parametrize("value", [1.5, 2.0, "2", None])
def test_a_count_that_is_no_integer_is_a_type_error(tokens, name, value):
    with pytest.raises(
        TypeError, match=f"{name} is {value!r} of type {type(value).__name__}; expected an integer"
    ):
        tl.TokenLoader(tokens, **{"batch_size": 2, "seq_len": 4, "prefetch": 2, name: value})


def test_counts_may_be_numpy_integers_and_the_state_is_json_all_the_same(tokens):
    loader = tl.TokenLoader(tokens, np.int64(2), np.uint8(4), prefetch=np.int32(1))
    state = loader.get_state()
    assert json.loads(json.dumps(state)) == state
    assert state["batch_sizes"] == "0:0:2"
    assert {type(value) for value in state.values()} == {int, str}


@pytest.mark.parametrize("transform", ["next_token", 3])
def test_a_transform_that_cannot_be_called_is_a_type_error(tokens, transform):
    with pytest.raises(TypeError, match=f"transform is of type {type(transform).__name__}"):
        tl.TokenLoader(tokens, 2, 4, transform=transform)


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_fewer_tokens_than_a_window_are_an_error(tokens, plan):
    with pytest.raises(ValueError, match=r"997 tokens are fewer than one window .* = 998"):
        tl.TokenLoader(tokens, 1, 997, plan=plan)
    with tl.TokenLoader(tokens, 1, 996, plan=plan, transform=None) as loader:
        np.testing.assert_array_equal(next(loader), [TOKENS])


def test_a_finite_plan_smaller_than_a_batch_is_an_error_that_tells_its_size(tokens):
    with pytest.raises(ValueError, match="use a smaller batch_size") as caught:
        tl.TokenLoader(tokens, 9, 100, plan=tl.ShuffledEpochs(0, num_epochs=1))
    assert "ShuffledEpochs(seed=0) ends after 8 windows of these tokens" in str(caught.value)
    assert "batch_size=9" in str(caught.value)
    tl.TokenLoader(tokens, 8, 100, plan=tl.ShuffledEpochs(0, num_epochs=1))


def test_sequential_windows_smaller_than_a_batch_make_one_batch(tokens):
    with tl.TokenLoader(tokens, 64, 100, plan=tl.SequentialWindows()) as loader:
        (batch,) = loader
    assert int(batch.loss_mask.sum()) == N - 1


def test_a_sharding_of_another_type_is_a_type_error(tokens):
    with pytest.raises(TypeError, match="sharding is of type str"):
        tl.TokenLoader(tokens, 2, 4, sharding="gpu")


def test_a_warning_of_an_idle_accelerator_points_to_the_line_of_the_user(tokens, monkeypatch):
    def warn(*args, stacklevel, **kwargs):
        frames = traceback.extract_stack()
        # stacklevel=1 is the caller of warn, which is the frame above this one.
        assert frames[-1 - stacklevel].filename == __file__
        warned.append(args[0])

    warned = []
    monkeypatch.setattr(jax, "local_devices", lambda backend: [f"{backend}:0"])
    monkeypatch.setattr(warnings, "warn", warn)
    tl.TokenLoader(tokens, 2, 4)
    assert len(warned) == 1
    assert "gpu:0 is idle" in warned[0]
    tl.TokenLoader(tokens, 2, 4, sharding=jax.devices()[0])
    assert len(warned) == 1


def test_a_transform_may_be_of_a_class_with_slots(tokens):
    @dataclass(frozen=True, slots=True)
    class Plus:
        more: int

        def __call__(self, block):
            return block + self.more

    with tl.TokenLoader(tokens, 4, 16, transform=Plus(3)) as loader:
        np.testing.assert_array_equal(next(loader), loader.window_tokens(0) + 3)


@dataclass(frozen=True)
class EveryTen(tl.Plan):
    """A plan of a user's own."""

    num_samples: int | None = None
    stride: int = 10

    def bind(self, num_tokens, seq_len):
        return BoundEveryTen(self, num_tokens - seq_len)


@dataclass(frozen=True)
class BoundEveryTen(tl.BoundPlan):
    plan: EveryTen
    num_starts: int

    @property
    def num_samples(self):
        return self.plan.num_samples

    def window_starts(self, samples):
        return samples * self.plan.stride % self.num_starts

    def key(self, until_sample):
        return f"EveryTen(stride={self.plan.stride})"


def test_a_plan_of_ones_own_decides_which_windows_there_are(tokens):
    with tl.TokenLoader(tokens, 4, 8, plan=EveryTen(), transform=None) as loader:
        for step in range(40):
            np.testing.assert_array_equal(next(loader), rows_of(EveryTen(), 4 * step, 4, 8))
        state = loader.get_state()
    assert state["plan"] == "EveryTen(stride=10)"
    with tl.TokenLoader(tokens, 4, 8, plan=EveryTen(), transform=None) as loader:
        loader.set_state(state)
        np.testing.assert_array_equal(next(loader), rows_of(EveryTen(), 160, 4, 8))
        np.testing.assert_array_equal(loader.window_starts(5), range(200, 240, 10))


def test_a_plan_of_ones_own_may_have_an_end(tokens):
    plan = EveryTen(num_samples=11)
    with tl.TokenLoader(tokens, 4, 8, plan=plan, transform=None) as loader:
        np.testing.assert_array_equal(list(loader), np.split(rows_of(plan, 0, 8, 8), 2))


def test_a_plan_of_ones_own_may_hide_targets(tokens):
    class BoundHalves(BoundEveryTen):
        def valid_targets(self, samples):
            return 1 + samples % 8

    class Halves(EveryTen):
        def bind(self, num_tokens, seq_len):
            return BoundHalves(self, num_tokens - seq_len)

    with tl.TokenLoader(tokens, 4, 8, plan=Halves(num_samples=11)) as loader:
        first, second, third = loader  # which is filled
    assert first.loss_mask.sum(axis=1).tolist() == [1, 2, 3, 4]
    assert second.loss_mask[0].tolist() == [False] * 3 + [True] * 5
    assert third.loss_mask.sum(axis=1).tolist() == [1, 2, 3, 4]


def test_a_plan_with_a_key_of_its_own_is_told_from_others(tokens):
    state = tl.TokenLoader(tokens, 4, 16, plan=EveryTen()).get_state()
    tl.TokenLoader(tokens, 4, 16, plan=EveryTen(num_samples=30)).set_state(state)
    with pytest.raises(ValueError, match=r"plan: saved EveryTen\(stride=10\), here EveryTen\(stride=3"):
        tl.TokenLoader(tokens, 4, 16, plan=EveryTen(stride=3)).set_state(state)


# What a loader and its classes are called


def test_a_loader_tells_its_plan_batch_and_step(tokens):
    loader = tl.TokenLoader(tokens, 4, 16, plan=tl.RandomWindows(seed=3))
    begin = "TokenLoader(RandomWindows(seed=3), batch_size=4, seq_len=16"
    assert repr(loader) == f"{begin}, step=0)"
    next(loader)
    assert repr(loader) == f"{begin}, step=1)"
    loader.close()
    assert repr(loader) == f"{begin}, step=1, closed)"


@pytest.mark.parametrize(
    "public",
    [
        tl.Batch,
        tl.BoundPlan,
        tl.LoaderStats,
        tl.Mixture,
        tl.Plan,
        tl.RandomWindows,
        tl.SequentialWindows,
        tl.ShuffledEpochs,
        tl.TokenLoader,
        tl.Windows,
        tl.next_token,
        tl.segment_documents,
    ],
    ids=lambda public: public.__name__,
)
def test_what_is_public_names_the_package_as_its_module(public):
    assert public.__module__ == "tokenloader"
    assert getattr(tl, public.__name__) is public
    assert pickle.loads(pickle.dumps(public)) is public


def test_pickles_name_public_classes_by_the_package_alone(tokens):
    with tl.TokenLoader(tokens, 4, 16, transform=tl.segment_documents(7)) as loader:
        batch, stats = next(loader), loader.stats
    plan = tl.Mixture({range(500): 3, range(500, N): 1}, tl.ShuffledEpochs(3))
    for value in (*PLANS, plan, batch, stats, tl.next_token, tl.Batch, tl.TokenLoader):
        data = pickle.dumps(value)
        assert str(pickle.loads(data)) == str(value)
        assert b"tokenloader." not in data, value
