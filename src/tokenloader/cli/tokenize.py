"""`tokenloader tokenize`: text files to a token file."""

from dataclasses import asdict
from pathlib import Path

import click

from tokenloader.cli.console import on_terminal, print_out, row, size
from tokenloader.cli.options import PATH, as_json
from tokenloader.prepare.convert import check_target
from tokenloader.prepare.tokenize import Tokenized, Tokenizer, tokenize


@click.command("tokenize")
@click.argument("files", metavar="FILES...", nargs=-1, required=True, type=PATH)
@click.option(
    "--tokenizer",
    required=True,
    type=PATH,
    help="A tokenizer.json of the tokenizers library, which most models on the Hub have.",
)
@click.option("--out", required=True, type=PATH, help="The safetensors file to write.")
@click.option("--column", default="text", help="Field or column of the text, in JSON lines and Parquet.")
@click.option("--eos-token", metavar="TOKEN", help="The token to end documents with.")
@click.option("--replace-invalid", is_flag=True, help="Put U+FFFD in the place of what is not UTF-8.")
@click.option("--force", is_flag=True, help="Replace the file --out if it exists.")
@as_json
def command(
    files: tuple[Path, ...],
    tokenizer: Path,
    out: Path,
    column: str,
    eos_token: str | None,
    replace_invalid: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Turn text into a token file.

    After each document comes an end-of-text id: that of --eos-token, or of <|endoftext|>,
    <|end_of_text|>, </s> or <eos>. FILES are JSON lines (.jsonl, .ndjson, .json), Parquet
    (.parquet), or plain text in UTF-8; all but Parquet may be packed (.gz, .zst). A plain text file
    is one document, or several with the end-of-text token, spelled out, between them. The ids are
    uint16 if the vocabulary fits, else uint32. Documents keep their order.

    Needs: pip install 'tokenloader[tokenize]'

    \b
    Examples:
      tokenloader tokenize books/*.txt --tokenizer tokenizer.json \\
          --out train.safetensors
      tokenloader tokenize shard-*.parquet --column content \\
          --tokenizer tokenizer.json --out train.safetensors
    """
    check_target(out, force=force, read=[*files, tokenizer])
    encoder = Tokenizer(tokenizer, eos_token)
    done = tokenize(
        files,
        out,
        encoder,
        column=column,
        replace_invalid=replace_invalid,
        force=force,
        progress=on_terminal(),
    )
    print_out(asdict(done) if as_json else tokenize_screen(done, out))


def tokenize_screen(done: Tokenized, path: Path) -> str:
    """What `tokenloader tokenize` prints."""
    per_token = done.text_bytes / max(1, done.num_tokens - done.num_documents)
    lines = row("file", str(path))
    lines += row("documents", f"{done.num_documents:,} ({size(done.text_bytes)} of text)")
    lines += row("tokens", f"{done.num_tokens:,} {done.dtype}, {per_token:.2f} bytes of text each")
    lines += row("end of text", f"id {done.eos_id}, after each document")
    return "\n".join(lines)
