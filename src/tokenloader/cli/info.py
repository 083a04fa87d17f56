"""`tokenloader info`: what a token file is."""

from collections.abc import Sequence
from dataclasses import asdict

import click

from tokenloader.check.devices import Device, find_devices
from tokenloader.check.info import Info, info
from tokenloader.cli.console import print_out, row, size
from tokenloader.cli.options import Sources, as_json, reads_tokens, takes_batches

_MOST_LISTED = 6  # files, and tensors, by name


@click.command("info")
@reads_tokens
@takes_batches
@click.option("--devices", is_flag=True, help="List JAX's devices too. Only this loads JAX.")
@as_json
def command(sources: Sources, batch_size: int, seq_len: int, devices: bool, as_json: bool) -> None:
    """Tell what a token file is, at once at any size.

    Format, tensors, tokens, bytes, steps in an epoch, and how much of the file is in the page cache
    (of more than 64 MiB, an estimate from a sample of pages).

    \b
    Examples:
      tokenloader info train.safetensors
      tokenloader info --batch-size 64 --seq-len 2048 train.safetensors
      tokenloader info --dtype uint16 train.bin
      tokenloader info --devices "fineweb_train_*.bin"
    """
    with sources.open() as tokens:
        found = info(tokens, batch_size=batch_size, seq_len=seq_len)
    there = find_devices() if devices else []
    if as_json:
        print_out(asdict(found) | ({"devices": list(map(asdict, there))} if devices else {}))
    else:
        print_out(info_screen(found, there))


def info_screen(info: Info, devices: Sequence[Device]) -> str:
    """What `tokenloader info` prints."""
    lines = _listed("file", [file.path for file in info.files])
    lines += row("format", ", ".join(dict.fromkeys(file.format for file in info.files)))
    lines += _listed("tensors", info.tensors)
    lines += row("dtype", info.dtype)
    lines += row("tokens", f"{info.num_tokens:,}")
    lines += row("bytes", f"{info.num_bytes:,} ({size(info.num_bytes)})")
    shape = f"batch size {info.batch_size:,}, sequence length {info.seq_len:,}"
    if info.windows_per_epoch is None:
        lines += row("windows", f"none: fewer tokens than a window of {info.seq_len + 1:,}")
    else:
        lines += row("windows", f"{info.windows_per_epoch:,} an epoch")
        lines += row("steps", f"{info.steps_per_epoch:,} an epoch ({shape})")
    if info.cached_share is None:
        lines += row("page cache", "the system does not tell")
    else:
        about = "about " if info.cache_sampled else ""
        cached = size(info.cached_share * info.num_bytes)
        lines += row("page cache", f"{about}{info.cached_share:.0%} cached ({cached})")
    for device in devices:
        memory = "memory unknown" if device.memory_bytes is None else size(device.memory_bytes)
        default = "  <- batches land here" if device.default else ""
        name = f"{device.name} ({device.kind})" if device.kind != device.backend else device.name
        lines += row(device.backend, f"{name}, {memory}{default}")
    return "\n".join(lines)


def _listed(label: str, names: Sequence[str]) -> list[str]:
    """Rows of the first names, and how many more there are."""
    shown = [*names[:_MOST_LISTED]]
    if len(names) > _MOST_LISTED:
        shown.append(f"and {len(names) - _MOST_LISTED:,} more")
    return [line for i, name in enumerate(shown) for line in row("" if i else label, name)]
