"""Options: the arguments and options that several commands have, and what is opened by them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tokenloader.formats.extent import TOKEN_DTYPES
from tokenloader.tokens.opening import open_tokens
from tokenloader.tokens.token_array import TokenArray

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = click.Choice([dtype.name for dtype in TOKEN_DTYPES])
POSITIVE = click.IntRange(min=1)
_ARGUMENT = re.compile(r"""\b(key|dtype)=["']?(\w*)["']?(?![\w/=])""")  # and no directory key=1/

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
eos_id = click.option(
    "--eos-id", type=click.IntRange(min=0), help="The end-of-text id after each document."
)
key = click.option(
    "--key", default="tokens", show_default=True, help="Name of the tensor in safetensors files."
)


def reads_tokens(command: Command) -> Command:
    """Adds the argument and the options of commands that open token files."""
    dtype = click.option("--dtype", type=DTYPES, help="Dtype of one token, for headerless files only.")
    return click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)(key(dtype(command)))


def takes_batches(command: Command) -> Command:
    """Adds the options of commands that make or count batches."""
    seq_len = click.option(
        "--seq-len", type=POSITIVE, default=1024, show_default=True, help="Tokens in a row."
    )
    batch_size = click.option(
        "--batch-size", type=POSITIVE, default=32, show_default=True, help="Rows in a batch."
    )
    return batch_size(seq_len(command))


def open_sources(
    sources: tuple[str, ...], key: str, dtype: str | None, dtype_option: str = "--dtype"
) -> TokenArray:
    """Opens the SOURCEs of a command.

    Raises:
        OSError: as `open_tokens`.
        ValueError: as `open_tokens`, but the message names the command's options, not Python arguments.
    """
    try:
        return open_tokens(list(sources) if len(sources) > 1 else sources[0], key=key, dtype=dtype)
    except ValueError as error:
        options = {"key": "--key", "dtype": dtype_option}
        message = _ARGUMENT.sub(lambda found: f"{options[found[1]]} {found[2]}".rstrip(), str(error))
        raise ValueError(message) from error
