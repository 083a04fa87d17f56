"""The mean loss of a model on a token file, exact: every target counts once.

SequentialWindows goes through the file once. To fill its last batch it repeats some targets, which
loss_mask hides, so the sum of the losses and their number are those of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gpt2
import tokenloader as tl

EvalStep = Callable[..., tuple[jax.Array, jax.Array]]


def make_eval_step(config: gpt2.Config, mesh: Mesh) -> EvalStep:
    """(params, inputs, targets, loss_mask) -> sum of the losses that count, and their number.

    Both are arrays [devices], each device's own: evaluating needs no communication.
    """

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data"), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    def eval_step(
        params: gpt2.Params, inputs: jax.Array, targets: jax.Array, loss_mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        losses = gpt2.loss_per_token(params, inputs, targets, config)
        return losses.sum(where=loss_mask)[None], loss_mask.sum()[None]

    return eval_step


def mean_loss(
    eval_step: EvalStep,
    params: gpt2.Params,
    *,
    tokens: tl.TokenArray,
    batch_size: int,
    seq_len: int,
    sharding: NamedSharding,
) -> float:
    """Mean loss over all targets of `tokens`, in nats."""
    plan = tl.SequentialWindows()
    with tl.TokenLoader(tokens, batch_size, seq_len, plan=plan, sharding=sharding) as loader:
        sums = [eval_step(params, batch.inputs, batch.targets, batch.loss_mask) for batch in loader]
    # Fetched only now, so that the devices did not wait in between; added up in float64.
    loss, count = np.array(jax.device_get(sums), np.float64).sum(axis=(0, 2))
    return float(loss / count)
