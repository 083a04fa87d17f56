"""Mixtures: exact proportions at every prefix, and each source as its plan alone goes through it."""

import copy
import dataclasses
import itertools
import math
import pickle
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenloader as tl
from tokenloader import Mixture, RandomWindows, SequentialWindows, ShuffledBlocks, ShuffledEpochs
from tokenloader.plans.proportions import Proportions, left_count

PLAN = ShuffledEpochs(seed=1)
BOUND = 1.68
FIBONACCI = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]


def mixture_of(weights, plan=PLAN, length=50):
    """A source of `length` tokens for each weight, end to end."""
    ranges = (range(k * length, (k + 1) * length) for k in range(len(weights)))
    return Mixture(dict(zip(ranges, weights, strict=True)), plan)


def assigned(mixture, samples):
    """(source, number in it) of each sample."""
    source, number = np.full(len(samples), -1), np.zeros(len(samples), np.uint64)
    proportions = Proportions.of_weights(mixture.weights)
    for k, where, numbers in proportions.assign(np.asarray(samples, np.uint64)):
        source[where], number[where] = k, numbers
    return source, number


def counts_of(mixture, num_samples):
    return Proportions.of_weights(mixture.weights).counts(num_samples)


# Proportions


def worst_error(weights, num_samples):
    source, number = assigned(mixture_of(weights), range(num_samples))
    came = np.arange(len(weights))[:, None] == source  # [K, n]
    counts = came.cumsum(axis=1)
    # The number in the source is the count of those before it.
    np.testing.assert_array_equal(number, counts[source, np.arange(num_samples)] - 1)
    share = np.array([weight / sum(weights) for weight in weights])
    return np.abs(counts - share[:, None] * np.arange(1, num_samples + 1)).max()


@pytest.mark.parametrize("num_sources", [2, 3, 4])
def test_counts_are_within_the_bound_at_every_prefix_for_all_small_weights(num_sources):
    bound = {2: 0.5, 3: 1.0}.get(num_sources, BOUND)
    for weights in itertools.combinations_with_replacement(range(1, 9), num_sources):
        assert worst_error(weights, 2 * sum(weights)) <= bound + 1e-9, weights


@pytest.mark.parametrize(
    "weights",
    [
        FIBONACCI,
        FIBONACCI[::-1],
        [1] * 100,
        [2**k for k in range(14)],
        [1, 1, 10_000],
        [7, *FIBONACCI],
    ],
    ids=str,
)
def test_counts_are_within_the_bound_at_every_prefix_for_deep_and_flat_trees(weights):
    assert worst_error(weights, sum(weights) * 2) <= BOUND


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=30))
def test_counts_are_within_the_bound_at_every_prefix_for_any_weights(weights):
    assert worst_error(weights, 3000) <= BOUND


@settings(deadline=None)
@given(
    weights=st.lists(
        st.one_of(st.integers(1, 100), st.integers(1, 2**55), st.fractions(1, 10**6)),
        min_size=1,
        max_size=12,
    ),
    near=st.integers(0, 2**62),
)
def test_counts_are_within_the_bound_at_sample_2_to_the_62(weights, near):
    mixture = mixture_of(weights)
    source, number = assigned(mixture, range(near, near + 200))
    counts = counts_of(mixture, near)
    total = sum(map(Fraction, weights))
    for n in range(near, near + 200):
        assert sum(counts) == n
        for count, weight in zip(counts, weights, strict=True):
            # Weights without a common unit of 2**-62 are rounded, by at most n * 2**-61 samples.
            assert abs(count - n * Fraction(weight) / total) < BOUND + 2
        k = source[n - near]
        assert number[n - near] == counts[k]
        counts[k] += 1
    assert counts == counts_of(mixture, near + 200)


@settings(deadline=None)
@given(weights=st.lists(st.integers(1, 2**58), min_size=1, max_size=8), n=st.integers(0, 2**62))
def test_whole_weights_are_exact_at_any_sample(weights, n):
    for count, weight in zip(counts_of(mixture_of(weights), n), weights, strict=True):
        assert abs(count - Fraction(n * weight, sum(weights))) < BOUND


@given(
    n=st.lists(st.one_of(st.integers(0, 100), st.integers(0, 2**63 - 1)), min_size=1, max_size=20),
    b=st.one_of(st.integers(2, 100), st.integers(2, 2**62 - 1)),
    data=st.data(),
)
def test_the_share_of_a_fork_is_exact_in_64_bits(n, b, data):
    a = data.draw(st.integers(1, b - 1))
    left = left_count(np.array(n, np.uint64), a, b)
    assert left.tolist() == [math.floor(Fraction(m * a, b) + Fraction(1, 2)) for m in n]


# Windows


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(11, 60), min_size=1, max_size=5),
    gap=st.integers(0, 5),
    plan=st.sampled_from([PLAN, RandomWindows(3), ShuffledBlocks(3, 20, 2)]),
    seed=st.integers(0, 100),
)
def test_each_source_is_gone_through_as_by_its_plan_alone(lengths, gap, plan, seed):
    ends = list(itertools.accumulate((length + gap for length in lengths), initial=gap))
    ranges = [range(end, end + length) for end, length in zip(ends, lengths, strict=False)]
    weights = np.random.default_rng(seed).integers(1, 20, len(ranges)).tolist()
    mixture = Mixture(dict(zip(ranges, weights, strict=True)), plan)
    starts = mixture.bind(ends[-1] + 7, 10).window_starts(range(300))
    assert starts.dtype == np.int64
    for tokens in ranges:
        of_source = starts[(starts >= tokens.start) & (starts < tokens.stop)]
        assert (of_source + 11 <= tokens.stop).all()
        alone = plan.bind(len(tokens), 10).window_starts(range(len(of_source)))
        np.testing.assert_array_equal(of_source, tokens.start + alone)


@settings(deadline=None)
@given(samples=st.lists(st.integers(0, 2**62), min_size=0, max_size=20), data=st.data())
def test_a_start_depends_on_the_mixture_and_the_sample_number_alone(samples, data):
    mixture, size = mixture_of([5, 1, 7, 2]), {"num_tokens": 200, "seq_len": 7}
    together = mixture.bind(**size).window_starts(samples)
    assert together.tolist() == [int(mixture.bind(**size).window_starts([i])[0]) for i in samples]
    order = data.draw(st.permutations(range(len(samples))))
    shuffled = mixture.bind(**size).window_starts(np.array(samples, np.int64)[order])
    np.testing.assert_array_equal(shuffled, together[order])


def test_each_source_is_read_in_blocks_of_its_own_as_by_its_plan_alone():
    plan = ShuffledBlocks(seed=2, block_tokens=60, open_blocks=4)
    mixture = Mixture({range(7, 807): 3, range(900, 1400): 1}, plan)
    bound, samples = mixture.bind(2000, 10), np.arange(400)
    source, number = assigned(mixture, samples)
    reads = bound.reads(samples)
    for k, tokens in enumerate(mixture.ranges):
        alone = plan.bind(len(tokens), 10).reads(number[source == k].astype(np.int64))
        np.testing.assert_array_equal(reads[source == k], tokens.start + alone, strict=True)
    order = np.random.default_rng(0).permutation(400)
    np.testing.assert_array_equal(bound.reads(samples[order]), reads[order])


def test_a_mixture_of_mixtures_reads_each_source_in_blocks():
    plan = ShuffledBlocks(seed=2, block_tokens=60, open_blocks=4)
    inner = Mixture({range(500): 1, range(500, 900): 1}, plan)
    samples = np.arange(100)
    found = Mixture({range(100, 1000): 5}, inner).bind(1000, 10).reads(samples)
    np.testing.assert_array_equal(found, 100 + inner.bind(900, 10).reads(samples))


def test_sources_that_are_read_window_by_window_are_so_in_a_mixture():
    assert mixture_of([1, 2]).bind(100, 10).reads(np.arange(5)) is None


def test_a_source_that_is_read_window_by_window_beside_one_in_blocks_is_read_by_its_windows():
    class BlocksWhereLong(tl.Plan):
        def bind(self, num_tokens, seq_len):
            plan = ShuffledBlocks(1, 60, 4) if num_tokens > 500 else ShuffledEpochs(1)
            return plan.bind(num_tokens, seq_len)

    mixture = Mixture({range(800): 1, range(800, 1200): 1}, BlocksWhereLong())
    bound, samples = mixture.bind(1200, 10), np.arange(100)
    starts, reads = bound.window_starts(samples), bound.reads(samples)
    is_long = starts < 800
    np.testing.assert_array_equal(
        reads[~is_long], np.stack([starts, starts + 11], axis=1)[~is_long], strict=True
    )
    assert (reads[is_long, 1] - reads[is_long, 0] > 11).any()


def test_samples_may_have_any_shape_as_for_other_plans():
    mixture, size = mixture_of([5, 1, 7, 2]), {"num_tokens": 200, "seq_len": 7}
    flat = mixture.bind(**size).window_starts(range(12))
    np.testing.assert_array_equal(
        mixture.bind(**size).window_starts(np.arange(12).reshape(3, 4)),
        flat.reshape(3, 4),
        strict=True,
    )
    assert mixture.bind(**size).window_starts([]).shape == (0,)


def test_the_starts_of_a_mixture_stay_what_they_were():
    # A saved run goes on with them. Whoever changes them breaks every run that is under way.
    mixture = Mixture(
        {range(0, 6 * 10**9): 0.6, range(6 * 10**9, 9 * 10**9): 0.3, range(9 * 10**9, 10**10): 0.1},
        ShuffledEpochs(seed=0),
    )
    starts = mixture.bind(10**10, 1024).window_starts([0, 1, 2, 3, 10**7, 10**12])
    assert starts.tolist() == STARTS_OF_A_MIXTURE


STARTS_OF_A_MIXTURE = [5840581002, 7912437130, 2297067914, 9345364874, 4430296946, 3621394249]


def test_open_tokens_stand_for_consecutive_ranges_in_the_order_given():
    web, books = (tl.open_tokens(np.arange(n, dtype=np.uint16)) for n in (100, 30))
    assert Mixture({web: 3, books: 1}, PLAN) == Mixture({range(100): 3, range(100, 130): 1}, PLAN)
    assert Mixture({books: 1, web: 3}, PLAN) == Mixture({range(30): 1, range(30, 130): 3}, PLAN)


def test_open_tokens_are_drawn_from_in_proportion_on_their_joint_axis(tmp_path):
    paths = [tmp_path / "web.bin", tmp_path / "books.bin"]
    for path, values in zip(paths, (range(1000), range(5000, 5300)), strict=True):
        np.array(values, np.uint16).tofile(path)
    web, books = (tl.open_tokens(path, dtype="uint16") for path in paths)
    both = tl.open_tokens(paths, dtype="uint16")
    with tl.TokenLoader(both, 8, 20, plan=Mixture({web: 3, books: 1}, PLAN)) as loader:
        for batch in itertools.islice(loader, 20):
            of_books = np.asarray(batch.inputs) >= 5000
            assert of_books.any(axis=1).sum() == of_books.all(axis=1).sum() == 2
            assert (np.asarray(batch.targets) >= 5000).sum() == 2 * 20


def test_a_loader_draws_from_all_sources_in_proportion():
    array = np.repeat(np.arange(3, dtype=np.uint16), 200)
    mixture = mixture_of([6, 3, 1], length=200)
    with tl.TokenLoader(tl.open_tokens(array), 10, 9, plan=mixture) as loader:
        for batch in itertools.islice(loader, 50):
            assert np.bincount(np.asarray(batch.inputs)[:, 0], minlength=3).tolist() == [6, 3, 1]
            assert (batch.inputs == batch.targets).all()  # no window crosses


# Names and values


def test_equal_mixtures_have_equal_names_and_others_have_not():
    a, b = range(100), range(100, 300)
    mixture = Mixture({a: 1, b: 3}, PLAN)
    for same in (
        Mixture({b: 3, a: 1}, PLAN),
        Mixture({a: 2, b: 6}, PLAN),
        Mixture({a: 0.25, b: 0.75}, PLAN),
        Mixture({a: np.float32(0.1), b: np.float64(0.3)}, PLAN),
        Mixture({a: Fraction(1, 3), b: np.int64(1)}, PLAN),
        Mixture({a: Decimal("1e-5"), b: 3e-5}, PLAN),
        Mixture({a: 1e300, b: 3e300}, PLAN),
        Mixture({range(np.int64(0), np.int64(100)): 1, b: 3}, PLAN),
        pickle.loads(pickle.dumps(mixture)),
        copy.deepcopy(mixture),
    ):
        assert same == mixture
        assert hash(same) == hash(mixture)
        assert repr(same) == repr(mixture)
    for other in (
        Mixture({a: 3, b: 1}, PLAN),
        Mixture({a: 1, b: 3}, ShuffledEpochs(2)),
        Mixture({a: 1, range(100, 299): 3}, PLAN),
        Mixture({a: 1}, PLAN),
    ):
        assert other != mixture
        assert repr(other) != repr(mixture)


def test_the_name_shows_ranges_weights_and_the_plans_own_name():
    plan = ShuffledEpochs(seed=4, num_epochs=2)
    mixture = Mixture({range(100, 300): 0.7, range(100): 0.3}, plan)
    sources = "range(0, 100): 3, range(100, 300): 7"
    assert repr(mixture) == f"Mixture({{{sources}}}, ShuffledEpochs(seed=4, num_epochs=2))"
    assert mixture.bind(300, 9).key(5) == f"Mixture({{{sources}}}, ShuffledEpochs(seed=4))"


def test_a_mixture_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixture_of([1, 2]).plan = RandomWindows(0)


def test_weights_without_a_common_unit_are_rounded_and_stay_below_2_to_the_62():
    weights = [Fraction(1, 10**15 + 37), Fraction(1, 3**30), Fraction(2, 7)]
    mixture = mixture_of(weights)
    assert sum(mixture.weights) < 2**62
    for kept, given_ in zip(mixture.weights, weights, strict=True):
        assert abs(Fraction(kept, sum(mixture.weights)) - given_ / sum(weights)) < Fraction(2, 2**61)


# One source


def test_ranges_of_one_file_are_a_train_and_a_validation_set():
    array = np.arange(1000, dtype=np.uint16)
    tokens = tl.open_tokens(array)
    train = Mixture({range(900): 1}, ShuffledEpochs(0, num_epochs=2))
    validation = Mixture({range(900, 1000): 1}, SequentialWindows())
    with tl.TokenLoader(tokens, 4, 30, plan=train) as loader:
        seen = np.concatenate([np.ravel(batch.targets) for batch in loader])
        assert loader.get_state()["plan"] == "Mixture({range(0, 900): 1}, ShuffledEpochs(seed=0))"
    assert seen.max() < 900
    assert len(seen) == 2 * 29 * 30 // (4 * 30) * (4 * 30)
    with tl.TokenLoader(tokens, 2, 16, plan=validation) as loader:
        targets = [np.asarray(batch.targets)[np.asarray(batch.loss_mask)] for batch in loader]
    assert np.concatenate(targets).tolist() == list(range(901, 1000))


@pytest.mark.parametrize(
    "plan",
    [PLAN, RandomWindows(2), ShuffledEpochs(3, 2), ShuffledBlocks(3, 30, 2, 2), SequentialWindows()],
)
def test_one_source_that_is_all_tokens_is_the_plan_itself(plan):
    mixture, size = Mixture({range(100): 5}, plan), {"num_tokens": 100, "seq_len": 9}
    np.testing.assert_array_equal(
        mixture.bind(**size).window_starts(range(10)), plan.bind(**size).window_starts(range(10))
    )
    assert mixture.bind(**size).num_samples == plan.bind(**size).num_samples
    np.testing.assert_array_equal(
        mixture.bind(**size).valid_targets(range(15)), plan.bind(**size).valid_targets(range(15))
    )


def test_the_valid_targets_of_a_range_are_those_of_its_own_length():
    mixture = Mixture({range(20, 45): 1}, SequentialWindows())
    size = {"num_tokens": 1000, "seq_len": 10}
    assert mixture.bind(**size).num_samples == 3
    assert mixture.bind(**size).window_starts(range(3)).tolist() == [20, 30, 34]
    assert mixture.bind(**size).valid_targets(range(4)).tolist() == [10, 10, 4, 0]


def test_a_mixture_may_be_a_part_of_the_tokens_and_then_a_mixture():
    inner = Mixture({range(50): 1, range(50, 90): 1}, PLAN)
    mixture = Mixture({range(10, 100): 1}, inner)
    size = {"num_tokens": 500, "seq_len": 4}
    expected = 10 + inner.bind(90, 4).window_starts(range(30))
    np.testing.assert_array_equal(mixture.bind(**size).window_starts(range(30)), expected)


# The end


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    num_epochs=st.integers(1, 3),
    lengths=st.lists(st.integers(11, 80), min_size=4, max_size=4),
)
def test_the_mixture_ends_where_the_first_source_would_run_out(weights, num_epochs, lengths):
    ends = list(itertools.accumulate(lengths, initial=0))
    ranges = [range(a, b) for a, b in itertools.pairwise(ends)][: len(weights)]
    plan = ShuffledEpochs(0, num_epochs)
    mixture = Mixture(dict(zip(ranges, weights, strict=True)), plan)
    size = {"num_tokens": ends[-1], "seq_len": 10}
    end = mixture.bind(**size).num_samples
    assert len(mixture.bind(**size).window_starts(range(end))) == end
    with pytest.raises(ValueError, match=r"is past the end"):
        mixture.bind(**size).window_starts([end])


def test_a_mixture_of_endless_plans_has_no_end():
    size = {"num_tokens": 100, "seq_len": 10}
    assert mixture_of([1, 2]).bind(**size).num_samples is None
    assert mixture_of([1, 2], RandomWindows(0)).bind(**size).num_samples is None


def test_the_end_of_very_many_epochs_is_found_at_once():
    mixture = mixture_of([1, 3], ShuffledEpochs(0, num_epochs=10**15), length=100)
    end = mixture.bind(200, 10).num_samples
    assert end == 12 * 10**15  # 9 windows an epoch, three quarters of all samples


def test_a_loader_over_a_mixture_ends_with_it_and_resumes():
    tokens = tl.open_tokens(np.arange(200, dtype=np.uint16))
    plan = mixture_of([1, 3], ShuffledEpochs(0, num_epochs=2), length=100)
    with tl.TokenLoader(tokens, 5, 10, plan=plan, transform=None) as loader:
        blocks = [next(loader), next(loader)]
        state = loader.get_state()
        whole = np.concatenate([*blocks, *loader])
        loader.set_state(state)
        np.testing.assert_array_equal(np.concatenate(list(loader)), whole[10:])
    assert len(whole) == 20  # 18 windows are three quarters of 24 samples


# Errors


def test_several_sources_counted_target_by_target_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="3 sources do not come to their ends together") as caught:
        mixture_of([1, 2, 3], SequentialWindows()).bind(150, 9)
    assert "plan=Mixture({range(0, 50): 1}, SequentialWindows())" in str(caught.value)


def test_ranges_that_overlap_are_refused_and_both_are_named():
    with pytest.raises(ValueError, match=r"range\(0, 100\) and range\(99, 200\) overlap; cut them"):
        Mixture({range(99, 200): 1, range(100): 2}, PLAN)


@pytest.mark.parametrize(
    "source", [range(0), range(5, 5), range(9, 3), range(-5, 10), range(0, 10, 2), range(9, 3, -1)]
)
def test_a_range_that_is_no_stretch_of_tokens_is_refused(source):
    message = f"Mixture: {source}; expected a range(start, stop) with 0 <= start < stop"
    with pytest.raises(ValueError, match=re.escape(message)):
        Mixture({source: 1}, PLAN)


@pytest.mark.parametrize("source", ["web.bin", 5, (0, 10), None])
def test_a_source_of_another_type_is_refused(source):
    message = f"source {source!r} is of type {type(source).__name__}; expected a range"
    with pytest.raises(TypeError, match=re.escape(message)):
        Mixture({source: 1}, PLAN)


def test_ranges_and_token_arrays_are_not_mixed():
    tokens = tl.open_tokens(np.arange(10, dtype=np.uint16))
    with pytest.raises(TypeError, match=r"range\(0, 5\) and TokenArray.* are of two kinds"):
        Mixture({range(5): 1, tokens: 1}, PLAN)
    with pytest.raises(TypeError, match=r"TokenArray.* and range\(0, 5\) are of two kinds"):
        Mixture({tokens: 1, range(5): 1}, PLAN)


@pytest.mark.parametrize("weight", [0, -1, 0.0, -0.5, math.nan, math.inf, Fraction(0), Decimal("nan")])
def test_a_weight_that_is_not_positive_and_finite_is_refused(weight):
    message = f"the weight of range(0, 9) is {weight!r}; expected a positive finite number"
    with pytest.raises(ValueError, match=re.escape(message)):
        Mixture({range(9): weight}, PLAN)


@pytest.mark.parametrize("weight", ["1", None, True, 1j])
def test_a_weight_that_is_no_number_is_refused(weight):
    message = f"the weight of range(0, 9) is {weight!r} of type {type(weight).__name__}; expected"
    with pytest.raises(TypeError, match=re.escape(message)):
        Mixture({range(9): weight}, PLAN)


def test_a_weight_that_rounds_to_nothing_is_refused():
    with pytest.raises(ValueError, match=r"the least weight is 1e-30 of the total; expected 4.34e-19"):
        mixture_of([1, 1e-30])


@pytest.mark.parametrize("weights", [None, [(range(5), 1)], range(5)])
def test_weights_that_are_no_dict_are_refused(weights):
    with pytest.raises(TypeError, match=f"weights is of type {type(weights).__name__}; expected"):
        Mixture(weights, PLAN)


def test_no_sources_are_refused():
    with pytest.raises(ValueError, match="there are no sources"):
        Mixture({}, PLAN)


@pytest.mark.parametrize("plan", [ShuffledEpochs, None, "plan"])
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(TypeError, match=re.escape(f"plan is {plan!r}; expected an instance")):
        Mixture({range(5): 1}, plan)


def test_a_source_beyond_the_tokens_is_an_error_of_the_loader_and_of_starts():
    tokens = tl.open_tokens(np.arange(1050, dtype=np.uint16))
    mixture = Mixture({range(500): 1, range(1000, 2000): 1}, PLAN)
    with pytest.raises(
        ValueError, match=r"range\(1000, 2000\) does not lie within the 1,050 tokens; open all"
    ):
        tl.TokenLoader(tokens, 2, 4, plan=mixture)
    with pytest.raises(ValueError, match=r"within the 1,999 tokens"):
        mixture.bind(1999, 4).window_starts([0])


def test_a_source_shorter_than_a_window_is_named():
    mixture = Mixture({range(500): 1, range(500, 510): 1}, PLAN)
    with pytest.raises(ValueError, match=r"range\(500, 510\): 10 tokens are fewer than one window"):
        mixture.bind(1000, 10).window_starts([0])
