"""`tokenloader convert`: a token file in another format or dtype."""

from pathlib import Path

import click

from tokenloader.cli.console import on_terminal, print_out, size
from tokenloader.cli.options import DTYPES, PATH, Sources, key
from tokenloader.formats.detect import WRITERS
from tokenloader.prepare.convert import convert, target_format


@click.command("convert")
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.argument("target", metavar="DST", type=PATH)
@click.option(
    "--to",
    "format",
    type=click.Choice([writer.name for writer in WRITERS]),
    help="Format of DST, where its suffix is not .safetensors or .npy.",
)
@click.option("--dtype", type=DTYPES, help="Dtype of one token in DST; ids that do not fit are refused.")
@click.option("--source-dtype", type=DTYPES, help="Dtype of one token in SRC, for headerless files only.")
@key
@click.option("--force", is_flag=True, help="Replace DST if it exists.")
def command(
    sources: tuple[str, ...],
    target: Path,
    format: str | None,
    dtype: str | None,
    source_dtype: str | None,
    key: str,
    force: bool,
) -> None:
    """Write the tokens of SRC to DST, in another format or dtype.

    DST may be safetensors, .npy, llm.c's and modded-nanogpt's .bin (uint16 or uint32), or raw:
    headerless, as nanoGPT writes it. It appears under its name when it is complete. Several SRC are
    joined in the order given.

    \b
    Examples:
      tokenloader convert fineweb_train_000001.bin train.safetensors
      tokenloader convert --source-dtype uint16 nanogpt.bin train.npy
      tokenloader convert --to llm.c --dtype uint16 train.npy train.bin
      tokenloader convert "shard_*.npy" whole.safetensors
    """
    writer = target_format(target, format)
    with Sources(sources, key, source_dtype, "--source-dtype").open() as tokens:
        num_bytes = convert(tokens, target, writer=writer, dtype=dtype, force=force, progress=on_terminal())
        print_out(f"{target}: {len(tokens):,} tokens, {size(num_bytes)}, {writer.name}")
