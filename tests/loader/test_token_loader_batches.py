"""What is in a batch, and the end of plans that have one."""

import contextlib
import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLANS, SOURCES, planned_rows, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenloader as tl

TOKENS = random_tokens()
N = len(TOKENS)
EOT = 7
rows_of = partial(planned_rows, TOKENS)


@settings(deadline=None, max_examples=60)
@given(
    plan=st.sampled_from(PLANS),
    source=st.sampled_from(SOURCES),
    batch_size=st.integers(1, 70),
    seq_len=st.integers(1, 60),
    prefetch=st.integers(1, 6),
)
def test_every_block_equals_the_reference(sources, plan, source, batch_size, seq_len, prefetch):
    with contextlib.suppress(ValueError):  # a finite plan may be smaller than a batch
        loader = tl.TokenLoader(
            sources[source], batch_size, seq_len, plan=plan, prefetch=prefetch, transform=None
        )
        with loader:
            for step, block in enumerate(itertools.islice(loader, 25)):
                expected = rows_of(plan, step * batch_size, batch_size, seq_len)
                np.testing.assert_array_equal(block, expected, strict=True)
        return
    count = plan.bind(N, seq_len).num_samples
    assert count < batch_size


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_every_batch_equals_the_reference(sources, plan, source):
    with tl.TokenLoader(sources[source], 5, 16, plan=plan) as loader:
        for step, batch in enumerate(itertools.islice(loader, 50)):
            block = rows_of(plan, 5 * step, 5, 16)
            assert isinstance(batch, tl.Batch)
            np.testing.assert_array_equal(batch.inputs, block[:, :-1].astype(np.int32), strict=True)
            np.testing.assert_array_equal(batch.targets, block[:, 1:].astype(np.int32), strict=True)
            assert isinstance(batch.inputs, jax.Array)
            assert (batch.segment_ids, batch.positions) == (None, None)
            assert (batch.loss_mask is not None) == (plan == tl.SequentialWindows())
    assert step > 10


def test_the_default_plan_is_shuffled_epochs_of_seed_0(tokens):
    with tl.TokenLoader(tokens, 3, 10, transform=None) as loader:
        np.testing.assert_array_equal(next(loader), rows_of(tl.ShuffledEpochs(0), 0, 3, 10))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_tokens_of_every_dtype_make_int32_batches(dtype):
    array = np.random.default_rng(1).integers(0, min(2**31, np.iinfo(dtype).max + 1), N)
    array = array.astype(dtype)
    tokens = tl.open_tokens(array)
    plan = tl.ShuffledEpochs(seed=0)
    with tl.TokenLoader(tokens, 4, 8, plan=plan) as loader:
        batch = next(loader)
        block = planned_rows(array, plan, 0, 4, 8)
        np.testing.assert_array_equal(batch.inputs, block[:, :-1].astype(np.int32), strict=True)
        np.testing.assert_array_equal(batch.targets, block[:, 1:].astype(np.int32), strict=True)
    with tl.TokenLoader(tokens, 4, 8, plan=plan, transform=None) as loader:
        raw = np.int32 if dtype == "int64" else dtype
        np.testing.assert_array_equal(next(loader), block.astype(raw), strict=True)


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_an_id_that_does_not_fit_int32_is_an_error_at_the_batch_that_has_it(dtype):
    array = np.zeros(100, dtype)
    array[45] = 2**31
    with tl.TokenLoader(tl.open_tokens(array), 1, 10, plan=tl.SequentialWindows()) as loader:
        for _ in range(4):
            next(loader)
        for _ in range(2):
            with pytest.raises(ValueError, match="token id 2147483648 does not fit in int32"):
                next(loader)
        assert loader.step == 4


def test_a_transform_of_ones_own_makes_any_pytree(tokens):
    def transform(block):
        return {"sum": block.sum(axis=1, dtype=jnp.int32), "ends": (block[:, 0], block[:, -1])}

    with tl.TokenLoader(tokens, 3, 10, transform=transform) as loader:
        for step in range(5):
            made, block = next(loader), rows_of(tl.ShuffledEpochs(0), 3 * step, 3, 10)
            np.testing.assert_array_equal(made["sum"], block.sum(axis=1))
            np.testing.assert_array_equal(made["ends"][0], block[:, 0], strict=True)
            np.testing.assert_array_equal(made["ends"][1], block[:, -1], strict=True)


@pytest.mark.parametrize("plan", [tl.ShuffledEpochs(0), tl.SequentialWindows()], ids=repr)
def test_the_transform_is_traced_once_also_for_further_loaders(tokens, plan):
    traces = []

    def transform(block):
        traces.append(block.shape)
        return tl.next_token(block)

    for _ in range(3):  # one for each evaluation, say
        with tl.TokenLoader(tokens, 3, 10, plan=plan, transform=transform) as loader:
            for _ in range(20):
                next(loader)
    assert traces == [(3, 11)]


@pytest.mark.parametrize(("rows", "seq_len"), [(1, 4), (4, 31), (8, 8191)])
def test_batches_kept_alive_never_change(rows, seq_len):
    # jax on CPU uses an aligned numpy block in place: were one written again, or a view of the
    # tokens, then batches handed out earlier would change (jax#37830).
    array = np.random.default_rng(2).integers(0, 2**16, 200_000).astype(np.uint16)
    original = array.copy()
    plan = tl.RandomWindows(seed=5)
    with tl.TokenLoader(tl.open_tokens(array), rows, seq_len, plan=plan, transform=None) as loader:
        blocks = [next(loader) for _ in range(200)]
    with tl.TokenLoader(tl.open_tokens(array), rows, seq_len, plan=plan) as loader:
        batches = [next(loader) for _ in range(200)]
    array[:] = 0
    for step, (block, batch) in enumerate(zip(blocks, batches, strict=True)):
        expected = planned_rows(original, plan, step * rows, rows, seq_len)
        np.testing.assert_array_equal(block, expected)
        np.testing.assert_array_equal(batch.targets, expected[:, 1:])


def test_a_window_that_is_all_of_the_tokens_does_not_alias_them():
    array = np.arange(64, dtype=np.uint16)
    with tl.TokenLoader(tl.open_tokens(array), 1, 63, transform=None) as loader:
        block = next(loader)
    array[:] = 0
    np.testing.assert_array_equal(block, [range(64)])


# Plans with an end


@pytest.mark.parametrize("batch_size", [1, 2, 7, 11, 33])
def test_epochs_end_after_their_last_full_batch(tokens, batch_size):
    plan = tl.ShuffledEpochs(seed=4, num_epochs=3)  # 3 epochs of 8 windows of 100
    count = plan.bind(N, 100).num_samples
    assert count == 24
    if batch_size > count:
        with pytest.raises(ValueError, match="before the first batch of"):
            tl.TokenLoader(tokens, batch_size, 100, plan=plan)
        return
    with tl.TokenLoader(tokens, batch_size, 100, plan=plan, transform=None) as loader:
        blocks = list(loader)
    assert len(blocks) == count // batch_size
    np.testing.assert_array_equal(
        np.concatenate(blocks), rows_of(plan, 0, count // batch_size * batch_size, 100)
    )


@settings(deadline=None, max_examples=40)
@given(
    num_tokens=st.integers(2, 60),
    seq_len=st.sampled_from([1, 3, 8]),
    batch_size=st.sampled_from([1, 4, 16]),
)
def test_a_sequential_mean_over_the_loss_mask_is_exact(num_tokens, seq_len, batch_size):
    array = (np.arange(num_tokens, dtype=np.uint16) ** 2) % 1009  # all positions tell apart
    if num_tokens < seq_len + 1:
        return
    plan, seen, shapes = tl.SequentialWindows(), [], set()
    with tl.TokenLoader(tl.open_tokens(array), batch_size, seq_len, plan=plan) as loader:
        for batch in loader:
            assert batch.loss_mask.dtype == jnp.bool_
            shapes.add((jax.tree.structure(batch), *(leaf.shape for leaf in jax.tree.leaves(batch))))
            mask = np.asarray(batch.loss_mask)
            pairs = np.stack([np.asarray(batch.inputs)[mask], np.asarray(batch.targets)[mask]], 1)
            seen.extend(pairs.tolist())
    # Every token but the first is a target exactly once, after the token before it, in file order.
    assert seen == np.stack([array[:-1], array[1:]], 1).tolist()
    assert len(shapes) == 1


def test_a_jitted_evaluation_over_sequential_windows_is_traced_once(tokens):
    traces = []

    @jax.jit
    def total(batch):
        traces.append(None)
        return (batch.targets * batch.loss_mask).sum(), batch.loss_mask.sum()

    with tl.TokenLoader(tokens, 6, 16, plan=tl.SequentialWindows()) as loader:
        sums = [total(batch) for batch in loader]
    assert len(traces) == 1
    assert sum(int(s) for s, _ in sums) == int(TOKENS[1:].astype(np.int64).sum())
    assert sum(int(n) for _, n in sums) == N - 1


def test_the_last_sequential_batch_is_filled_with_hidden_rows():
    array = np.arange(26, dtype=np.uint16)
    with tl.TokenLoader(tl.open_tokens(array), 2, 10, plan=tl.SequentialWindows()) as loader:
        first, last = list(loader)
    assert first.inputs[:, 0].tolist() == [0, 10]
    assert first.loss_mask.all()
    assert last.inputs[:, 0].tolist() == [15, 15]
    assert last.loss_mask.tolist() == [[False] * 5 + [True] * 5, [False] * 10]


@pytest.mark.parametrize("name", ["eos_id", "bos_id"])
def test_the_masks_of_documents_and_of_sequential_windows_combine(name):
    array = np.random.default_rng(3).integers(5, 9, 101).astype(np.uint16)
    seen = []
    with tl.TokenLoader(
        tl.open_tokens(array),
        3,
        8,
        plan=tl.SequentialWindows(),
        transform=tl.segment_documents(**{name: EOT}),
    ) as loader:
        for batch in loader:
            assert None not in batch
            mask = np.asarray(batch.loss_mask)
            seen.extend(np.asarray(batch.targets)[mask].tolist())
    pairs = itertools.pairwise(array.tolist())
    assert seen == [b for a, b in pairs if (a if name == "eos_id" else b) != EOT]


def test_sequential_windows_raw_are_the_blocks_themselves(tokens):
    plan = tl.SequentialWindows()
    with tl.TokenLoader(tokens, 8, 100, plan=plan, transform=None) as loader:
        blocks = np.concatenate(list(loader))
    np.testing.assert_array_equal(blocks, rows_of(plan, 0, 16, 100))


def test_a_transform_that_makes_no_batch_of_sequential_windows_is_warned_of(tokens):
    def only_a_dict(block):
        return {"block": block}

    with (
        tl.TokenLoader(tokens, 8, 100, plan=tl.SequentialWindows(), transform=only_a_dict) as loader,
        pytest.warns(UserWarning, match=r"only_a_dict.* returns dict and not a Batch.*not masked"),
    ):
        made = next(loader)
    np.testing.assert_array_equal(made["block"], rows_of(tl.SequentialWindows(), 0, 8, 100))


def test_a_transform_that_makes_no_batch_of_other_plans_is_not_warned_of(tokens):
    with (
        warnings.catch_warnings(),
        tl.TokenLoader(tokens, 8, 100, transform=lambda block: {"block": block}) as loader,
    ):
        warnings.simplefilter("error")
        next(loader)


@pytest.mark.parametrize("plan", PLANS[2:], ids=repr)
def test_a_second_for_makes_another_pass(tokens, plan):
    with tl.TokenLoader(tokens, 4, 60, plan=plan, transform=None) as loader:
        first, second = list(loader), list(loader)
    assert len(first) == len(second) > 1
    np.testing.assert_array_equal(first, second)


def test_next_after_the_end_keeps_raising_stop_iteration(tokens, own_threads):
    loader = tl.TokenLoader(tokens, 4, 200, plan=tl.SequentialWindows())
    assert len(list(loader)) == 2
    assert own_threads() == []  # the thread ends with the plan
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(loader)
    assert loader.step == 2
    assert next(iter(loader)).inputs[0, 0] == TOKENS[0]
    loader.close()


def test_a_for_after_a_break_goes_on_where_it_stopped(tokens):
    plan = tl.SequentialWindows()
    with tl.TokenLoader(tokens, 1, 100, plan=plan, transform=None) as loader:
        head = list(itertools.islice(loader, 3))
        tail = list(loader)
    np.testing.assert_array_equal(np.concatenate(head + tail), rows_of(plan, 0, 10, 100))
