"""docs/plans.md: its blocks run, it has every plan, and what it says and draws of ShuffledBlocks is so."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import planned_rows, random_tokens
from safetensors.numpy import save_file

import tokenloader as tl

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/plans.md").read_text()
README = (ROOT / "README.md").read_text()
TOKENS = random_tokens(50_000)
MIB = 2**20


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the blocks define, run one after the other."""
    monkeypatch.chdir(tmp_path)
    save_file({"tokens": TOKENS}, "train.safetensors")
    defined = {}
    for block in blocks("python"):
        exec(compile(block, "docs/plans.md", "exec"), defined)
    return defined


def test_the_blocks_run_one_after_the_other(names):
    np.testing.assert_array_equal(
        names["batch"].inputs, planned_rows(TOKENS, names["Echoed"](), 0, 32, 16)[:, :-1]
    )


def test_the_plan_of_ones_own_has_each_block_read_once_for_two_passes(names):
    plan = names["Echoed"]().bind(len(TOKENS), 16)
    assert plan.num_blocks == 12
    samples = np.arange(512 * 12)
    windows, times = np.unique(plan.window_starts(samples), return_counts=True)
    np.testing.assert_array_equal(windows, np.arange(256 * 12) * 16)
    assert set(times) == {2}
    reads, times = np.unique(plan.reads(samples), axis=0, return_counts=True)
    assert set(times) == {512}
    assert reads[-1].tolist() == [11 * 256 * 16, 12 * 256 * 16 + 1]


def test_the_plan_of_ones_own_says_how_many_tokens_it_needs(names):
    assert names["Echoed"]().bind(256 * 16 + 1, 16).num_blocks == 1
    with pytest.raises(ValueError, match="4,096 tokens are fewer than a block of 256 windows"):
        names["Echoed"]().bind(256 * 16, 16)


@pytest.mark.parametrize("page", [PAGE, README], ids=["docs/plans.md", "README.md"])
def test_the_table_has_every_plan(page):
    listed = re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)
    exported = (getattr(tl, name) for name in tl.__all__ if name != "Plan")
    plans = [one.__name__ for one in exported if isinstance(one, type) and issubclass(one, tl.Plan)]
    assert sorted(listed) == sorted(plans)


def test_the_drawing_has_every_window_once_and_opens_a_block_in_each_round():
    drawing = next(block for block in blocks("text") if "lane 0" in block)
    lanes = [re.findall(r"(\|?) ?([A-H][1-4])\b", line) for line in drawing.splitlines() if "lane" in line]
    windows = sorted(window for lane in lanes for _, window in lane)
    assert windows == [f"{block}{window}" for block in "ABCDEFGH" for window in "1234"]
    opened = sorted(number for lane in lanes for number, (bar, _) in enumerate(lane) if bar)
    assert opened == [1, 2, 3, 4, 5, 6, 7]
    for lane in lanes:  # the windows between two bars are of one block, and end to end in it
        parts = re.split(r"\|", "".join(bar + window for bar, window in lane))
        for part in parts:
            numbers = sorted(map(int, re.findall(r"\d", part)))
            assert len(set(re.findall(r"[A-H]", part))) == 1
            assert numbers == list(range(numbers[0], numbers[-1] + 1))


def test_the_sizes_are_those_of_the_defaults():
    plan, seq_len = tl.ShuffledBlocks(seed=0), 1024
    assert plan.block_tokens == 2**18
    assert plan.block_tokens * 2 * plan.open_blocks == 512 * MIB
    assert plan.block_tokens // seq_len * plan.open_blocks == 262_144
    bound = plan.bind(10**10, seq_len)

    def read_mib(first):
        reads = np.unique(bound.reads(np.arange(first, first + plan.open_blocks)), axis=0)
        assert len(reads) == plan.open_blocks
        return 2 * (reads[:, 1] - reads[:, 0]).sum() / MIB

    assert read_mib(0) == pytest.approx(256, rel=0.01)  # an epoch begins
    assert read_mib(10**6) == pytest.approx(512, rel=0.01)  # a run is resumed
