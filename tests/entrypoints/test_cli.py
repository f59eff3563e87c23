"""Help and version are instant and need no accelerator; a wrong word suggests the right one (CLI-01)."""

import os
import pty
import select
import socket
import subprocess
import sys
import time

import pytest

from octavo.entrypoints.commands.arguments import BENCH, COMMANDS
from tests.support import checkpoints


def octavo(*args, timeout_s=60, **env):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "octavo.entrypoints.cli", *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **env},
    )


def best_seconds(*args):
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        assert octavo(*args).returncode == 0
        best = min(best, time.perf_counter() - start)
    return best


def test_cli01_help_is_instant_and_on_standard_output_alone():
    assert best_seconds("--help") < 0.5
    done = octavo("--help")
    assert done.stderr == ""
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_cli01_help_of_each_command_is_quick(name):
    assert best_seconds(name, "--help") < 1.5
    done = octavo(name, "--help")
    assert done.stderr == ""
    assert done.stdout.startswith(f"usage: octavo {name}")


@pytest.mark.parametrize("part", BENCH)
def test_cli01_help_of_each_part_of_the_benchmark_command_is_as_quick(part):
    assert best_seconds("bench", part, "--help") < 1.5
    done = octavo("bench", part, "--help")
    assert done.stderr == ""
    assert done.stdout.startswith(f"usage: octavo bench {part}")
    assert part in octavo("bench", "--help").stdout


def test_cli01_version():
    done = octavo("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("octavo 0.")


def test_cli01_help_imports_no_torch_and_no_server():
    code = (
        "import sys\nfrom octavo.entrypoints.cli import main\nmain(['--help'])\n"
        "sys.stderr.write(str([m for m in ('torch', 'fastapi', 'uvicorn', 'transformers', 'zmq') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["srve"], "did you mean 'serve'"),
        (["bench", "latncy"], "did you mean 'bench latency'"),
        (["bench", "latency", "--max-modellen", "5"], "did you mean --max-model-len"),
        (["serve", "--max-modellen", "5"], "did you mean --max-model-len"),
        (["serve", "--max-modellen=5"], "did you mean --max-model-len"),
        (["chat", "--prot", "5"], "unknown option --prot"),
        (["serve", "--max-num-seqs", "many"], "--max-num-seqs must be a whole number"),
        (["serve", "--port"], "expected one argument"),
        (["pull", "a", "b"], "unknown option b"),
    ],
)
def test_cli01_wrong_usage_is_one_sentence_and_exit_code_2(argv, words):
    done = octavo(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_no_arguments_show_help_and_exit_code_2():
    done = octavo()
    assert done.returncode == 2
    assert "usage: octavo" in done.stdout


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def truncated(tmp_path):
    folder = tmp_path / "short"
    checkpoints.tiny_llama(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    return [str(folder)]


def unknown_architecture(tmp_path):
    folder = tmp_path / "odd"
    checkpoints.tiny_llama(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "LlamoForCausalLM").replace('"llama"', '"llamo"'))
    return [str(folder)]


def impossible_memory(_):
    return [str(checkpoints.tiny_llama()), "--kv-cache-memory", "9999GiB"]


def too_little_memory(_):
    return [str(checkpoints.tiny_llama()), "--max-model-len", "2048", "--num-kv-blocks", "3", "--block-size", "16"]


def too_many_blocks(_):
    return [str(checkpoints.tiny_llama()), "--num-kv-blocks", "999999999"]


def wrong_path(tmp_path):
    return [str(tmp_path / "nothing" / "here")]


def not_a_model(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"hello, I am not a model")
    return [str(file)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (wrong_path, "nothing/here"),
        (not_a_model, "x.gguf"),
        (truncated, "model.safetensors"),
        (unknown_architecture, "LlamoForCausalLM"),
        (impossible_memory, "--kv-cache-memory"),
        (too_many_blocks, "--num-kv-blocks"),
        (too_little_memory, "max_model_len"),
    ],
)
def test_a_failed_start_ends_with_one_sentence_with_cause_and_remedy(tmp_path, make, words):
    done = octavo("serve", *make(tmp_path), "--port", str(free_port()))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("octavo: ")
    assert words in last
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start = time.perf_counter()
        done = octavo("serve", str(checkpoints.tiny_llama()), "--port", str(port))
        seconds = time.perf_counter() - start
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr.strip().splitlines()[-1]
    assert seconds < 5


def test_explain_config_shows_each_setting_with_source_and_reason():
    done = octavo("explain-config", str(checkpoints.tiny_llama()), "--max-num-seqs", "7", OCTAVO_SEED="3")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert rows["--max-num-seqs"].split()[1:3] == ["7", "flag"]
    assert rows["--seed"].split()[1:3] == ["3", "environment"]
    assert "decided" in rows["--dtype"]
    assert "default" in rows["--port"]


def test_collect_env_names_versions_and_the_device():
    done = octavo("collect-env")
    assert done.returncode == 0
    for word in ("octavo: 0.", "torch: 2.", "device:", "memory:", "cores for this process:"):
        assert word in done.stdout


def test_complete_prints_the_continuation_alone():
    done = octavo(
        "complete", "hello", "--model", str(checkpoints.tiny_llama()), "--max-tokens", "4", "--temperature", "0"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    again = octavo(
        "complete", "hello", "--model", str(checkpoints.tiny_llama()), "--max-tokens", "4", "--temperature", "0"
    )
    assert again.stdout == done.stdout


def test_chat_answers_one_message():
    done = octavo("chat", str(checkpoints.tiny_llama()), "-m", "hello", "--max-tokens", "4", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert "octavo:" not in done.stdout


class Terminal:
    """`octavo chat` on a terminal of its own."""

    def __init__(self, *args):
        self.unread = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "octavo.entrypoints.cli", "chat", *args])

    def until(self, words, timeout_s=180):
        """Read up to these words; what follows them is kept for the next time."""
        end = time.monotonic() + timeout_s
        while words not in self.unread:
            assert select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0], self.unread
            self.unread += os.read(self.fd, 4096)
        self.unread = self.unread.partition(words)[2]

    def type(self, keys):
        os.write(self.fd, keys)

    def leave(self, keys, timeout_s=30):
        """Type these keys, again after two seconds as a person would, until the program ends; its exit code.

        Python's readline misses an interrupt that comes between its prompt and its wait for a key.
        """
        end, again = time.monotonic() + timeout_s, 0.0
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(self.pid, 9)
                os.waitpid(self.pid, 0)
                pytest.fail("chat did not leave")
            if time.monotonic() > again:
                self.type(keys)
                again = time.monotonic() + 2
            time.sleep(0.05)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(done[1])


@pytest.mark.parametrize("leave", [b"\x03", b"\x04", b"/quit\n"])
def test_chat_leaves_from_its_prompt_and_a_message_too_long_is_not_the_end(leave):
    chat = Terminal(str(checkpoints.tiny_llama()), "--max-tokens", "4", "--max-model-len", "64", "--temperature", "0")
    chat.until(b"> ")
    chat.type(b"word " * 100 + b"\n")
    chat.until(b"/reset forgets what was said")
    chat.until(b"> ")
    chat.type(b"hello\n")
    chat.until(b"hello")  # as typed
    chat.until(b"\n> ")
    assert chat.leave(leave) == 0
