"""Clients that say what they saw, whatever became of the server.

Promises: a `Witness` reads one answer on a thread of its own, and `saw` puts it in a few words: the right text, an error
by its code, or what no client should ever see (a wrong text, an end without an error, no end). A `Probe` looks at a
server's health all the time.
Does not know: what was done to the server.
"""

import json
import threading
import time
from typing import Any

import httpx

RIGHT, REFUSED = "right text", "connection refused"


class Witness(threading.Thread):
    """One client. `want` is the text that a server which is well gives.

    Owns: what came.
    """

    def __init__(self, url: str, body: dict[str, Any], want: str, limit_s: float = 60.0) -> None:
        super().__init__(daemon=True)
        self.url, self.want, self.limit_s = url, want, limit_s
        self.body = {"temperature": 0, "ignore_eos": True, **body}
        self.text, self.error, self.whole, self.source, self.instance = "", "", False, {}, ""
        self.began_s, self.took_s = time.monotonic(), 0.0
        self.first = threading.Event()  # something came: bytes of an answer, or its end
        self.start()

    def run(self) -> None:
        try:
            url = f"{self.url}/v1/completions"
            with httpx.stream("POST", url, json=self.body, timeout=self.limit_s) as answer:
                self.instance = answer.headers.get("x-octavo-instance", "")
                self._read(answer)
        except httpx.ConnectError:
            self.error = REFUSED
        except httpx.HTTPError as error:
            self.error = f"no end to its answer ({type(error).__name__})"
        finally:
            self.took_s = time.monotonic() - self.began_s
            self.first.set()

    def _read(self, answer: httpx.Response) -> None:
        if answer.status_code != 200 or not self.body.get("stream"):
            said = json.loads(answer.read())
            self._note(said)
            self.whole = answer.status_code == 200
            return
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                self.whole = True
            elif line.startswith("data: "):
                self._note(json.loads(line[6:]))
                self.first.set()

    def _note(self, said: dict[str, Any]) -> None:
        if "error" in said:
            self.error = str(said["error"]["code"])
        self.text += "".join(choice["text"] for choice in said.get("choices", ()))
        details = (said.get("usage") or {}).get("prompt_tokens_details") or {}
        self.source = details.get("cached_tokens_by_source") or self.source

    def end(self, limit_s: float | None = None) -> "Witness":
        """Wait for its end, which must come."""
        self.join(limit_s or self.limit_s)
        return self

    @property
    def saw(self) -> str:
        """In a few words."""
        if self.is_alive():
            return "hangs"
        if not self.want.startswith(self.text):
            return "wrong text"
        if self.error:
            return self.error
        return RIGHT if self.whole and self.text == self.want else "an end without an error"


class Probe(threading.Thread):
    """Asks for a server's health ten times a second, and once more when it is ended.

    Owns: what it was told, with the time.
    """

    def __init__(self, url: str, path: str = "/health") -> None:
        super().__init__(daemon=True)
        self.url, self.path, self.told, self._ended = url, path, [], threading.Event()
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=2.0) as client:
            ended = False
            while not ended:
                ended = self._ended.wait(0.1)
                self._look(client)

    def _look(self, client: httpx.Client) -> None:
        try:
            status = client.get(self.path).status_code
        except httpx.TimeoutException:
            status = 504
        except httpx.HTTPError:
            status = 0  # nobody is there any more
        self.told.append((time.monotonic(), status))

    def since(self, began_s: float, limit_s: float, *, green: bool = False) -> float:
        """Seconds until health was red (or green) after this moment."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            for at_s, status in self.told[:]:
                if at_s > began_s and (status == 200) is green:
                    return at_s - began_s
            time.sleep(0.02)
        raise AssertionError(f"health is not {'green' if green else 'red'} within {limit_s:g} s: {self.told[-3:]}")

    def end(self) -> set[int]:
        """All that it was told."""
        self._ended.set()
        self.join(5)
        return {status for _, status in self.told}
