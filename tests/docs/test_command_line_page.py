"""The page docs/command-line.md: every command's output in it is what the command prints.

`python tests/docs/test_command_line_page.py` writes the outputs anew. Numbers that differ from run to run
(speeds, memory) are not compared.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tokenloader import ShuffledEpochs, TokenLoader, open_tokens, write_tokens
from tokenloader.cli.commands import commands, main

PAGE = Path(__file__).parent.parent.parent / "docs/command-line.md"
EXAMPLE = re.compile(r"^```console\n\$ (tokenloader [^\n]*(?:\\\n[^\n]*)*)\n(.*?)^```\n", re.M | re.S)


def write_examples():
    """Writes the files that the page speaks of to the current directory."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.2, 1.1, 3000).astype(int) + 1
    # Frequent and rare ids as in a text, but not by rng.zipf: what that draws changed after numpy 2.0.
    ids = (50_000 ** rng.random(lengths.sum())).astype(int)
    documents = np.split(ids, lengths.cumsum()[:-1])
    for name, part in (
        ("train.safetensors", documents[:2800] + documents[7:11]),
        ("validation.safetensors", documents[2800:] + documents[40:41]),
    ):
        write_tokens(name, (ids for document in part for ids in (document, [50256])))
    np.append(ids, 50_300).astype(np.uint16).byteswap().tofile("swapped.bin")
    with open_tokens("train.safetensors") as tokens:
        state = TokenLoader(tokens, 8, 1024, plan=ShuffledEpochs(seed=0)).get_state()
    Path("state.json").write_text(json.dumps(state))
    texts = [f"This is story number {i}. " * (i % 9 + 1) for i in range(400)]
    Path("stories.txt").write_text("\n<|endoftext|>\n".join(texts))
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save("tokenizer.json")


def output_of(command):
    bytes_out, err = io.BytesIO(), io.StringIO()
    out = io.TextIOWrapper(bytes_out, encoding="utf-8", write_through=True)
    argv, sys.argv = sys.argv, shlex.split(command.replace("\\\n", " "))
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            contextlib.suppress(SystemExit),
        ):
            main()
    finally:
        sys.argv = argv
    return bytes_out.getvalue().decode() + err.getvalue()


def outputs():
    """(command, output now, output on the page) of each example, in a fresh directory."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write_examples()
            return [
                (command, output_of(command), printed)
                for command, printed in EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
            ]
        finally:
            os.chdir(before)


def steady(command, output):
    """The output without what differs from run to run and from machine to machine."""
    if " bench " in command:
        return [line.split()[:1] for line in output.splitlines() if not line.startswith(" ")]
    output = re.sub(r"^cpu .*\n", "", output, flags=re.M)
    return re.sub(r"(page cache +).*", r"\1", output)


@pytest.mark.skipif(sys.platform != "linux", reason="the page was written on Linux")
def test_every_output_on_the_page_is_what_the_command_prints():
    examples = outputs()
    assert {command.split()[1] for command, *_ in examples} >= set(commands.commands)
    for command, now, printed in examples:
        assert steady(command, now) == steady(command, printed), command


def test_the_page_has_a_section_for_every_command():
    sections = re.findall(r"^## `tokenloader (\w+)`", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(sections) == sorted(commands.commands)


def write_page():
    page = PAGE.read_text(encoding="utf-8")
    for command, now, printed in outputs():
        old = f"$ {command}\n{printed}```"
        assert old in page
        page = page.replace(old, f"$ {command}\n{now}```", 1)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_page()
