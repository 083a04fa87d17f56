"""How a program that uses a loader ends: no hang, no crash, no noise."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

PATH = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

HEAD = textwrap.dedent("""
    import itertools, os, signal, sys, threading, time
    import numpy as np
    import tokenloader as tl
    import tokenloader.loader.prefetch
    from helpers import watched_tokens

    # A shell starts what runs in the background with SIGINT ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    ids = np.arange(100_000, dtype=np.uint16)

    def block_from(call):
        calls = itertools.count()
        return watched_tokens(lambda: next(calls) >= call and time.sleep(1000), ids)

    tokens = tl.open_tokens(ids)
""")


def start(script):
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", HEAD + textwrap.dedent(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": "", "PYTHONPATH": PATH},  # one device: it starts faster
    )


def run(script, timeout=60):
    """(return code, stdout, stderr)."""
    process = start(script)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"the process hung; it had said {process.communicate()}")
    return process.returncode, out, err


ENDS = {
    "the end of the script": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an uncaught exception": ("1 / 0", 1, "ZeroDivisionError"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_with_an_active_loader_ends_at(end):
    code, returncode, error = ENDS[end]
    # The queue does not fill before the end: the thread is at work, now and then inside jax.
    found = run(f"""
        loader = tl.TokenLoader(tokens, 8, 128, prefetch=100_000)
        for _ in range(3):
            next(loader)
        print("last line")
        {code}
    """)
    assert found[:2] == (returncode, "last line\n")
    if error:
        assert found[2].splitlines()[-1].startswith(error)
        assert found[2].count("Traceback") == 1
    else:
        assert found[2] == ""


def test_a_program_ends_when_the_queue_is_full():
    assert run("""
        made = []
        loader = tl.TokenLoader(watched_tokens(lambda: made.append(1), ids), 64, 2048, prefetch=50)
        next(loader)
        while len(made) < 51:
            time.sleep(0.001)
        print("full")
    """) == (0, "full\n", "")


@pytest.mark.parametrize(
    "arguments", ["8, 1024, prefetch=100, transform=None", "256, 1024"], ids=["many", "large"]
)
def test_a_program_whose_loaders_lived_in_a_function_ends_without_a_crash(arguments):
    # They are collected when main() returns; if the interpreter goes down while their threads are
    # inside jax (sending a block, or dropping those not taken), the process dies of SIGABRT.
    assert run(f"""
        def main():
            loaders = [tl.TokenLoader(tokens, {arguments}) for _ in range(4)]
            for loader in loaders:
                next(loader)
                next(loader)

        main()
        print("done")
    """) == (0, "done\n", "")


def test_a_program_that_abandons_a_loader_that_is_making_a_batch_ends_without_a_crash():
    # The thread goes into jax at the very time at which the interpreter goes down.
    assert run("""
        def main():
            calls = itertools.count()
            slow = watched_tokens(lambda: next(calls) and time.sleep(0.2), ids)
            loader = tl.TokenLoader(slow, 512, 1024)
            next(loader)

        main()
        print("done")
    """) == (0, "done\n", "")


@pytest.mark.parametrize("where", ["global", "function"])
def test_a_program_ends_when_the_source_blocks_for_ever(where):
    script = """
        tokenloader.loader.prefetch.JOIN_SECONDS = 0.5

        def main():
            loader = tl.TokenLoader(block_from(2), 8, 128)
            next(loader)
            time.sleep(0.2)
            return loader

        {keep}main()
        print("done")
    """.format(keep="loader = " if where == "global" else "")
    began = time.monotonic()
    assert run(script) == (0, "done\n", "")
    assert time.monotonic() - began < 8


def test_a_program_ends_after_close_and_after_exhaustion():
    assert run("""
        loader = tl.TokenLoader(tokens, 8, 128)
        next(loader)
        loader.close()
        other = tl.TokenLoader(tokens, 8, 1280, plan=tl.SequentialWindows())
        print(len(list(other)), threading.active_count())
    """) == (0, "10 1\n", "")


def test_a_program_ends_after_an_error_of_the_background():
    code, out, err = run("""
        def fail():
            raise OSError("disk on fire")

        for batch in tl.TokenLoader(watched_tokens(fail, ids), 8, 128):
            pass
    """)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "OSError: disk on fire"
    assert ", in copy" in err  # the frames of the background
    assert err.count("Traceback") == 1


def interrupt_when_it_waits(script):
    """(return code, stdout, stderr, seconds from SIGINT to the end)."""
    with start(script) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.3)  # from the print to the wait
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, out, err, time.monotonic() - began


def test_ctrl_c_while_waiting_for_a_source_that_blocks_ends_the_program_promptly():
    # At once, and not after the time that the end of a thread is waited for; the exit may take that.
    code, out, err, seconds = interrupt_when_it_waits("""
        tokenloader.loader.prefetch.JOIN_SECONDS = 4
        loader = tl.TokenLoader(block_from(1), 8, 128, transform=None)
        next(loader)
        print("waiting", flush=True)
        began = time.monotonic()
        try:
            next(loader)
        except KeyboardInterrupt:
            print(time.monotonic() - began, flush=True)
            raise
    """)
    assert float(out) < 3
    assert code == -signal.SIGINT
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert err.count("Traceback") == 1
    assert seconds < 10


def test_after_ctrl_c_the_loader_goes_on_with_the_batch_that_was_waited_for():
    code, out, err, _ = interrupt_when_it_waits("""
        slow = [True]
        tokens = watched_tokens(lambda: slow and time.sleep(1.5), ids)
        loader = tl.TokenLoader(tokens, 8, 128, transform=None)
        slow.clear()
        np.testing.assert_array_equal(next(loader), loader.window_tokens(0))
        loader.set_state(loader.get_state())
        slow.append(True)
        print("waiting", flush=True)
        try:
            next(loader)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        slow.clear()
        for step in range(1, 20):
            np.testing.assert_array_equal(next(loader), loader.window_tokens(step))
        print(loader.step)
    """)
    assert (code, out, err) == (0, "interrupted\n20\n", "")


@pytest.mark.parametrize("transform", ["None", "lambda block: (block,)"])
def test_ctrl_c_at_any_moment_of_a_loop_loses_no_batch(transform):
    # Interrupted again and again, wherever the loop happens to be; with a transform also in jax, and
    # batches come in groups.
    code, out, err = run(
        """
        import random
        loader = tl.TokenLoader(tokens, 4, 64, transform=TRANSFORM, prefetch=3)
        done = threading.Event()

        def interrupt():
            rng = random.Random(0)
            while not done.wait(rng.random() * 0.01):
                os.kill(os.getpid(), signal.SIGINT)

        beginning = loader.get_state()
        next(loader)
        loader.set_state(beginning)
        threading.Thread(target=interrupt, daemon=True).start()
        rows, interrupts, deadline = [], 0, time.monotonic() + 1
        while not done.is_set():
            try:
                while time.monotonic() < deadline:
                    step = loader.step
                    rows.append((step, next(loader)))
                done.set()
                time.sleep(0.1)
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts > 10, interrupts
        # Each batch is that of the step at which the loader said it was.
        steps = [step for step, _ in rows]
        assert steps == sorted(steps)
        for step, batch in rows[:: len(rows) // 500 + 1] + rows[-1:]:
            block = batch if loader.transform is None else batch[0]
            np.testing.assert_array_equal(block, loader.window_tokens(step))
        # Falling between the return of next() and the append it costs this test a row, not the loader.
        assert len(rows) >= rows[-1][0] - interrupts
        print("same")
    """.replace("TRANSFORM", transform)
    )
    # jax complains on stderr of an interrupt in a callback of its own.
    assert (code, out) == (0, "same\n"), err


def test_a_thread_that_cannot_be_started_is_an_error_and_leaves_the_end_of_the_others_alone(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(100_000))
    code, out, err = run(f"""
        loaders = [tl.TokenLoader(tokens, 8, 64) for _ in range(3)]
        next(loaders[0])
        enough = threading.stack_size(1 << 47)  # more than there is for any thread
        for start in (
            lambda: next(loaders[1]),
            lambda: tl.open_tokens({str(path)!r}, dtype="uint16", residency="ram"),
        ):
            try:
                start()
            except RuntimeError as error:
                print(error)
        threading.stack_size(enough)
        for loader in loaders:
            print(next(loader).inputs.shape)
        loaders[1].close()
    """)
    assert (code, err) == (0, "")
    loader, ram, *shapes = out.splitlines()
    assert "can't start new thread" in loader
    assert "raise the limit on processes (ulimit -u" in loader
    assert ram.startswith(f'{path}: residency="ram" reads on background threads, and the system gives none')
    assert shapes == ["(8, 64)"] * 3
