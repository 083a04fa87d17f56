"""hf:// addresses: from a file of a Hugging Face dataset to a path in the local cache.

Cache, progress bars, tokens, offline mode and environment variables are huggingface_hub's. What is added
is the address, and an answer within seconds where the client would go on trying for much longer: when
the Hub cannot be reached and the file is not in the cache.
"""

from pathlib import Path

_SCHEME = "hf://"
_UNREACHABLE_AFTER_SECONDS = 5.0


def is_hub_address(source: str) -> bool:
    """Whether source is an hf:// address and not a path."""
    return source.startswith(_SCHEME)


def parse(address: str) -> tuple[str, str | None, str]:
    """Splits hf://datasets/OWNER/NAME[@REVISION]/FILE into (repository, revision or None, file)."""
    parts = address.removeprefix(_SCHEME).split("/")
    if len(parts) < 4 or parts[0] != "datasets" or not all(parts):
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
    set. If the Hub cannot be reached, or a request is not answered in time, the cached file is used.

    Raises:
        ConnectionError: the Hub cannot be reached and the file is not in the cache.
        FileNotFoundError: the Hub has no such repository, revision or file, or access is denied.
        ValueError: the address is malformed.
    """
    repo, revision, file = parse(address)
    # Imported here: it takes 0.3 s, and most programs open local files.
    import huggingface_hub as hub
    from huggingface_hub import errors

    cached = hub.try_to_load_from_cache(repo, file, revision=revision, repo_type="dataset")
    status = 200
    try:
        if not isinstance(cached, str):
            # One request of our own, because hf_hub_download tries an unreachable Hub again and again.
            # Without credentials: that the Hub answers is all that is asked.
            url = hub.hf_hub_url(repo, file, revision=revision, repo_type="dataset")
            status = hub.get_session().head(url, timeout=unreachable_after_seconds).status_code
    except Exception as error:
        raise ConnectionError(
            f"{address}: the Hub cannot be reached ({type(error).__name__}: {error}) and the file is not "
            f"in the local cache; check the connection, HF_ENDPOINT and HF_HUB_OFFLINE, or fetch it where "
            f'there is a connection ("hf download --repo-type dataset {repo} {file}") and pass the '
            f"path"
        ) from error
    # What the Hub has not, or will not show, hf_hub_download tells best.
    if status >= 500:
        raise ConnectionError(
            f"{address}: the Hub cannot serve it now (HTTP {status}) and the file is not in the local "
            f"cache; try again later"
        )
    missing = errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError
    try:
        path = hub.hf_hub_download(
            repo, file, revision=revision, repo_type="dataset", etag_timeout=unreachable_after_seconds
        )
    except missing as error:
        raise FileNotFoundError(
            f"{address}: the Hub has no such dataset or file at this revision, or it is private and "
            f'needs a token ("hf auth login"): {str(error).strip()}'
        ) from error
    return Path(path)
