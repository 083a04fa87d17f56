"""Writes a token file of any size without holding it in memory."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.measure import say

# train.safetensors of gpjt/fineweb-gpt2-tokens: 20,497,743,770 bytes, with a header of 88.
FULL_NUM_TOKENS = 10_248_871_837
_HEADER_BYTES = 88
_CHUNK_TOKENS = 32 << 20


def add_arguments(parser: argparse.ArgumentParser, gib: float | None = None) -> None:
    """--gib and --file: which token file a program measures on."""
    size = "the full 19.09" if gib is None else f"{gib:g}"
    parser.add_argument("--gib", type=float, default=gib, help=f"size of the file (default: {size})")
    parser.add_argument("--file", type=Path, help="use this token file and do not write one")


@contextmanager
def made(options: argparse.Namespace) -> Iterator[Path]:
    """Yields the file of --file, or one of the size of --gib, which is deleted afterwards."""
    if options.file is not None:
        yield options.file
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "train.safetensors"
        say(f"writing a token file of {size_of(options) / 2**30:.2f} GiB")
        write(path, size_of(options) // 2)
        yield path


def size_of(options: argparse.Namespace) -> int:
    """Bytes of the tokens; with --file, bytes of the file."""
    if options.file is not None:
        return int(options.file.stat().st_size)
    return 2 * FULL_NUM_TOKENS if options.gib is None else int(options.gib * 2**30) // 2 * 2


def write(path: Path, num_tokens: int = FULL_NUM_TOKENS) -> None:
    """Writes random GPT-2 ids, uint16 [num_tokens], as safetensors.

    One random chunk is written over and over, rotated each time: no two windows are alike, and the
    writing is as fast as the disk.
    """
    chunk = np.random.default_rng(0).integers(0, 50257, _CHUNK_TOKENS, dtype=np.uint16)
    with path.open("wb") as file:
        file.write(header(num_tokens))
        for i, begin in enumerate(range(0, num_tokens, _CHUNK_TOKENS)):
            file.write(np.roll(chunk, 12_345 * i)[: num_tokens - begin])


def header(num_tokens: int) -> bytes:
    """The bytes of the file before its tokens."""
    entry = {"dtype": "U16", "shape": [num_tokens], "data_offsets": [0, 2 * num_tokens]}
    text = json.dumps({"tokens": entry}, separators=(",", ":")).encode().ljust(_HEADER_BYTES)
    return len(text).to_bytes(8, "little") + text
