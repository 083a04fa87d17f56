"""The command-line options that describe the model, and the model they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import gpt2


def add(group: Any, name: str, default: int | float | Path, text: str) -> None:
    """Add an option to a parser or group. Its type is that of the default, which its help names."""
    text += " (default: %(default)s)"
    group.add_argument(name, type=type(default), default=default, help=text)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that `model_config` reads; their defaults are GPT-2 124M."""
    group = parser.add_argument_group("model")
    add(group, "--vocab-size", 50257, "number of token ids")
    add(group, "--seq-len", 1024, "tokens in a sequence")
    add(group, "--layers", 12, "blocks")
    add(group, "--heads", 12, "attention heads in a block")
    add(group, "--width", 768, "width of the residual stream")


def model_config(args: argparse.Namespace) -> gpt2.Config:
    """The model that the options describe; on accelerators its activations are bfloat16."""
    return gpt2.Config(
        vocab_size=args.vocab_size,
        seq_len=args.seq_len,
        num_layers=args.layers,
        num_heads=args.heads,
        width=args.width,
        dtype=jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16,
    )
