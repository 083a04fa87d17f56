"""How much the windows of a block have in common, and what that does to means over the steps of a run.

Values of a window are its loss under a trained model and features of its text. The intraclass correlation
of blocks of W is the mean correlation of two windows of a block, over all places where blocks may begin. It
decides by how much the mean over m samples in a row varies more than under a full shuffle. With c the
number of them that are of a sample's block, itself included, averaged over samples:

    ratio of the variances = (1 + (c - 1) * within + (m - c) * between) / (1 - (m - 1) / (n - 1))

An epoch has n windows. `within` is the intraclass correlation; `between`, that of windows of different
blocks, is the negative number that makes the sum over all pairs zero. c is 1 where each sample is of a
block of its own, and grows with m to W at most. The measured ratio is over many epochs, each of a seed.
Left out are the blocks that the ends of lanes cut, of which each lane uses a part.

Source: the design effect of a sample of clusters, Kish, "Survey Sampling" (1965), for clusters of which a
part is drawn.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import tokenloader as tl
from benchmarks.shuffle_orders import (
    BLOCKS,
    FILE_ORDER,
    FULL_BATCH_SIZE,
    FULL_NUM_WINDOWS,
    FULL_SEQ_LEN,
    FULL_SHUFFLE,
    ORDERS,
)
from benchmarks.token_file import FULL_NUM_TOKENS

BLOCK_SIZES = [2**k for k in range(1, 13)]  # windows
NUM_STEPS = [1, 10, 100, 1000]  # whose means are compared
NUM_EPOCHS = 200  # each of another seed

_NEWLINE, _HASH = ord("\n"), ord("#")


def text_features(windows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns features of the bytes of consecutive windows [n, seq_len]: float64 [n] each."""
    text = windows.ravel()
    places = np.arange(text.size)
    line_begin = np.maximum.accumulate(np.where(text == _NEWLINE, places, -1))
    last_hash = np.maximum.accumulate(np.where(text == _HASH, places, -1))
    shares = {
        "share of comments": last_hash > line_begin,  # a # in a string counts too
        "share of white space": np.isin(text, [ord(char) for char in " \t\r\n"]),
    }
    lines = 1 + (windows == _NEWLINE).sum(axis=1)
    counts = np.stack([(windows == byte).sum(axis=1) for byte in np.unique(text)], axis=1).astype(float)
    counts -= counts.mean(axis=0)
    component = np.linalg.eigh(counts.T @ counts)[1][:, -1]
    return {
        **{name: share.reshape(windows.shape).mean(axis=1) for name, share in shares.items()},
        "mean length of a line": windows.shape[1] / lines,
        "first principal component of counts of bytes": counts @ component,
    }


def intraclass_correlation(values: np.ndarray, block_windows: int) -> float:
    """Returns the mean correlation of two values of a block; blocks begin anywhere, and go around."""
    deviations = values - values.mean()
    spectrum = np.abs(np.fft.rfft(deviations)) ** 2
    by_distance = np.fft.irfft(spectrum, values.size)  # sum over all places, cyclic
    distances = np.arange(1, block_windows)
    weights = 2 * (block_windows - distances) / (block_windows * (block_windows - 1))
    return float(weights @ by_distance[distances] / by_distance[0])


def shuffle_documents(values: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Returns the values as they were if the documents lay in random order: float64 [n].

    Args:
        documents: int [n], the number of the document of each window, rising.
    """
    places = np.random.default_rng(0).permutation(int(documents[-1]) + 1)
    return values[np.argsort(places[documents], kind="stable")]


def predicted_ratio(values: np.ndarray, num_samples: int, block_windows: int, open_blocks: int) -> float:
    """Returns the ratio of variances of a block shuffle, as the module's docstring derives it."""
    n, m = values.size, num_samples
    within = intraclass_correlation(values, block_windows)
    between = -(1 + (block_windows - 1) * within) / (n - block_windows)
    rounds, longer = divmod(m, open_blocks)
    num_pairs = 0.0  # of samples of one block, each with itself included
    for lanes, visits in ((open_blocks - longer, rounds), (longer, rounds + 1)):
        apart = np.arange(1, min(visits, block_windows))
        num_pairs += lanes * (visits + 2 * ((visits - apart) * (1 - apart / block_windows)).sum())
    c = num_pairs / m
    return float((1 + (c - 1) * within + (m - c) * between) / (1 - (m - 1) / (n - 1)))


def predicted_ratio_in_file_order(values: np.ndarray, num_samples: int) -> float:
    """Returns the ratio of variances of consecutive windows: one block, of as many windows as samples."""
    n, m = values.size, num_samples
    return (1 + (m - 1) * intraclass_correlation(values, m)) / (1 - (m - 1) / (n - 1)) if m > 1 else 1.0


def variances(
    values: np.ndarray, order: str, num_steps: list[int], batch_size: int, seq_len: int, num_epochs: int
) -> np.ndarray:
    """Returns mean squares of what means over steps deviate from the mean: [epochs, num_steps, values].

    Args:
        values: float64 [num_windows, values].
        order: a name of ORDERS. In file order each epoch begins at another window, and goes around.
    """
    n = len(values)
    deviations = values - values.mean(axis=0)
    squares = np.empty((num_epochs, len(num_steps), values.shape[1]))
    for epoch in range(num_epochs):
        if order == FILE_ORDER:
            windows = (np.arange(n) + np.random.default_rng(epoch).integers(n)) % n
        else:
            plan = ORDERS[order](epoch, n, batch_size, seq_len).bind((n + 1) * seq_len, seq_len)
            windows = plan.window_starts(np.arange(n)) // seq_len  # the phase is not counted
        dealt = deviations[windows]
        for i, steps in enumerate(num_steps):
            size = steps * batch_size
            groups = dealt[: n // size * size].reshape(n // size, size, -1)
            squares[epoch, i] = (groups.mean(axis=1) ** 2).mean(axis=0)
    return squares


def measure_quality(
    named: dict[str, np.ndarray],
    documents: np.ndarray,
    batch_size: int,
    seq_len: int,
    num_epochs: int = NUM_EPOCHS,
) -> dict[str, Any]:
    """Returns correlations by block size, and ratios of variances by order.

    Args:
        named: values of each window, float64 [n].
        documents: int [n], the number of the document of each window, rising.
    """
    n = next(iter(named.values())).size
    values = np.stack(list(named.values()), axis=1)
    num_steps = [steps for steps in NUM_STEPS if 2 * steps * batch_size <= n]
    rows = []
    for order in ORDERS:
        squares = variances(values, order, num_steps, batch_size, seq_len, num_epochs)
        for (i, steps), (j, name) in itertools.product(enumerate(num_steps), enumerate(named)):
            m = steps * batch_size
            full = values[:, j].var() / m * (1 - (m - 1) / (n - 1))
            ratios = squares[:, i, j] / full
            if order == FULL_SHUFFLE:
                predicted = 1.0
            elif order == FILE_ORDER:
                predicted = predicted_ratio_in_file_order(named[name], m)
            else:
                predicted = predicted_ratio(named[name], m, *BLOCKS[order].sizes(n, batch_size))
            row = {
                "order": order,
                "steps": steps,
                "value": name,
                "ratio": round(float(ratios.mean()), 3),
                "standard_error": round(float(ratios.std(ddof=1) / num_epochs**0.5), 3),
                "predicted": round(predicted, 3),
                "deviation_of_mean": float(f"{squares[:, i, j].mean() ** 0.5:.3g}"),
            }
            rows.append(row)
    return {
        "num_windows": n,
        "num_epochs": num_epochs,
        "deviation": {name: float(f"{x.std():.4g}") for name, x in named.items()},
        "sizes": {order: blocks.sizes(n, batch_size) for order, blocks in BLOCKS.items()},
        "intraclass_correlation": {name: _by_block_size(x) for name, x in named.items()},
        "with_documents_shuffled": {
            name: _by_block_size(shuffle_documents(x, documents)) for name, x in named.items()
        },
        "variance_over_full_shuffle": rows,
    }


def _by_block_size(values: np.ndarray) -> dict[int, float]:
    sizes = [size for size in BLOCK_SIZES if 2 * size < values.size]
    return {size: round(intraclass_correlation(values, size), 4) for size in sizes}


def full_size_costs() -> list[dict[str, Any]]:
    """Returns requests, their size and what is open at a time, for an epoch of the full-size file."""
    n, rows = FULL_NUM_WINDOWS, []
    for order, plan in ORDERS.items():
        row: dict[str, Any] = {"order": order}
        if order in BLOCKS:
            block_windows, open_blocks = BLOCKS[order].sizes(n, FULL_BATCH_SIZE)
            open_mib = block_windows * open_blocks * FULL_SEQ_LEN * 2 / 2**20
            row |= {"block_windows": block_windows, "open_blocks": open_blocks, "open_mib": open_mib}
        num_reads, num_tokens = n, n * (FULL_SEQ_LEN + 1)  # each window by itself
        reads = _all_reads(plan(0, n, FULL_BATCH_SIZE, FULL_SEQ_LEN))
        if reads is not None:
            num_reads, num_tokens = len(reads), int((reads[:, 1] - reads[:, 0]).sum())
        row["requests_per_1000_windows"] = round(1000 * num_reads / n, 3)
        row["kib_per_request"] = round(num_tokens / num_reads * 2 / 2**10, 1)
        rows.append(row)
    return rows


def _all_reads(plan: tl.Plan) -> np.ndarray | None:
    bound = plan.bind(FULL_NUM_TOKENS, FULL_SEQ_LEN)
    reads = np.empty((0, 2), np.int64)
    for begin in range(0, FULL_NUM_WINDOWS, 2**20):
        more = bound.reads(np.arange(begin, min(begin + 2**20, FULL_NUM_WINDOWS)))
        if more is None:
            return None
        reads = np.concatenate([reads, more])
        reads = reads[np.unique(reads[:, 0], return_index=True)[1]]
    return reads
