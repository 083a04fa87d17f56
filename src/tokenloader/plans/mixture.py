"""Mixture: several ranges of the token axis, drawn from in fixed proportions."""

import bisect
import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.plans.plan import (
    BoundPlan,
    Plan,
    checked_plan,
    checked_reads,
    checked_samples,
    checked_window,
    checked_window_starts,
    masks_targets,
)
from tokenloader.plans.proportions import Proportions

_MAX_WEIGHT = 2**62  # of all sources together


@dataclass(frozen=True, init=False, repr=False)
class Mixture(Plan):
    """Ranges of the token axis, or several token arrays, drawn from in fixed proportions.

    After any number n of samples, a source of weight w (of a total of 1) has had n * w of them, to
    within 1.68 (1/2 with two sources, 1 with three). Each source goes through epochs of its own, at
    its own pace: its samples are those of `plan` over its tokens alone, so no window crosses from one
    source into another. A plan with an end ends the mixture where the first source would run out.

    A mixture of one source is that plan on a part of the tokens.

    Args:
        weights: the sources, as ranges of token positions, or as the open TokenArrays that stand for
            consecutive ranges in the order given, as in `open_tokens([web, books])`, which is what the
            loader then takes. To each, its weight: a positive number. Only proportions count, and a float
            counts as the decimal number it is written as. Proportions are exact while the weights
            are whole multiples of a common unit, less than 2**62 of it together; others are rounded to
            1/2**61 of the total.
        plan: the order within each source. Sources of equal length are in the same order.

    Raises:
        ValueError: a range is empty or has a step, two overlap, or a weight is not positive and finite.
        TypeError: an argument is of another type.

    Example:
        >>> plan = Mixture({range(0, 600): 0.75, range(600, 1000): 0.25}, ShuffledEpochs(seed=0))
        >>> plan.bind(num_tokens=1000, seq_len=10).window_starts(range(8)) < 600
        array([ True, False,  True,  True,  True, False,  True,  True])
        >>> last_tenth = Mixture({range(900, 1000): 1}, SequentialWindows())
        >>> last_tenth.bind(num_tokens=1000, seq_len=40).window_starts(range(3))
        array([900, 940, 959])
    """

    __module__ = "tokenloader"
    ranges: tuple[range, ...]
    weights: tuple[int, ...]
    plan: Plan

    def __init__(
        self, weights: Mapping[range | Sized, int | float | Fraction | Decimal], plan: Plan
    ) -> None:
        if not isinstance(weights, Mapping):
            raise TypeError(
                f"Mixture: weights is of type {type(weights).__name__}; expected a dict from ranges or "
                f"TokenArrays to weights"
            )
        if not weights:
            raise ValueError("Mixture: there are no sources; expected one or more")
        checked_plan(plan)
        parts = [_checked_weight(source, weight) for source, weight in weights.items()]
        weight_of = dict(zip(_as_ranges(list(weights)), _as_integers(parts), strict=True))
        ranges = tuple(sorted(weight_of, key=lambda source: source.start))
        for a, b in pairwise(ranges):
            if b.start < a.stop:
                raise ValueError(
                    f"Mixture: {a} and {b} overlap; cut them where they do, and give the part in both a "
                    f"weight of its own"
                )
        object.__setattr__(self, "ranges", ranges)
        object.__setattr__(self, "weights", tuple(weight_of[source] for source in ranges))
        object.__setattr__(self, "plan", plan)

    def __repr__(self) -> str:
        return self._named(repr(self.plan))

    def bind(self, num_tokens: int, seq_len: int) -> BoundPlan:
        """See `Plan.bind`.

        Raises:
            ValueError: a source does not lie within the tokens or does not hold one window; or the plan
                counts each target once, and there are several sources.
        """
        if self.ranges[-1].stop > num_tokens:
            raise ValueError(
                f"Mixture: {self.ranges[-1]} does not lie within the {num_tokens:,} tokens; open all that "
                f"it is a mixture of as one, or name other ranges"
            )
        shortest = min(self.ranges, key=len)
        try:
            checked_window(len(shortest), seq_len)
        except ValueError as error:
            raise ValueError(f"Mixture: {shortest}: {error}") from None
        plans = tuple(self.plan.bind(len(source), seq_len) for source in self.ranges)
        if len(plans) > 1 and masks_targets(plans[0]):
            raise ValueError(
                f"Mixture: {self.plan} counts each target once, and {len(plans)} sources do not come to "
                f"their ends together; evaluate each with a loader of its own, the first with "
                f"plan=Mixture({{{self.ranges[0]}: 1}}, {self.plan})"
            )
        return BoundMixture(self, plans, Proportions.of_weights(self.weights), seq_len)

    def _named(self, plan: str) -> str:
        pairs = zip(self.ranges, self.weights, strict=True)
        sources = ", ".join(f"{source}: {weight}" for source, weight in pairs)
        return f"{type(self).__qualname__}({{{sources}}}, {plan})"


@dataclass(frozen=True)
class BoundMixture(BoundPlan):
    """A mixture over the tokens of its sources."""

    mixture: Mixture
    plans: tuple[BoundPlan, ...]  # of each source, over its own tokens
    proportions: Proportions
    seq_len: int

    @cached_property
    def num_samples(self) -> int | None:
        """Samples until the first source would run out; None if the plan never ends."""
        ends = [plan.num_samples for plan in self.plans]
        if len(ends) == 1:
            return ends[0]
        if all(end is None for end in ends):
            return None

        def has_run_out(num_samples: int) -> bool:
            counts = self.proportions.counts(num_samples)
            return any(end is not None and n > end for n, end in zip(counts, ends, strict=True))

        return bisect.bisect_left(range(2**63 - 1), x=True, key=has_run_out) - 1

    def window_starts(self, samples: ArrayLike) -> NDArray[np.int64]:
        index = checked_samples(samples)
        starts = np.empty(index.size, np.int64)
        for source, where, numbers in self.proportions.assign(index.reshape(-1)):
            within = checked_window_starts(self.plans[source], numbers.astype(np.int64))
            starts[where] = self.mixture.ranges[source].start + within
        return starts.reshape(index.shape)

    def valid_targets(self, samples: NDArray[np.int64]) -> NDArray[np.int64] | None:
        # Several sources have plans without, which `bind` sees to.
        return self.plans[0].valid_targets(samples)

    def reads(self, samples: NDArray[np.int64]) -> NDArray[np.int64] | None:
        none = np.empty(0, np.int64)
        if all(plan.reads(none) is None for plan in self.plans):
            return None
        reads = np.empty((len(samples), 2), np.int64)
        for source, where, numbers in self.proportions.assign(checked_samples(samples)):
            plan, own, tokens = self.plans[source], numbers.astype(np.int64), self.mixture.ranges[source]
            within = checked_reads(plan, own, len(tokens))
            if within is None:
                starts = checked_window_starts(plan, own)
                within = np.stack([starts, starts + self.seq_len + 1], axis=1)
            reads[where] = tokens.start + within
        return reads

    def effect_of_going_on_from(self, weights: tuple[int, ...], sample: int) -> str:
        """Returns what becomes of the windows of a run with other weights that goes on here at a sample.

        Each source goes on where its part of so many samples ends in these proportions. With the other
        weights that was later, so windows come again; or earlier, so windows are left out.
        """
        before = Proportions.of_weights(weights).counts(sample)
        here = self.proportions.counts(sample)

        def named(counts: list[int], others: list[int]) -> str:
            surplus = zip(self.mixture.ranges, counts, others, strict=True)
            found = [f"{a - b:,} of {source}" for source, a, b in surplus if a > b]
            return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")

        num_repeated = sum(max(0, a - b) for a, b in zip(before, here, strict=True))
        if not num_repeated:
            return "the proportions change from here on; no window comes twice or is left out"

        def has_caught_up(num_windows: int) -> bool:
            counts = self.proportions.counts(sample + num_windows)
            return all(n >= end for n, end in zip(counts, before, strict=True))

        horizon = bisect.bisect_left(range(2**62), x=True, key=has_caught_up)
        return (
            f"the sources go on where these weights would have them, so of the next {horizon:,} windows "
            f"{num_repeated:,} were trained on before ({named(before, here)}), and {num_repeated:,} others "
            f"are left out ({named(here, before)})"
        )

    def key(self, until_sample: int) -> str:
        counts = self.proportions.counts(until_sample)
        keys = [plan.key(count) for plan, count in zip(self.plans, counts, strict=True)]
        return self.mixture._named(" | ".join(dict.fromkeys(keys)))


def _as_ranges(sources: list[range | Sized]) -> list[range]:
    for source in sources:
        if not isinstance(source, Sized) or isinstance(source, (str, bytes, tuple)):
            raise TypeError(
                f"Mixture: source {source!r} is of type {type(source).__name__}; expected a range of "
                f"token positions, or an open TokenArray"
            )
        if isinstance(source, range) != isinstance(sources[0], range):
            raise TypeError(
                f"Mixture: {sources[0]} and {source} are of two kinds; name all sources by ranges of "
                f"the one token axis, or all by TokenArrays"
            )
        if isinstance(source, range) and (source.step != 1 or not 0 <= source.start < source.stop):
            raise ValueError(f"Mixture: {source}; expected a range(start, stop) with 0 <= start < stop")
    ranges = [source for source in sources if isinstance(source, range)]
    if ranges:
        return ranges
    ends = accumulate((len(source) for source in sources), initial=0)
    return [range(start, stop) for start, stop in pairwise(ends)]


def _checked_weight(source: object, weight: object) -> Fraction:
    expected = "expected a positive finite number"
    if not isinstance(weight, (Real, Decimal)) or isinstance(weight, bool):
        raise TypeError(
            f"Mixture: the weight of {source} is {weight!r} of type {type(weight).__name__}; {expected}"
        )
    try:
        fraction = Fraction(str(weight))  # so 0.1 is a tenth, and not the nearest binary fraction
    except ValueError:
        raise ValueError(f"Mixture: the weight of {source} is {weight!r}; {expected}") from None
    if fraction <= 0:
        raise ValueError(f"Mixture: the weight of {source} is {weight!r}; {expected}")
    return fraction


def _as_integers(weights: list[Fraction]) -> list[int]:
    """Returns whole weights in the same proportions, below _MAX_WEIGHT together, in lowest terms."""
    unit = math.lcm(*(weight.denominator for weight in weights))
    integers = [int(weight * unit) for weight in weights]
    total = sum(integers)
    if total // math.gcd(*integers) >= _MAX_WEIGHT:
        integers = [round(Fraction(weight, total) * (_MAX_WEIGHT // 2)) for weight in integers]
        if 0 in integers:
            least = min(weights) / sum(weights)
            raise ValueError(
                f"Mixture: the least weight is {float(least):.3g} of the total; expected {2**-61:.3g} "
                f"or more, so leave that source out"
            )
    divisor = math.gcd(*integers)
    return [weight // divisor for weight in integers]
