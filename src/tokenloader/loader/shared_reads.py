"""Shared reads: the factor by which processes read more than they need, as their rows share blocks.

A process reads each block whole that its rows have a window of. Where the windows of a block are multiples
of batch_size samples apart, all are in one row, and the block is read for that row alone. Processes that
hold the same rows, as copies or as parts of the sequences, read the same on purpose.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from tokenloader.loader.sharding import Placement, processes_of
from tokenloader.plans.mixture import BoundMixture, Mixture
from tokenloader.plans.plan import BoundPlan, Plan, checked_reads
from tokenloader.plans.sequential_windows import SequentialWindows
from tokenloader.plans.shuffled_blocks import MAX_OPEN_BLOCKS, BoundShuffledBlocks, ShuffledBlocks
from tokenloader.tokens.token_array import TokenArray

# Samples whose reads are looked at: 64 of each block that ShuffledBlocks(seed) has open, in 10 ms.
_STRETCH = 1 << 16
_WORTH_TELLING = 1.05  # told as 1.1


def warn_of_shared_reads(
    tokens: TokenArray, plan: Plan, bound: BoundPlan, placement: Placement, *, stacklevel: int
) -> None:
    """Warns where processes read more than they need of a plan, and names sizes with which they do not.

    Nothing warns of SequentialWindows, whose neighbouring rows are of one block with all usual sizes, nor
    of tokens in RAM, which each process reads as a whole anyhow.
    """
    batch_size, seq_len = placement.batch_size, placement.seq_len
    if tokens.residency == "ram" or isinstance(_without_mixtures(plan)[1], SequentialWindows):
        return
    apart = samples_apart(bound)
    if apart is not None and apart % batch_size == 0:
        return
    held = rows_held(placement.sharding, batch_size, seq_len)
    try:
        factor = read_factor(bound, held, batch_size, len(tokens))
    except Exception:  # of the plan's; next() raises it, in every process as it is
        return
    if factor < _WORTH_TELLING:
        return
    better = blocks_near(plan, len(tokens), batch_size, seq_len)
    sizes = [" and ".join(f"{name}={size}" for name, size in better.items())] if better else []
    cause = f"not a multiple of batch_size={batch_size} samples apart"
    if apart is not None:
        samples = "sample" if apart == 1 else "samples"
        cause = f"{apart:,} {samples} apart, or a multiple, which batch_size={batch_size} does not divide"
        near = batch_sizes_near(batch_size, apart, held.shape[1])
        sizes = [f"batch_size={size}" for size in near] + sizes
    warnings.warn(
        f"the {len(held)} processes of this sharding will read {factor:.1f} times as much as they need, "
        f"because windows of one block are in rows of several of them: they are {cause}. Nearest sizes "
        f"that mend it: {', or '.join(sizes) or 'none'}",
        stacklevel=stacklevel + 1,
    )


def rows_held(sharding: Sharding, batch_size: int, seq_len: int) -> NDArray[np.bool_]:
    """Returns which process holds which of the equal parts of a batch's rows: [processes, parts]."""
    processes = processes_of(sharding)
    slices: Mapping[Any, tuple[slice, ...]] = sharding.devices_indices_map((batch_size, seq_len))
    begins = {device: rows.indices(batch_size)[0] for device, (rows, *_) in slices.items()}
    parts = sorted(set(begins.values()))
    held = np.zeros((len(processes), len(parts)), np.bool_)
    for device, begin in begins.items():
        held[processes.index(device.process_index), parts.index(begin)] = True
    return held


def read_factor(plan: BoundPlan, held: NDArray[np.bool_], batch_size: int, num_tokens: int) -> float:
    """Returns what all processes read, divided by what their rows need. held: as `rows_held` returns.

    The plan's first samples are looked at. Each block counts by how many of them are of it, so that a
    block of which they have only the end counts for little. Where a block has windows beyond these
    samples, the factor is a lower bound.
    """
    most = _STRETCH if plan.num_samples is None else min(_STRETCH, plan.num_samples)
    samples = np.arange(max(1, most // batch_size) * batch_size)
    reads = checked_reads(plan, samples, num_tokens)
    if reads is None:
        return 1.0
    _, blocks, num_samples = np.unique(reads[:, 0], return_inverse=True, return_counts=True)
    blocks = blocks.reshape(-1, held.shape[1], batch_size // held.shape[1])  # [steps, parts, rows]
    num_read = 0
    for own, num_processes in zip(*np.unique(held, axis=0, return_counts=True), strict=True):
        is_read = np.zeros(len(num_samples), np.bool_)
        is_read[blocks[:, own]] = True
        num_read += int(num_processes * num_samples[is_read].sum())
    num_needed = len(samples) * held.sum() / held.shape[1]
    return float(num_read / num_needed)


def samples_apart(plan: BoundPlan) -> int | None:
    """Returns a number that divides the distance, in samples, of any two windows of one block.

    None: there is none but 1, or the plan is not known.
    """
    if isinstance(plan, BoundShuffledBlocks):
        return plan.num_lanes
    if not isinstance(plan, BoundMixture):
        return None
    # Of any `total` samples in a row, `weight` are of a source.
    weights, total = plan.mixture.weights, sum(plan.mixture.weights)
    apart = 0
    for source, weight in zip(plan.plans, weights, strict=True):
        within = samples_apart(source)
        if within is None or within % weight:
            return None
        apart = math.gcd(apart, within // weight * total)
    return apart


def batch_sizes_near(batch_size: int, apart: int, num_parts: int) -> list[int]:
    """Returns the next batch sizes below and above that divide `apart` and into parts; [] if none do."""
    below = (size for size in range(batch_size - num_parts, 0, -num_parts) if apart % size == 0)
    # A size that is far above is no help, and long to find.
    most = min(apart, 16 * batch_size)
    above = (size for size in range(batch_size + num_parts, most + 1, num_parts) if apart % size == 0)
    return [size for size in (next(below, None), next(above, None)) if size is not None]


def blocks_near(plan: Plan, num_tokens: int, batch_size: int, seq_len: int) -> dict[str, int]:
    """Returns the nearest arguments of ShuffledBlocks that keep the windows of a block in one row.

    The arguments are those of open_blocks and block_tokens that differ from the plan's; {} if there are
    none. Blocks are halved until the tokens have as many as are to be open.
    """
    mixtures, plan = _without_mixtures(plan)
    if not isinstance(plan, ShuffledBlocks):
        return {}
    unit = batch_size  # open_blocks is to be a multiple of it; see samples_apart
    for mixture in mixtures:
        unit = unit // math.gcd(unit, sum(mixture.weights)) * math.lcm(*mixture.weights)
    below = plan.open_blocks // unit * unit
    nearest = sorted((below, below + unit), key=lambda number: abs(number - plan.open_blocks))
    numbers = [number for number in nearest if 0 < number <= MAX_OPEN_BLOCKS]
    block_tokens = plan.block_tokens
    while block_tokens >= 2 * seq_len:
        for open_blocks in numbers:
            better: Plan = replace(plan, block_tokens=block_tokens, open_blocks=open_blocks)
            for mixture in reversed(mixtures):
                better = Mixture(dict(zip(mixture.ranges, mixture.weights, strict=True)), better)
            apart = samples_apart(better.bind(num_tokens, seq_len))
            if apart is not None and apart % batch_size == 0:
                found = {"open_blocks": open_blocks, "block_tokens": block_tokens}
                return {name: size for name, size in found.items() if size != getattr(plan, name)}
        block_tokens //= 2
    return {}


def _without_mixtures(plan: Plan) -> tuple[list[Mixture], Plan]:
    """Returns the mixtures around a plan, the outermost first, and what is within them."""
    mixtures = []
    while isinstance(plan, Mixture):
        mixtures.append(plan)
        plan = plan.plan
    return mixtures, plan
