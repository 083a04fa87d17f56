"""Split sequences: the transforms on blocks whose rows are split over devices.

Each device has `seq_len / n` tokens of a row and the one that follows them, so inputs and targets
need no other device. Documents that begin or end before a shard reach it in one all-gather of two
numbers a row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tokenloader.batches.batch import Batch, Before, SegmentDocuments, mask_repeated_targets, next_token


def on_shards(
    transform: Callable[[jax.Array], Batch], mesh: Mesh, spec: tuple[Any, Any], seq_len: int
) -> Callable[..., Batch]:
    """Returns next_token or segment_documents for blocks whose rows are split; batches are split likewise.

    Returns:
        A function of a block [B, n * (T / n + 1)] and, if the plan hides targets, of the number of
        targets that count in each row, int32 [B, 1].
    """
    rows, columns = spec
    split, whole = PartitionSpec(rows, columns), PartitionSpec(rows)

    def make_shard(shard: jax.Array, *valid_targets: jax.Array) -> Batch:
        batch = next_token(shard)
        before = jax.lax.axis_index(columns) * batch.inputs.shape[1]
        if isinstance(transform, SegmentDocuments):
            batch = transform.segment(batch, _before(transform.ends(batch), before, columns))
        for counts in valid_targets:
            batch = mask_repeated_targets(batch, counts, seq_len, before)
        return batch

    def make_batch(block: jax.Array, *valid_targets: jax.Array) -> Batch:
        in_specs = (split, *(whole for _ in valid_targets))
        make_shards = jax.shard_map(make_shard, mesh=mesh, in_specs=in_specs, out_specs=split)
        batch: Batch = make_shards(block, *valid_targets)
        return batch

    return make_batch


def on_whole_rows(
    transform: Callable[[jax.Array], Any], mesh: Mesh, spec: tuple[Any, Any]
) -> Callable[..., Any]:
    """Returns a user's transform for blocks whose rows are split; it is given whole rows, [B, T + 1]."""
    rows, columns = spec
    # All shards of a row come to the same, which the type of an all-gather does not say.
    join: Callable[[jax.Array], jax.Array] = jax.shard_map(
        lambda shard: _join(shard, columns),
        mesh=mesh,
        in_specs=PartitionSpec(rows, columns),
        out_specs=PartitionSpec(rows),
        check_vma=False,
    )
    return lambda block: transform(join(block))


def _before(ends: jax.Array, num_columns: jax.Array, columns: Any) -> Before:
    """Returns the ends of documents to the left of this shard, gathered from all shards."""
    column = num_columns + jax.lax.broadcasted_iota(jnp.int32, ends.shape, 1)
    num_ends = ends.sum(axis=1, keepdims=True, dtype=jnp.int32)
    begin = jnp.where(ends, column + 1, 0).max(axis=1, keepdims=True)
    everywhere = jax.lax.all_gather(jnp.stack([num_ends, begin]), columns)  # [n, 2, B, 1]
    is_left = jnp.arange(everywhere.shape[0]) < jax.lax.axis_index(columns)
    left = jnp.where(is_left[:, None, None, None], everywhere, 0)
    return Before(num_columns, left[:, 0].sum(axis=0, dtype=jnp.int32), left[:, 1].max(axis=0))


def _join(shard: jax.Array, columns: Any) -> jax.Array:
    shards = jax.lax.all_gather(shard, columns, axis=1)  # [B, n, T / n + 1]
    inputs = shards[:, :, :-1].reshape(shard.shape[0], -1)
    return jnp.concatenate([inputs, shards[:, -1, -1:]], axis=1)
