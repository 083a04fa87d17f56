"""A run cut anywhere, with everything changed at the cut that may be, hands out the samples in order."""

import itertools
import json

import numpy as np
import pytest
from helpers import make_mesh, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tokenloader as tl
from tokenloader.check.replay import replay

N, T = 997, 100
TOKENS = random_tokens(N)
PLANS = [  # of 8 windows an epoch, so that cuts fall around the ends of epochs
    tl.ShuffledEpochs(seed=1),
    tl.ShuffledEpochs(seed=2, num_epochs=5),
    tl.ShuffledBlocks(seed=1, block_tokens=300, open_blocks=2),
    tl.RandomWindows(seed=1),
    tl.SequentialWindows(),
    tl.Mixture({range(500): 3, range(500, 800): 1, range(800, 997): 0.5}, tl.ShuffledEpochs(3)),
    tl.Mixture({range(400): 3, range(400, 997): 2}, tl.ShuffledEpochs(seed=3, num_epochs=9)),
    tl.Mixture({range(400): 3, range(400, 997): 2}, tl.ShuffledBlocks(3, 200, 2, num_epochs=9)),
    tl.Mixture({range(100, 997): 1}, tl.SequentialWindows()),
]


def rows_of(plan, count):
    """The first `count` windows of an uninterrupted run, or all there are."""
    bound = plan.bind(N, T)
    if bound.num_samples is not None and bound.valid_targets(np.arange(1)) is None:
        count = min(count, bound.num_samples)
    starts = bound.window_starts(np.arange(count))
    return [TOKENS[start : start + T + 1] for start in starts.tolist()]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same tokens: in an array, mapped, in RAM, and cut into files in two ways."""
    folder = tmp_path_factory.mktemp("tokens")

    def opened(*cuts, residency):
        files = [folder / f"{residency}-{len(cuts)}-{i}.bin" for i in range(len(cuts) + 1)]
        for file, part in zip(files, np.split(TOKENS, cuts), strict=True):
            part.tofile(file)
        return tl.open_tokens(files, dtype="uint16", residency=residency)

    return [
        tl.open_tokens(TOKENS),
        opened(residency="mmap"),
        opened(residency="ram"),
        opened(300, 303, 310, 800, residency="mmap"),
        opened(1, 500, residency="ram"),
    ]


def placed(num_devices):
    if num_devices == 1:
        return None
    return NamedSharding(make_mesh(num_devices), P("a"))


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_every_cut_around_the_end_of_an_epoch_is_seamless(plan, batch_size):
    tokens, expected = tl.open_tokens(TOKENS), rows_of(plan, 60)
    with tl.TokenLoader(tokens, batch_size, T, plan=plan, transform=None) as first:
        for step in range(20 // batch_size):
            state = json.loads(json.dumps(first.get_state()))
            assert (state["step"], state["sample"]) == (step, step * batch_size)
            for other in (1, 4, 7):
                with tl.TokenLoader(tokens, other, T, plan=plan, transform=None) as second:
                    second.set_state(state)
                    rows = list(itertools.chain.from_iterable(itertools.islice(second, 3)))
                np.testing.assert_array_equal(
                    rows, expected[step * batch_size : step * batch_size + len(rows)]
                )
            if next(first, None) is None:
                return


leg = st.fixed_dictionaries(
    {
        "back_to": st.one_of(st.none(), st.integers(0, 7)),  # the last checkpoint, or one before
        "steps": st.integers(0, 9),
        "batch_size": st.sampled_from([1, 2, 3, 4, 5, 8]),
        "devices": st.sampled_from([1, 2, 4, 8]),
        "prefetch": st.integers(1, 5),
        "source": st.integers(0, 4),
    }
)


@settings(deadline=None, max_examples=25)
@given(plan=st.sampled_from(PLANS), legs=st.lists(leg, min_size=2, max_size=7))
def test_a_run_of_many_legs_is_the_uninterrupted_one_and_knows_all_its_steps(sources, plan, legs):
    checkpoints = []  # after each leg: the state, and the blocks that the run has had then
    for leg in legs:
        tokens, batch_size = sources[leg["source"]], leg["batch_size"]
        sharding = placed(leg["devices"] if batch_size % leg["devices"] == 0 else 1)
        with tl.TokenLoader(
            tokens,
            batch_size,
            T,
            plan=plan,
            sharding=sharding,
            prefetch=leg["prefetch"],
            transform=None,
        ) as loader:
            blocks = []
            if checkpoints:
                last = -1 if leg["back_to"] is None else leg["back_to"] % len(checkpoints)
                state, blocks = checkpoints[last]
                loader.set_state(state)
            blocks = blocks + [np.asarray(b) for b in itertools.islice(loader, leg["steps"])]
            state = json.loads(json.dumps(loader.get_state()))
            checkpoints.append((state, blocks))
            # In order and whole, from the first sample on.
            rows = list(itertools.chain.from_iterable(blocks))
            np.testing.assert_array_equal(rows, rows_of(plan, len(rows)))
            assert (state["step"], state["sample"]) == (len(blocks), len(rows))
            # Every step of the past, from the loader, and from the state alone.
            for step, block in enumerate(blocks):
                np.testing.assert_array_equal(loader.window_tokens(step), block)
                np.testing.assert_array_equal(replay(state, sources[0], step).tokens, block)
