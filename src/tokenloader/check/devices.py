"""Devices: where batches can land, in every JAX backend that this process has."""

import os
from dataclasses import dataclass

from tokenloader.storage.memory_limits import available_bytes


@dataclass(frozen=True)
class Device:
    """A device that batches can land on."""

    backend: str  # name of its JAX backend
    name: str  # the device, as JAX prints it
    kind: str  # name of the hardware
    memory_bytes: int | None  # that JAX may use on it; for the CPU, what is available now. None: not told
    default: bool  # whether batches go there when no sharding is given


def start_backends() -> None:
    """Starts JAX's backends; a RuntimeError says that there are none, and what names them."""
    import jax

    try:
        jax.devices()
    except Exception as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise RuntimeError(
            f"JAX has no device, with JAX_PLATFORMS={asked!r} ({error!r:.500}); set JAX_PLATFORMS to what "
            f"this machine has, such as cpu, or leave it out"
        ) from error


def find_devices() -> list[Device]:
    """Lists every device of every JAX backend of this process. Takes no GPU memory for later."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jax.extend.backend import backends

    start_backends()
    from tokenloader.loader.sharding import default_device

    default = default_device()
    found = []
    for backend, client in backends().items():
        for device in client.local_devices():
            memory = (device.memory_stats() or {}).get("bytes_limit")
            if memory is None and device.platform == "cpu":
                memory = available_bytes()
            found.append(Device(backend, str(device), device.device_kind, memory, device == default))
    return found
