"""F52: a script with an `LLM` ends by itself, quietly, however it ends.

Real processes with the real engine: what is checked is what a person sees at the end of a script.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import checkpoints

HEAD = """
import os, signal, sys, threading, time
from octavo import LLM, SamplingParams
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)
def made(**options):
    return LLM(sys.argv[1], num_threads=1, max_model_len=512, num_kv_blocks=64, **options)
def ended():
    # registered before any engine is made, so it runs after whatever an engine does at the end
    print("threads:", sorted(t.name for t in threading.enumerate() if t.name.startswith("octavo")))
import atexit
atexit.register(ended)
"""
ENDS = {
    "several, closed in every way": """
        with made() as one:
            one.generate("x")
        one.close()
        two, three = made(), made()
        two.generate(["hello", "there"])
        three.close(); three.close()
        del three
        four = made()
        del four
        five = made()
        print(len(five.generate(["hello"])))
    """,
    "an exception in a function": """
        def work():
            llm = made()
            llm.generate("hello")
            raise ValueError("mine")
        work()
    """,
    "sys.exit while a thread waits for an answer": """
        llm = made()
        threading.Thread(target=llm.generate, args=(["hello"] * 500, SamplingParams(max_tokens=400, ignore_eos=True)), daemon=True).start()
        while llm.stats().num_running == 0:
            time.sleep(0.01)
        sys.exit(3)
    """,
    "an interrupt": """
        llm = made()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            llm.generate(["hello"] * 200, SamplingParams(max_tokens=400, ignore_eos=True))
    """,
    "a fork that ends by itself": """
        llm = made()
        llm.generate("hello")
        sys.stdout.flush()
        child = os.fork()
        if child:
            print("child:", os.waitpid(child, 0)[1])
            print(len(llm.generate("hello")))
    """,
}
LAST = {"an exception in a function": "ValueError: mine", "an interrupt": "KeyboardInterrupt"}
CODES = {
    "sys.exit while a thread waits for an answer": 3,
    "an exception in a function": 1,
    "an interrupt": -signal.SIGINT,
}


def script(tmp_path, text):
    """A file with `text` after what all of them begin with."""
    lines = [line[8:] for line in text.splitlines()]
    file = tmp_path / "script.py"
    file.write_text(HEAD + "\n".join(lines))
    return file


def run(*args, stdin=None):
    """A Python of its own that shows every warning; what it printed."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore:.*fork.*:DeprecationWarning", *map(str, args)],
        input=stdin, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_f52_a_script_ends_by_itself_and_quietly(tmp_path, name):
    done = run(script(tmp_path, ENDS[name]), checkpoints.tiny_llama())
    last = LAST.get(name)
    if last is None:
        assert done.stderr == ""
    else:  # its own traceback, and nothing after it
        assert done.stderr.startswith("Traceback")
        assert done.stderr.splitlines()[-1] == last
        assert done.stderr.count("Traceback") == 1
    assert done.returncode == CODES.get(name, 0)
    assert done.stdout.splitlines()[-1] == "threads: []", "the engine is closed before the interpreter ends"


def test_f52_an_interpreter_that_holds_the_last_error_ends_quietly(tmp_path):
    """As a notebook does: what failed, and with it the frame that has the engine, is kept until the end."""
    code = "llm = made()\nllm.generate('x')\nimport code\nllm.generate(5)\nprint('still', len(llm.generate('y')))\n"
    done = run("-i", "-q", script(tmp_path, ""), checkpoints.tiny_llama(), stdin=code)
    errors = [line for line in done.stderr.replace(">>> ", "").splitlines() if line.strip()]
    assert errors[-1].startswith("octavo.base.errors.ClientError"), done.stderr
    assert "still 1" in done.stdout
    assert done.stdout.splitlines()[-1] == "threads: []"


def test_f52_an_engine_in_a_process_of_its_own_ends_with_the_script(tmp_path):
    """F66 and OPS-4: `multiprocessing=True` is honoured, and leaves no process behind."""
    text = """
        llm = made(multiprocessing=True)
        print(len(llm.generate(["hello", "there"])))
        print("engine", llm._frontend.client.pid)
    """
    done = run(script(tmp_path, text), checkpoints.tiny_llama())
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines()[0] == "2"
    pid = int(next(line for line in done.stdout.splitlines() if line.startswith("engine")).split()[1])
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")
