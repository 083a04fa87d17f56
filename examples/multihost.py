"""Trains a GPT-2 over several processes: one global mesh, data x model, and one loader in each process.

    python examples/multihost.py --loopback 2      # here: two processes with two devices each
    srun --ntasks-per-node=1 python examples/multihost.py --data train.bin --dtype uint16   # Slurm
    python examples/multihost.py --data train.safetensors   # each pod on GKE: TPUs, or GPUs with jax[k8s]

All but the first line are the same program, started once a host with access to the same files:
`jax.distributed.initialize()` finds out from Slurm's or GKE's environment how many processes there are
and which this is. Stop it at any time; it goes on from its last checkpoint, also with other numbers of
processes and devices.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoints
import gpt2
import stdlib_corpus
import tokenloader as tl
import update


def main() -> None:
    args = parse_arguments()
    if args.loopback and args.process is None:
        sys.exit(run_loopback(args.loopback))
    if args.loopback:
        jax.distributed.initialize(args.coordinator, args.loopback, args.process)
    else:
        jax.distributed.initialize()

    # Neighbours in jax.devices() are close to each other: they share the model, the rest the data.
    mesh = jax.make_mesh(
        (jax.device_count() // args.model_parallel, args.model_parallel),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
    )
    by_rows = NamedSharding(mesh, P("data"))  # and the same on all devices of a model
    config = gpt2.Config(
        vocab_size=args.vocab_size,
        seq_len=args.seq_len,
        num_layers=args.layers,
        num_heads=args.heads,
        width=args.width,
        dtype=jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16,
    )
    schedule = update.learning_rate_schedule(3e-3, 20, args.steps)
    optimizer = update.adamw(schedule)
    state = init_state(config, optimizer, mesh)
    train_step = make_train_step(config, optimizer)

    tokens, plan, validation, validation_plan = open_data(args)
    # The same lines as on one device. Each process reads and sends the rows of its own devices.
    loader = tl.TokenLoader(tokens, args.batch_size, args.seq_len, plan=plan, sharding=by_rows)
    with loader, checkpoints.open_checkpoints(args.out) as manager:
        state, start = checkpoints.restore(manager, state, loader, {})
        if start:
            say(f"continuing after step {start}")
        previous = None
        for step, batch in zip(range(start + 1, args.steps + 1), loader, strict=False):
            state, loss = train_step(state, batch.inputs, batch.targets)
            # One step ahead of the devices is enough; many steps ahead, JAX's collectives on CPUs take
            # each other's threads and may wait for ever.
            jax.block_until_ready(previous)
            previous = loss
            if step % 10 == 0 or step == args.steps:
                say(f"step {step}: loss {float(loss):.4f}")
            if step % args.checkpoint_every == 0 or step == args.steps:
                checkpoints.save(manager, step, state, loader, {})

    loss, count = evaluate(
        config,
        state["params"],
        tl.TokenLoader(
            validation, args.batch_size, args.seq_len, plan=validation_plan, sharding=by_rows
        ),
    )
    say(f"validation loss {loss:.4f} over {count:,} targets, each counted once")


def init_state(
    config: gpt2.Config, optimizer: optax.GradientTransformation, mesh: Mesh
) -> update.State:
    """The state before the first step, each part made where it belongs."""
    init = partial(update.init_state, config, optimizer, 0)
    shapes = jax.eval_shape(init)
    replicated = NamedSharding(mesh, P())
    split = jax.tree.map_with_path(partial(_sharding_of, mesh), shapes["params"])
    moments = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        shapes["optimizer"],
        split,
        transform_non_params=lambda _: replicated,
    )
    shardings = {"params": split, "optimizer": moments, "step": replicated}
    return jax.jit(init, out_shardings=shardings)()


def _sharding_of(mesh: Mesh, path: Any, leaf: Any) -> NamedSharding:
    """The wide layer of each MLP is split over the devices of a model, and the embedding over its rows."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if name.endswith(("mlp_in.w", "mlp_in.b")):
        return NamedSharding(mesh, P(*(None,) * (leaf.ndim - 1), "model"))
    if name.endswith(("mlp_out.w", "token_embedding")):
        return NamedSharding(mesh, P("model"))
    return NamedSharding(mesh, P())


def make_train_step(config: gpt2.Config, optimizer: optax.GradientTransformation) -> Any:
    """(state, inputs, targets) -> (next state, loss). The compiler places the communication."""

    @partial(jax.jit, donate_argnums=0)
    def train_step(
        state: update.State, inputs: jax.Array, targets: jax.Array
    ) -> tuple[update.State, jax.Array]:
        def loss_of(params: gpt2.Params) -> jax.Array:
            return gpt2.loss_per_token(params, inputs, targets, config).mean()

        loss, gradient = jax.value_and_grad(loss_of)(state["params"])
        updates, moments = optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": moments, "step": state["step"] + 1}, loss

    return train_step


def evaluate(config: gpt2.Config, params: gpt2.Params, loader: tl.TokenLoader) -> tuple[float, int]:
    """The mean loss over all targets of one pass, and their number."""

    @jax.jit
    def add(params: gpt2.Params, total: Any, batch: tl.Batch) -> Any:
        losses = gpt2.loss_per_token(params, batch.inputs, batch.targets, config)
        return total[0] + losses.sum(where=batch.loss_mask), total[1] + batch.loss_mask.sum()

    total = jnp.float32(0), jnp.int32(0)
    with loader:
        for batch in loader:
            jax.block_until_ready(total)
            total = add(params, total, batch)
    return float(total[0] / total[1]), int(total[1])


def open_data(args: argparse.Namespace) -> tuple[tl.TokenArray, tl.Plan, tl.TokenArray, tl.Plan]:
    """Tokens and plan to train with, and to evaluate with.

    Of files that are given, the last hundredth is set aside; without any, it is Python's own source.
    """
    if args.data:
        tokens = tl.open_tokens(args.data, dtype=args.dtype)
        end = len(tokens) - len(tokens) // 100
        train = tl.Mixture({range(end): 1}, tl.ShuffledEpochs(seed=0))
        held_out = tl.Mixture({range(end, len(tokens)): 1}, tl.SequentialWindows())
        return tokens, train, tokens, held_out
    if jax.process_index() == 0:
        stdlib_corpus.write_stdlib_tokens(args.out)
    multihost_utils.sync_global_devices("the corpus is written")
    names = ("stdlib-train.safetensors", "stdlib-validation.safetensors")
    tokens, validation = (tl.open_tokens(args.out / name) for name in names)
    some = tl.open_tokens(validation[:20_001])
    return tokens, tl.ShuffledEpochs(seed=0), some, tl.SequentialWindows()


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def run_loopback(num_processes: int) -> int:
    """The same program as several processes of this machine: 0, or the exit status of one that failed."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        coordinator = f"localhost:{listener.getsockname()[1]}"
    # Without a GPU, each process gets two devices that are its share of the CPU.
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", **os.environ}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--coordinator", coordinator, "--process", str(i)], env=env
        )
        for i in range(num_processes)
    ]
    try:
        return max(abs(process.wait()) for process in processes)
    finally:
        for process in processes:
            process.terminate()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loopback", type=int, metavar="N", help="run as N processes, all here")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--data", nargs="+", metavar="FILE", help="default: Python's own source")
    parser.add_argument("--dtype", help="of files without a header, for example uint16")
    parser.add_argument("--out", type=Path, default=Path("runs/multihost"), help="of the run")
    for name, default, text in (
        ("--vocab-size", stdlib_corpus.VOCAB_SIZE, "number of token ids"),
        ("--seq-len", 64, "tokens in a sequence"),
        ("--layers", 2, "blocks"),
        ("--heads", 2, "attention heads in a block"),
        ("--width", 64, "of the residual stream"),
        ("--batch-size", 32, "sequences in an update, over all devices"),
        ("--model-parallel", 2, "devices that share a model"),
        ("--steps", 100, "updates in all"),
        ("--checkpoint-every", 50, "steps; the last has one too"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} (default: {default})")
    return parser.parse_args()


if __name__ == "__main__":
    main()
