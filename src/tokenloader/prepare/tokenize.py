"""Tokenizing: text files to a token file, an end-of-text id after each document.

The Rust library `tokenizers` encodes many documents at once on all cores, while a thread reads the
next ones. The order of the tokens is that of the files and of the documents in them, whatever the
number of cores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tokenloader.formats import safetensors
from tokenloader.prepare.text import import_extra, read_documents
from tokenloader.tokens.writing import write_file

# What ends documents: in GPT-2, NeoX and Qwen; in Llama 3; in Llama 2, Mistral and T5; in Gemma.
KNOWN_EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_BATCH_CHARACTERS = 2 << 20  # encoded at once: memory is some hundred bytes a character
_PIECE_CHARACTERS = 1 << 20  # a longer document is encoded in pieces
# Between two lines of which neither the first's end nor the second's beginning is blank: byte-level
# tokenizers never join tokens across that.
_SEAM = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass(frozen=True)
class Tokenized:
    """What was written.

    Attributes:
        eos_id: the id after each document.
        text_bytes: of the documents in UTF-8.
    """

    num_documents: int
    num_tokens: int
    text_bytes: int
    dtype: str
    eos_id: int


class Tokenizer:
    """A tokenizer.json, as it is needed here: no padding, no truncation, no tokens added of its own.

    A special token that is spelled out in a document is encoded as the text that it is there: else it would
    end the document.

    Args:
        path: tokenizer.json.
        eos_token: the token that ends documents; None: the first of KNOWN_EOS_TOKENS that it has.

    Raises:
        ImportError: the library tokenizers is missing.
        OSError: the file is missing.
        ValueError: it is no such file, or has no such token.
    """

    def __init__(self, path: Path, eos_token: str | None = None) -> None:
        self._tokenizer = _load(path)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        candidates = KNOWN_EOS_TOKENS if eos_token is None else (eos_token,)
        found = next((c for c in candidates if self._tokenizer.token_to_id(c) is not None), None)
        if found is None:
            special = [t.content for t in self._tokenizer.get_added_tokens_decoder().values()]
            raise ValueError(
                f"{path}: no token {' or '.join(candidates)} to end documents with; its special tokens "
                f"are: {', '.join(special) or 'none'}. Say which: --eos-token"
            )
        self.eos_token: str = found
        self.eos_id = int(self._tokenizer.token_to_id(found))
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.dtype = np.dtype("uint16" if highest < 2**16 else "uint32")

    def encode(self, documents: Sequence[str]) -> NDArray[Any]:
        """The ids of all documents, an end-of-text id after each; on all cores."""
        pieces = [(piece, last) for document in documents for piece, last in _pieces(document)]
        encoded = self._tokenizer.encode_batch_fast(
            [piece for piece, _ in pieces], add_special_tokens=False
        )
        ids: list[NDArray[Any]] = []
        for one, (_, last) in zip(encoded, pieces, strict=True):
            ids.append(np.array(one.ids, self.dtype))
            if last:
                ids.append(np.array([self.eos_id], self.dtype))
        return np.concatenate(ids)


def decoder(path: Path) -> Callable[[NDArray[Any]], str]:
    """A function from ids to their text, special tokens included, by a tokenizer.json.

    Raises: as `Tokenizer`.
    """
    tokenizer = _load(path)
    return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _load(path: Path) -> Any:
    library = import_extra("tokenizers", "tokenizing")
    text = path.read_text(encoding="utf-8")
    try:
        return library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no other kind
        raise ValueError(f"{path}: no tokenizer.json of the tokenizers library ({error})") from None


def tokenize(
    files: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer,
    *,
    column: str = "text",
    progress: bool = False,
) -> Tokenized:
    """Writes the tokens of all documents of the files, in order, to a safetensors file.

    Raises:
        OSError, ValueError, ImportError: as `read_documents` and `write_tokens`.
    """
    counts = _Counts()
    with tqdm(
        desc="tokenizing",
        unit=" tokens",
        unit_scale=True,
        disable=not progress,
        leave=False,
    ) as bar:

        def arrays() -> Iterator[NDArray[Any]]:
            documents = (
                document
                for file in files
                for document in read_documents(file, column=column, separator=tokenizer.eos_token)
            )
            for batch in _ahead(_batches(documents)):
                counts.documents += len(batch)
                counts.text_bytes += sum(len(document.encode()) for document in batch)
                ids = tokenizer.encode(batch)
                bar.update(len(ids))
                yield ids

        num_tokens = write_file(out, arrays(), tokenizer.dtype, safetensors.WRITER)
    return Tokenized(
        num_documents=counts.documents,
        num_tokens=num_tokens,
        text_bytes=counts.text_bytes,
        dtype=tokenizer.dtype.name,
        eos_id=tokenizer.eos_id,
    )


@dataclass
class _Counts:
    documents: int = 0
    text_bytes: int = 0


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _ahead(batches: Iterator[list[str]]) -> Iterator[list[str]]:
    """The same, the next one read by a thread meanwhile."""
    with ThreadPoolExecutor(1, "tokenloader-text") as pool:
        following = pool.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = pool.submit(next, batches, None)
            yield batch


def _pieces(document: str) -> Iterator[tuple[str, bool]]:
    """A document in pieces of bounded length where it has seams, and whether each is the last."""
    start = 0
    while len(document) - start > _PIECE_CHARACTERS:
        seam = _SEAM.search(document, start + _PIECE_CHARACTERS)
        if seam is None:
            break
        yield document[start : seam.start()], False
        start = seam.start()
    yield document[start:], True
