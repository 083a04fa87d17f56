"""The transforms, against per-token Python loops."""

import itertools
import pickle
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tokenloader import Batch, next_token, segment_documents
from tokenloader.batches.batch import mask_repeated_targets

DTYPES = ["uint8", "uint16", "uint32", "int32"]  # int64 is narrowed before it reaches a transform
EOT = 2
BETWEEN = [{"eos_id": EOT}, {"bos_id": EOT}]  # the token after each document, or before it


def naive_documents(block, *, eos_id=None, bos_id=None):
    """(loss_mask, segment_ids, positions) of a block, token by token."""
    rows = []
    for row in block.tolist():
        mask, segments, positions = [], [], []
        segment, position = 1, 0
        for token, target in itertools.pairwise(row):
            ends = token == eos_id or target == bos_id
            mask.append(not ends)
            segments.append(segment)
            positions.append(position)
            position += 1
            if ends:
                segment, position = segment + 1, 0
        rows.append((mask, segments, positions))
    return [np.array(field) for field in zip(*rows, strict=True)]


def assert_is_documents(batch, block, **between):
    mask, segments, positions = naive_documents(block, **between)
    np.testing.assert_array_equal(batch.inputs, block[:, :-1])
    np.testing.assert_array_equal(batch.targets, block[:, 1:])
    np.testing.assert_array_equal(batch.loss_mask, mask)
    np.testing.assert_array_equal(batch.segment_ids, segments)
    np.testing.assert_array_equal(batch.positions, positions)


@pytest.mark.parametrize("dtype", DTYPES)
def test_next_token_shifts_by_one_and_widens_to_int32(dtype):
    block = np.array([[1, 2, 3, 4], [5, 6, 7, 255]], dtype)
    batch = next_token(jnp.asarray(block))
    np.testing.assert_array_equal(batch.inputs, [[1, 2, 3], [5, 6, 7]])
    np.testing.assert_array_equal(batch.targets, [[2, 3, 4], [6, 7, 255]])
    assert batch.inputs.dtype == batch.targets.dtype == jnp.int32
    assert batch[2:] == (None, None, None)


def test_the_largest_uint16_id_does_not_turn_negative():
    batch = next_token(jnp.array([[65535, 65534]], jnp.uint16))
    assert batch.inputs.tolist() == [[65535]]
    assert batch.targets.tolist() == [[65534]]


@pytest.mark.parametrize("between", BETWEEN, ids=str)
def test_a_window_of_two_tokens_makes_one_input(between):
    batch = segment_documents(**between)(jnp.array([[EOT, 7], [7, EOT]], jnp.uint16))
    assert batch.loss_mask.tolist() == [[between == BETWEEN[1]], [between == BETWEEN[0]]]
    assert batch.segment_ids.tolist() == [[1], [1]]
    assert batch.positions.tolist() == [[0], [0]]


@pytest.mark.parametrize(
    "row",
    [
        [EOT, 5, 6, 7, 8, 9],
        [5, 6, 7, 8, 9, EOT],
        [5, 6, 7, 8, EOT, 9],
        [5, EOT, EOT, EOT, 6, 7],
        [EOT, EOT, 5, 6, EOT, EOT],
        [EOT] * 6,
        [5, 6, 7, 8, 9, 10],
    ],
)
@pytest.mark.parametrize("between", BETWEEN, ids=str)
def test_segment_documents_where_the_end_of_text_is_in_an_odd_place(between, row):
    block = np.array([row], np.uint16)
    assert_is_documents(segment_documents(**between)(jnp.asarray(block)), block, **between)


_segmented = [jax.jit(segment_documents(**between)) for between in BETWEEN]


@settings(deadline=None, max_examples=150)
@given(hnp.arrays(np.uint16, (3, 11), elements=st.integers(0, 4)))
def test_segment_documents_equals_a_loop_over_the_tokens(block):
    for segmented, between in zip(_segmented, BETWEEN, strict=True):
        assert_is_documents(segmented(jnp.asarray(block)), block, **between)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("between", BETWEEN, ids=str)
def test_segment_documents_of_every_dtype(between, dtype):
    block = np.random.default_rng(0).integers(0, 4, (4, 9)).astype(dtype)
    batch = jax.jit(segment_documents(**between))(jnp.asarray(block))
    assert_is_documents(batch, block, **between)
    assert [leaf.dtype.name for leaf in batch] == ["int32", "int32", "bool", "int32", "int32"]


def test_an_end_of_text_that_the_dtype_cannot_hold_is_never_found():
    # 50256 is 80 modulo 256: it must not be narrowed to the block's dtype.
    block = np.full((2, 5), 50256 % 256, np.uint8)
    for between in ({"eos_id": 50256}, {"bos_id": 50256}):
        assert_is_documents(segment_documents(**between)(jnp.asarray(block)), block, **between)


def test_the_end_of_text_is_a_target_that_counts():
    batch = segment_documents(EOT)(jnp.array([[5, EOT, 6]], jnp.uint16))
    assert batch.targets.tolist() == [[EOT, 6]]
    assert batch.loss_mask.tolist() == [[True, False]]


def test_a_begin_of_text_is_the_first_input_of_its_document_and_no_target():
    batch = segment_documents(bos_id=EOT)(jnp.array([[EOT, 5, 6, EOT, 7, 8]], jnp.uint16))
    assert batch.inputs.tolist() == [[EOT, 5, 6, EOT, 7]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.targets[0][batch.loss_mask[0]].tolist() == [5, 6, 7, 8]


def test_documents_with_both_are_segmented_alike_by_either():
    begin, end = 8, 9
    documents = [[begin, *range(1, 1 + length), end] for length in (3, 0, 1, 5, 2)]
    stream = np.concatenate(documents).astype(np.uint16)
    windows = jnp.asarray(np.lib.stride_tricks.sliding_window_view(stream, 7))
    by_end, by_begin = segment_documents(eos_id=end)(windows), segment_documents(bos_id=begin)(windows)
    for one, other in zip(by_end, by_begin, strict=True):
        np.testing.assert_array_equal(one, other)


def test_segment_documents_with_the_same_end_of_text_are_equal_and_others_are_not():
    assert segment_documents(50256) == segment_documents(np.uint16(50256))
    assert hash(segment_documents(50256)) == hash(segment_documents(np.uint16(50256)))
    assert segment_documents(50256) != segment_documents(0)
    assert segment_documents(bos_id=7) == segment_documents(bos_id=np.uint16(7)) != segment_documents(7)
    assert repr(segment_documents(np.uint16(50256))) == "SegmentDocuments(eos_id=50256)"
    assert repr(segment_documents(bos_id=np.uint16(7))) == "SegmentDocuments(bos_id=7)"


@pytest.mark.parametrize("token_id", [1.5, "<|endoftext|>"])
@pytest.mark.parametrize("name", ["eos_id", "bos_id"])
def test_an_end_of_text_that_is_not_an_integer_is_a_type_error(name, token_id):
    with pytest.raises(TypeError, match=type(token_id).__name__):
        segment_documents(**{name: token_id})


@pytest.mark.parametrize("given", [{}, {"eos_id": 7, "bos_id": 8}], ids=str)
def test_one_of_eos_id_and_bos_id_must_be_given(given):
    with pytest.raises(TypeError) as raised:
        segment_documents(**given)
    eos_id, bos_id = given.get("eos_id"), given.get("bos_id")
    assert str(raised.value) == (
        f"segment_documents was given eos_id={eos_id} and bos_id={bos_id}; expected one of the two: "
        f"eos_id= for the id after each document, or bos_id= for the id before it"
    )


def test_a_batch_is_a_pytree_whose_missing_fields_are_no_leaves():
    block = jnp.array([[1, 2, 3]], jnp.uint16)
    assert len(jax.tree.leaves(next_token(block))) == 2
    doubled = jax.tree.map(lambda leaf: 2 * leaf, next_token(block))
    assert isinstance(doubled, Batch)
    assert doubled.targets.tolist() == [[4, 6]]


def test_batch_fields_come_in_the_documented_order():
    assert Batch._fields == ("inputs", "targets", "loss_mask", "segment_ids", "positions")


def test_the_types_of_a_batchs_fields_can_be_asked_for():
    optional = jax.Array | None
    assert typing.get_type_hints(Batch) == {
        "inputs": jax.Array,
        "targets": jax.Array,
        "loss_mask": optional,
        "segment_ids": optional,
        "positions": optional,
    }
    assert typing.get_type_hints(next_token) == {"block": jax.Array, "return": Batch}


def test_a_batch_and_the_transforms_are_pickled_by_their_public_names():
    batch = jax.device_get(segment_documents(EOT)(jnp.array([[5, EOT, 6]], jnp.uint16)))
    assert repr(Batch) == "<class 'tokenloader.Batch'>"
    transforms = segment_documents(EOT), segment_documents(bos_id=EOT)
    pickled = pickle.dumps([batch, next_token, segment_documents, *transforms])
    assert b"tokenloader.batches" not in pickled
    done = subprocess.run(
        [sys.executable, "-c", FRESH], input=pickled, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert pickle.loads(done.stdout)[0].positions.tolist() == [[0, 1]]


FRESH = """if True:
    import pickle, sys
    import tokenloader
    assert not any(name.startswith("tokenloader.batches") for name in sys.modules)
    things = pickle.load(sys.stdin.buffer)
    batch, next_token, segment_documents, ended, begun = things
    assert type(batch) is tokenloader.Batch, type(batch)
    assert batch.segment_ids.tolist() == [[1, 1]]
    assert next_token is tokenloader.next_token
    assert segment_documents is tokenloader.segment_documents
    assert ended is tokenloader.segment_documents(2)
    assert begun is tokenloader.segment_documents(bos_id=2)
    sys.stdout.buffer.write(pickle.dumps(things))
"""


@pytest.mark.parametrize("documents", [False, True])
def test_mask_repeated_targets_leaves_the_last_targets_of_each_row_and_no_hidden_one(documents):
    block = jnp.array([[1, EOT, 3, 4, 5]] * 4, jnp.uint16)
    batch = segment_documents(EOT)(block) if documents else next_token(block)
    valid_targets = jnp.array([[4], [3], [1], [0]], jnp.int32)
    hidden = mask_repeated_targets(batch, valid_targets, batch.targets.shape[1])
    expected = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]], bool)
    if documents:
        expected[:, 1] = False
    np.testing.assert_array_equal(hidden.loss_mask, expected)
    assert hidden.loss_mask.dtype == jnp.bool_
    np.testing.assert_array_equal(hidden.inputs, batch.inputs)
