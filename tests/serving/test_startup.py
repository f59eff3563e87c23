"""What a server is called when nobody says: a name, never a place on its disk."""

import os
from pathlib import Path

import pytest

from octavo.serving.startup import shown_name
from tests.support import checkpoints
from tests.support.live import live


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("models/Tiny-1.1B", "Tiny-1.1B"),
        ("models/Tiny-1.1B/", "Tiny-1.1B"),
        ("models/Tiny-1.1B/.", "Tiny-1.1B"),
        ("models/tiny.Q4_K_M.gguf", "tiny.Q4_K_M"),
        ("owner/not-on-this-disk", "owner/not-on-this-disk"),
        ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
    ],
)
def test_a_path_is_shown_as_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, shown: str) -> None:  # fmt: skip
    """F64: the last part of a path, with its dots; names that are no paths stay."""
    (tmp_path / "models" / "Tiny-1.1B").mkdir(parents=True)
    (tmp_path / "models" / "tiny.Q4_K_M.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert shown_name(given) == shown
    if given.startswith("models"):
        assert shown_name(str(tmp_path / given)) == shown


def test_the_folder_one_stands_in_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F64."""
    (tmp_path / "a-model" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a-model")
    assert shown_name(".") == "a-model"
    monkeypatch.chdir(tmp_path / "a-model" / "inner")
    assert shown_name("..") == "a-model"


def test_no_client_sees_where_the_model_lies() -> None:
    """F64: the list of models, answers, errors and metrics name the model by its folder's name."""
    path = checkpoints.tiny_llama()
    with live(path, max_model_len=64, num_threads=1) as server:
        assert server.model == path.name
        card = server.http.get("/v1/models").json()["data"][0]
        assert (card["id"], card["root"]) == (path.name, path.name)
        assert server.complete([5, 6], max_tokens=1)["model"] == path.name
        told = [
            server.http.get("/v1/models").text,
            server.http.get("/metrics").text,
            server.http.get("/openapi.json").text,
            server.http.post("/v1/completions", json={"model": "other", "prompt": "a"}).text,
            server.http.post("/v1/completions", json={"prompt": [10**6]}).text,
        ]
        assert not [text for text in told if str(path.parent) + os.sep in text]


def test_a_given_name_wins() -> None:
    """F64."""
    with live(checkpoints.tiny_llama(), max_model_len=64, num_threads=1, served_model_name=("mine",)) as server:
        assert server.model == "mine"
