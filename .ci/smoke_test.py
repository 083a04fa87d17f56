"""Uses an installed tokenloader as its users do, in the current directory, which is empty.

No package but its dependencies is needed, not even pytest. The argument is the extra to try, or nothing.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import requires, version
from pathlib import Path

import numpy as np

import tokenloader as tl


def output(*program):
    """Runs a program; returns what it prints."""
    arguments = list(map(str, program))
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=300).stdout


def command(*arguments):
    """Runs the installed command line; returns what it prints."""
    return output(Path(sys.executable).with_name("tokenloader"), *arguments)


def print_versions(extra):
    """Prints the versions of the dependencies that an extra names, or of those that no extra names."""
    requirements = [line.partition(";") for line in requires("tokenloader")]
    names = [
        re.match(r"[\w-]+", name)[0]
        for name, _, marker in requirements
        if (extra in marker if extra else not marker)
    ]
    print("  " + ", ".join(f"{name} {version(name)}" for name in names), flush=True)


def library_and_commands():
    """Opens a file, takes three batches, resumes, evaluates; then runs every command on the same file."""
    assert "site-packages" in tl.__file__, tl.__file__
    ids = np.arange(20_000, dtype=np.uint16) % 997
    tl.write_tokens("train.safetensors", [ids])
    tokens = tl.open_tokens("train.safetensors")
    plan = tl.ShuffledEpochs(seed=0)
    loader = tl.TokenLoader(tokens, 8, 64, plan=plan, transform=tl.segment_documents(0))
    for step in range(3):
        batch = next(loader)
        assert batch.inputs.shape == (8, 64)
        windows = loader.window_tokens(step)
        np.testing.assert_array_equal(batch.inputs, windows[:, :-1])
        np.testing.assert_array_equal(batch.targets, windows[:, 1:])
    state = json.loads(json.dumps(loader.get_state()))
    expected = next(loader).inputs
    resumed = tl.TokenLoader(tokens, 8, 64, plan=plan, transform=tl.segment_documents(0))
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed).inputs, expected)
    once = tl.TokenLoader(tokens, 8, 64, plan=tl.SequentialWindows())
    assert sum(int(batch.loss_mask.sum()) for batch in once) == len(tokens) - 1
    Path("state.json").write_text(json.dumps(state))

    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": "cache"}
    with suppress(ConnectionError):
        tl.open_tokens("hf://datasets/owner/name/train.safetensors")
        raise AssertionError("a file that cannot be fetched was opened")

    assert json.loads(command("info", "train.safetensors", "--json"))["num_tokens"] == 20_000
    assert json.loads(command("check", "train.safetensors", "--json"))["highest_id"] == 996
    command("convert", "train.safetensors", "train.npy")
    np.testing.assert_array_equal(np.load("train.npy"), ids)
    replayed = json.loads(command("replay", "state.json", "train.npy", "--step", "2", "--json"))
    assert [row["start"] for row in replayed["rows"]] == loader.window_starts(2).tolist()
    command("bench", "train.safetensors", "--batch-size", 4, "--seq-len", 64, "--seconds", 0.1)
    assert command("--version") == f"tokenloader {tl.__version__}\n"


def tokenize():
    """Turns a Parquet file of two documents into tokens."""
    import pyarrow
    import pyarrow.parquet
    from tokenizers import Tokenizer, models

    vocabulary = {letter: i for i, letter in enumerate("abc")} | {"<|endoftext|>": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save("tokenizer.json")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["abc", "cab"]}), "text.parquet")
    command("tokenize", "text.parquet", "--tokenizer", "tokenizer.json", "--out", "text.safetensors")
    with tl.open_tokens("text.safetensors") as tokens:
        assert tokens[:].tolist() == [0, 1, 2, 3, 2, 0, 1, 3]


def examples():
    """Trains for four steps, twice two, with checkpoints between them."""
    tl.write_tokens("words.safetensors", [np.arange(20_000, dtype=np.uint16) % 50])
    program = Path(__file__).parent.parent / "examples" / "train.py"
    for steps in (2, 4):
        options = ["--vocab-size=50", "--log-every=1", f"--steps={steps}"]
        said = output(sys.executable, program, "words.safetensors", *options)
    assert "continuing after step 2" in said, said


if __name__ == "__main__":
    extra = sys.argv[1]
    print_versions(extra)
    {"": library_and_commands, "tokenize": tokenize, "examples": examples}[extra]()
