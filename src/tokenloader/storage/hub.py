"""hf:// addresses: from a file of a Hugging Face dataset to a path in the local cache.

Cache, progress bars, tokens, offline mode and environment variables are huggingface_hub's. What is added
is the address, and one request of our own before its first: the client tries again for 23 s, or for as
long as a server says, and then tells most refusals as a file that is not there. Our request is made once,
and its answer told as it is.
"""

import logging
import os
import re
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from tokenloader.storage.hub_errors import (
    HubFile,
    broken_off,
    refused,
    seconds_to_wait,
    unreachable,
    without_secrets,
)

_SCHEME = "hf://"
_UNREACHABLE_AFTER_SECONDS = 5.0
_MOST_REQUESTS = 10  # a dataset that was renamed takes two


def is_hub_address(source: str) -> bool:
    """Whether source is an hf:// address, in upper or lower case, and not a path."""
    return source[: len(_SCHEME)].lower() == _SCHEME


def parse(address: str) -> tuple[str, str | None, str]:
    """Splits hf://datasets/OWNER/NAME[@REVISION]/FILE into (repository, revision or None, file)."""
    parts = address[len(_SCHEME) :].split("/")
    if len(parts) < 4 or parts[0] != "datasets" or not all(parts) or ".." in parts:
        raise ValueError(
            f"{address!r}: expected hf://datasets/OWNER/NAME[@REVISION]/FILE, for example "
            f"hf://datasets/gpjt/fineweb-gpt2-tokens/train.safetensors"
        )
    owner, (name, at, revision) = parts[1], parts[2].partition("@")
    if not name or (at and not revision):
        raise ValueError(f"{address!r}: the name or the revision around '@' is empty")
    # As huggingface_hub writes it, a revision with slashes has them escaped.
    return f"{owner}/{name}", revision.replace("%2F", "/") or None, "/".join(parts[3:])


def download(address: str, *, unreachable_after_seconds: float = _UNREACHABLE_AFTER_SECONDS) -> Path:
    """Fetches a file of a dataset into the Hugging Face cache, if it is not there; returns its local path.

    A cached file costs one request, and none when the revision is a commit hash or HF_HUB_OFFLINE is
    set. It is used as it is if the Hub cannot be reached, does not answer in time, or refuses to answer;
    not if the Hub says that the revision or the file is no more. A Hub that asks to be asked again
    within unreachable_after_seconds is asked again.

    Raises:
        ConnectionError: the Hub cannot be reached, or cannot serve the file now, and the file is not in
            the cache.
        FileNotFoundError: the Hub has no such repository, revision or file, or it is private.
        PermissionError: access is denied, or a token is wrong.
        OSError: the Hub answers otherwise, the download breaks off, or the cache cannot be written.
        ValueError: the address, or HF_ENDPOINT, is malformed.
    """
    repo, revision, file = parse(address)
    # Before the client is imported: that parses it too, and quotes parts of a password that is not escaped.
    endpoint, login = _endpoint(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    # Imported here: it takes 0.3 s, and most programs open local files.
    import huggingface_hub as hub

    wanted = HubFile(address, repo, revision, file, endpoint)
    try:
        url = hub.hf_hub_url(repo, file, revision=revision, repo_type="dataset", endpoint=endpoint)
    except ValueError as error:  # the client's rules for names
        raise ValueError(f"{address}: {error}") from None
    with _logs_without_secrets():
        outcome = _fetch(wanted, url, login, unreachable_after_seconds)
    # Raised here, where the client's own error, which may print signed addresses, is not its context.
    if isinstance(outcome, OSError):
        raise outcome
    return outcome


def _endpoint(configured: str) -> tuple[str, dict[str, str]]:
    """Splits a user and a password off HF_ENDPOINT, into a header: what is in an address is printed."""
    try:
        parts = urlsplit(configured)
        is_sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_sound = False
    if not is_sound or parts.query or parts.fragment:
        raise ValueError(
            f"HF_ENDPOINT, which ends in {configured.rpartition('@')[2]!r}, is not the address of a Hub; "
            f"expected https://HOST[:PORT], with special characters of a user and a password escaped, as "
            f"%40 for @"
        )
    user, _, host = parts.netloc.rpartition("@")
    if not user:
        return configured.rstrip("/"), {}
    name, _, password = user.partition(":")
    basic = b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
    return parts._replace(netloc=host).geturl().rstrip("/"), {"authorization": f"Basic {basic}"}


def _fetch(wanted: HubFile, url: str, login: dict[str, str], patience_seconds: float) -> Path | OSError:
    """Returns where the file is in the cache, fetched if need be, or the error to raise."""
    import huggingface_hub as hub
    from huggingface_hub.constants import HF_HUB_CACHE

    def in_cache(revision: str | None) -> Path | None:
        path = hub.try_to_load_from_cache(wanted.repo, wanted.file, revision=revision, repo_type="dataset")
        return Path(path) if isinstance(path, str) else None

    cached = in_cache(wanted.revision)
    if cached and re.fullmatch("[0-9a-f]{40}", wanted.revision or ""):
        return cached
    try:
        status, answer = _ask(url, login, patience_seconds)
    except Exception as error:
        return cached or unreachable(wanted, error, HF_HUB_CACHE)
    if status >= 400:
        is_gone = answer.get("X-Error-Code") in ("EntryNotFound", "RevisionNotFound")
        return refused(wanted, status, answer) if is_gone or not cached else cached
    if cached and (commit := answer.get("X-Repo-Commit")) and in_cache(commit) == cached:
        return cached
    try:
        return Path(
            hub.hf_hub_download(
                wanted.repo,
                wanted.file,
                repo_type="dataset",
                revision=wanted.revision,
                endpoint=wanted.endpoint,
                headers=login,
                etag_timeout=patience_seconds,
            )
        )
    except Exception as error:
        return broken_off(wanted, error, HF_HUB_CACHE)


def _ask(url: str, login: dict[str, str], patience_seconds: float) -> tuple[int, Mapping[str, str]]:
    """Asks for a file's header; returns the status and the headers of the answer.

    Redirects to the same host, as of a dataset that was renamed, are followed. One to another host is an
    answer: the file is there, at an address that may be signed for one kind of request.
    """
    import huggingface_hub as hub
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    session: Any = hub.get_session()  # of requests before the client's release 1, of httpx since
    follow = "follow_redirects" if hasattr(session, "follow_redirects") else "allow_redirects"
    headers = build_hf_headers(headers=login) | {"Accept-Encoding": "identity"}
    waited = 0
    for _ in range(_MOST_REQUESTS):
        response = session.head(url, headers=headers, timeout=patience_seconds, **{follow: False})
        status, answer = response.status_code, response.headers
        target = urljoin(url, answer.get("Location", ""))
        wait = seconds_to_wait(answer)
        if 300 <= status < 400 and urlsplit(target)[:2] == urlsplit(url)[:2]:
            url = target
        elif status in (429, 503) and wait is not None and waited + wait <= patience_seconds:
            time.sleep(wait)
            waited += max(wait, 1)
        else:
            return status, answer
    raise OSError(f"{_MOST_REQUESTS} redirects, the last one to {urlsplit(url).path}")


@contextmanager
def _logs_without_secrets() -> Iterator[None]:
    """Cuts secrets out of the client's log lines, which tell each retry with a signed address.

    The client logs in the thread that calls it; lines of other threads are not its own.
    """
    here = threading.get_ident()

    def cut(record: logging.LogRecord) -> bool:
        if record.thread == here:
            record.msg, record.args = without_secrets(record.getMessage()), ()
        return True

    handlers = logging.getLogger("huggingface_hub").handlers + logging.getLogger().handlers
    for handler in handlers:
        handler.addFilter(cut)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(cut)
