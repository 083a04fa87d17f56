"""Transforms under jit, compiled once however many loaders are made with one.

A loader may be made anew for every evaluation, which must not compile anew; and a transform may hold
its loader, which must not be kept alive by what was compiled of it.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any

import jax
from jax.sharding import NamedSharding

from tokenloader.batches.batch import Batch, SegmentDocuments, hide_seen_targets, next_token
from tokenloader.batches.split_sequences import on_pieces, on_whole
from tokenloader.loader.sharding import Placement


def jitted(
    transform: Callable[[jax.Array], Any],
    placement: Placement,
    group: int,
) -> Callable[..., tuple[Any, ...]]:
    """The transform under jit, for groups of steps.

    Returns:
        A function of what `put` gives, without the None: the block and, where the plan hides targets,
        how many count in each row. It gives what the transform makes of each step of the group.
    """
    if transform is next_token or isinstance(transform, SegmentDocuments):
        return _ours_jitted(transform, placement, group)
    # Only a placement that cuts sequences is part of what is compiled.
    key = (placement if placement.cuts else None, placement.seq_len, group)
    # A user's may hold the loader itself (a bound method does), so it must not be kept here.
    if isinstance(transform, FunctionType):
        kept = _users_jitted.setdefault(transform, {})
        if key not in kept:
            kept[key] = _jit(_of_rows(weakref.proxy(transform), *key[:2]), group)
        return kept[key]
    with suppress(TypeError):  # a class with __slots__ may not allow it
        transform = weakref.proxy(transform)  # the loader has the reference that counts
    return _jit(_of_rows(transform, *key[:2]), group)


@functools.lru_cache(maxsize=64)
def _ours_jitted(
    transform: Callable[[jax.Array], Batch], placement: Placement, group: int
) -> Callable[..., tuple[Any, ...]]:
    if placement.cuts:
        of_one = on_pieces(transform, placement.mesh, placement.spec, placement.seq_len)
    else:
        of_one = _of_rows(transform, None, placement.seq_len)
    # Left to itself jax may gather a batch that was split, where axis types are mixed or T is 1.
    split = placement.sharding if isinstance(placement.sharding, NamedSharding) else None
    return _jit(of_one, group, split)


def _jit(
    of_one: Callable[..., Any], group: int, out_shardings: NamedSharding | None = None
) -> Callable[..., tuple[Any, ...]]:
    of_step = jax.jit(of_one)  # traced once, not once a step

    def make_batches(*arguments: jax.Array) -> tuple[Any, ...]:
        if group == 1:
            return (of_one(*arguments),)
        return tuple(of_step(*(stacked[i] for stacked in arguments)) for i in range(group))

    return jax.jit(make_batches, out_shardings=out_shardings)


def _of_rows(
    transform: Callable[[jax.Array], Any], cut: Placement | None, seq_len: int
) -> Callable[..., Any]:
    of_block = transform if cut is None else on_whole(transform, cut.mesh, cut.spec)

    def of_rows(block: jax.Array, new_targets: jax.Array | None = None) -> Any:
        batch = of_block(block)
        if new_targets is None:
            return batch
        if isinstance(batch, Batch):
            return hide_seen_targets(batch, new_targets, seq_len)
        warnings.warn(
            f"{transform} returns {type(batch).__name__} and not a Batch, so the targets that the plan "
            f"repeats to keep shapes static are not hidden in it",
            stacklevel=2,
        )
        return batch

    return of_rows


_users_jitted: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., tuple[Any, ...]]]] = (
    weakref.WeakKeyDictionary()
)
