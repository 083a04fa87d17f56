"""Information about token files without a look at their tokens: at once at any size."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenloader.formats import safetensors
from tokenloader.formats.extent import Extent
from tokenloader.formats.format import look_at
from tokenloader.plans.shuffled_epochs import ShuffledEpochs
from tokenloader.storage.kernel_advice import CACHE_IS_TOLD, PAGE, num_cached
from tokenloader.storage.mapped import map_read_only
from tokenloader.tokens.token_array import TokenArray

_PROBES, _PROBE_PAGES = 1024, 16  # asking about all pages of 19 GiB takes half a second


@dataclass(frozen=True)
class File:
    """One of the files of a token axis."""

    path: str
    format: str  # name of the format, as `tokenloader.formats` calls it
    offset_bytes: int  # of the first token in the file
    num_tokens: int


@dataclass(frozen=True)
class Info:
    """What `tokenloader info` tells."""

    files: tuple[File, ...]  # in order
    tensors: tuple[str, ...]  # of the first file, "NAME DTYPE[SHAPE]" each; empty unless it is safetensors
    dtype: str  # name of the numpy dtype of one token
    num_tokens: int  # of all files together
    num_bytes: int  # of these tokens, without headers
    batch_size: int
    seq_len: int
    windows_per_epoch: int | None  # of ShuffledEpochs with this seq_len; None: fewer tokens than a window
    steps_per_epoch: int | None  # whole batches of this batch_size in an epoch; None likewise
    cached_share: float | None  # part of the tokens in the page cache; None: the system does not tell
    cache_sampled: bool  # whether cached_share is an estimate, from evenly spread pages


def info(tokens: TokenArray, *, batch_size: int, seq_len: int) -> Info:
    """Collects what can be told of tokens without reading them."""
    windows = None
    if len(tokens) > seq_len:
        windows = ShuffledEpochs(seed=0, num_epochs=1).bind(len(tokens), seq_len).num_samples
    extents = tokens.extents
    has_tensors = bool(extents) and extents[0].format is safetensors.FORMAT
    tensors = safetensors.read_tensors(look_at(extents[0].path)) if has_tensors else []
    share, sampled = cached_share(extents)
    return Info(
        files=tuple(
            File(str(one.path), one.format.name, one.offset_bytes, one.num_tokens) for one in extents
        ),
        tensors=tuple(f"{one.name} {one.dtype}{list(one.shape)}" for one in tensors),
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

    At most num_probes ranges of pages are asked about; of a larger file pages are sampled. The part is
    None where the system does not tell: on other systems than Linux, and for files that this process
    neither owns nor may write (for those Linux says that all is cached).
    """
    if not is_told or not all(os.access(extent.path, os.W_OK) for extent in extents):
        return None, False
    probes = max(1, num_probes // max(1, len(extents)))
    sampled, cached, total = False, 0.0, 0
    for extent in extents:
        array, _ = map_read_only(extent)
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
