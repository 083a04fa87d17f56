"""The plans: pure functions of the sample number that cover the tokens as they say."""

import dataclasses
import functools
import re
from collections import Counter
from functools import cached_property

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc  # jax depends on scipy

from tokenloader import BoundPlan, Plan, RandomWindows, SequentialWindows, ShuffledBlocks, ShuffledEpochs
from tokenloader.plans.plan import checked_plan, checked_reads, checked_window_starts

SEEDED = RandomWindows, ShuffledEpochs, ShuffledBlocks
EACH = RandomWindows(1), ShuffledEpochs(1), ShuffledBlocks(1, 40, 4), SequentialWindows()
FINEWEB = {"num_tokens": 10_248_871_837, "seq_len": 1024}  # the data of DESIGN.md

seeds = st.integers(0, 2**64 - 1)
sizes = st.one_of(
    st.integers(1, 40).flatmap(
        lambda seq_len: st.tuples(st.integers(seq_len + 1, 60 * seq_len), st.just(seq_len))
    ),
    st.tuples(st.integers(10**9, 2**44), st.sampled_from([1, 1023, 1024, 8192])),
).map(lambda pair: {"num_tokens": pair[0], "seq_len": pair[1]})
small_sizes = (
    st.integers(1, 40)
    .flatmap(lambda seq_len: st.tuples(st.integers(seq_len + 1, 30 * seq_len), st.just(seq_len)))
    .map(lambda pair: {"num_tokens": pair[0], "seq_len": pair[1]})
)
plans = st.one_of(
    st.builds(RandomWindows, seed=seeds),
    st.builds(ShuffledEpochs, seed=seeds),
    st.builds(
        ShuffledBlocks,
        seed=seeds,
        block_tokens=st.integers(1, 500) | st.integers(2**11, 2**40),
        open_blocks=st.integers(1, 20) | st.integers(1, 2**24),
    ),
    st.just(SequentialWindows()),
)


def windows_per_epoch(**size):
    return ShuffledEpochs(seed=0, num_epochs=1).bind(**size).num_samples


def one_epoch(plan, epoch, **size):
    n = windows_per_epoch(**size)
    return plan.bind(**size).window_starts(np.arange(epoch * n, (epoch + 1) * n))


def order(plan, epoch, **size):
    """The epoch's windows in their order: 0 for the first of the file. Without the phase."""
    starts = one_epoch(plan, epoch, **size)
    return tuple((starts - starts.min()) // size["seq_len"])


def assert_uniform(counts):
    expected = counts.sum() / len(counts)
    assert expected > 5  # where chi-square holds
    # Fixed seeds: a truly uniform draw would fail once in 100,000.
    assert chdtrc(len(counts) - 1, ((counts - expected) ** 2 / expected).sum()) > 1e-5, counts


# Purity


@settings(deadline=None)
@given(plan=plans, size=sizes, data=st.data())
def test_a_start_depends_on_the_plan_and_the_sample_number_alone(plan, size, data):
    near = data.draw(st.integers(0, 10**13))
    samples = data.draw(
        st.lists(
            st.one_of(st.integers(0, 200), st.integers(0, 10**13), st.integers(near, near + 50)),
            min_size=1,
            max_size=30,
        )
    )
    together = plan.bind(**size).window_starts(samples)
    assert together.dtype == np.int64
    assert together.shape == (len(samples),)
    assert together.min() >= 0
    assert together.max() + size["seq_len"] + 1 <= size["num_tokens"]
    # One by one, in chunks, in another order, again, and from an equal plan.
    assert together.tolist() == [int(plan.bind(**size).window_starts([i])[0]) for i in samples]
    cut = data.draw(st.integers(1, len(samples)))
    chunks = [plan.bind(**size).window_starts(samples[at : at + cut]) for at in range(0, len(samples), cut)]
    np.testing.assert_array_equal(np.concatenate(chunks), together)
    reordered = data.draw(st.permutations(range(len(samples))))
    shuffled = plan.bind(**size).window_starts(np.array(samples)[reordered])
    np.testing.assert_array_equal(shuffled, together[reordered])
    np.testing.assert_array_equal(dataclasses.replace(plan).bind(**size).window_starts(samples), together)


@pytest.mark.parametrize("plan", EACH)
def test_no_samples_have_no_starts(plan):
    starts = plan.bind(1000, 10).window_starts(np.array([], np.int64))
    assert starts.dtype == np.int64
    assert starts.shape == (0,)


@pytest.mark.parametrize("plan", EACH)
def test_leaves_the_samples_as_they_were(plan):
    samples = np.arange(500)
    samples.flags.writeable = False
    plan.bind(1000, 10).window_starts(samples)
    starts = plan.bind(1000, 10).window_starts(samples.astype(np.int32))
    np.testing.assert_array_equal(starts, plan.bind(1000, 10).window_starts(samples))


@settings(deadline=None)
@given(plan=plans, size=sizes, samples=st.lists(st.integers(0, 300) | st.integers(0, 10**13), max_size=20))
def test_a_read_has_the_window_of_its_sample_and_depends_on_the_sample_number_alone(plan, size, samples):
    bound, samples = plan.bind(**size), np.array(samples, np.int64)
    reads = checked_reads(bound, samples, size["num_tokens"])  # which lie within the tokens
    if reads is None:
        assert isinstance(plan, RandomWindows | ShuffledEpochs | ShuffledBlocks)
        return
    starts = bound.window_starts(samples)
    assert (reads[:, 0] <= starts).all()
    assert (starts + size["seq_len"] + 1 <= reads[:, 1]).all()
    for sample, read in zip(samples, reads, strict=True):
        np.testing.assert_array_equal(bound.reads(np.array([sample])), [read])


def test_the_starts_of_a_seed_stay_what_they_were():
    # A saved run goes on with them. Whoever changes them breaks every run that is under way.
    def samples_of(plan):
        return plan.bind(**FINEWEB).window_starts([0, 1, 2, 3, 10**7, 10**12]).tolist()

    assert samples_of(RandomWindows(seed=0)) == RANDOM_WINDOWS_OF_SEED_0
    assert samples_of(ShuffledEpochs(seed=0)) == SHUFFLED_EPOCHS_OF_SEED_0


RANDOM_WINDOWS_OF_SEED_0 = [528050379, 256629850, 5723642679, 5452624981, 4666916535, 5187183683]
SHUFFLED_EPOCHS_OF_SEED_0 = [5243908900, 7879671588, 6768962340, 6265548580, 1775978276, 8371142647]


@pytest.mark.parametrize("plan", SEEDED)
def test_every_bit_of_the_seed_changes_the_windows(plan):
    size = {"num_tokens": 1001, "seq_len": 1}
    runs = [
        plan(seed=seed).bind(**size).window_starts(range(50)) for seed in (0, *(1 << i for i in range(64)))
    ]
    assert len({tuple(run) for run in runs}) == 65


def test_different_plans_of_one_seed_draw_different_windows():
    size = {"num_tokens": 10**6, "seq_len": 1}
    random = RandomWindows(seed=3).bind(**size).window_starts(range(1000))
    shuffled = ShuffledEpochs(seed=3).bind(**size).window_starts(range(1000))
    assert np.count_nonzero(random == shuffled) < 5


@pytest.mark.parametrize("plan", SEEDED)
def test_a_plan_is_a_value(plan):
    assert plan(seed=1) == plan(seed=np.int64(1))
    assert plan(seed=1) != plan(seed=2)
    assert hash(plan(seed=1)) == hash(plan(seed=np.uint64(1)))
    assert repr(plan(seed=1)) == repr(plan(seed=np.int32(1)))
    assert repr(plan(seed=1)) != repr(plan(seed=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan(seed=1).seed = 2


def test_sequential_windows_is_a_value():
    assert SequentialWindows() == SequentialWindows()
    assert repr(SequentialWindows()) == "SequentialWindows()"


# RandomWindows


@pytest.mark.parametrize("num_tokens", [1_000, 10_248_871_837, 2**44])
def test_random_windows_are_uniform(num_tokens):
    seq_len = 100
    starts = RandomWindows(seed=5).bind(num_tokens, seq_len).window_starts(range(50_000))
    num_starts = num_tokens - seq_len
    bins = 60  # divides 900, so that the bins of the smallest case are equal
    assert starts.min() >= 0
    assert starts.max() < num_starts
    assert_uniform(np.bincount(starts * bins // num_starts, minlength=bins))
    assert_uniform(np.bincount(starts % bins, minlength=bins))


def test_random_windows_pass_32_bits():
    starts = RandomWindows(seed=5).bind(2**44, 1024).window_starts(range(1000))
    assert starts.dtype == np.int64
    assert 2**43 < starts.max() < 2**44
    assert np.unique(starts).size == 1000


@settings(deadline=None, max_examples=30)
@given(seq_len=st.integers(1, 20), num_starts=st.integers(1, 10), seed=seeds)
def test_random_windows_reach_every_start_from_the_first_to_the_last(seq_len, num_starts, seed):
    # Of 10 starts one is not among 500 draws with probability 10 x 0.9**500 < 1e-21.
    starts = RandomWindows(seed).bind(seq_len + num_starts, seq_len).window_starts(range(500))
    assert set(starts.tolist()) == set(range(num_starts))


def test_random_windows_of_neighbouring_samples_are_independent():
    starts = RandomWindows(seed=6).bind(18, 10).window_starts(range(20_001))
    pairs = starts[:-1] * 8 + starts[1:]
    assert_uniform(np.bincount(pairs, minlength=64))


# ShuffledEpochs


@settings(deadline=None)
@given(seed=seeds, size=small_sizes, first_epoch=st.integers(0, 10**12))
def test_every_epoch_has_every_window_once_end_to_end_from_a_phase(seed, size, first_epoch):
    num_tokens, seq_len = size["num_tokens"], size["seq_len"]
    plan = ShuffledEpochs(seed)
    n = windows_per_epoch(**size)
    assert n >= 1
    for epoch in range(first_epoch, first_epoch + 3):
        starts = np.sort(one_epoch(plan, epoch, **size))
        phase = starts[0]
        np.testing.assert_array_equal(starts, phase + seq_len * np.arange(n))
        assert 0 <= phase < num_tokens - n * seq_len
        # Each window and its seq_len targets lie within the tokens; few tokens are left out.
        assert starts[-1] + seq_len <= num_tokens - 1
        assert num_tokens - (n * seq_len + 1) < 2 * seq_len


@settings(deadline=None, max_examples=30)
@given(seq_len=st.integers(1, 12), windows=st.integers(1, 4), more=st.integers(0, 11), seed=seeds)
def test_phases_take_every_value_so_that_every_token_is_seen(seq_len, windows, more, seed):
    num_tokens = seq_len * windows + 1 + more % seq_len
    size = {"num_tokens": num_tokens, "seq_len": seq_len}
    plan = ShuffledEpochs(seed)
    n = windows_per_epoch(**size)
    # At most 24 phases, one not among 1,000 epochs with probability 24 x (23/24)**1000 < 1e-16.
    starts = plan.bind(**size).window_starts(np.arange(1000 * n)).reshape(1000, n)
    phases = starts.min(axis=1)
    assert set(phases.tolist()) == set(range(num_tokens - n * seq_len))
    assert starts.min() == 0  # the first token
    assert starts.max() + seq_len == num_tokens - 1  # and the last


def test_phases_are_uniform_and_independent_from_epoch_to_epoch():
    size = {"num_tokens": 38, "seq_len": 10}  # two windows of ten, 18 phases
    starts = ShuffledEpochs(seed=1).bind(**size).window_starts(np.arange(2 * 20_000)).reshape(-1, 2)
    phases = starts.min(axis=1)
    assert_uniform(np.bincount(phases, minlength=18))
    assert_uniform(np.bincount(phases[:-1] * 18 + phases[1:], minlength=18 * 18))


def test_order_and_phase_are_independent():
    size = {"num_tokens": 38, "seq_len": 10}
    starts = ShuffledEpochs(seed=2).bind(**size).window_starts(np.arange(2 * 20_000)).reshape(-1, 2)
    second_first = starts[:, 0] > starts[:, 1]
    assert_uniform(np.bincount(starts.min(axis=1) * 2 + second_first, minlength=36))


def test_every_window_is_equally_often_at_each_place_of_the_epoch():
    n = 20
    size = {"num_tokens": (n + 1) * 8, "seq_len": 8}
    starts = ShuffledEpochs(seed=3).bind(**size).window_starts(np.arange(4000 * n)).reshape(-1, n)
    windows = (starts - starts.min(axis=1, keepdims=True)) // 8
    for place in range(n):
        assert_uniform(np.bincount(windows[:, place], minlength=n))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_no_two_epochs_have_the_same_order(seed):
    size = {"num_tokens": 101 * 10, "seq_len": 10}
    orders = {order(ShuffledEpochs(seed), epoch, **size) for epoch in range(50)}
    assert len(orders) == 50
    assert tuple(range(100)) not in orders


def test_the_next_epoch_of_a_seed_is_no_epoch_of_another_seed():
    # The trap of keys made as seed + epoch: epoch 1 of seed 0 would be epoch 0 of seed 1.
    size = {"num_tokens": 101 * 10, "seq_len": 10}
    orders = {order(ShuffledEpochs(seed), epoch, **size) for seed in range(12) for epoch in range(12)}
    assert len(orders) == 12 * 12


def test_epochs_follow_each_other_without_a_gap_also_inside_a_batch():
    size = {"num_tokens": 96, "seq_len": 10}  # 8 windows, and batches of 5
    plan = ShuffledEpochs(seed=4)
    n = windows_per_epoch(**size)
    assert n == 8
    run = np.concatenate(
        [plan.bind(**size).window_starts(np.arange(step * 5, step * 5 + 5)) for step in range(8)]
    )
    by_epoch = [one_epoch(plan, epoch, **size) for epoch in range(5)]
    np.testing.assert_array_equal(run, np.concatenate(by_epoch))


@pytest.mark.parametrize("seq_len", [1, 2, 10])
def test_data_of_exactly_one_window_is_that_window_every_epoch(seq_len):
    size = {"num_tokens": seq_len + 1, "seq_len": seq_len}
    plan = ShuffledEpochs(seed=5)
    assert windows_per_epoch(**size) == 1
    assert set(plan.bind(**size).window_starts(range(100)).tolist()) == {0}
    assert set(RandomWindows(seed=5).bind(**size).window_starts(range(100)).tolist()) == {0}
    assert SequentialWindows().bind(**size).window_starts(range(3)).tolist() == [0, 0, 0]
    assert SequentialWindows().bind(**size).num_samples == 1


def test_two_windows_come_in_both_orders():
    size = {"num_tokens": 30, "seq_len": 10}
    plan = ShuffledEpochs(seed=6)
    assert windows_per_epoch(**size) == 2
    assert {order(plan, epoch, **size) for epoch in range(30)} == {(0, 1), (1, 0)}


def test_an_epoch_of_the_real_data_is_right_past_sample_10_to_the_12():
    plan = ShuffledEpochs(seed=7)
    n = windows_per_epoch(**FINEWEB)
    assert n == 10_248_871_837 // 1024 - 1
    epoch = 10**12 // n + 1
    places = np.unique(np.random.default_rng(0).integers(0, n, 100_000))
    starts = plan.bind(**FINEWEB).window_starts(epoch * n + places)
    assert np.unique(starts).size == places.size
    assert np.unique(starts % 1024).size == 1
    assert starts.min() >= 0
    assert 2**33 < starts.max() <= FINEWEB["num_tokens"] - 1025
    assert_uniform(np.bincount(starts // 1024 * 64 // n, minlength=65)[:64])
    # Its samples are those of its own epoch: the one before and the one after have other phases.
    edges = plan.bind(**FINEWEB).window_starts([epoch * n - 1, epoch * n, epoch * n + n - 1, epoch * n + n])
    inside = (edges - starts[0]) % 1024 == 0
    assert inside.tolist() == [False, True, True, False]


def test_num_epochs_ends_the_plan():
    size = {"num_tokens": 96, "seq_len": 10}
    plan = ShuffledEpochs(seed=0, num_epochs=3)
    assert plan.bind(**size).num_samples == 24
    assert plan.bind(**size).window_starts([23]).shape == (1,)
    with pytest.raises(ValueError, match=r"sample 24 is past the end: 3 epochs of 8 windows"):
        plan.bind(**size).window_starts([24])
    with pytest.raises(ValueError, match=r"sample 1000 is past the end"):
        plan.bind(**size).window_starts([3, 1000, 4])


def test_without_num_epochs_the_plan_does_not_end():
    plan = ShuffledEpochs(seed=0)
    assert plan.bind(96, 10).num_samples is None
    assert plan.bind(96, 10).window_starts([2**62]).shape == (1,)


def test_num_epochs_takes_no_part_in_the_order_or_the_name():
    size = {"num_tokens": 96, "seq_len": 10}
    endless, ending = ShuffledEpochs(seed=9), ShuffledEpochs(seed=9, num_epochs=5)
    np.testing.assert_array_equal(
        ending.bind(**size).window_starts(range(40)), endless.bind(**size).window_starts(range(40))
    )
    assert ending.bind(**size).key(16) == endless.bind(**size).key(16)
    assert ending.bind(**size).key(16) != ShuffledEpochs(8, num_epochs=5).bind(**size).key(16)


# SequentialWindows


@given(size=st.one_of(small_sizes), padding=st.integers(0, 20))
def test_sequential_windows_count_every_target_exactly_once(size, padding):
    plan, seq_len = SequentialWindows(), size["seq_len"]
    num_samples = plan.bind(**size).num_samples
    samples = np.arange(num_samples + padding)
    starts = plan.bind(**size).window_starts(samples)
    new = plan.bind(**size).valid_targets(samples)
    assert new.dtype == np.int64
    targets = Counter()
    for start, count in zip(starts.tolist(), new.tolist(), strict=True):
        end = start + seq_len + 1  # of the window; its last `count` targets are new
        targets.update(range(end - count, end))
    assert targets == Counter(range(1, size["num_tokens"]))
    assert (new[:num_samples] > 0).all()
    assert (new[num_samples:] == 0).all()


def test_sequential_windows_go_in_file_order_and_end_with_the_data():
    size = {"num_tokens": 25, "seq_len": 10}
    plan = SequentialWindows()
    assert plan.bind(**size).num_samples == 3
    assert plan.bind(**size).window_starts(range(3)).tolist() == [0, 10, 14]
    assert plan.bind(**size).valid_targets(range(3)).tolist() == [10, 10, 4]


def test_sequential_windows_repeat_the_last_one_past_the_end_with_no_new_target():
    size = {"num_tokens": 25, "seq_len": 10}
    plan = SequentialWindows()
    assert plan.bind(**size).window_starts([2, 3, 10**12]).tolist() == [14, 14, 14]
    assert plan.bind(**size).valid_targets([2, 3, 10**12]).tolist() == [4, 0, 0]


def test_sequential_windows_that_fit_exactly_hide_nothing():
    size = {"num_tokens": 31, "seq_len": 10}
    plan = SequentialWindows()
    assert plan.bind(**size).num_samples == 3
    assert plan.bind(**size).window_starts(range(3)).tolist() == [0, 10, 20]
    assert plan.bind(**size).valid_targets(range(3)).tolist() == [10, 10, 10]


def test_sequential_windows_pass_32_bits():
    size = {"num_tokens": 2**44, "seq_len": 1024}
    plan = SequentialWindows()
    assert plan.bind(**size).num_samples == 2**34
    samples = [2**34 - 2, 2**34 - 1, 2**34]
    last = 2**44 - 1025
    assert plan.bind(**size).window_starts(samples).tolist() == [2**44 - 2048, last, last]
    assert plan.bind(**size).valid_targets(samples).tolist() == [1024, 1023, 0]


@settings(deadline=None)
@given(seq_len=st.integers(1, 2**19), num_tokens=st.integers(2, 2**21))
def test_sequential_windows_are_read_in_pieces_one_after_the_other(seq_len, num_tokens):
    num_tokens = max(num_tokens, seq_len + 1)
    bound = SequentialWindows().bind(num_tokens, seq_len)
    samples = np.unique(np.linspace(0, bound.num_samples - 1, 5000).astype(int))
    reads = bound.reads(samples)
    assert (np.diff(reads, axis=0) >= 0).all()
    assert (reads[0, 0], reads[-1, 1]) == (0, num_tokens)
    pieces = np.unique(reads, axis=0)
    assert (pieces[1:, 0] < pieces[:-1, 1]).all()  # the token that windows share, or more at the end
    assert ((pieces[:, 1] - pieces[:, 0])[:-2] == max(1, 2**18 // seq_len) * seq_len + 1).all()


# Errors


@pytest.mark.parametrize("plan", SEEDED)
@pytest.mark.parametrize("seed", [-1, 2**64, 10**30])
def test_a_seed_out_of_range_is_refused(plan, seed):
    with pytest.raises(ValueError, match=rf"^{plan.__name__}: seed={seed} is not in \[0, 2\*\*64\)"):
        plan(seed=seed)


@pytest.mark.parametrize("plan", SEEDED)
@pytest.mark.parametrize(
    ("seed", "named"),
    [(1.5, "1.5 is of type float"), ("7", "'7' is of type str"), (None, "NoneType")],
)
def test_a_seed_that_is_no_integer_is_refused(plan, seed, named):
    with pytest.raises(TypeError, match=rf"^{plan.__name__}: seed=.*{named}.*expected an integer"):
        plan(seed=seed)


@pytest.mark.parametrize("plan", SEEDED)
def test_the_extreme_seeds_are_allowed(plan):
    for seed in (0, 2**64 - 1, np.uint64(2**64 - 1)):
        assert plan(seed=seed).bind(100, 10).window_starts([0]).shape == (1,)


@pytest.mark.parametrize("num_epochs", [0, -1])
def test_num_epochs_below_one_is_refused(num_epochs):
    with pytest.raises(ValueError, match=f"num_epochs={num_epochs}; expected 1 or more"):
        ShuffledEpochs(seed=0, num_epochs=num_epochs)


@pytest.mark.parametrize("num_epochs", [1.5, "2"])
def test_num_epochs_that_is_no_integer_is_refused(num_epochs):
    with pytest.raises(TypeError, match="integer"):
        ShuffledEpochs(seed=0, num_epochs=num_epochs)


@pytest.mark.parametrize("plan", EACH)
class TestEveryPlan:
    def test_refuses_a_negative_sample(self, plan):
        with pytest.raises(ValueError, match="sample -3 is negative; samples are counted from 0"):
            plan.bind(100, 10).window_starts([5, -3, 2])

    def test_refuses_samples_that_are_no_integers(self, plan):
        # Not rounded down in silence.
        with pytest.raises((TypeError, ValueError)):
            plan.bind(100, 10).window_starts([0.5])

    def test_refuses_less_than_one_window(self, plan):
        message = (
            r"^1,000 tokens are fewer than one window of seq_len \+ 1 = 2,049; "
            r"use a seq_len of at most 999, or more data$"
        )
        with pytest.raises(ValueError, match=message):
            plan.bind(1000, 2048).window_starts([0])
        with pytest.raises(ValueError, match="10 tokens are fewer"):
            plan.bind(10, 10).window_starts([0])
        assert plan.bind(11, 10).window_starts([0]).tolist() == [0]


@pytest.mark.parametrize("plan", [ShuffledEpochs(seed=1, num_epochs=2), SequentialWindows()])
def test_binding_to_less_than_one_window_is_refused(plan):
    with pytest.raises(ValueError, match=r"10 tokens are fewer than one window of seq_len \+ 1 = 11"):
        plan.bind(10, 10)


@pytest.mark.parametrize("kind", [np.uint64, np.int64, np.int32, np.uint16])
def test_sizes_may_be_integers_of_numpy(kind):
    for plan in EACH:
        expected = plan.bind(30_000, 10).window_starts(range(20))
        found = plan.bind(kind(30_000), kind(10)).window_starts(range(20))
        np.testing.assert_array_equal(found, expected, strict=True)
    bound = ShuffledEpochs(0, kind(300)).bind(10_248_871_837, kind(1024))
    assert bound.num_samples == 300 * (10_248_871_837 // 1024 - 1)


@pytest.mark.parametrize("plan", EACH)
@pytest.mark.parametrize("seq_len", [0, -3])
def test_a_window_without_inputs_is_an_error(plan, seq_len):
    with pytest.raises(ValueError, match=f"seq_len={seq_len}; expected 1 or more"):
        plan.bind(10, seq_len).window_starts([0])


def test_a_fraction_of_epochs_is_an_error():
    with pytest.raises(TypeError, match=r"num_epochs=2\.0; expected an integer, or None"):
        ShuffledEpochs(0, num_epochs=2.0)


# Plans of one's own


class EveryTenth(Plan):
    def bind(self, num_tokens, seq_len):
        return BoundEveryTenth(num_tokens, seq_len)


@dataclasses.dataclass
class BoundEveryTenth(BoundPlan):
    num_tokens: int
    seq_len: int
    num_samples = None

    def window_starts(self, samples):
        return samples * 10 % (self.num_tokens - self.seq_len)

    def key(self, until_sample):
        return "EveryTenth()"


def test_a_plan_of_ones_own_implements_bind_and_three_names_of_the_bound_plan():
    bound = EveryTenth().bind(100, 9)
    assert bound.window_starts(np.arange(3)).tolist() == [0, 10, 20]
    assert bound.valid_targets(np.arange(3)) is None
    assert bound.reads(np.arange(3)) is None


@pytest.mark.parametrize("missing", ["num_samples", "window_starts", "key"])
def test_a_bound_plan_without_one_of_them_is_a_type_error(missing):
    own = {name: value for name, value in vars(BoundEveryTenth).items() if not name.startswith("_")}
    del own[missing]
    with pytest.raises(TypeError, match=f"abstract .*{missing}"):
        type("Incomplete", (BoundPlan,), own)()


def test_a_plan_without_bind_is_a_type_error():
    with pytest.raises(TypeError, match=r"abstract method.*bind"):
        type("Incomplete", (Plan,), {})()


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("num_sampels", "num_samples"),
        ("windows_starts", "window_starts"),
        ("valid_target", "valid_targets"),
        ("valid_tragets", "valid_targets"),
        ("read", "reads"),
    ],
)
def test_a_mistyped_method_of_a_bound_plan_is_a_type_error_that_says_what_was_meant(mistyped, meant):
    message = f"Mistyped.{mistyped} is no method of tokenloader.BoundPlan; did you mean {meant}?"
    with pytest.raises(TypeError, match=re.escape(message)):
        type("Mistyped", (BoundEveryTenth,), {mistyped: lambda self, samples: samples})


def test_a_mistyped_bind_is_a_type_error():
    with pytest.raises(TypeError, match=r"Mistyped.binds is no method.*did you mean bind"):
        type("Mistyped", (Plan,), {"binds": lambda self, num_tokens, seq_len: None})


@pytest.mark.parametrize(
    ("base", "hook", "own", "told"),
    [
        (
            BoundEveryTenth,
            "num_samples",
            lambda self: 5,
            "is a function; expected a property or a value: ",
        ),
        (
            BoundEveryTenth,
            "key",
            lambda self: "k",
            "is a function; expected key(self, until_sample: ",
        ),
        (BoundEveryTenth, "key", property(lambda self: "k"), "is a property; expected a method key(self, "),
        (BoundEveryTenth, "key", "EveryTenth()", "is a str; expected a method key(self, until_sample: "),
        (
            BoundEveryTenth,
            "window_starts",
            lambda samples: samples,
            "is a function; expected window_",
        ),
        (BoundEveryTenth, "window_starts", lambda self, a, b: a, "missing a required argument: 'b'"),
        (BoundEveryTenth, "valid_targets", lambda self: None, "too many positional arguments"),
        (BoundEveryTenth, "reads", None, "is a NoneType; expected a method reads(self, samples: "),
        (
            BoundEveryTenth,
            "valid_targets",
            None,
            "is a NoneType; expected a method valid_targets(self, ",
        ),
        (
            BoundEveryTenth,
            "valid_targets",
            cached_property(lambda self: 3),
            "is a cached_property; expec",
        ),
        (
            EveryTenth,
            "bind",
            lambda self, num_tokens: None,
            "expected bind(self, num_tokens: 'int', ",
        ),
        (EveryTenth, "bind", lambda self, *, num_tokens, seq_len: None, "too many positional arguments"),
    ],
)
def test_a_method_that_could_not_be_called_is_a_type_error_where_it_is_written(base, hook, own, told):
    with pytest.raises(TypeError, match=re.escape(told)) as caught:
        type("Mistyped", (base,), {hook: own})
    assert str(caught.value).startswith(f"Mistyped.{hook} is a ")


def test_methods_may_take_more_and_be_inherited_or_wrapped():
    class Mixin:
        @staticmethod
        def key(until_sample, more=None):
            return "k"

    class Fine(Mixin, BoundEveryTenth):
        num_samples = cached_property(lambda self: 5)

        @functools.cache  # noqa: B019
        def valid_targets(self, *samples, **more):
            return None

        @classmethod
        def window_starts(cls, numbers):
            return numbers

    assert Fine(9, 2).key(3) == "k"
    assert Fine(9, 2).num_samples == 5


def test_names_that_resemble_none_are_ones_own():
    type("Fine", (BoundEveryTenth,), {"stride": 10, "_valid_target": None, "seed": 3})


@pytest.mark.parametrize("plan", [None, "ShuffledEpochs", ShuffledEpochs, object()])
def test_what_is_no_plan_is_a_type_error(plan):
    with pytest.raises(TypeError, match=r"expected an instance of tokenloader\.Plan") as caught:
        checked_plan(plan)
    assert repr(plan) in str(caught.value)


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        (np.zeros(3), "float64[3]"),
        (np.zeros(2, int), "int64[2]"),
        (np.zeros((3, 1), int), "[3, 1]"),
    ],
)
def test_starts_that_are_not_one_integer_a_sample_are_an_error(starts, found):
    bound = type("Odd", (BoundEveryTenth,), {"window_starts": lambda self, samples: starts})(9, 2)
    with pytest.raises(ValueError, match="window_starts returned") as caught:
        checked_window_starts(bound, np.arange(3))
    assert f"{found} for 3 samples; expected one integer for each sample" in str(caught.value)


def test_a_plan_may_name_no_reads():
    assert checked_reads(EveryTenth().bind(100, 9), np.array([4, 0]), num_tokens=100) is None


def test_reads_of_integers_become_int64():
    reads = np.array([[0, 30]], np.uint16)
    bound = type("Small", (BoundEveryTenth,), {"reads": lambda self, samples: reads})(9, 2)
    found = checked_reads(bound, np.arange(1), num_tokens=30)
    np.testing.assert_array_equal(found, np.array([[0, 30]]), strict=True)


@pytest.mark.parametrize(
    ("reads", "found"),
    [
        (np.zeros((3, 2)), "float64[3, 2]"),
        (np.zeros((2, 2), int), "int64[2, 2]"),
        (np.zeros((3, 3), int), "int64[3, 3]"),
        (np.zeros(3, int), "int64[3]"),
    ],
)
def test_reads_that_are_not_a_range_for_each_sample_are_an_error(reads, found):
    bound = type("Odd", (BoundEveryTenth,), {"reads": lambda self, samples: reads})(9, 2)
    told = f": reads returned {found} for 3 samples; expected integers [3, 2]: start and stop of a range "
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        checked_reads(bound, np.arange(3), num_tokens=9)
    assert str(caught.value).startswith(repr(bound))


@pytest.mark.parametrize("read", [[-1, 5], [5, 5], [7, 3], [990, 1001]])
def test_reads_that_are_no_range_of_the_tokens_are_an_error_that_names_the_sample(read):
    reads = np.array([[0, 1000], read, read])
    bound = type("Odd", (BoundEveryTenth,), {"reads": lambda self, samples: reads})(1000, 2)
    start, stop = read
    told = f": reads returned [{start:,}, {stop:,}) for sample 8; expected 0 <= start < stop <= 1,000"
    with pytest.raises(ValueError, match=re.escape(told)):
        checked_reads(bound, np.array([7, 8, 9]), num_tokens=1000)


@pytest.mark.parametrize("kind", [*SEEDED, SequentialWindows, Plan, BoundPlan])
def test_plans_call_tokenloader_their_module(kind):
    assert kind.__module__ == "tokenloader"
