"""A Hugging Face hub, or one that speaks as it does, over its public HTTP interface.

Promises: what a repository holds at one commit; a file fetched whole and checked by the hash the hub tells; a file
half fetched goes on where it stopped; every failure is one sentence with a remedy. A token goes to the hub alone,
never to the address that it redirects to.
Does not know: where files are kept (see `config.pull`), or which of them make a model (see `config.hub_files`).

Not huggingface_hub, which is here with tokenizers: since its version 2 an interrupted file is deleted, so that nothing
resumes; its downloads run in threads or in a native library that hear Ctrl-C late.
"""

import errno
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import quote

import httpx2

from octavo.base.errors import LoadError
from octavo.config.env import HubAccess
from octavo.config.hub_files import HubFile
from octavo.config.meter import size_text
from octavo.config.names import HubName

ATTEMPTS: Final = 5  # without a byte of progress between them
LONGEST_WAIT_S: Final = 60.0  # of what a hub may ask for with Retry-After
_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONNECT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """What a repository holds at one commit."""

    commit: str
    files: tuple[HubFile, ...]


class _TryAgain(Exception):
    """What may pass by itself; the message says what it was."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Hub:
    """One hub at the address and with the token of `access`.

    Owns: its connections; close it.
    """

    def __init__(
        self,
        access: HubAccess,
        say: Callable[[str], None],
        *,
        silence_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._access = access
        self._say = say
        self._sleep = sleep
        self._token = access.read_token()
        headers = {"User-Agent": "octavo", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            self._client = httpx2.Client(
                headers=headers, follow_redirects=True, timeout=httpx2.Timeout(silence_s, connect=_CONNECT_S)
            )
        except (
            ValueError,
            OSError,
            ImportError,
            httpx2.InvalidURL,
        ) as error:  # what HTTPS_PROXY, ALL_PROXY or SSL_CERT_FILE say
            raise LoadError(f"the proxy or certificate settings of this environment cannot be used: {error}") from None

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()

    def look(self, name: HubName) -> Repository:
        """What the repository holds, pinned to a commit."""
        url = f"{self._access.endpoint}/api/models/{name.repo}/revision/{quote(name.revision or 'main', safe='')}"
        tries = _Tries(self._say, self._sleep)
        while True:
            try:
                return _repository(name, self._json(name, url))
            except _TryAgain as problem:
                tries.failed(name, problem)

    def _json(self, name: HubName, url: str) -> Any:
        try:
            answer = self._client.get(url, params={"blobs": "true"})
            if answer.status_code != 200:
                self._refused(name, answer)
            return answer.json()
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
            raise LoadError(self._unreachable(name, error)) from None
        except httpx2.HTTPError as error:
            raise _TryAgain(_words(error)) from None
        except ValueError:
            raise LoadError(f"{url} answered with something that no hub says; {self._ways(name)}") from None

    def fetch(self, name: HubName, commit: str, file: HubFile, part: Path, report: Callable[[int], None]) -> None:
        """Make `part` the whole file, from what it holds already; `report` gets its bytes so far.

        Raises `LoadError` when that cannot be; what has come stays in `part` unless it is of no use.
        """
        url = f"{self._access.endpoint}/{name.repo}/resolve/{commit}/{quote(file.path)}"
        tries = _Tries(self._say, self._sleep)
        while True:
            before = _size(part)
            try:
                if file.size is None or before != file.size:
                    self._receive(name, file, url, part, report)
                _check(file, part)
                return
            except _TryAgain as problem:
                tries.failed(name, problem, progress=_size(part) > before)

    def _receive(self, name: HubName, file: HubFile, url: str, part: Path, report: Callable[[int], None]) -> None:
        have = _size(part)
        if file.size is not None and have > file.size:
            part.unlink()
            have = 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        try:
            with self._client.stream("GET", url, headers=headers) as answer:
                if answer.status_code == 416:
                    part.unlink(missing_ok=True)
                    raise _TryAgain(f"{file.path} is shorter on the hub than what was fetched of it")
                if answer.status_code not in (200, 206):
                    answer.read()
                    self._refused(name, answer)
                goes_on = answer.status_code == 206 and have > 0
                if goes_on and not answer.headers.get("content-range", "").startswith(f"bytes {have}-"):
                    part.unlink()
                    raise _TryAgain(f"the hub sent another part of {file.path} than it was asked for")
                _write(file, part, answer, have if goes_on else 0, report)
        except httpx2.HTTPError as error:
            raise _TryAgain(_words(error)) from None

    def _refused(self, name: HubName, answer: httpx2.Response) -> NoReturn:
        """Raise what a status that is no success means."""
        status, code = answer.status_code, answer.headers.get("x-error-code", "")
        if status in _AGAIN:
            raise _TryAgain(f"the hub answered {status} ({answer.reason_phrase})", _wait_s(answer.headers))
        if code == "RevisionNotFound":
            raise LoadError(f"{name.repo} has no revision {name.revision or 'main'}; leave @{name.revision or ''} out")
        page = f"{self._access.endpoint}/{name.repo}"
        if code == "GatedRepo":
            has = "the token in HF_TOKEN is not of one who may" if self._token else "set HF_TOKEN after that"
            raise LoadError(f"{name.repo} is for those who accepted its terms at {page}; {has}")
        if status in (401, 403, 404):
            whose = "HF_TOKEN of somebody who may read it" if self._token else "HF_TOKEN"
            raise LoadError(f"{self._access.endpoint} has no such model as {name.repo}, or it needs {whose} ({status})")
        raise LoadError(f"{self._access.endpoint} answered {status} for {name}; {self._ways(name)}")

    def _unreachable(self, name: HubName, error: Exception) -> str:
        return f"{name} is not on this machine, and {self._access.endpoint} cannot be reached ({_words(error)}); {self._ways(name)}"

    def _ways(self, name: HubName) -> str:
        return (
            "try again with a network, set HF_ENDPOINT to a mirror or HTTPS_PROXY to a proxy, or copy the model's folder "
            "here and give its path"
        )


class _Tries:
    """Counts attempts that brought nothing.

    Owns: the count.
    """

    def __init__(self, say: Callable[[str], None], sleep: Callable[[float], None]) -> None:
        self._say = say
        self._sleep = sleep
        self._count = 0

    def failed(self, name: HubName, problem: _TryAgain, *, progress: bool = False) -> None:
        """Wait before the next attempt, or raise `LoadError` after the last."""
        self._count = 1 if progress else self._count + 1
        if self._count >= ATTEMPTS:
            raise LoadError(f"{name} could not be fetched: {problem}, {ATTEMPTS} times; the same command goes on later")
        wait = problem.wait_s if problem.wait_s is not None else 2.0 ** (self._count - 1)
        self._say(f"{problem}; trying again in {wait:g} s")
        self._sleep(wait)


def _repository(name: HubName, found: Any) -> Repository:
    try:
        files = tuple(_file(each) for each in found["siblings"])
        return Repository(commit=str(found["sha"]), files=files)
    except (KeyError, TypeError, ValueError):
        raise LoadError(f"what the hub says of {name.repo} cannot be understood; is HF_ENDPOINT a hub?") from None


def _file(found: Mapping[str, Any]) -> HubFile:
    path, size, lfs, blob = str(found["rfilename"]), found.get("size"), found.get("lfs"), found.get("blobId")
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(path)
    digest = f"sha256:{lfs['sha256']}" if lfs else f"git:{blob}" if blob else None
    return HubFile(path=path, size=None if size is None else int(size), digest=digest)


def _write(file: HubFile, part: Path, answer: httpx2.Response, start: int, report: Callable[[int], None]) -> None:
    have = start
    try:
        with part.open("ab" if start else "wb") as target:
            report(have)
            for piece in answer.iter_bytes():
                target.write(piece)
                have += len(piece)
                report(have)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise LoadError(
            f"the disk of {part.parent} is full after {size_text(have)} of {file.path}"
            f"{'' if file.size is None else f' ({size_text(file.size)})'}; make room and run the same command again"
        ) from None
    if file.size is not None and have < file.size:
        raise _TryAgain(f"the connection ended after {size_text(have)} of {size_text(file.size)}")


def _check(file: HubFile, part: Path) -> None:
    """Size and hash are what the hub told; a file that is not is removed."""
    size = _size(part)
    kind, _, digest = (file.digest or "").partition(":")
    if size == (size if file.size is None else file.size) and (not digest or _hash(part, kind, size) == digest):
        return
    part.unlink(missing_ok=True)
    raise _TryAgain(f"{file.path} came damaged")


def _hash(path: Path, kind: str, size: int) -> str:
    made = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            made.update(piece)
    return made.hexdigest()


def _size(part: Path) -> int:
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0


def _wait_s(headers: Mapping[str, str]) -> float | None:
    try:
        return min(max(float(headers["retry-after"]), 0.0), LONGEST_WAIT_S)
    except (KeyError, ValueError):
        return None


def _words(error: Exception) -> str:
    """The error in a few words of one line."""
    text = re.sub(r"^\[Errno -?\d+\] ", "", " ".join(str(error).split()))  # a number that no user knows
    kind = {"ReadTimeout": "no answer for long", "ReadError": "the connection broke"}.get(type(error).__name__)
    return (kind or text or type(error).__name__)[:160]
