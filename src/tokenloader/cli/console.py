"""The console: what a command prints, its error in one line, and its exit status."""

import json
import os
import sys
import textwrap
from typing import Any, NoReturn

import click

WRONG = 1  # exit status of a check that finds something wrong
_USAGE, _INTERRUPTED, _BROKEN_PIPE = 2, 130, 141
_WIDTH, _LABEL = 79, 16  # columns


def run_and_exit(commands: click.Command) -> NoReturn:
    """Runs the command that this process's arguments name, and exits with its status."""
    try:
        sys.exit(commands.main(prog_name="tokenloader", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(_USAGE)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
        message = error.format_message().rstrip(".")
        _fail(message, f"; see {where} --help" if where else "")
    except (KeyboardInterrupt, click.Abort):
        sys.exit(_INTERRUPTED)
    except _PipeClosedError:
        # The rest of the buffer would be written, and fail, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_BROKEN_PIPE)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, TypeError, ImportError, MemoryError) as error:
        _fail(str(error))


def on_terminal() -> bool:
    """Whether a progress bar would be seen."""
    return sys.stderr.isatty()


def print_out(output: str | dict[str, Any]) -> None:
    """Prints a screen, or values as JSON."""
    try:
        click.echo(output if isinstance(output, str) else json.dumps(output, indent=2))
    except BrokenPipeError:
        raise _PipeClosedError from None


def row(label: str, text: str) -> list[str]:
    """Lines of a label and its text, wrapped beside it; a path that is too long stays whole."""
    wrapped = textwrap.wrap(text, _WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False)
    return [f"{label if i == 0 else '':<{_LABEL}}{line}".rstrip() for i, line in enumerate(wrapped)]


def sentence(kind: str, text: str) -> list[str]:
    """Lines of a sentence after a word that says what kind it is."""
    return textwrap.wrap(
        f"{kind}: {text}", _WIDTH, subsequent_indent=" " * (len(kind) + 2), break_on_hyphens=False
    )


def size(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of 1 or more.

    Example:
        >>> size(20_497_743_674)
        '19.09 GiB'
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.2f} {unit}"
    return f"{num_bytes / 1024:.2f} TiB"


class _PipeClosedError(Exception):
    """The reader of the output has left. BrokenPipeError itself click would end with status 1."""


def _fail(message: str, remedy: str = "") -> NoReturn:
    click.echo(f"tokenloader: {' '.join(message.split())}{remedy}", err=True)
    sys.exit(_USAGE)
