"""ShuffledBlocks: every window of an epoch once, by blocks that are shuffled, and shuffled inside."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from helpers import python_permute
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc  # jax depends on scipy

from tokenloader import ShuffledBlocks, ShuffledEpochs
from tokenloader.plans.epochs import epoch_words
from tokenloader.plans.permutation import NUM_ROUNDS
from tokenloader.plans.philox import SHUFFLED_BLOCKS
from tokenloader.plans.split_mix import split_mix

SEQ_LEN = 3
seeds = st.integers(0, 2**64 - 1)


def bound(num_windows, block_windows, open_blocks, seed=0, seq_len=SEQ_LEN):
    """The plan over just the tokens that have so many windows of it."""
    plan = ShuffledBlocks(seed, block_tokens=block_windows * seq_len, open_blocks=open_blocks)
    return plan.bind((num_windows + 1) * seq_len, seq_len)


def phases_and_windows(plan, num_windows, epochs, seq_len=SEQ_LEN):
    """Of epochs from the first on: where each begins, [epochs]; its windows in file order, [epochs, n]."""
    starts = plan.window_starts(np.arange(epochs * num_windows)).reshape(epochs, num_windows)
    phases = starts.min(axis=1)
    return phases, (starts - phases[:, None]) // seq_len


def assert_uniform(counts):
    expected = np.sum(counts) / np.size(counts)
    assert expected > 5  # where chi-square holds
    # Fixed seeds: a truly uniform draw would fail once in 100,000.
    assert chdtrc(np.size(counts) - 1, ((counts - expected) ** 2 / expected).sum()) > 1e-5, counts


# Every window once


def check_epoch(num_windows, block_windows, open_blocks, epoch, seed=0):
    """Asserts of one epoch all that is promised of its windows and its reads."""
    n, plan = num_windows, bound(num_windows, block_windows, open_blocks, seed)
    samples = np.arange(epoch * n, (epoch + 1) * n)
    starts, reads = plan.window_starts(samples), plan.reads(samples)
    assert starts.dtype == reads.dtype == np.int64
    phase = starts.min()
    assert 0 <= phase < SEQ_LEN  # else the last window would not end within the tokens
    assert sorted(starts) == list(range(phase, phase + n * SEQ_LEN, SEQ_LEN))
    # The reads lie end to end, but for the token that the last window of one shares with the next.
    samples_of = {}
    for sample, read in enumerate(map(tuple, reads.tolist())):
        samples_of.setdefault(read, []).append(sample)
    in_order = sorted(samples_of)
    assert (in_order[0][0], in_order[-1][1]) == (phase, phase + n * SEQ_LEN + 1)
    assert all(one[1] - 1 == other[0] for one, other in itertools.pairwise(in_order))
    # Each is for the samples whose windows it holds, which come one after the other in one lane.
    num_lanes = open_blocks
    while num_lanes > max(1, n // block_windows):
        num_lanes //= 2
    num_torn = 0
    for (start, stop), own in samples_of.items():
        assert sorted(starts[own]) == list(range(start, stop - 1, SEQ_LEN))
        assert len(own) <= block_windows
        assert len({sample % num_lanes for sample in own}) == 1
        num_torn += own[-1] - own[0] != (len(own) - 1) * num_lanes
    # But the one segment that lies at both ends of the epoch is two reads, which take turns.
    assert num_torn <= 2
    assert num_torn == 0 or {in_order[0], in_order[-1]} >= {
        read for read, own in samples_of.items() if own[-1] - own[0] != (len(own) - 1) * num_lanes
    }
    return plan


def test_every_epoch_has_every_window_once_and_reads_each_token_once_for_all_small_sizes():
    for n in range(1, 33):
        for block_windows in (2, 3, 7, 40):
            for open_blocks in (1, 2, 3, 8, 40):
                check_epoch(n, block_windows, open_blocks, epoch=n % 3, seed=block_windows)


@pytest.mark.parametrize(("block_windows", "open_blocks"), [(3, 7), (8, 4), (5, 6), (4, 16)])
def test_every_epoch_has_every_window_once_for_all_remainders(block_windows, open_blocks):
    # As many lengths as there are remainders of n by W, of n by G, and of the lane n // G by W.
    product = block_windows * open_blocks
    for n in range(3 * product, 4 * product):
        check_epoch(n, block_windows, open_blocks, epoch=n % 2)


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 20_000),
    block_windows=st.integers(2, 300),
    open_blocks=st.integers(1, 300),
    epoch=st.integers(0, 10**9),
    seed=seeds,
)
def test_every_epoch_has_every_window_once_for_larger_sizes(n, block_windows, open_blocks, epoch, seed):
    check_epoch(n, block_windows, open_blocks, epoch, seed)


# The definition


def python_window(plan, sample, num_tokens, seq_len):
    """Start of a sample's window, and the read that it is of, in Python integers: the definition."""
    n = max(1, num_tokens // seq_len - 1)
    size, num_lanes = min(plan.block_tokens // seq_len, n), plan.open_blocks
    while num_lanes > max(1, n // size):
        num_lanes //= 2
    epoch, index = divmod(sample, n)
    words = epoch_words(plan.seed, SHUFFLED_BLOCKS, np.array([epoch], np.uint64), 2 * NUM_ROUNDS + 3)
    words = [int(word) for word in words]
    # The lane, and the axis positions that it visits one after the other.
    least, longer = divmod(n, num_lanes)
    turn, lane = divmod(index, num_lanes)
    begin, end = (each * least + min(each, longer) for each in (lane, lane + 1))
    room = least - size + 1
    inside = begin + lane * ((math.isqrt(5 * room**2) - room) // 2) % room
    first = inside + (lane * size // num_lanes - inside) % size
    position = first + turn if first + turn < end else begin + first + turn - end
    # The segment: what lies of its block in the lane, before or from the first position on.
    block = position // size
    cuts = [begin, first, end, block * size, (block + 1) * size]
    low = max(cut for cut in cuts if cut <= position)
    high = min(cut for cut in cuts if cut > position)
    segment_seed, rotation, phase = words[2 * NUM_ROUNDS :]
    segment = int(split_mix(np.array([segment_seed], np.uint64), np.array([low], np.uint64))[0])
    keys = [(word + segment) % 2**64 for word in words[:NUM_ROUNDS]]
    within = python_permute(position - low, high - low, keys)
    moved = block
    if block < n // size:  # the short block stays
        moved = python_permute(block, n // size, words[NUM_ROUNDS : 2 * NUM_ROUNDS])
    first_window = (low + (moved - block) * size + rotation) % n
    window = (first_window + within) % n
    stop = first_window + high - low
    read = (0, stop - n) if window < first_window else (first_window, min(stop, n))
    phase %= num_tokens - n * seq_len
    return window * seq_len + phase, [read[0] * seq_len + phase, read[1] * seq_len + phase + 1]


@settings(deadline=None)
@given(
    num_windows=st.one_of(st.integers(1, 10**4), st.integers(1, 2**44)),
    block_windows=st.one_of(st.integers(2, 50), st.integers(2, 2**40)),
    open_blocks=st.one_of(st.integers(1, 50), st.integers(1, 2**24)),
    seq_len=st.sampled_from([1, 2, 1024]),
    more=st.integers(0, 2**10),
    seed=seeds,
    data=st.data(),
)
def test_agrees_with_the_definition_in_python_integers(
    num_windows, block_windows, open_blocks, seq_len, more, seed, data
):
    num_tokens = (num_windows + 1) * seq_len + more % seq_len
    block_tokens = min(block_windows * seq_len, 2**40)
    plan = ShuffledBlocks(seed, block_tokens, open_blocks)
    places = st.one_of(st.integers(0, 10**13), st.integers(num_windows - 3, num_windows + 3).map(abs))
    samples = data.draw(st.lists(places, min_size=1, max_size=6))
    found = plan.bind(num_tokens, seq_len)
    expected = [python_window(plan, sample, num_tokens, seq_len) for sample in samples]
    assert found.window_starts(samples).tolist() == [start for start, _ in expected]
    assert found.reads(samples).tolist() == [read for _, read in expected]


def test_blocks_of_less_than_two_windows_are_shuffled_epochs():
    for block_tokens in (1, 10, 19):
        plan = ShuffledBlocks(5, block_tokens, num_epochs=2).bind(1000, 10)
        assert plan == ShuffledEpochs(5, num_epochs=2).bind(1000, 10)
        assert plan.key(3) == "ShuffledEpochs(seed=5)"
        assert plan.reads(np.arange(3)) is None
    assert ShuffledBlocks(5, 20).bind(1000, 10).key(3) == (
        "ShuffledBlocks(seed=5, block_tokens=20, open_blocks=1024)"
    )


def test_block_tokens_are_rounded_down_to_whole_windows():
    exact, more = (ShuffledBlocks(1, tokens, 4).bind(10_000, 10) for tokens in (80, 89))
    samples = np.arange(2000)
    np.testing.assert_array_equal(exact.window_starts(samples), more.window_starts(samples))


@pytest.mark.parametrize(("open_blocks", "num_lanes"), [(64, 16), (63, 15), (30, 30), (31, 15), (1000, 15)])
def test_open_blocks_are_halved_until_the_tokens_have_as_many(open_blocks, num_lanes):
    samples = np.arange(600)
    found, expected = (bound(300, 10, lanes).window_starts(samples) for lanes in (open_blocks, num_lanes))
    np.testing.assert_array_equal(found, expected)


def test_data_of_a_window_or_two_is_those_every_epoch():
    one = ShuffledBlocks(0).bind(11, 10)
    assert one.window_starts(np.arange(5)).tolist() == [0] * 5
    assert one.reads(np.arange(5)).tolist() == [[0, 11]] * 5
    starts = ShuffledBlocks(0).bind(30, 10).window_starts(np.arange(80)).reshape(40, 2)
    assert set(np.diff(starts).ravel().tolist()) == {-10, 10}


def test_no_samples_have_no_starts_and_no_reads():
    none = np.empty(0, np.int64)
    assert bound(100, 5, 4).window_starts(none).shape == (0,)
    assert bound(100, 5, 4).reads(none).shape == (0, 2)


def test_reads_depend_on_the_sample_number_alone():
    n, plan = 100, bound(100, 7, 4, seed=3)
    samples = np.arange(6 * n)
    whole = plan.reads(samples)
    order = np.random.default_rng(0).permutation(samples.size)
    np.testing.assert_array_equal(plan.reads(samples[order]), whole[order])
    for size in (7, 32):
        parts = [plan.reads(samples[at : at + size]) for at in range(0, samples.size, size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


# Shuffled


def test_every_window_is_equally_often_at_each_place_of_the_epoch():
    for n, block_windows, open_blocks in [(22, 4, 2), (24, 4, 3), (21, 5, 1)]:
        _, windows = phases_and_windows(bound(n, block_windows, open_blocks, seed=1), n, 3000)
        for place in range(n):
            assert_uniform(np.bincount(windows[:, place], minlength=n))


def first_of_pairs(windows):
    """The window that begins each block of two windows, in their order: [epochs, n // 2]."""
    one, other = windows[:, 0::2], windows[:, 1::2]
    return np.where((one + 1) % windows.shape[1] == other, one, other)


def test_every_order_of_the_blocks_appears_equally_often_and_independent_of_the_epoch_before():
    n = 8  # 4 blocks of 2, one lane
    first = first_of_pairs(phases_and_windows(bound(n, 2, 1, seed=2), n, 30_000)[1])
    after_first = (first[:, 1:] - first[:, :1]) % n // 2  # an order of 1, 2, 3, whatever the rotation
    kind = after_first @ [16, 4, 1]
    names, kind = np.unique(kind, return_inverse=True)
    assert len(names) == math.factorial(3)
    assert_uniform(np.bincount(kind))
    assert_uniform(np.bincount(kind[:-1] * 6 + kind[1:]))
    assert_uniform(np.bincount(first[:, 0], minlength=n))  # the rotation
    assert_uniform(np.bincount(first[:-1, 0] * n + first[1:, 0], minlength=n * n))


def segments(block_windows, num_blocks, open_blocks, seed=0):
    """Places of windows in their segments of one epoch: [whole segments, block_windows], lane by lane."""
    n = block_windows * num_blocks
    plan = bound(n, block_windows, open_blocks, seed)
    samples = np.arange(n).reshape(-1, open_blocks).T.ravel()
    starts, reads = plan.window_starts(samples), plan.reads(samples)
    whole = reads[:, 1] - reads[:, 0] == block_windows * SEQ_LEN + 1
    return ((starts - reads[:, 0])[whole] // SEQ_LEN).reshape(-1, block_windows)


def test_every_order_within_a_block_appears_equally_often():
    orders = segments(4, 24 * 400, 16, seed=1)
    assert len(orders) > 9000
    names, counts = np.unique(orders @ [64, 16, 4, 1], return_counts=True)
    assert len(names) == math.factorial(4)
    assert_uniform(counts)


@pytest.mark.parametrize("block_windows", [8, 11])
def test_windows_of_a_block_are_equally_often_at_each_place_of_its_visit(block_windows):
    orders = segments(block_windows, 10_000, 16, seed=4)
    for place in range(block_windows):
        assert_uniform(np.bincount(orders[:, place], minlength=block_windows))


@pytest.mark.parametrize("apart", [1, 2, 10_000 // 16])  # in a lane; and in the next lane
def test_orders_within_neighbouring_blocks_are_independent(apart):
    orders = segments(8, 10_000, 16, seed=5)
    for place, other in itertools.product((0, 3, 7), repeat=2):
        joint = orders[:-apart, place] * 8 + orders[apart:, other]
        assert_uniform(np.bincount(joint, minlength=64))


@pytest.mark.parametrize("num_bits", [3, 6, 8])
def test_neighbours_in_a_visit_differ_in_each_bit_as_in_a_random_order(num_bits):
    n = 2**num_bits
    orders = segments(n, 2**16 // n, 16, seed=6)
    differences = (orders[:, ::2] ^ orders[:, 1::2]).ravel()  # each of 1 to n - 1 equally often
    assert_uniform(np.bincount(differences, minlength=n)[1:])


def test_phases_are_uniform_and_independent_of_the_order():
    n, seq_len = 8, 10
    plan = ShuffledBlocks(1, block_tokens=20, open_blocks=1).bind((n + 1) * seq_len + 8, seq_len)
    phases, windows = phases_and_windows(plan, n, 20_000, seq_len)
    assert_uniform(np.bincount(phases, minlength=18))
    assert_uniform(np.bincount(phases[:-1] * 18 + phases[1:], minlength=18 * 18))
    assert_uniform(np.bincount(phases * n + windows[:, 0], minlength=18 * n))
    is_rotated_oddly = first_of_pairs(windows)[:, 0] % 2
    assert_uniform(np.bincount(phases * 2 + is_rotated_oddly))


def test_each_bit_of_the_seed_changes_orders_rotation_and_phase():
    size, num_blocks, seq_len = 500, 8, 1000

    def parts(seed):
        plan = bound(size * num_blocks, size, 1, seed, seq_len)
        (phase,), windows = phases_and_windows(plan, size * num_blocks, 1, seq_len)
        blocks = windows.reshape(num_blocks, size)
        inner = blocks[blocks.max(axis=1) - blocks.min(axis=1) == size - 1][:2]  # not at both ends
        first = inner.min(axis=1)
        orders = [tuple(blocks[:, 0] // size), *map(tuple, inner - first[:, None])]
        return [phase, first[0] % size, *orders]

    base = parts(3)
    flipped = [parts(3 ^ 1 << bit) for bit in range(64)]
    for i, what in enumerate(["phase", "rotation", "blocks", "one block", "another block"]):
        # One of 64 may be equal by chance where there are 500 or 1,000 values.
        assert sum(each[i] == base[i] for each in flipped) <= (1 if i < 2 else 0), what
        assert len({each[i] for each in flipped}) >= (58 if i < 2 else 64), what


def test_windows_of_an_epoch_and_of_the_next_are_independent_and_those_of_other_seeds():
    n, epochs = 12, 6000
    own = phases_and_windows(bound(n, 4, 1, seed=7), n, epochs)[1]
    for place, other in [(0, 0), (5, 5), (0, 11)]:
        assert_uniform(np.bincount(own[:-1, place] * n + own[1:, other], minlength=n * n))
        for seed in (6, 7 + 2**32, 7 + 2**63):
            others = phases_and_windows(bound(n, 4, 1, seed), n, epochs)[1]
            assert_uniform(np.bincount(own[:, place] * n + others[:, other], minlength=n * n))


def test_no_epoch_is_another_one_of_the_same_or_another_seed():
    windows = [phases_and_windows(bound(90, 9, 4, seed), 90, 10)[1] for seed in range(10)]
    assert len(np.unique(np.concatenate(windows), axis=0)) == 10 * 10


def test_draws_other_windows_than_shuffled_epochs_of_the_same_seed():
    ours = ShuffledBlocks(3, block_tokens=8).bind(10**6, 1).window_starts(np.arange(1000))
    theirs = ShuffledEpochs(3).bind(10**6, 1).window_starts(np.arange(1000))
    assert np.count_nonzero(ours == theirs) < 5


# The end, the name, the arguments


def test_num_epochs_ends_the_plan_and_takes_no_part_in_the_order_or_the_name():
    endless, ending = (ShuffledBlocks(9, 30, 2, num_epochs).bind(96, 10) for num_epochs in (None, 3))
    assert (endless.num_samples, ending.num_samples) == (None, 24)
    samples = np.arange(24)
    np.testing.assert_array_equal(ending.window_starts(samples), endless.window_starts(samples))
    np.testing.assert_array_equal(ending.reads(samples), endless.reads(samples))
    assert ending.key(16) == endless.key(16) == "ShuffledBlocks(seed=9, block_tokens=30, open_blocks=2)"
    for ask in (ending.window_starts, ending.reads):
        with pytest.raises(ValueError, match=r"^sample 24 is past the end: 3 epochs of 8 windows$"):
            ask(np.array([3, 24]))


def test_a_plan_is_a_value():
    plan = ShuffledBlocks(1, 2**10, 16, 3)
    same = ShuffledBlocks(np.uint64(1), np.int32(2**10), np.uint8(16), np.int64(3))
    assert plan == same
    assert hash(plan) == hash(same)
    assert (repr(plan), plan.bind(10**5, 10).key(0)) == (repr(same), same.bind(10**5, 10).key(0))
    assert repr(same) == "ShuffledBlocks(seed=1, block_tokens=1024, open_blocks=16, num_epochs=3)"
    assert plan.bind(10**5, 10) == same.bind(np.uint32(10**5), np.int16(10))
    others = [dataclasses.replace(plan, **{field.name: 9}) for field in dataclasses.fields(plan)]
    assert len({plan, *others}) == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seed = 2


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ((-1,), ValueError, "seed=-1 is not in [0, 2**64)"),
        ((2**64,), ValueError, "seed=18446744073709551616 is not in [0, 2**64)"),
        ((1.5,), TypeError, "seed=1.5 is of type float; expected an integer"),
        ((0, 0), ValueError, "block_tokens=0; expected 1 to 1,099,511,627,776"),
        ((0, 2**40 + 1), ValueError, "block_tokens=1099511627777; expected 1 to 1,099,511,627,776"),
        ((0, 2.0**18), TypeError, "block_tokens=262144.0; expected an integer"),
        ((0, 8, 0), ValueError, "open_blocks=0; expected 1 to 16,777,216"),
        ((0, 8, 2**24 + 1), ValueError, "open_blocks=16777217; expected 1 to 16,777,216"),
        ((0, 8, "4"), TypeError, "open_blocks='4'; expected an integer"),
        ((0, 8, None), TypeError, "open_blocks=None; expected an integer"),
        ((0, 8, 4, 0), ValueError, "num_epochs=0; expected 1 or more, or None for no end"),
        ((0, 8, 4, 2.0), TypeError, "num_epochs=2.0; expected an integer, or None"),
    ],
    ids=repr,
)
def test_an_argument_out_of_range_is_refused_with_what_it_is(arguments, error, told):
    with pytest.raises(error, match=f"^ShuffledBlocks: {re.escape(told)}$"):
        ShuffledBlocks(*arguments)
