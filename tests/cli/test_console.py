"""The console: statuses, errors of one line, help, pipes, and what a process imports."""

import os
import re
import subprocess
import sys

import click
import numpy as np
import pytest
from helpers import run_cli, run_python
from safetensors.numpy import save_file

import tokenloader as tl
from tokenloader.cli.commands import commands
from tokenloader.cli.console import run_and_exit

COMMANDS = sorted(commands.commands)


@pytest.fixture
def failed(monkeypatch, capsys):
    """Status, output and error of a command that raises an error."""

    def call(error):
        @click.command()
        def command():
            raise error

        monkeypatch.setattr(sys, "argv", ["tokenloader"])
        with pytest.raises(SystemExit) as ended:
            run_and_exit(command)
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


class Panic(BaseException):
    """What a library of Rust raises is no Exception either."""


# errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "none.npy"], "none.npy: no such file"),
        # Around "…" are click's words, which change with its releases.
        (["info"], "SOURCE…; see tokenloader info --help"),
        (["info", "--bogus", "a"], "--bogus…; see tokenloader info --help"),
        (["bogus"], "bogus…; see tokenloader --help"),
        (["info", "--batch-size", "0", "train.npy"], "--batch-size…0…; see tokenloader info --help"),
        (["info", "--dtype", "int7", "train.npy"], "int7…uint8…uint16…; see tokenloader info --help"),
        (["check", "train.bin"], "train.bin: is of no known format. If it is headerless (nothing but "),
        (["check", "train.bin"], "pass --dtype, as in --dtype uint16. It has "),
        (["convert", "train.bin", "o.npy"], "pass --source-dtype, as in --source-dtype uint16. It has "),
        (["convert", "train.npy", "none/out.npy"], "its directory "),
        (["info", "--key", "other", "train.safetensors"], " --key"),
        (["info", "--dtype", "uint32", "train.npy"], ": --dtype uint32 was given"),
        (["check", "train.npy", "--against", "train.npy", "--dtype", "uint8"], ": --dtype uint8 was"),
        (["convert", "--source-dtype", "uint8", "train.npy", "o.npy"], "--source-dtype uint8 was given"),
        (["info", "--dtype", "uint16", "odd.bin"], "is --dtype wrong?"),
    ],
)  # fmt: skip
def test_errors_are_one_line_of_the_commands_own_options_and_status_2(run, arguments, message):
    with open("odd.bin", "wb") as file:
        file.write(b"odd")
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("tokenloader: ")
    assert re.search(".*".join(map(re.escape, message.split("…"))), err)
    assert err.count("\n") == 1
    assert "key=" not in err
    assert "dtype=" not in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (TypeError("a type"), "a type"),
        (MemoryError("no memory"), "no memory"),
        (ImportError("no module"), "no module"),
        (OSError(28, "No space left on device", "a.npy"), "a.npy: No space left on device"),
        (ConnectionError("no Hub"), "no Hub"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (RecursionError("too deep"), "too deep"),
        (EOFError("the end"), "EOFError: the end"),
        (KeyError("a key"), "KeyError: 'a key'"),
        (Panic("as from Rust"), "Panic: as from Rust"),
        (ValueError("\x1b[2J\u202e"), r"\x1b[2J\u202e"),
        (OSError(5, "failed", "\x07.npy"), r"\x07.npy: failed"),
        (ValueError("a" * 10**6), "a" * 2498 + "..." + "a" * 2498),
    ],
)
def test_errors_of_the_library_are_told_without_a_traceback(failed, error, message):
    assert failed(error) == (2, "", f"tokenloader: {message}\n")


def test_a_directory_that_is_called_like_an_argument_keeps_its_name(run, folder):
    for name in ("key=1", "dtype=u16"):
        (folder / name).mkdir()
        (folder / name / "odd.bin").write_bytes(b"odd")
        _, _, err = run("info", "--dtype", "uint16", f"{name}/odd.bin")
        assert err.startswith(f"tokenloader: {name}/odd.bin: 3 bytes is not a whole number")
        assert "--dtype" in err


def test_calls_that_errors_of_the_library_show_are_told_as_arguments(run, folder):
    (folder / "raw").mkdir()
    for name in ("it's, a.bin", "b.bin", "val.bin"):
        (folder / "raw" / name).write_bytes(b"odd!")
    _, _, err = run("info", "raw", "--dtype", "uint16")
    files = """'raw/b.bin' "raw/it's, a.bin" --dtype uint16 or 'raw/val.bin' --dtype uint16"""
    assert err.endswith(f"; open those that belong together: {files}\n")
    (folder / "open_tokens()").mkdir()
    _, _, err = run("info", "open_tokens()")
    assert err.startswith("tokenloader: open_tokens(): no file in this directory")
    assert err.endswith(" Name the files with a pattern: 'open_tokens()/*'\n")


def test_a_command_that_reads_a_missing_file_is_told_its_name(run):
    status, _, err = run("replay", "none.json", "train.npy", "--step", 0)
    assert (status, err) == (2, "tokenloader: none.json: No such file or directory\n")


def test_ctrl_c_is_quiet(failed):
    status, out, err = failed(KeyboardInterrupt())
    assert (status, out, err.strip()) == (130, "", "")


# control characters

CLEAR = "\x1b[2J\x1b]52;c;cm0gLXJm\x07\x9b31m\u202e\r"


def is_harmless(text):
    return all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize("command", ["info", "check", "convert"])
def test_names_do_nothing_to_the_terminal(run, folder, command):
    data = np.arange(5000, dtype=np.uint16)
    save_file({f"a{CLEAR}\nforged  1": data, "tokens": data}, folder / f"{CLEAR}\n.safetensors")
    save_file({f"a{CLEAR}": data}, folder / f"{CLEAR}.safetensors")
    target = [f"o{CLEAR}\n.npy"] if command == "convert" else []
    for name, key in [(f"{CLEAR}\n", "tokens"), (CLEAR, "tokens"), (CLEAR, CLEAR), ("none" + CLEAR, "a")]:
        _, out, err = run(command, "--key", key, f"{name}.safetensors", *target)
        assert is_harmless(out + err)
        assert r"\x1b[2J" in out + err or command == "check"
        assert not any(line.startswith("forged") for line in out.splitlines())
        if command == "info":
            assert is_harmless(run(command, "--json", "--key", key, f"{name}.safetensors")[1])


# The process


def test_info_and_convert_and_check_do_not_load_jax(folder):
    for command in (
        ["info", "train.npy"],
        ["check", "train.npy"],
        ["convert", "train.npy", "o.npy"],
    ):
        code = f"""if True:
            import sys
            sys.argv = {["tokenloader", *command]!r}
            from tokenloader.cli.commands import main
            try:
                main()
            except SystemExit as ended:
                assert not ended.code, ended.code
            print(sorted({{"jax", "jaxlib", "huggingface_hub"}} & sys.modules.keys()))
        """
        assert run_python(code).endswith("\n[]\n"), command


def test_python_m_is_the_same(folder):
    done = run_cli("info", "train.npy")
    assert (done.returncode, done.stderr) == (0, "")
    assert "NumPy .npy" in done.stdout
    assert run_cli("bogus").returncode == 2
    version = run_cli("--version")
    assert version.stdout == f"tokenloader {tl.__version__}\n"


def test_without_a_command_the_help_is_shown(run):
    status, out, err = run()
    assert (status, out) == (2, "")
    assert "Commands:" in err


def test_output_in_a_pipe_has_no_control_codes_and_80_columns(folder):
    for arguments in (["info", "train.npy"], ["check", "train.npy"], ["--help"]):
        done = run_cli(*arguments)
        assert "\x1b" not in done.stdout + done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_80_columns(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0
    assert "Examples:\n" in out
    assert f"tokenloader {command} " in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_says_all_of_each_summary(run, command):
    summary = commands.commands[command].get_short_help_str(200)
    _, out, _ = run("--help")
    assert f"{summary.rstrip('.')}." in " ".join(out.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_given_completion(folder, shell):
    try:
        done = subprocess.run(
            [os.path.join(os.path.dirname(sys.executable), "tokenloader")],
            env={**os.environ, "_TOKENLOADER_COMPLETE": f"{shell}_source"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("the command is not installed beside this Python")
    assert done.returncode == 0
    assert "_TOKENLOADER_COMPLETE" in done.stdout


def test_click_errors_of_other_kinds_are_one_line_too(failed):
    status, _, err = failed(click.FileError("a.npy", "it is so"))
    assert status == 2
    assert err.count("\n") == 1
