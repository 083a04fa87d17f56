"""Proportions: which source each sample of a mixture is of, as a function of the sample's number.

The sources are the leaves of a Huffman tree of their weights. Of the first n samples that reach a
fork, round(n * a / b) go left, where a is the weight below its left branch and b the weight below
both. That is a function of n alone, so which source a sample is of, and how many samples of that source
came before it, is found from its number, fork by fork, without counting what came before.

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

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Fork(NamedTuple):
    """An inner node of the tree, whose children are forks or sources (integers)."""

    left: Fork | int
    right: Fork | int
    left_weight: int
    weight: int  # below both children


@dataclass(frozen=True)
class Proportions:
    """The tree over sources 0, 1, ...; its root is a source alone, or the fork that samples reach first."""

    root: Fork | int
    num_sources: int

    @classmethod
    def of_weights(cls, weights: Sequence[int]) -> Proportions:
        """Builds the tree for weights of 1 or more, which together are below 2**62."""
        # The second field makes the order of equal weights certain, and keeps nodes uncompared.
        nodes: list[tuple[int, int, Fork | int]] = [(w, k, k) for k, w in enumerate(weights)]
        heapq.heapify(nodes)
        for k in range(len(nodes), 2 * len(nodes) - 1):
            a, _, left = heapq.heappop(nodes)
            b, _, right = heapq.heappop(nodes)
            heapq.heappush(nodes, (a + b, k, Fork(left, right, a, a + b)))
        return cls(nodes[0][2], len(weights))

    def assign(
        self, samples: NDArray[np.uint64]
    ) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.uint64]]]:
        """Yields, for each source of any of the samples [n], below 2**63: its index, which of the samples
        are of it, and their numbers among all samples of that source.
        """
        todo: list[tuple[Fork | int, NDArray[np.intp], NDArray[np.uint64]]]
        todo = [(self.root, np.arange(samples.size), samples)]
        while todo:
            node, where, number = todo.pop()
            if isinstance(node, int):
                yield node, where, number
                continue
            before = left_count(number, node.left_weight, node.weight)
            goes_left = left_count(number + np.uint64(1), node.left_weight, node.weight) > before
            if goes_left.any():
                todo.append((node.left, where[goes_left], before[goes_left]))
            if not goes_left.all():
                todo.append((node.right, where[~goes_left], (number - before)[~goes_left]))

    def counts(self, num_samples: int) -> list[int]:
        """Returns how many of the first num_samples are of each source."""
        counts = [0] * self.num_sources
        todo = [(self.root, num_samples)]
        while todo:
            node, n = todo.pop()
            if isinstance(node, int):
                counts[node] = n
                continue
            left = _rounded_share(n, node.left_weight, node.weight)
            todo += [(node.left, left), (node.right, n - left)]
        return counts


def left_count(n: NDArray[np.uint64], a: int, b: int) -> NDArray[np.uint64]:
    """Returns round(n * a / b), halves up, exactly; for n up to 2**63 and 0 < a < b < 2**62.

    With n = q * b + r, n * a / b is the whole number q * a, and r * a / b, in which r is below b.
    """
    q = n // np.uint64(b)
    r = n - q * np.uint64(b)
    if 2 * a * int(r.max(initial=0)) + b < 2**64:
        share = (r * np.uint64(2 * a) + np.uint64(b)) // np.uint64(2 * b)
    else:  # late samples, of weights such as counts of tokens: Python's integers, 0.3 us each
        share = _rounded_share(r.astype(object), a, b).astype(np.uint64)
    count: NDArray[np.uint64] = q * np.uint64(a) + share
    return count


def _rounded_share(n: Any, a: int, b: int) -> Any:
    """Returns round(n * a / b), halves up, in Python's integers or arrays of them."""
    return (2 * n * a + b) // (2 * b)
