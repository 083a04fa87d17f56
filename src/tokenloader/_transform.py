"""Transforms under jit, compiled once however many loaders are made with one.

A loader may be made anew for every evaluation, which must not compile anew; and a transform may hold
its loader, which must not be kept alive by what was compiled of it.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax

from tokenloader._batch import Batch, PackedDocuments, hide_seen_targets, next_token


def jitted(transform: Callable[[jax.Array], Any], hides_targets: bool) -> Callable[..., Any]:
    """The transform under jit, compiled once however many loaders are made with it."""
    if transform is next_token or isinstance(transform, PackedDocuments):
        return _ours_jitted(transform, hides_targets)
    # A user's may hold the loader itself (a bound method does), so it must not be kept here.
    if not hides_targets:
        return jax.jit(transform)  # jax keeps what it compiled for as long as the function lives
    if isinstance(transform, FunctionType):
        if transform not in _users_jitted:
            _users_jitted[transform] = _jit(weakref.proxy(transform), hides_targets)
        return _users_jitted[transform]
    return _jit(weakref.proxy(transform), hides_targets)  # the loader has the reference that counts


def _jit(transform: Callable[[jax.Array], Any], hides_targets: bool) -> Callable[..., Any]:
    if not hides_targets:
        return jax.jit(transform)

    def transform_and_hide(block: jax.Array, new_targets: jax.Array) -> Any:
        batch = transform(block)
        if isinstance(batch, Batch):
            return hide_seen_targets(batch, new_targets)
        warnings.warn(
            f"{transform} returns {type(batch).__name__} and not a Batch, so the targets that the plan "
            f"repeats to keep shapes static are not hidden in it",
            stacklevel=2,
        )
        return batch

    return jax.jit(transform_and_hide)


_ours_jitted = functools.lru_cache(maxsize=64)(_jit)
_users_jitted: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()
