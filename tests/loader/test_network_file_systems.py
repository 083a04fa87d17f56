"""A loader over a file system on which each read is a request that takes a while.

The tests mount one (tests/slow_file_system.py), and so need root and /dev/fuse.
"""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from helpers import eventually, planned_rows
from slow_file_system import SlowFile, most_at_once
from token_files import write_npy

import tokenloader as tl
from tokenloader.loader import token_loader
from tokenloader.loader.prefetch import Prefetcher
from tokenloader.storage.file_systems import file_system_type, is_over_a_network
from tokenloader.tokens.reader import Reader

TOKENS = np.random.default_rng(0).integers(1, 2**16, 3 << 20).astype(np.uint16)  # 6 MiB
PLAN = tl.ShuffledBlocks(seed=0, block_tokens=2**18, open_blocks=4, num_epochs=1)
SEQ_LEN, BATCH_SIZE = 1024, 16
PAGE = 4096
BOUND = PLAN.bind(len(TOKENS), SEQ_LEN)
NUM_SAMPLES = BOUND.num_samples
rows_of = partial(planned_rows, TOKENS, PLAN)


@pytest.fixture
def mounted(tmp_path, request):
    """Mounts the file of TOKENS, and returns it as a SlowFile."""
    source, folder = write_npy(tmp_path / "tokens.npy", TOKENS), tmp_path / "mounted"
    folder.mkdir()

    def mount(**options):
        if not os.path.exists("/dev/fuse"):
            pytest.skip("no /dev/fuse here")
        try:
            slow = SlowFile(folder, source, **{"delay": 0.001, **options})
        except PermissionError as error:
            pytest.skip(f"mounting a file system needs root: {error}")
        request.addfinalizer(slow.close)
        return slow

    return mount


def loader_over(path):
    return tl.TokenLoader(tl.open_tokens(path), BATCH_SIZE, SEQ_LEN, plan=PLAN, transform=None)


def test_its_type_is_told_as_one_over_a_network(mounted):
    with open(mounted().path, "rb") as file:
        assert file_system_type(file.fileno()) == "fuse.slow"
    assert is_over_a_network("fuse.slow")


@pytest.mark.parametrize("options", [{}, {"async_read": False}, {"keep_cache": False}])
def test_batches_of_blocks_are_those_of_the_plan(mounted, options):
    slow = mounted(**options)
    with loader_over(slow.path) as loader:
        rows = np.concatenate(list(loader))
    np.testing.assert_array_equal(rows, rows_of(0, len(rows), SEQ_LEN))
    assert len(rows) == NUM_SAMPLES // BATCH_SIZE * BATCH_SIZE


@pytest.mark.parametrize(
    "options",
    [{}, {"async_read": False}, {"direct_io": True}, {"read_ahead": 1 << 20, "max_read": 1 << 20}],
)
def test_each_page_is_read_once_and_with_blocks_and_never_for_a_window(mounted, options):
    slow = mounted(delay=0.01, **options)
    with loader_over(slow.path) as loader:
        of_the_opening = slow.reads()  # of the header, and of 64 places for the fingerprint
        assert len(list(loader)) == NUM_SAMPLES // BATCH_SIZE
    reads = slow.reads()
    num_bytes = sum(read.size for read in of_the_opening + reads)
    # Where reads go past the page cache, the header's pages are read once more for the mapping.
    assert 0 <= num_bytes - TOKENS.nbytes < 5 * PAGE
    blocks = np.unique(BOUND.reads(np.arange(NUM_SAMPLES)), axis=0)
    pieces = -(-np.diff(blocks) * 2 // options.get("max_read", 128 << 10)) + 1  # and a page at its end
    assert len(reads) <= pieces.sum() + 64 < NUM_SAMPLES / 15
    assert most_at_once(reads) >= 4


def test_announcements_are_not_lost_after_the_file_was_read_in_order(mounted):
    slow = mounted()
    with tl.open_tokens(slow.path) as tokens:
        with Reader(tokens) as reader:
            for start in range(0, 4 * 2**16, 2**14):  # of the first blocks
                reader.read(start, np.empty(2**14, np.uint16))
        slow.reads()
        with tl.TokenLoader(tokens, BATCH_SIZE, SEQ_LEN, plan=PLAN, transform=None) as loader:
            assert len(list(loader)) == NUM_SAMPLES // BATCH_SIZE
    assert len(slow.reads()) < NUM_SAMPLES / 10


def test_a_block_that_cannot_be_read_is_an_error_at_next_and_the_position_stays(mounted):
    slow = mounted()
    begin, end = 500 * PAGE, 502 * PAGE  # of which the loader has read no sample when it is made
    batches, errors = [], []
    with loader_over(slow.path) as loader:
        slow.fail(begin, end)
        while not errors:
            try:
                batches.append(next(loader))
            except OSError as error:
                errors.append(error)
        assert loader.step == len(batches)
        slow.fail(0, 0)
        batches += list(loader)
    np.testing.assert_array_equal(np.concatenate(batches), rows_of(0, BATCH_SIZE * len(batches), SEQ_LEN))
    (error,) = errors
    assert error.filename == str(slow.path)
    offset = int(error.strerror.split("cannot be read at byte ")[1].split(": ")[0].replace(",", ""))
    assert begin - 2 * (SEQ_LEN + 1) <= offset < end  # where the window begins, or the page


@pytest.mark.parametrize("options", [{}, {"async_read": False}])
def test_a_wait_for_a_server_that_does_not_answer_is_logged_with_file_and_byte(
    mounted, options, monkeypatch, caplog
):
    monkeypatch.setattr(token_loader, "LOG_SECONDS", 0.2)
    monkeypatch.setattr(token_loader, "_SLICE_SECONDS", 0.01)
    caplog.set_level(logging.WARNING, logger="tokenloader")
    slow = mounted(**options)
    with loader_over(slow.path) as loader:
        slow.stall(PAGE, TOKENS.nbytes)
        threading.Timer(0.5, slow.stall, (0, 0)).start()
        np.testing.assert_array_equal(next(loader), rows_of(0, BATCH_SIZE, SEQ_LEN))
    (message,) = [text for text in caplog.messages if "step 0" in text]
    assert f" of {slow.path}; is its disk slow, or stuck?" in message
    assert 0 < int(message.split("waits for byte ")[1].split(" of ")[0].replace(",", "")) < TOKENS.nbytes


def test_close_returns_while_the_server_does_not_answer(mounted, monkeypatch, own_threads):
    impatient = partial(Prefetcher, join_seconds=0.1)
    monkeypatch.setattr("tokenloader.loader.token_loader.Prefetcher", impatient)
    slow = mounted()
    loader = loader_over(slow.path)
    slow.stall(PAGE, TOKENS.nbytes)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(next, loader)
        assert eventually(slow.num_stalled)
        loader.close()
        with pytest.raises(ValueError, match="this TokenLoader was closed"):
            waiting.result()
    assert own_threads()
    slow.stall(0, 0)
    assert eventually(lambda: own_threads() == [], seconds=30)
