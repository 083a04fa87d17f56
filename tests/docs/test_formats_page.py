"""docs/formats.md: its blocks run, and the error it shows is the one that is raised."""

import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tokenloader import open_tokens

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests/formats/data"
PAGE = (ROOT / "docs/formats.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """What the page opens."""
    monkeypatch.chdir(tmp_path)
    tokens = np.arange(100, dtype=np.uint16)
    save_file({"tokens": tokens, "ids": tokens}, "train.safetensors")
    header = struct.pack("<256i", 20240520, 1, 100, *[0] * 253)
    for folder in ("nanogpt", "shards", "corpus", "more"):
        (tmp_path / folder).mkdir()
    for path in ("fineweb_train_000001.bin", "shards/fineweb_train_000001.bin"):
        Path(path).write_bytes(header + tokens.tobytes())
    for suffix in (".bin", ".idx"):
        shutil.copy(DATA / f"megatron_uint16{suffix}", f"corpus_text_document{suffix}")
    for suffix in ("", ".index"):
        shutil.copy(DATA / f"datatrove_uint16.ds{suffix}", f"00000_shuffled.ds{suffix}")
    tokens.tofile("nanogpt/train.bin")
    np.save("more/extra.npy", tokens)
    save_file({"tokens": tokens}, "corpus/train.safetensors")
    Path("corpus/model.safetensors.index.json").write_text(
        '{"weight_map": {"tokens": "train.safetensors"}}'
    )


def test_the_blocks_run_one_after_the_other(files):
    names = {"np": np}
    for block in blocks("python"):
        exec(compile(block, "docs/formats.md", "exec"), names)
    assert names["fourth_document"].tolist() == [11, 50256]


def test_the_error_it_shows_is_the_one_that_is_raised(files):
    Path("mystery.bin").write_bytes(np.array([5, 0, 65535, 50256, 7], np.uint16).tobytes())
    with pytest.raises(ValueError, match=r"^mystery") as raised:
        open_tokens("mystery.bin")
    assert blocks("text") == [f"{raised.value}\n"]


def test_readme_leads_to_it():
    assert "(docs/formats.md)" in (ROOT / "README.md").read_text()
