"""report: the README's tables, from benchmarks/results/*.json."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS

README = Path(__file__).parent.parent / "README.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="fail if the README is not up to date")


def run(options: argparse.Namespace) -> None:
    text = README.read_text()
    updated = text
    for path in sorted(RESULTS.glob("*.json")):
        table = TABLES[path.stem](json.loads(path.read_text()))
        updated = _between_markers(updated, path.stem, table)
    if options.check and updated != text:
        raise SystemExit("README.md is not what the results say; run: python -m benchmarks report")
    README.write_text(updated)


def warm(result: dict[str, Any]) -> str:
    """Million tokens a second by batch shape."""
    names = list(result["rows"][0]["contestants"])
    lines = [
        "Million tokens a second, finished on the device, data in memory (batch x sequence; one batch at a "
        "time, each waited for):",
        "",
        "| | "
        + " | ".join(f"{row['batch_size']}x{row['seq_len']}" for row in result["rows"])
        + " |",
        "|---|" + "--:|" * len(result["rows"]),
    ]
    for name in names:
        rates = [row["contestants"][name]["million_tokens_per_second"] for row in result["rows"]]
        lines.append(f"| {name} | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |")
    lines += ["", _hardware(result["environment"])]
    return "\n".join(lines)


def memory(result: dict[str, Any]) -> str:
    """Anonymous memory by residency."""
    lines = ["| residency | data | memory of the process beyond jax's own |", "|---|--:|--:|"]
    for residency, row in result["residencies"].items():
        added = row["added_anonymous_mib"]
        lines.append(
            f"| `{residency}` | {row['data_bytes'] / 2**30:.2f} GiB | {added:,.0f} MiB "
            f"({row['added_share_of_data']:.4f} of the data) |"
        )
    return "\n".join(lines)


TABLES = {"memory": memory, "warm": warm}


def _hardware(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    return (
        f"{environment['processor']}, {environment['cores']} cores, {environment['memory_gib']:.0f} GiB, "
        f"jax {versions['jax']} on {environment['platform']}, numpy {versions['numpy']}, "
        f"{environment['date']}."
    )


def _between_markers(text: str, name: str, content: str) -> str:
    pattern = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md has no <!-- {name}: --> and <!-- /{name} --> to write between")
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)
