"""Replay: what a step of a run trained on, from its saved state and the tokens alone.

The state names the plan, and the history of batch sizes says which samples the step is made of: no
loader is needed, no device and no jax.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.plans.batch_size_schedule import samples_at
from tokenloader.plans.mixture import Mixture
from tokenloader.plans.plan import (
    Plan,
    RandomWindows,
    SequentialWindows,
    ShuffledEpochs,
    end_sample,
    plan_name,
)
from tokenloader.plans.state import data_difference, from_dict
from tokenloader.tokens.token_array import TokenArray

_PLAIN: dict[str, type[RandomWindows | ShuffledEpochs | SequentialWindows]] = {
    "RandomWindows": RandomWindows,
    "ShuffledEpochs": ShuffledEpochs,
    "SequentialWindows": SequentialWindows,
}


@dataclass(frozen=True)
class Replayed:
    """What a step trained on, or will.

    Attributes:
        samples: int64 [B], the global sample numbers of its rows.
        starts: int64 [B], where their windows begin.
        tokens: [B, T + 1], the windows, in the tokens' dtype.
        documents: int64 [k, 2] for each row: begin and end, on the token axis, of each document's part
            in the window. The first may have begun before the window, the last may go on after it.
            None where the end-of-text id was not given.
    """

    samples: NDArray[np.int64]
    starts: NDArray[np.int64]
    tokens: NDArray[Any]
    documents: list[NDArray[np.int64]] | None


def replay(
    state: Mapping[str, Any], tokens: TokenArray, step: int, *, eos_id: int | None = None
) -> Replayed:
    """The samples, windows, tokens and documents of any step, past or to come, in O(1).

    Args:
        state: from `get_state` of the run, at any step of it. Steps after it are taken to have the
            batch_size that the run had then.
        tokens: what the run trains on.
        step: 0 is the first of the run.
        eos_id: the token id after every document, and part of it.

    Raises:
        ValueError: it is no such state, its plan is none of tokenloader's own, the tokens are not
            those it was saved with, or the step is negative or past the plan's end.
        TypeError: state is no mapping, or step no integer.

    Example:
        >>> tokens = tl.open_tokens(np.arange(100, dtype=np.uint16))
        >>> state = tl.TokenLoader(tokens, 2, 9, plan=tl.SequentialWindows()).get_state()
        >>> replay(state, tokens, step=1).starts
        array([18, 27])
    """
    saved = from_dict(state)
    if saved.data != tokens.fingerprint():
        line = data_difference(saved.data, tokens.fingerprint())
        raise ValueError(f"{tokens!r} is not what this state was saved with: {line}")
    plan = plan_named(saved.plan)
    end = end_sample(plan, len(tokens), saved.seq_len, saved.history.batch_size)
    samples = samples_at(step, saved.history, plan=plan, end=end)
    starts = plan.starts(samples, num_tokens=len(tokens), seq_len=saved.seq_len)
    block = tokens.gather(starts, saved.seq_len + 1)
    documents = None
    if eos_id is not None:
        documents = [
            _documents(row, start, eos_id)
            for row, start in zip(block, starts.tolist(), strict=True)
        ]
    return Replayed(samples, starts, block, documents)


def plan_named(name: str) -> Plan:
    """The plan that a saved state calls `name`. It is read and not run.

    A plan of tokenloader's own, without num_epochs, which is no part of its name.

    Raises:
        ValueError: it is the name of another plan, or of none.
    """
    try:
        plan = _plan(ast.parse(name, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise _not_ours(name) from error
    if plan_name(plan) != name:  # written in another way than any plan's name is
        raise _not_ours(name)
    return plan


def _not_ours(name: str) -> ValueError:
    return ValueError(
        f"state: plan is {name}, which is none of {', '.join(_PLAIN)} and Mixture, so its windows cannot "
        f"be told from the state alone; in Python, make a TokenLoader with that plan, set_state(state), "
        f"and ask its window_starts(step) and window_tokens(step)"
    )


def _plan(node: ast.expr) -> Plan:
    match node:
        case ast.Call(ast.Name("Mixture"), [ast.Dict(keys, values), plan], []):
            ranges = [_range(key) for key in keys]
            weights = [_integer(value) for value in values]
            return Mixture(dict(zip(ranges, weights, strict=True)), _plan(plan))
        case ast.Call(ast.Name(kind), [], keywords) if kind in _PLAIN:
            return _PLAIN[kind](
                **{str(keyword.arg): _integer(keyword.value) for keyword in keywords}
            )
    raise ValueError(f"{ast.unparse(node)} is no plan")


def _range(node: ast.expr | None) -> range:
    match node:
        case ast.Call(ast.Name("range"), [start, stop], []):
            return range(_integer(start), _integer(stop))
    raise ValueError("a source is no range(start, stop)")


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return value
    raise ValueError(f"{ast.unparse(node)} is no integer of 0 or more")


def _documents(row: NDArray[Any], start: int, eos_id: int) -> NDArray[np.int64]:
    ends = np.flatnonzero(row == eos_id) + 1
    if not ends.size or ends[-1] != len(row):
        ends = np.append(ends, len(row))
    begins = np.concatenate([[0], ends[:-1]])
    return np.stack([begins, ends], axis=1) + start
