"""Token files as their own writers make them, and every way in which a person may have tokens."""

import errno
import io
import json
import mmap
import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tokenloader import open_tokens
from tokenloader.formats.extent import Extent
from tokenloader.storage.kernel_advice import KernelAdvice
from tokenloader.tokens.opening import join

CUTS = [
    1,
    3,
    900,
    905,
    1990,
]  # where ways of several parts cut; the first 2,000 tokens: 1, 2, 897, 5, 1085, 10
DTYPES = "uint8", "uint16", "uint32", "int32", "int64"


def random_tokens(num_tokens=2000, dtype="uint16", seed=0):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    return rng.integers(info.min, info.max, num_tokens, dtype=dtype, endpoint=True)


# Doubles


class NeverFull:
    """A fill that ends with nothing read: tokens are served from the mapped files."""

    def __init__(self, extents, files):
        self.arrays = self.failure = None

    def wait(self):
        pass

    def stop(self):
        pass


class RecordingKernel(KernelAdvice):
    """Advice as it is given, and a record of the ranges that are announced."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.announced = []

    def start_reading(self, ranges, *most_bytes):
        self.announced += ranges.tolist()
        super().start_reading(ranges, *most_bytes)


def watch_reads(monkeypatch, fails_at=None):
    """Lists how many bytes each read of a path's open file returns; one read fails, as of a broken disk."""
    reads = []

    def check():
        if len(reads) == fails_at:
            raise OSError(errno.EIO, "Input/output error")

    class File(io.BufferedReader):
        def read(self, *count):
            check()
            data = super().read(*count)
            reads.append(len(data))
            return data

        def readinto(self, out):
            check()
            reads.append(super().readinto(out))
            return reads[-1]

    def open_path(path, mode):
        assert mode == "rb"
        return File(io.FileIO(path))

    monkeypatch.setattr(Path, "open", open_path)
    return reads


def fill_with(start_fill, source, **arguments):
    """Files opened with residency "ram", and read as start_fill does."""
    return join(open_tokens(source, **arguments).extents, "ram", start_fill=start_fill)


# Files


def write_safetensors(path, tokens):
    save_file({"tokens": tokens}, path)
    return path


def write_safetensors_at_odd_offset(path, tokens):
    offsets = [0, tokens.nbytes]
    name = {"u": "U", "i": "I"}[tokens.dtype.kind] + str(8 * tokens.itemsize)
    header = {"tokens": {"dtype": name, "shape": [len(tokens)], "data_offsets": offsets}}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    assert (8 + len(text)) % 2 == 1
    path.write_bytes(struct.pack("<Q", len(text)) + text + tokens.tobytes())
    return path


def write_npy(path, tokens):
    with path.open("wb") as file:
        np.save(file, tokens)
    return path


def write_raw(path, tokens):
    tokens.tofile(path)
    return path


def write_llm_c(path, tokens):
    magic, version = {2: (20240520, 1), 4: (20240801, 7)}[tokens.itemsize]
    path.write_bytes(struct.pack("<256i", magic, version, len(tokens), *[0] * 253) + tokens.tobytes())
    return path


def write_megatron(path, tokens):
    """One sequence, which is one document."""
    code = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}[tokens.dtype.name]
    counts = struct.pack("<QBQQ", 1, code, 1, 2)
    sequences = struct.pack("<iqqq", len(tokens), 0, 0, 1)
    path.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0" + counts + sequences)
    return write_raw(path.with_suffix(".bin"), tokens)


def write_datatrove(path, tokens):
    """Documents of 100 tokens, the last as long as it comes."""
    ends = np.append(np.arange(100, len(tokens), 100), len(tokens))
    write_raw(path.with_name(path.name + ".index"), ends.astype("<u8"))
    return write_raw(path, tokens)


def written_extent(path, tokens, offset_bytes=0, after=b""):
    """A file with tokens from an offset on and other bytes around them, and where they lie in it."""
    path.write_bytes(b"\xaa" * offset_bytes + tokens.tobytes() + after)
    return Extent(path, offset_bytes, tokens.dtype, len(tokens), "headerless")


# Ways: (source, arguments of open_tokens)


def aligned(folder, tokens):
    return write_safetensors(folder / "t.safetensors", tokens), {}


def at_odd_offset(folder, tokens):
    return write_safetensors_at_odd_offset(folder / "t.safetensors", tokens), {}


def npy(folder, tokens):
    return write_npy(folder / "t.npy", tokens), {}


def raw(folder, tokens):
    return write_raw(folder / "t.bin", tokens), {"dtype": tokens.dtype.name}


def llm_c(folder, tokens):
    return write_llm_c(folder / "t.bin", tokens), {}


def megatron(folder, tokens):
    return write_megatron(folder / "t.bin", tokens), {}


def datatrove(folder, tokens):
    return write_datatrove(folder / "t.ds", tokens), {}


def in_a_directory(folder, tokens):
    for i, part in enumerate(np.split(tokens, CUTS), start=8):  # 8 to 13: 8 and 9 are first
        write_safetensors(folder / f"shard_{i}.safetensors", part)
    return folder, {}


def by_a_pattern(folder, tokens):
    for i, part in enumerate(np.split(tokens, CUTS), start=8):
        write_raw(folder / f"shard_{i}", part)
    return folder / "shard_*", {"dtype": tokens.dtype}


def mixed(folder, tokens):
    """A path, an array, an open TokenArray of two files, a directory."""
    parts = np.split(tokens, CUTS)
    (folder / "rest").mkdir()
    for i, part in enumerate(parts[4:]):
        write_npy(folder / f"rest/{i}.npy", part)
    opened = open_tokens([write_npy(folder / str(i), parts[i]) for i in (2, 3)])
    return [write_safetensors(folder / "0", parts[0]), parts[1], opened, folder / "rest"], {}


def sharded(folder, tokens):
    writers = write_safetensors, write_npy, write_safetensors_at_odd_offset
    parts = enumerate(np.split(tokens, CUTS))
    return [writers[i % 3](folder / f"{i}", part) for i, part in parts], {}


def sharded_raw(folder, tokens):
    parts = enumerate(np.split(tokens, CUTS))
    return [write_raw(folder / f"{i}", part) for i, part in parts], {"dtype": tokens.dtype}


def array(folder, tokens):
    return tokens.copy(), {}


def array_with_gaps(folder, tokens):
    return np.repeat(tokens, 3)[1::3], {}


def array_backwards(folder, tokens):
    return tokens[::-1].copy()[::-1], {}


def array_mapped(folder, tokens):
    return np.memmap(write_raw(folder / "t.bin", tokens), tokens.dtype, "r"), {}


def array_loaded_mapped(folder, tokens):
    return np.load(write_npy(folder / "t.npy", tokens), mmap_mode="r"), {}


def array_mapped_and_changed(folder, tokens):
    """Half of a mapping whose changes are its own: the file holds other tokens."""
    path = write_raw(folder / "t.bin", np.concatenate([tokens, tokens[::-1]]))
    mapped = np.memmap(path, tokens.dtype, "c", shape=(2, len(tokens)))[1]
    mapped[:] = tokens
    return mapped, {}


def array_of_a_mapping(folder, tokens):
    """Of Python's mmap, at an odd offset, with memoryviews and views between."""
    path = written_extent(folder / "t.bin", tokens, offset_bytes=3).path
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memoryview(mapped)[3:], np.uint8)[:].view(tokens.dtype), {}


def array_read_only(folder, tokens):
    return np.frombuffer(tokens.tobytes(), tokens.dtype), {}


FILES = aligned, at_odd_offset, npy, raw, sharded, sharded_raw, in_a_directory, by_a_pattern
ARRAYS = array, array_with_gaps, array_backwards, array_read_only
MAPPED_ARRAYS = array_mapped, array_loaded_mapped, array_mapped_and_changed, array_of_a_mapping
