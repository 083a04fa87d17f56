"""Samples: the tokens that a check looks at before all of them, and where the files among them lie."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.tokens.token_array import TokenArray

NUM_SAMPLES, _SAMPLE_TOKENS = 64, 1 << 14


def take_sample(tokens: TokenArray, num_samples: int = NUM_SAMPLES) -> NDArray[Any]:
    """Copies evenly spread samples end to end, or all of few tokens.

    Each begins at a position that 8 divides: if a token was read as two, four or eight, with its first.
    """
    if len(tokens) <= num_samples * _SAMPLE_TOKENS:
        return np.asarray(tokens[:])
    starts = np.linspace(0, len(tokens) - _SAMPLE_TOKENS, num_samples).astype(np.int64) // 8 * 8
    tokens.prefetch(starts, _SAMPLE_TOKENS)
    return tokens.gather(starts, _SAMPLE_TOKENS).reshape(-1)


def file_bounds(tokens: TokenArray) -> NDArray[np.int64]:
    """Returns where files begin and end, int64 [num_files + 1] in tokens; an axis with arrays is one."""
    ends = np.cumsum([extent.num_tokens for extent in tokens.extents], dtype=np.int64)
    if not len(ends) or ends[-1] != len(tokens):
        return np.array([0, len(tokens)])
    return np.append(0, ends)
