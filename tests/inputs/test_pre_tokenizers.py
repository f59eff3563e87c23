"""GGUF files as they are in the wild: each name of a pre-tokenizer gives the ids of the published tokenizer (F03)."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from octavo.base.errors import LoadError
from octavo.inputs.pre_tokenizers import NAMES, REFUSED
from octavo.inputs.tokenizer import load_tokenizer
from octavo.inputs.tokenizer_gguf import from_metadata
from tests.inputs.builders import TEXTS, gguf_of_bpe, write_vocabulary
from tests.inputs.published import MORE_TEXT, published
from tests.inputs.published import NAMES as PUBLISHED

TRICKY = (
    *TEXTS,
    *MORE_TEXT.splitlines(keepends=True),
    "1 12 123 1234 12345 123456 1234567 a1b22c333 1234567890123 12345x x12345",
    "   leading and trailing   ",
    "\n\n\n  \n x\r\n\r\ny\t\t",
    "I'm you're HE'LL they'Ve o'clock rock'n'roll 'tis ''s",
    "日本語テキスト漢字ABC한국어混ざりカナ123あ",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301\u0302 \u200d \ufeff",
    "<|im_start|>user\nhi <tool_call> 12 </s>x",
    "a" * 40 + " " * 40 + "\n" * 5 + "!" * 9,
    "IMGIMGABCDZ <sentinel:12> ....,,,,。。、、!!",
)


def test_every_name_of_the_table_is_known_or_refused() -> None:
    """F03: the names of llama.cpp's table, written out in the tests once more; 'gpt2' is a spelling of older files."""
    assert {*NAMES, *REFUSED} == {*PUBLISHED, "gpt2"}
    assert not NAMES.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_file_gives_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    """F03: the same vocabulary as a Transformers tokenizer with the published rule, and as a GGUF file with the name."""
    core = published("gpt-2" if name == "gpt2" else name)
    theirs = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    ours = load_tokenizer(str(write_vocabulary(tmp_path / "m.gguf", gguf_of_bpe(core, name))))
    for text in TRICKY:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_rule_that_cannot_be_built_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """F03: a sentence, not ids of another rule."""
    path = write_vocabulary(tmp_path / "m.gguf", gguf_of_bpe(published("gpt-2"), name))
    with pytest.raises(LoadError, match=rf"m\.gguf needs the pre-tokenizer '{name}': its vocabulary .* not supported"):
        load_tokenizer(str(path))


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no merges": ({"merges": None}, r"holds no merges \(tokenizer.ggml.merges\)"),
    "empty merges": ({"merges": []}, r"holds an empty list of merges \(tokenizer.ggml.merges\)"),
    "half the merges": ({"merges": 0.5}, r"lacks the merges \(tokenizer.ggml.merges\) of \d+ of its \d+ words"),
    "most of the merges": ({"merges": 0.95}, r"lacks the merges \(tokenizer.ggml.merges\) of \d+ of its \d+ words"),
    "a merge of one part": ({"merges": ["a"]}, r"merge 0 \(tokenizer.ggml.merges\) is 'a', not two entries"),
    "no types": ({"token_type": None}, r"does not say of what type its tokens are \(tokenizer.ggml.token_type\)"),
    "empty types": ({"token_type": []}, r"does not say of what type its tokens are \(tokenizer.ggml.token_type\)"),
    "half the types": ({"token_type": 0.5}, r"tokens but \d+ token types"),
    "no tokens": ({"tokens": None}, r"holds no vocabulary \(tokenizer.ggml.tokens\)"),
}


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-llm", "bloom"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_vocabulary_that_lacks_something_is_refused_with_its_name(fault: str, name: str, tmp_path: Path) -> None:
    """F02: no merges, an empty or a cut list, no types: a start that names what is missing, not other tokens."""
    metadata = gguf_of_bpe(published(name), name)
    changes, words = FAULTS[fault]
    for key, value in changes.items():
        whole = metadata.pop(f"tokenizer.ggml.{key}")
        if value is not None:
            kept = whole[: int(len(whole) * value)] if isinstance(value, float) else value
            metadata[f"tokenizer.ggml.{key}"] = kept
    with pytest.raises(LoadError, match=rf"m\.gguf .*{words}"):
        if [] in metadata.values():  # which the gguf package does not write
            from_metadata(metadata, "m.gguf")
        else:
            load_tokenizer(str(write_vocabulary(tmp_path / "m.gguf", metadata)))


def test_entries_that_no_two_entries_make_need_no_merge(tmp_path: Path) -> None:
    """F02: plain words that were added to a vocabulary as ordinary entries do not make the list look cut."""
    metadata = gguf_of_bpe(published("qwen2"), "qwen2")
    metadata["tokenizer.ggml.tokens"] += [f"<|extra_{i}|>" for i in range(50)]
    metadata["tokenizer.ggml.token_type"] += [1] * 50
    load_tokenizer(str(write_vocabulary(tmp_path / "m.gguf", metadata)))
