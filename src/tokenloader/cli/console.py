"""The console: what a command prints, its error in one line, and its exit status.

Whatever is printed may have text in it that comes from files. Here, and so in every screen and error, what
is not printable is escaped, lest a tensor's name clear the terminal.
"""

import io
import json
import os
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import shell_complete

from tokenloader.formats.quoting import shown

WRONG = 1  # exit status of a check that finds something wrong
_USAGE, _INTERRUPTED, _BROKEN_PIPE, _STOPPED = 2, 130, 141, 128  # the last plus the signal's number
_WIDTH, _LABEL = 79, 16  # columns
_UNWINDING_SECONDS = 2.0  # after which a second Ctrl-C ends what hangs
_MOST = 5000  # characters of a line: the longest path that Linux allows, and more


def run_and_exit(commands: click.Command) -> NoReturn:
    """Runs the command that this process's arguments name, and exits with its status.

    The status is 1 only where the command itself ends with it. `python -X dev` shows tracebacks.
    """
    _open_closed_streams()
    try:
        with _stopping_on_signals():
            sys.exit(_run(commands))
    except _StoppedError as stopped:
        status = int(stopped.args[0])
        if status == _INTERRUPTED:
            _print_error("")  # ends the line in which the terminal shows ^C
        # sys.exit would wait for threads, of which one may read a pipe that nobody writes.
        os._exit(status)
    except SystemExit:
        raise
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except BrokenPipeError:  # the reader of the output has left
        # The rest of the buffer would be written, and fail, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_BROKEN_PIPE)
    except click.exceptions.NoArgsIsHelpError as error:
        _print_error(error.format_message())
        sys.exit(_USAGE)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
        message = error.format_message().rstrip(".")
        _fail(message, f"; see {where} --help" if where else "")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BaseException as error:  # a panic in Rust is no Exception
        if sys.flags.dev_mode:
            traceback.print_exc()
        _fail(_message(error))


def on_terminal() -> bool:
    """Whether a progress bar would be seen."""
    return sys.stderr.isatty()


def print_out(output: str | dict[str, Any]) -> None:
    """Prints a screen, or values as JSON."""
    if isinstance(output, str):
        text = "\n".join(shown(line, _MOST) for line in output.split("\n"))
    else:
        text = json.dumps(output, indent=2)  # which is ASCII
    encoding = sys.stdout.encoding or "utf-8"
    try:
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


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


def _run(commands: click.Command) -> int:
    """Runs the command, or tells a shell how to complete one; click's main would end some errors with 1."""
    name, variable = "tokenloader", "_TOKENLOADER_COMPLETE"
    if instruction := os.environ.get(variable):
        return _USAGE if shell_complete(commands, {}, name, variable, instruction) else 0
    with commands.make_context(name, sys.argv[1:]) as context:
        commands.invoke(context)
    return 0


def _open_closed_streams() -> None:
    """Opens the standard streams that this process was started without, as by 2>&-.

    Else the file that is written would get such a stream's number, and whatever a library prints.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # It gets the lowest number that is free: the stream's own, as those before it are open.
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "r+")))


class _StoppedError(SystemExit):
    """A signal ends the command, with this status."""


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """Has a signal unwind the command, which removes its temporary file; those that are ignored stay so.

    Others that follow at once, as from a shell that is closed, are not heard: they would leave the file.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    caught = [number for number in before if before[number] in (signal.SIG_DFL, signal.default_int_handler)]
    deaf_until = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal deaf_until
        if time.monotonic() >= deaf_until:
            deaf_until = time.monotonic() + _UNWINDING_SECONDS
            raise _StoppedError(_STOPPED + number)

    for number in caught:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


def _message(error: BaseException) -> str:
    """What an error says; that of the system with its file, and one that programs raise with its kind."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    kind, text = type(error).__name__, str(error)
    told = isinstance(error, (OSError, ValueError, TypeError, ImportError, MemoryError, RuntimeError))
    return text if told and text else f"{kind}: {text}".removesuffix(": ")


def _fail(message: str, remedy: str = "") -> NoReturn:
    _print_error(f"tokenloader: {shown(' '.join(message.split()), _MOST)}{remedy}")
    sys.exit(_USAGE)


def _print_error(text: str) -> None:
    with suppress(OSError):  # standard error may be full or closed; the exit status still tells
        click.echo(text, err=True)
