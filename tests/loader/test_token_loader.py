"""TokenLoader against a three-line reference, through every plan, source, cut and failure."""

import contextlib
import gc
import itertools
import json
import re
import threading
import time
import traceback
import types
import warnings
import weakref
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenloader as tl
from tokenloader.loader import pipeline as _pipeline
from tokenloader.loader import prefetch as _prefetch
from tokenloader.loader import token_loader as _loader
from tokenloader.tokens.part import Part
from tokenloader.tokens.store import Store

N = 997
TOKENS = np.random.default_rng(0).integers(0, 2**16, N).astype(np.uint16)
PLANS = [
    tl.RandomWindows(seed=1),
    tl.ShuffledEpochs(seed=1),
    tl.ShuffledEpochs(seed=2, num_epochs=3),
    tl.SequentialWindows(),
]
SOURCES = ["array", "mmap", "ram", "sharded mmap", "sharded ram"]
EOT = 7


def naive(array, starts, seq_len):
    return np.stack([array[s : s + seq_len + 1] for s in starts.tolist()])


def rows_of(plan, first, count, seq_len, array=TOKENS):
    samples = np.arange(first, first + count)
    return naive(array, plan.bind(len(array), seq_len).window_starts(samples), seq_len)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same tokens, opened in every way."""
    folder = tmp_path_factory.mktemp("tokens")
    TOKENS.tofile(folder / "whole.bin")
    shards = []
    for i, part in enumerate(np.split(TOKENS, [300, 303, 310, 800])):  # some shorter than a window
        shards.append(folder / f"{i}.bin")
        part.tofile(shards[-1])
    dtype = "uint16"
    return {
        "array": tl.open_tokens(TOKENS),
        "mmap": tl.open_tokens(folder / "whole.bin", dtype=dtype),
        "ram": tl.open_tokens(folder / "whole.bin", dtype=dtype, residency="ram"),
        "sharded mmap": tl.open_tokens(shards, dtype=dtype),
        "sharded ram": tl.open_tokens(shards, dtype=dtype, residency="ram"),
    }


@pytest.fixture
def tokens():
    return tl.open_tokens(TOKENS)


class WatchedTokens(tl.TokenArray):
    """Tokens in RAM that call `before` whenever the background gathers."""

    def __init__(self, before, array=TOKENS):
        super().__init__(Store([Part(array)]))
        self.before = before

    def gather(self, starts, length):
        if threading.current_thread() is not threading.main_thread():
            self.before()
        return super().gather(starts, length)


def eventually(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.fixture
def own_threads():
    """A function that lists the threads started during this test and still alive."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread not in before]


# What is in a batch


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
        block = rows_of(plan, 0, 4, 8, array)
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
        assert loader.get_state()["step"] == 4


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
        expected = rows_of(plan, step * rows, rows, seq_len, original)
        np.testing.assert_array_equal(block, expected)
        np.testing.assert_array_equal(batch.targets, expected[:, 1:])


def test_a_window_that_is_all_of_the_tokens_does_not_alias_them():
    array = np.arange(64, dtype=np.uint16)
    with tl.TokenLoader(tl.open_tokens(array), 1, 63, transform=None) as loader:
        block = next(loader)
    array[:] = 0
    np.testing.assert_array_equal(block, [range(64)])


def test_a_plan_of_ones_own_needs_starts_only(tokens):
    class EveryTen:
        def starts(self, samples, *, num_tokens, seq_len):
            return np.asarray(samples) * 10 % (num_tokens - seq_len)

        def __repr__(self):
            return "EveryTen()"

    with tl.TokenLoader(tokens, 4, 8, plan=EveryTen(), transform=None) as loader:
        for step in range(40):
            np.testing.assert_array_equal(next(loader), rows_of(EveryTen(), 4 * step, 4, 8))
        assert loader.get_state()["plan"] == "EveryTen()"


# Plans with an end


@pytest.mark.parametrize("batch_size", [1, 2, 7, 11, 33])
def test_epochs_end_after_their_last_full_batch(tokens, batch_size):
    plan = tl.ShuffledEpochs(seed=4, num_epochs=3)  # 3 epochs of 8 windows of 100
    count = plan.bind(N, 100).num_samples
    assert count == 24
    if batch_size > count:
        with pytest.raises(ValueError, match="before the first batch"):
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


def test_the_masks_of_documents_and_of_sequential_windows_combine():
    array = np.random.default_rng(3).integers(5, 9, 101).astype(np.uint16)
    seen = []
    with tl.TokenLoader(
        tl.open_tokens(array),
        3,
        8,
        plan=tl.SequentialWindows(),
        transform=tl.segment_documents(EOT),
    ) as loader:
        for batch in loader:
            assert None not in batch
            mask = np.asarray(batch.loss_mask)
            seen.extend(np.asarray(batch.targets)[mask].tolist())
    assert seen == [b for a, b in itertools.pairwise(array.tolist()) if a != EOT]


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
        pytest.warns(UserWarning, match=r"only_a_dict.* returns dict and not a Batch.*not hidden"),
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
    assert loader.get_state()["step"] == 2
    assert next(iter(loader)).inputs[0, 0] == TOKENS[0]
    loader.close()


def test_a_for_after_a_break_goes_on_where_it_stopped(tokens):
    plan = tl.SequentialWindows()
    with tl.TokenLoader(tokens, 1, 100, plan=plan, transform=None) as loader:
        head = list(itertools.islice(loader, 3))
        tail = list(loader)
    np.testing.assert_array_equal(np.concatenate(head + tail), rows_of(plan, 0, 10, 100))


# State


def json_state(loader):
    return json.loads(json.dumps(loader.get_state()))


def test_the_state_counts_batches_handed_out_and_not_those_made():
    made = []
    with tl.TokenLoader(WatchedTokens(lambda: made.append(1)), 3, 10, prefetch=4, transform=None) as loader:
        assert loader.get_state()["step"] == 0
        next(loader)
        assert eventually(lambda: len(made) == 5)
        state = loader.get_state()
    assert state == {
        "version": 1,
        "step": 1,
        "sample": 3,
        "batch_sizes": [[0, 3]],
        "seq_len": 10,
        "plan": "ShuffledEpochs(seed=0)",
        "data": tl.open_tokens(TOKENS).fingerprint(),
    }
    assert len(json.dumps(state)) < 250


@settings(deadline=None, max_examples=80)
@given(
    plan=st.sampled_from(PLANS),
    legs=st.lists(
        st.tuples(
            st.integers(0, 9),  # batches taken
            st.sampled_from([1, 2, 3, 5]),  # batch_size
            st.integers(1, 5),  # prefetch
            st.sampled_from(SOURCES),
        ),
        min_size=2,
        max_size=4,
    ),
    to_the_end=st.booleans(),
)
def test_a_resumed_run_goes_on_in_order_whatever_changed_at_the_cut(sources, plan, legs, to_the_end):
    # 8 windows an epoch, so that the cuts lie around the ends of epochs.
    seq_len, state, steps, rows = 100, None, 0, [np.zeros((0, 101), np.uint16)]
    finite = hasattr(plan, "num_samples") and plan.bind(N, seq_len).num_samples
    for i, (count, batch_size, prefetch, source) in enumerate(legs):
        with tl.TokenLoader(
            sources[source], batch_size, seq_len, plan=plan, prefetch=prefetch, transform=None
        ) as loader:
            if state is not None:
                loader.set_state(state)
            all_of_it = to_the_end and finite and i == len(legs) - 1
            blocks = list(itertools.islice(loader, None if all_of_it else count))
            rows, steps = rows + blocks, steps + len(blocks)
            state = json_state(loader)
            assert state["step"] == steps
            assert state["sample"] == sum(map(len, rows))
    rows = np.concatenate(rows)
    np.testing.assert_array_equal(rows, rows_of_or_none(plan, len(rows), seq_len))
    if all_of_it and plan != tl.SequentialWindows():
        assert finite - batch_size < len(rows) <= finite
    if all_of_it and plan == tl.SequentialWindows():
        assert len(rows) >= finite


def rows_of_or_none(plan, count, seq_len):
    return rows_of(plan, 0, count, seq_len) if count else np.zeros((0, seq_len + 1), np.uint16)


def test_set_state_rewinds_a_running_loader_and_one_that_has_ended(tokens):
    plan = tl.SequentialWindows()
    with tl.TokenLoader(tokens, 1, 100, plan=plan, transform=None) as loader:
        next(loader)
        state = loader.get_state()
        for _ in range(2):
            rest = list(loader)
            np.testing.assert_array_equal(np.concatenate(rest), rows_of(plan, 1, 9, 100))
            loader.set_state(state)
        next(loader)
        loader.set_state(state)
        np.testing.assert_array_equal(next(loader), rows_of(plan, 1, 1, 100))


def test_a_state_saved_at_the_end_resumes_at_the_end(tokens):
    with tl.TokenLoader(tokens, 4, 60, plan=tl.SequentialWindows()) as loader:
        list(loader)
        state = loader.get_state()
    with tl.TokenLoader(tokens, 4, 60, plan=tl.SequentialWindows()) as loader:
        loader.set_state(state)
        assert list(loader) == []
        assert len(list(loader)) > 0  # and another for is another pass


def test_a_run_may_be_resumed_with_more_epochs(tokens):
    with tl.TokenLoader(tokens, 3, 100, plan=tl.ShuffledEpochs(7, num_epochs=1), transform=None) as loader:
        blocks = list(loader)
        state = json_state(loader)
    more = tl.ShuffledEpochs(7, num_epochs=3)
    with tl.TokenLoader(tokens, 3, 100, plan=more, transform=None) as loader:
        loader.set_state(state)
        blocks += list(loader)
    assert len(blocks) == 8
    np.testing.assert_array_equal(np.concatenate(blocks), rows_of(more, 0, 24, 100))


def test_a_state_of_another_run_is_refused_with_each_difference_and_nothing_moves(tokens):
    other = TOKENS[:-1].astype(np.uint32)
    with (
        tl.TokenLoader(tokens, 2, 10, plan=tl.RandomWindows(1), transform=None) as here,
        tl.TokenLoader(tl.open_tokens(other), 2, 20, plan=tl.ShuffledEpochs(9)) as there,
    ):
        next(here)
        with pytest.raises(ValueError, match="this state is of another run") as caught:
            here.set_state(there.get_state())
        message = str(caught.value)
        assert "plan: saved ShuffledEpochs(seed=9), here RandomWindows(seed=1)" in message
        assert "seq_len: saved 20, here 10" in message
        assert f"data: saved uint32:{N - 1}:" in message
        assert f"here uint16:{N}:" in message
        assert "another dtype and another number of tokens and other contents" in message
        assert message.endswith("begin anew without set_state; strict=False goes on all the same")
        assert here.get_state()["step"] == 1
        np.testing.assert_array_equal(next(here), rows_of(tl.RandomWindows(1), 2, 2, 10))


def test_a_state_of_another_run_is_gone_on_with_if_asked_and_warned_of(tokens):
    plan = tl.RandomWindows(1)
    with tl.TokenLoader(tokens, 2, 20, plan=tl.ShuffledEpochs(9)) as there:
        next(there)
        state = there.get_state()
    with tl.TokenLoader(tokens, 3, 10, plan=plan, transform=None) as here:
        with pytest.warns(UserWarning, match="going on from step 1 of another run") as caught:
            here.set_state(state, strict=False)
        assert caught[0].filename == __file__
        lines = str(caught[0].message).splitlines()
        assert [line.split(": ")[0].strip() for line in lines[1:]] == ["plan", "seq_len"]
        assert "saved ShuffledEpochs(seed=9), here RandomWindows(seed=1)" in lines[1]
        assert "saved 20, here 10" in lines[2]
        np.testing.assert_array_equal(next(here), rows_of(plan, 2, 3, 10))
        assert here.get_state()["batch_sizes"] == [[0, 2], [1, 3]]
        here.set_state(here.get_state())  # a state of this run from now on


def test_strict_or_not_the_state_of_the_same_run_is_not_warned_of(tokens):
    loader = tl.TokenLoader(tokens, 2, 20)
    loader.set_state(loader.get_state(), strict=False)


def test_not_being_strict_does_not_read_what_is_no_state(tokens):
    loader = tl.TokenLoader(tokens, 2, 10)
    with pytest.raises(ValueError, match="state has version 2; this tokenloader reads version 1"):
        loader.set_state({**loader.get_state(), "version": 2}, strict=False)
    with pytest.raises(ValueError, match="state: sample is 7, and 0 steps"):
        loader.set_state({**loader.get_state(), "sample": 7}, strict=False)


def test_changed_contents_of_the_same_length_are_refused(tokens):
    changed = TOKENS.copy()
    changed[-1] ^= 1
    state = tl.TokenLoader(tl.open_tokens(changed), 2, 10).get_state()
    with pytest.raises(ValueError, match="other contents"):
        tl.TokenLoader(tokens, 2, 10).set_state(state)


def test_a_state_that_is_none_is_refused_as_such(tokens):
    loader = tl.TokenLoader(tokens, 2, 10)
    with pytest.raises(TypeError, match="state is of type NoneType"):
        loader.set_state(None)
    with pytest.raises(ValueError, match="state has version None"):
        loader.set_state({"epoch": 3})


# Any step, at once


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_starts_at_and_batch_at_tell_past_present_and_future_steps(tokens, plan):
    with tl.TokenLoader(tokens, 3, 40, plan=plan, transform=None) as loader:
        foretold = [loader.window_tokens(step) for step in range(8)]
        blocks = [next(loader) for _ in range(8)]
        np.testing.assert_array_equal(foretold, blocks)
        for step, block in enumerate(blocks):
            np.testing.assert_array_equal(loader.window_tokens(step), block, strict=True)
            starts = loader.window_starts(step)
            assert (starts.dtype, starts.shape) == (np.int64, (3,))
            np.testing.assert_array_equal(naive(TOKENS, starts, 40), block)
        assert loader.get_state()["step"] == 8


def test_starts_at_reads_nothing():
    tokens = tl.open_tokens(TOKENS)
    loader = tl.TokenLoader(tokens, 3, 40)
    expected = loader.window_starts(5)
    tokens.close()
    np.testing.assert_array_equal(loader.window_starts(5), expected)


def test_starts_at_knows_the_steps_before_a_change_of_batch_size(tokens):
    plan, handed_out = tl.ShuffledEpochs(3), []
    with tl.TokenLoader(tokens, 2, 40, plan=plan, transform=None) as loader:
        handed_out += [next(loader) for _ in range(5)]
        state = json_state(loader)
    with tl.TokenLoader(tokens, 7, 40, plan=plan, transform=None) as loader:
        loader.set_state(state)
        handed_out += [next(loader) for _ in range(5)]
        for step, block in enumerate(handed_out):
            np.testing.assert_array_equal(loader.window_tokens(step), block)
        np.testing.assert_array_equal(
            loader.window_starts(10), plan.bind(N, 40).window_starts(range(45, 52))
        )
        state = json_state(loader)
    with tl.TokenLoader(tokens, 3, 40, plan=plan, transform=None) as loader:
        loader.set_state(state)
        np.testing.assert_array_equal(loader.window_tokens(10), next(loader))
        for step, block in enumerate(handed_out):
            np.testing.assert_array_equal(loader.window_tokens(step), block)


def test_starts_at_knows_past_steps_near_the_end_of_a_finite_plan(tokens):
    # 8 windows: with batch_size=4 no batch begins at 6, with batch_size=1 one did.
    plan, handed_out = tl.ShuffledEpochs(0, num_epochs=1), []
    with tl.TokenLoader(tokens, 1, 100, plan=plan, transform=None) as loader:
        handed_out += [next(loader) for _ in range(7)]
        state = json_state(loader)
    with tl.TokenLoader(tokens, 4, 100, plan=plan, transform=None) as loader:
        loader.set_state(state)
        for step, block in enumerate(handed_out):
            np.testing.assert_array_equal(loader.window_tokens(step), block)
        with pytest.raises(ValueError, match="step 7 is past the end"):
            loader.window_starts(7)


@pytest.mark.parametrize("plan", PLANS[:2], ids=repr)
def test_a_run_of_a_billion_steps_is_addressed_and_resumed_at_once(tokens, plan):
    step = 10**9
    with tl.TokenLoader(tokens, 5, 10, plan=plan, transform=None) as loader:
        np.testing.assert_array_equal(loader.window_tokens(step), rows_of(plan, 5 * step, 5, 10))
        loader.set_state({**loader.get_state(), "step": step, "sample": 5 * step})
        np.testing.assert_array_equal(next(loader), rows_of(plan, 5 * step, 5, 10))
        assert loader.get_state()["step"] == step + 1


def test_starts_at_ends_with_the_plan(tokens):
    plan = tl.ShuffledEpochs(0, num_epochs=2)  # 16 windows
    loader = tl.TokenLoader(tokens, 5, 100, plan=plan)
    assert loader.window_starts(2).shape == (5,)
    with pytest.raises(ValueError, match=re.escape(f"step 3 is past the end of {plan}")):
        loader.window_starts(3)
    loader = tl.TokenLoader(tokens, 4, 100, plan=tl.SequentialWindows())  # 10 windows
    assert loader.window_starts(2).tolist() == [800, 896, 896, 896]
    with pytest.raises(ValueError, match=r"step 3 is past the end of SequentialWindows\(\)"):
        loader.window_tokens(3)


@pytest.mark.parametrize("step", [-1, -(10**9)])
def test_a_negative_step_is_an_error(tokens, step):
    with pytest.raises(ValueError, match=f"step {step} is negative"):
        tl.TokenLoader(tokens, 5, 100).window_starts(step)


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_a_step_that_is_no_integer_is_a_type_error(tokens, step):
    with pytest.raises(TypeError, match=type(step).__name__):
        tl.TokenLoader(tokens, 5, 100).window_starts(step)


# Arguments


@pytest.mark.parametrize("wrong", [TOKENS, "train.bin", None, [1, 2, 3]])
def test_tokens_of_another_type_are_a_type_error(wrong):
    with pytest.raises(
        TypeError, match=rf"tokens is of type {type(wrong).__name__}; needed is a TokenArray: open_"
    ):
        tl.TokenLoader(wrong, 2, 4)


@pytest.mark.parametrize(
    "plan",
    [tl.RandomWindows, tl.ShuffledEpochs, tl.SequentialWindows, "shuffled", None, 0],
    ids=repr,
)
def test_what_is_no_plan_is_a_type_error_also_the_class_of_one(tokens, plan):
    with pytest.raises(TypeError, match="needed is an instance of a plan") as caught:
        tl.TokenLoader(tokens, 2, 4, plan=plan)
    assert repr(plan) in str(caught.value)


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "prefetch"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_below_1_is_an_error(tokens, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}; needed is 1 or more"):
        tl.TokenLoader(tokens, **{"batch_size": 2, "seq_len": 4, "prefetch": 2, name: value})


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "prefetch"])
@pytest.mark.parametrize("value", [1.5, 2.0, "2", None])
def test_a_count_that_is_no_integer_is_a_type_error(tokens, name, value):
    with pytest.raises(
        TypeError, match=f"{name} is {value!r} of type {type(value).__name__}; needed is an integer"
    ):
        tl.TokenLoader(tokens, **{"batch_size": 2, "seq_len": 4, "prefetch": 2, name: value})


def test_counts_may_be_numpy_integers_and_the_state_is_json_all_the_same(tokens):
    loader = tl.TokenLoader(tokens, np.int64(2), np.uint8(4), prefetch=np.int32(1))
    assert json_state(loader)["batch_sizes"] == [[0, 2]]
    assert {type(value) for value in loader.get_state().values()} == {int, str, list}


@pytest.mark.parametrize("transform", ["next_token", 3])
def test_a_transform_that_cannot_be_called_is_a_type_error(tokens, transform):
    with pytest.raises(TypeError, match=f"transform is of type {type(transform).__name__}"):
        tl.TokenLoader(tokens, 2, 4, transform=transform)


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_fewer_tokens_than_a_window_are_an_error(tokens, plan):
    with pytest.raises(ValueError, match=r"997 tokens are fewer than one window .* = 998"):
        tl.TokenLoader(tokens, 1, 997, plan=plan)
    with tl.TokenLoader(tokens, 1, 996, plan=plan, transform=None) as loader:
        np.testing.assert_array_equal(next(loader), [TOKENS])


def test_a_finite_plan_smaller_than_a_batch_is_an_error_that_tells_its_size(tokens):
    with pytest.raises(ValueError, match="use a smaller batch_size") as caught:
        tl.TokenLoader(tokens, 9, 100, plan=tl.ShuffledEpochs(0, num_epochs=1))
    assert "ShuffledEpochs(seed=0, num_epochs=1) ends after 8 windows of these 997 tokens" in str(
        caught.value
    )
    assert "batch_size=9" in str(caught.value)
    tl.TokenLoader(tokens, 8, 100, plan=tl.ShuffledEpochs(0, num_epochs=1))


def test_sequential_windows_smaller_than_a_batch_make_one_batch(tokens):
    with tl.TokenLoader(tokens, 64, 100, plan=tl.SequentialWindows()) as loader:
        (batch,) = loader
    assert int(batch.loss_mask.sum()) == N - 1


def test_a_sharding_of_another_type_is_a_type_error(tokens):
    with pytest.raises(TypeError, match="sharding is of type str"):
        tl.TokenLoader(tokens, 2, 4, sharding="gpu")


def test_a_warning_of_an_idle_accelerator_points_to_the_line_of_the_user(tokens, monkeypatch):
    def warn(*args, stacklevel, **kwargs):
        frames = traceback.extract_stack()
        # stacklevel=1 is the caller of warn, which is the frame above this one.
        assert frames[-1 - stacklevel].filename == __file__
        warned.append(args[0])

    warned = []
    monkeypatch.setattr(jax, "local_devices", lambda backend: [f"{backend}:0"])
    monkeypatch.setattr(warnings, "warn", warn)
    tl.TokenLoader(tokens, 2, 4)
    assert len(warned) == 1
    assert "gpu:0 is idle" in warned[0]
    tl.TokenLoader(tokens, 2, 4, sharding=jax.devices()[0])
    assert len(warned) == 1


# Time: the thread, its bound, its errors and its end


def test_nothing_is_read_and_no_thread_started_before_the_first_next(own_threads):
    made = []
    tl.TokenLoader(WatchedTokens(lambda: made.append(1)), 2, 4)
    time.sleep(0.02)
    assert (made, own_threads()) == ([], [])


@pytest.mark.parametrize(("prefetch", "group"), [(1, 1), (2, 2), (3, 2), (5, 3), (8, 5)])
def test_never_more_than_prefetch_and_one_batches_are_made_beyond_those_taken(prefetch, group):
    made = []  # an entry for a gather, which is of a group
    with tl.TokenLoader(WatchedTokens(lambda: made.append(1)), 2, 4, prefetch=prefetch) as loader:
        for taken in range(1, 2 * group + 3):
            next(loader)
            groups = -(-taken // group) + prefetch // group
            assert groups * group <= taken + prefetch + 1
            assert eventually(lambda groups=groups: len(made) == groups)
            time.sleep(0.01)
            assert len(made) == groups


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_blocks_that_are_handed_out_raw_are_made_one_by_one(prefetch):
    made = []
    with tl.TokenLoader(
        WatchedTokens(lambda: made.append(1)), 2, 4, prefetch=prefetch, transform=None
    ) as loader:
        for taken in range(1, 7):
            next(loader)
            assert eventually(lambda taken=taken: len(made) == taken + prefetch)
            time.sleep(0.01)
            assert len(made) == taken + prefetch


def test_a_slow_source_is_waited_for_and_the_wait_is_counted():
    with tl.TokenLoader(WatchedTokens(lambda: time.sleep(0.03)), 2, 10, transform=None) as loader:
        for step in range(4):
            np.testing.assert_array_equal(next(loader), rows_of(tl.ShuffledEpochs(0), 2 * step, 2, 10))
        stats = loader.stats
    assert stats.wait_seconds > 0.06
    assert stats.gather_seconds > 0.1


class Flaky:
    """Raises at the calls whose numbers are given, counted from 0."""

    def __init__(self, error, *calls):
        self.error, self.calls, self.count = error, calls, itertools.count()

    def __call__(self):
        if next(self.count) in self.calls:
            raise self.error("disk on fire")


class BoomBaseError(BaseException):
    pass


@pytest.mark.parametrize("error", [OSError, ValueError, MemoryError, BoomBaseError, SystemExit])
def test_an_error_of_the_background_arrives_at_next_and_nothing_is_lost_or_repeated(error):
    plan, blocks, errors = tl.ShuffledEpochs(0), [], []
    with tl.TokenLoader(
        WatchedTokens(Flaky(error, 0, 4, 5, 13)), 3, 40, plan=plan, prefetch=3, transform=None
    ) as loader:
        while len(blocks) < 20:
            try:
                blocks.append(next(loader))
            except error as caught:
                errors.append(caught)
                assert loader.get_state()["step"] == len(blocks)
    assert len(errors) == 4
    np.testing.assert_array_equal(np.concatenate(blocks), rows_of(plan, 0, 60, 40))
    for caught in errors:
        frames = [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
        assert "gather" in frames  # where it happened
        assert frames[-1] == "__call__"


def test_batches_made_before_an_error_are_handed_out_before_it():
    with tl.TokenLoader(WatchedTokens(Flaky(OSError, 2)), 3, 40, prefetch=5, transform=None) as loader:
        for _ in range(2):
            next(loader)
        with pytest.raises(OSError, match="disk on fire"):
            next(loader)


def test_an_error_of_the_plan_arrives_at_next(tokens):
    class Broken:
        def starts(self, samples, *, num_tokens, seq_len):
            raise ZeroDivisionError("no such window")

    with (
        tl.TokenLoader(tokens, 2, 4, plan=Broken()) as loader,
        pytest.raises(ZeroDivisionError, match="no such window"),
    ):
        next(loader)


def test_a_stop_iteration_of_the_plan_is_an_error_and_not_the_end(tokens):
    class Broken:
        def starts(self, samples, *, num_tokens, seq_len):
            raise StopIteration

    with (
        tl.TokenLoader(tokens, 2, 4, plan=Broken()) as loader,
        pytest.raises(RuntimeError, match="StopIteration"),
    ):
        next(loader)


def test_tokens_closed_under_a_loader_are_an_error_at_next(tmp_path):
    TOKENS.tofile(tmp_path / "a.bin")
    tokens = tl.open_tokens(tmp_path / "a.bin", dtype="uint16")
    with tl.TokenLoader(tokens, 2, 4, prefetch=1) as loader:
        next(loader)
        tokens.close()
        with pytest.raises(ValueError, match="it was closed"):
            list(itertools.islice(loader, 10))


def test_a_transform_may_be_of_a_class_with_slots(tokens):
    @dataclass(frozen=True, slots=True)
    class Plus:
        more: int

        def __call__(self, block):
            return block + self.more

    with tl.TokenLoader(tokens, 4, 16, transform=Plus(3)) as loader:
        np.testing.assert_array_equal(next(loader), loader.window_tokens(0) + 3)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_the_transform_does_not_lose_the_batch(tokens, error):
    faults = [error("bad transform")] * 2

    def transform(block):
        if faults:
            raise faults.pop()
        return block

    with tl.TokenLoader(tokens, 3, 40, transform=transform) as loader:
        for _ in range(2):
            with pytest.raises(error, match="bad transform"):
                next(loader)
            assert loader.get_state()["step"] == 0
        for step in range(3):
            np.testing.assert_array_equal(next(loader), rows_of(tl.ShuffledEpochs(0), 3 * step, 3, 40))


@pytest.mark.parametrize("taken", [1, 2])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_block_that_was_taken_but_never_counted_is_not_skipped(tokens, taken, prefetch):
    # What Ctrl-C leaves behind when it falls between the taking of a block and its counting.
    plan = tl.ShuffledEpochs(0)
    with tl.TokenLoader(tokens, 3, 40, plan=plan, prefetch=prefetch, transform=None) as loader:
        blocks = [next(loader), next(loader)]
        for _ in range(taken):
            loader._prefetcher.take()
        blocks += [next(loader) for _ in range(4)]
        assert loader.get_state()["step"] == 6
    np.testing.assert_array_equal(np.concatenate(blocks), rows_of(plan, 0, 18, 40))


def test_the_last_block_that_was_taken_but_never_counted_is_not_skipped(tokens):
    plan = tl.SequentialWindows()
    with tl.TokenLoader(tokens, 5, 100, plan=plan, transform=None) as loader:
        first = next(loader)
        loader._prefetcher.take()
        (last,) = loader
    np.testing.assert_array_equal(np.concatenate([first, last]), rows_of(plan, 0, 10, 100))


@pytest.mark.parametrize("plan", [tl.ShuffledEpochs(0), tl.SequentialWindows()], ids=repr)
def test_a_batch_that_was_made_early_but_not_reached_is_not_handed_out_in_place_of_another(tokens, plan):
    # What Ctrl-C leaves behind when it falls between the making of the next batch and the counting.
    with tl.TokenLoader(tokens, 3, 40, plan=plan) as loader:
        next(loader)
        for step in range(1, 6):
            eventually(loader._prefetcher._ready.qsize)
            batch = next(loader)
            loader._step, loader._sample = step, 3 * step
            again = next(loader)
            block = rows_of(plan, 3 * step, 3, 40)
            np.testing.assert_array_equal(batch.targets, block[:, 1:])
            np.testing.assert_array_equal(again.targets, block[:, 1:])
            assert loader.get_state()["step"] == step + 1


def test_the_transform_of_the_next_batch_is_launched_early_and_does_not_count(tokens):
    plan = tl.ShuffledEpochs(0)
    with tl.TokenLoader(tokens, 3, 40, plan=plan, prefetch=2) as loader:
        next(loader)
        assert eventually(lambda: loader._prefetcher._ready.qsize() > 0)
        next(loader)
        assert loader._made[0].sample == 6
        assert loader.get_state()["step"] == loader.stats.batches == 2
        state = loader.get_state()
        loader.set_state({**state, "step": 1, "sample": 3})
        np.testing.assert_array_equal(next(loader).inputs, rows_of(plan, 3, 3, 40)[:, :-1])


@pytest.mark.timeout(10)
def test_ctrl_c_while_the_thread_is_being_ended_does_not_hang_the_next_batch(tokens, monkeypatch):
    stop = _prefetch.Prefetcher.stop

    def interrupted(self, *, wait=True):
        stop(self, wait=False)
        if wait:
            raise KeyboardInterrupt

    with tl.TokenLoader(tokens, 3, 40, transform=None) as loader:
        next(loader)
        state = loader.get_state()
        monkeypatch.setattr(_prefetch.Prefetcher, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loader.set_state(state)
        monkeypatch.undo()
        for step in range(1, 8):
            np.testing.assert_array_equal(next(loader), rows_of(tl.ShuffledEpochs(0), 3 * step, 3, 40))


def test_next_after_close_is_an_error(tokens):
    loader = tl.TokenLoader(tokens, 2, 4)
    next(loader)
    loader.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="this TokenLoader was closed; make another"):
            next(loader)


def test_close_ends_the_thread_and_leaves_the_tokens_open(tokens, own_threads):
    loader = tl.TokenLoader(tokens, 2, 4)
    next(loader)
    assert len(own_threads()) == 1
    loader.close()
    assert own_threads() == []
    loader.close()
    assert tokens[:3].tolist() == TOKENS[:3].tolist()
    assert loader.stats.batches == loader.get_state()["step"] == 1


def test_close_before_the_first_next_and_after_the_end_is_allowed(tokens):
    loader = tl.TokenLoader(tokens, 2, 4)
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    loader = tl.TokenLoader(tokens, 4, 200, plan=tl.SequentialWindows())
    list(loader)
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(iter(loader))


def test_a_with_block_closes_also_when_its_body_fails(tokens, own_threads):
    def fail(loader):
        with loader:
            next(loader)
            raise ZeroDivisionError

    loader = tl.TokenLoader(tokens, 2, 4)
    with pytest.raises(ZeroDivisionError):
        fail(loader)
    assert own_threads() == []
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def loader_whose_source_blocks():
    """A loader whose thread waits in its third gather, and the event that lets it go."""
    going, blocked = threading.Event(), threading.Event()
    calls = itertools.count()

    def block_from_the_third_on():
        if next(calls) >= 2:
            blocked.set()
            going.wait()

    loader = tl.TokenLoader(WatchedTokens(block_from_the_third_on), 2, 4, transform=None)
    next(loader)
    blocked.wait()
    return loader, going


def test_close_while_the_source_blocks_returns_and_the_thread_ends_later(monkeypatch, own_threads):
    monkeypatch.setattr(_prefetch, "_JOIN_SECONDS", 0.1)
    loader, going = loader_whose_source_blocks()
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 5
    assert len(own_threads()) == 1
    going.set()
    assert eventually(lambda: own_threads() == [])


def test_seeking_ends_the_thread_before(tokens, own_threads):
    with tl.TokenLoader(tokens, 2, 4) as loader:
        for _ in range(3):
            state = loader.get_state()
            next(loader)
            loader.set_state(state)
            assert own_threads() == []


def test_an_abandoned_loader_is_collected_and_its_thread_ends(tokens, own_threads):
    gc.collect()
    gc.disable()  # mid-iteration no cycle holds it: del is enough
    try:
        loader = tl.TokenLoader(tokens, 2, 4)
        next(loader)
        ref = weakref.ref(loader)
        del loader
        assert ref() is None
        assert eventually(lambda: own_threads() == [])
    finally:
        gc.enable()


def test_a_loader_in_a_cycle_is_collected_and_its_thread_ends(tokens, own_threads):
    loader = tl.TokenLoader(tokens, 2, 4)
    next(loader)
    cycle = [loader]
    cycle.append(cycle)
    ref = weakref.ref(loader)
    del loader, cycle
    gc.collect()
    assert ref() is None
    assert eventually(lambda: own_threads() == [])


def test_a_loader_abandoned_while_its_source_blocks_is_collected_at_once(own_threads):
    loader, going = loader_whose_source_blocks()
    began = time.monotonic()
    del loader
    assert time.monotonic() - began < 1
    assert len(own_threads()) == 1
    going.set()
    assert eventually(lambda: own_threads() == [])


@pytest.mark.parametrize("how", ["exhausted", "failed", "closed"])
def test_loader_and_tokens_are_freed_without_the_garbage_collector(how):
    # Tokens in RAM may be 19 GiB: they must go when the last name for them does.
    def use():
        tokens = WatchedTokens(Flaky(OSError, 1) if how == "failed" else lambda: None)
        loader = tl.TokenLoader(tokens, 4, 100, plan=tl.SequentialWindows())
        if how == "exhausted":
            for _ in loader:
                pass
        else:
            next(loader)
        if how == "failed":
            with contextlib.suppress(OSError):
                next(loader)
        if how == "closed":
            loader.close()
        return weakref.ref(loader), weakref.ref(tokens)

    gc.collect()
    gc.disable()
    try:
        loader, tokens = use()
        assert eventually(lambda: (loader(), tokens()) == (None, None), seconds=1)
    finally:
        gc.enable()


def test_two_loaders_over_the_same_tokens_do_not_disturb_each_other(tokens):
    plans = tl.ShuffledEpochs(0), tl.RandomWindows(0)
    with (
        tl.TokenLoader(tokens, 3, 10, plan=plans[0], transform=None) as a,
        tl.TokenLoader(tokens, 2, 20, plan=plans[1], transform=None) as b,
    ):
        for step in range(30):
            np.testing.assert_array_equal(next(a), rows_of(plans[0], 3 * step, 3, 10))
            np.testing.assert_array_equal(next(b), rows_of(plans[1], 2 * step, 2, 20))


# Statistics


def test_stats_are_exact_sums_of_the_clock(tokens, monkeypatch):
    def clock(times):
        return types.SimpleNamespace(perf_counter=lambda: next(times))

    faults = itertools.count(0, 2)
    squares = (float(i * i) for i in itertools.count())
    monkeypatch.setattr(_loader, "time", clock(iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.0, 30.0, 99.0])))
    monkeypatch.setattr(_pipeline, "time", clock(squares))
    monkeypatch.setattr(_pipeline, "_major_page_faults", lambda: next(faults))
    # Without a transform, each batch is taken when it is asked for and not before.
    loader = tl.TokenLoader(tokens, 4, 100, plan=tl.SequentialWindows(), prefetch=1, transform=None)
    assert loader.stats == tl.LoaderStats(0, 0, 0.0, 0.0, 0.0, 0)
    assert len(list(loader)) == 3
    assert loader.stats == tl.LoaderStats(
        batches=3,
        tokens=3 * 4 * 100,
        wait_seconds=1.0 + 2.0 + 3.0,  # the wait for the end is no wait for a batch
        gather_seconds=1.0 + 9.0 + 17.0,
        transfer_seconds=5.0 + 13.0 + 21.0,
        major_page_faults=2 * 3,
    )


def test_stats_are_a_snapshot_and_count_since_the_loader_was_made(tokens):
    with tl.TokenLoader(tokens, 3, 10) as loader:
        next(loader)
        before = loader.stats
        state = loader.get_state()
        next(loader)
        loader.set_state(state)
        next(loader)
        assert (before.batches, before.tokens) == (1, 30)
        after = loader.stats
    assert (after.batches, after.tokens) == (3, 90)
    assert after.wait_seconds > before.wait_seconds > 0
    assert after.gather_seconds > 0
    assert after.transfer_seconds > 0
    assert type(after.major_page_faults) is int
    assert after.major_page_faults >= 0


# What a profiler sees


def test_a_profile_names_the_phases_of_a_step(tokens, tmp_path):
    with (
        jax.profiler.trace(str(tmp_path)),
        tl.TokenLoader(tokens, 3, 10) as loader,
    ):
        for _ in range(3):
            next(loader)
    (trace,) = tmp_path.rglob("*.xplane.pb")
    found = set(re.findall(rb"tokenloader\.[a-z][a-z_]*", trace.read_bytes()))
    assert found == {
        b"tokenloader." + phase
        for phase in (b"wait", b"transform", b"plan", b"look_ahead", b"gather", b"transfer")
    }


# What users' own classes may do


def test_a_transform_that_holds_its_loader_does_not_keep_it(tokens, own_threads):
    class Trainer:
        def __init__(self, plan):
            self.loader = tl.TokenLoader(tokens, 4, 16, plan=plan, transform=self.transform)

        def transform(self, block):
            return tl.next_token(block)

    for plan in (tl.ShuffledEpochs(0), tl.SequentialWindows()):
        trainer = Trainer(plan)
        next(trainer.loader)
        loader = weakref.ref(trainer.loader)
        del trainer
        gc.collect()
        assert eventually(lambda loader=loader: loader() is None)
    assert eventually(lambda: own_threads() == [])


def test_a_plan_of_a_subclass_has_a_name_of_its_own(tokens):
    class Backwards(tl.ShuffledEpochs):
        def starts(self, samples, *, num_tokens, seq_len):
            found = super().bind(num_tokens, seq_len).window_starts(samples)
            return num_tokens - seq_len - 1 - found

    state = tl.TokenLoader(tokens, 4, 16, plan=Backwards(0)).get_state()
    tl.TokenLoader(tokens, 4, 16, plan=Backwards(0, num_epochs=3)).set_state(state)
    with pytest.raises(ValueError, match=r"plan: saved .*Backwards"):
        tl.TokenLoader(tokens, 4, 16, plan=tl.ShuffledEpochs(0)).set_state(state)


def test_a_plan_that_cannot_be_told_from_others_has_no_state_to_save(tokens):
    class Mine:
        def starts(self, samples, *, num_tokens, seq_len):
            return np.asarray(samples) % (num_tokens - seq_len)

    loader = tl.TokenLoader(tokens, 4, 16, plan=Mine())
    assert next(loader).inputs.shape == (4, 16)
    with pytest.raises(TypeError, match=r"plan Mine has no __repr__ of its own.*make it a dataclass"):
        loader.get_state()
