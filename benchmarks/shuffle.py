"""shuffle: how good is the order of each plan, and what does it cost, against a full shuffle?

On the corpus of the demo, real text, in three parts: what the windows of a block have in common and what
that does to means over steps (`shuffle_quality`), what it does to the training of the demo's model
(`shuffle_training`), and how many reads an epoch of the full-size file is. Plans are compared at equal
proportions (`shuffle_orders`). Losses and statistics do not depend on how fast or how busy the machine is.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import tokenloader as tl
from benchmarks import measure
from benchmarks.shuffle_orders import BLOCKS
from benchmarks.shuffle_quality import full_size_costs, measure_quality, text_features
from benchmarks.shuffle_training import Corpus, Trainer, read_corpus, train_orders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=800, help="steps of each run of training")
    parser.add_argument("--seeds", type=int, default=5, help="runs of training with each plan")
    parser.add_argument(
        "--finished", type=Path, metavar="FILE", help="go on after the runs in FILE, to which each is added"
    )


def run(options: argparse.Namespace) -> None:
    corpus, trainer = read_corpus(), Trainer(options.steps)
    shape = {"batch_size": trainer.batch_size, "seq_len": trainer.seq_len}
    with tempfile.TemporaryDirectory() as directory:
        finished = options.finished or Path(directory) / "runs.jsonl"
        orders = train_orders(corpus, trainer, options.seeds, finished)
    num_windows = options.steps * trainer.batch_size
    training = {
        "steps": options.steps,
        **shape,
        "num_windows": num_windows,
        "num_validation_targets": corpus.validation.size - 1,
        "sizes": {name: blocks.sizes(num_windows, trainer.batch_size) for name, blocks in BLOCKS.items()},
        "orders": orders,
    }
    quality = measure_quality(*window_values(corpus, trainer), **shape)
    result = {
        "question": (__doc__ or "").splitlines()[0],
        "cache": "nothing is timed",
        "training": training,
        "quality": quality,
        "full_size_costs": full_size_costs(),
    }
    measure.write_result("shuffle", result)


def window_values(corpus: Corpus, trainer: Trainer) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns loss and features of each window of the corpus, float64 [n], and its document's number.

    The loss is that of a model trained on a sample of the same windows, each seen once at most.
    """
    tokens, T = corpus.train, trainer.seq_len
    num_windows = tokens.size // T - 1
    measure.say(f"the loss of each of {num_windows:,} windows")
    params = trainer.train(tokens, tl.ShuffledEpochs(0), seed=0)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, T + 1)[::T][:num_windows]
    losses = trainer.window_losses(params, windows)
    documents = np.cumsum(tokens == corpus.end_of_text)[::T][:num_windows]
    return {"loss": losses, **text_features(windows[:, 1:])}, documents
