"""A corpus that every machine already has: the Python standard library's own source, one byte a token.

Each file is a document: its bytes (ids 0 to 255), then the end-of-text id 256. About one document in
twenty is set aside for validation, chosen by a hash of its path, so the split does not depend on the
order of the files or on luck, and no document is on both sides of it.

A bigram model is what a validation loss is compared with: it knows how often each byte follows each
other byte in the training documents, and nothing else. A model that has learnt anything about Python
has a loss well below the bigrams'.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

import tokenloader as tl

END_OF_TEXT = 256
VOCAB_SIZE = 257  # 256 bytes and the end of text

# Packages that are not the standard library's own, and its tests, which are long and repetitive.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

VALIDATION_ONE_IN = 20


def stdlib_sources(root: Path) -> list[Path]:
    """Paths of the standard library's modules, relative to `root`, in a fixed order.

    Raises: FileNotFoundError if this Python keeps no source files (some embedded builds do not).
    """
    paths = sorted(
        (path.relative_to(root) for path in root.rglob("*.py") if path.is_file()),
        key=lambda path: path.as_posix(),
    )
    paths = [path for path in paths if SKIPPED_FOLDERS.isdisjoint(path.parts)]
    if not paths:
        raise FileNotFoundError(f"{root}: no .py files; the demo needs a Python with its sources")
    return paths


def is_validation(relative_path: Path) -> bool:
    """Whether a document is set aside: its path alone decides, so every run agrees."""
    digest = hashlib.blake2b(relative_path.as_posix().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VALIDATION_ONE_IN == 0


def write_stdlib_tokens(folder: Path) -> tuple[Path, Path]:
    """Write `stdlib-train.safetensors` and `stdlib-validation.safetensors`; return their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
    for path in stdlib_sources(root):
        text = np.frombuffer((root / path).read_bytes(), dtype=np.uint8)
        document = np.append(text.astype(np.uint16), np.uint16(END_OF_TEXT))
        documents["validation" if is_validation(path) else "train"].append(document)

    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, parts in documents.items():
        written[split] = folder / f"stdlib-{split}.safetensors"
        tl.write_tokens(written[split], parts)
    return written["train"], written["validation"]


def decode(tokens: list[int]) -> str:
    """Decode token ids to text; bytes that no terminal should be sent become the replacement character."""
    text = bytes(token for token in tokens if token < END_OF_TEXT).decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def bigram_loss(train: np.ndarray, validation: np.ndarray, smoothing: float = 0.1) -> float:
    """The mean negative log-likelihood, in nats, of validation[1:] under a bigram model of `train`.

    Args:
        train, validation: token ids, 1-D, of any integer type.
        smoothing: added to every pair's count, so that a pair never seen is not impossible.
            With millions of tokens and 66,049 pairs the score hardly depends on it.
    """
    pairs = train[:-1].astype(np.int64) * VOCAB_SIZE + train[1:]
    counts = np.bincount(pairs, minlength=VOCAB_SIZE**2).reshape(VOCAB_SIZE, VOCAB_SIZE) + smoothing
    log_probability = np.log(counts / counts.sum(axis=1, keepdims=True))
    return -float(log_probability[validation[:-1], validation[1:]].mean())
