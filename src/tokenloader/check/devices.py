"""Devices: where batches can land, of every JAX backend that this process has."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tokenloader.storage.memory_limits import available_bytes


@dataclass(frozen=True)
class Device:
    """Where batches can land.

    Attributes:
        name: as JAX prints it.
        kind: the hardware's name.
        memory_bytes: that JAX may use of it; for the CPU, what is available now. None: not told.
        default: whether batches go there when nothing else is said.
    """

    backend: str
    name: str
    kind: str
    memory_bytes: int | None
    default: bool


def find_devices() -> list[Device]:
    """Every device of every JAX backend of this process. Takes no GPU memory for later."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jax.extend.backend import backends

    from tokenloader.loader.sharding import default_device

    default = default_device()
    found = []
    for backend, client in backends().items():
        for device in client.local_devices():
            stats = device.memory_stats() or {}
            memory = stats.get("bytes_limit")
            if memory is None and device.platform == "cpu":
                memory = available_bytes()
            found.append(
                Device(backend, str(device), device.device_kind, memory, device == default)
            )
    return found
