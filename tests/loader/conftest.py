"""What tests of the loader share: tokens, opened in every way, and a list of a test's threads."""

import threading

import numpy as np
import pytest
from helpers import random_tokens

import tokenloader as tl


@pytest.fixture
def tokens():
    """random_tokens(), opened."""
    return tl.open_tokens(random_tokens())


@pytest.fixture(scope="package")
def sources(tmp_path_factory):
    """random_tokens(), opened in every way, by a name for it."""
    folder = tmp_path_factory.mktemp("tokens")
    random_tokens().tofile(folder / "whole.bin")
    shards = []
    for i, part in enumerate(np.split(random_tokens(), [300, 303, 310, 800])):
        shards.append(folder / f"{i}.bin")  # some shorter than a window
        part.tofile(shards[-1])
    dtype = "uint16"
    return {
        "array": tl.open_tokens(random_tokens()),
        "mmap": tl.open_tokens(folder / "whole.bin", dtype=dtype),
        "ram": tl.open_tokens(folder / "whole.bin", dtype=dtype, residency="ram"),
        "sharded mmap": tl.open_tokens(shards, dtype=dtype),
        "sharded ram": tl.open_tokens(shards, dtype=dtype, residency="ram"),
    }


@pytest.fixture
def own_threads():
    """A function that lists the threads started during this test and still alive."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread not in before]
