"""Replay: the same answers as the loader that saved the state, without it."""

import itertools
import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from helpers import NAMED_PLANS

import tokenloader as tl
from tokenloader.check.replay import replay
from tokenloader.plans.cursor import probe

N = 997
TOKENS = np.random.default_rng(0).integers(0, 50, N).astype(np.uint16)
EOT = 7


@pytest.fixture
def tokens():
    return tl.open_tokens(TOKENS)


def saved_after(tokens, plan, sizes, seq_len=20):
    """The state after 3 steps of each batch size, as read from JSON, and the last loader."""
    state = None
    for batch_size in sizes:
        loader = tl.TokenLoader(tokens, batch_size, seq_len, plan=plan, transform=None)
        with loader:
            if state is not None:
                loader.set_state(state)
            for _ in itertools.islice(loader, 3):
                pass
            state = json.loads(json.dumps(loader.get_state()))
    return state, loader


@pytest.mark.parametrize("plan", NAMED_PLANS, ids=repr)
def test_every_step_is_what_the_loader_says_it_is(tokens, plan):
    state, loader = saved_after(tokens, plan, [2, 5, 3])
    for step in range(11):
        replayed = replay(state, tokens, step)
        np.testing.assert_array_equal(replayed.starts, loader.window_starts(step), strict=True)
        np.testing.assert_array_equal(replayed.tokens, loader.window_tokens(step), strict=True)
        assert len(replayed.samples) == len(replayed.starts)
        assert replayed.documents is None
    assert replay(state, tokens, 4).samples.tolist() == [11, 12, 13, 14, 15]


def test_a_step_far_ahead_is_replayed_at_once(tokens):
    state, _ = saved_after(tokens, tl.RandomWindows(0), [4])
    expected = tl.RandomWindows(0).bind(N, 20).window_starts(4 * 10**15 + np.arange(4))
    np.testing.assert_array_equal(replay(state, tokens, 10**15).starts, expected)


def test_documents_are_the_spans_between_ends_of_text(tokens):
    state, _ = saved_after(tokens, tl.RandomWindows(0), [50])
    replayed = replay(state, tokens, 1, eos_id=EOT)
    ends = set()
    for start, row, spans in zip(replayed.starts, replayed.tokens, replayed.documents, strict=True):
        assert spans.dtype == np.int64
        assert spans[0, 0] == start
        assert spans[-1, 1] == start + 21
        assert (spans[1:, 0] == spans[:-1, 1]).all()
        assert (spans[:, 0] < spans[:, 1]).all()
        parts = [TOKENS[begin:end] for begin, end in spans]
        assert all((part[:-1] != EOT).all() for part in parts)
        assert all(part[-1] == EOT for part in parts[:-1])
        assert np.concatenate(parts).tolist() == row.tolist()
        ends.add(int(row[-1]))
    assert EOT in ends  # also a window that ends with its document


def test_documents_with_an_id_before_them_begin_with_it(tokens):
    state, _ = saved_after(tokens, tl.RandomWindows(0), [50])
    replayed = replay(state, tokens, 1, bos_id=EOT)
    begins = set()
    for start, row, spans in zip(replayed.starts, replayed.tokens, replayed.documents, strict=True):
        parts = [TOKENS[begin:end] for begin, end in spans]
        assert (spans[0, 0], spans[-1, 1]) == (start, start + 21)
        assert all((part[1:] != EOT).all() for part in parts)
        assert all(part[0] == EOT for part in parts[1:])
        assert np.concatenate(parts).tolist() == row.tolist()
        begins |= {int(row[0]), int(row[-1]) + 100}
    assert {
        EOT,
        EOT + 100,
    } <= begins  # windows that begin with a document, or end with its first token


@pytest.mark.parametrize("name", ["eos_id", "bos_id"])
def test_a_window_of_one_document_is_one_span(tokens, name):
    state, _ = saved_after(tokens, tl.SequentialWindows(), [1])
    assert replay(state, tokens, 2, **{name: 999}).documents[0].tolist() == [[40, 61]]


def test_it_needs_neither_jax_nor_a_loader(tmp_path, tokens):
    state, loader = saved_after(tokens, NAMED_PLANS[4], [2, 3])
    TOKENS.tofile(tmp_path / "a.bin")
    (tmp_path / "state.json").write_text(json.dumps(state))
    code = f"""if True:
        import json, sys
        import tokenloader as tl
        from tokenloader.check.replay import replay
        tokens = tl.open_tokens({str(tmp_path / "a.bin")!r}, dtype="uint16")
        state = json.load(open({str(tmp_path / "state.json")!r}))
        print(replay(state, tokens, 4).starts.tolist(), "jax" in sys.modules)
    """
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == f"{loader.window_starts(4).tolist()} False\n"


# Refused


def test_other_tokens_are_refused_with_what_differs(tokens):
    state, _ = saved_after(tokens, NAMED_PLANS[0], [2])
    other = tl.open_tokens(TOKENS[:-1].copy())
    with pytest.raises(ValueError, match="is not what this state was saved with") as caught:
        replay(state, other, 0)
    assert repr(other) in str(caught.value)
    assert f"data: saved {tokens.fingerprint()}, here {other.fingerprint()}" in str(caught.value)
    assert "another number of tokens" in str(caught.value)


def test_a_step_that_is_none_is_refused(tokens):
    state, _ = saved_after(tokens, tl.SequentialWindows(), [10])
    with pytest.raises(ValueError, match="step -1 is negative"):
        replay(state, tokens, -1)
    with pytest.raises(ValueError, match=r"step 5 is past the end: SequentialWindows\(\) ends"):
        replay(state, tokens, 5)
    with pytest.raises(TypeError, match="float"):
        replay(state, tokens, 1.0)


def test_what_is_no_state_is_refused(tokens):
    with pytest.raises(ValueError, match="state has version None"):
        replay({}, tokens, 0)
    with pytest.raises(TypeError, match="state is of type list; expected the dict"):
        replay([], tokens, 0)


def test_a_state_whose_windows_were_others_is_refused(tokens):
    # As those of another release would be, whose plan of the same name draws other windows.
    state, _ = saved_after(tokens, NAMED_PLANS[0], [2])
    with pytest.raises(ValueError, match=r"probe: saved 0123456789abcdef, here .* another release"):
        replay({**state, "probe": "0123456789abcdef"}, tokens, 0)


def test_a_plan_of_ones_own_is_refused_with_the_way_in_python(tokens):
    state, _ = saved_after(tokens, NAMED_PLANS[0], [2])
    with pytest.raises(ValueError, match=r"plan is EveryTen\(\), which is none of RandomWindows"):
        replay({**state, "plan": "EveryTen()"}, tokens, 0)


@pytest.mark.parametrize(("batch_size", "most"), [(2**30, 2**18), (2**18 + 1, 2**18), (2**61, 2**18)])
def test_a_state_of_more_windows_than_fit_in_memory_is_refused_before_they_are_made(
    tokens, batch_size, most
):
    state, _ = saved_after(tokens, NAMED_PLANS[0], [2])
    forged = {
        **state,
        "step": 0,
        "sample": 0,
        "batch_sizes": f"0:0:{batch_size}",
        "probe": probe(NAMED_PLANS[0].bind(N, 20), 0),
    }
    told = (
        f"state: step 0 has {batch_size:,} windows of seq_len=20 by its batch_sizes; expected {most:,} at"
    )
    tracemalloc.start()
    with pytest.raises(ValueError, match=told):
        replay(forged, tokens, 0)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
