"""The command line: arguments in, a command's function called, its screen or its JSON out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from tokenloader.cli.console import WRONG, print_out, run_and_exit
from tokenloader.formats.extent import TOKEN_DTYPES, token_dtype
from tokenloader.tokens.opening import open_tokens
from tokenloader.tokens.token_array import TokenArray
from tokenloader.tokens.writing import Format

Command = TypeVar("Command", bound=Callable[..., Any])

_DTYPES = click.Choice([dtype.name for dtype in TOKEN_DTYPES])
_POSITIVE = click.IntRange(min=1)


def main() -> None:
    """Runs the command line of this process, and exits with its status."""
    run_and_exit(commands)


def _reads_tokens(command: Command) -> Command:
    """The argument and the options of commands that open token files."""
    for add in (
        click.option(
            "--dtype", type=_DTYPES, help="Of the tokens in headerless files, and only there."
        ),
        click.option(
            "--key", default="tokens", show_default=True, help="The tensor, in safetensors files."
        ),
        click.argument("sources", metavar="SOURCE...", nargs=-1, required=True),
    ):
        command = add(command)
    return command


def _takes_batches(command: Command) -> Command:
    """The options of commands that make or count batches."""
    for add in (
        click.option("--seq-len", type=_POSITIVE, default=1024, show_default=True),
        click.option("--batch-size", type=_POSITIVE, default=32, show_default=True),
    ):
        command = add(command)
    return command


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


def _open(sources: Sequence[str], key: str, dtype: str | None) -> TokenArray:
    return open_tokens(list(sources) if len(sources) > 1 else sources[0], key=key, dtype=dtype)


def _on_terminal() -> bool:
    return sys.stderr.isatty()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(package_name="tokenloader", message="%(package)s %(version)s")
def commands() -> None:
    """Token files for language models in JAX: look at them, check, convert, make and time them.

    A SOURCE is what tokenloader.open_tokens takes: a token file of any format, a directory of shards, a
    pattern in quotes, or hf://datasets/OWNER/NAME/FILE. Several are one token axis, in the order given.

    \b
    The exit status is 0, 1 if check finds something wrong, or 2 if the command
    cannot be carried out.
    """


@commands.command()
@_reads_tokens
@_takes_batches
@click.option("--devices", is_flag=True, help="List JAX's devices too. This alone loads JAX.")
@_as_json
def info(
    sources: Sequence[str],
    key: str,
    dtype: str | None,
    batch_size: int,
    seq_len: int,
    devices: bool,
    as_json: bool,
) -> None:
    """Tell what a token file is, at once at any size.

    Format, tensors, tokens, bytes, steps an epoch takes, and how much of it is in the page cache
    (of more than 64 MiB, by a sample of pages).

    \b
    Examples:
      tokenloader info train.safetensors
      tokenloader info --batch-size 64 --seq-len 2048 train.safetensors
      tokenloader info --dtype uint16 train.bin
      tokenloader info --devices "fineweb_train_*.bin"
    """
    from tokenloader.check.info import info as run
    from tokenloader.cli.screens import info_screen

    with _open(sources, key, dtype) as tokens:
        found = run(tokens, batch_size=batch_size, seq_len=seq_len)
    where = None
    if devices:
        from tokenloader.check.devices import find_devices

        where = find_devices()
    if as_json:
        print_out(asdict(found) | ({"devices": [asdict(one) for one in where]} if where else {}))
    else:
        print_out(info_screen(found, where))


@commands.command()
@_reads_tokens
@click.option("--vocab-size", type=_POSITIVE, help="Ids must be below it.")
@click.option("--eos-id", type=click.IntRange(min=0), help="The id that ends documents.")
@click.option(
    "--against", multiple=True, metavar="SOURCE", help="Tokens that should share no document."
)
@_as_json
def check(
    sources: Sequence[str],
    key: str,
    dtype: str | None,
    vocab_size: int | None,
    eos_id: int | None,
    against: Sequence[str],
    as_json: bool,
) -> None:
    """Tell whether something is wrong with a token file.

    Every token is read once. Looked for are ids past the vocabulary, a wrong byte order or width,
    how documents end and how long they are, runs of one token, documents that are there twice or in
    other tokens too. Without --eos-id, the ids of GPT-2, Llama 3, Qwen and OpenAI's encodings
    are looked for.

    The exit status is 1 if anything is wrong. Duplicates are, when they are over 1% of the
    documents; a document shared with --against always is.

    \b
    Examples:
      tokenloader check --vocab-size 50257 train.safetensors
      tokenloader check validation.safetensors --against train.safetensors
      tokenloader check --eos-id 2 --json llama2.npy
    """
    from tokenloader.check.check import check as run
    from tokenloader.cli.screens import check_screen

    with _open(sources, key, dtype) as tokens:
        report = run(
            tokens,
            vocab_size=vocab_size,
            eos_id=eos_id,
            against=_open(against, key, dtype) if against else None,
            progress=_on_terminal(),
        )
    if as_json:
        values = asdict(report)
        print_out(values.pop("counts") | values)
    else:
        encoding = (sys.stdout.encoding or "").lower()
        print_out(check_screen(report, "█" if encoding.startswith("utf") else "#"))
    if report.problems:
        sys.exit(WRONG)


@commands.command()
@_reads_tokens
@_takes_batches
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="A measurement.",
)
@_as_json
def bench(
    sources: Sequence[str],
    key: str,
    dtype: str | None,
    batch_size: int,
    seq_len: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure how fast a token file gives batches.

    Random windows through TokenLoader, to the default device: first cold, after this file (and no
    other) has been dropped from the page cache, which needs no privileges; then the same windows
    warm. And a sentence on what limits it.

    \b
    Examples:
      tokenloader bench train.safetensors
      tokenloader bench --batch-size 256 --seconds 10 train.safetensors
      JAX_PLATFORMS=cpu tokenloader bench train.safetensors
    """
    from tokenloader.check.bench import bench as run
    from tokenloader.cli.screens import bench_screen

    measured = run(
        lambda: _open(sources, key, dtype), batch_size=batch_size, seq_len=seq_len, seconds=seconds
    )
    if as_json:
        print_out(asdict(measured))
    else:
        print_out(bench_screen(measured))


@commands.command()
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "format",
    type=click.Choice(get_args(Format)),
    help="The format of DST, where its suffix is not .safetensors or .npy.",
)
@click.option("--dtype", type=_DTYPES, help="Of DST; ids that do not fit are refused.")
@click.option("--source-dtype", type=_DTYPES, help="Of the tokens in SRC, if it is headerless.")
@click.option(
    "--key", default="tokens", show_default=True, help="The tensor, in safetensors files of SRC."
)
@click.option("--force", is_flag=True, help="Replace DST if it exists.")
def convert(
    sources: Sequence[str],
    target: Path,
    format: Format | None,
    dtype: str | None,
    source_dtype: str | None,
    key: str,
    force: bool,
) -> None:
    """Write the tokens of SRC to DST, in another format or dtype.

    DST may be safetensors, .npy, llm.c's and modded-nanogpt's .bin (uint16 or uint32), or raw:
    headerless, as nanoGPT has it. It appears under its name when it is complete. Several SRC are
    joined in order.

    \b
    Examples:
      tokenloader convert fineweb_train_000001.bin train.safetensors
      tokenloader convert --source-dtype uint16 nanogpt.bin train.npy
      tokenloader convert --to llm.c --dtype uint16 train.npy train.bin
      tokenloader convert "shard_*.npy" whole.safetensors
    """
    from tokenloader.cli.screens import size
    from tokenloader.prepare.convert import convert as run
    from tokenloader.prepare.convert import target_format

    chosen = target_format(target, format)
    with _open(sources, key, source_dtype) as tokens:
        num_bytes = run(
            tokens,
            target,
            format=chosen,
            dtype=token_dtype(dtype, "--dtype ") if dtype else None,
            force=force,
            progress=_on_terminal(),
        )
        print_out(f"{target}: {len(tokens):,} tokens, {size(num_bytes)}, {chosen}")


@commands.command()
@click.argument(
    "files", metavar="FILES...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--tokenizer",
    required=True,
    type=click.Path(path_type=Path),
    help="A tokenizer.json of the tokenizers library, as most models on the Hub have it.",
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The safetensors file to write."
)
@click.option(
    "--column", default="text", show_default=True, help="With the text, in JSON lines and Parquet."
)
@click.option("--eos-token", metavar="TOKEN", help="Ends documents, if it is not a known one.")
@click.option("--force", is_flag=True, help="Replace the file --out if it exists.")
@_as_json
def tokenize(
    files: Sequence[Path],
    tokenizer: Path,
    out: Path,
    column: str,
    eos_token: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Turn text into a token file.

    After each document comes an end-of-text id. FILES are JSON lines (.jsonl, .ndjson, .json),
    Parquet (.parquet), or plain text in UTF-8; all but Parquet also packed (.gz, .zst). A plain
    text file is one document, or several with the end-of-text token's own text (such as
    <|endoftext|>) between them. The ids are uint16 if the vocabulary fits, else uint32. Documents
    keep their order.

    Needs: pip install 'tokenloader[tokenize]'

    \b
    Examples:
      tokenloader tokenize books/*.txt --tokenizer tokenizer.json \\
          --out train.safetensors
      tokenloader tokenize shard-*.parquet --column content \\
          --tokenizer tokenizer.json --out train.safetensors
    """
    from tokenloader.cli.screens import tokenized_screen
    from tokenloader.prepare.convert import check_target
    from tokenloader.prepare.tokenize import Tokenizer
    from tokenloader.prepare.tokenize import tokenize as run

    check_target(out, force=force, read=[*files, tokenizer])
    done = run(files, out, Tokenizer(tokenizer, eos_token), column=column, progress=_on_terminal())
    if as_json:
        print_out(asdict(done))
    else:
        print_out(tokenized_screen(done, str(out)))


@commands.command()
@click.argument("state", metavar="STATE.json", type=click.Path(path_type=Path))
@_reads_tokens
@click.option("--step", type=click.IntRange(min=0), required=True, help="The run's first is 0.")
@click.option("--eos-id", type=click.IntRange(min=0), help="The id that ends documents.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json, to show text.")
@_as_json
def replay(
    state: Path,
    sources: Sequence[str],
    key: str,
    dtype: str | None,
    step: int,
    eos_id: int | None,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Show what a step of a run trained on, or will.

    From loader.get_state(), of any step and saved as JSON, and from the tokens that the run trains on:
    no device, no JAX. With --eos-id the documents in each window are counted; with --json they are
    listed, and the text is whole.

    \b
    Examples:
      tokenloader replay state.json train.safetensors --step 1200
      tokenloader replay state.json train.safetensors --step 1200 \\
          --eos-id 50256 --tokenizer tokenizer.json
    """
    from tokenloader.check.replay import replay as run
    from tokenloader.cli.screens import replay_screen, replayed_rows
    from tokenloader.prepare.tokenize import decoder

    try:
        saved = json.loads(state.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{state}: not JSON ({error}); write json.dumps(loader.get_state())"
        ) from None
    decode = decoder(tokenizer) if tokenizer else None
    with _open(sources, key, dtype) as tokens:
        rows = replayed_rows(run(saved, tokens, step, eos_id=eos_id), decode)
    if as_json:
        print_out({"step": step, "rows": [asdict(row) for row in rows]})
    else:
        print_out(replay_screen(step, rows))
