"""Windows: a random-access source of the windows of a TokenArray, in file order."""

import operator
from typing import Any, NoReturn, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from tokenloader.plans.plan import checked_window
from tokenloader.tokens.token_array import TokenArray


class Windows:
    """A random-access source of windows, for Grain and other loaders of records.

    Window i begins with token i * seq_len: each starts on the last token of the one before it, so no
    target comes twice. Fewer than seq_len tokens at the end, too few for a window, are left out. Several
    threads may read windows at once.

    Grain's threads (`grain.ReadOptions`) read windows well. Its worker processes would have to pickle the
    source, which is refused, as it is for the tokens: there, open the tokens in a source of your own.

    Args:
        tokens: the TokenArray to read. Whoever opened it closes it.
        seq_len: inputs in a window, 1 or more; a window has one token more.

    Raises:
        ValueError: seq_len is below 1, or the tokens are fewer than a window.
        TypeError: an argument is of another type.

    Example:
        >>> windows = Windows(open_tokens(np.arange(10, dtype=np.uint16)), seq_len=4)
        >>> len(windows), windows[1]
        (2, array([4, 5, 6, 7, 8], dtype=uint16))

        With Grain: `grain.MapDataset.source(windows).shuffle(seed=0).repeat().batch(32)`.
    """

    __module__ = "tokenloader"  # where users find it: in repr, help and pickles

    def __init__(self, tokens: TokenArray, seq_len: int) -> None:
        if not isinstance(tokens, TokenArray):
            raise TypeError(
                f"tokens is of type {type(tokens).__name__}; expected a TokenArray: open_tokens(...)"
            )
        num_tokens, self.seq_len = checked_window(len(tokens), seq_len)
        self.tokens = tokens
        self._num_windows = (num_tokens - 1) // self.seq_len

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: SupportsIndex) -> NDArray[np.integer[Any]]:
        """Copies window `index`, [seq_len + 1] in the tokens' dtype; a negative one counts from the end."""
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"window {position} of {self!r}; there are 0 to {len(self) - 1}")
        start = position % len(self) * self.seq_len
        window: NDArray[np.integer[Any]] = self.tokens.gather([start], self.seq_len + 1)[0]
        return window

    def __repr__(self) -> str:
        return f"Windows({self.tokens!r}, seq_len={self.seq_len})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied or pickled, as for worker processes; read it in threads "
            f"(grain.ReadOptions), or open the tokens in each process, in a source of your own"
        )
