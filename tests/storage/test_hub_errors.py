"""What is said of each answer a Hub can give, with the real client against a server on the loopback."""

import errno
import logging
import socket
import threading

import pytest
from helpers import run_cli
from hub_server import (
    MAIN,
    REPOSITORY,
    assert_fails,
    assert_tokens,
    found,
    open_in_process,
    serve,
    tokens_of,
    variables,
)

from tokenloader.storage.hub import _logs_without_secrets
from tokenloader.storage.hub_errors import HubFile, broken_off, seconds_to_wait, without_secrets

SECRET = "user:pa%40ss"  # whose password is pa@ss
SIGNATURE = "X-Amz-Signature=5f3a"
PAGE = "/datasets/owner/name"
WHOLE, SHORT = found(MAIN, "whole"), found(MAIN, "short")


def always(status, headers=None, body=b""):
    return lambda method, count: (status, headers or {}, body)


def first(status, headers):
    """The first answer to HEAD is another one, and the rest are the file."""
    return lambda method, count: (status, headers, b"") if (method, count) == ("HEAD", 1) else WHOLE


def get(status, headers=None, body=b""):
    """HEAD finds the file, GET does not."""
    return lambda method, count: (status, headers or {}, body) if method == "GET" else WHOLE


def code(status, name, said=""):
    return always(status, {"X-Error-Code": name, "X-Error-Message": said})


# name of the file: (answers, type of the error, what its message has)
REFUSALS = {
    "401": (always(401), "PermissionError", "does not accept the token, or wants one (HTTP 401 from "),
    "401-token": (
        always(401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
        "PermissionError",
        "HTTP 401, 'Invalid credentials in Authorization header' from ",
        'log in ("hf auth login", or set HF_TOKEN)',
    ),
    "401-repo": (code(401, "RepoNotFound"), "FileNotFoundError", "no dataset owner/name, or it is private"),
    "401-gated": (code(401, "GatedRepo"), "PermissionError", "gated (HTTP 401", f"its terms at {{}}{PAGE}"),
    "403": (
        always(403, {"X-Error-Message": "not in the list"}),
        "PermissionError",
        "access is denied (HTTP 403, 'not in the list' from ",
        f'log in ("hf auth login", or set HF_TOKEN) with a token that may read {{}}{PAGE}',
    ),
    "403-gated": (code(403, "GatedRepo"), "PermissionError", "the dataset is gated", "hf auth login"),
    "404": (always(404), "FileNotFoundError", "no dataset owner/name, or it is private (HTTP 404"),
    "404-repo": (code(404, "RepoNotFound"), "FileNotFoundError", f"check the name at {{}}{PAGE}"),
    "404-revision": (code(404, "RevisionNotFound"), "FileNotFoundError", "has no revision 'main'", PAGE),
    "404-file": (
        code(404, "EntryNotFound"),
        "FileNotFoundError",
        "no file '404-file'",
        f"{PAGE}/tree/main",
    ),
    "400": (always(400), "OSError", "not expected (HTTP 400 from {})", "check HF_ENDPOINT and proxies"),
    "416": (always(416), "OSError", "not expected (HTTP 416"),
    "418": (always(418), "OSError", "not expected (HTTP 418"),
    "451": (always(451, {"X-Error-Message": "taken down"}), "OSError", "HTTP 451, 'taken down'"),
    "408": (always(408), "ConnectionError", "cannot serve it now (HTTP 408", "try again later"),
    "429": (
        always(429),
        "ConnectionError",
        "the Hub limits the rate of requests (HTTP 429 from ",
        "; try again later, or log in",
    ),
    "429-hour": (always(429, {"Retry-After": "3600"}), "ConnectionError", "try again in 3600 s, or log in"),
    "429-window": (
        always(429, {"RateLimit": '"resolvers";r=0;t=55', "RateLimit-Policy": '"fixed";q=9;w=300'}),
        "ConnectionError",
        "try again in 55 s",
    ),
    "500": (always(500), "ConnectionError", "cannot serve it now (HTTP 500 from {}); try again later"),
    "503-minute": (always(503, {"Retry-After": "60"}), "ConnectionError", "(HTTP 503", "again in 60 s"),
    "504": (always(504), "ConnectionError", "HTTP 504"),
    "screen": (always(403, {"X-Error-Message": "\x1b[2J" + "a" * 9999}), "PermissionError", r"'\x1b[2Jaaa"),
    "circle": (
        always(302, {"Location": f"{PAGE}/resolve/main/circle"}),
        "ConnectionError",
        f"10 redirects, the last one to {PAGE}/resolve/main/circle",
    ),
    "garbage": (always(0, body=b"SSH-2.0\r\n\r\n"), "ConnectionError", "cannot be reached ("),
    "silence": (always(0), "ConnectionError", "cannot be reached ("),
    "portal": (always(200, {}, b"<html>"), "OSError", "at {} is not a Hub", "whether the network wants"),
    "no-etag": (always(200, {"X-Repo-Commit": MAIN}), "OSError", "is not a Hub", "no ETag"),
    "get-401": (get(401), "PermissionError", "does not accept the token"),
    "get-403": (get(403, body=b'{"error": "expired"}'), "PermissionError", "(HTTP 403, 'expired' from"),
    "get-404": (get(404), "FileNotFoundError", "HTTP 404"),
    "get-416": (get(416), "OSError", "HTTP 416"),
    "get-500": (get(500), "ConnectionError", "HTTP 500"),
    "short": (
        lambda method, _: (*SHORT[:2], SHORT[2] if method == "HEAD" else SHORT[2][:-5]),
        "ConnectionError",
        "broke off (OSError: ",
        "); try again",
    ),
    "signed": (
        always(302, {"X-Repo-Commit": MAIN, "ETag": '"e"', "X-Linked-Size": "5", "Location": "OTHER"}),
        "PermissionError",
        "HTTP 403",
    ),
}
# What is well after a second.
PATIENCE = {
    "again-429": first(429, {"Retry-After": "1"}),
    "again-503": first(503, {"Retry-After": "1"}),
    "at-once": first(429, {"Retry-After": "0"}),
    "renamed": first(307, {"Location": f"{PAGE}/resolve/main/renamed"}),
}


@pytest.fixture(scope="module")
def hub():
    with serve() as server:
        # As on the Hub, the bytes lie elsewhere: the same server by another name.
        other = server.address.replace("127.0.0.1", "localhost") + f"{PAGE}/resolve/main/bytes?{SIGNATURE}"
        for name, (answers, *_) in REFUSALS.items():
            server.answers[name] = answers
        status, headers, _ = REFUSALS["signed"][0]("HEAD", 1)
        server.answers["signed"] = always(status, headers | {"Location": other})
        server.answers["bytes"] = always(403, {}, f"<Error>{other}</Error>".encode())
        cut = {"Content-Length": "5", "ETag": '"cut"', "X-Repo-Commit": MAIN}
        there = {"X-Linked-Size": "5", "Location": other.replace("bytes", "half")}
        server.answers["cut"] = always(302, cut | there | {"Content-Length": "0"})
        server.answers["half"] = always(200, cut, b"123")
        server.answers |= PATIENCE
        yield server


@pytest.fixture(scope="module")
def outcome(hub, tmp_path_factory):
    """What became of each file, and how long it took."""
    return open_in_process(
        hub,
        tmp_path_factory.mktemp("hf_home"),
        *(f"{REPOSITORY}/{name}" for name in [*REFUSALS, *PATIENCE]),
        HF_TOKEN="hf_secret",
    )


@pytest.mark.parametrize("name", REFUSALS)
def test_an_answer_is_told_as_it_is_within_seconds(hub, outcome, name):
    _, kind, *named = REFUSALS[name]
    result = outcome[f"{REPOSITORY}/{name}"]
    assert_fails(result, kind, *(text.format(hub.address) for text in named))
    assert result["message"].startswith(f"{REPOSITORY}/{name}: ")
    assert len(result["message"]) < 600
    assert "\n" not in result["message"]
    assert result["seconds"] < 4


@pytest.mark.parametrize("name", PATIENCE)
def test_a_hub_that_asks_to_be_asked_again_soon_is(outcome, name):
    result = outcome[f"{REPOSITORY}/{name}"]
    assert_tokens(result, tokens_of(MAIN, "whole"))
    assert result["seconds"] < 4


def test_a_token_goes_to_the_hub_and_to_no_other_and_is_not_printed(hub, outcome):
    logins = {host.partition(":")[0]: login for host, login in hub.logins}
    assert logins == {"127.0.0.1": "Bearer hf_secret", "localhost": None}
    for result in outcome.values():
        assert "hf_secret" not in result.get("traceback", "")
        assert SIGNATURE not in result.get("traceback", "")
    assert "hf_secret" not in outcome.printed
    assert SIGNATURE not in outcome.printed


def test_of_log_lines_those_of_the_downloading_thread_are_cut_and_no_others(caplog):
    log = logging.getLogger("of.a.program").warning
    address = "GET https://hub/file?signature=5"
    with _logs_without_secrets():
        log("%s", address)
        other = threading.Thread(target=log, args=("%s", address))
        other.start()
        other.join()
    assert caplog.messages == ["GET https://hub/file", address]


def test_a_password_in_the_endpoint_or_a_signature_is_sent_and_never_printed(hub, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
    names = ["404-file", "401", "get-500", "circle", "cut", "whole"]
    sources = [f"{REPOSITORY}/{name}" for name in names]
    endpoint = hub.address.replace("//", f"//{SECRET}@") + "/"
    outcome = open_in_process(hub, tmp_path, *sources, endpoint=endpoint, HF_TOKEN="hf_x")
    assert_tokens(outcome[sources[-1]], tokens_of(MAIN, "whole"))
    for source in sources[:-1]:
        assert_fails(outcome[source], outcome[source]["kinds"][0], hub.address.removesuffix("/"))
    broke_off = f"{REPOSITORY}/cut: the download from {hub.address} broke off ("
    assert_fails(outcome[f"{REPOSITORY}/cut"], "ConnectionError", broke_off)
    at_the_hub = {login for host, login in hub.logins if host.startswith("127.0.0.1")}
    assert at_the_hub == {"Basic dXNlcjpwYUBzcw=="}
    offline = [
        open_in_process(hub, tmp_path / "new", sources[0], endpoint=f"http://{SECRET}@{nobody}", **more)
        for more in ({}, {"HF_HUB_OFFLINE": "1"})
    ]
    for each in (outcome, *offline):
        # Newer clients log the address at each of their retries.
        for part in (SIGNATURE, "pa%40ss", "pa@ss", "dXNlcjpwYUBzcw"):
            assert part not in each.printed


@pytest.mark.parametrize(
    "endpoint",
    ["http://me:xy/zzy@hub", "http://me:xy#zzy@hub", "http://me:xy[zzy@hub", "me:xyzzy@hub", "hub"],
)
def test_an_endpoint_that_is_no_address_is_refused_without_its_password(hub, tmp_path, endpoint):
    outcome = open_in_process(hub, tmp_path, f"{REPOSITORY}/file", endpoint=endpoint)
    message = "HF_ENDPOINT, which ends in 'hub', is not the address of a Hub; expected https://HOST"
    assert_fails(outcome[f"{REPOSITORY}/file"], "ValueError", message)
    assert "xy" not in outcome.printed
    assert "zzy" not in outcome.printed


def test_a_command_prints_the_same_message_in_one_line(hub, tmp_path):
    done = run_cli("info", f"{REPOSITORY}/403", env=variables(hub.address, tmp_path))
    assert done.returncode == 2
    start = (
        f"tokenloader: {REPOSITORY}/403: access is denied (HTTP 403, 'not in the list' from {hub.address});"
    )
    assert done.stderr.startswith(start)
    assert done.stderr.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_named(hub, tmp_path):
    (tmp_path / "file").touch()
    source, cache = f"{REPOSITORY}/whole", tmp_path / "file" / "cache"
    for more in ({"HF_HUB_CACHE": str(cache)}, {"HF_TOKEN_PATH": str(cache)}):
        result = open_in_process(hub, tmp_path, source, **more)[source]
        assert_fails(result, "NotADirectoryError", f"while {source} is fetched; HF_HOME moves", str(cache))


def test_a_full_disk_is_an_error_of_the_disk_with_the_place_of_the_cache():
    wanted = HubFile(f"{REPOSITORY}/f", "owner/name", None, "f", "https://hub")
    error = broken_off(wanted, OSError(errno.ENOSPC, "No space left on device"), "/cache")
    assert (error.errno, error.filename) == (errno.ENOSPC, "/cache")
    assert error.strerror.startswith(f"No space left on device while {REPOSITORY}/f is fetched; HF_HOME")


def test_an_error_that_the_caller_is_handling_is_not_the_cause():
    wanted = HubFile(f"{REPOSITORY}/f", "owner/name", None, "f", "https://hub")
    try:
        raise OSError(errno.EIO, "theirs")
    except OSError:
        try:
            raise RuntimeError("ours")
        except RuntimeError as error:
            told = broken_off(wanted, error, "/cache")
    assert "(RuntimeError: ours)" in str(told)


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("GET https://user:pa:ss@hub/x: no", "GET https://hub/x: no"),
        (f"'https://cdn/x?{SIGNATURE}&y=1' failed", "'https://cdn/x' failed"),
        (f"/x?{SIGNATURE} (Caused by it)", "/x (Caused by it)"),
        ("size 5 ((…)gnature=5f3a)", "size 5 ((…))"),
        ("header b'Bearer hf_x\\n'", "header b'Bearer "),
        ("is it right? a@b: yes", "is it right? a@b: yes"),
    ],
)
def test_secrets_are_cut_out_of_a_text(text, public):
    assert without_secrets(text) == public


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "0"}, 0),
        ({"Retry-After": " 17 "}, 17),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"Retry-After": "9" * 5000}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"RateLimit": '"api";r=20;t=55'}, None),
    ],
)
def test_how_long_a_server_wants_us_to_wait_is_read(headers, seconds):
    assert seconds_to_wait(headers) == seconds
