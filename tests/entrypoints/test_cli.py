"""Help and version are instant and need no accelerator; a wrong word suggests the right one (CLI-01)."""

import os
import resource
import socket
import subprocess
import sys
import time

import pytest

from octavo.config.args import options
from octavo.entrypoints.commands.arguments import BENCH, commands, completed
from tests.support import checkpoints

COMMANDS = {name: completed(name, command) for name, command in commands().items()}


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
    """Of processor time, so that a busy neighbour does not count."""
    best = float("inf")
    for _ in range(3):
        start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        assert octavo(*args).returncode == 0
        best = min(best, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start)
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


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.sections])
def test_f67_help_is_short_and_about_the_command_and_all_is_shown_when_asked(name):
    """F67: what most people need fits two screens; the rest is one word away."""
    short = octavo(name, "--help").stdout
    assert len(short.splitlines()) <= 48
    assert max(map(len, short.splitlines())) <= 80
    assert 0 < len(COMMANDS[name].common) <= 10
    assert all("--" + option.replace("_", "-") in short for option in COMMANDS[name].common)
    assert f"more options: 'octavo {name} --help all'" in short
    full = octavo(name, "--help", "all")
    assert (full.returncode, full.stderr) == (0, "")
    assert full.stdout == octavo(name, "--help-all").stdout
    assert max(map(len, full.stdout.splitlines())) <= 80
    listed = full.stdout.replace("--[no-]", "--")
    assert all(option.flag in listed for option in options(COMMANDS[name].sections).values())


def test_f67_chat_s_help_is_about_chat():
    text = octavo("chat", "--help").stdout
    assert "--system" in text and "--temperature" in text
    assert "--kv-tier" not in text and "--port" not in text


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
    # as the page of options writes them, so that they can be copied
    for name, value in (("--max-request-bytes", "32MiB"), ("--multiprocessing", "on"), ("--drain-timeout-s", "15")):
        assert rows[name].split()[1] == value
    assert rows["--kv-cache-memory"].split()[1].endswith("iB")


def test_plan_says_in_words_what_weights_and_layers_are_and_how_many_requests_may_run():
    done = octavo("plan", str(checkpoints.tiny_llama()), "--max-num-seqs", "7")
    assert done.returncode == 0, done.stderr
    assert " in bfloat16" in done.stdout and "layers with full attention" in done.stdout
    assert "Spec" not in done.stdout
    assert "at once        7 requests at most (--max-num-seqs)" in done.stdout


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


@pytest.mark.parametrize("command", [["collect-env"], ["plugins"], ["explain-config", "{model}"]], ids=lambda c: c[0])
def test_f65_a_foreign_variable_is_a_warning_once_in_every_command(command):
    """F65: and in its place, standard error."""
    command = [word.format(model=checkpoints.tiny_llama()) for word in command]
    done = octavo(*command, OCTAVO_TEAM="red")
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("ignored") == 1
    assert "octavo: warning: OCTAVO_TEAM in the environment is no option" in done.stderr
    done = octavo(*command, OCTAVO_MAX_MODELLEN="5")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("did you mean OCTAVO_MAX_MODEL_LEN?")


def test_f65_a_foreign_variable_is_a_warning_to_a_script():
    code = (
        f"from octavo import LLM\nllm = LLM({str(checkpoints.tiny_llama())!r}, num_threads=1, max_model_len=64, "
        "enforce_eager=True)"
    )
    env = {**os.environ, "OCTAVO_TEAM": "red"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "not needed here, and ignored: enforce_eager",
        "OCTAVO_TEAM in the environment is no option of Octavo, and ignored",
    ]
