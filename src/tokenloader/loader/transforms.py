"""Transforms under jit, each compiled once however many loaders are made with it.

A loader may be made anew for every evaluation, which must not compile anew; and a transform may hold
its loader (a bound method does), which its compiled function must not keep alive. So compiled functions
are kept for as long as their transform lives, and refer to it weakly: the loader has the reference that
counts.
"""

import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
from jax.sharding import NamedSharding

from tokenloader.batches.batch import Batch, SegmentDocuments, Transform, mask_repeated_targets, next_token
from tokenloader.batches.split_sequences import on_shards, on_whole_rows
from tokenloader.loader.sharding import Placement

BatchMaker = Callable[..., tuple[Any, ...]]
"""A function of a block and, if the plan hides targets, of its valid targets; gives each step's batch."""

# Compiled functions to keep for each transform; each is for another shape or sharding.
MAX_KEPT = 64

_kept: weakref.WeakKeyDictionary[Any, dict[Any, BatchMaker]] = weakref.WeakKeyDictionary()


def compiled(transform: Transform[Any], placement: Placement, group_size: int) -> BatchMaker:
    """Returns a transform under jit, for blocks of group_size steps."""
    is_ours = transform is next_token or isinstance(transform, SegmentDocuments)
    # A user's transform depends on the placement only where whole rows are gathered for it.
    needs = placement if is_ours or placement.splits_sequence else None
    key = (needs, placement.seq_len, group_size)
    makers: dict[Any, BatchMaker] = {}
    # Kept only for a transform that equals no other: an equal one could outlive the one referred to.
    if type(transform).__hash__ is object.__hash__:  # type: ignore[comparison-overlap]
        with suppress(TypeError):  # a class with __slots__ may allow no weak references
            makers = _kept.setdefault(transform, makers)
    if key not in makers:
        if len(makers) == MAX_KEPT:
            del makers[next(iter(makers))]
        makers[key] = _compile(transform, needs, placement.seq_len, group_size, is_ours)
    return makers[key]


def _compile(
    transform: Transform[Any],
    placement: Placement | None,
    seq_len: int,
    group_size: int,
    is_ours: bool,
) -> BatchMaker:
    if not is_ours:
        with suppress(TypeError):
            transform = weakref.proxy(transform)
    splits = placement is not None and placement.splits_sequence
    out_shardings = None
    if placement is not None and is_ours and isinstance(placement.sharding, NamedSharding):
        # Left to itself jax may gather a batch that was split, where axis types are mixed or T is 1.
        out_shardings = placement.sharding
    if placement is not None and splits and is_ours:
        make_one = on_shards(transform, placement.mesh, placement.spec, seq_len)
    elif placement is not None and splits:
        whole_rows = on_whole_rows(transform, placement.mesh, placement.spec)
        make_one = _masking(whole_rows, transform, seq_len)
    else:
        make_one = _masking(transform, transform, seq_len)
    make_step = jax.jit(make_one)  # traced once, not once a step

    def make_batches(*arguments: jax.Array) -> tuple[Any, ...]:
        if group_size == 1:
            return (make_one(*arguments),)
        return tuple(make_step(*(stacked[i] for stacked in arguments)) for i in range(group_size))

    return jax.jit(make_batches, out_shardings=out_shardings)


def _masking(make_batch: Transform[Any], transform: Transform[Any], seq_len: int) -> Callable[..., Any]:
    """Returns a function that also masks the targets that the plan repeats, where it does."""

    def make(block: jax.Array, valid_targets: jax.Array | None = None) -> Any:
        batch = make_batch(block)
        if valid_targets is None:
            return batch
        if isinstance(batch, Batch):
            return mask_repeated_targets(batch, valid_targets, seq_len)
        warnings.warn(
            f"{transform} returns {type(batch).__name__} and not a Batch, so the targets that the plan "
            f"repeats to keep shapes static are not masked in it",
            stacklevel=2,
        )
        return batch

    return make
