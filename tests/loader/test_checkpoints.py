"""A loader's state inside checkpoints: Orbax's, beside parameters, and in the shape of Grain's."""

import inspect
import json
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import random_tokens

import tokenloader as tl

grain = pytest.importorskip("grain", reason="Grain has no wheel for this platform")

TOKENS = random_tokens(2000)
PLAN = tl.Mixture({range(1500): 0.7, range(1500, 2000): 0.3}, tl.ShuffledEpochs(seed=5))
KINDS = {
    "JSON": (ocp.args.JsonSave, ocp.args.JsonRestore),
    "pytree": (ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
}


@pytest.fixture
def token_file(tmp_path):
    TOKENS.tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin"


def open_loader(token_file, batch_size):
    tokens = tl.open_tokens(token_file, dtype="uint16")
    return tl.TokenLoader(tokens, batch_size, 20, plan=PLAN, transform=None)


def train(folder, token_file, kind):
    """Five steps of 4, three of 6, and a checkpoint. What the three steps after it would train on."""
    first = open_loader(token_file, 4)
    for _ in range(5):
        next(first)
    loader = open_loader(token_file, 6)
    loader.set_state(first.get_state())
    first.close()
    params = {"w": jnp.zeros(3)}
    for _ in range(3):
        params = {"w": params["w"] + next(loader)[0, :3]}
    with ocp.CheckpointManager(folder) as checkpoints:
        save, _ = KINDS[kind]
        items = ocp.args.Composite(params=ocp.args.StandardSave(params), loader=save(loader.get_state()))
        checkpoints.save(8, args=items)
    with loader:
        return params, [next(loader) for _ in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_in_an_orbax_checkpoint_beside_params_goes_on_with_the_next_batch(
    tmp_path, token_file, kind
):
    params, following = train(tmp_path / "run", token_file, kind)
    _, restore = KINDS[kind]
    with ocp.CheckpointManager(tmp_path / "run") as checkpoints:
        saved = checkpoints.restore(
            checkpoints.latest_step(),
            args=ocp.args.Composite(params=ocp.args.StandardRestore({"w": jnp.zeros(3)}), loader=restore()),
        )
    np.testing.assert_array_equal(saved.params["w"], params["w"])
    with open_loader(token_file, 6) as loader:
        loader.set_state(saved.loader)
        assert loader.get_state()["batch_sizes"] == "0:0:4 5:20:6"
        for step, block in enumerate(following, start=8):
            np.testing.assert_array_equal(loader.window_tokens(step), block)
            np.testing.assert_array_equal(next(loader), block)
        assert len(loader.window_starts(4)) == 4


def test_a_fresh_process_goes_on_from_an_orbax_checkpoint(tmp_path, token_file):
    _, following = train(tmp_path / "run", token_file, "JSON")
    script = f"""
        import numpy as np, orbax.checkpoint as ocp, tokenloader as tl
        with ocp.CheckpointManager({str(tmp_path / "run")!r}) as checkpoints:
            items = ocp.args.Composite(loader=ocp.args.JsonRestore())
            state = checkpoints.restore(8, args=items).loader
        tokens = tl.open_tokens({str(token_file)!r}, dtype="uint16")
        ranges = {{range(1500): 0.7, range(1500, 2000): 0.3}}
        plan = tl.Mixture(ranges, tl.ShuffledEpochs(seed=5))
        with tl.TokenLoader(tokens, 6, 20, plan=plan, transform=None) as loader:
            loader.set_state(state)
            np.save({str(tmp_path / "rows.npy")!r}, [next(loader) for _ in range(3)])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=100)
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), following)


# What code written for Grain's iterators does with any iterator


def loader_of_ours():
    return tl.TokenLoader(tl.open_tokens(TOKENS), 3, 20, plan=PLAN, transform=None)


def iterator_of_grain():
    windows = tl.Windows(tl.open_tokens(TOKENS), 20)
    return iter(grain.MapDataset.source(windows).shuffle(seed=0).repeat().batch(3).to_iter_dataset())


@pytest.mark.parametrize("make", [loader_of_ours, iterator_of_grain])
def test_loader_and_grain_iterator_are_saved_and_restored_by_the_same_code(make):
    iterator = make()
    assert iter(iterator) is iterator
    for _ in range(4):
        next(iterator)
    text = json.dumps(iterator.get_state(), indent=4)  # as grain.checkpoint writes it
    following = [np.asarray(next(iterator)) for _ in range(5)]
    iterator.set_state(json.loads(text))
    np.testing.assert_array_equal([next(iterator) for _ in range(5)], following)
    resumed = make()
    resumed.set_state(json.loads(text))
    np.testing.assert_array_equal([next(resumed) for _ in range(5)], following)
    for one in (iterator, resumed):
        one.close()


def test_the_methods_take_what_those_of_grains_iterators_take():
    for name in ("get_state", "set_state"):
        theirs = inspect.signature(getattr(grain.DatasetIterator, name))
        ours = inspect.signature(getattr(tl.TokenLoader, name))
        assert list(theirs.parameters) == list(ours.parameters)[: len(theirs.parameters)]
