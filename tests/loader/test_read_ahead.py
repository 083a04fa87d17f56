"""ReadAhead: what is announced, how far ahead, and when announcing stops and begins again."""

from itertools import islice

import numpy as np
import pytest
from helpers import RecordedTokens

from tokenloader import RandomWindows
from tokenloader.loader.groups import group_steps
from tokenloader.loader.read_ahead import (
    GROUPS_WITHOUT_MISS,
    Located,
    ReadAhead,
    read_ahead_depth,
)
from tokenloader.loader.steps import plan_steps
from tokenloader.plans.cursor import Cursor

N, T, DEPTH = 1000, 9, 4


@pytest.mark.parametrize(
    ("num_windows", "window_bytes", "groups"),
    [
        (32, 2050, 16),  # 512 windows
        (1, 2050, 512),
        (8, 2050, 64),
        (256, 2050, 2),
        (5000, 2050, 2),  # never fewer than two groups
        (8, 1 << 20, 4),  # 32 MiB
        (1, 1 << 40, 2),
    ],
)
def test_the_depth_keeps_the_disk_busy_and_is_bounded_in_bytes(num_windows, window_bytes, groups):
    assert read_ahead_depth(num_windows, window_bytes) == groups


def test_the_depth_may_be_given_in_windows():
    assert read_ahead_depth(4, 2050, ahead_windows=16) == 4
    assert read_ahead_depth(5, 2050, ahead_windows=16) == 4


def located(recorded, num_groups=None):
    """Groups of one step of 5 windows."""
    steps = plan_steps(Cursor.begin(RandomWindows(0).bind(N, T), 5), np.arange(5))
    for group in islice(group_steps(steps, 1), num_groups):
        yield Located(group, recorded.tokens.locate(group.window_starts[0], T + 1))


def recorded(**cached):
    return RecordedTokens(np.arange(N, dtype=np.uint16), **cached)


def announced(ahead, tokens, num_groups):
    """Which of the next groups were announced at all: [bool]."""
    groups = [ahead.next().group for _ in range(num_groups)]
    asked = [starts for starts, _ in tokens.asked("prefetch")]
    return [group.window_starts[0].tolist() in asked for group in groups]


def test_groups_come_in_order_each_announced_some_groups_before_its_turn():
    tokens = recorded(cached=False)
    ahead = ReadAhead(located(tokens, 10), DEPTH)
    for turn in range(10):
        assert ahead.next().group.step == turn
        assert len(tokens.asked("prefetch")) == min(10, turn + 1 + DEPTH)
    assert ahead.next() is None
    assert ahead.next() is None
    expected = [one.group.window_starts[0].tolist() for one in located(tokens, 10)]
    assert tokens.asked("prefetch") == [[starts, T + 1] for starts in expected]


@pytest.mark.parametrize("limit", [3, GROUPS_WITHOUT_MISS])
def test_cached_data_is_soon_no_longer_announced(limit):
    tokens = recorded(cached=True)
    found = announced(ReadAhead(located(tokens), DEPTH, limit), tokens, 3 * limit)
    assert found == [True] * limit + [False] * 2 * limit


def test_data_that_is_not_cached_is_announced_without_end():
    tokens = recorded(cached=False)
    assert all(announced(ReadAhead(located(tokens), DEPTH, 6), tokens, 100))


@pytest.mark.parametrize("found_by", ["probe", "fault"])
def test_announcing_begins_again_when_the_cache_is_lost_and_ends_when_it_is_back(found_by):
    tokens, limit = recorded(cached=True), 16
    ahead = ReadAhead(located(tokens), DEPTH, limit)
    assert not announced(ahead, tokens, 2 * limit)[-1]
    if found_by == "fault":
        ahead.missed()
    else:
        tokens.cached = False
        announced(ahead, tokens, 1)
        tokens.cached = True
    found = announced(ahead, tokens, 2 * limit)
    assert True in found
    assert sum(found) <= limit
    assert not found[-1]


def test_where_blocks_are_read_windows_are_announced_after_a_miss_alone():
    tokens, limit = recorded(cached=False), 6
    ahead = ReadAhead(located(tokens), DEPTH, limit, reads_blocks=True)
    assert not any(announced(ahead, tokens, 50))
    ahead.missed()
    found = announced(ahead, tokens, 50)
    assert found == [False] * DEPTH + [True] * limit + [False] * (50 - DEPTH - limit)


def test_where_blocks_are_read_the_page_cache_is_not_asked():
    tokens = recorded()
    tokens.cached = None
    asked = []
    tokens.tokens.locate = lambda starts, length, locate=tokens.tokens.locate: Asked(
        locate(starts, length), asked
    )
    ahead = ReadAhead(located(tokens), DEPTH, reads_blocks=True)
    for _ in range(10):
        ahead.next()
    assert asked == []
    ReadAhead(located(tokens), DEPTH).next()
    assert len(asked) == 1 + DEPTH


class Asked:
    """Windows that tell when they are asked whether they are cached."""

    def __init__(self, windows, asked):
        self.prefetch, self.asked = windows.prefetch, asked

    def is_cached(self):
        self.asked.append(self)
        return True
