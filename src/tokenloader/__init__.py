"""Feeds a language model in JAX from token ids that stay in host memory.

    tokens = tl.open_tokens("train.safetensors")
    loader = tl.TokenLoader(tokens, batch_size=32, seq_len=1024, plan=tl.ShuffledEpochs(seed=0))
    for batch in loader:
        state, loss = train_step(state, batch.inputs, batch.targets)

Importing this does not import jax; the names that need it do, when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tokenloader.loader.stats import LoaderStats
from tokenloader.loader.windows import Windows
from tokenloader.plans.mixture import Mixture
from tokenloader.plans.plan import BoundPlan, Plan
from tokenloader.plans.random_windows import RandomWindows
from tokenloader.plans.sequential_windows import SequentialWindows
from tokenloader.plans.shuffled_blocks import ShuffledBlocks
from tokenloader.plans.shuffled_epochs import ShuffledEpochs
from tokenloader.tokens.opening import Source, open_tokens
from tokenloader.tokens.token_array import Residency, TokenArray
from tokenloader.tokens.writing import write_tokens

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BoundPlan",
    "LoaderStats",
    "Mixture",
    "Plan",
    "RandomWindows",
    "Residency",
    "SequentialWindows",
    "ShuffledBlocks",
    "ShuffledEpochs",
    "Source",
    "TokenArray",
    "TokenLoader",
    "Transform",
    "Windows",
    "next_token",
    "open_tokens",
    "segment_documents",
    "write_tokens",
]

if TYPE_CHECKING:
    from tokenloader.batches.batch import Batch, Transform, next_token, segment_documents
    from tokenloader.loader.token_loader import TokenLoader
else:  # out of a type checker's sight, so that a misspelt name is an error there
    _NEED_JAX = {
        "Batch": "tokenloader.batches.batch",
        "Transform": "tokenloader.batches.batch",
        "next_token": "tokenloader.batches.batch",
        "segment_documents": "tokenloader.batches.batch",
        "TokenLoader": "tokenloader.loader.token_loader",
    }

    def __getattr__(name: str) -> object:
        if name not in _NEED_JAX:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_NEED_JAX[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
