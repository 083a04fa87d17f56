"""Batch, and the transforms that make one of a block of tokens, on the device.

A block is what crosses to the device: integers [rows, seq_len + 1], 2 bytes a token. Shifting it
into inputs and targets and widening to int32 there, under jit, moves a quarter of the bytes that
two int32 arrays would.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Batch(NamedTuple):
    """One training batch; a pytree of jax arrays, B = batch_size and T = seq_len.

    Attributes:
        inputs: int32 [B, T], token ids.
        targets: int32 [B, T], the token after each input.
        loss_mask: bool [B, T], False where a target must not count; None where all of them count. It
            is there in every batch or in none, so that the train step is traced once.
        segment_ids: int32 [B, T], which document of its row an input belongs to, counted from 1 (0 is
            padding by convention, and there is none), or None.
        positions: int32 [B, T], position within the document, or within the row for the document it
            begins inside of; or None.
    """

    inputs: jax.Array
    targets: jax.Array
    loss_mask: jax.Array | None = None
    segment_ids: jax.Array | None = None
    positions: jax.Array | None = None


def next_token(block: jax.Array) -> Batch:
    """Inputs, and as targets the tokens that follow: int32 [B, T] of a block [B, T + 1].

    Example:
        >>> next_token(jnp.array([[5, 6, 7]], jnp.uint16)).targets
        Array([[6, 7]], dtype=int32)
    """
    return Batch(inputs=block[:, :-1].astype(jnp.int32), targets=block[:, 1:].astype(jnp.int32))


class Before(NamedTuple):
    """What lies before some columns of a batch; numbers of rows are int32 [B, 1], or 0 for all."""

    num_columns: jax.Array | int
    num_ends: jax.Array | int  # of a row's documents, up to there
    last_begin: jax.Array | int  # the column after the last of them, or 0


@dataclass(frozen=True)
class SegmentDocuments:
    """A value and not a closure, so that loaders with the same one share its compiled code."""

    eos_id: int

    def __call__(self, block: jax.Array) -> Batch:
        return self.of(next_token(block), Before(0, 0, 0))

    def of(self, batch: Batch, before: Before) -> Batch:
        """The batch with its documents, where its columns come after others of the same rows."""
        ends = batch.inputs == self.eos_id
        column = before.num_columns + jax.lax.broadcasted_iota(jnp.int32, ends.shape, 1)
        # A document begins in the column after an end of text; a running maximum carries its column
        # on to the columns that follow.
        begins = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
        begin = jax.lax.cummax(jnp.where(begins, column, 0), axis=1)
        return batch._replace(
            loss_mask=~ends,
            segment_ids=1 + before.num_ends + jnp.cumsum(begins, axis=1, dtype=jnp.int32),
            positions=column - jnp.maximum(begin, before.last_begin),
        )


def segment_documents(eos_id: int) -> Callable[[jax.Array], Batch]:
    """A transform for windows that hold several documents, each ended by the token eos_id.

    Beside inputs and targets it gives segment_ids and positions, which restart after each end of
    text, and a loss_mask that hides the targets across a document's end: where the input is
    eos_id, the target is the first token of an unrelated document. The end of text itself
    belongs to the document it ends, and is a target that counts.

    Args:
        eos_id: the id that ends a document, for example 50256 for GPT-2's ids.

    Raises:
        TypeError: eos_id is not an integer.

    Example:
        >>> batch = segment_documents(eos_id=0)(jnp.array([[5, 0, 6, 7, 8]], jnp.uint16))
        >>> batch.segment_ids, batch.positions
        (Array([[1, 1, 2, 2]], dtype=int32), Array([[0, 1, 0, 1]], dtype=int32))
        >>> batch.loss_mask
        Array([[ True, False,  True,  True]], dtype=bool)
    """
    return SegmentDocuments(operator.index(eos_id))


def hide_seen_targets(
    batch: Batch, new_targets: jax.Array, seq_len: int, num_columns_before: jax.Array | int = 0
) -> Batch:
    """The batch with all but the last new_targets[i, 0] targets of row i hidden by its loss_mask.

    Args:
        new_targets: int32 [B, 1].
        seq_len: targets in a whole row.
        num_columns_before: of the row, where the batch begins behind them.
    """
    column = num_columns_before + jax.lax.broadcasted_iota(jnp.int32, batch.targets.shape, 1)
    new = column >= seq_len - new_targets
    return batch._replace(loss_mask=new if batch.loss_mask is None else batch.loss_mask & new)
