"""Extents, and the dtypes that tokens may have."""

import numpy as np
import pytest
from helpers import DTYPES

from tokenloader.formats import headerless
from tokenloader.formats.extent import TOKEN_DTYPES, Extent, token_dtype


def test_every_token_dtype_is_accepted_and_is_native():
    assert tuple(dtype.name for dtype in TOKEN_DTYPES) == DTYPES
    for name in DTYPES:
        for form in (name, np.dtype(name), np.dtype(name).type, np.dtype(name).newbyteorder("<")):
            assert token_dtype(form, "") == np.dtype(name)
            assert token_dtype(form, "").isnative


def test_the_message_about_a_dtype_begins_with_where_it_was_found():
    with pytest.raises(ValueError, match=r"^the book: float64, which cannot hold token ids"):
        token_dtype(float, "the book: ")


def test_an_extent_knows_its_bytes(tmp_path):
    assert Extent(tmp_path, 9, np.dtype("uint32"), 2**33, headerless.FORMAT).nbytes == 2**35
