"""Dtype sniffing: real text tokens, their bytes turned round, widened and paired."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tokenloader import open_tokens
from tokenloader.check.dtype_sniffing import MIN_TOKENS, sniff_dtype, sniff_files
from tokenloader.check.samples import take_sample


@pytest.fixture(scope="module")
def ids():
    """Source of the standard library, in ids of a tokenizer trained on it: uint16."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text() for path in sorted(folder.glob("[a-f]*.py")) if path.is_file()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=4000, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    found = np.concatenate([one.ids for one in tokenizer.encode_batch(texts)])
    assert len(found) > 100_000
    return found[:100_000].astype(np.uint16)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_text_as_it_should_be_is_not_suspected(ids, dtype):
    assert sniff_dtype(ids.astype(dtype)) is None
    assert sniff_dtype(ids[:MIN_TOKENS].astype(dtype)) is None


def test_text_in_bytes_is_not_suspected():
    text = Path(__file__).read_bytes() * 3
    for dtype in ("uint8", "uint16", "uint32"):
        assert sniff_dtype(np.frombuffer(text, np.uint8).astype(dtype)) is None


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_the_wrong_byte_order_is(ids, dtype):
    found = sniff_dtype(ids.astype(dtype).byteswap())
    assert "the byte order looks wrong, or the offset is odd" in found
    assert "array.byteswap()" in found


def test_the_entropies_are_told_from_the_lowest_byte(ids):
    swapped = ids.byteswap()
    bits = []
    for plane in swapped & 0xFF, swapped >> 8:
        shares = np.bincount(plane, minlength=256) / len(ids)
        bits.append(f"{abs(sum(s * np.log2(s) for s in shares if s)):.1f}")
    assert f"have {bits[0]}, {bits[1]} bits of entropy" in sniff_dtype(swapped)


def test_an_odd_offset_is(ids):
    assert "offset is odd" in sniff_dtype(np.frombuffer(ids.tobytes()[1:-1], np.uint16))


@pytest.mark.parametrize(
    ("written", "read", "told"),
    [
        ("uint16", "uint32", "these look like uint16 tokens read as uint32"),
        ("uint16", "int64", "these look like uint16 tokens read as int64"),
        ("uint32", "int64", "these look like uint32 tokens read as int64"),
        ("uint32", "uint16", "every second token is below 4: these look like uint32 tokens read as uint16"),
        ("uint32", "uint8", "of every 4 tokens 2 are below 4: these look like uint32 tokens read as uint8"),
        ("int64", "int32", "every second token is below 4: these look like int64 tokens read as int32"),
        ("int64", "uint32", "every second token is below 4: these look like int64 tokens read as uint32"),
        ("int64", "uint16", "of every 4 tokens 2 are below 4: these look like int64 tokens read as uint16"),
        ("int64", "uint8", "of every 8 tokens 4 are below 4: these look like int64 tokens read as uint8"),
        (">u4", "uint16", "uint32 tokens read as uint16"),
        (">i8", "uint16", "int64 tokens read as uint16"),
    ],
)
def test_the_wrong_width_is(ids, written, read, told):
    found = sniff_dtype(ids.astype(written).view(read))
    assert told in found
    assert f"pass --dtype {told.split(' tokens read')[0].split()[-1]}; else write it again" in found


@pytest.mark.parametrize("highest", [1, 2, 256, 257, 1000, 4096, 50_257, 65_536])
def test_random_ids_are_not(highest):
    ids = np.random.default_rng(0).integers(0, highest, 100_000).astype(np.uint16)
    assert sniff_dtype(ids) is None
    assert sniff_dtype(ids.astype(np.uint32)) is None


def test_a_sample_that_is_too_small_is_not(ids):
    assert sniff_dtype(ids[: MIN_TOKENS - 1].byteswap()) is None


def sniffed(folder, dtype):
    tokens = open_tokens(folder, dtype=dtype)
    return sniff_files(tokens, take_sample(tokens))


@pytest.mark.parametrize("num_right", [0, 1, 9, 70])
@pytest.mark.parametrize(
    ("written", "read"), [("int64", "int32"), ("uint16", "uint32"), ("int64", "uint16"), (">u4", "uint32")]
)
def test_one_file_of_several_is_looked_at_alone(ids, tmp_path, written, read, num_right):
    wrong = np.resize(ids, 1_200_000).astype(written) if num_right == 9 else ids.astype(written)
    wrong.tofile(tmp_path / "5.bin")
    for i in range(num_right):
        ids[: 20_001 + i].astype(read).tofile(tmp_path / f"{10 * i}.bin")  # an odd number of tokens
    found = sniffed(tmp_path, read)
    if num_right:
        assert found.startswith(f"{tmp_path / '5.bin'}: ")
        assert found.endswith(f" (1 of {num_right + 1} files look wrong)")
    told = written.replace(">u4", "the byte order looks wrong")
    assert told in found


def test_of_several_wrong_files_the_first_is_named_and_all_are_counted(ids, tmp_path):
    for i, dtype in enumerate(["int32", "int64", "int32", "int64"]):
        ids.astype(dtype).tofile(tmp_path / f"{i}.bin")
    found = sniffed(tmp_path, "int32")
    assert found.startswith(f"{tmp_path / '1.bin'}: every second token is below 4: these look like int64")
    assert found.endswith(" (2 of 4 files look wrong)")


def test_files_too_small_to_be_looked_at_alone_are_looked_at_together(ids, tmp_path):
    for i in range(4):
        ids[2000 * i : 2000 * i + 2000].byteswap().tofile(tmp_path / f"{i}.bin")
    assert sniffed(tmp_path, "uint16").startswith("the bytes of an id, from the lowest, have")


def test_files_as_they_should_be_are_not_suspected(ids, tmp_path):
    for i in range(3):
        ids[10_001 * i : 10_001 * i + 10_001].tofile(tmp_path / f"{i}.bin")
    assert sniffed(tmp_path, "uint16") is None
