"""The benchmarks, which are no installed package, for the tests that look into them."""

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def import_benchmark(monkeypatch):
    """Imports a module of the folder benchmarks, by its name there."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: import_module(f"benchmarks.{name}")
