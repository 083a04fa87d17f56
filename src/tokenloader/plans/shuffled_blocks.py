"""ShuffledBlocks: every window of an epoch exactly once, near-random, at the speed of large reads.

The n windows of an epoch are cut into blocks of W, the last one shorter. An axis has the blocks one after
the other, in an order of the epoch's own. The axis is cut into G lanes of equal length (the first n % G are
one window longer), and samples are dealt from the lanes in turn: sample i of an epoch is of lane i % G.

    axis     | block 7   | block 2   | block 9   | block 0   | block 4   |  in keyed order, n positions
    lanes    |         lane 0            |          lane 1           | ...  G of them
    visits     7 8 9 A 0 1 2 3 4 5 6 ...   9 A B 0 1 2 3 4 5 6 7 8 ...      0: the lane's first

Each lane begins inside itself and goes around once. The place is chosen so that lane j enters a new block
in the rounds r with (r + j * W // G) % W == 0, until it goes around, and then in rounds as many later for
all; and so that the lanes go around at an even rate over the whole epoch. So G blocks are open at any time,
and lanes come to the ends of their blocks one by one: of 4,000 lengths with four blocks a lane or more, in
the rounds that open 20 on average at most 41 opened, 24 in the median. But an epoch begins with all G.

A segment is what a lane visits of a block in one go: all of it, or a part, where an end of the lane or its
first place cuts the block. The windows of a segment are in a keyed order among themselves. So a segment is
read once, and all that is read is used: in an epoch n windows, and one token more for each segment. Rows of
a batch, as many as there are lanes, are of different segments.

At last all windows are rotated by an amount of the epoch's own, which moves cuts and the short block.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenloader.plans.epochs import Epochs, checked_num_epochs, epoch_words
from tokenloader.plans.permutation import NUM_ROUNDS, permute
from tokenloader.plans.philox import SHUFFLED_BLOCKS
from tokenloader.plans.plan import BoundPlan, Plan, checked_count, checked_seed
from tokenloader.plans.shuffled_epochs import ShuffledEpochs
from tokenloader.plans.split_mix import split_mix

_MAX_BLOCK_TOKENS, MAX_OPEN_BLOCKS = 2**40, 2**24  # their product is below 2**64


@dataclass(frozen=True)
class ShuffledBlocks(Plan):
    """Every window of an epoch exactly once, near-random, at the speed of large reads.

    For slow disks, network file systems and buckets. An epoch has the windows of `ShuffledEpochs`. Blocks
    of consecutive windows are shuffled, and so are the windows of each block; `open_blocks` of the blocks
    are in use at a time, and each row of a batch is of another of them, up to open_blocks rows. A block is
    read once and stays in the page cache while it is in use: with the defaults and uint16 that takes
    512 MiB.

    Args:
        seed: 0 <= seed < 2**64. Orders and phases are hashes of (seed, epoch).
        block_tokens: tokens in a block, 1 to 2**40, rounded down to whole windows. Below two windows the
            plan is ShuffledEpochs(seed, num_epochs). 2**18 tokens of uint16 are reads of 512 KiB.
        open_blocks: blocks in use at a time, 1 to 2**24. Where the tokens have fewer, it is halved until
            they have as many. Processes read different blocks where it is a multiple of the batch size, and
            in a Mixture of each source's rows in a batch. docs/plans.md says how to choose both.
        num_epochs: epochs after which the plan ends; None: it never does. The order does not depend on
            it. A last batch that would not be full is left out.

    Raises:
        ValueError: an argument is out of its range. TypeError: it is no integer.

    Example:
        >>> plan = ShuffledBlocks(seed=0, block_tokens=40, open_blocks=2).bind(num_tokens=170, seq_len=10)
        >>> starts = plan.window_starts(range(16))
        >>> sorted(starts // 10) == list(range(16))
        True
    """

    __module__ = "tokenloader"
    seed: int
    block_tokens: int = 2**18
    open_blocks: int = 1024
    num_epochs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked_seed("ShuffledBlocks", self.seed))
        for name, most in (("block_tokens", _MAX_BLOCK_TOKENS), ("open_blocks", MAX_OPEN_BLOCKS)):
            object.__setattr__(self, name, checked_count("ShuffledBlocks", name, getattr(self, name), most))
        object.__setattr__(self, "num_epochs", checked_num_epochs("ShuffledBlocks", self.num_epochs))

    def bind(self, num_tokens: int, seq_len: int) -> BoundPlan:
        """See `Plan.bind`."""
        epochs = Epochs.over(num_tokens, seq_len, self.num_epochs)
        block_windows = self.block_tokens // epochs.seq_len
        if block_windows < 2:
            return ShuffledEpochs(self.seed, self.num_epochs).bind(num_tokens, seq_len)
        num_lanes, num_blocks = self.open_blocks, max(1, epochs.num_windows // block_windows)
        while num_lanes > num_blocks:
            num_lanes //= 2
        return BoundShuffledBlocks(self, epochs, min(block_windows, epochs.num_windows), num_lanes)


class _Visit(NamedTuple):
    """Where samples are on the axis of their epoch, and the segments that they are of: uint64 [n] each."""

    position: NDArray[np.uint64]
    begin: NDArray[np.uint64]  # first position of the segment
    size: NDArray[np.uint64]  # windows in it


# Random words of an epoch: keys of the order in segments, and of that of blocks; seeds of the rest.
_SEGMENTS, _BLOCKS = slice(0, NUM_ROUNDS), slice(NUM_ROUNDS, 2 * NUM_ROUNDS)
_SEGMENT, _ROTATION, _PHASE, _NUM_WORDS = range(2 * NUM_ROUNDS, 2 * NUM_ROUNDS + 4)


@dataclass(frozen=True)
class BoundShuffledBlocks(BoundPlan):
    """Shuffled blocks over a token axis of one length."""

    plan: ShuffledBlocks
    epochs: Epochs
    block_windows: int  # W
    num_lanes: int  # G; no lane is shorter than a block

    @property
    def num_samples(self) -> int | None:
        return self.epochs.num_samples

    def window_starts(self, samples: ArrayLike) -> NDArray[np.int64]:
        epoch, index = self.epochs.locate(samples)
        words = epoch_words(self.plan.seed, SHUFFLED_BLOCKS, epoch, _NUM_WORDS)
        visit = self._visit(index)
        first = self._first_window(visit, words)
        return self.epochs.starts(self._rotated(first + self._within(visit, words), words), words[_PHASE])

    def reads(self, samples: ArrayLike) -> NDArray[np.int64]:
        epoch, index = self.epochs.locate(samples)
        words = epoch_words(self.plan.seed, SHUFFLED_BLOCKS, epoch, _NUM_WORDS)
        visit, n = self._visit(index), np.uint64(self.epochs.num_windows)
        begin = self._rotated(self._first_window(visit, words), words)
        end = begin + visit.size
        if (two := end > n).any():  # rotated to both ends of the epoch: two reads
            own = words if words.ndim == 1 else words[:, two]
            is_behind = begin[two] + self._within(_Visit(*(field[two] for field in visit)), own) >= n
            begin[two], end[two] = (
                np.where(is_behind, np.uint64(0), begin[two]),
                np.where(is_behind, end[two] - n, n),
            )
        starts, stops = (self.epochs.starts(window, words[_PHASE]) for window in (begin, end))
        return np.stack([starts, stops + 1], axis=1)  # a window ends with the first token of the next

    def key(self, until_sample: int) -> str:
        block_tokens, open_blocks = self.plan.block_tokens, self.plan.open_blocks
        return f"ShuffledBlocks(seed={self.plan.seed}, {block_tokens=}, {open_blocks=})"

    def _visit(self, index: NDArray[np.uint64]) -> _Visit:
        """Finds where samples of an epoch are."""
        size, num_lanes = np.uint64(self.block_windows), np.uint64(self.num_lanes)
        least, longer = map(np.uint64, divmod(self.epochs.num_windows, self.num_lanes))
        turn = index // num_lanes
        lane = index - turn * num_lanes
        begin = lane * least + np.minimum(lane, longer)
        end = begin + least + (lane < longer)
        # Multiples of the golden section of a length spread evenly over it, however many there are.
        room = self.epochs.num_windows // self.num_lanes - self.block_windows + 1
        section = np.uint64((math.isqrt(5 * room**2) - room) // 2)
        inside = begin + lane * section % np.uint64(room)
        first = inside + (lane * size // num_lanes + size - inside % size) % size  # that the lane visits
        position = first + turn
        position = np.where(position < end, position, position - end + begin)
        block = position // size * size
        is_late = position < first  # the lane has gone around
        segment = np.maximum(np.maximum(block, begin), np.where(is_late, np.uint64(0), first))
        segment_end = np.minimum(np.minimum(block + size, end), np.where(is_late, first, end))
        return _Visit(position, segment, segment_end - segment)

    def _within(self, visit: _Visit, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns which window of its segment, in file order, each sample is."""
        # One word for a segment, not one for each round: no test tells them apart, at a ninth of the time.
        keys = words[_SEGMENTS].reshape(NUM_ROUNDS, -1) + split_mix(words[_SEGMENT], visit.begin)
        size = self.block_windows if (visit.size == self.block_windows).all() else visit.size
        return permute(visit.position - visit.begin, size, keys)

    def _first_window(self, visit: _Visit, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns the first window of each segment, before the rotation."""
        size, num_blocks = np.uint64(self.block_windows), self.epochs.num_windows // self.block_windows
        block = visit.begin // size
        moved = permute(np.minimum(block, np.uint64(num_blocks - 1)), num_blocks, words[_BLOCKS])
        first: NDArray[np.uint64] = (
            visit.begin + (np.where(block < num_blocks, moved, block) - block) * size
        )
        return first

    def _rotated(self, window: NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        n = np.uint64(self.epochs.num_windows)
        rotated: NDArray[np.uint64] = (window + words[_ROTATION] % n) % n
        return rotated
