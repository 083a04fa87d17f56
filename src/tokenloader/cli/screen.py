"""The screen: lines of a label and a text, 80 columns wide, that all commands print."""

from __future__ import annotations

import textwrap

_WIDTH = 79
_LABEL = 16


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
