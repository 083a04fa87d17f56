"""pyproject.toml, and the files that must agree with it: the lock, the changelog, the commit hooks."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import tokenloader as tl

ROOT = Path(__file__).parent.parent
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIGURATION["project"]
LOCK = (ROOT / "requirements-dev.txt").read_text()
DEVELOPMENT = [
    *PROJECT["dependencies"],
    *PROJECT["optional-dependencies"]["examples"],
    *CONFIGURATION["dependency-groups"]["test"],
]


def canonical(name):
    return name.replace("_", "-").lower()


@pytest.mark.parametrize("requirement", DEVELOPMENT)
def test_the_lock_has_what_development_needs_in_a_version_that_is_allowed(requirement):
    wanted = Requirement(requirement)
    locked = map(Requirement, re.findall(r"^([\w-]+==[^\\\n]+)", LOCK, re.M))
    pins = [pin for pin in locked if canonical(pin.name) == canonical(wanted.name)]
    assert pins, "run `make lock`"
    for pin in pins:
        assert wanted.specifier.contains(next(iter(pin.specifier)).version), "run `make lock`"


def test_the_lock_has_hashes_and_no_address():
    pins = re.findall(r"^[\w-]+==.*(?:\n    .*)*", LOCK, re.M)
    assert len(pins) > 50
    assert all("--hash=sha256:" in pin for pin in pins)
    assert "://" not in LOCK
    assert "index-url" not in LOCK


def test_dependencies_have_a_lower_bound_and_no_upper_one():
    extras = [name for extra in PROJECT["optional-dependencies"].values() for name in extra]
    for requirement in [*PROJECT["dependencies"], *extras]:
        assert [bound.operator for bound in Requirement(requirement).specifier] == [">="]


def test_the_classifiers_name_versions_of_python_that_are_allowed():
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert versions
    assert all(allowed.contains(version) for version in versions)
    assert f">={versions[0]}" == PROJECT["requires-python"]
    assert sys.version_info[:2] >= tuple(map(int, versions[0].split(".")))


def test_the_changelog_has_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.*)\]", changelog, re.M)[0] == tl.__version__


def test_the_commit_hooks_run_what_make_lint_runs():
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.M)[1]
    commands = [line.replace("$(BIN)", ".venv/bin") for line in recipe.split("\n\t")]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"entry: (.*)", hooks) == [command.strip() for command in commands]


def test_make_help_tells_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)", makefile, re.M)[1].split()
    told = re.findall(r"^([a-z-]+):.*  ## ", makefile, re.M)
    assert sorted(told) == sorted(set(targets) - {"clean"})
