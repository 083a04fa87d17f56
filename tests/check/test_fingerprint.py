"""Full fingerprints: of all tokens, whatever holds them, against hashlib alone."""

import hashlib

import numpy as np
import pytest
from helpers import changed, llm_c_bytes
from token_files import DTYPES, random_tokens

import tokenloader as tl
from tokenloader.check.fingerprint import BLOCK_TOKENS, full_fingerprint


def naive(tokens):
    blocks = [tokens[at : at + BLOCK_TOKENS] for at in range(0, len(tokens), BLOCK_TOKENS)]
    digests = [
        hashlib.sha256(block.astype(block.dtype.newbyteorder("<")).tobytes()).digest() for block in blocks
    ]
    return f"{tokens.dtype}:{len(tokens)}:{hashlib.sha256(b''.join(digests)).hexdigest()}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, BLOCK_TOKENS - 1, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 7])
def test_it_is_a_hash_of_the_hashes_of_blocks(num_tokens, dtype):
    tokens = random_tokens(num_tokens, dtype)
    assert full_fingerprint(tl.open_tokens(tokens)) == naive(tokens)


def test_equal_tokens_have_one_whatever_their_format_and_files(tmp_path):
    ids = random_tokens(BLOCK_TOKENS + 5000)
    tl.write_tokens(tmp_path / "a.safetensors", ids)
    (tmp_path / "a.bin").write_bytes(llm_c_bytes(ids))
    (tmp_path / "parts").mkdir()
    for i, part in enumerate(np.split(ids, [1, 3000, BLOCK_TOKENS + 3])):
        np.save(tmp_path / f"parts/{i}.npy", part)
    opened = [tl.open_tokens(tmp_path / name) for name in ("a.safetensors", "a.bin", "parts")]
    opened.append(tl.open_tokens(tmp_path / "parts", residency="ram"))
    opened.append(tl.open_tokens(np.append(ids, ids[:7])).view(0, len(ids)))
    assert {full_fingerprint(tokens) for tokens in opened} == {naive(ids)}


@pytest.mark.parametrize("at", [0, 7_000, BLOCK_TOKENS - 1, BLOCK_TOKENS, -1])
def test_a_change_of_any_token_changes_it_also_where_samples_miss_it(at):
    ids = random_tokens(2 * BLOCK_TOKENS)
    one, other = tl.open_tokens(ids), tl.open_tokens(changed(ids, at, to=ids[at] ^ 1))
    assert full_fingerprint(one) != full_fingerprint(other)
    assert (one.fingerprint() == other.fingerprint()) == (at not in (0, -1))
