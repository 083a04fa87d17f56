"""What a loader counts, and what a profiler sees."""

import re
import threading
import time

import jax
from helpers import eventually, random_tokens, watched_tokens

import tokenloader as tl

TOKENS = random_tokens()
N = len(TOKENS)


def test_stats_are_exact_sums(tokens, monkeypatch):
    # What gathering and sending take is summed by the pipeline, and tested there.
    system_clock = time.perf_counter
    waits = iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.0, 30.0, 99.0])

    def clock():
        on_main_thread = threading.current_thread() is threading.main_thread()
        return next(waits) if on_main_thread else system_clock()

    # Without a transform, each batch is taken when it is asked for and not before.
    with monkeypatch.context() as patches:
        patches.setattr(time, "perf_counter", clock)
        loader = tl.TokenLoader(tokens, 4, 100, plan=tl.SequentialWindows(), prefetch=1, transform=None)
        assert loader.stats == tl.LoaderStats(0, 0, 0.0, 0.0, 0.0, 0)
        assert len(list(loader)) == 3
    stats = loader.stats
    assert (stats.batches, stats.tokens) == (3, 3 * 4 * 100)
    assert stats.wait_seconds == 1.0 + 2.0 + 3.0  # the wait for the end is no wait for a batch


def test_stats_count_a_wait_while_it_lasts_also_for_another_thread():
    going = threading.Event()
    with tl.TokenLoader(watched_tokens(going.wait, TOKENS), 2, 10, transform=None) as loader:
        taking = threading.Thread(target=next, args=(loader,))
        taking.start()
        try:
            assert eventually(lambda: loader.stats.wait_seconds > 0.05 < loader.stats.gather_seconds)
            assert loader.stats.batches == 0
        finally:
            going.set()
        taking.join()
        before = loader.stats
        assert loader.stats.wait_seconds == before.wait_seconds >= 0.05


def test_stats_are_a_snapshot_and_count_since_the_loader_was_made(tokens):
    with tl.TokenLoader(tokens, 3, 10) as loader:
        next(loader)
        before = loader.stats
        state = loader.get_state()
        next(loader)
        loader.set_state(state)
        next(loader)
        assert (before.batches, before.tokens) == (1, 30)
        after = loader.stats
    assert (after.batches, after.tokens) == (3, 90)
    assert after.wait_seconds > before.wait_seconds > 0
    assert after.gather_seconds > 0
    assert after.transfer_seconds > 0
    assert type(after.major_page_faults) is int
    assert after.major_page_faults >= 0


def test_a_profile_names_the_phases_of_a_step(tokens, tmp_path):
    with (
        jax.profiler.trace(str(tmp_path)),
        tl.TokenLoader(tokens, 3, 10) as loader,
    ):
        for _ in range(3):
            next(loader)
    (trace,) = tmp_path.rglob("*.xplane.pb")
    found = re.findall(r"tokenloader\.([a-z][a-z_]*)", trace.read_bytes().decode("latin-1"))
    # Some public functions are in a profile, too, once they were called directly.
    assert set(found) - set(tl.__all__) == {"wait", "transform", "read_ahead", "gather", "transfer"}
