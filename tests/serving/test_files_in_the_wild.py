"""GGUF files and folders whose vocabulary is not what the model's table or its keys say, served as they are."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ClientError, LoadError
from octavo.serving.startup import open_offline
from tests.entrypoints.test_cli import octavo
from tests.inputs.builders import gguf_of_bpe
from tests.support.checkpoints import tiny_llama
from tests.support.fixture_tokenizers import CHATML, trained_bpe
from tests.support.gguf_files import write_gguf
from tests.support.live import live

SMALL: dict[str, Any] = {"max_model_len": 64, "num_threads": 1, "num_kv_blocks": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def gguf(path: Path, *more: tuple[str, int], template: str | None = CHATML, **changes: Any) -> Path:
    """A Llama with the vocabulary of the fixtures and `more` entries (text, type); `changes` are tokenizer keys."""
    core = trained_bpe(512, adds_bos=False)
    metadata = gguf_of_bpe(core, "gpt-2")
    for key in ("bos_token_id", "eos_token_id"):  # written from config.json
        del metadata[f"tokenizer.ggml.{key}"]
    metadata["tokenizer.ggml.tokens"] += [text for text, _ in more]
    metadata["tokenizer.ggml.token_type"] += [kind for _, kind in more]
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(tiny_llama(vocab_size=512 + len(more)), path, metadata=metadata)


@pytest.mark.parametrize(("end", "kind"), [("<|im_end|>", 3), ("<|eot_id|>", 1), ("<end_of_turn>", 4), ("<EOT>", 1), ("<|end|>", 3)])  # fmt: skip
def test_a_turn_ends_where_the_template_ends_it(tmp_path: Path, end: str, kind: int) -> None:
    """F05: the only id key names </s>; the answer stops all the same, hides the end, and leaks no next turn."""
    more = () if end == "<|im_end|>" else ((end, kind),)
    path = gguf(tmp_path / "m.gguf", *more, template=CHATML.replace("<|im_end|>", end))
    with LLM(str(path), **SMALL) as llm:
        index = 3 if end == "<|im_end|>" else 512
        answer = llm.chat([{"role": "user", "content": "hi"}], GREEDY.replace(logit_bias={index: 100.0}))[0]
        (output,) = answer.outputs
        assert (output.text, output.finish_reason) == ("", "stop")
        goes_on = GREEDY.replace(logit_bias={index: 100.0}, ignore_eos=True)
        assert llm.chat([{"role": "user", "content": "hi"}], goes_on)[0].outputs[0].finish_reason == "length"


def test_a_folder_ends_turns_as_its_template_does() -> None:
    """F05: tokenizer.json and config.json name </s> only, and the template writes <|im_end|>."""
    with LLM(str(tiny_llama()), **SMALL) as llm:
        output = llm.chat([{"role": "user", "content": "hi"}], GREEDY.replace(logit_bias={3: 100.0}))[0].outputs[0]
        assert (output.text, output.finish_reason) == ("", "stop")


def test_repeated_entries_are_prompted_and_sampled(tmp_path: Path) -> None:
    """F06: ids beyond the number of different texts."""
    path = gguf(tmp_path / "m.gguf", ("[PAD]", 5), ("[PAD]", 5), ("the", 1), ("[PAD]", 5), template=None)
    with LLM(str(path), **SMALL) as llm:
        params = GREEDY.replace(allowed_token_ids=(515,), max_tokens=2)
        (output,) = llm.generate({"prompt_token_ids": [515, 513, 514]}, params)
        assert list(output.outputs[0].token_ids) == [515, 515]
        assert output.outputs[0].text == "[PAD][PAD]"
        with pytest.raises(ClientError, match=r"prompt\[0\] is 516, .*ids are 0 to 515"):
            llm.generate({"prompt_token_ids": [516]}, params)


def larger_vocabulary(folder: Path) -> Path:
    """A model of 500 rows with a tokenizer of 503 entries: ids 500 to 502 have no row."""
    tiny_llama(folder, vocab_size=500)
    state = json.loads((folder / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    state["added_tokens"] += [{"id": 500 + i, "content": f"<|extra_{i}|>", **plain} for i in range(3)]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


BEYOND: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": [5, 6, 501]}),
    ("prompt", {"prompt": [[5, 6], [502]]}),
    ("prompt", {"prompt": "a <|extra_1|> b"}),
    ("allowed_token_ids", {"allowed_token_ids": [5, 501]}),
    ("logit_bias", {"logit_bias": {"501": 1.0}}),
    ("stop_token_ids", {"stop_token_ids": [501]}),
    ("bad_words", {"bad_words": ["<|extra_1|>"]}),
]


def test_ids_without_a_row_in_the_model_are_refused_at_every_door(tmp_path: Path) -> None:
    """F07: a 400 with the id and the limit, before the engine; the next request is served."""
    folder = larger_vocabulary(tmp_path / "m")
    with live(folder, **SMALL) as server:
        for field, body in BEYOND:
            answer = server.post("/v1/completions", **{"prompt": [5], "max_tokens": 2, **body})
            assert answer.status_code == 400, (body, answer.text)
            error = answer.json()["error"]
            assert error["param"] == field, (body, error)
            assert "50" in error["message"] and "ids" in error["message"] and "0 to 499" in error["message"], error
        said = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "<|extra_1|>"}], max_tokens=2)
        assert said.status_code == 400 and "0 to 499" in said.json()["error"]["message"]
        assert server.complete([5, 6, 499], max_tokens=2, min_tokens=2)["usage"]["completion_tokens"] == 2
        assert server.post("/detokenize", tokens=[501]).json()["prompt"] == "<|extra_1|>"
    with LLM(str(folder), **SMALL) as llm:
        for field, body in BEYOND:
            prompt = body.get("prompt", [5])
            prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
            asked: Any = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
            fields = {name: {501: 1.0} if name == "logit_bias" else v for name, v in body.items() if name != "prompt"}
            with pytest.raises(ClientError, match="0 to 499") as caught:
                llm.generate(asked, SamplingParams(max_tokens=2, **fields))
            assert caught.value.param == field


def test_an_end_without_a_row_is_never_asked_for(tmp_path: Path) -> None:
    """F07: an id key that points beyond the table does no harm to a request that holds its end back."""
    folder = larger_vocabulary(tmp_path / "m")
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [1, 501]}))
    with LLM(str(folder), **SMALL) as llm:
        (output,) = llm.generate("a b c", SamplingParams(max_tokens=4, min_tokens=4, temperature=0))
        assert len(output.outputs[0].token_ids) == 4


def test_a_folder_with_one_gguf_file_is_served_whole(tmp_path: Path) -> None:
    """F63: facts, tokenizer and chat template are those of the file; a README beside it does not matter."""
    path = gguf(tmp_path / "m.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(path, folder / "any-name.gguf")
    (folder / "README.md").write_text("# a model")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answers = []
    for place in (path, folder):
        with LLM(str(place), **SMALL) as llm:
            answers.append(
                [o.outputs[0].text for o in (*llm.generate("Once upon", GREEDY), *llm.chat(messages, GREEDY))]
            )
    assert answers[0] == answers[1]
    shutil.copy(path, folder / "another.gguf")
    with pytest.raises(LoadError, match="holds 2 GGUF files"):
        LLM(str(folder), **SMALL)


def test_a_guessed_pre_tokenizer_is_said_by_start_and_plan(tmp_path: Path) -> None:
    """F04: with the rule and the flag; and not any more once the flag is given."""
    path = gguf(tmp_path / "m.gguf", pre=None)
    done = octavo("plan", str(path), "--max-model-len", "64")
    assert done.returncode == 0, done.stderr
    assert "the rule 'default' is used" in done.stdout and "--pre-tokenizer" in done.stdout
    done = octavo("plan", str(path), "--pre-tokenizer", "gpt-3")
    assert done.returncode != 0 and "--pre-tokenizer is 'gpt-3', which is not known" in done.stderr
    for flag, says in (({}, True), ({"pre_tokenizer": "gpt-2"}, False)):
        lines: list[str] = []
        open_offline({"model": str(path), **SMALL, **flag}, lines.append).close()
        assert any("the rule 'default' is used" in line for line in lines) is says
