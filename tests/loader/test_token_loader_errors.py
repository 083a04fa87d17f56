"""Errors of reading, of plans and of transforms: they arrive at next(), and lose nothing."""

import ctypes
import errno
import itertools
import os
import traceback
from functools import partial

import numpy as np
import pytest
from helpers import planned_rows, random_tokens, watched_tokens

import tokenloader as tl
from tokenloader.storage.kernel_advice import KernelAdvice
from tokenloader.tokens.opening import join

TOKENS = random_tokens()
N = len(TOKENS)
rows_of = partial(planned_rows, TOKENS)


class Flaky:
    """Raises at the calls whose numbers are given, counted from 0."""

    def __init__(self, error, *calls):
        self.error, self.calls, self.count = error, calls, itertools.count()

    def __call__(self):
        if next(self.count) in self.calls:
            raise self.error("disk on fire")


class BoomBaseError(BaseException):
    pass


@pytest.mark.parametrize("error", [OSError, ValueError, MemoryError, BoomBaseError, SystemExit])
def test_an_error_of_the_background_arrives_at_next_and_nothing_is_lost_or_repeated(error):
    plan, blocks, errors = tl.ShuffledEpochs(0), [], []
    with tl.TokenLoader(
        watched_tokens(Flaky(error, 0, 4, 5, 13), TOKENS),
        3,
        40,
        plan=plan,
        prefetch=3,
        transform=None,
    ) as loader:
        while len(blocks) < 20:
            try:
                blocks.append(next(loader))
            except error as caught:
                errors.append(caught)
                assert loader.step == len(blocks)
    assert len(errors) == 4
    np.testing.assert_array_equal(np.concatenate(blocks), rows_of(plan, 0, 60, 40))
    for caught in errors:
        frames = [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
        assert "copy" in frames  # where it happened
        assert frames[-1] == "__call__"


def test_batches_made_before_an_error_are_handed_out_before_it():
    with tl.TokenLoader(
        watched_tokens(Flaky(OSError, 2), TOKENS), 3, 40, prefetch=5, transform=None
    ) as loader:
        for _ in range(2):
            next(loader)
        with pytest.raises(OSError, match="disk on fire"):
            next(loader)


class Broken(tl.Plan):
    """A plan whose window_starts raises an error, from a sample on."""

    def __init__(self, error, first_sample=0):
        self.error, self.first_sample = error, first_sample

    def bind(self, num_tokens, seq_len):
        return BoundBroken(self.error, self.first_sample)


class BoundBroken(tl.BoundPlan):
    num_samples = None

    def __init__(self, error, first_sample):
        self.error, self.first_sample = error, first_sample

    def window_starts(self, samples):
        if (samples >= self.first_sample).any():
            raise self.error("no such window")
        return samples

    def key(self, until_sample):
        return "Broken()"


@pytest.mark.parametrize("transform", [None, tl.next_token])
def test_an_error_of_the_plan_arrives_at_next(tokens, transform):
    with tl.TokenLoader(tokens, 2, 4, plan=Broken(ZeroDivisionError), transform=transform) as loader:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="no such window"):
                next(loader)
            assert loader.step == 0


@pytest.mark.parametrize("transform", [None, tl.next_token])
@pytest.mark.parametrize("first_sample", [0, 4096])  # so many are planned at once
def test_a_stop_iteration_of_the_plan_is_an_error_and_not_the_end(tokens, first_sample, transform):
    plan = Broken(StopIteration, first_sample)
    with tl.TokenLoader(tl.open_tokens(np.zeros(9000, np.uint16)), 512, 4, plan=plan) as loader:
        with pytest.raises(RuntimeError, match="StopIteration"):
            for _ in loader:
                pass
        assert loader.step * 512 <= first_sample


def test_a_plan_whose_windows_lie_outside_the_tokens_is_an_error_at_next(tokens):
    class Outside(BoundBroken):
        def window_starts(self, samples):
            return samples + N - 5

    class FarOut(tl.Plan):
        def bind(self, num_tokens, seq_len):
            return Outside(None, 0)

    with (
        tl.TokenLoader(tokens, 2, 4, plan=FarOut()) as loader,
        pytest.raises(IndexError, match="does not lie within"),
    ):
        next(loader)


def test_tokens_closed_under_a_loader_are_an_error_at_next(tmp_path):
    TOKENS.tofile(tmp_path / "a.bin")
    tokens = tl.open_tokens(tmp_path / "a.bin", dtype="uint16")
    with tl.TokenLoader(tokens, 2, 4, prefetch=1) as loader:
        next(loader)
        tokens.close()
        with pytest.raises(ValueError, match="it was closed"):
            list(itertools.islice(loader, 10))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_the_transform_does_not_lose_the_batch(tokens, error):
    faults = [error("bad transform")] * 2

    def transform(block):
        if faults:
            raise faults.pop()
        return block

    with tl.TokenLoader(tokens, 3, 40, transform=transform) as loader:
        for _ in range(2):
            with pytest.raises(error, match="bad transform"):
                next(loader)
            assert loader.step == 0
        for step in range(3):
            np.testing.assert_array_equal(next(loader), rows_of(tl.ShuffledEpochs(0), 3 * step, 3, 40))


class RefusingLibc:
    """A C library under whose limits every call fails: advice, what is cached, copying."""

    def __init__(self):
        self.calls = set()

    def refuse(self, name):
        def call(*_):
            self.calls.add(name)
            ctypes.set_errno(errno.ENOMEM)
            return -1

        return call

    def __getattr__(self, name):
        return self.refuse(name)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_what_only_makes_it_faster_may_fail_under_tight_limits_and_no_batch_does(
    tmp_path, monkeypatch, is_mapped
):
    def refuse_descriptors(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    def empty(shape, *arguments, real=np.empty, **kwargs):
        if shape == 24 << 20:  # which nothing needs
            raise MemoryError
        return real(shape, *arguments, **kwargs)

    TOKENS.tofile(tmp_path / "t.bin")
    sources = tl.open_tokens(tmp_path / "t.bin", dtype="uint16").extents if is_mapped else [TOKENS]
    libc = RefusingLibc()
    tokens = join(sources, "mmap", kernel=KernelAdvice(linux=True, libc=libc))
    monkeypatch.setattr(os, "pidfd_open", refuse_descriptors, raising=False)
    monkeypatch.setattr(np, "empty", empty)
    plan = tl.ShuffledEpochs(0)
    with tl.TokenLoader(tokens, 3, 40, plan=plan, transform=None) as loader:
        blocks = [next(loader) for _ in range(9)]
    np.testing.assert_array_equal(np.concatenate(blocks), rows_of(plan, 0, 27, 40))
    assert libc.calls == ({"madvise", "mincore", "process_vm_writev"} if is_mapped else set())
