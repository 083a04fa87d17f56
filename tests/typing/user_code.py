"""What users write, as type checkers see it. Never run: test_typing.py checks it with mypy and pyright.

A line with `# type: ignore` must be an error: both checkers refuse an ignore that ignores nothing.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, assert_type

import jax
import numpy as np
from numpy.typing import NDArray

import tokenloader as tl

# Tokens

tokens = tl.open_tokens("train.safetensors", key="tokens", residency="ram")
assert_type(tokens, tl.TokenArray)
assert_type(tokens.residency, tl.Residency)
assert_type(len(tokens), int)
assert_type(tokens[0], np.integer[Any])
assert_type(tokens[10:20], NDArray[np.integer[Any]])
assert_type(tokens.gather([0, 10], 5), NDArray[np.integer[Any]])
assert_type(tokens.documents, NDArray[np.int64] | None)
train, validation = tokens.split(-1000)
assert_type(train, tl.TokenArray)
assert_type(validation.view(0, 10), tl.TokenArray)

source: tl.Source = ["a.bin", np.arange(10), tokens]
tl.open_tokens(source, dtype="uint16")
tl.open_tokens(3)  # type: ignore
tl.open_tokens("a.bin", residency="gpu")  # type: ignore
tl.open_token("a.bin")  # type: ignore
tokens["0"]  # type: ignore
tokens.will_need([0], 1)  # type: ignore

# Loaders

loader = tl.TokenLoader(tokens, 8, 64, plan=tl.ShuffledEpochs(seed=0))
assert_type(loader, tl.TokenLoader[tl.Batch])
tl.TokenLoader(tokens, 8, 64, sharding=jax.sharding.PartitionSpec("data"))
assert_type(next(loader), tl.Batch)
assert_type(next(loader).inputs, jax.Array)
assert_type(next(loader).loss_mask, jax.Array | None)
for batch in loader:
    assert_type(batch, tl.Batch)
with tl.TokenLoader(tokens, 8, 64, transform=tl.segment_documents(50256)) as documents:
    assert_type(next(documents), tl.Batch)
with tl.TokenLoader(tokens, 8, 64, transform=tl.segment_documents(bos_id=50256)) as documents:
    assert_type(next(documents), tl.Batch)
tl.segment_documents()  # type: ignore
tl.segment_documents(50256, bos_id=50256)  # type: ignore
assert_type(next(tl.TokenLoader(tokens, 8, 64, transform=None)), jax.Array)
assert_type(loader.window_starts(3), NDArray[np.int64])
assert_type(loader.stats, tl.LoaderStats)
assert_type(loader.stats.wait_seconds, float)
assert_type(loader.step, int)
assert_type(loader.get_state(), dict[str, int | str])
loader.set_state(loader.get_state(), strict=False)


class Pair(NamedTuple):
    inputs: jax.Array
    targets: jax.Array


def pair(block: jax.Array) -> Pair:
    return Pair(block[:, :-1], block[:, 1:])


assert_type(next(tl.TokenLoader(tokens, 8, 64, transform=pair)), Pair)
transform: tl.Transform[Pair] = pair


def train_on(batches: Iterator[tl.Batch]) -> None: ...


train_on(loader)
train_on(tl.TokenLoader(tokens, 8, 64, transform=pair))  # type: ignore
next(loader).input_ids  # type: ignore
loader.starts_at(3)  # type: ignore
tl.TokenLoader(tokens, "8", 64)  # type: ignore
tl.TokenLoader(tokens, 8, 64, plan="shuffled")  # type: ignore
tl.DataLoader(tokens)  # type: ignore

# Plans


class EveryTenth(tl.Plan):
    def bind(self, num_tokens: int, seq_len: int) -> tl.BoundPlan:
        return BoundEveryTenth(num_tokens - seq_len)


class BoundEveryTenth(tl.BoundPlan):
    def __init__(self, num_starts: int) -> None:
        self._num_starts = num_starts

    @property
    def num_samples(self) -> int | None:
        return None

    def window_starts(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return samples * 10 % self._num_starts

    def key(self, until_sample: int) -> str:
        return "EveryTenth()"


tl.TokenLoader(tokens, 8, 64, plan=EveryTenth())
tl.Mixture({range(100): 3, range(100, 200): 0.5}, EveryTenth())
tl.Mixture({train: 3, validation: 1}, tl.RandomWindows(seed=0))
bound = tl.ShuffledEpochs(seed=0, num_epochs=1).bind(num_tokens=1000, seq_len=10)
assert_type(bound, tl.BoundPlan)
assert_type(bound.num_samples, int | None)
assert_type(bound.window_starts(np.arange(3)), NDArray[np.int64])


class Mistyped(tl.BoundPlan):
    num_sampels = None

    def window_starts(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return samples

    def key(self, until_sample: int) -> str:
        return "Mistyped()"


Mistyped()  # type: ignore
tl.ShuffledEpochs(seeds=0)  # type: ignore
