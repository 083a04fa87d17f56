"""datatrove's .ds files, with an index of documents beside them.

NAME.ds is nothing but tokens, little-endian uint16 or uint32. NAME.ds.index: u64 document ends, in tokens.
NAME.ds.metadata: text, of which the second line is the number of tokens. NAME.ds.loss: a mask.

Opening reads the last document end and no more: with 10^7 documents an index has 80 MB.

Source: https://github.com/huggingface/datatrove/blob/main/src/datatrove/pipeline/tokens/tokenizer.py
"""

import os.path
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.formats.format import (
    Candidate,
    DoubtfulFormatError,
    Format,
    NotThisFormatError,
    read_array,
    read_bytes,
)

_SIDE_SUFFIXES = ".index", ".metadata", ".loss"


def find(candidate: Candidate, key: str, dtype: np.dtype[Any] | None) -> Extent:
    """Finds the tokens of a NAME.ds by its index or metadata.

    Both tell how wide tokens are and no more, so a dtype of that width is taken at its word.
    """
    path, size_bytes = candidate.path, candidate.size_bytes
    index_path, metadata_path = (path.with_name(path.name + suffix) for suffix in (".index", ".metadata"))
    # os.path.isfile, which is also False for a name longer than names may be.
    has_index, has_metadata = os.path.isfile(index_path), os.path.isfile(metadata_path)
    # An empty file has an empty index, which a full disk leaves too: the metadata was written last.
    if has_metadata and not (has_index and size_bytes):
        num_tokens, teller = _count_in_metadata(metadata_path), metadata_path
    elif has_index:
        num_tokens, teller = _last_document_end(index_path), index_path
    else:
        raise NotThisFormatError(f"there is no {path.name}.index or .metadata beside it")
    if size_bytes not in (2 * num_tokens, 4 * num_tokens):
        raise DoubtfulFormatError(
            f"{path}: by {teller.name} it has {num_tokens:,} tokens, which in {size_bytes:,} bytes are "
            f"neither 2 nor 4 bytes each; is one of the two truncated, or of another data set? To open "
            f"it as it is, move {teller.name} away and pass dtype="
        )
    found = np.dtype("uint16" if size_bytes == 2 * num_tokens else "uint32")
    if dtype is not None and (dtype.itemsize == found.itemsize or not num_tokens):
        found = dtype
    return Extent(path, 0, found, num_tokens, FORMAT, index_path if teller is index_path else None)


def read_boundaries(index_path: Path) -> NDArray[np.int64]:
    """Reads document boundaries, int64 [num_documents + 1] in tokens."""
    return np.append(0, read_array(index_path, "<u8", index_path.stat().st_size // 8).astype(np.int64))


def _last_document_end(index_path: Path) -> int:
    size_bytes = index_path.stat().st_size
    if size_bytes % 8:
        raise DoubtfulFormatError(
            f"{index_path}: {size_bytes} bytes is not a whole number of document ends (8 bytes each); "
            f"fetch or write it again, or move it away and pass dtype="
        )
    return int(read_array(index_path, "<u8", 1, size_bytes - 8)[0]) if size_bytes else 0


def _count_in_metadata(metadata_path: Path) -> int:
    lines = read_bytes(metadata_path, 1 << 16).splitlines()
    if len(lines) < 2 or not re.fullmatch(rb"[0-9]{1,20}", lines[1]):
        raise NotThisFormatError(f"{metadata_path.name} beside it tells no number of tokens")
    return int(lines[1])


FORMAT = Format(
    "datatrove .ds", find, (".ds",), _SIDE_SUFFIXES, tells_dtype=False, read_boundaries=read_boundaries
)
