"""One update of the model from one batch: optimizer, micro-batches, devices.

Data parallel: every device holds all parameters, and its own rows of each batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gpt2

State = dict[str, Any]  # params; optimizer, its state; step, int32, the updates made so far
TrainStep = Callable[..., tuple[State, dict[str, jax.Array]]]


def learning_rate_schedule(peak: float, num_warmup_steps: int, num_steps: int) -> optax.Schedule:
    """A linear warm-up from near zero, then a cosine down to a tenth of the peak."""
    num_warmup_steps = min(num_warmup_steps, num_steps // 2)  # a trial run may be of three steps
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (num_warmup_steps + 1),
        peak_value=peak,
        warmup_steps=num_warmup_steps,
        decay_steps=num_steps,
        end_value=0.1 * peak,
    )


def adamw(schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW with gradients clipped, and weight decay on matrices and embeddings only."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=gpt2.decay_mask),
    )


def init_state(config: gpt2.Config, optimizer: optax.GradientTransformation, seed: int) -> State:
    """The state before the first update."""
    params = gpt2.init(config, jax.random.key(seed))
    return {"params": params, "optimizer": optimizer.init(params), "step": jnp.int32(0)}


def count_micro_batches(batch_size: int, num_devices: int, most_rows: int) -> int:
    """The fewest equal parts of a device's rows that have at most `most_rows` each.

    Raises: ValueError if batch_size does not divide over the devices.
    """
    if most_rows < 1:
        raise ValueError(f"micro-batch {most_rows}; it must be 1 or more")
    rows, rest = divmod(batch_size, num_devices)
    if rest or not rows:
        raise ValueError(f"batch size {batch_size} does not divide over {num_devices} devices")
    return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most_rows)


def make_train_step(
    config: gpt2.Config,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    mesh: Mesh,
    num_micro_batches: int,
) -> TrainStep:
    """(state, inputs, targets) -> (next state, metrics); the first state is used up.

    Gradients are accumulated in here and not over several batches of the loader. So an update is one
    batch whatever fits into memory, and a checkpoint never falls in the middle of one.
    """

    def loss(params: gpt2.Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return gpt2.loss_per_token(params, inputs, targets, config).mean()

    # shard_map spells out what each device does: its own rows, part after part, then one mean over
    # the devices. Left to the compiler, or with check_vma, there might be a mean after every part.
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    def loss_and_gradient(
        params: gpt2.Params, inputs: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, gpt2.Params]:
        def add_part(total: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *part)), None

        seq_len = inputs.shape[1]
        parts = tuple(x.reshape(num_micro_batches, -1, seq_len) for x in (inputs, targets))
        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add_part, zero, parts)
        mean = jax.tree.map(lambda x: x / num_micro_batches, total)  # the parts are of one size
        return jax.lax.pmean(mean, "data")

    @partial(jax.jit, donate_argnums=0)
    def train_step(
        state: State, inputs: jax.Array, targets: jax.Array
    ) -> tuple[State, dict[str, jax.Array]]:
        params, step = state["params"], state["step"]
        loss, gradient = loss_and_gradient(params, inputs, targets)
        updates, optimizer_state = optimizer.update(gradient, state["optimizer"], params)
        metrics = {
            "loss": loss,
            "learning_rate": schedule(step),
            "gradient_norm": optax.tree.norm(gradient),
        }
        params = optax.apply_updates(params, updates)
        return {"params": params, "optimizer": optimizer_state, "step": step + 1}, metrics

    return train_step
