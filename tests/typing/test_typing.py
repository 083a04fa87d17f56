"""The types that users meet: a file of user code under mypy's and pyright's strict rules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = Path(__file__).with_name("user_code.py")
PYRIGHT = {
    "include": [str(CODE)],
    "typeCheckingMode": "strict",
    "reportUnnecessaryTypeIgnoreComment": "error",
    "reportUnusedExpression": "none",
    # jax and numpy leave some of their own names untyped.
    "reportUnknownMemberType": "none",
    "reportMissingTypeStubs": "none",
}


def run(*command):
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_user_code_passes_mypy_strict():
    run("mypy", "--strict", str(CODE))


def test_user_code_passes_pyright_strict(tmp_path):
    pytest.importorskip("basedpyright")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    run("basedpyright", "--project", str(tmp_path), "--pythonpath", sys.executable)
