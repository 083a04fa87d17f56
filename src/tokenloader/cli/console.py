"""The console: the output of a command, its error in one line, and its exit status."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import click

WRONG = 1  # exit status of a check that finds something wrong
_USAGE, _INTERRUPTED, _BROKEN_PIPE = 2, 130, 141


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


class _PipeClosedError(Exception):
    """The reader of the output has left. BrokenPipeError itself click would end with status 1."""


def _fail(message: str, remedy: str = "") -> NoReturn:
    click.echo(f"tokenloader: {' '.join(message.split())}{remedy}", err=True)
    sys.exit(_USAGE)
