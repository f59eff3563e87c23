"""A look into a process that hangs needs no thread that hangs (OPS-3)."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence

from octavo.engine.dump import TRIES, held_back, looked_at

SCRIPT = """
import ctypes, sys, threading, time
from octavo.engine.dump import HangDump
dump = HangDump("test")
{install}
dump.describe = lambda: ["all is quiet"]
print("here", flush=True)
{hang}
"""
STUCK = """
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""  # for ever


def stderr_of(install: str, hang: str, end: str) -> str:
    """What a process that does this writes to standard error, once it was signalled, until it has written `end`."""
    script = textwrap.dedent(SCRIPT).format(install=install, hang=hang)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    guard = threading.Timer(60, process.kill)
    guard.start()
    try:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGUSR1)
        told = ""
        while end not in told and (line := process.stderr.readline()):
            told += line
        return told
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_a_main_thread_that_is_stuck_holds_up_nothing():
    """In native code that goes on waiting after a signal, where no handler of the interpreter runs."""
    told = stderr_of("dump.write_from_a_thread()", STUCK, "all is quiet")
    assert "Current thread" in told and told.rstrip().endswith("octavo: dump: all is quiet")


def test_stacks_are_shown_while_native_code_holds_the_interpreters_lock():
    hang = "threading.Thread(target=lambda: ctypes.PyDLL(None).sleep(1000)).start()\ntime.sleep(1000)"
    told = stderr_of("dump.write_from_a_thread()", hang, 'File "<string>", line')
    assert "most recent call first" in told and "all is quiet" not in told


def test_without_its_own_thread_the_main_one_writes():
    told = stderr_of("", "time.sleep(1000)", "all is quiet")
    assert "Current thread" in told and "(test), whose stacks stand above:" in told


def test_a_process_that_is_not_ready_to_write_keeps_the_signal():
    """It came to a process that had only just started, and ended it."""
    with held_back():
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(1)\n"
             "from octavo.engine.dump import HangDump; HangDump('late'); print('alive')"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert process.stdout.readline() == "here\n"
    os.kill(process.pid, signal.SIGUSR1)
    out, told = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "alive\n")
    assert "the engine has not started yet" in told
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_what_changes_while_it_is_looked_at_is_looked_at_again():
    calls = iter(range(100))

    def describe() -> Sequence[str]:
        if next(calls) < 3:
            raise RuntimeError("dictionary changed size during iteration")
        return ["steady"]

    def never() -> Sequence[str]:
        next(calls)
        raise RuntimeError("still changing")

    assert looked_at(describe) == ["steady"]
    assert "still changing" in looked_at(never)[0]
    assert next(calls) == 4 + TRIES
