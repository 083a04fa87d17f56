"""Opening: what may be opened, and what is refused with a remedy."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from token_files import random_tokens, write_npy, write_raw

from tokenloader import open_tokens

A, B, C = (np.arange(n, n + 5, dtype=np.uint16) for n in (0, 100, 200))


def test_paths_may_be_strings_or_path_objects_in_any_sequence(tmp_path):
    class Somewhere:
        def __fspath__(self):
            return str(a)

    expected = random_tokens(10)
    a = write_npy(tmp_path / "a.npy", expected)
    for source in (a, str(a), Somewhere(), [a], (str(a),)):
        np.testing.assert_array_equal(open_tokens(source)[:], expected)
    for source in ([a, str(a)], (Somewhere(), a)):
        np.testing.assert_array_equal(open_tokens(source)[:], np.concatenate([expected] * 2))


def test_a_key_names_the_tensor_in_every_file(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for path, tokens in zip(files, np.split(random_tokens(), [700]), strict=True):
        save_file({"ids": tokens, "tokens": tokens[:3]}, path)
    np.testing.assert_array_equal(open_tokens(files, key="ids")[:], random_tokens())
    assert len(open_tokens(files)) == 6


def test_an_array_is_not_copied_unless_it_has_gaps():
    source = random_tokens()
    tokens, copied = open_tokens(source), open_tokens(source[::2])
    old = int(source[4])
    source[4] = old ^ 1
    assert tokens[4] == old ^ 1
    assert copied[2] == old


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_an_array_is_in_ram_whatever_was_asked_for(residency):
    assert open_tokens(random_tokens(), residency=residency).residency == "ram"


@pytest.mark.parametrize("residency", ["gpu", "", "MMAP", None])
def test_an_unknown_residency_is_refused(residency):
    with pytest.raises(ValueError, match=f'residency={residency!r}; expected "mmap" or "ram"'):
        open_tokens(random_tokens(), residency=residency)


@pytest.mark.parametrize("residency", ["mmap", "ram"])
def test_files_of_different_dtypes_are_refused_and_both_are_named(tmp_path, residency):
    a = write_npy(tmp_path / "a.npy", random_tokens(10))
    b = write_npy(tmp_path / "b.npy", random_tokens(10))
    c = write_npy(tmp_path / "c.npy", random_tokens(10, "uint32"))
    message = f"^{re.escape(str(c))} holds uint32 tokens and {re.escape(str(a))} uint16; "
    with pytest.raises(ValueError, match=message):
        open_tokens([a, b, c], residency=residency)


def test_one_bad_file_of_several_is_named(tmp_path):
    a = write_npy(tmp_path / "a.npy", random_tokens(10))
    b = write_raw(tmp_path / "b.npy", random_tokens(10))
    with pytest.raises(ValueError, match=re.escape(str(b))):
        open_tokens([a, b])
    with pytest.raises(ValueError, match=f"^{re.escape(str(a))}: dtype=uint16 was given"):
        open_tokens([b, a], dtype="uint16")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "c"))):
        open_tokens([a, tmp_path / "c"])


@pytest.mark.parametrize("source", [[], ()])
def test_an_empty_sequence_is_refused(source):
    with pytest.raises(ValueError, match=r"source is an empty sequence; expected a path"):
        open_tokens(source)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (None, "NoneType"),
        (7, "int"),
        (b"tokens.bin", "bytes"),
        ({"tokens.bin"}, "set"),
        ({"train": "tokens.bin"}, "dict"),
        ((path for path in ["tokens.bin"]), "generator"),
    ],
)
def test_a_source_of_another_type_is_refused_and_named(source, kind):
    with pytest.raises(TypeError, match=f"source is of type {kind}; expected a path") as raised:
        open_tokens(source)
    assert "np.asarray" not in str(raised.value)


@pytest.mark.parametrize(
    ("element", "kind"),
    [(7, "int"), (None, "NoneType"), (["c"], "list"), (b"b", "bytes")],
)
def test_an_element_of_another_type_is_refused_and_named(tmp_path, element, kind):
    a = write_npy(tmp_path / "a.npy", random_tokens(10))
    with pytest.raises(TypeError, match=rf"source\[1\] is of type {kind}; expected a path"):
        open_tokens([a, element])


def test_a_jax_array_is_refused_with_the_remedy():
    import jax.numpy as jnp

    with pytest.raises(TypeError, match=r"source is of type ArrayImpl; .*: pass np\.asarray\(source\)"):
        open_tokens(jnp.arange(10))


@pytest.mark.parametrize("shape", [(2, 3), (1, 6), ()])
def test_an_array_that_is_not_flat_is_refused_with_its_shape(shape):
    with pytest.raises(ValueError, match=re.escape(f"the array has shape {shape}; tokens must be")):
        open_tokens(np.zeros(shape, np.uint16))


@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", "int16", "uint64", "object", "U2"])
def test_an_array_of_another_dtype_is_refused_with_its_dtype(dtype):
    array = np.zeros(3, dtype)
    with pytest.raises(ValueError, match=f"^the array is of dtype {array.dtype.name}, which cannot hold"):
        open_tokens(array)


def test_a_big_endian_array_is_refused_and_called_that():
    with pytest.raises(ValueError, match="the array is of dtype uint16 in big-endian byte order"):
        open_tokens(np.zeros(3, ">u2"))


def test_an_empty_array_is_refused():
    with pytest.raises(ValueError, match="the array is empty"):
        open_tokens(np.zeros(0, np.uint16))


def test_dtype_is_refused_for_an_array():
    with pytest.raises(ValueError, match=r"dtype='uint32' was given with an array of uint16; .*leave it"):
        open_tokens(random_tokens(3), dtype="uint32")


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros((2, 3), np.uint16), "the array has shape (2, 3)"),
        (np.zeros(3), "the array is of dtype float64"),
        (np.zeros(0, np.uint16), "the array is empty"),
    ],
)
def test_an_array_of_a_sequence_is_checked_as_one_alone(array, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        open_tokens([A, array])


def test_dtype_is_for_the_headerless_files_among_the_parts(tmp_path):
    C.tofile(tmp_path / "c")
    with open_tokens([A, tmp_path / "c"], dtype="uint16") as tokens:
        np.testing.assert_array_equal(tokens[:], np.concatenate([A, C]))
    with pytest.raises(ValueError, match=r"dtype='uint16' was given with an array of uint16; .*leave"):
        open_tokens([A, open_tokens(B)], dtype="uint16")


def test_what_has_no_order_of_its_own_is_refused_with_the_remedy(tmp_path):
    write_npy(tmp_path / "a.npy", A)
    for source in (tmp_path.glob("*.npy"), {str(tmp_path / "a.npy")}, (p for p in [tmp_path])):
        with pytest.raises(TypeError, match=r"in the order wanted: pass sorted\(source\) or list"):
            open_tokens(source)
    np.testing.assert_array_equal(open_tokens(sorted(tmp_path.glob("*.npy")))[:], A)


def test_an_empty_path_is_not_the_current_directory(tmp_path, monkeypatch):
    write_npy(tmp_path / "a.npy", A)
    monkeypatch.chdir(tmp_path)
    for source in ("", [A, ""]):
        with pytest.raises(ValueError, match="source is an empty path; name the token file"):
            open_tokens(source)
    np.testing.assert_array_equal(open_tokens(".")[:], A)


def test_a_jax_array_of_a_sequence_is_refused_with_the_remedy():
    import jax.numpy as jnp

    with pytest.raises(TypeError, match=r"source\[1\] is of type .*: pass np.asarray\(source\[1\]\)"):
        open_tokens([A, jnp.arange(3)])


@pytest.mark.parametrize("scheme", ["https://", "s3://", "gs://", "S3://"])
def test_an_address_that_is_not_read_is_said_to_be_one(scheme):
    with pytest.raises(ValueError, match=f"^{scheme}bucket/train.bin: {scheme} addresses are not read"):
        open_tokens(f"{scheme}bucket/train.bin")


@pytest.mark.parametrize("scheme", ["hf", "HF"])
def test_an_address_that_was_made_a_path_is_to_be_passed_as_text(scheme):
    address = f"{scheme}:/datasets/owner/name/train.bin"
    with pytest.raises(ValueError, match=f"^{address}: expected hf://; a Path drops a slash"):
        open_tokens(Path(f"{scheme}://datasets/owner/name/train.bin"))
