"""Tokenizing: text files to one token file, with an end-of-text id after each document.

The Rust library `tokenizers` encodes many documents at once on all cores, while a thread reads the
next ones. The order of the tokens is that of the files and of the documents in them, whatever the
number of cores.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats import safetensors
from tokenloader.formats.quoting import listed, shown
from tokenloader.prepare.text import import_extra, read_texts
from tokenloader.storage.progress import progress_bar
from tokenloader.tokens.writing import write_file

# End-of-text tokens: of GPT-2, NeoX and Qwen; of Llama 3; of Llama 2, Mistral and T5; of Gemma.
KNOWN_EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
BATCH_CHARACTERS = 2 << 20  # encoded at once: memory is some hundred bytes a character
CHUNK_CHARACTERS = 1 << 20  # a longer document is encoded in chunks
_WAIT_SECONDS = 0.5  # between looks for signals
# A seam lies between two lines, neither the end of the first nor the beginning of the second blank:
# byte-level tokenizers never join tokens across it.
_SEAM = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass(frozen=True)
class Tokenized:
    """What `tokenize` has written."""

    num_documents: int
    num_tokens: int  # end-of-text ids among them
    text_bytes: int  # size of all documents in UTF-8
    dtype: str  # name of the numpy dtype of one token
    eos_id: int  # the end-of-text id after each document


class Tokenizer:
    """Encodes documents by a tokenizer.json, without padding, truncation or added tokens.

    A special token that is spelled out in a document is encoded as text: else it would end the document.
    The token that ends documents is `eos_token`, or else the first of KNOWN_EOS_TOKENS in the vocabulary.

    Raises ImportError where the library tokenizers is missing, OSError where the file is, and ValueError
    where it is no tokenizer.json, or its vocabulary has no such token.
    """

    def __init__(
        self, path: Path, eos_token: str | None = None, *, chunk_characters: int = CHUNK_CHARACTERS
    ) -> None:
        if eos_token == "":
            raise ValueError("--eos-token is empty; expected a token of the vocabulary, as <|endoftext|>")
        self._path, self._chunk_characters = path, chunk_characters
        self._tokenizer = library = _load(path)
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True
        candidates = KNOWN_EOS_TOKENS if eos_token is None else (eos_token,)
        found = next((token for token in candidates if library.token_to_id(token) is not None), None)
        if found is None:
            special = [token.content for token in library.get_added_tokens_decoder().values()]
            raise ValueError(
                f"{path}: no token {' or '.join(candidates)} to end documents with; pass --eos-token with "
                f"one of its special tokens: {listed(special)}"
            )
        self.eos_token: str = found
        self.eos_id = int(library.token_to_id(found))
        highest_id = max(library.get_vocab(with_added_tokens=True).values())
        self.dtype = np.dtype("uint16" if highest_id < 2**16 else "uint32")  # of one token

    def encode(self, documents: Sequence[str]) -> NDArray[Any]:
        """Encodes documents on all cores, to [n] ids of them all, an end-of-text id after each."""
        chunks = [split_document(document, self._chunk_characters) for document in documents]
        with _errors_naming(self._path, "cannot encode these documents"):
            found = self._tokenizer.encode_batch_fast(list(chain(*chunks)), add_special_tokens=False)
        encoded = iter(found)
        ids: list[NDArray[Any]] = []
        for chunks_of_one in chunks:
            ids += [np.array(next(encoded).ids, self.dtype) for _ in chunks_of_one]
            ids.append(np.array([self.eos_id], self.dtype))
        return np.concatenate(ids)


def decoder(path: Path) -> Callable[[NDArray[Any]], str]:
    """Returns a function from ids to their text, special tokens included. Raises as `Tokenizer` does."""
    tokenizer = _load(path)

    def decode(ids: NDArray[Any]) -> str:
        with _errors_naming(path, "cannot decode these tokens"):
            return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    return decode


def _load(path: Path) -> Any:
    library = import_extra("tokenizers", "tokenizing")
    what = "not a tokenizer.json of the tokenizers library"
    with _errors_naming(path, what), _without_standard_error():
        return library.Tokenizer.from_str(path.read_bytes().decode("utf-8-sig"))


@contextmanager
def _errors_naming(path: Path, what: str) -> Iterator[None]:
    """Turns what the library raises, of no class of its own, into a ValueError that names its file."""
    try:
        yield
    except (OSError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise ValueError(f"{path}: {what} ({shown(error)})") from error


@contextmanager
def _without_standard_error() -> Iterator[None]:
    """Drops what is written to descriptor 2: a panic in Rust prints lines there before it is raised."""
    standard_error = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)


def tokenize(
    files: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer,
    *,
    column: str = "text",
    replace_invalid: bool = False,
    force: bool = False,
    progress: bool = False,
    batch_characters: int = BATCH_CHARACTERS,  # encoded at once, about
) -> Tokenized:
    """Writes the tokens of all documents of text files, in order, to a safetensors file.

    Files, `column` and `replace_invalid` are as `read_texts` takes them; raises as `read_texts` and
    `write_tokens` do, and FileExistsError where the file exists and force is False.
    """
    num_documents = text_bytes = 0

    def encoded() -> Iterator[NDArray[Any]]:
        nonlocal num_documents, text_bytes
        texts = chain.from_iterable(
            read_texts(file, column=column, separator=tokenizer.eos_token, replace_invalid=replace_invalid)
            for file in files
        )
        for batch, ids in _encode_ahead(_batches(texts, batch_characters), tokenizer):
            num_documents += len(batch)
            text_bytes += sum(len(document.encode()) for document in batch)
            bar.done_bytes = text_bytes
            yield ids

    with progress_bar("tokenizing", None, shown=progress) as bar:
        num_tokens = write_file(out, encoded(), tokenizer.dtype, safetensors.WRITER, replace=force)
    return Tokenized(num_documents, num_tokens, text_bytes, tokenizer.dtype.name, tokenizer.eos_id)


def _batches(documents: Iterable[str], batch_characters: int) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= batch_characters:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_ahead(
    batches: Iterator[list[str]], tokenizer: Tokenizer
) -> Iterator[tuple[list[str], NDArray[Any]]]:
    """Yields batches and their ids, while a thread reads the next batch.

    Another thread encodes: the library takes seconds over a batch, in which this one handles signals. It
    waits a while at a time: the system may hand a signal to another thread, which does not wake this one.
    """

    def result(future: Future[Any]) -> Any:
        while not wait([future], _WAIT_SECONDS).done:
            pass
        return future.result()

    pool = ThreadPoolExecutor(2, "tokenloader-text")
    try:
        following = pool.submit(next, batches, None)
        while (batch := result(following)) is not None:
            following = pool.submit(next, batches, None)
            yield batch, result(pool.submit(tokenizer.encode, batch))
    finally:
        pool.shutdown(wait=False)  # a thread may wait for a pipe that it reads


def split_document(document: str, chunk_characters: int) -> list[str]:
    """Splits a document, where it has seams, into chunks of chunk_characters or little more."""
    chunks, start = [], 0
    while len(document) - start > chunk_characters:
        seam = _SEAM.search(document, start + chunk_characters)
        if seam is None:
            break
        chunks.append(document[start : seam.start()])
        start = seam.start()
    return [*chunks, document[start:]]
