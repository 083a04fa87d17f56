"""Information about files: what is told, and that nothing is read for it."""

import os
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

import tokenloader as tl
from tokenloader.check.devices import find_devices
from tokenloader.check.info import cached_share, info

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


@pytest.fixture
def tokens(tmp_path):
    save_file(
        {"tokens": np.zeros(100_000, np.uint16), "other": np.zeros((2, 3), np.float32)},
        tmp_path / "t.safetensors",
    )
    return tl.open_tokens(tmp_path / "t.safetensors")


def test_it_tells_what_the_file_holds(tmp_path, tokens):
    found = info(tokens, batch_size=32, seq_len=1024)
    (file,) = found.files
    assert (file.path, file.format, file.num_tokens) == (
        str(tmp_path / "t.safetensors"),
        "safetensors",
        100_000,
    )
    assert file.offset_bytes == tokens.extents[0].offset_bytes
    assert sorted(found.tensors) == ["other F32[2, 3]", "tokens U16[100000]"]
    assert (found.dtype, found.num_tokens, found.num_bytes) == ("uint16", 100_000, 200_000)


@pytest.mark.parametrize(("batch_size", "seq_len"), [(32, 1024), (1, 99_999), (7, 10)])
def test_windows_and_steps_are_those_of_the_plan(tokens, batch_size, seq_len):
    found = info(tokens, batch_size=batch_size, seq_len=seq_len)
    plan = tl.ShuffledEpochs(seed=0, num_epochs=1)
    windows = plan.bind(100_000, seq_len).num_samples
    assert found.windows_per_epoch == windows
    assert found.steps_per_epoch == windows // batch_size


def test_tokens_fewer_than_a_window_have_none(tokens):
    found = info(tokens, batch_size=1, seq_len=100_000)
    assert found.windows_per_epoch is found.steps_per_epoch is None


def test_several_files_are_told_in_order(tmp_path):
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.zeros(10 + i, np.uint32))
    found = info(tl.open_tokens(sorted(tmp_path.glob("*"))), batch_size=1, seq_len=1)
    assert [file.num_tokens for file in found.files] == [10, 11, 12]
    assert found.num_tokens == 33
    assert found.tensors == ()


@linux
def test_a_file_just_written_is_in_the_page_cache(tokens):
    assert cached_share(tokens.extents) == (1.0, False)


@linux
def test_of_a_large_file_pages_are_sampled(tmp_path):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(1 << 30)
    with open(tmp_path / "sparse.bin", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 1 << 17, 0)  # of the 4 places, the first
    tokens = tl.open_tokens(tmp_path / "sparse.bin", dtype="uint16")
    assert cached_share(tokens.extents, num_probes=4) == (0.25, True)


@linux
def test_of_a_file_that_is_another_users_nothing_is_told(tokens, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cached_share(tokens.extents) == (None, False)


def test_where_the_system_does_not_tell_nothing_is_told(tokens):
    assert cached_share(tokens.extents, is_told=False) == (None, False)


def test_tokens_past_2_33_are_told_at_once(tmp_path):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(2**35)
    found = info(tl.open_tokens(tmp_path / "sparse.bin", dtype="uint16"), batch_size=32, seq_len=1024)
    assert found.num_tokens == 2**34
    assert found.windows_per_epoch == 2**24 - 1


def test_devices_are_all_of_each_backend():
    found = find_devices()
    assert [device.name for device in found if device.backend == "cpu"] == [
        f"TFRT_CPU_{i}" if "TFRT" in found[0].name else f"cpu:{i}" for i in range(8)
    ]
    assert [device.default for device in found].count(True) == 1
    if sys.platform == "linux":
        assert all(device.memory_bytes > 1 << 20 for device in found)
