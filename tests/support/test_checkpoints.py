"""The test checkpoints are what they say, by Transformers' word."""

from pathlib import Path

import pytest

from tests.support.checkpoints import chain, cut, tiny_llama

transformers = pytest.importorskip("transformers")


def continuation(folder: Path, prompt: str | None, **settings) -> str:
    """What the reference says after a prompt, or after the chat template when there is none."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    if prompt is None:
        chat = [{"role": "user", "content": "hi"}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=40, **settings)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(out)


def test_a_chain_says_its_script_one_token_a_piece(tmp_path: Path) -> None:
    folder = chain(tmp_path / "m", ["A", "B", "CD", "é🧑".encode(), " done"])
    assert continuation(folder, "A", do_sample=False) == "BCDé🧑 done</s>"
    assert continuation(folder, "CD", do_sample=True) == "é🧑 done</s>"  # so certain that sampling says it too


def test_a_chain_answers_a_chat_and_may_hold_special_tokens(tmp_path: Path) -> None:
    folder = chain(tmp_path / "m", ["a", "<X>", "b "], specials=["<X>"], template_opens="<think>")
    assert continuation(folder, None, do_sample=False) == "a<X>b </s>"


def test_a_chain_may_loop() -> None:
    folder = chain(None, ["a", "b", "c"], loop_to=1)
    assert continuation(folder, "a", do_sample=False).startswith("bcbcbcbc")


def test_a_script_that_repeats_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="comes twice"):
        chain(None, ["a", "b", "a"])


@pytest.mark.parametrize("length", range(1, 12))
def test_cutting_keeps_the_text_and_repeats_no_piece(length: int) -> None:
    text = '{"name": "f", "arguments": {"t": "he said \\"hi\\" 😀", "u": "he said"}} aaaaaaaa'
    pieces = cut(text, length)
    assert "".join(pieces) == text
    assert len(set(pieces)) == len(pieces)


def test_the_same_arguments_share_a_folder_and_others_do_not() -> None:
    assert tiny_llama() == tiny_llama()
    assert tiny_llama() != tiny_llama(seed=1)
    assert tiny_llama(dtype="bfloat16") != tiny_llama()


def test_text_round_trips_through_the_tiny_tokenizer() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama())
    text = "Bücher, 日本語, 🧑‍💻 and\n\ttabs"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids[1:]) == text
    assert len(tokenizer) == 512
