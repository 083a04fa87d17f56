"""A next() that waits for long says in the log what for."""

import logging
import threading

import numpy as np
import pytest
from helpers import random_tokens, watched_tokens

import tokenloader as tl
from tokenloader.loader import token_loader
from tokenloader.storage.kernel_advice import KERNEL, PAGE
from tokenloader.tokens.located_windows import LocatedWindows

TOKENS = random_tokens()


@pytest.fixture
def impatient(monkeypatch, caplog):
    monkeypatch.setattr(token_loader, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(token_loader, "_SLICE_SECONDS", 0.01)
    caplog.set_level(logging.WARNING, logger="tokenloader")
    return caplog


def test_a_wait_for_the_disk_is_logged_once_with_step_file_and_byte(impatient, tmp_path, monkeypatch):
    path = tmp_path / "a\x1b[2J.npy"
    np.save(path, np.arange(100_000, dtype=np.uint16))
    going = threading.Event()
    copy = LocatedWindows.copy
    plan = tl.SequentialWindows()
    with (
        tl.open_tokens(path) as tokens,
        tl.TokenLoader(tokens, 1, PAGE, plan=plan, transform=None) as loader,  # two pages and more
    ):
        absent = (tokens._memory().parts[0].array.ctypes.data & -PAGE) + PAGE
        monkeypatch.setattr(LocatedWindows, "copy", lambda windows: going.wait() and copy(windows))
        monkeypatch.setattr(KERNEL, "is_cached", lambda address: address != absent)
        timer = threading.Timer(0.5, going.set)
        timer.start()
        next(loader)
        timer.join()
    (message,) = [text for text in impatient.messages if "step 0" in text]
    assert message.startswith("next() has waited ")
    assert (
        f" s for step 0: the background thread is reading step 0, and waits for byte {PAGE:,} of "
        in message
    )
    assert rf"of {tmp_path}/a\x1b[2J.npy; is its disk slow, or stuck?" in message


def test_a_wait_for_tokens_in_memory_says_which_steps_are_read(impatient):
    going = threading.Event()
    timer = threading.Timer(0.3, going.set)
    with tl.TokenLoader(watched_tokens(going.wait, TOKENS), 2, 10, prefetch=8) as loader:
        timer.start()
        next(loader)
    assert (
        "for step 0: the background thread is reading steps 0 to 4, whose tokens are in" in impatient.text
    )


def test_a_wait_for_the_plan_says_so(impatient):
    going = threading.Event()

    class Slow(tl.Plan):
        def bind(self, num_tokens, seq_len):
            return SlowBound()

    class SlowBound(tl.BoundPlan):
        num_samples = None

        def window_starts(self, samples):
            if threading.current_thread() is not threading.main_thread():
                going.wait()
            return np.zeros(len(samples), np.int64)

        def key(self, until_sample):
            return "Slow()"

    timer = threading.Timer(0.3, going.set)
    with tl.TokenLoader(tl.open_tokens(TOKENS), 2, 10, plan=Slow()) as loader:
        timer.start()
        next(loader)
    assert "is asking the plan for the next windows, and announcing them to the disk" in impatient.text


def test_a_wait_that_is_short_is_not_logged(caplog):
    with tl.TokenLoader(tl.open_tokens(TOKENS), 2, 10) as loader:
        next(loader)
    assert caplog.messages == []
