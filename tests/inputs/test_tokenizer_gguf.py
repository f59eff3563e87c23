"""Vocabularies inside GGUF files give the ids of the models' own tokenizer files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer

from octavo.base.errors import LoadError
from octavo.inputs.tokenizer import load_tokenizer
from octavo.inputs.tokenizer_gguf import PRE_TOKENIZERS, from_metadata, merges_by_score
from tests.inputs.builders import TEXTS, byte_bpe, gguf_of_bpe, gguf_of_sentencepiece, sentencepiece_model
from tests.support.checkpoints import smollm2_f32, smollm2_gguf

NAMES = ("smollm", "llama-bpe", "qwen2", "gpt-2", "tekken")


def test_exactly_the_named_pre_tokenizers_are_known() -> None:
    assert set(PRE_TOKENIZERS) == {*NAMES, "default"}


@pytest.mark.parametrize("pre", NAMES)
def test_byte_level_vocabularies_give_the_ids_of_the_tokenizer_file(pre: str) -> None:
    core = byte_bpe(pre)
    ours = from_metadata(gguf_of_bpe(core, pre), "model.gguf")
    for text in (*TEXTS, "<|im_start|>user\nhi<|im_end|><tool_call>x", "a\n" * 50):
        assert ours.encode(text) == core.encode(text).ids, text
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == core.decode(
            core.encode(text).ids, skip_special_tokens=False
        )
    assert ours.vocab_size == core.get_vocab_size(with_added_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)
    assert ours.template_variables == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'm 12345  x!!\n\n y", ["I", "'m", "Ġ12345", "Ġ", "Ġx", "!!", "ĊĊ", "Ġy"]),
        ("smollm", "I'm 123 x", ["I", "'m", "Ġ", "1", "2", "3", "Ġx"]),
        ("llama-bpe", "I'M 12345\n\nx", ["I", "'M", "Ġ", "123", "45", "ĊĊ", "x"]),
        ("qwen2", "I'M 123(a)\n", ["I", "'M", "Ġ", "1", "2", "3", "(a", ")Ċ"]),
        ("tekken", "CamelCase a/b 12", ["Camel", "Case", "Ġa", "/b", "Ġ", "1", "2"]),
        ("default", "$a 12345, don't", ["$", "a", "Ġ", "123", "45", ",", "Ġdon", "'", "t"]),
    ],
)
def test_text_is_cut_where_the_models_cut_it(pre: str, text: str, pieces: list[str]) -> None:
    cut = PRE_TOKENIZERS[pre].make().pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


def test_a_file_without_a_pre_tokenizer_uses_the_default() -> None:
    metadata = gguf_of_bpe(byte_bpe("gpt-2"), "default")
    del metadata["tokenizer.ggml.pre"]
    assert from_metadata(metadata, "m").encode("a 1234") == from_metadata(metadata | {"tokenizer.ggml.pre": "default"}, "m").encode("a 1234")  # fmt: skip


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)])
def test_bos_is_added_as_the_file_says_or_as_the_model_does(pre: str, adds: bool) -> None:
    metadata = gguf_of_bpe(byte_bpe(pre), pre)
    del metadata["tokenizer.ggml.add_bos_token"]
    assert from_metadata(metadata, "m").adds_bos is adds
    for flag in (True, False):
        ours = from_metadata(metadata | {"tokenizer.ggml.add_bos_token": flag}, "m")
        assert ours.adds_bos is flag
        assert ours.encode("x")[0] == (0 if flag else ours.encode("x", add_special_tokens=False)[0])


def test_eos_is_added_when_the_file_says_so() -> None:
    metadata = gguf_of_bpe(byte_bpe(), "smollm") | {"tokenizer.ggml.add_eos_token": True}
    assert from_metadata(metadata, "m").encode("x")[-1] == 1


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    ours = from_metadata(gguf_of_bpe(byte_bpe(), "smollm"), "m")
    ids = ours.encode("<tool_call><|im_end|>")
    assert len(ids) == 2
    assert ids[1] in ours.special_ids and ids[0] not in ours.special_ids
    assert ours.decode(ids) == "<tool_call>"


def test_numpy_metadata_are_read_like_lists() -> None:
    metadata = gguf_of_bpe(byte_bpe(), "smollm")
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], dtype=np.int32)
    assert from_metadata(metadata, "m").encode("Hello <s>") == byte_bpe().encode("Hello <s>").ids


def test_padding_entries_with_equal_texts_keep_the_first_id() -> None:
    metadata = gguf_of_bpe(byte_bpe(), "smollm")
    metadata["tokenizer.ggml.tokens"] += ["Ġ", "[PAD]", "[PAD]"]
    metadata["tokenizer.ggml.token_type"] += [5, 5, 5]
    ours = from_metadata(metadata, "m")
    assert ours.encode("a b c") == byte_bpe().encode("a b c").ids


class TestSentencePiece:
    """The `llama` family against the sentencepiece library itself."""

    @pytest.fixture
    def model(self) -> bytes:
        return sentencepiece_model("bpe")

    def test_ids_equal_sentencepiece(self, model: bytes) -> None:
        ours = from_metadata(gguf_of_sentencepiece(model), "m")
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
        for text in TEXTS:
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), text
            assert ours.encode(text) == [theirs.bos_id(), *theirs.encode(text)]
            assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))

    def test_characters_outside_the_vocabulary_become_their_bytes(self, model: bytes) -> None:
        ours = from_metadata(gguf_of_sentencepiece(model), "m")
        ids = ours.encode("🙂", add_special_tokens=False)
        assert [ours.token_bytes(i) for i in ids[-4:]] == [bytes([b]) for b in "🙂".encode()]
        assert ours.decode(ids) == "🙂"

    def test_special_tokens_are_recognized_and_the_space_follows_each_of_them(self, model: bytes) -> None:
        """GGUF's own reader puts SentencePiece's space before every stretch of plain text."""
        ours = from_metadata(gguf_of_sentencepiece(model), "m")
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
        expected = [1, theirs.piece_to_id("[INST]"), *theirs.encode("the capital"), 2]
        assert ours.encode("<s>[INST]the capital</s>", add_special_tokens=False) == expected
        assert theirs.piece_to_id("<|user|>") in ours.encode("a<|user|>b")

    def test_a_file_without_the_space_prefix_adds_none(self, model: bytes) -> None:
        metadata = gguf_of_sentencepiece(model) | {"tokenizer.ggml.add_space_prefix": False}
        ours = from_metadata(metadata, "m")
        ids = ours.encode("the capital", add_special_tokens=False)
        assert "".join(map(ours.token_text, ids)) == "the capital"
        assert ours.decode(ids) == "the capital"

    def test_missing_scores_are_an_error(self, model: bytes) -> None:
        metadata = gguf_of_sentencepiece(model)
        del metadata["tokenizer.ggml.scores"]
        with pytest.raises(LoadError, match="no score for each token"):
            from_metadata(metadata, "m.gguf")

    def test_better_scores_merge_first(self) -> None:
        tokens = ["a", "b", "c", "ab", "bc", "abc"]
        merges = merges_by_score(tokens, [0, 0, 0, -2, -1, -3], [1] * 6)
        assert merges == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.pre": "exotic-9b"}, "'exotic-9b'.*not supported.*smollm"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'.*not supported.*gpt2, llama"),
        ({"tokenizer.ggml.model": None}, "holds no vocabulary"),
        ({"tokenizer.ggml.tokens": None}, "holds no vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "damaged"),
        ({"tokenizer.ggml.merges": ["nope nothing"]}, "damaged vocabulary"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=rf"m\.gguf.*{words}"):
        from_metadata(gguf_of_bpe(byte_bpe(), "smollm") | change, "m.gguf")


def test_a_written_file_reads_like_its_metadata(tmp_path: Path) -> None:
    import gguf

    core = byte_bpe()
    metadata = gguf_of_bpe(core, "smollm")
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours = load_tokenizer(str(tmp_path / "v.gguf"))
    for text in TEXTS:
        assert ours.encode(text) == [0, *core.encode(text).ids]


def test_smollm2_from_gguf_equals_transformers_on_its_folder() -> None:
    from transformers import AutoTokenizer

    ours, folder = load_tokenizer(str(smollm2_gguf())), load_tokenizer(str(smollm2_f32()))
    theirs = AutoTokenizer.from_pretrained(smollm2_f32())
    assert ours.vocab_size == len(theirs) == 49152
    for text in (*TEXTS, "<|im_start|>user\nHi 123<|im_end|>\n"):
        assert ours.encode(text) == folder.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_a_reference_core_is_not_changed_by_loading(tmp_path: Path) -> None:
    core = byte_bpe()
    before = Tokenizer.from_str(core.to_str()).get_vocab_size()
    from_metadata(gguf_of_bpe(core, "smollm"), "m")
    assert core.get_vocab_size() == before
