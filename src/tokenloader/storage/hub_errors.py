"""Hub errors: the OSError for a Hub's refusal or silence, which names the address, cause and remedy.

All is judged by status codes, the Hub's own headers, and what the system says, not by the client's
exceptions and their wording, which differ from release to release.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# User and password of an address, its query, which may be a signature, in full or as the client
# shortens it, and a token.
_SECRETS = re.compile(r"(?<=://)[^\s/@]*@|(?<=\S)\?[^\s'\"]+|(?<=\(…\))[^\s)]+|(?<=Bearer )\S+")
_LOGIN = 'log in ("hf auth login", or set HF_TOKEN)'
_LONGEST_QUOTE = 200  # characters of what a server says


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset on a Hub."""

    address: str  # as the user wrote it
    repo: str
    revision: str | None
    file: str
    endpoint: str

    @property
    def page(self) -> str:
        """The dataset's page."""
        return f"{self.endpoint}/datasets/{self.repo}"


def without_secrets(text: str) -> str:
    """Cuts passwords, tokens, and the queries of addresses out of a text."""
    return _SECRETS.sub("", text)


def seconds_to_wait(answer: Mapping[str, str]) -> int | None:
    """Returns the seconds after which a server wants to be asked again; None where it does not say."""
    # The Hub's own form is: ratelimit: "resolvers";r=0;t=55
    after = re.fullmatch(r"\s*(\d{1,9})\s*", answer.get("Retry-After", ""))
    after = after or re.search(r";\s*r=0\s*;\s*t=(\d{1,9})", answer.get("RateLimit", ""))
    return int(after[1]) if after else None


def unreachable(wanted: HubFile, error: Exception, cache: str) -> OSError:
    """Makes the error for a Hub that gives no answer, and a file that is not in the cache."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if on_disk := _error_on_disk(wanted, error, cache):
        return on_disk
    revision = ["--revision", wanted.revision] if wanted.revision else []
    fetch = shlex.join(["hf", "download", "--repo-type", "dataset", *revision, wanted.repo, wanted.file])
    elsewhere = f'or fetch it where there is a connection ("{fetch}") and pass the path'
    if any(isinstance(one, OfflineModeIsEnabled) for one in _chain(error)):
        cause, remedy = "HF_HUB_OFFLINE is set", "unset it"
    else:
        cause = f"the Hub at {wanted.endpoint} cannot be reached ({_cause(error)})"
        remedy = "check the connection, proxies and HF_ENDPOINT"
    return ConnectionError(
        f"{wanted.address}: {cause} and the file is not in the local cache; {remedy}, {elsewhere}"
    )


def refused(wanted: HubFile, status: int, answer: Mapping[str, str], said: str | None = None) -> OSError:
    """Makes the error for a status of 400 or more; said is what the body of the answer said, if known."""
    code, page = answer.get("X-Error-Code", ""), wanted.page
    said = without_secrets(said or answer.get("X-Error-Message", ""))[:_LONGEST_QUOTE]
    found = ", ".join([f"HTTP {status}"] + ([repr(said)] if said else []))
    revision = wanted.revision or "main"
    kind: type[OSError] = FileNotFoundError
    if code == "EntryNotFound":
        cause = f"the dataset has no file {wanted.file!r} at revision {revision}"
        remedy = f"{page}/tree/{revision} lists its files"
    elif code == "RevisionNotFound":
        cause, remedy = f"the dataset has no revision {revision!r}", f"{page} lists its branches and tags"
    elif code == "RepoNotFound" or (status == 404 and code != "GatedRepo"):
        cause = f"the Hub has no dataset {wanted.repo}, or it is private"
        remedy = f"check the name at {page}, or {_LOGIN} with a token that may read it"
    elif code == "GatedRepo":
        kind, cause = PermissionError, "the dataset is gated"
        remedy = f"accept its terms at {page}, then {_LOGIN}"
    elif status == 401:
        kind, cause = PermissionError, "the Hub does not accept the token, or wants one"
        remedy = f"{_LOGIN}, or correct the user and the password in HF_ENDPOINT"
    elif status == 403:
        kind, cause = PermissionError, "access is denied"
        remedy = f"{_LOGIN} with a token that may read {page}; a proxy or a firewall may answer so as well"
    elif status in (408, 429) or status >= 500:
        kind = ConnectionError
        cause = "the Hub limits the rate of requests" if status == 429 else "the Hub cannot serve it now"
        wait = seconds_to_wait(answer)
        remedy = "try again later" if wait is None else f"try again in {wait} s"
        if status == 429:
            remedy += f", or {_LOGIN}, which raises the limit"
    else:
        kind, cause = OSError, "the Hub gives an answer that is not expected"
        remedy = "check HF_ENDPOINT and proxies"
    return kind(f"{wanted.address}: {cause} ({found} from {wanted.endpoint}); {remedy}")


def broken_off(wanted: HubFile, error: Exception, cache: str) -> OSError:
    """Makes the error for a download that ended in an exception of the client."""
    from huggingface_hub.errors import FileMetadataError

    for one in _chain(error):
        response: Any = getattr(one, "response", None)
        if response is not None:
            said = getattr(one, "server_message", None)
            return refused(wanted, response.status_code, response.headers, said)
        if isinstance(one, FileMetadataError):
            return OSError(
                f"{wanted.address}: what answers at {wanted.endpoint} is not a Hub, because it names no "
                f"commit, no ETag or no length of the file; check HF_ENDPOINT, proxies, and whether the "
                f"network wants you to sign in first"
            )
    return _error_on_disk(wanted, error, cache) or ConnectionError(
        f"{wanted.address}: the download from {wanted.endpoint} broke off ({_cause(error)}); try again"
    )


def _error_on_disk(wanted: HubFile, error: Exception, cache: str) -> OSError | None:
    """Makes the error for a cache, or a token beside it, that cannot be read or written."""
    if not isinstance(error, OSError) or not error.errno:  # those of the network are the client's own
        return None
    text = f"{error.strerror} while {wanted.address} is fetched; HF_HOME moves the cache elsewhere"
    return OSError(error.errno, text, error.filename or cache)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, its cause, the cause's cause. A context may be an error that our caller handles."""
    while error:
        yield error
        error = error.__cause__


def _cause(error: Exception) -> str:
    """Describes the first of a chain of causes: with newer clients, the system's own error."""
    *_, first = _chain(error)
    line = without_secrets(str(first)).partition("\n")[0]
    return f"{type(first).__name__}: {line}"
