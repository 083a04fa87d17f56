"""Replay: what a step of a run trained on, from its saved state and the tokens alone.

The state names the plan, and its batch sizes say which samples the step is made of: no loader is
needed, no device and no jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.plans.cursor import Cursor
from tokenloader.plans.names import bind_named
from tokenloader.plans.state import data_difference, differences, from_dict
from tokenloader.tokens.token_array import TokenArray

# Replayed at once, so that a damaged state allocates no more than a gigabyte; the largest batches in use
# are a tenth. The arithmetic of a window takes what some thousand tokens do.
_MAX_TOKENS = 1 << 28
_LEAST_ROW_TOKENS = 1 << 10


@dataclass(frozen=True)
class Replayed:
    """What a step trained on, or will."""

    samples: NDArray[np.int64]  # [B], the global sample numbers of its rows
    starts: NDArray[np.int64]  # [B], where their windows begin
    tokens: NDArray[Any]  # [B, T + 1], the windows
    # [k, 2] for each row: where each document's part in the window begins and ends, on the token axis. The
    # first may have begun before the window, the last may go on after it. None without eos_id and bos_id.
    documents: list[NDArray[np.int64]] | None


def replay(
    state: Mapping[str, Any],
    tokens: TokenArray,
    step: int,
    *,
    eos_id: int | None = None,
    bos_id: int | None = None,
) -> Replayed:
    """Returns the samples, windows, tokens and documents of any step, past or to come, in O(1).

    Args:
        state: what `get_state` of the run returned. Later steps are taken to have its batch_size.
        eos_id: the token id after every document, and part of it; or
        bos_id: the token id before every document, and part of it.

    Raises:
        ValueError: state is not what get_state returns, its plan is none of tokenloader's own, the tokens
            are not those it was saved with, or the step is negative, past the plan's end, or has more
            than 2**28 tokens.
        TypeError: state is no mapping, or step no integer.

    Example:
        >>> tokens = tl.open_tokens(np.arange(100, dtype=np.uint16))
        >>> state = tl.TokenLoader(tokens, 2, 9, plan=tl.SequentialWindows()).get_state()
        >>> replay(state, tokens, step=1).starts
        array([18, 27])
    """
    saved, data = from_dict(state), tokens.fingerprint()
    if saved.data != data:
        difference = data_difference(saved.data, data)
        raise ValueError(f"{tokens!r} is not what this state was saved with: {difference}")
    plan = bind_named(saved.plan, saved.sample, len(tokens), saved.seq_len)
    if found := differences(saved, plan, seq_len=saved.seq_len, data=data):
        raise ValueError(f"this state is of another run: {' '.join(found)}")
    cursor = Cursor.at(plan, saved.schedule, saved.step)
    num_rows = len(cursor.sample_range(step))
    if num_rows * max(saved.seq_len, _LEAST_ROW_TOKENS) > _MAX_TOKENS:
        raise ValueError(
            f"state: step {step} has {num_rows:,} windows of seq_len={saved.seq_len:,} by its batch_sizes; "
            f"expected {_MAX_TOKENS // max(saved.seq_len, _LEAST_ROW_TOKENS):,} at most: is it damaged?"
        )
    samples, starts = cursor.samples(step), cursor.window_starts(step)
    block = tokens.gather(starts, saved.seq_len + 1)
    documents = None
    if eos_id is not None or bos_id is not None:
        ends = block[:, :-1] == eos_id if bos_id is None else block[:, 1:] == bos_id
        documents = [_documents(row, start) for row, start in zip(ends, starts.tolist(), strict=True)]
    return Replayed(samples, starts, block, documents)


def _documents(ends: NDArray[np.bool_], start: int) -> NDArray[np.int64]:
    """The documents of a window at `start`, given after which of its tokens but the last one ends."""
    bounds = np.concatenate([[0], np.flatnonzero(ends) + 1, [len(ends) + 1]])
    return np.stack([bounds[:-1], bounds[1:]], axis=1) + start
