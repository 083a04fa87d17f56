"""A Hub on the loopback, and processes that open its files with the real huggingface_hub client.

The client reads HF_ENDPOINT when it is imported, so it runs in processes of its own: one for each
state of the network, which opens several addresses and says what became of each.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from urllib.parse import unquote

import numpy as np
from safetensors.numpy import save

MAIN, V1, PULL = "a" * 40, "b" * 40, "c" * 40  # commits
COMMITS = {"main": MAIN, "v1": V1, "refs/pr/1": PULL, MAIN: MAIN, V1: V1, PULL: PULL}
REPOSITORY = "hf://datasets/owner/name"

# Opens each source of sys.argv, telling the server beforehand which one it is at.
WORKER = """
import json, sys, time, traceback, urllib.request
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
        result = {"kinds": kinds, "message": str(error), "traceback": traceback.format_exc()}
    result["seconds"] = time.monotonic() - began
    print(json.dumps(result), flush=True)
"""


def tokens_of(commit, file):
    """What the server has there: other tokens for every commit and file."""
    digest = hashlib.sha256(f"{commit}/{file}".encode()).digest()
    return np.frombuffer(digest, np.uint16)


def found(commit, file):
    """A whole answer with a file: status, headers, body."""
    data = save({"tokens": tokens_of(commit, file)})
    etag = hashlib.sha256(data).hexdigest()
    return 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, data


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
        request = f"{self.command} {unquote(self.path)}"
        self.server.requests[-1].append(request)
        self.server.logins.append((self.headers["Host"], self.headers["Authorization"]))
        _, datasets, owner, name, resolve, revision, file = self.path.partition("?")[0].split("/", 6)
        assert (datasets, owner, resolve) == ("datasets", "owner", "resolve")
        revision, file = unquote(revision), unquote(file)
        if file in self.server.answers:
            count = self.server.requests[-1].count(request)
            self.reply(*self.server.answers[file](self.command, count))
        elif self.server.overloaded:
            self.reply(503, {}, b"")
        elif name != "name":
            self.reply(401, {"X-Error-Code": "RepoNotFound"}, b"")
        elif revision not in COMMITS:
            self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        elif "gone" in file:
            self.reply(404, {"X-Error-Code": "EntryNotFound"}, b"")
        else:
            self.reply(*found(COMMITS[revision], file))

    def reply(self, status, headers, data):
        headers = {"Content-Length": str(len(data))} | headers
        if status:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
        if self.command == "GET" or not status:
            self.wfile.write(data)
        # What is not a whole answer, nothing can follow.
        self.close_connection = not status or headers["Content-Length"] != str(len(data))

    def log_message(self, *_):
        pass


class Outcome(dict):
    """What became of each source: a dict with tokens, or kinds, message, traceback; seconds; requests."""

    printed = ""  # the process's own output, its log lines among it

    def __getitem__(self, source):
        return super().__getitem__(json.dumps(source))


@contextmanager
def serve():
    """Serves REPOSITORY; `answers` of the server, by file, may say otherwise: (method, count) -> reply."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.requests, server.logins, server.answers = [], [], {}
        server.overloaded = False
        server.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def variables(endpoint, home):
    """The environment of a process that has the Hub there, and its cache in that folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING")) and not name.lower().endswith("_proxy")
    }
    return kept | {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
    }


def open_in_process(server, home, *sources, endpoint=None, patience="", **more):
    """Opens sources one after the other in a process of its own; returns an Outcome."""
    server.requests.clear()
    server.logins.clear()
    texts = [json.dumps(source) for source in sources]
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", WORKER, f"{server.address}/mark", patience, *texts],
        env=variables(endpoint or server.address, home) | more,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    results = [json.loads(line) for line in process.stdout.splitlines()]
    for result, requests in zip(results, server.requests, strict=True):
        result["requests"] = requests
    outcome = Outcome(zip(texts, results, strict=True))
    outcome.printed = process.stdout + process.stderr
    return outcome


def assert_tokens(outcome, *tokens):
    assert "message" not in outcome, outcome["message"]
    np.testing.assert_array_equal(outcome["tokens"], np.concatenate(tokens))


def assert_fails(outcome, kind, *named):
    assert "message" in outcome, outcome
    assert outcome["kinds"][0] == kind, outcome
    for part in named:
        assert part in outcome["message"], outcome["message"]
