"""Eight CPU devices for every test, so that sharding is tested in this process; the slow tests; and files.

The devices must be asked for before jax starts its backends. Subprocesses inherit them.
"""

import mmap
import os
import weakref
from pathlib import Path

import pytest

# Test files that start processes, compile for many meshes, or try very many cases.
SLOW_FILES = (
    "batches/test_split_sequences.py",
    "check/test_check.py",
    "check/test_runs.py",
    "cli/test_console.py",
    "cli/test_console_processes.py",
    "docs/test_benchmarks.py",
    "docs/test_command_line_page.py",
    "docs/test_examples.py",
    "loader/test_checkpoints.py",
    "loader/test_devices.py",
    "loader/test_failing_processes.py",
    "loader/test_loader_processes.py",
    "loader/test_network_file_systems.py",
    "loader/test_processes.py",
    "loader/test_resume.py",
    "loader/test_token_loader_interrupts.py",
    "loader/test_transforms.py",
    "plans/test_mixture.py",
    "plans/test_permutation.py",
    "storage/test_hub.py",
    "storage/test_hub_errors.py",
    "typing/test_typing.py",
)

_EIGHT = "--xla_force_host_platform_device_count=8"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _EIGHT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT}".strip()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    slow = {Path(__file__).parent / name for name in SLOW_FILES}
    for item in items:
        if item.path in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def file(tmp_path):
    """Writes bytes to a file of a name, and returns its path."""

    def write(name, data):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def allocations(monkeypatch):
    """Weak references to the pieces of RAM that are taken as memory maps, in order."""

    class Watched(mmap.mmap):
        def __new__(cls, descriptor, *arguments, **keywords):
            made = super().__new__(cls, descriptor, *arguments, **keywords)
            if descriptor == -1:
                found.append(weakref.ref(made))
            return made

    found = []
    monkeypatch.setattr(mmap, "mmap", Watched)
    return found
