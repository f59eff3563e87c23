"""One toy server for all tests of a module that need nothing special."""

from collections.abc import Iterator

import pytest

from tests.entrypoints.http.toy_server import Served, toy_server


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with toy_server() as server:
        yield server
