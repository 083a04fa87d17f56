"""Quoting: how text from files, such as the names of tensors, is shown in messages and on screens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_MOST_NAMED = 10
_MOST = 300  # characters; a file name has up to 255


def shown(text: object, most: int = _MOST) -> str:
    r"""Returns text in one line of at most `most` characters that does nothing to a terminal.

    What is not printable is escaped, and of a longer text the middle is left out.

    Example:
        >>> print(shown("shard\x1b[2J\u202e.npy"))
        shard\x1b[2J\u202e.npy
    """
    return _cut(printable(_cut(str(text), most)), most)


def printable(text: str) -> str:
    """Escapes what is not printable, as in a Python string.

    That is control characters, line ends, marks that turn the writing direction, and halves of surrogates.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def listed(names: Sequence[object]) -> str:
    """Lists names for a message: the first ten, and how many more there are."""
    first, more = ", ".join(map(shown, names[:_MOST_NAMED])), len(names) - _MOST_NAMED
    return f"{first} and {more} more" if more > 0 else first or "none"


@contextmanager
def printable_messages() -> Iterator[None]:
    """Escapes what is not printable, such as a name that has control characters, in messages of errors."""
    try:
        yield
    except (ValueError, OSError) as error:
        error.args = tuple(printable(part) if isinstance(part, str) else part for part in error.args)
        raise


def _cut(text: str, most: int) -> str:
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
