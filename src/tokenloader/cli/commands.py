"""The command line: `tokenloader` and its commands, a file each."""

import click

from tokenloader.cli import bench, check, convert, info, replay, tokenize
from tokenloader.cli.console import run_and_exit


def main() -> None:
    """Runs the command line of this process, and exits with its status."""
    run_and_exit(commands)


@click.group(
    commands=[module.command for module in (info, check, bench, convert, tokenize, replay)],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80, "show_default": True},
)
@click.version_option(package_name="tokenloader", message="%(package)s %(version)s")
def commands() -> None:
    """Look at token files for language models in JAX; check, convert, make and time them.

    A SOURCE is what tokenloader.open_tokens takes: a token file of any format, a directory of shards, a
    pattern in quotes, or hf://datasets/OWNER/NAME/FILE. Several are joined in the order given.

    \b
    The exit status is 0, 1 if check finds something wrong, or 2 if the command
    cannot be carried out.
    """
