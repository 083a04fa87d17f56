"""How much more than they need processes read, what is said of it, and whether what is advised mends it."""

import math
import types
import warnings
from dataclasses import dataclass, replace
from itertools import product

import jax
import numpy as np
import pytest
from helpers import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tokenloader as tl
from tokenloader.loader.shared_reads import (
    batch_sizes_near,
    blocks_near,
    read_factor,
    rows_held,
    samples_apart,
    warn_of_shared_reads,
)

N, T = 10_248_871_837, 1024
HALVES = range(N // 2), range(N // 2, N)


def contiguous(num_processes):
    """Each process holds a part of the rows."""
    return np.eye(num_processes, dtype=bool)


def factor_of(plan, batch_size, held, num_tokens=N, seq_len=T):
    return read_factor(plan.bind(num_tokens, seq_len), held, batch_size, num_tokens)


@dataclass(frozen=True)
class Dealt(tl.Plan):
    """Samples from `lanes` in turn, each lane a read of its own."""

    lanes: int

    def bind(self, num_tokens, seq_len):
        return BoundDealt(self)


@dataclass(frozen=True)
class BoundDealt(tl.BoundPlan):
    plan: Dealt
    num_samples = None

    def window_starts(self, samples):
        return samples % self.plan.lanes * 100

    def reads(self, samples):
        starts = self.window_starts(samples)
        return np.stack([starts, starts + 100], axis=1)

    def key(self, until_sample):
        return repr(self)


HELD = {
    "one part each": [[0], [1], [2], [3]],
    "two parts each": [[0, 1], [2, 3]],
    "parts in turn": [[0, 2], [1, 3]],
    "copies": [[0, 1], [0, 1], [2, 3], [2, 3]],
    "copies of some": [[0, 1], [1, 2], [3]],
    "all of all": [[0, 1, 2, 3], [0, 1, 2, 3]],
}


@pytest.mark.parametrize("parts_of", HELD.values(), ids=HELD)
def test_the_factor_is_what_all_read_by_what_they_would_read_of_blocks_that_keep_to_a_row(parts_of):
    held = np.array([[part in own for part in range(4)] for own in parts_of])
    for batch_size, lanes in product(range(4, 33, 4), range(1, 25)):
        common = math.gcd(batch_size, lanes)
        read = 0
        for own in parts_of:
            rows = [row for row in range(batch_size) if row * 4 // batch_size in own]
            read += len({row % common for row in rows}) / common
        needed = sum(map(len, parts_of)) / 4
        found = factor_of(Dealt(lanes), batch_size, held)
        assert found == pytest.approx(read / needed, rel=0.01), (batch_size, lanes)


@pytest.mark.parametrize(
    ("batch_size", "num_processes", "factor"),
    [(480, 4, 4.0), (2048, 4, 2.0), (4096, 4, 4.0), (512, 4, 1.0), (1024, 64, 1.0), (768, 2, 2.0)],
)
def test_processes_share_the_blocks_of_shuffled_blocks_where_the_batch_does_not_divide_those_open(
    batch_size, num_processes, factor
):
    held = contiguous(num_processes)
    assert factor_of(tl.ShuffledBlocks(0), batch_size, held) == pytest.approx(factor, abs=0.01)


def test_blocks_of_few_windows_are_read_by_few_processes():
    # The 1,024 that are open go back by 24 rows of 1,000 from a window of a block to its next, of two.
    plan = tl.ShuffledBlocks(0, block_tokens=2 * T)
    assert factor_of(plan, 1000, contiguous(4)) == pytest.approx(1 + 24 / 250, abs=0.01)


def test_a_plan_that_ends_is_looked_at_to_its_end():
    # It has 199 windows in blocks of 20, and raises when it is asked for others.
    plan = tl.ShuffledBlocks(0, block_tokens=200, open_blocks=4, num_epochs=1)
    assert factor_of(plan, 6, contiguous(2), 2000, 10) == pytest.approx(2, abs=0.1)
    assert 1.1 < factor_of(plan, 198, contiguous(2), 2000, 10) < 1.5


def test_windows_of_a_block_are_as_many_samples_apart_as_blocks_are_open_times_the_share_of_a_source():
    def apart(plan):
        return samples_apart(plan.bind(N, T))

    blocks = tl.ShuffledBlocks(0)
    assert apart(blocks) == 1024
    assert apart(tl.ShuffledBlocks(0, block_tokens=2**24)) == 512  # halved: there are 610 blocks
    assert apart(tl.Mixture({HALVES[1]: 1}, blocks)) == 1024
    assert apart(tl.Mixture({HALVES[0]: 1, HALVES[1]: 1}, blocks)) == 2048
    assert apart(tl.Mixture({HALVES[0]: 3, HALVES[1]: 1}, blocks)) is None
    of_three = tl.Mixture({HALVES[0]: 3, HALVES[1]: 1}, tl.ShuffledBlocks(0, open_blocks=768))
    assert apart(of_three) == math.gcd(768 // 3 * 4, 768 * 4) == 1024
    assert apart(tl.ShuffledEpochs(0)) is None
    assert apart(Dealt(4)) is None


PLANS = [
    tl.ShuffledBlocks(0),
    tl.ShuffledBlocks(0, block_tokens=2**12, open_blocks=100),
    tl.ShuffledBlocks(0, block_tokens=2**24),
    tl.Mixture({HALVES[0]: 0.7, HALVES[1]: 0.3}, tl.ShuffledBlocks(0)),
    tl.Mixture({range(100, 10_000_000_000): 1}, tl.ShuffledBlocks(0)),
    tl.Mixture(
        {HALVES[0]: 1},
        tl.Mixture({range(N // 4): 3, range(N // 4, N // 2): 1}, tl.ShuffledBlocks(0, 2**16)),
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("batch_size", [24, 480, 512, 1032, 2048, 5000])
def test_the_sizes_that_are_advised_share_nothing(plan, batch_size):
    held = contiguous(8)
    fields = blocks_near(plan, N, batch_size, T)
    sources = []
    while isinstance(plan, tl.Mixture):
        sources.append(dict(zip(plan.ranges, plan.weights, strict=True)))
        plan = plan.plan
    better = replace(plan, **fields)
    for source in reversed(sources):
        plan, better = tl.Mixture(source, plan), tl.Mixture(source, better)
    assert factor_of(better, batch_size, held) == pytest.approx(1.0, abs=0.001)
    if (apart := samples_apart(plan.bind(N, T))) is not None:
        for size in batch_sizes_near(batch_size, apart, 8):
            assert factor_of(plan, size, held) == pytest.approx(1.0, abs=0.001)


def test_advice_keeps_to_the_size_of_blocks_that_fits_best():
    def near(batch_size, num_tokens=N, **fields):
        return blocks_near(tl.ShuffledBlocks(0, **fields), num_tokens, batch_size, T)

    assert near(480) == {"open_blocks": 960}
    assert near(600) == {"open_blocks": 1200}
    assert near(2048) == {"open_blocks": 2048}
    assert near(512, 300 * 2**18) == {"block_tokens": 2**17}  # 300 blocks are fewer than 512, 600 are not
    assert near(480, 300 * 2**18) == {"open_blocks": 960, "block_tokens": 2**17}
    assert near(2048, 3000 * T) == {}  # of which fewer than 2,048 could be open
    assert near(2**25) == {}
    assert blocks_near(tl.ShuffledEpochs(0), N, 480, T) == {}


def test_the_batch_sizes_that_are_advised_are_the_nearest_that_divide():
    for apart, num_parts, batch_size in product((64, 96, 100, 1024), (1, 2, 3, 4), range(4, 120)):
        if batch_size % num_parts:
            continue
        fit = [size for size in range(num_parts, 1025, num_parts) if apart % size == 0]
        below = [size for size in fit if size < batch_size][-1:]
        above = [size for size in fit if batch_size < size <= 16 * batch_size][:1]
        assert batch_sizes_near(batch_size, apart, num_parts) == below + above


def test_the_rows_of_a_process_are_those_of_its_devices():
    for spec, parts in [(P("a"), 4), (P(("a", "b")), 8), (P(), 1), (P(None, "a"), 1), (P("b", "a"), 2)]:
        held = rows_held(NamedSharding(make_mesh(4, 2), spec), 16, 16)
        assert held.tolist() == [[True] * parts]
    over_three = sharding_over([[0, 1], [1, 2], [3]])
    assert rows_held(over_three, 8, T).tolist() == [
        [True, True, False, False],
        [False, True, True, False],
        [False, False, False, True],
    ]


def sharding_over(parts_of, num_parts=4):
    """What a sharding over several processes tells of them: the parts of rows that each holds."""
    devices = [
        types.SimpleNamespace(process_index=3 * process, part=part)
        for process, parts in enumerate(parts_of)
        for part in parts
    ]

    def indices(shape):
        rows = shape[0] // num_parts
        return {each: (slice(rows * each.part, rows * (each.part + 1)), slice(None)) for each in devices}

    class Hashed(types.SimpleNamespace):
        __hash__ = object.__hash__

    devices = [Hashed(**vars(each)) for each in devices]
    return types.SimpleNamespace(device_set=set(devices), devices_indices_map=indices)


@dataclass(frozen=True)
class Counted:
    """What counts of tokens here."""

    num_tokens: int
    residency: str

    def __len__(self):
        return self.num_tokens


def told(
    plan,
    batch_size,
    parts_of=((0,), (1,), (2,), (3,)),
    num_tokens=1_000_000,
    seq_len=10,
    residency="mmap",
):
    """What is said of a plan, by processes that hold parts of rows."""
    sharding = sharding_over(parts_of)
    placement = types.SimpleNamespace(sharding=sharding, batch_size=batch_size, seq_len=seq_len)
    tokens = Counted(num_tokens, residency)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_shared_reads(tokens, plan, plan.bind(num_tokens, seq_len), placement, stacklevel=1)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


BLOCKS = tl.ShuffledBlocks(0, block_tokens=1000, open_blocks=64)
TOLD = (
    "the 4 processes of this sharding will read {} times as much as they need, because windows of one "
    "block are in rows of several of them: they are {}. Nearest sizes that mend it: {}"
)


def test_the_factor_is_told_and_the_nearest_sizes_that_share_nothing():
    cause = "{} samples apart, or a multiple, which batch_size={} does not divide"
    near = "batch_size=32, or batch_size=64, or open_blocks="
    assert told(BLOCKS, 48) == [TOLD.format("3.0", cause.format(64, 48), near + "48")]
    assert told(BLOCKS, 44) == [TOLD.format("4.0", cause.format(64, 44), near + "44")]
    assert told(BLOCKS, 44, HELD["copies"]) == [TOLD.format("2.0", cause.format(64, 44), near + "44")]
    (one,) = told(replace(BLOCKS, open_blocks=1), 8)
    assert "they are 1 sample apart, or a multiple, which batch_size=8 does not divide" in one
    (few,) = told(BLOCKS, 64, num_tokens=50_000)
    assert few.endswith(TOLD.format("", cause.format(32, 64), "batch_size=32, or block_tokens=500")[-99:])


def test_where_windows_of_a_block_are_at_uneven_distances_that_is_told():
    cause = "not a multiple of batch_size=8 samples apart"
    assert told(Dealt(12), 8) == [TOLD.format("2.0", cause, "none")]
    for weights, factor, sizes in [((0.3701, 0.6299), "4.0", "none"), ((3, 1), "2.5", "open_blocks=66")]:
        sources = zip((range(500_000), range(500_000, 1_000_000)), weights, strict=True)
        assert told(tl.Mixture(dict(sources), BLOCKS), 8) == [TOLD.format(factor, cause, sizes)]


def test_nothing_is_told_where_processes_read_what_they_need():
    for batch_size in (4, 8, 16, 32, 64):
        assert told(BLOCKS, batch_size) == []
    for plan in (tl.ShuffledEpochs(0), tl.RandomWindows(0), tl.SequentialWindows()):
        assert told(plan, 48) == []
    assert told(tl.ShuffledBlocks(0, block_tokens=15), 48) == []  # one window each
    assert told(Dealt(8), 8) == []
    assert told(BLOCKS, 48, residency="ram") == []
    assert told(BLOCKS, 48, HELD["all of all"]) == []
    assert told(Dealt(12), 8, HELD["parts in turn"]) == []
    for plan in (tl.RandomWindows(0), tl.SequentialWindows()):
        assert told(tl.Mixture({range(1_000_000): 1}, plan), 48) == []


def test_reads_that_are_wrong_are_left_to_next_which_says_so_in_every_process():
    with pytest.raises(ValueError, match=r"reads returned \[500, 600\) for sample 5"):
        factor_of(Dealt(12), 8, contiguous(4), num_tokens=500)
    assert told(Dealt(12), 8, num_tokens=500) == []


def test_in_one_process_nothing_is_told(file):
    tokens = tl.open_tokens(file("t.bin", bytes(20_000)), dtype="uint16")
    for where in (None, jax.devices()[1], NamedSharding(make_mesh(8), P("a"))):
        tl.TokenLoader(tokens, 24, 10, plan=tl.ShuffledBlocks(0, 100, 16), sharding=where).close()
