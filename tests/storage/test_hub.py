"""hf:// addresses, with the real huggingface_hub client against a server on the loopback.

The client reads HF_ENDPOINT when it is imported, so it runs in processes of its own: one for each
state of the network, which opens several addresses and says what became of each.
"""

import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from urllib.parse import unquote

import numpy as np
import pytest
from safetensors.numpy import save

from tokenloader import open_tokens
from tokenloader.storage.hub import is_hub_address, parse

MAIN, V1, PULL = "a" * 40, "b" * 40, "c" * 40  # commits
COMMITS = {"main": MAIN, "v1": V1, "refs/pr/1": PULL, MAIN: MAIN, V1: V1, PULL: PULL}
REPOSITORY = "hf://datasets/owner/name"

# Opens each source of sys.argv, telling the server beforehand which one it is at.
WORKER = """
import json, sys, time, urllib.request
from tokenloader import open_tokens
from tokenloader.storage.hub import download
mark, patience, *sources = sys.argv[1:]
for source in map(json.loads, sources):
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(mark).close()
    began = time.monotonic()
    try:
        if patience:
            source = download(source, unreachable_after_seconds=float(patience))
        with open_tokens(source) as tokens:
            result = {"tokens": tokens[:].tolist()}
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        result = {"kinds": kinds, "message": str(error)}
    result["seconds"] = time.monotonic() - began
    print(json.dumps(result), flush=True)
"""


def tokens_of(commit, file):
    """What the server has there: other tokens for every commit and file."""
    digest = hashlib.sha256(f"{commit}/{file}".encode()).digest()
    return np.frombuffer(digest, np.uint16)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        if self.path == "/mark":
            self.server.requests.append([])
            self.reply(200, {}, b"")
            return
        self.server.requests[-1].append(f"{self.command} {unquote(self.path)}")
        _, datasets, owner, name, resolve, revision, file = self.path.split("/", 6)
        assert (datasets, owner, resolve) == ("datasets", "owner", "resolve")
        revision, file = unquote(revision), unquote(file)
        if self.server.overloaded:
            self.reply(503, {}, b"")
        elif name != "name":
            self.reply(401, {"X-Error-Code": "RepoNotFound"}, b"")
        elif revision not in COMMITS:
            self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        elif "gone" in file:
            self.reply(404, {"X-Error-Code": "EntryNotFound"}, b"")
        else:
            data = save({"tokens": tokens_of(COMMITS[revision], file)})
            etag = hashlib.sha256(data).hexdigest()
            self.reply(200, {"X-Repo-Commit": COMMITS[revision], "ETag": f'"{etag}"'}, data)

    def reply(self, status, headers, data):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


class Outcome(dict):
    """What became of each source: a dict with tokens, or kinds and message; seconds; requests."""

    def __getitem__(self, source):
        return super().__getitem__(json.dumps(source))


@pytest.fixture(scope="module")
def hub():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.requests = []
        server.overloaded = False
        server.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def opened(hub, tmp_path_factory):
    """Opens sources in a process of its own, with one cache for all calls in this module."""
    home = tmp_path_factory.mktemp("hf_home")

    def run(*sources, endpoint=hub.address, patience="", **variables):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING")) and not name.lower().endswith("_proxy")
        }
        environment |= {
            "HF_HOME": str(home),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "*",
            **variables,
        }
        hub.requests.clear()
        texts = [json.dumps(source) for source in sources]
        process = subprocess.run(
            [sys.executable, "-W", "error", "-c", WORKER, f"{hub.address}/mark", patience, *texts],
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        results = [json.loads(line) for line in process.stdout.splitlines()]
        for result, requests in zip(results, hub.requests, strict=True):
            result["requests"] = requests
        return Outcome(zip(texts, results, strict=True))

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


def assert_tokens(outcome, *tokens):
    assert "message" not in outcome, outcome["message"]
    np.testing.assert_array_equal(outcome["tokens"], np.concatenate(tokens))


def assert_fails(outcome, kind, *named):
    assert "message" in outcome, outcome
    assert outcome["kinds"][0] == kind, outcome
    for part in named:
        assert part in outcome["message"]


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
        "OfflineModeIsEnabled",
        "HF_HUB_OFFLINE",
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
        f"{address}: the Hub cannot be reached (ConnectError: ",
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
    assert_fails(silent[address], "ConnectionError", address, "ReadTimeout")
    assert 0.9 < silent[address]["seconds"] < 4


def test_a_cached_file_opens_while_the_hub_is_overloaded(overloaded):
    outcome = overloaded[f"{REPOSITORY}/train.safetensors"]
    assert_tokens(outcome, tokens_of(MAIN, "train.safetensors"))
    assert outcome["seconds"] < 10


def test_a_hub_that_is_overloaded_is_not_said_to_lack_the_file(overloaded):
    address = f"{REPOSITORY}/new.safetensors"
    outcome = overloaded[address]
    assert "message" in outcome
    assert "OSError" in outcome["kinds"]
    assert "FileNotFoundError" not in outcome["kinds"]
    assert address in outcome["message"]
    assert "503" in outcome["message"]
    assert outcome["seconds"] < 10


def test_a_file_the_hub_does_not_have_is_an_error_with_its_address(online):
    address = f"{REPOSITORY}/gone.safetensors"
    outcome = online[address]
    assert_fails(outcome, "FileNotFoundError", f"{address}: the Hub has no such dataset or file")
    assert "Entry Not Found for url" in outcome["message"]
    assert all(request.startswith("HEAD") for request in outcome["requests"])


def test_a_dataset_the_hub_does_not_have_is_an_error_with_its_address(online):
    address = "hf://datasets/owner/other/train.safetensors"
    assert_fails(online[address], "FileNotFoundError", address, "private", "hf auth login")


def test_a_revision_the_hub_does_not_have_is_an_error_with_its_address(online):
    address = f"{REPOSITORY}@v9/train.safetensors"
    assert_fails(online[address], "FileNotFoundError", address, "Revision Not Found")


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
        (
            "gpjt/fineweb-gpt2-tokens/train.safetensors",
            ("gpjt/fineweb-gpt2-tokens", None, "train.safetensors"),
        ),
    ],
)
def test_an_address_is_a_repository_a_revision_and_a_file(address, parsed):
    assert parse(f"hf://datasets/{address}") == parsed


@pytest.mark.parametrize(
    "address",
    [
        "hf://",
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


@pytest.mark.parametrize("address", ["hf://datasets/o/n@/f", "hf://datasets/o/@v1/f"])
def test_an_empty_name_or_revision_is_refused(address):
    message = f"^{re.escape(repr(address))}: the name or the revision around '@' is empty"
    with pytest.raises(ValueError, match=message):
        open_tokens(address)


def test_only_what_begins_with_the_scheme_is_an_address(tmp_path, monkeypatch):
    assert is_hub_address("hf://datasets/o/n/f")
    for path in ("hf", "hf:", "./hf://datasets/o/n/f", "/hf://x", "train.bin", "datasets/o/n/f"):
        assert not is_hub_address(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:").mkdir()
    np.save(tmp_path / "hf:" / "t.npy", np.arange(3, dtype=np.uint16))
    assert open_tokens("hf:/t.npy")[:].tolist() == [0, 1, 2]
