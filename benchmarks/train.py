"""train: what does a training step cost with the loader, against the same step on a resident batch?

The step is that of the example's GPT-2: forward, backward, AdamW. Two loops run the same compiled step in
turns: "loader" takes its batches from a loader, "resident" has one batch that stays on the device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import tokenloader as tl
from benchmarks import measure, token_file

EXAMPLES = Path(__file__).parent.parent / "examples"
# Two cores take two seconds for a step of SMALL; an accelerator runs GPT2, the 124M model.
SMALL = {"num_layers": 2, "num_heads": 4, "width": 256, "batch_size": 8, "seq_len": 256}
GPT2 = {"num_layers": 12, "num_heads": 12, "width": 768, "batch_size": 32, "seq_len": 1024}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps of each loop in each round")


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "train.safetensors"
        token_file.write(path, 2**29)
        result = measure_step(path, options.rounds, options.steps)
    question = (__doc__ or "").splitlines()[0]
    measure.write_result("train", {"question": question, "cache": "warm", **result})


def measure_step(path: Path, rounds: int, steps: int) -> dict[str, Any]:
    """The time of a step with the loader and with a resident batch, and the ratio of the two."""
    shape = SMALL if jax.default_backend() == "cpu" else GPT2
    B, T = shape["batch_size"], shape["seq_len"]
    step, state = _train_step(shape)
    loader = tl.TokenLoader(tl.open_tokens(path), B, T, plan=tl.ShuffledEpochs(0))
    resident = next(loader)
    seconds: dict[str, list[float]] = {"loader": [], "resident": []}
    sources: dict[str, Callable[[], Any]] = {
        "loader": lambda: next(loader),
        "resident": lambda: resident,
    }
    waited = took = 0.0
    for turn in range(rounds + 1):
        for name in list(sources)[:: 1 if turn % 2 else -1]:
            before = loader.stats.wait_seconds
            began = time.perf_counter()
            for _ in range(steps):
                batch = sources[name]()
                state, loss = step(state, batch.inputs, batch.targets)
            jax.block_until_ready(loss)
            if turn:  # the first turn compiles
                seconds[name].append((time.perf_counter() - began) / steps)
                if name == "loader":
                    waited += loader.stats.wait_seconds - before
                    took += seconds[name][-1] * steps
    row = {
        "step_milliseconds": {n: round(1e3 * statistics.median(s), 3) for n, s in seconds.items()},
        "loader_over_resident": round(measure.median_ratio(seconds["loader"], seconds["resident"]), 4),
        "share_of_time_waiting": round(waited / took, 6),
    }
    measure.say(f"{B}x{T}: {row}")
    return {"model": shape, "rounds": rounds, "steps": steps, **row}


def _train_step(shape: dict[str, int]) -> tuple[Callable[..., Any], Any]:
    with examples_importable():
        import gpt2
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    sizes = {name: shape[name] for name in ("num_layers", "num_heads", "width", "seq_len")}
    config = gpt2.Config(**sizes, dtype=dtype)

    def loss_of(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return gpt2.loss_per_token(params, inputs, targets, config).mean()

    def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        params, mean, square, count = state
        loss, gradient = jax.value_and_grad(loss_of)(params, inputs, targets)
        # AdamW is written out, so that a machine without optax measures the same step.
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, square, gradient)
        count = count + 1
        a, b = 1 - 0.9**count, 1 - 0.95**count
        params = jax.tree.map(
            lambda p, m, v: p - 1e-4 * (m / a / (jnp.sqrt(v / b) + 1e-8) + 0.1 * p),
            params,
            mean,
            square,
        )
        return (params, mean, square, count), loss

    params = gpt2.init(config, jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = (params, zeros, jax.tree.map(jnp.copy, zeros), jnp.float32(0))
    return jax.jit(step, donate_argnums=0), state


@contextmanager
def examples_importable() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLES))
