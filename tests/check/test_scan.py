"""Scanning: each token once and in order, whatever holds it, and no thread or file left behind."""

import threading

import numpy as np
import pytest

import tokenloader as tl
from tokenloader.check.scan import scan

IDS = (np.arange(10_007) * 7919 % 65_536).astype(np.uint16)


def sources(folder):
    tl.write_tokens(folder / "a.safetensors", IDS)
    parts = [folder / f"p{i}.npy" for i in range(3)]
    for part, ids in zip(parts, np.split(IDS, [1, 5000]), strict=True):
        np.save(part, ids)
    return {
        "file": tl.open_tokens(folder / "a.safetensors"),
        "files": tl.open_tokens(parts),
        "array": tl.open_tokens(IDS),
        "mixed": tl.open_tokens([parts[0], IDS[1:5000], parts[2]]),
        "ram": tl.open_tokens(parts, residency="ram"),
    }


@pytest.mark.parametrize("held", ["file", "files", "array", "mixed", "ram"])
@pytest.mark.parametrize("chunk_tokens", [1, 4999, 10_007, 20_000])
def test_every_chunk_is_looked_at_in_order(tmp_path, held, chunk_tokens):
    tokens = sources(tmp_path)[held]
    if chunk_tokens == 1:
        tokens = tl.open_tokens(tokens[:100])
    found = list(scan(tokens, lambda ids, start: (start, ids.copy()), chunk_tokens))
    assert [start for start, _, _ in found] == list(range(0, len(tokens), chunk_tokens))
    assert all(start == where for start, _, (where, _) in found)
    assert found[-1][1] == len(tokens)
    np.testing.assert_array_equal(np.concatenate([ids for *_, (_, ids) in found]), tokens[:])


def test_an_error_in_a_thread_is_the_callers_and_ends_the_scan(tmp_path):
    def look(ids, start):
        if start == 300:
            raise ArithmeticError(f"at {start}")

    with pytest.raises(ArithmeticError, match="at 300"):
        list(scan(tl.open_tokens(IDS), look, 100))
    assert not [t for t in threading.enumerate() if t.name.startswith("tokenloader-scan")]


def test_a_scan_that_is_left_ends_its_threads():
    chunks = scan(tl.open_tokens(IDS), lambda ids, start: None, 10)
    next(chunks)
    chunks.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("tokenloader-scan")]


def test_a_file_that_was_truncated_is_an_error_that_says_where(tmp_path):
    IDS.tofile(tmp_path / "a.bin")
    tokens = tl.open_tokens(tmp_path / "a.bin", dtype="uint16")
    with open(tmp_path / "a.bin", "r+b") as file:
        file.truncate(8000)
    with pytest.raises(OSError, match="it has 8,000 bytes and had 20,014") as raised:
        list(scan(tokens, lambda ids, start: None, 1000))
    assert raised.value.filename == str(tmp_path / "a.bin")
