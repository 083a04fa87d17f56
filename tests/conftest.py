"""Eight CPU devices for every test, so that sharding is tested in this process.

It must be said before jax starts its backends. Subprocesses inherit it.
"""

import os

_EIGHT = "--xla_force_host_platform_device_count=8"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _EIGHT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT}".strip()
