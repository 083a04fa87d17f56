"""hf:// addresses, with the real huggingface_hub client against a server on the loopback."""

import re
import socket

import numpy as np
import pytest
from hub_server import (
    COMMITS,
    MAIN,
    PULL,
    REPOSITORY,
    V1,
    assert_fails,
    assert_tokens,
    found,
    open_in_process,
    serve,
    tokens_of,
)

from tokenloader import open_tokens
from tokenloader.storage.hub import is_hub_address, parse


@pytest.fixture(scope="module")
def hub():
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def opened(hub, tmp_path_factory):
    """Opens sources in a process of its own, with one cache for all calls in this module."""
    home = tmp_path_factory.mktemp("hf_home")

    def run(*sources, **more):
        return open_in_process(hub, home, *sources, **more)

    return run


@pytest.fixture(scope="module")
def online(opened):
    """The Hub is there, and nothing is in the cache."""
    return opened(
        f"{REPOSITORY}/train.safetensors",
        f"{REPOSITORY}@v1/train.safetensors",
        f"{REPOSITORY}@{PULL}/train.safetensors",
        f"{REPOSITORY}@refs%2Fpr%2F1/data/nested/part 0.safetensors",
        f"{REPOSITORY}/gone.safetensors",
        f"{REPOSITORY}@v9/train.safetensors",
        "hf://datasets/owner/other/train.safetensors",
        [f"{REPOSITORY}/a.safetensors", f"{REPOSITORY}/b.safetensors"],
    )


@pytest.fixture(scope="module")
def cached(online, opened):
    """The Hub is there, and the files of `online` are in the cache."""
    return opened(
        f"{REPOSITORY}/train.safetensors",
        f"{REPOSITORY}@v1/train.safetensors",
        f"{REPOSITORY}@{PULL}/train.safetensors",
        f"{REPOSITORY}@{MAIN}/train.safetensors",
    )


@pytest.fixture(scope="module")
def offline(online, opened):
    """HF_HUB_OFFLINE is set."""
    return opened(
        f"{REPOSITORY}/train.safetensors",
        f"{REPOSITORY}/new.safetensors",
        HF_HUB_OFFLINE="1",
    )


@pytest.fixture(scope="module")
def unreachable(online, opened):
    """Nobody listens where the Hub should be."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    return opened(
        f"{REPOSITORY}/train.safetensors",
        f"{REPOSITORY}@v1/train.safetensors",
        f"{REPOSITORY}/new.safetensors",
        endpoint=address,
    )


@pytest.fixture(scope="module")
def silent(online, opened):
    """Somebody listens, and does not answer."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        return opened(
            f"{REPOSITORY}/train.safetensors",
            f"{REPOSITORY}/new.safetensors",
            endpoint=f"http://127.0.0.1:{listening.getsockname()[1]}",
            patience="1",
        )


@pytest.fixture(scope="module")
def overloaded(online, hub, opened):
    """The Hub answers, and what it says is 503."""
    hub.overloaded = True
    try:
        return opened(f"{REPOSITORY}/train.safetensors", f"{REPOSITORY}/new.safetensors")
    finally:
        hub.overloaded = False


def test_a_file_of_the_default_revision_is_fetched_and_opened(online):
    outcome = online[f"{REPOSITORY}/train.safetensors"]
    assert_tokens(outcome, tokens_of(MAIN, "train.safetensors"))
    path = "/datasets/owner/name/resolve/main/train.safetensors"
    assert outcome["requests"].count(f"GET {path}") == 1
    assert set(outcome["requests"]) == {f"HEAD {path}", f"GET {path}"}


def test_a_revision_may_be_a_tag(online):
    outcome = online[f"{REPOSITORY}@v1/train.safetensors"]
    assert_tokens(outcome, tokens_of(V1, "train.safetensors"))


def test_a_revision_may_be_a_commit(online):
    outcome = online[f"{REPOSITORY}@{PULL}/train.safetensors"]
    assert_tokens(outcome, tokens_of(PULL, "train.safetensors"))


def test_a_revision_may_have_slashes_and_a_file_may_lie_deep(online):
    outcome = online[f"{REPOSITORY}@refs%2Fpr%2F1/data/nested/part 0.safetensors"]
    assert_tokens(outcome, tokens_of(PULL, "data/nested/part 0.safetensors"))


def test_several_addresses_make_one_axis(online):
    outcome = online[[f"{REPOSITORY}/a.safetensors", f"{REPOSITORY}/b.safetensors"]]
    assert_tokens(outcome, tokens_of(MAIN, "a.safetensors"), tokens_of(MAIN, "b.safetensors"))


@pytest.mark.parametrize("file", ["train.safetensors", "@v1/train.safetensors"])
def test_a_cached_file_costs_one_small_request(cached, file):
    revision = "v1" if "v1" in file else "main"
    outcome = cached[REPOSITORY + (file if file[0] == "@" else f"/{file}")]
    assert_tokens(outcome, tokens_of(COMMITS[revision], "train.safetensors"))
    assert outcome["requests"] == [f"HEAD /datasets/owner/name/resolve/{revision}/train.safetensors"]


@pytest.mark.parametrize("commit", [MAIN, PULL])
def test_a_cached_file_of_a_commit_costs_no_request(cached, commit):
    outcome = cached[f"{REPOSITORY}@{commit}/train.safetensors"]
    assert_tokens(outcome, tokens_of(commit, "train.safetensors"))
    assert outcome["requests"] == []


def test_a_cached_file_opens_offline_without_a_request(offline):
    outcome = offline[f"{REPOSITORY}/train.safetensors"]
    assert_tokens(outcome, tokens_of(MAIN, "train.safetensors"))
    assert outcome["requests"] == []


def test_a_file_that_is_not_cached_fails_offline_at_once_with_the_remedy(offline):
    address = f"{REPOSITORY}/new.safetensors"
    assert_fails(
        offline[address],
        "ConnectionError",
        address,
        "HF_HUB_OFFLINE is set and the file is not in the local cache; unset it",
        'hf download --repo-type dataset owner/name new.safetensors"',
    )
    assert offline[address]["requests"] == []
    assert offline[address]["seconds"] < 3


@pytest.mark.parametrize("revision", ["main", "v1"])
def test_a_cached_file_opens_while_the_hub_is_unreachable(unreachable, revision):
    at = "" if revision == "main" else f"@{revision}"
    outcome = unreachable[f"{REPOSITORY}{at}/train.safetensors"]
    assert_tokens(outcome, tokens_of(COMMITS[revision], "train.safetensors"))
    assert outcome["seconds"] < 10


def test_a_file_that_is_not_cached_fails_within_seconds_while_the_hub_is_unreachable(unreachable):
    address = f"{REPOSITORY}/new.safetensors"
    assert_fails(
        unreachable[address],
        "ConnectionError",
        f"{address}: the Hub at http://127.0.0.1:",
        "Connection refused",
        "not in the local cache",
        "HF_ENDPOINT",
        "hf download --repo-type dataset owner/name new.safetensors",
        "pass the path",
    )
    assert unreachable[address]["seconds"] < 10  # the client itself takes 23


def test_a_hub_that_does_not_answer_is_waited_for_no_longer_than_said(silent):
    outcome = silent[f"{REPOSITORY}/train.safetensors"]
    assert_tokens(outcome, tokens_of(MAIN, "train.safetensors"))
    assert outcome["seconds"] < 4
    address = f"{REPOSITORY}/new.safetensors"
    assert_fails(silent[address], "ConnectionError", address, "cannot be reached", "timed out")
    assert 0.9 < silent[address]["seconds"] < 4


def test_a_cached_file_opens_while_the_hub_is_overloaded(overloaded):
    outcome = overloaded[f"{REPOSITORY}/train.safetensors"]
    assert_tokens(outcome, tokens_of(MAIN, "train.safetensors"))
    assert outcome["seconds"] < 10


def test_a_hub_that_is_overloaded_is_not_said_to_lack_the_file(overloaded):
    address = f"{REPOSITORY}/new.safetensors"
    assert_fails(overloaded[address], "ConnectionError", address, "cannot serve it now (HTTP 503")
    assert overloaded[address]["seconds"] < 5


def test_a_file_the_hub_does_not_have_is_an_error_with_its_address(online):
    address = f"{REPOSITORY}/gone.safetensors"
    assert_fails(
        online[address],
        "FileNotFoundError",
        f"{address}: the dataset has no file 'gone.safetensors' at revision main (HTTP 404 from http://",
        "/datasets/owner/name/tree/main lists its files",
    )
    assert len(online[address]["requests"]) == 1


def test_a_dataset_the_hub_does_not_have_is_an_error_with_its_address(online):
    address = "hf://datasets/owner/other/train.safetensors"
    assert_fails(
        online[address],
        "FileNotFoundError",
        f"{address}: the Hub has no dataset owner/other, or it is private (HTTP 401",
        "hf auth login",
    )


def test_a_revision_the_hub_does_not_have_is_an_error_with_its_address(online):
    address = f"{REPOSITORY}@v9/train.safetensors"
    assert_fails(online[address], "FileNotFoundError", f"{address}: the dataset has no revision 'v9'")


def test_a_file_that_is_gone_is_not_taken_from_the_cache(hub, opened, cached):
    hub.answers["b.safetensors"] = lambda *_: (404, {"X-Error-Code": "EntryNotFound"}, b"")
    hub.answers["a.safetensors"] = lambda *_: (403, {}, b"")
    try:
        outcome = opened(f"{REPOSITORY}/a.safetensors", f"{REPOSITORY}/b.safetensors")
    finally:
        hub.answers.clear()
    assert_tokens(outcome[f"{REPOSITORY}/a.safetensors"], tokens_of(MAIN, "a.safetensors"))
    assert_fails(outcome[f"{REPOSITORY}/b.safetensors"], "FileNotFoundError", "no file 'b.safetensors'")


def test_a_revision_that_moved_is_fetched_anew(hub, opened, cached):
    hub.answers["train.safetensors"] = lambda *_: found(V1, "train.safetensors")
    try:
        outcome = opened(f"{REPOSITORY}/train.safetensors")
    finally:
        hub.answers.clear()
    assert_tokens(outcome[f"{REPOSITORY}/train.safetensors"], tokens_of(V1, "train.safetensors"))


# Addresses


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("o/n/f.bin", ("o/n", None, "f.bin")),
        ("o/n/a/b/f.bin", ("o/n", None, "a/b/f.bin")),
        ("o/n@v1/f.bin", ("o/n", "v1", "f.bin")),
        ("o/n@v1.0-rc/a/f.bin", ("o/n", "v1.0-rc", "a/f.bin")),
        (f"o/n@{MAIN}/f.bin", ("o/n", MAIN, "f.bin")),
        ("o/n@refs%2Fpr%2F1/f.bin", ("o/n", "refs/pr/1", "f.bin")),
        ("o/n/f@v1.bin", ("o/n", None, "f@v1.bin")),
        ("o/n@v1/data@v2/f.bin", ("o/n", "v1", "data@v2/f.bin")),
        ("o/n/..f/f..bin", ("o/n", None, "..f/f..bin")),
        (
            "gpjt/fineweb-gpt2-tokens/train.safetensors",
            ("gpjt/fineweb-gpt2-tokens", None, "train.safetensors"),
        ),
    ],
)
def test_an_address_is_a_repository_a_revision_and_a_file(address, parsed):
    for scheme in ("hf", "HF", "Hf"):
        assert parse(f"{scheme}://datasets/{address}") == parsed


@pytest.mark.parametrize(
    "address",
    [
        "hf://",
        "HF://",
        "HF://datasets/o/n",
        "hf://datasets/o/n/../f",
        "hf://datasets",
        "hf://datasets/",
        "hf://datasets/o",
        "hf://datasets/o/n",
        "hf://datasets/o/n/",
        "hf://datasets/o/n@v1",
        "hf://datasets/o/n/a//b",
        "hf://datasets/o/n/a/",
        "hf://datasets//n/f",
        "hf://datasets/o//f",
        "hf:///o/n/f",
        "hf://models/o/n/f",
        "hf://o/n/f",
        "hf://owner/name/data/f",
        "hf://Datasets/o/n/f",
    ],
)
def test_an_address_of_another_form_is_refused_with_the_form_expected(address):
    message = f"^{re.escape(repr(address))}: expected " + re.escape(
        "hf://datasets/OWNER/NAME[@REVISION]/FILE, for example hf://datasets/"
    )
    for opening in (parse, open_tokens):
        with pytest.raises(ValueError, match=message):
            opening(address)


def test_a_name_that_the_hub_does_not_allow_is_an_error_with_the_address():
    with pytest.raises(ValueError, match=r"^hf://datasets/o/n--m/f\.bin: .*n--m"):
        open_tokens("hf://datasets/o/n--m/f.bin")


@pytest.mark.parametrize("address", ["hf://datasets/o/n@/f", "hf://datasets/o/@v1/f"])
def test_an_empty_name_or_revision_is_refused(address):
    message = f"^{re.escape(repr(address))}: the name or the revision around '@' is empty"
    with pytest.raises(ValueError, match=message):
        open_tokens(address)


def test_only_what_begins_with_the_scheme_is_an_address(tmp_path, monkeypatch):
    for scheme in ("hf", "HF", "Hf"):
        assert is_hub_address(f"{scheme}://datasets/o/n/f")
    for path in ("hf", "hf:", "./hf://datasets/o/n/f", "/hf://x", "train.bin", "datasets/o/n/f"):
        assert not is_hub_address(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:").mkdir()
    np.save(tmp_path / "hf:" / "t.npy", np.arange(3, dtype=np.uint16))
    assert open_tokens("hf:/t.npy")[:].tolist() == [0, 1, 2]
