"""Checks a release: builds sdist and wheel, installs the wheel into empty environments, and uses it there.

Each Python from 3.11 to 3.14 that is on the PATH (or, if set, each that PYTHONS names) gets two
environments: one with the lowest dependencies that pyproject.toml allows, one with the newest. In each,
.ci/smoke_test.py runs. `make check-release` calls this.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
REQUIRED_FILES = ("pyproject.toml", "src", "tests", "examples", "docs", "README.md", "LICENSE")


def run(*command, **options):
    """Runs a command and returns its output; if it fails, prints both and ends the check."""
    command = list(map(str, command))
    done = subprocess.run(command, text=True, check=False, stdout=subprocess.PIPE, **options)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed with status {done.returncode}: {' '.join(command)}")
    return done.stdout


def interpreters():
    """Finds one interpreter of each version; returns their paths by version."""
    asked = os.environ.get("PYTHONS", "").split()
    candidates = asked or [sys.executable, *(f"python{version}" for version in VERSIONS)]
    found = {}
    for name in candidates:
        code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
        try:
            version, path = subprocess.check_output(
                [name, "-c", code], text=True, stderr=subprocess.DEVNULL
            ).split(maxsplit=1)
        except (OSError, subprocess.CalledProcessError):
            if asked:
                sys.exit(f"{name}: not a Python that runs")
            continue
        found.setdefault(version, path.strip())
    return {version: found[version] for version in VERSIONS if version in found}


def build(folder):
    """Builds the sdist, and the wheel from it, which shows that the sdist is whole; returns the wheel."""
    run(UV, "build", "--quiet", "--out-dir", folder, ROOT)
    sdist, wheel = next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))
    there = {name.split("/")[1] for name in run("tar", "-tzf", sdist).split()}
    missing = [name for name in REQUIRED_FILES if name not in there]
    if missing:
        sys.exit(f"{sdist.name} lacks {', '.join(missing)}")
    with ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        if b"License-Expression: Apache-2.0" not in archive.read(metadata):
            sys.exit(f"{wheel.name}: its metadata names no license; build with a newer hatchling")
    print(f"built {sdist.name} and {wheel.name}")
    return wheel


def use(wheel, python, resolution, folder):
    """Installs the wheel into an empty environment and runs the smoke test in an empty directory."""
    environment, empty, versions = folder / "environment", folder / "empty", folder / "versions.txt"
    empty.mkdir(parents=True)
    run(UV, "venv", "--quiet", "--python", python, environment)
    installed = environment / "bin" / "python"
    # Only wheels: the lowest release of a dependency that has none for this Python cannot be meant.
    binary = ["--quiet", "--python", installed, "--only-binary", ":all:"]
    resolve = [UV, "pip", "compile", *binary, "--all-extras", "--resolution", resolution]
    run(*resolve, "--output-file", versions, ROOT / "pyproject.toml")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["JAX_PLATFORMS"] = "cpu"
    smoke = [installed, "-W", "error", ROOT / ".ci" / "smoke_test.py"]
    for extra in ("", "tokenize", "examples"):
        wanted = f"tokenloader[{extra}] @ {wheel.as_uri()}"
        run(UV, "pip", "install", *binary, "--constraints", versions, wanted)
        print(run(*smoke, extra, cwd=empty, env=variables), end="", flush=True)


def main():
    """Builds once, and uses the wheel in every environment."""
    pythons = interpreters()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        for version, python in pythons.items():
            for resolution in ("lowest-direct", "highest"):
                print(f"\nPython {version}, {resolution}:", flush=True)
                use(wheel, python, resolution, Path(folder) / f"{version}-{resolution}")
    absent = [version for version in VERSIONS if version not in pythons]
    print(f"\nthe release works with Python {', '.join(pythons)}", end="")
    print(f"; not tried, because there is no interpreter: {', '.join(absent)}" if absent else "")


if __name__ == "__main__":
    main()
