"""A token file of the size this was made for, or of any other, without holding it in memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FULL_NUM_TOKENS = (
    10_248_871_837  # train.safetensors of gpjt/fineweb-gpt2-tokens: 20,497,743,770 bytes
)
_HEADER_BYTES = 88  # as that file has it
_CHUNK_TOKENS = 32 << 20


def write(path: Path, num_tokens: int = FULL_NUM_TOKENS) -> None:
    """Writes tokens uint16 [num_tokens] as safetensors: GPT-2 ids without structure.

    One random chunk over and over, each time rotated: no two windows are alike, at the disk's speed.
    """
    entry = {"dtype": "U16", "shape": [num_tokens], "data_offsets": [0, 2 * num_tokens]}
    header = json.dumps({"tokens": entry}, separators=(",", ":")).encode().ljust(_HEADER_BYTES)
    chunk = np.random.default_rng(0).integers(0, 50257, _CHUNK_TOKENS, dtype=np.uint16)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for i, begin in enumerate(range(0, num_tokens, _CHUNK_TOKENS)):
            file.write(np.roll(chunk, 12_345 * i)[: num_tokens - begin])


def size_option(gib: float | None) -> int:
    """Tokens in a file of that many GiB; the full size for None."""
    return FULL_NUM_TOKENS if gib is None else int(gib * 2**30) // 2
