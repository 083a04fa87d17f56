"""Information about token files that costs no look at their tokens: at once at any size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenloader.formats.extent import Extent
from tokenloader.formats.safetensors import read_tensors
from tokenloader.plans.plan import ShuffledEpochs
from tokenloader.storage.kernel_advice import CACHE_IS_TOLD, PAGE, num_cached
from tokenloader.storage.mapped import map_read_only
from tokenloader.tokens.token_array import TokenArray

_PROBES, _PROBE_PAGES = 1024, 16  # asking about all pages of 19 GiB takes half a second


@dataclass(frozen=True)
class File:
    """One of the files of a token axis.

    Attributes:
        offset_bytes: of its first token.
    """

    path: str
    format: str
    offset_bytes: int
    num_tokens: int


@dataclass(frozen=True)
class Info:
    """What `tokenloader info` tells.

    Attributes:
        files: in order.
        tensors: of the first file, if it is safetensors: "NAME DTYPE[SHAPE]" each.
        dtype: of a token.
        num_tokens, num_bytes: of all files together, without headers.
        batch_size, seq_len: that the next two are for.
        windows_per_epoch: of ShuffledEpochs; None: the tokens are fewer than a window.
        steps_per_epoch: whole batches of them.
        cached_share: the part that is in the page cache; None where the system does not tell.
        cache_sampled: whether that is an estimate, from evenly spread pages.
    """

    files: tuple[File, ...]
    tensors: tuple[str, ...]
    dtype: str
    num_tokens: int
    num_bytes: int
    batch_size: int
    seq_len: int
    windows_per_epoch: int | None
    steps_per_epoch: int | None
    cached_share: float | None
    cache_sampled: bool


def info(tokens: TokenArray, *, batch_size: int, seq_len: int) -> Info:
    """What can be told of tokens without reading them."""
    windows = None
    if len(tokens) > seq_len:
        windows = ShuffledEpochs(seed=0).windows_per_epoch(num_tokens=len(tokens), seq_len=seq_len)
    extents = extents_of(tokens)
    share, sampled = cached_share(extents)
    return Info(
        files=tuple(
            File(str(one.path), one.format, one.offset_bytes, one.num_tokens) for one in extents
        ),
        tensors=tuple(
            f"{tensor.name} {tensor.dtype}{list(tensor.shape)}"
            for one in extents[:1]
            if one.format == "safetensors"
            for tensor in read_tensors(one.path)
        ),
        dtype=tokens.dtype.name,
        num_tokens=len(tokens),
        num_bytes=tokens.nbytes,
        batch_size=batch_size,
        seq_len=seq_len,
        windows_per_epoch=windows,
        steps_per_epoch=None if windows is None else windows // batch_size,
        cached_share=share,
        cache_sampled=sampled,
    )


def extents_of(tokens: TokenArray) -> list[Extent]:
    """The files of tokens; none for arrays."""
    return list(tokens.extents)


def cached_share(extents: Sequence[Extent]) -> tuple[float | None, bool]:
    """The part of the tokens that is in the page cache, and whether that is an estimate.

    None where the system does not tell: on other systems than Linux, and of files that this process
    neither owns nor may write (of those Linux says that all is cached).
    """
    if not CACHE_IS_TOLD or not all(os.access(extent.path, os.W_OK) for extent in extents):
        return None, False
    probes = max(1, _PROBES // max(1, len(extents)))
    sampled, cached, total = False, 0.0, 0
    for extent in extents:
        array = map_read_only(extent)
        first = array.ctypes.data // PAGE
        pages = (array.ctypes.data + array.nbytes - 1) // PAGE + 1 - first
        begins, length = np.zeros(1, np.int64), pages
        if pages > probes * _PROBE_PAGES:
            sampled, length = True, _PROBE_PAGES
            begins = np.linspace(0, pages - length, probes).astype(np.int64)
        found = [num_cached((first + begin) * PAGE, length) for begin in begins.tolist()]
        cached += sum(found) / (len(found) * length) * pages
        total += pages
    return (cached / total if total else None), sampled
