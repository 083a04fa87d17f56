"""Mixture: several ranges of the token axis, drawn from in fixed proportions.

The sources are the leaves of a Huffman tree of their weights. Of the first n samples that reach a
fork, round(n * a / b) go left, where a is the weight below its left branch and b the weight below
both. That is a function of n alone, so which source a sample is of, and the how-manieth of its
source, is found from its number, fork by fork, without counting what came before.

How far a source's count is off. Let v be the nodes from the source x up to the root, x and the
root's child included, and w their weights. Rounding at the fork above v adds an error of at most
1/2, and the forks below pass on the share w(x) / w(v) of it. So the count of x is off by at most
1/2 * (sum of w(x) / w(v)), whatever n is. Huffman's algorithm joins the two lightest nodes there
are, so a node's sibling weighs no less than its children: w grows from x upwards at least as the
Fibonacci numbers 1, 1, 2, 3, 5, ..., and the sum is below that of their reciprocals, 3.36. Hence
|count - n * weight| < 1.68; it is at most 1/2 for two sources, and below 1 for three.

Source: Huffman, "A Method for the Construction of Minimum-Redundancy Codes" (1952).
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from numbers import Real
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.plans.plan import (
    Plan,
    check_is_plan,
    check_one_window_fits,
    checked_samples,
    plan_name,
)

# A fork's arithmetic needs four times the weight of all in 64 bits.
_MOST_WEIGHT = 2**62
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True, init=False, repr=False)
class Mixture:
    """Ranges of the token axis, or several token arrays, drawn from in fixed proportions.

    After any number n of samples, a source of weight w (of a total of 1) has had n * w of them, to
    within 1.68 (1/2 with two sources, 1 with three). Each source goes through epochs of its own, at
    its own pace: its samples are those of `plan` over its tokens alone, so no window crosses from one
    source into another. A plan with an end ends the mixture where the first source would run out.

    With one source it is that plan on a part of the tokens: a train and a validation set of one file.

    Args:
        weights: the sources, as ranges of token positions, or as the open TokenArrays that stand for
            consecutive ranges in the order given, as in `open_tokens([web, books])`, which is what the
            loader then takes. To each, its weight: a positive number. Only proportions count, and a float
            counts as the decimal number it is written as. Proportions are exact while the weights
            are whole multiples of a common unit, less than 2**62 of it together; others are rounded to
            1/2**61 of the total.
        plan: how each source is gone through. Sources of equal length are in the same order.

    Raises:
        ValueError: a range is empty or has a step, two overlap, or a weight is not positive and finite;
            or several sources are to be gone through by a plan that counts each target once.
        TypeError: an argument is of another type.

    Example:
        >>> plan = Mixture({range(0, 600): 0.75, range(600, 1000): 0.25}, ShuffledEpochs(seed=0))
        >>> plan.starts(range(8), num_tokens=1000, seq_len=10) < 600
        array([ True, False,  True,  True,  True, False,  True,  True])
        >>> train = Mixture({range(0, 900): 1}, ShuffledEpochs(seed=0))
        >>> validation = Mixture({range(900, 1000): 1}, SequentialWindows())
        >>> validation.starts(range(3), num_tokens=1000, seq_len=40)
        array([900, 940, 959])
    """

    ranges: tuple[range, ...]
    weights: tuple[int, ...]
    plan: Plan

    def __init__(
        self, weights: Mapping[range | Sized, int | float | Fraction | Decimal], plan: Plan
    ) -> None:
        if not isinstance(weights, Mapping):
            raise TypeError(
                f"Mixture: weights is of type {type(weights).__name__}; needed is a dict from ranges or "
                f"TokenArrays to weights"
            )
        if not weights:
            raise ValueError("Mixture: there are no sources; needed is one or more")
        check_is_plan(plan)
        parts = [_checked_weight(source, weight) for source, weight in weights.items()]
        of_range = dict(zip(_as_ranges(list(weights)), _as_integers(parts), strict=True))
        ranges = tuple(sorted(of_range, key=lambda source: source.start))
        for a, b in pairwise(ranges):
            if b.start < a.stop:
                raise ValueError(
                    f"Mixture: {a} and {b} overlap; cut them where they do, and give the part in both a "
                    f"weight of its own"
                )
        if len(ranges) > 1 and hasattr(plan, "new_targets"):
            raise ValueError(
                f"Mixture: {plan} counts each target once, and {len(ranges)} sources do not come to their "
                f"ends together; evaluate each with a loader of its own, the first with "
                f"plan=Mixture({{{ranges[0]}: 1}}, {plan})"
            )
        object.__setattr__(self, "ranges", ranges)
        object.__setattr__(self, "weights", tuple(of_range[source] for source in ranges))
        object.__setattr__(self, "plan", plan)

    def __repr__(self) -> str:
        return self._named(repr(self.plan))

    def sequence_name(self) -> str:
        """The mixture's name in a saved state, from the plan's own."""
        return self._named(plan_name(self.plan))

    def starts(self, samples: ArrayLike, *, num_tokens: int, seq_len: int) -> NDArray[np.int64]:
        """See `Plan.starts`.

        Raises:
            ValueError: a source does not lie within the tokens, or does not hold one window.
        """
        index = checked_samples(samples)
        self._check_sources(num_tokens, seq_len)
        starts = np.empty(index.size, np.int64)
        for source, where, number in self._assign(index.reshape(-1)):
            tokens = self.ranges[source]
            starts[where] = tokens.start + np.asarray(
                self.plan.starts(
                    number.astype(np.int64), num_tokens=tokens.stop - tokens.start, seq_len=seq_len
                )
            )
        return starts.reshape(index.shape)

    def num_samples(self, *, num_tokens: int, seq_len: int) -> int | None:
        """Samples until the first source would run out; None if the plan never ends."""
        self._check_sources(num_tokens, seq_len)
        if not hasattr(self.plan, "num_samples"):
            return None
        ends: list[int | None] = [
            self.plan.num_samples(num_tokens=source.stop - source.start, seq_len=seq_len)
            for source in self.ranges
        ]
        if len(ends) == 1 or None in ends:
            return ends[0] if len(ends) == 1 else None

        def has_run_out(num_samples: int) -> bool:
            counts = self._counts(num_samples)
            return any(counts[k] > end for k, end in enumerate(ends) if end is not None)

        return bisect.bisect_left(range(2**63 - 1), x=True, key=has_run_out) - 1

    @property
    def new_targets(self) -> Callable[..., NDArray[np.int64]]:
        """The method of a plan that has it, which a mixture of one source then has as well."""
        of_plan: Callable[..., NDArray[np.int64]] = self.plan.new_targets  # type: ignore[attr-defined]

        def new_targets(samples: ArrayLike, *, num_tokens: int, seq_len: int) -> NDArray[np.int64]:
            self._check_sources(num_tokens, seq_len)
            (source,) = self.ranges
            return of_plan(samples, num_tokens=source.stop - source.start, seq_len=seq_len)

        return new_targets

    def _named(self, plan: str) -> str:
        pairs = zip(self.ranges, self.weights, strict=True)
        sources = ", ".join(f"{source}: {weight}" for source, weight in pairs)
        return f"{type(self).__qualname__}({{{sources}}}, {plan})"

    def _check_sources(self, num_tokens: int, seq_len: int) -> None:
        if self.ranges[-1].stop > num_tokens:
            raise ValueError(
                f"Mixture: {self.ranges[-1]} does not lie within the {num_tokens:,} tokens; open all that "
                f"it is a mixture of as one, or name other ranges"
            )
        shortest = min(self.ranges, key=lambda source: source.stop - source.start)
        try:
            check_one_window_fits(shortest.stop - shortest.start, seq_len)
        except ValueError as error:
            raise ValueError(f"Mixture: {shortest}: {error}") from None

    @cached_property
    def _tree(self) -> _Node:
        # The second field makes the order of equal weights certain, and keeps nodes uncompared.
        nodes: list[tuple[int, int, _Node]] = [(w, k, k) for k, w in enumerate(self.weights)]
        heapq.heapify(nodes)
        for k in range(len(nodes), 2 * len(nodes) - 1):
            a, _, left = heapq.heappop(nodes)
            b, _, right = heapq.heappop(nodes)
            heapq.heappush(nodes, (a + b, k, _Fork(left, right, a, a + b)))
        return nodes[0][2]

    def _assign(
        self, samples: NDArray[np.uint64]
    ) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.uint64]]]:
        """For each source of any of the samples: its index, which samples, and their numbers in it."""
        todo: list[tuple[_Node, NDArray[np.intp], NDArray[np.uint64]]]
        todo = [(self._tree, np.arange(samples.size), samples)]
        while todo:
            node, where, number = todo.pop()
            if isinstance(node, int):
                yield node, where, number
                continue
            gone_left, goes_left = _left_of(number, node.left_weight, node.weight)
            for child, count, here in (
                (node.left, gone_left, goes_left),
                (node.right, number - gone_left, ~goes_left),
            ):
                if here.any():
                    todo.append((child, where[here], count[here]))

    def _counts(self, num_samples: int) -> list[int]:
        """How many of the first num_samples are of each source, in Python's own integers."""
        counts = [0] * len(self.ranges)
        todo = [(self._tree, num_samples)]
        while todo:
            node, n = todo.pop()
            if isinstance(node, int):
                counts[node] = n
                continue
            left = (2 * n * node.left_weight + node.weight) // (2 * node.weight)
            todo += [(node.left, left), (node.right, n - left)]
        return counts


class _Fork(NamedTuple):
    left: _Node
    right: _Node
    left_weight: int
    weight: int  # of both


_Node = int | _Fork  # an int is a source


def _left_of(n: NDArray[np.uint64], a: int, b: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """round(n * a / b), halves up, and whether it is one more for n + 1. Exact for n < 2**63.

    0 < a < b < 2**62. The products pass 64 bits; their difference, taken modulo 2**64, does not.
    """
    # With a / b cut to 64 bits, n * (a / b) comes out less than n / 2**64 < 1/2 too low. So the quotient
    # is one too low only where the true remainder is below b / 2, and what remains is below 3b / 2.
    quotient = _high_word(n, (a << 64) // b)
    remainder = n * np.uint64(a) - quotient * np.uint64(b)
    twice = remainder * np.uint64(2)
    up = (twice >= np.uint64(b)).astype(np.uint64)
    # (2na + b) modulo 2b: from 2b - 2a on, the next sample takes it over.
    phase = twice + np.uint64(b) - up * np.uint64(2 * b)
    return quotient + up, phase >= np.uint64(2 * (b - a))


def _high_word(x: NDArray[np.uint64], y: int) -> NDArray[np.uint64]:
    """The upper 64 bits of x * y, for y < 2**64."""
    x_low, x_high = x & _LOW, x >> _32
    y_low, y_high = np.uint64(y & 0xFFFFFFFF), np.uint64(y >> 32)
    middle = x_high * y_low + ((x_low * y_low) >> _32)
    other = x_low * y_high + (middle & _LOW)
    high: NDArray[np.uint64] = x_high * y_high + (middle >> _32) + (other >> _32)
    return high


def _as_ranges(sources: list[range | Sized]) -> list[range]:
    for source in sources:
        if not isinstance(source, Sized) or isinstance(source, (str, bytes, tuple)):
            raise TypeError(
                f"Mixture: source {source!r} is of type {type(source).__name__}; needed is a range of "
                f"token positions, or an open TokenArray"
            )
        if isinstance(source, range) != isinstance(sources[0], range):
            raise TypeError(
                f"Mixture: {sources[0]} and {source} are of two kinds; name all sources by ranges of "
                f"the one token axis, or all by TokenArrays"
            )
        if isinstance(source, range) and (source.step != 1 or not 0 <= source.start < source.stop):
            raise ValueError(
                f"Mixture: {source}; needed is a range(start, stop) with 0 <= start < stop"
            )
    ranges = [source for source in sources if isinstance(source, range)]
    if ranges:
        return ranges
    ends = accumulate((len(source) for source in sources), initial=0)
    return [range(start, stop) for start, stop in pairwise(ends)]


def _checked_weight(source: object, weight: object) -> Fraction:
    needed = "needed is a positive finite number"
    if not isinstance(weight, (Real, Decimal)) or isinstance(weight, bool):
        raise TypeError(
            f"Mixture: the weight of {source} is {weight!r} of type {type(weight).__name__}; {needed}"
        )
    try:
        fraction = Fraction(str(weight))  # so 0.1 is a tenth, and not the nearest binary fraction
    except ValueError:
        raise ValueError(f"Mixture: the weight of {source} is {weight!r}; {needed}") from None
    if fraction <= 0:
        raise ValueError(f"Mixture: the weight of {source} is {weight!r}; {needed}")
    return fraction


def _as_integers(weights: list[Fraction]) -> list[int]:
    """In the same proportions, without a common divisor, and below _MOST_WEIGHT together."""
    unit = math.lcm(*(weight.denominator for weight in weights))
    integers = [int(weight * unit) for weight in weights]
    total = sum(integers)
    if total // math.gcd(*integers) >= _MOST_WEIGHT:
        integers = [round(Fraction(weight, total) * (_MOST_WEIGHT // 2)) for weight in integers]
        if 0 in integers:
            least = min(weights) / sum(weights)
            raise ValueError(
                f"Mixture: the least weight is {float(least):.3g} of the total; needed is {2**-61:.3g} "
                f"or more, so leave that source out"
            )
    divisor = math.gcd(*integers)
    return [weight // divisor for weight in integers]
