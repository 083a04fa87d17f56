"""compare: which rows of the benchmarks cost more with the code as it is than at another git revision?

Each side is a copy in a temporary folder, and is measured by the benchmarks in that copy, because names
may differ between revisions. In every round each program runs once on each side, one right after the
other, and the order changes from round to round. A row's figure is the median over rounds of its cost
now / its cost before. Grain, PyTorch and LitData are hidden from both sides; the peers that are left do not
depend on our code, so their rows show the noise.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

from benchmarks import measure, token_file

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "benchmarks", "examples")  # that the programs need
HIDDEN = ("grain", "torch", "litdata")
SIDES = ("before", "now")
SLOWER = 1.05  # a row with a ratio above this is listed as slower

Cost = float | None  # None: the contestant failed
Round = dict[tuple[str, str], dict[str, Cost]]  # by program and row, then by side


class Program(NamedTuple):
    """How a program runs in each round, and what its JSON says."""

    unit: str
    costs: Callable[[dict[str, Any]], Iterator[tuple[str, Cost]]]  # of its JSON: rows, less is better
    options: str = ""
    tiny: str = ""  # the options under --tiny
    takes_file: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("revision", metavar="REV", help="git revision to compare with")
    parser.add_argument(
        "programs",
        nargs="*",
        metavar="NAME",
        default=["warm", "scale", "cpu"],
        help=f"of {', '.join(PROGRAMS)} (default: warm scale cpu)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program on each side")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the token file (default: 1)")
    parser.add_argument(
        "--tiny", action="store_true", help="short runs to try this out; the figures mean nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")


def run(options: argparse.Namespace) -> None:
    unknown = [name for name in options.programs if name not in PROGRAMS]
    if unknown:
        raise SystemExit(f"unknown program {unknown[0]!r}; expected {', '.join(PROGRAMS)}")
    commit = _git("rev-parse", "--short", f"{options.revision}^{{commit}}").decode().strip()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        _copy_revision(commit, folder / "before")
        _copy_working_tree(folder / "now")
        _hide(folder / "hidden")
        for side in SIDES:
            _check_imports(folder / side)
        changed = [name for name in options.programs if _differs(folder, f"benchmarks/{name}.py")]
        for name in changed:
            measure.say(f"benchmarks/{name}.py itself is not the same at {commit}")
        tokens = folder / "train.safetensors"
        token_file.write(tokens, int(options.gib * 2**29))
        rounds = []
        for turn in range(options.rounds):
            measured: Round = {}
            for name in options.programs:
                for side in SIDES[:: 1 if turn % 2 == 0 else -1]:
                    began = time.perf_counter()
                    for row, cost in _run_program(name, folder / side, tokens, options):
                        measured.setdefault((name, row), {})[side] = cost
                    seconds = time.perf_counter() - began
                    measure.say(f"round {turn + 1} of {options.rounds}: {name} {side}: {seconds:.0f} s")
            rounds.append(measured)
    rows, not_compared = match(rounds)
    print(table(rows, not_compared))
    if options.json:
        result = {
            "question": (__doc__ or "").splitlines()[0],
            "cache": "as each program has it",
            "before": commit,
            "changed_programs": changed,
            "rounds": options.rounds,
            "gib": options.gib,
            "tiny": options.tiny,
            "rows": rows,
            "not_compared": not_compared,
        }
        measure.write_json(options.json, result)


def match(rounds: list[Round]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The rows that both sides have, each with its ratio; and the other rows, each with a reason."""
    rows: list[dict[str, Any]] = []
    not_compared: list[dict[str, str]] = []
    for program, row in dict.fromkeys(key for measured in rounds for key in measured):
        turns = [measured.get((program, row), {}) for measured in rounds]
        pairs = [(turn.get("before"), turn.get("now")) for turn in turns]
        costs = [(before, now) for before, now in pairs if before and now is not None]
        ratios = [now / before for before, now in costs]
        if ratios:
            before, now = (statistics.median(side) for side in zip(*costs, strict=True))
            rows.append(
                {
                    "program": program,
                    "row": row,
                    "unit": PROGRAMS[program].unit,
                    "before": before,
                    "now": now,
                    "now_over_before": round(statistics.median(ratios), 4),
                    "ratios": [round(ratio, 4) for ratio in ratios],
                }
            )
        else:
            sides = [side for side in SIDES if any(side in turn for turn in turns)]
            reason = f"only {sides[0]}" if len(sides) == 1 else f"no ratio of {pairs}"
            not_compared.append({"program": program, "row": row, "reason": reason})
    return rows, not_compared


def table(rows: list[dict[str, Any]], not_compared: list[dict[str, str]]) -> str:
    """The result as lines for a screen."""
    width = max((len(_name(row)) for row in rows), default=0)
    lines = [f"{'':{width}} {'before':>10} {'now':>10}  {'':13} now / before, median (range)"]
    lines += [
        f"{_name(row):{width}} {row['before']:10,.2f} {row['now']:10,.2f}  {row['unit']:13} "
        f"{row['now_over_before']:.3f} ({min(row['ratios']):.3f} to {max(row['ratios']):.3f})"
        for row in rows
    ]
    slower = [row for row in rows if row["now_over_before"] > SLOWER]
    lines += ["", f"slower by more than {SLOWER - 1:.0%}: {len(slower)} of {len(rows)} rows"]
    lines += [f"  {_name(row)}: {row['now_over_before']:.3f}" for row in slower]
    lines += [f"not compared: {len(not_compared)} rows"]
    lines += [f"  {_name(row)}: {row['reason']}" for row in not_compared]
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    return f"{row['program']}: {row['row']}"


def _run_program(
    name: str, folder: Path, tokens: Path, options: argparse.Namespace
) -> list[tuple[str, Cost]]:
    program = PROGRAMS[name]
    arguments = (program.tiny if options.tiny else program.options).split()
    if program.takes_file:
        arguments += ["--file", str(tokens)]
    finished = _python(folder, "-m", "benchmarks", name, *arguments)
    if finished.returncode:
        raise SystemExit(f"{name} {folder.name} failed:\n{finished.stderr[-3000:]}")
    result = folder / "benchmarks" / "results" / f"{name}.json"
    if not result.exists():
        raise SystemExit(f"{name} {folder.name} wrote no result:\n{finished.stderr[-3000:]}")
    costs = list(program.costs(json.loads(result.read_text())))
    result.unlink()  # so that the next round cannot read it again
    return costs


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (folder.parent / "hidden", folder / "src")))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def _copy_revision(commit: str, folder: Path) -> None:
    archive = _git("archive", "--format=zip", commit, *FOLDERS)
    with ZipFile(io.BytesIO(archive)) as files:
        files.extractall(folder)
    shutil.rmtree(folder / "benchmarks" / "results", ignore_errors=True)


def _copy_working_tree(folder: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)


def _hide(folder: Path) -> None:
    """Write modules that cannot be imported, for the packages not to be measured."""
    folder.mkdir()
    for name in HIDDEN:
        text = f"raise ImportError('{name} is left out of comparisons of revisions')\n"
        (folder / f"{name}.py").write_text(text)


def _check_imports(folder: Path) -> None:
    """Exit if a program in the folder would measure another copy of tokenloader."""
    finished = _python(folder, "-c", "import tokenloader; print(tokenloader.__file__)")
    if not finished.stdout.startswith(str(folder)):
        found = finished.stdout.strip() or finished.stderr
        raise SystemExit(f"{folder.name}: expected tokenloader from {folder}, got {found}")


def _differs(folder: Path, name: str) -> bool:
    before, now = (folder / side / name for side in SIDES)
    return not before.exists() or before.read_bytes() != now.read_bytes()


def _git(*arguments: str) -> bytes:
    finished = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    if finished.returncode:
        raise SystemExit(finished.stderr.decode())
    return finished.stdout


def _warm(result: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    for row in result["rows"]:
        for name, rates in row["contestants"].items():
            yield f"{row['batch_size']}x{row['seq_len']}, {name}", rates["microseconds_per_batch"]


def _scale(result: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    for what, row in result["microseconds"].items():
        for size, cost in row.items():
            yield f"{what}, {size}", cost
    for row in result["hosts"]:
        yield f"plan a step, hosts: {row['hosts']}", row["plan_microseconds_per_step"]


def _cpu(result: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    yield from result["processor_seconds_per_billion_tokens"].items()


def _cold(result: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    for row in result["rows"]:
        for name, rate in row.items():
            if name != "read_ahead_kib":
                at = f"read-ahead {row['read_ahead_kib']} KiB"
                yield f"{name}, {at}", 1e6 / rate["windows_per_second"]


def _first(result: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    for way, seconds in result["seconds"].items():
        yield way, None if seconds is None else 1e3 * seconds


def _memory(result: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    for residency, row in result["residencies"].items():
        yield f"{residency}, anonymous memory", row["added_anonymous_mib"]
        yield f"{residency}, on the device", row["device_bytes_in_flight"] / 2**20


def _train(result: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    yield from result["step_milliseconds"].items()


def _gpu(result: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    yield from _warm({"rows": result["throughput"]})
    for source, milliseconds in _train(result["train"]):
        yield f"training step, {source}", 1e3 * milliseconds if milliseconds else None


PROGRAMS = {
    "warm": Program("us a batch", _warm, "--rounds 3 --seconds 0.3", "--rounds 1 --seconds 0.02"),
    "scale": Program("us", _scale, "--rounds 101", "--rounds 3", takes_file=False),
    "cpu": Program("s a 10^9 tok.", _cpu, "--rounds 1", "--rounds 1 --batches 10"),
    "cold": Program("us a window", _cold, "--rounds 2 --seconds 2", "--rounds 1 --seconds 0.1"),
    "first": Program("ms", _first, "--rounds 1", "--rounds 1"),
    "memory": Program("MiB", _memory),
    "train": Program("ms a step", _train, "--rounds 3", "--rounds 1 --steps 1", takes_file=False),
    "gpu": Program("us", _gpu, "--rounds 3", "--rounds 1 --gib 0.1", takes_file=False),
}
