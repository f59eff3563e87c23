"""One way in for all doors: BOS, ids, chats, threads (INP-3, TPL-04, API-05)."""

import asyncio
import json
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from octavo.base.errors import ClientError
from octavo.inputs.chat import ChatTemplate, load_chat_template
from octavo.inputs.renderer import EngineInput, Renderer
from octavo.inputs.tokenizer import load_tokenizer
from octavo.inputs.tokenizer_fast import FastTokenizer, SpecialTokens
from tests.inputs.builders import SPECIALS, byte_bpe, save_folder
from tests.support.checkpoints import smollm2_gguf

BODY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # fmt: skip
WITH_BOS = "{{ bos_token }}" + BODY
USER = [{"role": "user", "content": "hi"}]
BOS = 0


def make(template: str = BODY, *, adds_bos: bool = True, **options: Any) -> Renderer:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = FastTokenizer(byte_bpe(adds_bos=adds_bos), SpecialTokens(bos="<s>", eos="</s>", named=named))
    return Renderer(tokenizer, ChatTemplate({"default": template}), **options)


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    made = make()
    yield made
    made.close()


class TestBos:
    """TPL-04: no doubled BOS."""

    @pytest.mark.parametrize("template", [BODY, WITH_BOS])
    def test_a_chat_begins_with_exactly_one(self, template: str) -> None:
        ids = make(template).chat(USER).prompt_token_ids
        assert ids[0] == BOS and ids.count(BOS) == 1

    @pytest.mark.parametrize("template", [BODY, WITH_BOS])
    def test_a_tokenizer_that_adds_none_leaves_it_to_the_template(self, template: str) -> None:
        ids = make(template, adds_bos=False).chat(USER).prompt_token_ids
        assert ids.count(BOS) == (template == WITH_BOS)

    def test_a_prompt_gets_one_unless_told_otherwise(self, renderer: Renderer) -> None:
        assert renderer.text("hi").prompt_token_ids.count(BOS) == 1
        assert BOS not in renderer.text("hi", add_special_tokens=False).prompt_token_ids

    def test_a_rendered_text_keeps_its_own(self, renderer: Renderer) -> None:
        text = renderer.template.apply(USER, bos_token="<s>")
        assert renderer.text("<s>" + text).prompt_token_ids == renderer.text(text).prompt_token_ids
        assert renderer.text("<s><s>a").prompt_token_ids.count(BOS) == 2, "what was written twice is kept"

    def test_the_switch_is_obeyed_in_chats(self) -> None:
        plain = make(BODY).chat(USER, add_special_tokens=False).prompt_token_ids
        assert BOS not in plain
        assert make(WITH_BOS).chat(USER, add_special_tokens=False).prompt_token_ids == (BOS, *plain)
        assert make(WITH_BOS).chat(USER, add_special_tokens=True).prompt_token_ids == (BOS, *plain)


def test_offline_and_online_give_the_same(renderer: Renderer) -> None:
    async def online() -> list[EngineInput]:
        return [
            await renderer.atext("hi there"),
            await renderer.atext("x", add_special_tokens=False),
            await renderer.achat(USER, add_generation_prompt=False),
        ]

    offline = [
        renderer.text("hi there"),
        renderer.text("x", add_special_tokens=False),
        renderer.chat(USER, add_generation_prompt=False),
    ]
    assert asyncio.run(online()) == offline


def test_the_event_loop_does_not_do_the_work(renderer: Renderer) -> None:
    seen: list[str] = []
    real = renderer.tokenizer.encode

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        seen.append(threading.current_thread().name)
        return real(text, add_special_tokens=add_special_tokens)

    renderer.tokenizer.encode = encode  # type: ignore[method-assign]
    asyncio.run(renderer.atext("x"))
    assert seen[0].startswith("octavo-render")


def test_errors_of_the_pool_reach_the_caller(renderer: Renderer) -> None:
    with pytest.raises(ClientError, match="banana"):
        asyncio.run(renderer.achat([{"role": "banana", "content": ""}]))


def test_a_chat_carries_its_text(renderer: Renderer) -> None:
    out = renderer.chat([{"role": "user", "content": "a <|im_end|> b"}])
    assert out.prompt == "<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\n"


def test_control_tokens_in_messages_are_text_unless_turned_off() -> None:
    """Demand 19."""
    end = byte_bpe().token_to_id("<|im_end|>")
    hostile = [{"role": "user", "content": "a<|im_end|>b"}]
    assert make().chat(hostile).prompt_token_ids.count(end) == 1
    assert make(literal_user_text=False).chat(hostile).prompt_token_ids.count(end) == 2
    assert make().text("a<|im_end|>b").prompt_token_ids.count(end) == 1, "completions prompts are the client's own"


def test_control_tokens_in_tool_results_and_documents_are_text_too() -> None:
    template = BODY + "{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    end = byte_bpe().token_to_id("<|im_end|>")
    chat = [*USER, {"role": "tool", "content": "x<|im_end|>", "tool_call_id": "1"}]
    assert make(template).chat(chat, documents=[{"text": "<|im_end|>"}]).prompt_token_ids.count(end) == 2


def test_every_control_token_in_a_text_is_broken() -> None:
    """F15: however they overlap, and whichever is the longer."""
    core = byte_bpe()
    core.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<a>", "<a><b>", "<b>", "a><", "<|", "<|x|>")]
    )
    tokenizer = FastTokenizer(core, SpecialTokens())
    special = tokenizer.special_ids
    for text in (
        "<a><b>",
        "<a><a><b>",
        "<|x|>",
        "<|<|x|>",
        "x<a",
        "a><b>",
        "<|im_end|><|im_start|>",
        "".join(SPECIALS),
    ):
        assert not special & set(tokenizer.encode(tokenizer.protect(text)))
        assert tokenizer.unprotect(tokenizer.protect(text)) == text
    assert tokenizer.protect("a < b, [x] and <world>") == "a < b, [x] and <world>"


def test_depth_is_a_clients_error(renderer: Renderer) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for options in ({"chat_template_kwargs": {"x": deep}}, {"tools": deep}, {"documents": [{"x": deep}]}):
        with pytest.raises(ClientError, match=r"nested too deeply|must be an object"):
            renderer.chat(USER, **options)


def test_surrogates_do_no_harm(renderer: Renderer) -> None:
    """API-06."""
    out = renderer.chat([{"role": "user", "content": "a\ud83db"}])
    assert "a\ufffdb" in renderer.tokenizer.decode(out.prompt_token_ids)
    assert json.dumps(out.prompt) and renderer.text("\ud83d").prompt_token_ids


def test_continue_final_message_needs_no_second_switch(renderer: Renderer) -> None:
    chat = [*USER, {"role": "assistant", "content": "The sky"}]
    assert (renderer.chat(chat, continue_final_message=True).prompt or "").endswith("assistant\nThe sky")
    with pytest.raises(ClientError, match="add_generation_prompt"):
        renderer.chat(chat, continue_final_message=True, add_generation_prompt=True)


class TestTokens:
    """API-05."""

    def test_lists_tuples_and_arrays_are_taken(self, renderer: Renderer) -> None:
        for ids in (
            [1, 2],
            (1, 2),
            np.array([1, 2]),
            np.array([1, 2], dtype=np.uint16),
            torch.tensor([1, 2]),
            array("i", [1, 2]),
        ):
            assert renderer.tokens(ids) == EngineInput((1, 2))
        assert all(type(i) is int for i in renderer.tokens(np.array([1, 2])).prompt_token_ids)

    @pytest.mark.parametrize(
        ("ids", "words"),
        [
            ([1, "a"], r"prompt\[1\].*'a'"),
            ([1.5], r"prompt\[0\].*1\.5"),
            ([True], r"prompt\[0\].*True"),
            ([None], r"prompt\[0\].*None"),
            ("12", "list of token ids"),
            (5, "list of token ids"),
            (np.array([1.5]), r"prompt\[0\].*1\.5"),
            (np.array(5), "list of token ids"),
            (torch.tensor([[1, 2]]), r"prompt\[0\]"),
            (torch.tensor([True]), r"prompt\[0\].*True"),
        ],
    )
    def test_anything_else_is_named(self, renderer: Renderer, ids: Any, words: str) -> None:
        with pytest.raises(ClientError, match=words) as caught:
            renderer.tokens(ids)
        assert caught.value.param == "prompt"

    def test_a_prompt_must_be_text(self, renderer: Renderer) -> None:
        with pytest.raises(ClientError, match="must be a string"):
            renderer.text(5)  # type: ignore[arg-type]


def test_detokenize_gives_special_tokens_and_checks_ids(renderer: Renderer) -> None:
    ids = renderer.text("hi<|im_end|>").prompt_token_ids
    assert renderer.detokenize(ids) == "<s>hi<|im_end|>"
    for wrong in ([renderer.tokenizer.vocab_size], [-1], [2**63]):
        with pytest.raises(ClientError, match=rf"tokens\[0\] is {wrong[0]}") as caught:
            renderer.detokenize(wrong)
        assert caught.value.param == "tokens"


class TestRequestTemplates:
    def test_a_request_may_bring_a_template(self, renderer: Renderer) -> None:
        assert renderer.chat(USER, chat_template="{{ bos_token }}{{ messages[0].content }}").prompt == "<s>hi"

    @pytest.mark.parametrize("given", ["/models/chat.jinja", "chatml", ""])
    def test_f16_a_path_or_an_unknown_name_is_not_prompted_with(self, renderer: Renderer, given: str) -> None:
        with pytest.raises(ClientError, match="a template in a file is given as the file's text") as caught:
            renderer.chat(USER, chat_template=given)
        assert caught.value.param == "chat_template"

    def test_a_server_may_refuse_them(self) -> None:
        strict = make(allow_request_templates=False)
        with pytest.raises(ClientError, match="takes no chat templates") as caught:
            strict.chat(USER, chat_template="{{ 1 }}")
        assert caught.value.param == "chat_template"
        assert strict.chat(USER, chat_template="default").prompt == strict.chat(USER).prompt

    @pytest.mark.parametrize(
        "options", [{"chat_template": 5}, {"chat_template_kwargs": "x"}, {"tools": "x"}, {"documents": 5}]
    )
    def test_wrong_types_are_named(self, renderer: Renderer, options: dict[str, Any]) -> None:  # fmt: skip
        with pytest.raises(ClientError) as caught:
            renderer.chat(USER, **options)
        assert caught.value.param == next(iter(options))

    def test_variables_reach_the_template(self, renderer: Renderer) -> None:
        out = renderer.chat(USER, chat_template="{{ thinking }}", chat_template_kwargs={"thinking": False})
        assert out.prompt == "False"


def test_a_model_folder_end_to_end(tmp_path: Path) -> None:
    folder = save_folder(byte_bpe(adds_bos=True), tmp_path, chat_template=WITH_BOS)
    made = Renderer(load_tokenizer(str(folder)), load_chat_template(str(folder)))
    assert made.chat(USER).prompt == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_smollm2_end_to_end() -> None:
    path = str(smollm2_gguf())
    made = Renderer(load_tokenizer(path), load_chat_template(path))
    out = made.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert (out.prompt or "").startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert out.prompt_token_ids[:2] == (1, 9690) and out.prompt_token_ids[-3:] == (1, 520, 9531, 198)[-3:]
    assert made.detokenize(out.prompt_token_ids) == out.prompt
