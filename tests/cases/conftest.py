"""Servers that the cases share: one for a session each, the whole engine behind real HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import checkpoints
from tests.support.live import Live, live
from tests.support.truth import Reference


@pytest.fixture(scope="session")
def chat_path() -> Path:
    """SmolLM2-135M-Instruct in float32."""
    return checkpoints.smollm2_f32()


@pytest.fixture(scope="session")
def reference(chat_path: Path) -> Reference:
    """Transformers on the same checkpoint."""
    return Reference(chat_path)


@pytest.fixture(scope="session")
def chat135m(chat_path: Path) -> Iterator[Live]:
    """`chat135m`: prefix caching on, blocks of 16."""
    with live(
        chat_path, max_model_len=2048, num_kv_blocks=1024, served_model_name=("chat135m",), num_threads=1
    ) as server:
        yield server


@pytest.fixture(scope="session")
def tiny() -> Iterator[Live]:
    """`tiny-llama`."""
    path = checkpoints.tiny_llama()
    with live(path, num_kv_blocks=4096, num_threads=1, served_model_name=("tiny",), max_num_seqs=64) as server:
        yield server
