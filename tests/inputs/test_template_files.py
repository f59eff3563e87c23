"""Chat templates are found wherever a model keeps them."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.inputs.template_files import read_templates, read_variables


def config(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_a_string_and_a_list_in_the_configuration(tmp_path: Path) -> None:
    config(tmp_path, chat_template="a")
    assert read_templates(str(tmp_path)) == {"default": "a"}
    config(tmp_path, chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])
    assert read_templates(str(tmp_path)) == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("value", [5, [5], [{"name": 5}], [{"template": "a"}], [{"name": "x", "template": None}], []])
def test_what_is_no_template_is_left_out(tmp_path: Path, value: Any) -> None:
    config(tmp_path, chat_template=value)
    assert read_templates(str(tmp_path)) == {}


def test_files_of_their_own_come_first(tmp_path: Path) -> None:
    config(tmp_path, chat_template="a")
    (tmp_path / "chat_template.jinja").write_text("Größe")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert read_templates(str(tmp_path)) == {"default": "Größe", "rag": "r"}


def test_the_older_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert read_templates(str(tmp_path)) == {"default": "j"}


def test_nothing_is_no_error(tmp_path: Path) -> None:
    assert read_templates(str(tmp_path)) == {}
    assert read_templates(str(tmp_path / "missing")) == {} == read_variables(str(tmp_path / "missing"))


@pytest.mark.parametrize("value", ["<x>", {"content": "<x>", "special": True}])
def test_special_tokens_by_their_names(value: Any, tmp_path: Path) -> None:
    config(tmp_path, eos_token=value, add_bos_token=True, pad_token=None, extra_special_tokens={"image_token": "<i>"})
    assert read_variables(str(tmp_path)) == {"eos_token": "<x>", "image_token": "<i>"}


def test_gguf_metadata(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(99)
    writer.add_chat_template([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_templates(str(path)) == {"default": "d", "tool_use": "t"}
    assert read_variables(str(path)) == {"bos_token": "<s>", "eos_token": "</s>"}
