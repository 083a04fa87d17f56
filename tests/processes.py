"""Starts several processes on one machine, each with its devices of one mesh, as on several hosts."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

HEAD = textwrap.dedent("""
    import functools, itertools, json, os, sys, time
    import jax
    here, count, port = map(int, sys.argv[1:4])
    if count > 1:
        jax.distributed.initialize(f"localhost:{port}", count, here)
    # What is read below is read explicitly; what the loader sends it must send so too.
    jax.config.update("jax_transfer_guard", "disallow")
    if hasattr(jax.config, "jax_thread_guard"):  # jax 0.9
        jax.config.update("jax_thread_guard", True)
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import tokenloader as tl
    from helpers import Listed, RecordedTokens, make_mesh, watched_tokens

    # Gloo, which makes the collectives on CPUs, writes to stdout what it likes.
    print = functools.partial(print, file=open(sys.argv[4], "w"), flush=True)

    def mesh(shape, axis_type=AxisType.Auto):
        return make_mesh(*shape, names=("data", "seq", "model"), axis_type=axis_type)

    def everywhere(x):
        with jax.transfer_guard("allow"):
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
""")


HELPERS = str(Path(__file__).parent)


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run(count, script, *, devices=8, timeout=110, must_succeed=True):
    """What each of `count` processes printed, with `devices` among them in all."""
    port, env = str(free_port()), dict(os.environ, JAX_PLATFORMS="cpu")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [HELPERS, env.get("PYTHONPATH")]))
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices // count}"
    program = [sys.executable, "-c", HEAD + textwrap.dedent(script)]
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder) / str(i) for i in range(count)]
        started = [
            subprocess.Popen(
                [*program, str(i), str(count), port, str(printed[i])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
            for i in range(count)
        ]
        try:
            errors = [process.communicate(timeout=timeout)[1] for process in started]
        finally:
            for process in started:
                process.kill()
                process.communicate()
        for process, error in zip(started, errors, strict=True):
            assert process.returncode == 0 or not must_succeed, error
        return [path.read_text() for path in printed]
