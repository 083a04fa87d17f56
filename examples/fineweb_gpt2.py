"""Trains GPT-2 124M on ten billion tokens of FineWeb, with tokenloader, JAX, optax and Orbax.

    python examples/fineweb_gpt2.py          # downloads 19 GiB; for a GPU of 24 GB, or several
    python examples/fineweb_gpt2.py --data train.bin --validation val.bin --dtype uint16
    python examples/fineweb_gpt2.py --demo   # downloads nothing; two minutes on two CPU cores

What a run makes is in --out: checkpoints, metrics.jsonl, loss.png. Stop or kill it at any time: the
same command goes on from its last checkpoint, on exactly the batches that were to come.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tokenloader as tl

try:
    import matplotlib  # noqa: F401 (draws the plot at the end; say now that it is missing)

    import checkpoints
    import gpt2
    import options
    import run_log
    import stdlib_corpus
    import training
except ModuleNotFoundError as error:
    sys.exit(f'{error.name} is not installed: in the clone, pip install ".[examples]"')

FINEWEB = "hf://datasets/gpjt/fineweb-gpt2-tokens"

# The defaults under --demo: they gave the lowest validation loss of those tried, within two minutes
# on two cores. In so short a time, many small steps of a shallow model beat few of a deep one.
DEMO = {
    "out": Path("runs/demo"),
    "vocab_size": stdlib_corpus.VOCAB_SIZE,
    "seq_len": 128,
    "layers": 2,
    "heads": 2,
    "width": 128,
    "steps": 1800,
    "batch_size": 8,
    "learning_rate": 3e-3,
    "warmup_steps": 30,
    "log_every": 50,
    "eval_every": 600,
    "eval_tokens": 0,
    "checkpoint_every": 600,
}

# These settings decide the outcome of a run, so it goes on only with those it was begun with.
MODEL_SETTINGS = ("vocab_size", "seq_len", "layers", "heads", "width")
TRAINING_SETTINGS = ("steps", "batch_size", "learning_rate", "warmup_steps", "seed", "eval_tokens")


def main() -> None:
    args = parse_arguments()
    if args.fresh:
        checkpoints.delete(args.out)
    if args.demo:
        args.data, args.validation = stdlib_corpus.write_stdlib_tokens(args.out)

    # Data parallel over this machine: all parameters on every device, each with its rows of a batch.
    mesh = jax.make_mesh(
        (jax.local_device_count(),),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.local_devices(),
    )
    by_rows = NamedSharding(mesh, P("data"))

    loader = tl.TokenLoader(
        tl.open_tokens(args.data, dtype=args.dtype),
        args.batch_size,
        args.seq_len,
        plan=tl.ShuffledEpochs(seed=args.seed),
        sharding=by_rows,
    )
    largest_id = loader.window_tokens(0).max()
    if largest_id >= args.vocab_size:
        sys.exit(f"the data has token id {largest_id}; --vocab-size {args.vocab_size} is too small")

    config = options.model_config(args)
    schedule = training.learning_rate_schedule(args.learning_rate, args.warmup_steps, args.steps)
    optimizer = training.adamw(schedule)
    parts = training.count_micro_batches(args.batch_size, mesh.size, args.micro_batch)
    loss_and_gradient = training.accumulate(training.batch_loss(config), mesh, parts)
    train_step = training.make_train_step(loss_and_gradient, optimizer, schedule)
    state = training.init_state(config, optimizer, mesh, args.seed)

    evaluate = None
    if args.validation:
        evaluate = partial(
            training.mean_loss,
            config,
            tokens=open_validation(args),
            batch_size=args.batch_size // parts,  # fits into memory: it does in training
            sharding=by_rows,
        )

    settings = {name: getattr(args, name) for name in MODEL_SETTINGS + TRAINING_SETTINGS}
    with loader, checkpoints.open_checkpoints(args.out) as manager:
        try:
            state, step = checkpoints.restore(manager, state, loader, settings)
            run_log.drop_after(args.out / "metrics.jsonl", step)
        except ValueError as error:
            sys.exit(f"cannot continue {args.out} (choose another --out, or --fresh):\n{error}")
        if step:
            print(f"{args.out}: continuing after step {step} of {args.steps}; --fresh begins anew")
        save = partial(checkpoints.save, manager, loader=loader, settings=settings)
        state = train(args, state, step, loader, train_step, evaluate, save)

    report(args, config, state["params"])


def train(
    args: argparse.Namespace,
    state: training.State,
    start: int,
    loader: tl.TokenLoader,
    train_step: training.TrainStep,
    evaluate: Callable[[gpt2.Params], tuple[float, int]] | None,
    save: Callable[[int, training.State], None],
) -> training.State:
    """The training loop, from the step after `start` to the last one or to a stop signal."""
    watch = run_log.Stopwatch(loader)
    previous = None
    with stop_signal() as stop:
        for step, batch in zip(range(start + 1, args.steps + 1), loader, strict=False):
            state, metrics = train_step(state, batch.inputs, batch.targets)

            # JAX returns before the work is done. Waiting for the step before keeps the loop one step
            # ahead of the devices: they always have work, and a wait for data stalls them as well.
            jax.block_until_ready(previous)
            previous = metrics

            is_last, is_stopped = step == args.steps, stop.is_set()
            is_evaluated = evaluate and (step % args.eval_every == 0 or is_last)
            if step == 1 or step % args.log_every == 0 or is_evaluated or is_last:
                values = {name: float(value) for name, value in jax.device_get(metrics).items()}
                row = {"step": step, **values, **watch.rates()}
                if is_evaluated:
                    row["val_loss"], _ = evaluate(state["params"])
                    watch.restart()
                run_log.append(args.out / "metrics.jsonl", row)
                print(run_log.progress_line(row, args.steps), flush=True)

            if step % args.checkpoint_every == 0 or is_last or is_stopped:
                save(step, state)
            if is_stopped:
                print(f"stopped after step {step}; the same command goes on from there")
                break
    return state


def open_validation(args: argparse.Namespace) -> tl.TokenArray:
    """The validation tokens, or with --eval-tokens the first so many targets of them."""
    tokens = tl.open_tokens(args.validation, dtype=args.dtype)
    if not args.eval_tokens:
        return tokens
    return tokens.view(0, min(args.eval_tokens + 1, len(tokens)))  # n targets are of n + 1 tokens


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C or SIGTERM sets. A second signal ends the program at once."""
    event = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        event.set()
        signal.signal(number, before[number])

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(args: argparse.Namespace, config: gpt2.Config, params: gpt2.Params) -> None:
    """Draw the losses; after a demo, print how its loss compares with bigrams', and a sample."""
    rows = run_log.read(args.out / "metrics.jsonl")
    if not args.demo:
        run_log.plot(rows, args.out / "loss.png")
        return

    validation = open_validation(args)[:]
    bigram_loss = stdlib_corpus.bigram_loss(tl.open_tokens(args.data)[:], validation)
    run_log.plot(rows, args.out / "loss.png", baseline=("byte bigrams", bigram_loss))
    if not rows or rows[-1]["step"] < args.steps:
        return
    loss = rows[-1]["val_loss"]
    print(
        f"\nvalidation loss, nats per byte, over the same {len(validation) - 1:,} targets:"
        f"\n  this model    {loss:.3f}"
        f"\n  byte bigrams  {bigram_loss:.3f}   (difference {loss - bigram_loss:+.3f})"
        f"\n\na sample:\n"
    )
    prompt = "def "
    continuation = gpt2.sample(
        params,
        np.frombuffer(prompt.encode(), np.uint8).astype(np.int32),
        jax.random.key(args.seed),
        config=config,
        num_tokens=400,
    )
    print(prompt + stdlib_corpus.decode(continuation.tolist()))


def parse_arguments() -> argparse.Namespace:
    """Options whose defaults are a whole run of GPT-2 124M, or with --demo those of the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="train a small model on the bytes of Python's standard library, with other defaults: "
        "see --demo --help",
    )

    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help="token files of any format that tokenloader opens, or hf:// addresses; several become one "
        f"(default: {FINEWEB}/train.safetensors)",
    )
    group.add_argument(
        "--validation",
        nargs="+",
        metavar="FILE",
        help="the same, to evaluate on; with --data and without this there is no evaluation",
    )
    group.add_argument("--dtype", help="dtype of files without a header, for example uint16")

    options.add_model(parser)
    group = parser.add_argument_group("training")
    add = partial(options.add, group)
    add("--steps", 19_000, "updates in all; ten billion tokens with the other defaults")
    add("--batch-size", 512, "sequences in an update, over all devices")
    add("--micro-batch", 8, "most sequences on a device at a time; lower it if memory runs out")
    add("--learning-rate", 6e-4, "peak learning rate")
    add("--warmup-steps", 2000, "updates until the peak")
    add("--seed", 0, "for the first parameters and the order of the data")

    group = parser.add_argument_group("run")
    add = partial(options.add, group)
    add("--out", Path("runs/fineweb"), "folder of the run; the run in it, if any, is continued")
    group.add_argument("--fresh", action="store_true", help="first delete the run in --out")
    add("--log-every", 10, "steps between lines in metrics.jsonl")
    add("--eval-every", 1000, "steps between evaluations; the last step has one too")
    add("--eval-tokens", 10_485_760, "targets in an evaluation, the file's first; 0: all of them")
    add("--checkpoint-every", 500, "steps between checkpoints; the last step has one too")

    if "--demo" in sys.argv:  # before parsing, so that options override it and --help shows it
        parser.set_defaults(**DEMO)
    args = parser.parse_args()
    if args.demo and (args.data or args.validation):
        parser.error("--demo makes its own data: leave out --data and --validation")
    if not (args.demo or args.data):
        args.data = f"{FINEWEB}/train.safetensors"
        args.validation = args.validation or f"{FINEWEB}/validation.safetensors"
    return args


if __name__ == "__main__":
    main()
