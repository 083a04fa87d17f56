"""The examples run as a user runs them: as programs, on this machine's own text."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SHORT = ["--steps", "4", "--log-every", "1", "--eval-every", "3", "--eval-tokens", "3000"]
SHORT += ["--checkpoint-every", "2"]
TINY = ["--seq-len=32", "--layers=1", "--heads=2", "--width=32", "--batch-size=32"]
TINY += ["--learning-rate=3e-3", "--warmup-steps=30"]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """What one run has compiled, the next ones take."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patches.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


def start(program, *arguments, env=os.environ):
    finished = subprocess.run(
        list(map(str, [sys.executable, EXAMPLES / program, *arguments])),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=env,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def run(out, *arguments, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "XLA_FLAGS": flags}
    return start("fineweb_gpt2.py", "--out", out, *arguments, env=env)


def rows(out, *names):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line).get(name) for name in names} for line in lines]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, run(out, "--demo", "--micro-batch=32", *TINY, *SHORT)


def train(folder, out, num_steps):
    """The short run on 50,000 tokens."""
    data = folder / "train.bin"
    np.random.default_rng(0).integers(0, 50, 50_000, dtype=np.uint16).tofile(data)
    arguments = [data, "--dtype=uint16", "--vocab-size=50", "--log-every=1", f"--steps={num_steps}"]
    said = start("train.py", *arguments, "--out", out).splitlines()
    assert said[0] == "49,500 tokens to train on, 500 for validation"
    return said[1:]


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A short run that was cut off after step 2."""
    out = tmp_path_factory.mktemp("cut")
    train(out, out, 2)
    return out


def test_the_short_run_goes_on_exactly_as_it_would_have(tmp_path, cut):
    whole = train(tmp_path, tmp_path / "whole", 4)
    assert len(whole) == 5
    shutil.copytree(cut, tmp_path / "cut")
    assert train(tmp_path, tmp_path / "cut", 4) == ["continuing after step 2", *whole[2:]]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB, and how to make it larger."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False)
        return done.returncode == 0

    if sys.platform != "linux" or os.geteuid() or not mount("size=8m"):
        pytest.skip("no file system can be mounted here")
    yield folder, lambda: mount("remount,size=64m")
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(tmp_path, small_disk, cut):
    folder, enlarge = small_disk
    shutil.copytree(cut, folder / "run")  # a second checkpoint finds no room
    with pytest.raises(AssertionError, match="No space left on device") as raised:
        train(tmp_path, folder / "run", 3)
    assert f"{folder}/run/checkpoints/3." in str(raised.value)
    assert enlarge()
    assert "continuing after step 2" in train(tmp_path, folder / "run", 3)
    assert {path.name for path in (folder / "run" / "checkpoints").iterdir()} == {"2", "3"}


def test_the_short_run_refuses_token_ids_that_the_model_has_not(tmp_path):
    np.save(tmp_path / "train.npy", np.full(10_000, 70, np.uint16))
    with pytest.raises(AssertionError, match="token ids of 70 or more; pass a larger --vocab-size"):
        start("train.py", tmp_path / "train.npy", "--vocab-size=70", "--out", tmp_path / "run")


def test_the_short_run_is_short():
    assert len((EXAMPLES / "train.py").read_text().splitlines()) < 120


def test_the_reading_list_has_every_file_once():
    listed = re.findall(r"^\| \[`.*`\]\((.*)\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_the_demo_tells_its_loss_that_of_bigrams_and_a_sample(demo):
    out, said = demo
    assert "this model" in said
    assert "byte bigrams" in said
    assert "a sample:" in said
    assert (out / "loss.png").stat().st_size > 10_000
    assert [row["step"] for row in rows(out, "step")] == [1, 2, 3, 4]
    assert all(0 < row["loss"] < 10 for row in rows(out, "loss"))
    assert [row["val_loss"] is not None for row in rows(out, "val_loss")] == [
        False,
        False,
        True,
        True,
    ]


def test_the_demo_corpus_is_documents_with_an_end_of_text_each(demo):
    out, _ = demo
    for split in ("train", "validation"):
        tokens = load_file(out / f"stdlib-{split}.safetensors")["tokens"]
        assert tokens.dtype == np.uint16
        assert tokens.max() == tokens[-1] == 256
        assert len(tokens) > 100_000


def test_a_run_that_was_cut_off_goes_on_exactly_as_it_would_have(demo, tmp_path):
    whole, _ = demo
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "4")  # as if killed after step 3
    said = run(cut, "--demo", "--micro-batch=32", *TINY, *SHORT)
    assert "continuing after step 2" in said
    assert rows(cut, "step", "loss", "val_loss") == rows(whole, "step", "loss", "val_loss")


def test_other_token_files_train_on_four_devices(demo, tmp_path):
    out, _ = demo
    data = [f"--data={out / 'stdlib-train.safetensors'}", "--vocab-size=257"]
    data += [f"--validation={out / 'stdlib-validation.safetensors'}"]
    run(tmp_path / "four", *data, "--micro-batch=4", *TINY, *SHORT, devices=4)
    for name in ("loss", "val_loss"):
        four, one = (
            [row[name] for row in rows(run, name) if row[name]] for run in (tmp_path / "four", out)
        )
        np.testing.assert_allclose(four, one, rtol=1e-4)


def test_several_processes_train_on_one_mesh_and_another_number_of_them_goes_on(tmp_path):
    arguments = ["--steps=4", "--checkpoint-every=2", "--seq-len=16", "--width=16", "--layers=1"]

    # Several processes are tried as a user runs them, each compiling for itself.
    apart = {"XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"}
    env = {name: value for name, value in os.environ.items() if name not in apart}

    def train(out, num_processes):
        loopback = ["--loopback", num_processes, "--out", out]
        said = start("multihost.py", *loopback, *arguments, env=env)
        lines = [line for line in said.splitlines() if "Gloo" not in line]
        assert re.fullmatch(r".*loss [0-9.]+ over 20,000 targets, each counted once", lines[-1])
        losses = [re.search(r"loss ([0-9.]+)", line) for line in lines]
        return lines, [float(match[1]) for match in losses if match]

    _, whole = train(tmp_path / "run", 2)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")  # as if killed after step 3
    lines, resumed = train(tmp_path / "run", 1)
    assert "continuing after step 2" in lines
    np.testing.assert_allclose(resumed, whole, atol=2e-3)
