"""What holds around every test."""

import signal
import sys

import pytest

# A shell's background job ignores Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_forward_context_is_left_behind():
    """The one ambient value is empty after every test; the module is looked up, not imported, so that tests without
    torch stay without it."""
    yield
    module = sys.modules.get("octavo.forward.context")
    assert module is None or not module.is_entered(), "a test left a forward context entered"
