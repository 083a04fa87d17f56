"""Options: the arguments and options that several commands have, and what is opened by them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from tokenloader.formats.extent import TOKEN_DTYPES
from tokenloader.tokens.opening import open_tokens
from tokenloader.tokens.token_array import TokenArray

Command = Callable[..., None]

DTYPES = click.Choice([dtype.name for dtype in TOKEN_DTYPES])
POSITIVE = click.IntRange(min=1)
PATH = click.Path(path_type=Path)
_ARGUMENT = re.compile(r"""\b(key|dtype)=["']?(\w*)["']?(?![\w/=])""")  # and no directory key=1/
_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_CALL = re.compile(rf"open_tokens\(((?=['\"\[])(?:{_STRING}|[^'\"()])*)\)")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
key = click.option("--key", default="tokens", help="Name of the tensor in safetensors files.")


@dataclass(frozen=True)
class Sources:
    """The SOURCEs of a command, and the values of the options that say how to open them."""

    names: tuple[str, ...]
    key: str
    dtype: str | None
    dtype_option: str = "--dtype"

    def open(self) -> TokenArray:
        """Opens the SOURCEs as `open_tokens` does, but errors name the command's options, not arguments."""
        source = list(self.names) if len(self.names) > 1 else self.names[0]
        try:
            return open_tokens(source, key=self.key, dtype=self.dtype)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            options = {"key": "--key", "dtype": self.dtype_option}
            message = _CALL.sub(_as_words, str(error))
            message = _ARGUMENT.sub(lambda found: f"{options[found[1]]} {found[2]}".rstrip(), message)
            raise ValueError(message) from error


def _as_words(call: re.Match[str]) -> str:
    """Writes what a call of open_tokens is given as the words of a command; dtype= stays."""
    return re.sub(rf"({_STRING})|[\[\],]", r"\1", call[1])


def reads_tokens(command: Command) -> Command:
    """Adds the argument and the options of commands that open token files, which they take as `sources`."""

    @click.argument("names", metavar="SOURCE...", nargs=-1, required=True)
    @key
    @click.option("--dtype", type=DTYPES, help="Dtype of one token, for headerless files only.")
    @wraps(command)
    def with_sources(names: tuple[str, ...], key: str, dtype: str | None, **others: Any) -> None:
        command(sources=Sources(names, key, dtype), **others)

    return with_sources


def takes_delimiter(command: Command) -> Command:
    """Adds the options that say which id stands after each document, or before it; at most one is given."""

    @click.option("--eos-id", type=click.IntRange(min=0), help="The end-of-text id after each document.")
    @click.option("--bos-id", type=click.IntRange(min=0), help="The id before each document, instead.")
    @wraps(command)
    def with_delimiter(eos_id: int | None, bos_id: int | None, **others: Any) -> None:
        if eos_id is not None and bos_id is not None:
            raise click.UsageError(
                f"--eos-id {eos_id} and --bos-id {bos_id} were given; expected one of the two, for the id "
                f"after each document or the id before it"
            )
        command(eos_id=eos_id, bos_id=bos_id, **others)

    return with_delimiter


def takes_batches(command: Command) -> Command:
    """Adds the options of commands that make or count batches."""
    seq_len = click.option("--seq-len", type=POSITIVE, default=1024, help="Tokens in a row.")
    batch_size = click.option("--batch-size", type=POSITIVE, default=32, help="Rows in a batch.")
    return batch_size(seq_len(command))
