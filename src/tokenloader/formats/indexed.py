"""Data files with an index beside them: Megatron-LM's and datatrove's, and their document boundaries.

Both data files are nothing but tokens; the index is found by its name, which the writers fix.

- Megatron-LM: PREFIX.bin and PREFIX.idx: "MMIDIDX", two zero bytes, u64 version 1, u8 code of the dtype,
  u64 number of sequences S, u64 number of document entries D; then int32 [S] sequence lengths in tokens,
  int64 [S] byte offsets in the .bin, int64 [D] sequence numbers at which documents begin and, last,
  the end; int8 [S] modes in multimodal data. All little-endian.
  https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
- datatrove: NAME.ds, little-endian uint16 or uint32; NAME.ds.index: u64 document ends, in tokens;
  NAME.ds.metadata: text, of which the second line is the number of tokens.
  https://github.com/huggingface/datatrove/blob/main/src/datatrove/pipeline/tokens/tokenizer.py

Opening reads no more than the two ends of an index: with 10^7 documents it has 200 MB.
"""

from __future__ import annotations

import errno
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import (
    CONVERT_IT,
    Candidate,
    DoubtfulFormatError,
    Extent,
    NotThisFormatError,
    token_dtype,
)

MEGATRON = "Megatron-LM .bin"
DATATROVE = "datatrove .ds"

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {
    code: np.dtype(name)
    for code, name in enumerate(
        ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), start=1
    )
}
_CHECKED_AT_OPEN = 1 << 15  # sequences at each end; 400 KiB of the index


class _MegatronIndex(NamedTuple):
    path: Path
    dtype: np.dtype[Any]
    num_sequences: int
    num_entries: int  # of documents: one more than there are documents

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """int64 [count], in tokens, of sequences first and after."""
        at = _MEGATRON_HEADER.size + 4 * first
        return np.fromfile(self.path, "<i4", count, offset=at).astype(np.int64)

    def pointers(self, first: int, count: int) -> NDArray[np.int64]:
        """int64 [count], in bytes."""
        at = _MEGATRON_HEADER.size + 4 * self.num_sequences + 8 * first
        return np.fromfile(self.path, "<i8", count, offset=at)

    def entries(self) -> NDArray[np.int64]:
        """int64 [num_entries], sequence numbers."""
        at = _MEGATRON_HEADER.size + 12 * self.num_sequences
        return np.fromfile(self.path, "<i8", self.num_entries, offset=at)


def find_megatron(candidate: Candidate, key: str) -> Extent:
    """The tokens of a PREFIX.bin and PREFIX.idx, of which the candidate is either."""
    path = candidate.path
    if candidate.head.startswith(_MEGATRON_MAGIC):
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
    index = _read_megatron_header(index_path)
    count = min(index.num_sequences, _CHECKED_AT_OPEN)
    if count < index.num_sequences:
        _check_sequences(index, 0, count)
    end_bytes = _check_sequences(index, index.num_sequences - count, count)
    size_bytes = path.stat().st_size
    if end_bytes != size_bytes:
        raise ValueError(
            f"{path}: has {size_bytes:,} bytes, and by {index_path.name} its tokens end at byte "
            f"{end_bytes:,}; is one of the two truncated, or of another data set?"
        )
    num_tokens = end_bytes // index.dtype.itemsize
    if not num_tokens:
        raise ValueError(f"{path}: the file is empty; was the download or conversion completed?")
    # A writer that was never told where a document ends leaves one entry, 0.
    documents = index_path if index.num_entries > 1 else None
    return Extent(path, 0, index.dtype, num_tokens, MEGATRON, documents)


def find_datatrove(candidate: Candidate, key: str) -> Extent:
    """The tokens of a NAME.ds, whose width its index or metadata tells."""
    path, size_bytes = candidate.path, candidate.size_bytes
    index_path, metadata_path = (
        path.with_name(path.name + suffix) for suffix in (".index", ".metadata")
    )
    if _is_there(index_path):
        num_tokens, teller = _last_document_end(index_path), index_path
    elif _is_there(metadata_path):
        num_tokens, teller = _count_in_metadata(metadata_path), metadata_path
    else:
        raise NotThisFormatError(f"there is no {path.name}.index or .metadata beside it")
    if size_bytes not in (2 * num_tokens, 4 * num_tokens):
        raise DoubtfulFormatError(
            f"{path}: by {teller.name} it has {num_tokens:,} tokens, which in {size_bytes:,} bytes are "
            f"neither 2 nor 4 bytes each; is one of the two truncated, or of another data set? To open "
            f"it as it is, move {teller.name} away and pass dtype="
        )
    dtype = np.dtype("uint16" if size_bytes == 2 * num_tokens else "uint32")
    return Extent(
        path, 0, dtype, num_tokens, DATATROVE, index_path if teller is index_path else None
    )


def read_documents(extent: Extent) -> NDArray[np.int64]:
    """int64 [num_documents + 1], document boundaries in tokens: 0, ..., num_tokens.

    Args:
        extent: that has an index_path.

    Raises:
        OSError: the index cannot be read.
        ValueError: the index does not fit the tokens.
    """
    assert extent.index_path is not None
    if extent.format == MEGATRON:
        return _megatron_documents(extent, extent.index_path)
    ends = np.fromfile(extent.index_path, "<u8").astype(np.int64)
    return _checked_boundaries(np.concatenate([[0], ends]), extent, extent.index_path)


def _megatron_documents(extent: Extent, index_path: Path) -> NDArray[np.int64]:
    index = _read_megatron_header(index_path)
    _check_sequences(index, 0, index.num_sequences)
    begins = np.zeros(index.num_sequences + 1, np.int64)
    np.cumsum(index.lengths(0, index.num_sequences), out=begins[1:])
    entries = index.entries()
    outside = np.flatnonzero((entries < 0) | (entries > index.num_sequences))
    if outside.size:
        raise ValueError(
            f"{index_path}: document entry {outside[0]:,} is sequence {entries[outside[0]]:,}, and there "
            f"are {index.num_sequences:,}; fetch or write the index again"
        )
    return _checked_boundaries(begins[entries], extent, index_path)


def _checked_boundaries(
    boundaries: NDArray[np.int64], extent: Extent, index_path: Path
) -> NDArray[np.int64]:
    if boundaries[0] != 0 or boundaries[-1] != extent.num_tokens:
        raise ValueError(
            f"{index_path}: its documents are tokens {boundaries[0]:,} to {boundaries[-1]:,}, and "
            f"{extent.path.name} has tokens 0 to {extent.num_tokens:,}; fetch or write the two again"
        )
    backwards = np.flatnonzero(boundaries[1:] < boundaries[:-1])
    if backwards.size:
        document = int(backwards[0])
        raise ValueError(
            f"{index_path}: document {document:,} begins at token {boundaries[document]:,} and ends "
            f"before it, at {boundaries[document + 1]:,}; fetch or write the index again"
        )
    return boundaries


def _read_megatron_header(index_path: Path) -> _MegatronIndex:
    size_bytes = index_path.stat().st_size
    with index_path.open("rb") as file:
        header = file.read(_MEGATRON_HEADER.size)
    if not header.startswith(_MEGATRON_MAGIC):
        raise NotThisFormatError(f"{index_path.name} beside it is no Megatron-LM index")
    if len(header) < _MEGATRON_HEADER.size:
        raise ValueError(
            f"{index_path}: is cut off in its header, after {size_bytes} of {_MEGATRON_HEADER.size} "
            f"bytes; fetch or write it again"
        )
    _, version, code, num_sequences, num_entries = _MEGATRON_HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{index_path}: is of version {version}; known is version 1 of the format")
    if code not in _MEGATRON_DTYPES:
        known = ", ".join(f"{code} ({dtype})" for code, dtype in _MEGATRON_DTYPES.items())
        raise ValueError(
            f"{index_path}: the code of its dtype is {code}; known are {known}. Fetch or write it again"
        )
    dtype = token_dtype(_MEGATRON_DTYPES[code], f"{index_path}: its data is of dtype ", CONVERT_IT)
    needed = _MEGATRON_HEADER.size + 12 * num_sequences + 8 * num_entries
    if size_bytes not in (needed, needed + num_sequences):  # with modes, in multimodal data
        raise ValueError(
            f"{index_path}: has {size_bytes:,} bytes, and {num_sequences:,} sequences and {num_entries:,} "
            f"document entries, as its header says, take {needed:,}; fetch or write it again"
        )
    return _MegatronIndex(index_path, dtype, num_sequences, num_entries)


def _check_sequences(index: _MegatronIndex, first: int, count: int) -> int:
    """Checks that sequences lie end to end; returns the byte where the last of them ends."""
    if not count:
        return 0
    lengths, pointers = index.lengths(first, count), index.pointers(first, count)
    ends = pointers + lengths * index.dtype.itemsize
    negative = np.flatnonzero(lengths < 0)
    if negative.size:
        raise ValueError(
            f"{index.path}: sequence {first + negative[0]:,} has {lengths[negative[0]]:,} tokens; fetch or "
            f"write the index again"
        )
    before = np.concatenate([[pointers[0] if first else 0], ends[:-1]])
    elsewhere = np.flatnonzero(pointers != before)
    if elsewhere.size:
        at = int(elsewhere[0])
        raise ValueError(
            f"{index.path}: sequence {first + at:,} begins at byte {pointers[at]:,} and the tokens before "
            f"it end at byte {before[at]:,}; to be one token axis the sequences must lie end to end and in "
            f"order, so write the data set again"
        )
    return int(ends[-1])


def _is_there(path: Path) -> bool:
    """Whether there is such a file; none has a name that is longer than names may be."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def _last_document_end(index_path: Path) -> int:
    size_bytes = index_path.stat().st_size
    if not size_bytes or size_bytes % 8:
        raise DoubtfulFormatError(
            f"{index_path}: {size_bytes} bytes is not a whole number of document ends (8 bytes each, 1 or "
            f"more); fetch or write it again, or move it away and pass dtype="
        )
    return int(np.fromfile(index_path, "<u8", 1, offset=size_bytes - 8)[0])


def _count_in_metadata(metadata_path: Path) -> int:
    with metadata_path.open("rb") as file:
        lines = file.read(1 << 16).splitlines()
    if len(lines) < 2 or not lines[1].isdigit():
        raise NotThisFormatError(f"{metadata_path.name} beside it tells no number of tokens")
    return int(lines[1])
