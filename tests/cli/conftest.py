"""Token files in a directory of their own, and the command line called on them."""

import sys

import numpy as np
import pytest

import tokenloader as tl
from tokenloader.cli.commands import main

END = 50_256


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.2, 100_000) - 1
    ids = ids[ids < 20_000]
    ids[499::500] = END
    tl.write_tokens("train.safetensors", ids)
    np.save("train.npy", ids.astype(np.uint16))
    ids.astype("<u2").tofile("train.bin")
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tokenloader", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call
