"""Foreign files: what lies beside token files or is taken for one, and how to get at the tokens in it.

With dtype= any file opens, and these would as garbage. They are known by bytes with which tokens hardly
begin: magic numbers of 3 bytes or more, checksums, offsets that add up to the file's size. Only what has
no such bytes is told by its name, or as text.

Sources: the formats' own descriptions; litdata's streaming/writer.py, mosaicml-streaming's
base/format/mds/writer.py, lit-gpt's packed_dataset.py, TensorFlow's core/lib/io/record_writer.h, Arrow's
format/Columnar.rst, Riegeli's doc/riegeli_records_file_format.md.
"""

import codecs
import re
import struct
from typing import Any, NamedTuple

import numpy as np

from tokenloader.formats.format import Candidate, read_bytes


class Foreign(NamedTuple):
    """The kind of a file that is no token file, and the way to its tokens."""

    what: str
    remedy: str


class ForeignFileError(ValueError):
    """The file is known to be no token file."""

    def __init__(self, candidate: Candidate, foreign: Foreign, dtype: np.dtype[Any] | None) -> None:
        self.what = foreign.what
        message = f"{candidate.path}: is {foreign.what}; {foreign.remedy}"
        if dtype is not None:
            message += (
                f". If the file is nothing but tokens all the same, open "
                f'np.memmap({str(candidate.path)!r}, "{dtype}", "r") instead of its path'
            )
        super().__init__(message)


_DECOMPRESS = "decompress it first"
SAVE_IDS = "load it, and write its ids, end to end, with np.save"
_BIG_ENDIAN = Foreign("llm.c .bin in big-endian byte order", "write it on a little-endian machine")
OLD_INDEX = b"TNTIDX\0\0"
_BY_FIRST_BYTES = {
    b"version https://git-lfs": Foreign("a Git LFS pointer", "fetch the file itself: git lfs pull"),
    b"PAR1": Foreign(
        "a Parquet file", f"make tokens of text with tokenloader tokenize; of ids, {SAVE_IDS}"
    ),
    b"ARROW1\0\0": Foreign("an Arrow file", SAVE_IDS),
    b"PK\x03\x04": Foreign("a zip archive (.npz, or PyTorch's)", SAVE_IDS),
    b"\x89HDF\r\n\x1a\n": Foreign("an HDF5 file", SAVE_IDS),
    bytes.fromhex("80028a0a6cfc9c46f9206aa850192e"): Foreign("a PyTorch file", SAVE_IDS),
    bytes.fromhex("83af70d10d884a3f"): Foreign("a Riegeli or ArrayRecord file", SAVE_IDS),
    OLD_INDEX: Foreign("an index of the old kind (TNTIDX)", SAVE_IDS),
    b"\x1f\x8b\x08": Foreign("gzip", _DECOMPRESS),
    b"\x28\xb5\x2f\xfd": Foreign("zstd", _DECOMPRESS),
    b"\xfd7zXZ\0": Foreign("xz", _DECOMPRESS),
    b"\x04\x22\x4d\x18": Foreign("lz4", _DECOMPRESS),
    **{b"BZh%d1AY&SY" % level: Foreign("bzip2", _DECOMPRESS) for level in range(1, 10)},
    struct.pack("<i", 20240522): Foreign("llm.c's evaluation file", "its examples are no token axis"),
    struct.pack(">i", 20240520): _BIG_ENDIAN,
    struct.pack(">i", 20240801): _BIG_ENDIAN,
}
_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".bz2": "bzip2", ".lz4": "lz4"}
_PICKLED = ".pkl", ".pickle", ".pt", ".pth"
_LIT_DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}  # by the code in the header
_MIN_TEXT_BYTES, _MIN_TEXT_VALUES = 32, 8  # less of it might be ids


def by_bytes(candidate: Candidate) -> Foreign | None:
    """Says what a file is by bytes that tokens hardly begin with; None: nothing that is known."""
    for magic, known in _BY_FIRST_BYTES.items():
        if candidate.head.startswith(magic):
            return known
    checks = _tar, _sample_index, _samples, _lit_packed, _pickle, _arrow_stream, _tfrecord
    return next((found for check in checks if (found := check(candidate))), None)


def by_name_or_text(candidate: Candidate, dtype: np.dtype[Any] | None) -> Foreign | None:
    """Says what a file is whose bytes are too few to tell: by its name, or as text that is no tokens."""
    suffix = candidate.path.suffix.lower()
    if suffix in _COMPRESSED:
        return Foreign(f"{_COMPRESSED[suffix]}, by its name", f"{_DECOMPRESS}; if it is none, rename it")
    if suffix in _PICKLED:
        return Foreign("a pickle or PyTorch file, by its name", f"{SAVE_IDS}; if it is none, rename it")
    if (dtype is None or dtype.itemsize > 1) and (text := _text(candidate.head)):
        remedy = (
            'make tokens of it with tokenloader tokenize, or take its bytes for tokens with dtype="uint8"'
        )
        return Foreign("text", f"it begins with {text[:30]!r}: {remedy}")
    return None


def _text(head: bytes) -> str | None:
    # Of ids that lie close together each second byte is nearly the same.
    if len(head) < _MIN_TEXT_BYTES or min(len({*head[::2]}), len({*head[1::2]})) < _MIN_TEXT_VALUES:
        return None
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # which may end in a character
    except UnicodeDecodeError:
        return None
    return None if re.search(r"[^\t\n\v\f\r -~\u00a0-\U0010ffff]", text) else text


def _tar(candidate: Candidate) -> Foreign | None:
    return Foreign("a tar archive", "unpack it first") if candidate.head[257:262] == b"ustar" else None


def _sample_index(candidate: Candidate) -> Foreign | None:
    found = re.match(rb'\s*\{\s*"(chunks|shards)"\s*:\s*\[', candidate.head)
    return _of_samples("an index", found[1] == b"chunks") if found else None


def _samples(candidate: Candidate) -> Foreign | None:
    """A chunk of samples: u32 their number, and u32 offsets, of which the last is the size of the file."""
    if len(candidate.head) < 12:
        return None
    num_samples, first = struct.unpack_from("<II", candidate.head)
    header_bytes = 8 + 4 * num_samples
    if not num_samples or not header_bytes <= first <= candidate.size_bytes:
        return None
    # The last offset, and the first byte of settings, if there are any.
    last = read_bytes(candidate.path, 5, header_bytes - 4)
    if int.from_bytes(last[:4], "little") != candidate.size_bytes % 2**32:
        return None
    if first > header_bytes and last[4:] != b"{":
        return None
    return _of_samples("a chunk", first == header_bytes)


def _of_samples(what: str, by_litdata: bool) -> Foreign:
    writer = "litdata" if by_litdata else "mosaicml-streaming"
    remedy = f"read them with {writer}, and write their ids, end to end, with np.save"
    return Foreign(f"{what} of samples by {writer}", remedy)


def _lit_packed(candidate: Candidate) -> Foreign | None:
    """Tokens after 24 bytes: LITPKDS, u64 version, u8 code of the dtype, u64 number of tokens."""
    if not candidate.head.startswith(b"LITPKDS"):
        return None
    dtype = _LIT_DTYPES.get(candidate.head[15] if len(candidate.head) > 15 else 0)
    remedy = f'open np.memmap({str(candidate.path)!r}, "{dtype}", "r", offset=24) instead of its path'
    return Foreign("lit-gpt's packed data, tokens after a header", remedy if dtype else SAVE_IDS)


def _pickle(candidate: Candidate) -> Foreign | None:
    """A pickle of protocol 4 or 5, whose first frame fits into the file."""
    if candidate.head[:3] not in (b"\x80\x04\x95", b"\x80\x05\x95"):
        return None
    frame_bytes = int.from_bytes(candidate.head[3:11], "little")
    return Foreign("a pickle", SAVE_IDS) if frame_bytes <= candidate.size_bytes - 11 else None


def _arrow_stream(candidate: Candidate) -> Foreign | None:
    """A stream of Arrow: -1, i32 size of a message, and this, a flatbuffer with its table and vtable."""
    head, begin = candidate.head, 8
    if len(head) < 64 or head[:4] != b"\xff" * 4:
        return None
    message_bytes, table = struct.unpack_from("<iI", head, 4)
    if message_bytes % 8 or not table <= message_bytes <= candidate.size_bytes - begin or table > 512:
        return None
    vtable = begin + table - int.from_bytes(head[begin + table :][:4], "little", signed=True)
    is_vtable = 12 <= vtable <= 512 and 4 <= int.from_bytes(head[vtable : vtable + 2], "little") <= 64
    return Foreign("an Arrow stream (Hugging Face datasets)", SAVE_IDS) if is_vtable else None


def _tfrecord(candidate: Candidate) -> Foreign | None:
    """A record of TensorFlow: u64 its length, u32 the masked CRC-32C of that."""
    if int.from_bytes(candidate.head[:8], "little") > candidate.size_bytes - 16:
        return None
    crc = 2**32 - 1
    for byte in candidate.head[:8]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 2**32 - 1
    masked = ((crc >> 15 | (crc & 0x7FFF) << 17) + 0xA282EAD8) % 2**32
    is_record = candidate.head[8:12] == masked.to_bytes(4, "little")
    return Foreign("a TFRecord file", SAVE_IDS) if is_record else None
