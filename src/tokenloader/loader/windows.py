"""Windows: the windows of a TokenArray in file order, each a record that is read by its number."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tokenloader.plans.plan import checked_window
from tokenloader.tokens.token_array import TokenArray


class Windows:
    """Tokens as a random-access source of windows, for Grain and other loaders of records.

    Window i begins with token i * seq_len: each starts on the last token of the one before it, so no
    target comes twice. Fewer than seq_len tokens at the end, too few for a window, are left out. May be
    read from several threads at once.

    Grain's threads (`grain.ReadOptions`) read it well; its worker processes would have to pickle it,
    which is refused, as for the tokens: open them in a source of your own there.

    Args:
        tokens: from `open_tokens`. They stay open for as long as you keep them so.
        seq_len: inputs in a window, 1 or more; the window has one token more.

    Raises:
        ValueError: seq_len is below 1, or the tokens are fewer than a window.
        TypeError: an argument is of another type.

    Example:
        >>> windows = Windows(open_tokens(np.arange(10, dtype=np.uint16)), seq_len=4)
        >>> len(windows), windows[1]
        (2, array([4, 5, 6, 7, 8], dtype=uint16))

        With Grain: `grain.MapDataset.source(windows).shuffle(seed=0).repeat().batch(32)`.
    """

    __module__ = "tokenloader"

    def __init__(self, tokens: TokenArray, seq_len: int) -> None:
        if not isinstance(tokens, TokenArray):
            raise TypeError(
                f"tokens is of type {type(tokens).__name__}; needed is a TokenArray: open_tokens(...)"
            )
        num_tokens, self.seq_len = checked_window(len(tokens), seq_len)
        self.tokens = tokens
        self._num_windows = (num_tokens - 1) // self.seq_len

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Window `index`, a numpy copy [seq_len + 1] in the tokens' dtype; negative: from the end."""
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"window {position} of {self!r}; there are 0 to {len(self) - 1}")
        start = position % len(self) * self.seq_len
        window: NDArray[Any] = self.tokens.gather(np.array([start]), self.seq_len + 1)[0]
        return window

    def __repr__(self) -> str:
        return f"Windows({self.tokens!r}, seq_len={self.seq_len})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied or pickled, as for worker processes; read it in threads "
            f"(grain.ReadOptions), or open the tokens in each process, in a source of your own"
        )
