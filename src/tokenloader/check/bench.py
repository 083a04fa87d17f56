"""The bench: the speed of one token file on one machine, batches through the real loader, cold and warm.

Cold means that the file's pages have been dropped from the page cache (posix_fadvise DONTNEED, which
needs no privileges and touches no other file): the speed is that of the disk, or of a cache below it,
which a virtual disk may have. Warm are the same batches once more, now that their pages are there. Every
batch is waited for, so that its transfer and its transform are in the time.

ShuffledBlocks is measured cold, after the file is dropped once more, and in its first epoch, which reads
no block twice. Its first samples open a block each; the speed is that of the batches after them, as it is
for the rest of the epoch. Random windows are measured before: they read so little of the file that a cache
below the page cache is no help to the blocks.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import jax

from tokenloader.batches.batch import Batch
from tokenloader.check.devices import start_backends
from tokenloader.check.info import cached_share
from tokenloader.formats.extent import Extent
from tokenloader.loader.stats import LoaderStats
from tokenloader.loader.token_loader import TokenLoader
from tokenloader.plans.plan import Plan
from tokenloader.plans.random_windows import RandomWindows
from tokenloader.plans.shuffled_blocks import BoundShuffledBlocks, ShuffledBlocks
from tokenloader.storage.mapped import open_file
from tokenloader.tokens.token_array import TokenArray
from tokenloader.tokens.writing import blocks

_STILL_CACHED = 0.05  # more of the pages: another process has them mapped, or they lie on no disk
_FIRST_BATCHES = 3  # not measured: the transform is compiled
_COLD_SEED, _OTHER_SEED = 0, 1
_SHUFFLED = ShuffledBlocks(_COLD_SEED)
# Of few blocks, less than a window is read for each sample: 0.83 with 1,100 blocks, 0.90 with 1,500.
_LEAST_BLOCKS = 2  # times open_blocks
_OPENING_TIMES = 10  # most time for opening the first blocks, in times that of a measurement


@dataclass(frozen=True)
class Speed:
    """One measurement."""

    tokens_per_second: float  # input tokens handed out
    batches: int
    seconds: float
    wait_seconds: float  # this and the next two: the loader's statistics of these batches
    gather_seconds: float
    transfer_seconds: float
    limit: str  # what limits the speed, in a sentence


@dataclass(frozen=True)
class Bench:
    """What `bench` has measured."""

    device: str  # the device, or devices, that batches went to
    batch_size: int
    seq_len: int
    cold: Speed | None  # None: the file's pages cannot be dropped
    why_not_cold: str | None  # the reason for that
    warm: Speed
    shuffled_blocks: Speed | None  # cold, once its first blocks are open; None: not measured
    why_not_shuffled_blocks: str | None  # the reason for that
    opening_seconds: float | None  # of the batches that open its first blocks; not in its speed


def drop_from_cache(extents: Sequence[Extent]) -> str | None:
    """Drops the files' pages from the page cache; returns None, or why that cannot be done."""
    if not hasattr(os, "posix_fadvise"):
        return "this system has no call that drops a file from the page cache"
    for extent in extents:
        file = open_file(extent)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share, _ = cached_share(extents)
    return why_still_cached(share)


def why_still_cached(share: float | None) -> str | None:
    """Says why a share of the pages that were dropped is still cached; None: it is none to speak of."""
    if share is None:
        return "the system does not tell whether the file is still in the page cache"
    if share > _STILL_CACHED:
        return (
            f"{share:.0%} of the file stay in the page cache: another process has it mapped, it is not "
            f"on disk yet (run sync), or its file system is in memory"
        )
    return None


def bench(
    open_again: Callable[[], TokenArray],
    *,
    batch_size: int,
    seq_len: int,
    seconds: float,
    drop_from_cache: Callable[[Sequence[Extent]], str | None] = drop_from_cache,
    shuffled: ShuffledBlocks = _SHUFFLED,
) -> Bench:
    """Measures random windows, cold and warm, and shuffled blocks, each for about `seconds`.

    The tokens are opened again after their pages are dropped, because what a process has mapped stays.
    Raises ValueError where they are fewer than a window.
    """

    def loader_of(tokens: TokenArray, plan: Plan) -> TokenLoader[Batch]:
        return TokenLoader(tokens, batch_size, seq_len, plan=plan)

    start_backends()
    with open_again() as tokens:
        extents = tokens.extents
        first, stop, why_too_small = _cold_steps(shuffled, len(tokens), batch_size, seq_len)
        with loader_of(tokens, RandomWindows(_OTHER_SEED)) as loader:
            device = ", ".join(sorted(map(str, loader.sharding.device_set)))
            for _, batch in zip(range(_FIRST_BATCHES), loader, strict=False):
                jax.block_until_ready(batch)
    del tokens, loader, batch
    why_not = drop_from_cache(extents)
    with open_again() as tokens:
        # Of a small file no more than half is read cold: what comes later would be there already.
        most = max(1, len(tokens) // (2 * batch_size * (seq_len + 1)))
        plan = RandomWindows(_COLD_SEED)
        with loader_of(tokens, plan) as loader:
            cold = _measure(loader, seconds, most, cold=why_not is None)
        again: int | None = cold.batches
        if cold.batches == most:
            for _ in blocks(tokens):
                pass  # all of it into the cache, and then any window is warm
            again = None
        for _ in range(2):  # because the first touch of a mapped page costs something too
            with loader_of(tokens, plan) as loader:
                warm = _measure(loader, seconds, again, cold=False)
    del tokens, loader  # what is mapped cannot be dropped
    speed, opening_seconds = None, None
    why_no_blocks = why_not or why_too_small or drop_from_cache(extents)
    if why_no_blocks is None:
        with open_again() as tokens, loader_of(tokens, shuffled) as loader:
            opening_seconds = _skip_to(loader, first, _OPENING_TIMES * seconds)
            if loader.step == first:
                speed = _measure(loader, seconds, stop - first, cold=True)
            else:
                why_no_blocks = (
                    f"in {opening_seconds:.0f} s {loader.step} batches were read of the {first} that open "
                    f"its first blocks; give more seconds: these get {_OPENING_TIMES} times as many"
                )
    return Bench(
        device,
        batch_size,
        seq_len,
        cold if why_not is None else None,
        why_not,
        warm,
        speed,
        why_no_blocks,
        opening_seconds,
    )


def _cold_steps(
    plan: ShuffledBlocks, num_tokens: int, batch_size: int, seq_len: int
) -> tuple[int, int, str | None]:
    """Returns the steps [first, stop) of an epoch after those that open its first blocks, or why not."""
    bound = plan.bind(num_tokens, seq_len)
    if not isinstance(bound, BoundShuffledBlocks):
        return 0, 0, f"blocks of {plan.block_tokens:,} tokens hold fewer than two windows of {seq_len:,}"
    first, stop = -(-bound.num_lanes // batch_size), bound.epochs.num_windows // batch_size
    num_blocks = -(-bound.epochs.num_windows // bound.block_windows)
    least = _LEAST_BLOCKS * plan.open_blocks
    if num_blocks >= least and first < stop:
        return first, stop, None
    found = f"it has {num_blocks:,} blocks of {plan.block_tokens:,} tokens"
    return 0, 0, f"the file is too small to tell: {found}; expected {least:,}, twice those kept open"


def _skip_to(loader: TokenLoader[Batch], step: int, most_seconds: float) -> float:
    """Takes batches up to a step, while there is time; returns the seconds that took."""
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < most_seconds and loader.step < step:
        jax.block_until_ready(next(loader))
    return elapsed


def _measure(loader: TokenLoader[Batch], seconds: float, most: int | None, *, cold: bool) -> Speed:
    """Takes batches for so many seconds, `most` of them at most, and measures the loader meanwhile."""
    before, began = loader.stats, time.perf_counter()
    for batch in loader:
        jax.block_until_ready(batch)
        elapsed = time.perf_counter() - began
        if elapsed >= seconds or loader.stats.batches - before.batches == most:
            break
    pairs = zip(astuple(loader.stats), astuple(before), strict=True)
    stats = LoaderStats(*(after - then for after, then in pairs))
    return Speed(
        tokens_per_second=stats.tokens / elapsed,
        batches=stats.batches,
        seconds=elapsed,
        wait_seconds=stats.wait_seconds,
        gather_seconds=stats.gather_seconds,
        transfer_seconds=stats.transfer_seconds,
        limit=find_limit(stats, elapsed, cold=cold),
    )


def find_limit(stats: LoaderStats, seconds: float, *, cold: bool) -> str:
    """Names what limits a loader whose batches nobody computes with, by where its time went.

    Example:
        >>> stats = LoaderStats(100, 3_276_800, 0.9, 0.8, 0.1, 5000)
        >>> find_limit(stats, 1.0, cold=False)
        'memory: 80% of the time went into gathering windows from the page cache'
    """
    wait = f"the loop waited for data {stats.wait_seconds / seconds:.0%} of the time"
    gather, transfer = stats.gather_seconds / seconds, stats.transfer_seconds / seconds
    if transfer >= max(0.5, gather):
        return f"the transfer: {transfer:.0%} of the time went into handing blocks to the device"
    if stats.wait_seconds < 0.5 * seconds and gather < 0.5:
        return f"the device: {wait}, and the rest for batches to be made of it"
    if cold:
        return f"the disk: {wait}, and transfers took {transfer:.0%}; the rest is windows on their way"
    if gather >= 0.5:
        return f"memory: {gather:.0%} of the time went into gathering windows from the page cache"
    return (
        f"the hand-over between threads: gathering took {gather:.0%} of the time and transfers "
        f"{transfer:.0%}; larger batches share its cost"
    )
