"""NumPy's .npy files, versions 1 to 3.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import io
from typing import Any

import numpy as np

from tokenloader.formats.extent import Extent, flat_extent
from tokenloader.formats.format import Candidate, Format, NotThisFormatError, Writer
from tokenloader.formats.identity import naming
from tokenloader.formats.quoting import shown

_MAGIC = b"\x93NUMPY"


def find(candidate: Candidate, key: str, dtype: np.dtype[Any] | None) -> Extent:
    """Finds the tokens of an .npy file."""
    path = candidate.path
    if not candidate.head.startswith(_MAGIC):
        raise NotThisFormatError(f"does not begin with {_MAGIC.hex(' ')}")
    with naming(path), path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                shape, _, found = np.lib.format.read_array_header_1_0(file)
            elif version in ((2, 0), (3, 0)):
                # 3.0 is 2.0 with field names in UTF-8; tokens have no fields.
                shape, _, found = np.lib.format.read_array_header_2_0(file)
            else:
                raise ValueError(f"format version {version}; known are 1.0, 2.0 and 3.0")
        except OSError:
            raise
        except Exception as error:
            reason = shown(error)
            raise ValueError(f"{path}: corrupt .npy header ({reason}); fetch or write it again") from None
        data = range(file.tell(), candidate.size_bytes)
    return flat_extent(path, "the array", found, shape, data, FORMAT)


def header(dtype: np.dtype[Any], num_tokens: int) -> bytes:
    """Makes a header of version 1, in which numpy leaves room for 21 digits."""
    file = io.BytesIO()
    description = {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, description)
    return file.getvalue()


WRITER = Writer("npy", ".npy", header)
FORMAT = Format("NumPy .npy", find, (".npy",), writer=WRITER)
