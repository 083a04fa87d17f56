"""Every page: its links lead somewhere, and docs/architecture.md says of the packages what they say."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_exists(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_links_to_every_page():
    readme = (ROOT / "README.md").read_text()
    for page in PAGES:
        if page.name != "README.md":
            assert f"({page.relative_to(ROOT).as_posix()})" in readme, page.name


def test_the_architecture_page_has_every_package_in_the_order_that_imports_have():
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M)
    packages = ROOT / "src" / "tokenloader"
    said = {
        path.parent.name: ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
        for path in packages.glob("*/__init__.py")
    }
    assert dict(rows) == {name: line.partition(": ")[2].rstrip(".") for name, line in said.items()}
    layers = CONFIGURATION["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [name for name, _ in rows] == layers
