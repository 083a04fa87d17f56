"""Quoting: how text from files, such as the names of tensors, is shown in messages and on screens."""

_MOST = 300  # characters; a file name has up to 255


def shown(text: object) -> str:
    r"""Returns text in one line of at most 300 characters that does nothing to a terminal.

    What is not printable (control characters, line ends, marks that turn the writing direction, halves of
    surrogate pairs) is escaped as in a Python string. Of a longer text the middle is left out.

    Example:
        >>> print(shown("shard\x1b[2J\u202e.npy"))
        shard\x1b[2J\u202e.npy
    """
    escaped = (c if c.isprintable() else ascii(c)[1:-1] for c in _cut(str(text)))
    return _cut("".join(escaped))


def _cut(text: str) -> str:
    half = (_MOST - 3) // 2
    return text if len(text) <= _MOST else f"{text[:half]}...{text[-half:]}"
