"""Tables and the plot of the program shuffle, for docs/plans.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.shuffle_orders import BLOCKS, FILE_ORDER, FULL_SHUFFLE

SHOWN_BLOCKS = ["2", "8", "32", "128", "512", "2048"]


def sections(result: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/plans.md, by the name of their markers."""
    tables = {
        "shuffle-losses": loss_table(result),
        "shuffle-variances": ratio_table(result["quality"]),
        "shuffle-correlations": correlation_table(result["quality"]),
    }
    return {name: "\n".join(lines) for name, lines in tables.items()}


def loss_table(result: dict[str, Any]) -> list[str]:
    """What each plan costs at full size, and what it does to a validation loss."""
    training = result["training"]
    costs = {row["order"]: row for row in result["full_size_costs"]}
    lines = [
        "| plan | blocks at full size | requests for 1,000 windows | open | blocks in training | "
        "validation loss | above `ShuffledEpochs` |",
        "|---|---|---|--:|---|--:|--:|",
    ]
    losses = {row["order"]: row["validation_losses"] for row in training["orders"]}
    for order, values in losses.items():
        cost = costs[order]
        requests = cost["requests_per_1000_windows"]
        told = f"{requests:,.0f}" if requests >= 100 else f"{requests:.2f}"
        cells = [order, "", f"{told} of {cost['kib_per_request']:,.0f} KiB", "", ""]
        if order in BLOCKS:
            cells[1] = f"{cost['open_blocks']:,} of {cost['block_windows']:,} windows"
            cells[3] = f"{cost['open_mib']:,.0f} MiB"
            block_windows, open_blocks = training["sizes"][order]
            cells[4] = f"{open_blocks:,} of {block_windows:,}"
        above = [a - b for a, b in zip(values, losses[FULL_SHUFFLE], strict=True)]
        cells += [_spread(values), "" if order == FULL_SHUFFLE else _spread(above)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ratio_table(quality: dict[str, Any]) -> list[str]:
    """The variance of mean losses over steps, against a full shuffle, measured and by theory."""
    rows = quality["variance_over_full_shuffle"]
    of_loss = {(row["order"], row["steps"]): row for row in rows if row["value"] == "loss"}
    steps = sorted({row["steps"] for row in rows})
    lines = [
        "| variance of the mean loss over | " + " | ".join(map(_count_of_steps, steps)) + " |",
        "|---|" + "--:|" * len(steps),
    ]
    for order in (FULL_SHUFFLE, *BLOCKS, FILE_ORDER):
        told = [f"{of_loss[order, k]['ratio']:,.3g} ({of_loss[order, k]['predicted']:,.3g})" for k in steps]
        lines.append(f"| {order} | {' | '.join(told)} |")
    deviations = [f"{of_loss[FULL_SHUFFLE, k]['deviation_of_mean']:.2g}" for k in steps]
    lines.append(f"| deviation under {FULL_SHUFFLE}, nats | {' | '.join(deviations)} |")
    return [*lines, "", agreement(rows)]


def agreement(rows: list[dict[str, Any]]) -> str:
    """How far the measured ratios are from the predicted ones."""
    off = [abs(row["ratio"] / row["predicted"] - 1) for row in rows]
    is_near = [abs(row["ratio"] - row["predicted"]) <= 2 * row["standard_error"] for row in rows]
    return (
        f"Of {len(rows)} ratios, of the loss and of four features of the text, the measured one is off the "
        f"predicted one by {statistics.median(off):.1%} in the median and {max(off):.0%} at most; "
        f"{sum(is_near) / len(rows):.0%} are within two standard errors."
    )


def correlation_table(quality: dict[str, Any]) -> list[str]:
    """The intraclass correlation of what a window holds, by the size of blocks."""
    lines = [
        "| correlation of two windows of a block of | " + " | ".join(SHOWN_BLOCKS) + " |",
        "|---|" + "--:|" * len(SHOWN_BLOCKS),
    ]
    for key, added in (("intraclass_correlation", ""), ("with_documents_shuffled", ", documents shuffled")):
        for name, by_size in quality[key].items():
            cells = [f"{by_size[size]:.3f}" for size in SHOWN_BLOCKS]
            lines.append(f"| {name}{added} | {' | '.join(cells)} |")
    return lines


def plot(result: dict[str, Any], path: Path) -> None:
    """Validation losses of all runs, and ratios of variances by the number of steps."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "tokenloader"  # equal results give equal bytes
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = result["training"]["orders"]
    for i, row in enumerate(rows):
        losses = row["validation_losses"]
        left.plot(losses, [i] * len(losses), "o", color=f"C{i}", alpha=0.5, markeredgewidth=0)
        spread = statistics.stdev(losses) if len(losses) > 1 else 0
        left.errorbar(statistics.mean(losses), i, xerr=spread, color=f"C{i}", marker="|", capsize=4)
    left.set_yticks(range(len(rows)), [row["order"] for row in rows])
    left.invert_yaxis()
    left.set(xlabel="validation loss, nats a byte (each run; mean and deviation)")

    for i, row in enumerate(rows):
        of_order = [
            ratio
            for ratio in result["quality"]["variance_over_full_shuffle"]
            if (ratio["order"], ratio["value"]) == (row["order"], "loss")
        ]
        steps = [ratio["steps"] for ratio in of_order]
        right.plot(steps, [ratio["predicted"] for ratio in of_order], "-", color=f"C{i}", linewidth=1)
        right.plot(steps, [ratio["ratio"] for ratio in of_order], "o", color=f"C{i}", label=row["order"])
    right.set(xscale="log", yscale="log", xlabel="steps (points: measured; lines: predicted)")
    right.set(ylabel="variance of the mean loss / full shuffle")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def _count_of_steps(steps: int) -> str:
    return f"{steps:,} step{'s' * (steps > 1)}"
