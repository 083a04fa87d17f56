"""What the programs do with the model: its first state, one update from one batch, its exact mean loss.

A mesh has the axis "data", over which the rows of a batch are split, and may have the axis "model",
over which the largest parameters are split; the other parameters lie on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gpt2
import tokenloader as tl

State = dict[str, Any]  # params; optimizer, its state; step, int32, the updates made so far
Loss = Callable[[gpt2.Params, jax.Array, jax.Array], jax.Array]  # params, inputs, targets
LossAndGradient = Callable[[gpt2.Params, jax.Array, jax.Array], tuple[jax.Array, gpt2.Params]]
TrainStep = Callable[[State, jax.Array, jax.Array], tuple[State, dict[str, jax.Array]]]


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


def init_state(
    config: gpt2.Config, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int
) -> State:
    """The state before the first update, each part made on the devices that keep it."""

    def init() -> State:
        params = gpt2.init(config, jax.random.key(seed))
        return {"params": params, "optimizer": optimizer.init(params), "step": jnp.int32(0)}

    shapes = jax.eval_shape(init)
    replicated = NamedSharding(mesh, P())
    params = jax.tree.map_with_path(partial(_param_sharding, mesh), shapes["params"])
    optimizer_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        shapes["optimizer"],
        params,
        transform_non_params=lambda _: replicated,
    )
    shardings = {"params": params, "optimizer": optimizer_state, "step": replicated}
    return jax.jit(init, out_shardings=shardings)()


def _param_sharding(mesh: Mesh, path: Any, param: Any) -> NamedSharding:
    """Split the wide layer of each MLP, and the rows of the embedding, over the axis "model"."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    spec = P()
    if "model" in mesh.axis_names:
        if name.endswith(("mlp_in.w", "mlp_in.b")):
            spec = P(*(None,) * (param.ndim - 1), "model")
        elif name.endswith(("mlp_out.w", "token_embedding")):
            spec = P("model")
    return NamedSharding(mesh, spec)


def count_micro_batches(batch_size: int, num_devices: int, most_rows: int) -> int:
    """The fewest equal parts of a device's rows that have at most `most_rows` each.

    Raises: ValueError if batch_size does not divide over the devices.
    """
    if most_rows < 1:
        raise ValueError(f"micro-batch {most_rows}; expected 1 or more")
    rows, rest = divmod(batch_size, num_devices)
    if rest or not rows:
        raise ValueError(f"batch size {batch_size} does not divide over {num_devices} devices")
    return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most_rows)


def batch_loss(config: gpt2.Config) -> Loss:
    """(params, inputs, targets) -> the mean loss of a batch, in nats."""

    def loss(params: gpt2.Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return gpt2.loss_per_token(params, inputs, targets, config).mean()

    return loss


def accumulate(loss: Loss, mesh: Mesh, num_micro_batches: int) -> LossAndGradient:
    """(params, inputs, targets) -> the mean loss and its gradient, computed in micro-batches.

    For a mesh of "data" alone: every device holds all parameters, and its own rows of each batch.

    Gradients are accumulated in here and not over several batches of the loader. So an update is one
    batch whatever fits into memory, and a checkpoint never falls in the middle of one.
    """

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

    return loss_and_gradient


def make_train_step(
    loss_and_gradient: LossAndGradient,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
) -> TrainStep:
    """(state, inputs, targets) -> (next state, metrics); the first state is used up.

    Args:
        loss_and_gradient: `accumulate(...)`, or `jax.value_and_grad(loss)`, which leaves the
            communication between devices to the compiler and takes any mesh.
        optimizer: as `adamw` makes it.
        schedule: the optimizer's, to report the learning rate.
    """

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


@partial(jax.jit, static_argnums=0)
def _loss_sum(config: gpt2.Config, params: gpt2.Params, batch: tl.Batch) -> tuple[jax.Array, jax.Array]:
    losses = gpt2.loss_per_token(params, batch.inputs, batch.targets, config)
    return losses.sum(where=batch.loss_mask), batch.loss_mask.sum()


def mean_loss(
    config: gpt2.Config,
    params: gpt2.Params,
    tokens: tl.TokenArray,
    batch_size: int,
    sharding: NamedSharding,
) -> tuple[float, int]:
    """The mean loss in nats over all targets of `tokens`, each counted once, and their number.

    SequentialWindows goes through the tokens once. To fill its last batch it repeats some targets, which
    loss_mask hides.
    """
    plan = tl.SequentialWindows()
    sums: list[tuple[jax.Array, jax.Array]] = []
    with tl.TokenLoader(tokens, batch_size, config.seq_len, plan=plan, sharding=sharding) as loader:
        for batch in loader:
            sums.append(_loss_sum(config, params, batch))
            jax.block_until_ready(sums[-2:-1])  # one batch ahead of the devices, as in training
    # Fetched only now, so that the devices did not wait in between; added up in float64.
    loss, count = np.array(jax.device_get(sums), np.float64).sum(axis=0)
    return float(loss / count), int(count)
