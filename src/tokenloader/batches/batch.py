"""Batch, and the transforms that make one of a block of tokens, on the device.

A block is what crosses to the device: integers [rows, seq_len + 1], 2 bytes a token. Shifting it
into inputs and targets and widening to int32 there, under jit, moves a quarter of the bytes that
two int32 arrays would.
"""

# Annotations are values here, so that typing.get_type_hints finds Batch's types wherever it is.

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp

T = TypeVar("T")

# From a block, integers [batch_size, seq_len + 1] on the device, to any pytree; traced under jit.
Transform = Callable[[jax.Array], T]


class Batch(NamedTuple):
    """One training batch; a pytree of jax arrays, B = batch_size and T = seq_len.

    Attributes:
        inputs: int32 [B, T], token ids.
        targets: int32 [B, T], the token after each input.
        loss_mask: bool [B, T], False where a target must not count; None where all of them count. Every
            batch of a run has it or none has, so that the train step is traced once.
        segment_ids: int32 [B, T], which document of its row an input belongs to, counted from 1 (0 is
            padding by convention, and there is none), or None.
        positions: int32 [B, T], position within the document, or within the row for the document it
            begins inside of; or None.
    """

    inputs: jax.Array
    targets: jax.Array
    loss_mask: jax.Array | None = None
    segment_ids: jax.Array | None = None
    positions: jax.Array | None = None


def next_token(block: jax.Array) -> Batch:
    """Makes inputs, and as targets the tokens that follow: int32 [B, T] of a block [B, T + 1].

    Example:
        >>> next_token(jnp.array([[5, 6, 7]], jnp.uint16)).targets
        Array([[6, 7]], dtype=int32)
    """
    return Batch(inputs=block[:, :-1].astype(jnp.int32), targets=block[:, 1:].astype(jnp.int32))


class Before(NamedTuple):
    """Columns and documents to the left of a part of a batch: int32 [B, 1], or 0 for all rows."""

    num_columns: jax.Array | int
    num_ends: jax.Array | int  # documents that end there
    last_begin: jax.Array | int  # the column after the last end, or 0


@dataclass(frozen=True, eq=False)
class SegmentDocuments:
    """The transform that `segment_documents` returns; one object for one id and name."""

    token_id: int
    name: Literal["eos_id", "bos_id"]

    def __call__(self, block: jax.Array) -> Batch:
        return self.segment(next_token(block), Before(0, 0, 0))

    def __repr__(self) -> str:
        return f"SegmentDocuments({self.name}={self.token_id})"

    def __reduce__(self) -> tuple[Callable[[], "SegmentDocuments"], tuple[()]]:
        return functools.partial(segment_documents, **{self.name: self.token_id}), ()

    def ends(self, batch: Batch) -> jax.Array:
        """Finds where documents end, bool [B, T]: the target there is the first token of the next one."""
        return (batch.inputs if self.name == "eos_id" else batch.targets) == self.token_id

    def segment(self, batch: Batch, before: Before) -> Batch:
        """Returns a part of a batch with the documents of its columns, which come after `before`."""
        ends = self.ends(batch)
        column = before.num_columns + jax.lax.broadcasted_iota(jnp.int32, ends.shape, 1)
        # A document begins in the column after an end; a running maximum carries its column on to the
        # columns that follow.
        begins = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
        begin = jax.lax.cummax(jnp.where(begins, column, 0), axis=1)
        return batch._replace(
            loss_mask=~ends,
            segment_ids=1 + before.num_ends + jnp.cumsum(begins, axis=1, dtype=jnp.int32),
            positions=column - jnp.maximum(begin, before.last_begin),
        )


@overload
def segment_documents(eos_id: int) -> SegmentDocuments: ...
@overload
def segment_documents(*, bos_id: int) -> SegmentDocuments: ...
def segment_documents(eos_id: int | None = None, *, bos_id: int | None = None) -> SegmentDocuments:
    """Makes a transform for windows that hold several documents, with a token between each two.

    Beside inputs and targets it gives segment_ids and positions, which restart with each document,
    and a loss_mask that hides the targets across a document's end, where the target is the first
    token of an unrelated document. The token itself belongs to the document that it ends (eos_id),
    and is a target that counts; or to the document that it begins (bos_id), and is an input alone,
    so that nothing tells a model where documents end. Where they have both, either id gives the
    same batches.

    Args:
        eos_id: the id after each document, for example 128001 for Llama 3's ids.
        bos_id: the id before each document, for example 50256 in llm.c's files of GPT-2's ids.
            `tokenloader check` tells which of the two a file has.

    Raises:
        TypeError: neither or both are given, or the id is not an integer.

    Example:
        >>> batch = segment_documents(eos_id=0)(jnp.array([[5, 0, 6, 7, 8]], jnp.uint16))
        >>> batch.segment_ids, batch.positions
        (Array([[1, 1, 2, 2]], dtype=int32), Array([[0, 1, 0, 1]], dtype=int32))
        >>> batch.loss_mask
        Array([[ True, False,  True,  True]], dtype=bool)
        >>> batch = segment_documents(bos_id=0)(jnp.array([[5, 0, 6, 7, 8]], jnp.uint16))
        >>> batch.segment_ids, batch.positions
        (Array([[1, 2, 2, 2]], dtype=int32), Array([[0, 0, 1, 2]], dtype=int32))
        >>> batch.loss_mask
        Array([[False,  True,  True,  True]], dtype=bool)
    """
    if eos_id is not None and bos_id is None:
        return _segment_documents(operator.index(eos_id), "eos_id")
    if bos_id is not None and eos_id is None:
        return _segment_documents(operator.index(bos_id), "bos_id")
    raise TypeError(
        f"segment_documents was given eos_id={eos_id} and bos_id={bos_id}; expected one of the two: "
        f"eos_id= for the id after each document, or bos_id= for the id before it"
    )


@functools.cache  # loaders with the same one share its compiled code
def _segment_documents(token_id: int, name: Literal["eos_id", "bos_id"]) -> SegmentDocuments:
    return SegmentDocuments(token_id, name)


def mask_repeated_targets(
    batch: Batch, valid_targets: jax.Array, seq_len: int, num_columns_before: jax.Array | int = 0
) -> Batch:
    """Returns a batch whose loss_mask leaves only the last valid_targets[i, 0] targets of row i.

    Args:
        valid_targets: int32 [B, 1].
        seq_len: targets in a whole row.
        num_columns_before: columns of the row to the left of the batch.
    """
    column = num_columns_before + jax.lax.broadcasted_iota(jnp.int32, batch.targets.shape, 1)
    new = column >= seq_len - valid_targets
    return batch._replace(loss_mask=new if batch.loss_mask is None else batch.loss_mask & new)


# As users import them, so that files may move.
Batch.__module__ = next_token.__module__ = segment_documents.__module__ = "tokenloader"
