"""The console as a process: its streams, its signals, and what is left of a file that is being written."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import run_cli

import tokenloader as tl

# Streams


def test_a_pipe_that_is_closed_is_quiet(folder):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "tokenloader", "info", "train.npy"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_into_a_pipe_that_is_closed_is_quiet(folder):
    read, write = os.pipe()
    os.close(read)
    done = run_cli("info", "--help", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["info", "none.npy"], ["--bogus"], [], ["info", "train.npy"]])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is full")
def test_a_full_disk_behind_the_screens_is_status_2(folder, arguments):
    with open("/dev/full", "w") as full:
        assert run_cli(*arguments, stdout=full, stderr=full).returncode == 2
        if arguments == ["info", "train.npy"]:
            done = run_cli(*arguments, stdout=full, stderr=subprocess.PIPE)
            assert done.stderr == "tokenloader: standard output: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_without_a_standard_stream_commands_do_their_work(folder, closed):
    for arguments, status in [
        (["convert", "--force", "train.npy", "o.npy"], 0),
        (["check", "--vocab-size", "9", "train.npy"], 1),
    ]:
        command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-m", "tokenloader", *arguments]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == status
    assert (folder / "o.npy").read_bytes() == (folder / "train.npy").read_bytes()


def test_tracebacks_are_shown_in_development_mode(folder):
    command = [sys.executable, "-X", "dev", "-m", "tokenloader", "info", "none.npy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.splitlines()[-1].startswith("tokenloader: none.npy: no such file")


@pytest.mark.parametrize("command", [["bench"], ["info", "--devices"]])
def test_a_platform_that_jax_does_not_know_is_told_in_one_line(folder, command):
    environment = {**os.environ, "JAX_PLATFORMS": "bogus"}
    done = run_cli(*command, "train.npy", env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tokenloader: JAX has no device, with JAX_PLATFORMS='bogus' (")
    assert done.stderr.endswith("such as cpu, or leave it out\n")
    assert done.stderr.count("\n") == 1


def test_what_a_terminal_cannot_show_is_escaped(folder):
    np.save("☃ ü.npy", np.arange(3000, dtype=np.uint16))
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = run_cli("info", "☃ ü.npy", env=environment, encoding="latin-1")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, r"file            \u2603 ü.npy")


# Signals


@pytest.fixture
def writing(folder):
    """Starts `tokenloader tokenize`, which waits for its text while it has a temporary file."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, "a")).save("tokenizer.json")
    os.mkfifo("text.txt")
    before = set(os.listdir())
    command = "tokenloader tokenize text.txt --tokenizer tokenizer.json --out out.safetensors"
    started = []

    def start(number=signal.SIGINT, handler="default_int_handler"):
        # A shell starts what runs in the background with SIGINT ignored, and that is inherited.
        code = f"""if True:
            import signal, sys
            signal.signal({int(number)}, signal.{handler})
            from tokenloader.cli.commands import main
            sys.argv = {command.split()!r}
            main()
        """
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        text = Path("text.txt").open("w")  # noqa: SIM115 # waits for its reader
        started.append((process, text))
        assert len(set(os.listdir()) - before) == 1
        return process, text

    yield start
    for process, text in started:
        process.kill()
        process.communicate()
        text.close()


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_ends_a_writer_at_once_and_leaves_nothing(writing, number, status):
    process, _ = writing()
    before = set(os.listdir())
    process.send_signal(getattr(signal, number))
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.strip()) == (status, "", "")
    (temporary,) = before - set(os.listdir())
    assert temporary.startswith(".tokenloader-")


def test_signals_that_come_together_end_a_writer_as_one_does(writing):
    process, _ = writing()
    before = set(os.listdir())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode in (129, 130, 143)  # of those that wait, the system delivers the lowest
    assert (out, err.strip()) == ("", "")
    assert len(before - set(os.listdir())) == 1


def test_a_signal_that_is_ignored_stays_so(writing):
    process, text = writing(signal.SIGHUP, "SIG_IGN")
    process.send_signal(signal.SIGHUP)
    text.write("a")
    text.close()
    assert process.wait(timeout=30) == 0
    assert tl.open_tokens("out.safetensors")[:].tolist() == [1, 0]


def test_of_two_writers_of_one_file_the_second_is_refused(run, writing):
    process, text = writing()
    status, _, err = run("convert", "train.npy", "out.safetensors")
    assert status == 2
    assert err.startswith("tokenloader: out.safetensors is being written by another process (into ")
    text.write("a")
    text.close()
    assert process.wait(timeout=30) == 0
    assert tl.open_tokens("out.safetensors")[:].tolist() == [1, 0]


def test_a_file_that_appears_while_it_is_written_stays(writing, folder):
    process, text = writing()
    (folder / "out.safetensors").write_bytes(b"precious")
    text.write("a")
    text.close()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "out.safetensors exists by now, and stays as it is" in err
    assert (folder / "out.safetensors").read_bytes() == b"precious"
    assert not any(name.startswith(".tokenloader") for name in os.listdir())
