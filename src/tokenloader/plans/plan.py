"""Plan and BoundPlan: the contract of what decides which window each sample of a run is.

A plan depends on its own fields, the number of tokens and seq_len alone. So any process can compute any
part of a run, in any order, and a resumed run goes on with the very samples it would have had.
A window is `seq_len + 1` consecutive tokens, which make `seq_len` inputs and `seq_len` targets.
"""

from __future__ import annotations

import difflib
import inspect
import operator
import types
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Plan(ABC):
    """Which window of the token axis each sample of a run is. Subclass it for a plan of your own.

    docs/plans.md has one whose windows come in blocks (`BoundPlan.reads`).

    Example:
        >>> class EveryTenth(tl.Plan):
        ...     def bind(self, num_tokens, seq_len):
        ...         return BoundEveryTenth(num_tokens - seq_len)
        >>> class BoundEveryTenth(tl.BoundPlan):
        ...     num_samples = None
        ...
        ...     def __init__(self, num_starts):
        ...         self._num_starts = num_starts
        ...
        ...     def window_starts(self, samples):
        ...         return samples * 10 % self._num_starts
        ...
        ...     def key(self, until_sample):
        ...         return "EveryTenth()"
        >>> tokens = tl.open_tokens(np.arange(100, dtype=np.uint16))
        >>> next(tl.TokenLoader(tokens, 3, 4, plan=EveryTenth())).inputs[:, 0]
        Array([ 0, 10, 20], dtype=int32)
    """

    __module__ = "tokenloader"  # as users import it, so that files may move

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _check_hooks(cls, Plan)

    @abstractmethod
    def bind(self, num_tokens: int, seq_len: int) -> BoundPlan:
        """Returns the plan for a token axis of num_tokens, in windows of seq_len + 1 tokens.

        Raises ValueError if the plan does not fit the tokens, for example because no window does.
        """


class BoundPlan(ABC):
    """A plan over a token axis of one length, in windows of one length. Made by `Plan.bind`.

    Its methods are pure. They run on the loader's background thread.
    """

    __module__ = "tokenloader"

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _check_hooks(cls, BoundPlan)

    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """Samples after which the plan ends; None if it never does."""

    @abstractmethod
    def window_starts(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first token of each sample's window: int64 [n], 0 to num_tokens - seq_len - 1.

        Args:
            samples: int64 [n], sample numbers from 0 on, in any order.
        """

    def valid_targets(self, samples: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns how many targets, at the end of each window, count in a loss: int64 [n], 0 to seq_len.

        None, for whatever samples: all of them count. A plan whose windows overlap counts each target once
        this way: the loader hides the others with `Batch.loss_mask`, and fills the last batch with samples
        past the end, so window_starts and reads must take those. Otherwise a last batch that is not full
        is left out.
        """
        return None

    def reads(self, samples: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the tokens [start, stop) to be read as a whole before each sample: int64 [n, 2].

        A sample's window lies in its read. Samples that share a read have equal rows, and the loader has it
        read once, in large requests, before the first of them. A plan that returns None does so for any
        samples, and has each window read by itself.
        """
        return None

    @abstractmethod
    def key(self, until_sample: int) -> str:
        """Returns a name for all that decides the samples before until_sample. A saved state keeps it.

        What decides later samples only, as a number of epochs does, stays out of it. Where the text hides
        something, as numpy's text of an array does or an object's address, the loader has it end there,
        with a hash of the fields of the whole plan, and refuses what cannot be hashed.
        """


def checked_plan(plan: object) -> Plan:
    """Returns the plan; TypeError if it is none (the class of a plan is not a plan)."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is {plan!r}; expected an instance of tokenloader.Plan, for example "
            f"ShuffledEpochs(seed=0)"
        )
    return plan


def checked_window_starts(plan: BoundPlan, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns what a bound plan's window_starts gives, int64 [n]; ValueError if it is not that."""
    starts = np.asarray(plan.window_starts(samples))
    if starts.shape != samples.shape or starts.dtype.kind not in "iu":
        raise ValueError(
            f"{plan!r}: window_starts returned {starts.dtype}{list(starts.shape)} for {len(samples)} "
            f"samples; expected one integer for each sample"
        )
    return starts.astype(np.int64, copy=False)


def checked_reads(plan: BoundPlan, samples: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64] | None:
    """Returns what a bound plan's reads gives, int64 [n, 2] or None; ValueError if it is neither."""
    given = plan.reads(samples)
    if given is None:
        return None
    reads = np.asarray(given)
    if reads.shape != (len(samples), 2) or reads.dtype.kind not in "iu":
        raise ValueError(
            f"{plan!r}: reads returned {reads.dtype}{list(reads.shape)} for {len(samples)} samples; "
            f"expected integers [{len(samples)}, 2]: start and stop of a range of tokens for each sample"
        )
    reads = reads.astype(np.int64, copy=False)
    wrong = (reads[:, 0] < 0) | (reads[:, 0] >= reads[:, 1]) | (reads[:, 1] > num_tokens)
    if wrong.any():
        (start, stop), sample = reads[wrong.argmax()].tolist(), samples[wrong.argmax()]
        raise ValueError(
            f"{plan!r}: reads returned [{start:,}, {stop:,}) for sample {sample}; expected "
            f"0 <= start < stop <= {num_tokens:,}"
        )
    return reads


def masks_targets(plan: BoundPlan) -> bool:
    """Whether the plan says which targets count."""
    return plan.valid_targets(np.empty(0, np.int64)) is not None


def checked_window(num_tokens: int, seq_len: int) -> tuple[int, int]:
    """Returns both as Python integers (numpy's wrap around); ValueError if no window fits the tokens."""
    num_tokens, seq_len = operator.index(num_tokens), operator.index(seq_len)
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}; expected 1 or more")
    if num_tokens < seq_len + 1:
        raise ValueError(
            f"{num_tokens:,} tokens are fewer than one window of seq_len + 1 = {seq_len + 1:,}; "
            f"use a seq_len of at most {num_tokens - 1:,}, or more data"
        )
    return num_tokens, seq_len


def checked_samples(samples: ArrayLike) -> NDArray[np.uint64]:
    """Returns sample numbers as uint64; TypeError or ValueError unless they are integers from 0 on."""
    index = np.asarray(samples)
    if not index.size:
        return np.empty(index.shape, np.uint64)
    if index.dtype.kind not in "iu":
        raise TypeError(f"samples are of dtype {index.dtype}; expected integers")
    if index.min() < 0:
        raise ValueError(f"sample {index.min()} is negative; samples are counted from 0")
    return index.astype(np.uint64)


def checked_seed(owner: str, seed: int) -> int:
    """Returns the seed as a Python integer, so that names of plans do not tell numpy's integers apart."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(
            f"{owner}: seed={seed!r} is of type {type(seed).__name__}; expected an integer"
        ) from None
    if not 0 <= number < 2**64:
        raise ValueError(f"{owner}: seed={number} is not in [0, 2**64)")
    return number


def checked_count(owner: str, name: str, value: int, most: int) -> int:
    """Returns an integer from 1 to `most` as a Python integer; TypeError or ValueError if it is none."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: {name}={value!r}; expected an integer") from None
    if not 1 <= number <= most:
        raise ValueError(f"{owner}: {name}={number}; expected 1 to {most:,}")
    return number


def _check_hooks(subclass: type, base: type) -> None:
    """Raises TypeError for what is no method as the base has it, or is nearly called as one of them."""
    hooks = [name for name in vars(base) if not name.startswith("_")]
    for name in hooks:
        own, expected = inspect.getattr_static(subclass, name), vars(base)[name]
        told = f"{subclass.__qualname__}.{name} is a {type(own).__name__}; expected"
        if isinstance(expected, property):
            if isinstance(own, types.FunctionType):
                raise TypeError(f"{told} a property or a value: write @property above it")
            continue
        signature = inspect.signature(expected)
        if isinstance(own, property | cached_property) or not (hasattr(own, "__func__") or callable(own)):
            raise TypeError(f"{told} a method {name}{signature}")
        if isinstance(own, types.FunctionType):
            try:
                inspect.signature(own).bind(*signature.parameters)
            except TypeError as error:
                raise TypeError(f"{told} {name}{signature}: {error}") from None
    for name in vars(subclass):
        nearest = difflib.get_close_matches(name, hooks, 1, cutoff=0.8)
        if nearest and name not in hooks and not name.startswith("_"):
            raise TypeError(
                f"{subclass.__qualname__}.{name} is no method of tokenloader.{base.__name__}; did you mean "
                f"{nearest[0]}? If not, rename it, or let its name begin with _"
            )
