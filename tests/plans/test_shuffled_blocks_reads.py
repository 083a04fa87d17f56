"""ShuffledBlocks opens blocks one by one, each for one row of a batch, and each host reads its own."""

import numpy as np
import pytest

from tokenloader import Mixture, ShuffledBlocks

SEQ_LEN = 2


def read_starts(num_windows, block_windows, open_blocks, epoch=0):
    """Where the read of each sample of an epoch begins, which names it."""
    plan = ShuffledBlocks(1, block_windows * SEQ_LEN, open_blocks)
    bound = plan.bind((num_windows + 1) * SEQ_LEN, SEQ_LEN)
    samples = np.arange(epoch * num_windows, (epoch + 1) * num_windows)
    return np.concatenate([bound.reads(part)[:, 0] for part in np.array_split(samples, 8)])


@pytest.mark.parametrize(
    ("num_windows", "block_windows", "open_blocks"),
    [(20_000, 16, 32), (20_011, 16, 100), (9_999, 50, 7), (5_000, 3, 1_000), (640, 10, 64)],
)
def test_rows_of_a_batch_are_of_different_reads(num_windows, block_windows, open_blocks):
    starts = read_starts(num_windows, block_windows, open_blocks)
    for batch_size in (2, open_blocks // 2, open_blocks - 1, open_blocks):
        batches = np.lib.stride_tricks.sliding_window_view(starts, batch_size)[::3]
        assert (np.diff(np.sort(batches, axis=1)) > 0).all()


def openings(num_windows, block_windows, open_blocks):
    """First samples of all reads of an epoch, in order."""
    return np.sort(np.unique(read_starts(num_windows, block_windows, open_blocks), return_index=True)[1])


def most_within(openings, num_samples):
    """The most openings of any num_samples consecutive samples."""
    return (np.searchsorted(openings, openings + num_samples) - np.arange(openings.size)).max()


def test_blocks_open_at_an_even_rate():
    all_openings = openings(2_000_000, 256, 1024)
    after_first = all_openings[all_openings >= 1024]
    assert all_openings.size - after_first.size == 1024  # at the beginning of an epoch all lanes open one
    for batch_size in (256, 512, 1024):
        average = 10 * batch_size * after_first.size / 2_000_000
        # Of batches of 256, 10 steps are 2.5 rounds of the lanes: 17 where the average is 11.3.
        assert most_within(after_first, 10 * batch_size) <= 1.3 * average + 3


@pytest.mark.parametrize(
    ("lane", "block_windows", "open_blocks"),
    [
        (8 * 256 - 2, 256, 128),  # lanes that began at j * W // G would enter all their blocks in one round
        (8 * 256 + 2, 256, 128),  # lanes go around in one of 8 rounds: cuts are a multiple of W apart
        (8 * 256 + 3, 256, 128),
        (9 * 250 + 128, 250, 100),
        (20 * 100 + 1, 100, 128),
        (20 * 64, 64, 256),
    ],
)
@pytest.mark.parametrize("more", [0, 77])
def test_no_length_lets_many_lanes_enter_blocks_in_the_same_rounds(lane, block_windows, open_blocks, more):
    all_openings = openings(lane * open_blocks + more, block_windows, open_blocks)
    after_first = all_openings[all_openings >= open_blocks]
    rounds = 20
    average = rounds * after_first.size / lane
    assert most_within(after_first, rounds * open_blocks) <= 2.7 * average


def factor_read(starts, first_sample, batch_size, num_hosts):
    """Reads of all hosts over the reads that there are, hosts having equal parts of the rows of batches."""
    rows = np.arange(first_sample, first_sample + starts.size) % batch_size
    host = rows * num_hosts // batch_size
    return np.unique(starts * num_hosts + host).size / np.unique(starts).size


@pytest.fixture(scope="module")
def epochs_of_1024():
    n = 400_003
    return n, [read_starts(n, 64, 1024, epoch) for epoch in (0, 1)]


@pytest.mark.parametrize("batch_size", [64, 256, 1024])
@pytest.mark.parametrize("num_hosts", [2, 4, 8, 16, 64])
def test_hosts_read_blocks_of_their_own_where_batches_divide_lanes(epochs_of_1024, batch_size, num_hosts):
    n, epochs = epochs_of_1024
    for epoch, starts in enumerate(epochs):
        found = factor_read(starts, epoch * n, batch_size, num_hosts)
        assert found == 1


@pytest.mark.parametrize(
    ("batch_size", "num_hosts", "factor"), [(480, 4, 4), (768, 3, 3), (2048, 2, 2), (2048, 8, 2)]
)
def test_hosts_read_blocks_of_others_where_batches_do_not(epochs_of_1024, batch_size, num_hosts, factor):
    n, epochs = epochs_of_1024
    for epoch, starts in enumerate(epochs):
        found = factor_read(starts, epoch * n, batch_size, num_hosts)
        assert found == pytest.approx(factor, rel=0.03)  # parts of blocks may be too short for all


@pytest.mark.parametrize(("open_blocks", "is_shared"), [(192, False), (768, False), (1024, True)])
def test_hosts_read_blocks_of_their_own_where_each_source_of_a_mixture_has_rows_that_divide_lanes(
    open_blocks, is_shared
):
    # 192 and 64 rows of each batch of 256.
    plan = ShuffledBlocks(1, 64 * SEQ_LEN, open_blocks)
    mixture = Mixture({range(500_000): 3, range(500_000, 10**6): 1}, plan).bind(10**6, SEQ_LEN)
    samples = np.arange(256 * 1000)
    starts = np.concatenate([mixture.reads(part)[:, 0] for part in np.split(samples, 8)])
    found = factor_read(starts, 0, batch_size=256, num_hosts=4)
    assert found > 2 if is_shared else found == 1
