"""Information about token files without a look at their tokens: at once at any size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenloader.formats import safetensors
from tokenloader.formats.extent import Extent
from tokenloader.plans.shuffled_epochs import ShuffledEpochs
from tokenloader.storage.kernel_advice import CACHE_IS_TOLD, PAGE, num_cached
from tokenloader.storage.mapped import map_read_only
from tokenloader.tokens.token_array import TokenArray

_PROBES, _PROBE_PAGES = 1024, 16  # asking about all pages of 19 GiB takes half a second


@dataclass(frozen=True)
class File:
    """One of the files of a token axis.

    Attributes:
        path: the file.
        format: name of the format, as `tokenloader.formats` calls it.
        offset_bytes: offset of the first token in the file.
        num_tokens: number of tokens in the file.
    """

    path: str
    format: str
    offset_bytes: int
    num_tokens: int


@dataclass(frozen=True)
class Info:
    """What `tokenloader info` tells.

    Attributes:
        files: the files, in order.
        tensors: the tensors of the first file, "NAME DTYPE[SHAPE]" each; empty unless it is safetensors.
        dtype: name of the numpy dtype of one token.
        num_tokens, num_bytes: tokens of all files together, and their bytes, without headers.
        batch_size, seq_len: the batch shape that windows_per_epoch and steps_per_epoch are for.
        windows_per_epoch: windows in an epoch of ShuffledEpochs; None: fewer tokens than a window.
        steps_per_epoch: whole batches in an epoch; None likewise.
        cached_share: the part of the tokens in the page cache; None where the system does not tell.
        cache_sampled: whether cached_share is an estimate, from evenly spread pages.
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
    """Collects what can be told of tokens without reading them."""
    windows = None
    if len(tokens) > seq_len:
        windows = ShuffledEpochs(seed=0, num_epochs=1).bind(len(tokens), seq_len).num_samples
    extents = tokens.extents
    share, sampled = cached_share(extents)
    return Info(
        files=tuple(
            File(str(extent.path), extent.format.name, extent.offset_bytes, extent.num_tokens)
            for extent in extents
        ),
        tensors=tuple(
            f"{tensor.name} {tensor.dtype}{list(tensor.shape)}"
            for extent in extents[:1]
            if extent.format is safetensors.FORMAT
            for tensor in safetensors.read_tensors(extent.path)
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


def cached_share(
    extents: Sequence[Extent], *, num_probes: int = _PROBES, is_told: bool = CACHE_IS_TOLD
) -> tuple[float | None, bool]:
    """Measures the part of the tokens that is in the page cache, and says whether it is an estimate.

    The part is None where the system does not tell: on other systems than Linux, and for files that
    this process neither owns nor may write (for those Linux says that all is cached).

    Args:
        num_probes: ranges of pages asked about, at most; of a larger file pages are sampled.
    """
    if not is_told or not all(os.access(extent.path, os.W_OK) for extent in extents):
        return None, False
    probes = max(1, num_probes // max(1, len(extents)))
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
