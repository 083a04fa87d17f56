"""The README: its blocks run, and its commands exist."""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_python_blocks_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("train", "validation"):
        tokens = rng.integers(0, 50257, 100_000, dtype=np.uint16)
        save_file({"tokens": tokens}, f"{name}.safetensors")
    seen = []

    def train_step(state, inputs, targets):
        assert inputs.shape == targets.shape == (32, 1024)
        assert inputs.dtype == np.int32
        seen.append("train_step")
        return state, 0.0

    def evaluate(state, inputs, targets, loss_mask):
        seen.append(int(loss_mask.sum()))
        return 2.0 * seen[-1], seen[-1]

    names = {"train_step": train_step, "evaluate": evaluate, "state": None, "num_steps": 3}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert seen[:3] == ["train_step"] * 3
    assert names["num_targets"] == sum(seen[3:]) == 100_000 - 1
    assert names["loss_sum"] == 2 * names["num_targets"]
    assert names["checkpoint"]["step"] == 3
    names["loader"].close()


@pytest.mark.parametrize("block", blocks("sh"))
def test_the_commands_exist(block):
    for line in block.splitlines():
        command = line.split("#")[0].split()
        if command[0] == "make":
            subprocess.run([*command, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
        else:
            assert command[:3] == ["python", "-m", "benchmarks"], line


def test_it_is_short_and_its_code_fits_a_narrow_page():
    assert os.path.getsize(ROOT / "README.md") < 12_000
    assert max(len(line) for block in blocks("python") for line in block.splitlines()) <= 88
