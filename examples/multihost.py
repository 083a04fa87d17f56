"""Trains a GPT-2 over several processes: one global mesh, data x model, and one loader in each process.

    python examples/multihost.py --loopback 2      # here: two processes with two devices each
    srun --ntasks-per-node=1 python examples/multihost.py --data train.bin --dtype uint16   # Slurm
    python examples/multihost.py --data train.safetensors   # each pod on GKE: TPUs, or GPUs with jax[k8s]

Slurm and GKE start the program once on each host, with access to the same files;
`jax.distributed.initialize()` reads the number of processes and its own rank from their environment.
Stop it at any time: the same command goes on from the last checkpoint, also with other numbers of
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

import jax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoints
import options
import stdlib_corpus
import tokenloader as tl
import training


def main() -> None:
    args = parse_arguments()
    if args.loopback and args.process is None:
        sys.exit(run_loopback(args.loopback))
    if args.loopback:
        jax.distributed.initialize(args.coordinator, args.loopback, args.process)
    else:
        jax.distributed.initialize()

    # Neighbours in jax.devices() are close to each other, so they share the model.
    mesh = jax.make_mesh(
        (jax.device_count() // args.model_parallel, args.model_parallel),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
    )
    by_rows = NamedSharding(mesh, P("data"))  # the devices that share a model get the same rows
    config = options.model_config(args)
    schedule = training.learning_rate_schedule(3e-3, 20, args.steps)
    optimizer = training.adamw(schedule)
    loss_and_gradient = jax.value_and_grad(training.batch_loss(config))
    train_step = training.make_train_step(loss_and_gradient, optimizer, schedule)
    state = training.init_state(config, optimizer, mesh, seed=0)

    tokens, validation = open_data(args)
    # The same lines as on one device. Each process reads and sends the rows of its own devices.
    loader = tl.TokenLoader(
        tokens, args.batch_size, args.seq_len, plan=tl.ShuffledEpochs(seed=0), sharding=by_rows
    )
    with loader, checkpoints.open_checkpoints(args.out) as manager:
        state, start = checkpoints.restore(manager, state, loader, {})
        if start:
            say(f"continuing after step {start}")
        previous = None
        for step, batch in zip(range(start + 1, args.steps + 1), loader, strict=False):
            state, metrics = train_step(state, batch.inputs, batch.targets)
            # One step ahead of the devices is enough; many steps ahead, JAX's collectives on CPUs take
            # each other's threads and may wait for ever.
            jax.block_until_ready(previous)
            previous = metrics
            if step % 10 == 0 or step == args.steps:
                say(f"step {step}: loss {float(metrics['loss']):.4f}")
            if step % args.checkpoint_every == 0 or step == args.steps:
                checkpoints.save(manager, step, state, loader, {})

    loss, count = training.mean_loss(config, state["params"], validation, args.batch_size, by_rows)
    say(f"validation loss {loss:.4f} over {count:,} targets, each counted once")


def open_data(args: argparse.Namespace) -> tuple[tl.TokenArray, tl.TokenArray]:
    """The tokens to train on and those to evaluate on: Python's own source unless --data is given.

    The last hundredth of the tokens of --data is set aside to evaluate on.
    """
    if args.data:
        tokens = tl.open_tokens(args.data, dtype=args.dtype)
        return tokens.split(-(len(tokens) // 100))
    if jax.process_index() == 0:
        stdlib_corpus.write_stdlib_tokens(args.out)
    multihost_utils.sync_global_devices("the corpus is written")
    names = ("stdlib-train.safetensors", "stdlib-validation.safetensors")
    tokens, validation = (tl.open_tokens(args.out / name) for name in names)
    return tokens, validation.view(0, 20_001)  # n targets are of n + 1 tokens


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def run_loopback(num_processes: int) -> int:
    """Run this program as several processes of this machine.

    Returns: 0, or the exit status of a process that failed.
    """
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        coordinator = f"localhost:{listener.getsockname()[1]}"
    # Without a GPU, jax makes two devices of the CPU in each process.
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
    parser.add_argument("--dtype", help="dtype of files without a header, for example uint16")
    options.add_model(parser)
    group = parser.add_argument_group("training")
    add = partial(options.add, group)
    add("--batch-size", 32, "sequences in an update, over all devices")
    add("--model-parallel", 2, "devices that share a model")
    add("--steps", 100, "updates in all")
    add("--checkpoint-every", 50, "steps between checkpoints; the last step has one too")
    add("--out", Path("runs/multihost"), "folder of the run; the run in it, if any, is continued")
    small = {"seq_len": 64, "layers": 2, "heads": 2, "width": 64}
    parser.set_defaults(vocab_size=stdlib_corpus.VOCAB_SIZE, **small)
    return parser.parse_args()


if __name__ == "__main__":
    main()
