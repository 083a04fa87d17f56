"""What the order of the windows does to training: the demo's model, on one epoch of real text.

One epoch, so that all orders see the same windows, each once, and differ in nothing but when. It is made of
a piece of every document of the standard library's source, in file order. Seeds decide the order and the
first parameters. Losses are over all targets of the demo's validation documents.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tokenloader as tl
from benchmarks import measure
from benchmarks.shuffle_orders import ORDERS
from benchmarks.train import examples_importable


class Corpus(NamedTuple):
    """The demo's corpus, one byte a token."""

    train: np.ndarray  # uint16 [num_tokens]
    validation: np.ndarray
    end_of_text: int

    def one_epoch(self, num_windows: int, seq_len: int) -> np.ndarray:
        """Returns a piece of each document, in file order: as many tokens as these windows have.

        The pieces are as long as their documents are, so that all lengths shrink by one factor.
        """
        num_tokens = (num_windows + 1) * seq_len
        if num_tokens > self.train.size:
            most = self.train.size // seq_len - 1
            raise SystemExit(f"{num_windows:,} windows; the corpus has {most:,}: choose fewer --steps")
        random = np.random.default_rng(0)
        pieces = []
        for document in np.split(self.train, np.flatnonzero(self.train == self.end_of_text) + 1)[:-1]:
            size = -(-document.size * num_tokens // self.train.size)
            begin = random.integers(document.size - size + 1)
            pieces += [document[begin : begin + size - 1], document[-1:]]  # ends as documents do
        return np.concatenate(pieces)[:num_tokens]


def read_corpus() -> Corpus:
    """Makes the corpus from the files of this Python."""
    with examples_importable(), tempfile.TemporaryDirectory() as directory:
        import stdlib_corpus

        paths = stdlib_corpus.write_stdlib_tokens(Path(directory))
        train, validation = (tl.open_tokens(path)[:] for path in paths)
    return Corpus(train, validation, stdlib_corpus.END_OF_TEXT)


class Trainer:
    """The demo's model and training, compiled once for all runs."""

    def __init__(self, num_steps: int) -> None:
        with examples_importable():
            import gpt2
            import training
            from fineweb_gpt2 import DEMO
        self.num_steps, self._training, self._gpt2 = num_steps, training, gpt2
        self.batch_size, self.seq_len = DEMO["batch_size"], DEMO["seq_len"]
        self.config = gpt2.Config(
            vocab_size=DEMO["vocab_size"],
            seq_len=self.seq_len,
            num_layers=DEMO["layers"],
            num_heads=DEMO["heads"],
            width=DEMO["width"],
        )
        axis_types = (jax.sharding.AxisType.Auto,)
        self._mesh = jax.make_mesh((1,), ("data",), axis_types, devices=jax.local_devices()[:1])
        self._sharding = NamedSharding(self._mesh, P("data"))
        schedule = training.learning_rate_schedule(DEMO["learning_rate"], DEMO["warmup_steps"], num_steps)
        self._optimizer = training.adamw(schedule)
        loss_and_gradient = training.accumulate(training.batch_loss(self.config), self._mesh, 1)
        self._step = training.make_train_step(loss_and_gradient, self._optimizer, schedule)

    def train(self, tokens: np.ndarray, plan: tl.Plan, seed: int) -> Any:
        """Returns the parameters after all steps."""
        state = self._training.init_state(self.config, self._optimizer, self._mesh, seed)
        shape = self.batch_size, self.seq_len
        with tl.TokenLoader(tl.open_tokens(tokens), *shape, plan=plan, sharding=self._sharding) as loader:
            for _, batch in zip(range(self.num_steps), loader, strict=False):
                state, metrics = self._step(state, batch.inputs, batch.targets)
                jax.block_until_ready(metrics)
        return state["params"]

    def mean_loss(self, params: Any, tokens: np.ndarray) -> float:
        """Returns the mean loss in nats over all targets of `tokens`."""
        opened = tl.open_tokens(tokens)
        loss, _ = self._training.mean_loss(self.config, params, opened, self.batch_size, self._sharding)
        return loss

    def window_losses(self, params: Any, windows: np.ndarray) -> np.ndarray:
        """Returns the mean loss of each window [n, seq_len + 1] in nats: float64 [n]."""

        @jax.jit
        def losses(params: Any, block: jax.Array) -> jax.Array:
            ids = block.astype("int32")
            return self._gpt2.loss_per_token(params, ids[:, :-1], ids[:, 1:], self.config).mean(axis=1)

        parts = [np.asarray(losses(params, windows[i : i + 64])) for i in range(0, len(windows), 64)]
        return np.concatenate(parts).astype(np.float64)


def train_orders(corpus: Corpus, trainer: Trainer, num_seeds: int, finished: Path) -> list[dict[str, Any]]:
    """Returns the validation loss of every order and seed; a file of finished runs is read and added to."""
    batch_size, seq_len = trainer.batch_size, trainer.seq_len
    num_windows = trainer.num_steps * batch_size
    tokens = corpus.one_epoch(num_windows, seq_len)
    lines = finished.read_text().splitlines() if finished.exists() else []
    losses = {(run["order"], run["seed"]): run["validation_loss"] for run in map(json.loads, lines)}
    for seed in range(num_seeds):  # all orders of a seed, then the next: what is there is even at any time
        for order, plan in ORDERS.items():
            if (order, seed) in losses:
                continue
            params = trainer.train(tokens, plan(seed, num_windows, batch_size, seq_len), seed)
            losses[order, seed] = loss = round(trainer.mean_loss(params, corpus.validation), 5)
            measure.say(f"seed {seed}: {order}: {loss:.4f} nats")
            with finished.open("a") as file:
                print(json.dumps({"order": order, "seed": seed, "validation_loss": loss}), file=file)
    seeds = range(num_seeds)
    return [{"order": name, "validation_losses": [losses[name, i] for i in seeds]} for name in ORDERS]
