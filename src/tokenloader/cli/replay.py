"""`tokenloader replay`: what a step of a run trained on, or will."""

import json
import textwrap
from pathlib import Path
from typing import Any

import click

from tokenloader.check.replay import replay
from tokenloader.cli.console import print_out
from tokenloader.cli.options import PATH, Sources, as_json, reads_tokens, takes_delimiter
from tokenloader.prepare.tokenize import decoder


@click.command("replay")
@click.argument("state", metavar="STATE.json", type=PATH)
@reads_tokens
@click.option(
    "--step", type=click.IntRange(min=0), required=True, help="Number of the step; a run begins with 0."
)
@takes_delimiter
@click.option("--tokenizer", type=PATH, help="tokenizer.json, to show text.")
@as_json
def command(
    state: Path,
    sources: Sources,
    step: int,
    eos_id: int | None,
    bos_id: int | None,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Show what a step of a run trained on, or will.

    Needs a state from loader.get_state(), of any step and saved as JSON, and the tokens that the run
    trains on; no device, and no JAX. With --eos-id or --bos-id the documents in each window are
    counted; with --json they are listed, and the text is whole.

    \b
    Examples:
      tokenloader replay state.json train.safetensors --step 1200
      tokenloader replay state.json train.safetensors --step 1200 \\
          --eos-id 50256 --tokenizer tokenizer.json
    """
    try:
        saved = json.loads(state.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{state}: not JSON ({error}); expected what json.dumps(loader.get_state()) gives"
        ) from None
    with sources.open() as tokens:
        found = replay(saved, tokens, step, eos_id=eos_id, bos_id=bos_id)
    nothing = [None] * len(found.samples)
    documents = nothing if found.documents is None else [one.tolist() for one in found.documents]
    texts = list(map(decoder(tokenizer), found.tokens)) if tokenizer else nothing
    columns = zip(found.samples.tolist(), found.starts.tolist(), documents, texts, strict=True)
    rows = [dict(zip(("sample", "start", "documents", "text"), row, strict=True)) for row in columns]
    print_out({"step": step, "rows": rows} if as_json else replay_screen(step, rows))


def replay_screen(step: int, rows: list[dict[str, Any]]) -> str:
    """What `tokenloader replay` prints; rows as in the JSON."""
    lines = [f"step {step:,}: {len(rows):,} windows", ""]
    lines.append(f"{'sample':>14} {'first token':>16} {'documents':>10}")
    for row in rows:
        count = "" if row["documents"] is None else f"{len(row['documents']):,}"
        text = textwrap.shorten(row["text"] or "", 36, placeholder="...")
        lines.append(f"{row['sample']:>14,} {row['start']:>16,} {count:>10}  {text}".rstrip())
    return "\n".join(lines)
