"""report: writes the tables and plots of the pages from benchmarks/results/*.json and nothing else."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks import shuffle_report
from benchmarks.cold import FIO_WINDOWS
from benchmarks.measure import RESULTS
from benchmarks.slow import BLOCKS, EPOCHS, FIO, IN_ORDER

README = Path(__file__).parent.parent / "README.md"
PLANS = README.parent / "docs" / "plans.md"
PLOT = RESULTS / "warm.svg"
SHUFFLE_PLOT = RESULTS / "shuffle.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="fail if a page is not up to date")


def run(options: argparse.Namespace) -> None:
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    sections = [(README, "results", results_section(results))]
    if "shuffle" in results:
        tables = shuffle_report.sections(results["shuffle"])
        sections += [(PLANS, name, table) for name, table in tables.items()]
    for page, name, content in sections:
        updated = _between_markers(page, name, content)
        if not options.check:
            page.write_text(updated)
        elif updated != page.read_text():
            raise SystemExit(f"{page.name} is not what the results say: python -m benchmarks report")
    if options.check:
        return
    if "warm" in results:
        plot_warm(results["warm"], PLOT)
    if "shuffle" in results:
        shuffle_report.plot(results["shuffle"], SHUFFLE_PLOT)


def results_section(results: dict[str, dict[str, Any]]) -> str:
    """The README's answers, one line each, then the table of throughput."""
    lines = []
    for name, answer in ANSWERS.items():
        if name in results:
            lines.append(f"| {answer(results[name])} |")
    parts = ["| question | answer |", "|---|---|", *lines]
    if "warm" in results:
        parts += [
            "",
            *warm_table(results["warm"]),
            "",
            f"![Million tokens a second by batch shape]({_relative(PLOT)})",
        ]
    shown = [name for name in (*ANSWERS, "warm") if name in results]
    on = {name: hardware(results[name]["environment"]) for name in shown}
    for where in dict.fromkeys(on.values()):
        parts += ["", f"{where}: {', '.join(name for name in shown if on[name] == where)}."]
    parts += ["", "How each was measured: the docstrings in `benchmarks/`."]
    return "\n".join(parts)


def warm_table(result: dict[str, Any]) -> list[str]:
    """Million tokens a second by contestant and batch shape."""
    rows = result["rows"]
    lines = [
        "Million tokens a second, finished on the device, each batch waited for, data in memory:",
        "",
        "| | " + " | ".join(f"{row['batch_size']}x{row['seq_len']}" for row in rows) + " |",
        "|---|" + "--:|" * len(rows),
    ]
    for name in rows[0]["contestants"]:
        rates = [row["contestants"][name]["million_tokens_per_second"] for row in rows]
        lines.append(f"| {name} | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |")
    return lines


def cold(result: dict[str, Any]) -> str:
    """Windows a second against fio and np.memmap, at both read-aheads."""
    parts = []
    for row in result["rows"]:
        ours, plain = row["tokenloader"], row["np.memmap in a loop"]
        fio, pages = row.get("fio, 4 KiB, depth 64"), row.get(FIO_WINDOWS)
        against = ""
        if fio and pages:
            against = (
                f", {fio['tokenloader_is_times_this']:.2f} of fio's random reads of 4 KiB, "
                f"{pages['tokenloader_is_times_this']:.2f} of its reads of the windows' pages"
            )
        parts.append(
            f"{ours['windows_per_second']:,} windows/s{against}, "
            f"{plain['tokenloader_is_times_this']:,.0f} times `np.memmap` "
            f"(read-ahead {row['read_ahead_kib']} KiB)"
        )
    return f"{result['gib']:.2f} GiB on disk, page cache dropped | {'; '.join(parts)}"


def slow(result: dict[str, Any]) -> str:
    """ShuffledBlocks at each limit of the disk, against reads in file order and at random."""
    parts = []
    for row in result["rows"]:
        ours = row["contestants"][BLOCKS]
        times = ours["is_times"]
        in_order = FIO if FIO in times else IN_ORDER
        parts.append(
            f"{row['limits']}: {ours['windows_per_second']:,.0f} windows/s, {times[in_order]:.2f} of "
            f"{in_order.split(',')[0]} in file order, {times[EPOCHS]:.1f} times `{EPOCHS}`"
        )
    told = f"`{BLOCKS}` on {result['gib']:.2f} GiB, page cache dropped, the disk held to a rate"
    return f"{told} | {'; '.join(parts)}"


def first(result: dict[str, Any]) -> str:
    """Seconds to the first batch, for each way to load."""
    ways = result["seconds"].items()
    told = ", ".join(f"{way}: {'died' if s is None else f'{s:.3f} s'}" for way, s in ways)
    return f"from opening {result['gib']:.2f} GiB to the first batch, cold | {told}"


def train(result: dict[str, Any]) -> str:
    """The cost of a step with the loader."""
    return (
        f"a training step with the loader, against one batch that stays on the device | "
        f"{result['loader_over_resident']:.3f} times the time, "
        f"{result['share_of_time_waiting']:.2%} of it waiting"
    )


def memory(result: dict[str, Any]) -> str:
    """Anonymous memory by residency."""
    rows = result["residencies"]
    size = rows["mmap"]["data_bytes"] / 2**30
    told = [f"mapped: {rows['mmap']['added_anonymous_mib']:,.1f} MiB"]
    if "ram" in rows:
        told.append(f"in RAM: {rows['ram']['added_share_of_data']:.4f} of the data")
    return f"memory beyond jax's own, for {size:.2f} GiB of tokens | {'; '.join(told)}"


def scale(result: dict[str, Any]) -> str:
    """The worst growth, with the data and with the number of hosts."""
    worst = max(result["largest_over_smallest"].values())
    first, *_, last = result["hosts"]
    return (
        f"opening, a batch, a resume, at samples 0 and 10^12: from 1 GiB to 8 TiB | at most "
        f"{worst:.2f} times the cheapest size; one of {last['hosts']:,} hosts plans "
        f"{last['rows_gathered']} rows in {last['plan_microseconds_per_step']:.0f} us, a single one in "
        f"{first['plan_microseconds_per_step']:.0f}"
    )


def cpu(result: dict[str, Any]) -> str:
    """Processor seconds of tokenloader, and of the best peer."""
    rows = dict(result["processor_seconds_per_billion_tokens"])
    ours = {name: rows.pop(name) for name in list(rows) if name.startswith("tokenloader")}
    rows.pop("bare parts in a loop", None)
    name, seconds = min(rows.items(), key=lambda row: row[1])
    told = ", ".join(f"{value:.1f} ({key.split(', ', 1)[1]})" for key, value in ours.items())
    return f"processor seconds for a billion tokens | {told}; the next is {name} with {seconds:.1f}"


def gpu(result: dict[str, Any]) -> str:
    """The cost of a step on the accelerator, and the bytes on the bus."""
    step = result["train"]
    return (
        f"a GPT-2 124M step on {result['environment']['device']}, with the loader | "
        f"{step['loader_over_resident']:.3f} times the time of a resident batch; "
        f"{result['bytes_on_the_bus_per_token']:.2f} bytes a token on the bus"
    )


ANSWERS = {
    "cold": cold,
    "slow": slow,
    "first": first,
    "train": train,
    "memory": memory,
    "scale": scale,
    "cpu": cpu,
    "gpu": gpu,
}


def plot_warm(result: dict[str, Any], path: Path) -> None:
    """Bars of tokens a second by batch shape."""
    from matplotlib import colormaps, rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "tokenloader"  # equal results give equal bytes
    rows = result["rows"]
    names = list(rows[0]["contestants"])
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.add_subplot()
    width = 0.84 / len(names)
    light = colormaps["Set3"].colors
    for i, name in enumerate(names):
        rates = [row["contestants"][name]["million_tokens_per_second"] for row in rows]
        color = light[i] if not name.startswith("tokenloader") else f"C{i}"
        places = [j + (i - len(names) / 2 + 0.5) * width for j in range(len(rows))]
        axes.bar(places, rates, width, label=name, color=color, edgecolor="0.4", linewidth=0.3)
    axes.set_xticks(range(len(rows)), [f"{row['batch_size']} x {row['seq_len']:,}" for row in rows])
    axes.set(xlabel="batch (sequences x tokens)", ylabel="million tokens a second")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, ncols=2, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def hardware(environment: dict[str, Any]) -> str:
    """The hardware and versions that the figures were measured with."""
    versions = environment["versions"]
    return (
        f"{environment['processor']}, {environment['cores']} cores, {environment['memory_gib']:.0f} GiB, "
        f"jax {versions['jax']} on {environment['platform']}, {environment['date']}"
    )


def _relative(path: Path) -> str:
    return path.relative_to(README.parent).as_posix()


def _between_markers(page: Path, name: str, content: str) -> str:
    text = page.read_text()
    pattern = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{page.name} has no <!-- {name}: --> and <!-- /{name} --> to write between")
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)
