"""Folders that only Transformers can read go through a child process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.base.errors import LoadError, ServerError
from octavo.inputs.tokenizer import load_tokenizer
from octavo.inputs.tokenizer_fast import FastTokenizer
from octavo.inputs.tokenizer_hf import ChildTokenizer
from tests.inputs.builders import TEXTS, sentencepiece_model


def llama_folder(folder: Path) -> Path:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model("bpe"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def bytes_folder(folder: Path) -> Path:
    """A tokenizer without a fast form: it is Python code inside Transformers."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}))
    return folder


def test_a_sentencepiece_model_is_handed_over_and_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = llama_folder(tmp_path)
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, FastTokenizer)
    for text in (*TEXTS, "<s>a b</s> c"):
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.template_variables["bos_token"] == "<s>"


def test_a_tokenizer_without_a_fast_form_is_asked_in_its_process(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = bytes_folder(tmp_path)
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, ChildTokenizer)
    try:
        for text in ("Hello wörld", "a\n\nb", "</s>x"):
            for special in (True, False):
                ids = theirs.encode(text, add_special_tokens=special)
                assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode([*ours.encode("ab", add_special_tokens=False), 10**6, -4]) == "ab"
        assert ours.encode("\ud800", add_special_tokens=False) == theirs.encode("\ufffd", add_special_tokens=False)
        os.kill(
            ours._child._process.pid, signal.SIGINT
        )  # F71: in octavo chat it ends an answer, and reaches every process
        assert ours.encode("ab", add_special_tokens=False) == theirs.encode("ab", add_special_tokens=False)
        assert ours.vocab_size == len(theirs)
        assert ours.eos_token_id == theirs.eos_token_id in ours.special_ids
        assert not ours.adds_bos
        assert ours.token_text(ours.encode("x")[0]) == "x"
        assert ours.token_bytes(ours.encode("x")[0]) == b"x"
        assert ours.open_stream(skip_special_tokens=True) is None
        assert ours.protect("</s>") == ours.unprotect("</s>") == "</s>"
    finally:
        ours.close()
    with pytest.raises(ServerError, match="child process has ended"):
        ours.encode("again")


@pytest.mark.parametrize(
    "files", [(), ("tokenizer_config.json",), ("tokenizer_config.json", "special_tokens_map.json")]
)
def test_a_folder_without_any_tokenizer_is_named_at_once(tmp_path: Path, files: tuple[str, ...]) -> None:
    """F62: also where settings of a tokenizer are there: no extra of ours would help."""
    for name in files:
        (tmp_path / name).write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}))
    with pytest.raises(LoadError, match=r"holds no tokenizer\.json, tokenizer\.model or vocab\.json") as caught:
        load_tokenizer(str(tmp_path))
    assert "extra" not in str(caught.value)


def test_a_damaged_model_gives_the_reason_and_no_stack(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(b"\x00damaged")
    with pytest.raises(LoadError, match="cannot be read") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def test_the_child_ends_with_its_input(tmp_path: Path) -> None:
    """No orphans: when the parent goes, its end of the pipe closes, and so does the child."""
    folder = bytes_folder(tmp_path)
    command = [sys.executable, "-m", "octavo.inputs.tokenizer_hf", str(folder)]
    run = subprocess.run(command, input="", capture_output=True, text=True, timeout=120, check=True)
    hello = json.loads(run.stdout)
    assert hello["vocab_size"] > 256
