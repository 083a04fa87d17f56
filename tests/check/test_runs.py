"""Runs of one token: against a naive reference, at chunk borders, and what is remembered of many."""

import itertools

import numpy as np
import pytest

from tokenloader.check.runs import RUN_TOKENS, Run, Runs, runs_in


def naive(ids):
    at, found = 0, []
    for token, group in itertools.groupby(ids.tolist()):
        length = len(list(group))
        if length >= RUN_TOKENS:
            found.append(Run(token, at, at + length))
        at += length
    return found


def found(ids, chunk_tokens):
    runs = Runs()
    for start in range(0, len(ids), chunk_tokens):
        runs.append(runs_in(np.array(ids[start : start + chunk_tokens]), start))
    runs.finish()
    return runs


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 63, 64, 65, 257, 100_000])
def test_runs_are_those_of_a_naive_loop(dtype, chunk_tokens):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        lengths = rng.choice([1, 2, 3, 63, 64, 65, 66, 67, 200], 30)
        ids = np.repeat(rng.integers(0, 3, 30), lengths).astype(dtype)
        expected = naive(ids)
        runs = found(ids, chunk_tokens)
        assert runs.count == len(expected)
        assert runs.tokens == sum(run.length for run in expected)
        lengths = sorted((run.length for run in expected), reverse=True)
        assert [run.length for run in runs.longest] == lengths[:3]
        assert set(runs.longest) <= set(expected)


def test_a_pattern_of_several_tokens_is_no_run():
    assert found(np.tile(np.array([1, 2, 3, 4], np.uint16), 1000), 777).count == 0
    assert found(np.tile(np.array([1, 2], np.uint16), 1000), 777).count == 0


def test_a_run_over_many_chunks_is_one():
    runs = found(np.zeros(10_000, np.uint16), 100)
    assert (runs.count, runs.tokens, runs.longest) == (1, 10_000, [Run(0, 0, 10_000)])


def test_the_longest_are_kept_with_the_first_first():
    ids = np.concatenate([np.full(n, i % 2) for i, n in enumerate([64, 90, 70, 90, 80])])
    assert [run.length for run in found(ids, 1000).longest] == [90, 90, 80]
    assert found(ids, 1000).longest[0].start == 64
