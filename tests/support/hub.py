"""A stand-in for a model hub on loopback: its public HTTP interface, and the faults that networks have.

Promises: listings with sizes and hashes at a commit, files by Range behind a redirect to a second address, ETags;
on demand slow, cut, refused or damaged. Everything that was asked is in `seen`.
Does not know: who asks. `python -m tests.support.hub FOLDER` serves FOLDER/owner/name/* until it is ended.
"""

import argparse
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_BYTES = 4096  # files from this size have a sha256 and stand behind a redirect, as large files of a hub do
PIECE = 1 << 14


@dataclass
class Faults:
    """What goes wrong; tests change it while the hub runs."""

    bytes_per_s: float | None = None  # of one connection
    cut_after: list[int] = field(default_factory=list)  # bytes after which a file's connection is cut, one a request
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # statuses given before any answer
    ignore_range: bool = False
    damaged: int = 0  # so many files have a wrong byte
    tokens: tuple[str, ...] = ()  # who may read; empty: everybody
    gated: bool = False
    hold: threading.Event | None = None  # files wait for it after their first piece


@dataclass
class Repo:
    """Files by path at one commit, and the names of revisions."""

    files: dict[str, bytes]
    commit: str = ""
    revisions: dict[str, "Repo"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.commit:
            made = hashlib.sha1()
            for path, data in sorted(self.files.items()):
                made.update(path.encode() + hashlib.sha256(data).digest())
            self.commit = made.hexdigest()


@dataclass
class Seen:
    """One request: which of the two addresses it came to, and what it said."""

    host: str  # "hub" or "cdn"
    path: str
    range: str | None
    authorization: str | None


class Hub:
    """The two servers and what they serve."""

    def __init__(self, repos: dict[str, Repo]) -> None:
        self.repos = repos
        self.faults = Faults()
        self.seen: list[Seen] = []
        self._servers = [_server(self, host) for host in ("hub", "cdn")]
        self.url, self.cdn = (f"http://127.0.0.1:{s.server_address[1]}" for s in self._servers)

    def start(self) -> None:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def asked(self, ending: str) -> list[Seen]:
        """Requests for bytes of files whose path ends so."""
        return [s for s in self.seen if s.path.endswith(ending) and s.host == "cdn"]

    def at(self, repo: str, revision: str) -> Repo | None:
        found = self.repos.get(repo)
        if found is None:
            return None
        every = {"main": found, found.commit: found}
        for name, other in found.revisions.items():
            every |= {name: other, other.commit: other}
        return every.get(revision)


@contextmanager
def running_hub(repos: dict[str, Repo]) -> Iterator[Hub]:
    """A hub on two free ports of loopback, gone when the block ends."""
    hub = Hub(repos)
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()


def _server(hub: Hub, host: str) -> ThreadingHTTPServer:
    class Handler(_Handler):
        pass

    Handler.hub, Handler.host = hub, host
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    host: str
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        faults, path = self.hub.faults, unquote(urlsplit(self.path).path)
        self.hub.seen.append(Seen(self.host, path, self.headers.get("Range"), self.headers.get("Authorization")))
        if faults.answers:
            status, headers = faults.answers.pop(0)
            return self._answer(status, b'{"error": "later"}', headers)
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = listing or file
        if match is None or match[1] not in self.hub.repos:
            return self._answer(404 if self._known() else 401, b'{"error": "Repository not found"}')
        if not self._known() and not (faults.gated and listing):
            code = {"X-Error-Code": "GatedRepo"} if faults.gated else {}
            return self._answer(401, b'{"error": "no"}', code)
        repo = self.hub.at(match[1], match[2] or "main")
        if repo is None:
            return self._answer(404, b'{"error": "no revision"}', {"X-Error-Code": "RevisionNotFound"})
        if listing:
            return self._answer(200, json.dumps(_listing(match[1], repo)).encode())
        if match[3] not in repo.files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._file(repo, match[3])

    def _known(self) -> bool:
        if self.host == "cdn" or not self.hub.faults.tokens:
            return True
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") in self.hub.faults.tokens

    def _file(self, repo: Repo, path: str) -> None:
        data = repo.files[path]
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{_digest(data)}"', "Accept-Ranges": "bytes"}
        if self.host == "hub" and len(data) >= LFS_BYTES:
            headers |= {"X-Linked-Etag": f'"{_digest(data)}"', "X-Linked-Size": str(len(data))}
            return self._answer(302, b"", headers | {"Location": f"{self.hub.cdn}{self.path}"})
        faults = self.hub.faults
        if faults.damaged and len(data) >= LFS_BYTES:
            faults.damaged -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is None or faults.ignore_range:
            return self._send(200, data, headers)
        start = int(asked[1])
        if start >= len(data):
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        return self._send(206, data[start:], headers | {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        faults = self.hub.faults
        large = len(data) >= LFS_BYTES
        end = faults.cut_after.pop(0) if large and faults.cut_after else None
        self._head(status, len(data), headers)
        if self.command == "HEAD":
            return
        start, sent = time.monotonic(), 0
        try:
            for at in range(0, len(data), PIECE):
                piece = data[at : min(at + PIECE, len(data) if end is None else end)]
                self.wfile.write(piece)
                sent += len(piece)
                if end is not None and sent >= end:
                    self.wfile.flush()
                    self.close_connection = True
                    return
                if faults.hold is not None and large:
                    faults.hold.wait(60)
                if faults.bytes_per_s and large:
                    time.sleep(max(0.0, sent / faults.bytes_per_s - (time.monotonic() - start)))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def _digest(data: bytes) -> str:
    if len(data) >= LFS_BYTES:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _listing(name: str, repo: Repo) -> dict[str, Any]:
    files = []
    for path, data in repo.files.items():
        found: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
        if len(data) >= LFS_BYTES:
            found["lfs"] = {"sha256": _digest(data), "size": len(data), "pointerSize": 134}
        else:
            found["blobId"] = _digest(data)
        files.append(found)
    return {"id": name, "sha": repo.commit, "siblings": files, "gated": False, "private": False}


def repos_in(folder: Path) -> dict[str, Repo]:
    """FOLDER/owner/name/* as repositories."""
    found = {}
    for repo in sorted(folder.glob("*/*")):
        files = {str(p.relative_to(repo)): p.read_bytes() for p in sorted(repo.rglob("*")) if p.is_file()}
        found[f"{repo.parent.name}/{repo.name}"] = Repo(files)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes-per-s", type=float)
    args = parser.parse_args()
    with running_hub(repos_in(args.folder)) as hub:
        hub.faults.bytes_per_s = args.bytes_per_s
        sys.stdout.write(f"{hub.url}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
