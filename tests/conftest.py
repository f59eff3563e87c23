"""What holds around every test."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_forward_context_is_left_behind():
    """The one ambient value is empty after every test; the module is looked up, not imported, so that tests without
    torch stay without it."""
    yield
    module = sys.modules.get("octavo.forward.context")
    assert module is None or not module.is_entered(), "a test left a forward context entered"
