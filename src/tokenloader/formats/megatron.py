"""Megatron-LM's .bin files, with an index of sequences and documents beside them.

PREFIX.bin is nothing but tokens. PREFIX.idx: "MMIDIDX", two zero bytes, u64 version 1, u8 code of the
dtype, u64 number of sequences S, u64 number of document entries D; then int32 [S] sequence lengths in
tokens, int64 [S] byte offsets in the .bin, int64 [D] sequence numbers at which documents begin and, last,
the end; int8 [S] modes in multimodal data. All little-endian.

Opening reads no more than the two ends of an index: with 10^7 documents it has 200 MB.

Source: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import CONVERT_IT, Extent, token_dtype
from tokenloader.formats.foreign import OLD_INDEX, SAVE_IDS, Foreign, ForeignFileError
from tokenloader.formats.format import (
    Candidate,
    Format,
    NotThisFormatError,
    look_at,
    read_array,
    read_bytes,
)

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = dict(enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), 1))
_CHECKED_AT_OPEN = 1 << 15  # sequences at each end, 400 KiB of the index; the others with the documents
_AGAIN = "fetch or write the index again"


class _Index(NamedTuple):
    path: Path
    dtype: np.dtype[Any]
    num_sequences: int
    num_entries: int  # one more than there are documents

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """Reads the lengths of sequences from `first` on, int64 [count] in tokens."""
        return read_array(self.path, "<i4", count, _HEADER.size + 4 * first).astype(np.int64)

    def pointers(self, first: int, count: int) -> NDArray[np.int64]:
        """Reads where sequences from `first` on begin, int64 [count] in bytes."""
        at = _HEADER.size + 4 * self.num_sequences + 8 * first
        return read_array(self.path, "<i8", count, at)

    def entries(self) -> NDArray[np.int64]:
        """Reads the sequences with which documents begin, int64 [num_entries]."""
        at = _HEADER.size + 12 * self.num_sequences
        return read_array(self.path, "<i8", self.num_entries, at)


def find(candidate: Candidate, key: str, dtype: np.dtype[Any] | None) -> Extent:
    """Finds the tokens of PREFIX.bin and PREFIX.idx, given either."""
    path = candidate.path
    if candidate.head.startswith(_MAGIC):
        index_path, path = path, path.with_suffix(".bin")
        if index_path == path or not path.is_file():
            raise FileNotFoundError(
                f"{index_path}: is the index of Megatron-LM tokens, which should be in {path.name} beside "
                f"it, a file that is not there; bring the two together, named PREFIX.idx and PREFIX.bin"
            )
    else:
        index_path = path.with_suffix(".idx")
        if path.suffix != ".bin" or not index_path.is_file():
            raise NotThisFormatError(f"there is no {path.stem}.idx beside it")
        if look_at(index_path).head.startswith(OLD_INDEX):
            # Early Megatron-LM wrote ids as they are, fairseq each plus 1; the files do not tell which.
            remedy = f"{index_path.name} beside it says so: {SAVE_IDS}"
            raise ForeignFileError(candidate, Foreign("data of the old kind (TNTIDX)", remedy), dtype)
    index = _read_header(index_path)
    count = min(index.num_sequences, _CHECKED_AT_OPEN)
    if count < index.num_sequences:
        _check_sequences(index, 0, count)
    end_bytes = _check_sequences(index, index.num_sequences - count, count)
    size_bytes = look_at(path).size_bytes
    if end_bytes != size_bytes:
        raise ValueError(
            f"{path}: has {size_bytes:,} bytes, and by {index_path.name} its tokens end at byte "
            f"{end_bytes:,}; is one of the two truncated, or of another data set?"
        )
    num_tokens = end_bytes // index.dtype.itemsize
    # A writer that was never told where a document ends leaves one entry, 0.
    return Extent(path, 0, index.dtype, num_tokens, FORMAT, index_path if index.num_entries > 1 else None)


def read_boundaries(index_path: Path) -> NDArray[np.int64]:
    """Reads document boundaries, int64 [num_documents + 1] in tokens, and checks all sequences."""
    index = _read_header(index_path)
    _check_sequences(index, 0, index.num_sequences)
    begins = np.append(0, index.lengths(0, index.num_sequences).cumsum())
    entries = index.entries()
    outside = np.flatnonzero((entries < 0) | (entries > index.num_sequences))
    if outside.size:
        raise ValueError(
            f"{index_path}: document entry {outside[0]:,} is sequence {entries[outside[0]]:,}, and there "
            f"are {index.num_sequences:,}; {_AGAIN}"
        )
    return begins[entries]


def _read_header(path: Path) -> _Index:
    size_bytes = path.stat().st_size
    header = read_bytes(path, _HEADER.size)
    if not header.startswith(_MAGIC):
        raise NotThisFormatError(f"{path.name} beside it is no Megatron-LM index")
    if len(header) < _HEADER.size:
        raise ValueError(
            f"{path}: is cut off in its header, after {size_bytes} of {_HEADER.size} bytes; {_AGAIN}"
        )
    _, version, code, num_sequences, num_entries = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{path}: is of version {version} of the format; expected version 1, so {_AGAIN}")
    if code not in _DTYPES:
        known = ", ".join(f"{code} ({name})" for code, name in _DTYPES.items())
        raise ValueError(f"{path}: the code of its dtype is {code}; expected one of {known}, so {_AGAIN}")
    dtype = token_dtype(_DTYPES[code], f"{path}: its data is of dtype ", CONVERT_IT)
    expected = _HEADER.size + 12 * num_sequences + 8 * num_entries
    if size_bytes not in (expected, expected + num_sequences):  # with modes, in multimodal data
        raise ValueError(
            f"{path}: has {size_bytes:,} bytes, and {num_sequences:,} sequences and {num_entries:,} "
            f"document entries, as its header says, take {expected:,}; {_AGAIN}"
        )
    return _Index(path, dtype, num_sequences, num_entries)


def _check_sequences(index: _Index, first: int, count: int) -> int:
    """Checks that sequences lie end to end; returns the byte at which the last of them ends."""
    if not count:
        return 0
    lengths, pointers = index.lengths(first, count), index.pointers(first, count)
    ends = pointers + lengths * index.dtype.itemsize
    if (lengths < 0).any():
        at = int((lengths < 0).argmax())
        raise ValueError(f"{index.path}: sequence {first + at:,} has {lengths[at]:,} tokens; {_AGAIN}")
    before = np.concatenate([[pointers[0] if first else 0], ends[:-1]])
    if (pointers != before).any():
        at = int((pointers != before).argmax())
        raise ValueError(
            f"{index.path}: sequence {first + at:,} begins at byte {pointers[at]:,} and the tokens before "
            f"it end at byte {before[at]:,}; to be one token axis the sequences must lie end to end and in "
            f"order, so write the data set again"
        )
    return int(ends[-1])


FORMAT = Format("Megatron-LM .bin", find, (".bin",), (".idx",), read_boundaries=read_boundaries)
