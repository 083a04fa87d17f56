"""Orders of a run's windows that the program shuffle compares, in proportion to the size of the data.

What decides the quality of a block shuffle is the share of the epoch that is open at a time, and how many
blocks that is for each row of a batch; a count of windows means something else in a small corpus.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tokenloader as tl
from benchmarks import token_file

# The run that ShuffledBlocks' defaults are for: the full-size file, in the batches of the GPT-2 example.
FULL_SEQ_LEN, FULL_BATCH_SIZE = 1024, 512
FULL_NUM_WINDOWS = token_file.FULL_NUM_TOKENS // FULL_SEQ_LEN - 1
_DEFAULT = tl.ShuffledBlocks(seed=0)
_OPEN_SHARE = _DEFAULT.open_blocks * _DEFAULT.block_tokens / token_file.FULL_NUM_TOKENS


class Blocks(NamedTuple):
    """Proportions of a block shuffle."""

    open_share: float  # of the windows of an epoch
    open_blocks_per_row: float  # rows of a batch

    def sizes(self, num_windows: int, batch_size: int) -> tuple[int, int]:
        """Returns windows in a block, and open blocks."""
        open_blocks = max(1, round(self.open_blocks_per_row * batch_size))
        return max(2, round(self.open_share * num_windows / open_blocks)), open_blocks

    def plan(self, seed: int, num_windows: int, batch_size: int, seq_len: int) -> tl.Plan:
        """Returns the plan of these proportions."""
        block_windows, open_blocks = self.sizes(num_windows, batch_size)
        return tl.ShuffledBlocks(seed, block_tokens=block_windows * seq_len, open_blocks=open_blocks)


FULL_SHUFFLE, FILE_ORDER = "ShuffledEpochs", "SequentialWindows"

# The defaults; four times as many blocks open; as much open, in blocks eight times as large, one for each
# row; and no more open than with the defaults, in blocks 16 times as large, each shared by eight rows.
BLOCKS = {
    "ShuffledBlocks, default": Blocks(_OPEN_SHARE, _DEFAULT.open_blocks / FULL_BATCH_SIZE),
    "ShuffledBlocks, more open": Blocks(4 * _OPEN_SHARE, 4 * _DEFAULT.open_blocks / FULL_BATCH_SIZE),
    "ShuffledBlocks, coarse": Blocks(4 * _OPEN_SHARE, 1.0),
    "ShuffledBlocks, few open": Blocks(_OPEN_SHARE, 1 / 8),
}

# A plan by seed, windows of an epoch, batch size and seq_len.
ORDERS: dict[str, Callable[[int, int, int, int], tl.Plan]] = {
    FULL_SHUFFLE: lambda seed, *_: tl.ShuffledEpochs(seed),
    **{name: blocks.plan for name, blocks in BLOCKS.items()},
    FILE_ORDER: lambda *_: tl.SequentialWindows(),
}
