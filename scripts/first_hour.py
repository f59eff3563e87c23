"""A first hour with Octavo, as somebody types it, in a clean home and a clean environment; the transcript is printed.

Promises: a clone of this checkout, a new `.venv`, an empty home; what README and the guides name is typed as it stands
there: install, serve, chat, pull interrupted and resumed, list, run, rm, a script without a network, the router. Every
command must end as it should, and with a last line that a person can read; the exit code says whether all did.
Does not know: the engine. A stand-in on loopback takes the hub's place (see `tests/support/hub.py`).

Usage: python3 scripts/first_hour.py [FOLDER]    FOLDER: where to work; a temporary one when not given
"""

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1800.0
SPEED = 4_000_000  # bytes a second of the stand-in, so that there is time to interrupt a pull of 98 MB
BUILT_IN = "SmolLM2-135M-Instruct"
PROMPT = "\x1b[?2004h"  # the editor takes pasted text from here on
UNREADABLE = re.compile(r"Traceback|OCTAVO_DEBUG|nanobind: leaked")
SCRIPT = """\
from octavo import LLM, SamplingParams

with LLM() as llm:
    for output in llm.generate(["The capital of France is", "Prime numbers are"], SamplingParams(temperature=0)):
        print(output.prompt + output.outputs[0].text)
"""


class Hour:
    """The checkout, the home, and what was seen so far.

    Owns: the processes that it started; `close` ends what is left of them.
    """

    def __init__(self, work: Path) -> None:
        self.checkout, self.home = work / "octavo", work / "home"
        self.home.mkdir(parents=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OCTAVO_", "HF_", "VIRTUAL_ENV", "PYTHON"))}
        self.env = {**kept, "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "xterm"}
        self.wrong: list[str] = []
        self.running: list[subprocess.Popen[str]] = []

    def say(self, text: str) -> None:
        """A line of the transcript."""
        print(text, flush=True)

    def check(self, what: str, fine: bool) -> None:
        """One thing that must be so."""
        if not fine:
            self.wrong.append(what)
            self.say(f"!!! wrong: {what}")

    def type(self, command: str, *, code: int = 0, last: str = "", **env: str) -> str:
        """Run a command to its end; its output. `last` is what the last line must contain."""
        shown = " ".join(f"{k}={v}" for k, v in env.items())
        self.say(f"\n$ {shown + ' ' if shown else ''}{command}")
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.checkout if self.checkout.exists() else self.home, text=True,
            env={**self.env, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        self.ended(command, done.returncode, code, done.stdout, last)
        return done.stdout

    def ended(self, command: str, got: int, code: int, output: str, last: str) -> None:
        """The output in the transcript, and how it should have ended."""
        self.say(output.rstrip())
        self.check(f"{command}: exit code {got}, not {code}", got == code)
        self.check(f"{command}: unreadable", UNREADABLE.search(output) is None)
        final = (output.strip().splitlines() or [""])[-1]
        self.check(f"{command}: the last line is {final!r}, without {last!r}", last in final)

    def start(self, command: str, ready: str) -> tuple[subprocess.Popen[str], list[str]]:
        """Start a command that stays, and wait for a line; the process and its lines so far."""
        self.say(f"\n$ {command} &")
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.checkout, env=self.env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.running.append(process)
        lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            self.say(lines[-1])
            if ready in line:
                return process, lines
        self.check(f"{command}: it ended before {ready!r}", False)
        return process, lines

    def end(self, process: subprocess.Popen[str], command: str, number: signal.Signals, *, code: int = 0) -> None:
        """Send a signal as a terminal does, to everybody the command started; how it ended."""
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        self.say(f"[{name} for {command}]")
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=120)
        self.ended(command, process.returncode, code, output, "")

    def close(self) -> None:
        """End what still runs."""
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def ask(hour: Hour, port: int, model: str) -> None:
    """One chat request, as README has it, with what Python has by itself."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    hour.say(f"\n[POST {url}]")
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)
    hour.say(f"{found['model']}: {found['choices'][0]['message']['content']}")
    hour.check("the answer carries the name of what is served", found["model"] == model)


def converse(hour: Hour, command: str, typed: list[str], expected: list[str]) -> None:
    """A conversation at a terminal: type each line at a prompt."""
    hour.say(f"\n$ {command}    (at a terminal)")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(hour.checkout)
        os.execvpe("bash", ["bash", "-c", f"exec {command}"], hour.env)
    seen, count, end = "", 0, time.monotonic() + 300
    while time.monotonic() < end:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                seen += os.read(terminal, 65536).decode(errors="replace")
            except OSError:
                break
        elif count < len(typed) and seen.count(PROMPT) > count:
            os.write(terminal, typed[count].encode() + b"\r")
            count += 1
    else:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    text = plain(seen)
    hour.say(text.strip())
    hour.check(f"{command}: exit code {code}", code == 0)
    hour.check(f"{command}: unreadable", UNREADABLE.search(text) is None)
    for words in expected:
        hour.check(f"{command}: nothing says {words!r}", words in text)


def plain(text: str) -> str:
    """What stays to be seen of a terminal's output."""
    text = text.replace(">\x08\x1b[2C", "")  # the prompt, drawn again with what was typed
    text = re.sub(r"[^\n]*\r\x1b\[K", "", text)
    text = re.sub(r"\x1b\[[0-9;?=]*[ -/]*[@-~]|\x1b[=>]", "", text)
    return re.sub(r"\r+\n?", "\n", text)


def install(hour: Hour) -> None:
    """A clone and its environment."""
    hour.type(f"git clone -q {shlex.quote(str(ROOT))} {shlex.quote(str(hour.checkout))}")
    hour.type("make venv")
    hour.type(".venv/bin/octavo --version", last="octavo ")


def serve_and_chat(hour: Hour) -> None:
    """README's two doors: a server, and the terminal."""
    port = free_port()
    command = f'make serve ARGS="--port {port}"'
    process, lines = hour.start(command, "ready at")
    hour.check("the built-in model is fetched at the first start", any("98 MB" in line for line in lines))
    ask(hour, port, BUILT_IN)
    hour.type(f".venv/bin/octavo serve --port {port}", code=1, last="is in use")
    hour.end(process, command, signal.SIGINT, code=-signal.SIGINT)  # make ends by the signal itself
    typed = ["/help", "What is the capital of France?", "/bye"]
    converse(hour, ".venv/bin/octavo chat", typed, ["/system", "/clear", "of France?"])


def get_and_keep(hour: Hour) -> None:
    """pull, interrupted and resumed; list, run, rm; names that mean nothing."""
    repos = hour.home.parent / "hub"
    (repos / "me" / "smol").mkdir(parents=True)
    built_in = next((hour.home / ".cache" / "octavo").glob("*.gguf"))
    shutil.copy(built_in, repos / "me" / "smol" / "smol-Q4_1.gguf")
    hub = f"{shlex.quote(sys.executable)} -m tests.support.hub {repos} --bytes-per-s {SPEED}"
    process, lines = hour.start(hub, "http://")
    hour.env["HF_ENDPOINT"] = lines[-1]
    octavo = ".venv/bin/octavo"
    pull = f"{octavo} pull me/smol:Q4_1"
    pulling, _ = hour.start(pull, "fetching me/smol")
    time.sleep(3)
    hour.end(pulling, pull, signal.SIGINT, code=130)
    hour.check("the unfinished model is listed", "unfinished" in hour.type(f"{octavo} list"))
    hour.check("the pull goes on", "of it here already" in hour.type(pull, last="smol-Q4_1.gguf"))
    answer = hour.type(f'{octavo} run me/smol:Q4_1 "Give me the capital of France." --max-tokens 24')
    hour.check("it answers", bool(answer.strip()))
    hour.type(f"{octavo} list")
    hour.type(f"{octavo} rm -y me/smol:Q4_1", last="removed me/smol:Q4_1")
    hour.type(f"{octavo} rm -y me/smol:Q4_1", code=1, last="is not in the cache folder")
    hour.type(f"{octavo} list")
    hour.type(f"{octavo} pull me/smol:Q8_0", code=1, last="it has Q4_1")
    hour.type(f"{octavo} serve my-org/smollm2", code=1, last="no such model as my-org/smollm2, or it needs HF_TOKEN")
    hour.type(f"{octavo} pull", code=1, last="set OCTAVO_CACHE to a folder that can", OCTAVO_CACHE="/proc/nowhere")
    hour.end(process, "the hub's stand-in", signal.SIGTERM, code=-signal.SIGTERM)
    hour.type(f"{octavo} pull me/smol", code=1, last="cannot be reached")


def offline(hour: Hour) -> None:
    """README's script, and a file of it that has neither `with` nor `close`."""
    hour.env["HF_HUB_OFFLINE"] = "1"
    (hour.checkout / "hello.py").write_text(SCRIPT)
    hour.say("\n$ cat hello.py\n" + SCRIPT.rstrip())
    hour.check("the script answers", "The capital of France is" in hour.type(".venv/bin/python hello.py"))
    hour.type(".venv/bin/octavo pull me/smol", code=1, last="HF_HUB_OFFLINE says not to ask")


def route(hour: Hour) -> None:
    """Two servers behind one address."""
    first, second, front = free_port(), free_port(), free_port()
    servers = [f".venv/bin/octavo serve --port {port} --kv-events --kv-cache-memory 256MiB" for port in (first, second)]
    running = [hour.start(command, "ready at")[0] for command in servers]
    command = f".venv/bin/octavo route --plain http://127.0.0.1:{first} http://127.0.0.1:{second} --port {front}"
    router, _ = hour.start(command, "ready at")
    ask(hour, front, BUILT_IN)
    hour.end(router, command, signal.SIGINT)
    for process, server in zip(running, servers, strict=True):
        hour.end(process, server, signal.SIGTERM)


def main() -> int:
    """All of it; the number of things that were wrong decides the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a shell hears none
    own = len(sys.argv) < 2
    work = Path(tempfile.mkdtemp(prefix="first-hour-") if own else sys.argv[1]).resolve()
    hour, start = Hour(work), time.monotonic()
    try:
        for part in (install, serve_and_chat, get_and_keep, offline, route):
            hour.say(f"\n== {(part.__doc__ or '').splitlines()[0]}")
            part(hour)
    finally:
        hour.close()
        if own:
            shutil.rmtree(work, ignore_errors=True)
    hour.say(f"\n{len(hour.wrong)} things were wrong, in {time.monotonic() - start:.0f} s")
    return 1 if hour.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
