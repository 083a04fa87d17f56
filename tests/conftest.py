"""Eight CPU devices for every test, so that sharding is tested in this process; and files to test on.

The devices must be asked for before jax starts its backends. Subprocesses inherit them.
"""

import os

import pytest

_EIGHT = "--xla_force_host_platform_device_count=8"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _EIGHT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT}".strip()


@pytest.fixture
def file(tmp_path):
    """Writes bytes to a file of a name, and returns its path."""

    def write(name, data):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write
