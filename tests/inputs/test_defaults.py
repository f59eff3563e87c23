"""The author's recommended sampling parameters (INP-22)."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo.base.errors import ConfigError, LoadError
from octavo.inputs.defaults import load_default_sampling


def folder(path: Path, **values: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(values))
    return str(path)


def test_recommendations_are_read_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = folder(tmp_path, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=2, do_sample=True, min_p=None)
    with caplog.at_level(logging.INFO):
        assert load_default_sampling(source) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert "temperature=0.6, top_p=0.95, top_k=20" in caplog.text


def test_neutral_ignores_them_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load_default_sampling(folder(tmp_path, temperature=0.6), "neutral") == {}
    assert "neutral" in caplog.text


def test_another_folder_may_be_named(tmp_path: Path) -> None:
    model, other = folder(tmp_path / "a", temperature=0.6), folder(tmp_path / "b", repetition_penalty=1.1)
    assert load_default_sampling(model, other) == {"repetition_penalty": 1.1}
    with pytest.raises(ConfigError, match=r"no generation_config\.json"):
        load_default_sampling(model, str(tmp_path / "c"))


def test_a_model_without_recommendations(tmp_path: Path) -> None:
    assert load_default_sampling(str(tmp_path)) == {}


def test_wrong_values_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_default_sampling(folder(tmp_path, temperature=-1, top_p="x", top_k=5)) == {"top_k": 5}
    assert "temperature" in caplog.text and "top_p" in caplog.text


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(LoadError, match=r"generation_config\.json is not valid JSON"):
        load_default_sampling(str(tmp_path))


def test_gguf_files_may_recommend_too(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert load_default_sampling(str(path)) == {"temperature": 0.6, "top_k": 20}
