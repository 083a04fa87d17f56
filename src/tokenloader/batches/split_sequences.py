"""Split sequences: the transforms on blocks whose rows are cut into pieces, one to a shard.

Each device has `seq_len / n` tokens of a row and the one that follows them, so inputs and targets
need no other device. What a position owes to the tokens before its piece (documents) crosses in one
all-gather of two numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tokenloader.batches.batch import Batch, Before, SegmentDocuments, hide_seen_targets, next_token


def on_pieces(
    transform: Callable[[jax.Array], Batch], mesh: Mesh, spec: tuple[Any, Any], seq_len: int
) -> Callable[..., Batch]:
    """next_token or segment_documents for blocks whose rows are cut, making batches that are cut likewise.

    Returns:
        A function of a block [B, n * (T / n + 1)] and, if the plan hides targets, of how many count in
        each row, int32 [B, 1].
    """
    rows, columns = spec
    split, whole = PartitionSpec(rows, columns), PartitionSpec(rows)

    def of_piece(piece: jax.Array, *new_targets: jax.Array) -> Batch:
        batch = next_token(piece)
        before = jax.lax.axis_index(columns) * batch.inputs.shape[1]
        if isinstance(transform, SegmentDocuments):
            ends = batch.inputs == transform.eos_id
            batch = transform.of(batch, _before(ends, before, columns))
        for counts in new_targets:
            batch = hide_seen_targets(batch, counts, seq_len, before)
        return batch

    def of_block(block: jax.Array, *new_targets: jax.Array) -> Batch:
        in_specs = (split, *(whole for _ in new_targets))
        of_pieces = jax.shard_map(of_piece, mesh=mesh, in_specs=in_specs, out_specs=split)
        batch: Batch = of_pieces(block, *new_targets)
        return batch

    return of_block


def on_whole(
    transform: Callable[[jax.Array], Any], mesh: Mesh, spec: tuple[Any, Any]
) -> Callable[..., Any]:
    """A user's transform, which is given whole blocks [B, T + 1]: every shard of a row then holds it."""
    rows, columns = spec
    # All shards of a row come to the same, which the type of an all-gather does not say.
    join: Callable[[jax.Array], jax.Array] = jax.shard_map(
        lambda piece: _join(piece, columns),
        mesh=mesh,
        in_specs=PartitionSpec(rows, columns),
        out_specs=PartitionSpec(rows),
        check_vma=False,
    )
    return lambda block: transform(join(block))


def _before(ends: jax.Array, num_columns: jax.Array, columns: Any) -> Before:
    """What the pieces to the left of this one have to say, gathered from all."""
    column = num_columns + jax.lax.broadcasted_iota(jnp.int32, ends.shape, 1)
    num_ends = ends.sum(axis=1, keepdims=True, dtype=jnp.int32)
    begin = jnp.where(ends, column + 1, 0).max(axis=1, keepdims=True)
    of_all = jax.lax.all_gather(jnp.stack([num_ends, begin]), columns)  # [n, 2, B, 1]
    is_left = jnp.arange(of_all.shape[0]) < jax.lax.axis_index(columns)
    of_left = jnp.where(is_left[:, None, None, None], of_all, 0)
    return Before(
        num_columns, of_left[:, 0].sum(axis=0, dtype=jnp.int32), of_left[:, 1].max(axis=0)
    )


def _join(piece: jax.Array, columns: Any) -> jax.Array:
    pieces = jax.lax.all_gather(piece, columns, axis=1)  # [B, n, T / n + 1]
    inputs = pieces[:, :, :-1].reshape(piece.shape[0], -1)
    return jnp.concatenate([inputs, pieces[:, -1, -1:]], axis=1)
