"""Vocabularies inside GGUF files give the ids of the models' own tokenizer files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer

from octavo.base.errors import LoadError
from octavo.inputs.pre_tokenizers import NAMES as PRE_TOKENIZERS
from octavo.inputs.pre_tokenizers import build
from octavo.inputs.tokenizer import ends_of_generation, load_tokenizer, tokenizer_warning
from octavo.inputs.tokenizer_gguf import from_metadata, merges_by_score
from tests.inputs.builders import (
    TEXTS,
    byte_bpe,
    gguf_of_bpe,
    gguf_of_sentencepiece,
    save_folder,
    sentencepiece_model,
    write_vocabulary,
)
from tests.support.checkpoints import smollm2_f32, smollm2_gguf

NAMES = ("smollm", "llama-bpe", "qwen2", "gpt-2", "tekken")


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
    cut = build(PRE_TOKENIZERS[pre]).pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


class TestAFileThatNamesNoPreTokenizer:
    """F04: the default rule is used, and said with the flag that chooses another."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        metadata = gguf_of_bpe(byte_bpe("qwen2"), "default")
        del metadata["tokenizer.ggml.pre"]
        return write_vocabulary(tmp_path / "m.gguf", metadata)

    def test_the_default_is_used_with_a_warning(self, path: Path) -> None:
        lines: list[str] = []
        ours = load_tokenizer(str(path), say=lines.append)
        named = from_metadata(gguf_of_bpe(byte_bpe("qwen2"), "default"), "m")
        assert ours.encode("a 1234, don't") == named.encode("a 1234, don't")
        (line,) = lines
        assert line.startswith(f"warning: {path} does not say how text is cut")
        assert "rule 'default' is used" in line and "--pre-tokenizer" in line
        assert tokenizer_warning(str(path)) == line.removeprefix("warning: ")

    def test_the_flag_chooses_and_nothing_is_said(self, path: Path) -> None:
        lines: list[str] = []
        ours = load_tokenizer(str(path), pre_tokenizer="qwen2", say=lines.append)
        for text in TEXTS:
            assert ours.encode(text) == byte_bpe("qwen2").encode(text).ids
        assert lines == []
        assert tokenizer_warning(str(path), "qwen2") is None

    def test_the_flag_wins_over_what_a_file_says(self, tmp_path: Path) -> None:
        path = write_vocabulary(tmp_path / "m.gguf", gguf_of_bpe(byte_bpe("qwen2"), "gpt-2"))
        right = [byte_bpe("qwen2").encode(text).ids for text in TEXTS]
        own, chosen = load_tokenizer(str(path)), load_tokenizer(str(path), pre_tokenizer="qwen2")
        assert [own.encode(text) for text in TEXTS] != right
        assert [chosen.encode(text) for text in TEXTS] == right

    def test_files_that_say_it_give_no_warning(self, tmp_path: Path) -> None:
        path = write_vocabulary(tmp_path / "m.gguf", gguf_of_bpe(byte_bpe("smollm"), "smollm"))
        assert tokenizer_warning(str(path)) is None
        spm = write_vocabulary(tmp_path / "s.gguf", gguf_of_sentencepiece(sentencepiece_model("bpe")))
        assert tokenizer_warning(str(spm)) is None
        assert tokenizer_warning(str(save_folder(byte_bpe(), tmp_path / "folder"))) is None

    def test_a_flag_without_a_meaning_is_refused(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(LoadError, match=r"--pre-tokenizer is 'qwen-2', which is not known; known are .*qwen2"):
            load_tokenizer(str(path), pre_tokenizer="qwen-2")
        spm = write_vocabulary(tmp_path / "s.gguf", gguf_of_sentencepiece(sentencepiece_model("bpe")))
        with pytest.raises(LoadError, match="no byte-level vocabulary: --pre-tokenizer has no meaning"):
            load_tokenizer(str(spm), pre_tokenizer="qwen2")
        with pytest.raises(LoadError, match="--pre-tokenizer is for GGUF files"):
            load_tokenizer(str(save_folder(byte_bpe(), tmp_path / "folder")), pre_tokenizer="qwen2")


def repeated() -> dict[str, Any]:
    """A vocabulary in which four of the last ids have texts that others have too."""
    metadata = gguf_of_bpe(byte_bpe(), "smollm")
    metadata["tokenizer.ggml.tokens"] += ["[PAD]", "Ġ", "[PAD]", "</s>", "[PAD]", "new"]
    metadata["tokenizer.ggml.token_type"] += [5, 1, 5, 3, 5, 4]
    return metadata


class TestRepeatedTexts:
    """F06: ids are those of the file, 0 to the largest, and each keeps its text."""

    def test_every_id_is_known_and_keeps_its_text(self) -> None:
        metadata = repeated()
        ours, texts = from_metadata(metadata, "m"), metadata["tokenizer.ggml.tokens"]
        assert ours.vocab_size == len(texts) == 708
        plain = from_metadata(gguf_of_bpe(byte_bpe(), "smollm"), "m")
        for i in range(plain.vocab_size):
            assert ours.token_text(i) == plain.token_text(i)
        assert [ours.token_text(i) for i in range(702, 708)] == ["[PAD]", " ", "[PAD]", "</s>", "[PAD]", "new"]
        assert ours.decode([703, 707, 705, 704], skip_special_tokens=False) == " new</s>[PAD]"
        assert ours.decode([703, 707, 705]) == " new"
        assert 705 in ours.special_ids

    def test_a_stream_gives_the_same_text(self) -> None:
        ours = from_metadata(repeated(), "m")
        stream = ours.open_stream(skip_special_tokens=False)
        assert stream is not None
        assert "".join(stream.step(i) or "" for i in (707, 703, 705, 702)) == "new </s>[PAD]"

    def test_text_becomes_the_first_and_protection_works(self) -> None:
        ours = from_metadata(repeated(), "m")
        assert ours.encode("a b c") == byte_bpe().encode("a b c").ids
        assert ours.encode("</s>new") == [1, 707]
        protected = ours.encode(ours.protect("a</s>new[PAD]"))
        assert 1 not in protected and protected[-1:] != [701]
        assert ours.decode(protected) == "a</s>new[PAD]"
        assert max(protected) < 708

    def test_role_keys_mean_their_own_id(self) -> None:
        metadata = repeated() | {"tokenizer.ggml.eos_token_id": 705, "tokenizer.ggml.add_eos_token": True}
        ours = from_metadata(metadata, "m")
        assert ours.eos_token_id == 705
        assert ours.encode("a")[-1] == 705

    def test_repeats_in_a_sentencepiece_vocabulary(self) -> None:
        metadata = gguf_of_sentencepiece(sentencepiece_model("bpe"))
        plain = from_metadata(dict(metadata), "m")
        size = len(metadata["tokenizer.ggml.tokens"])
        for key, values in (
            ("tokens", ["▁the", "<s>", "▁the"]),
            ("scores", [0.0, 0.0, 9.0]),
            ("token_type", [1, 3, 1]),
        ):
            metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *values]
        ours = from_metadata(metadata, "m")
        assert ours.vocab_size == size + 3
        assert [ours.token_text(size + i) for i in range(3)] == [" the", "<s>", " the"]
        for text in TEXTS:
            assert ours.encode(text) == plain.encode(text)


ENDS = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<EOT>", "_<EOT>", "<|return|>", "<|call|>", "<|end_of_text|>"]  # fmt: skip


class TestEnds:
    """F05: texts that end a generation do so whatever the id keys say."""

    @pytest.mark.parametrize("kind", [1, 3, 4])
    @pytest.mark.parametrize("end", ENDS)
    def test_an_end_is_one_and_is_hidden_whatever_its_type(self, end: str, kind: int) -> None:
        metadata = gguf_of_bpe(Tokenizer.from_str(byte_bpe().to_str().replace(end, "<|other|>")), "smollm")
        metadata["tokenizer.ggml.tokens"] += [end]
        metadata["tokenizer.ggml.token_type"] += [kind]
        index = len(metadata["tokenizer.ggml.tokens"]) - 1
        ours = from_metadata(metadata, "m")
        assert ours.encode(f"a{end}b")[1] == index
        assert index in ends_of_generation(ours, ())
        assert ours.decode([index]) == ""
        assert ours.eos_token_id == 1

    def test_text_that_words_can_become_is_no_end(self) -> None:
        """A base model whose text merged into such an entry goes on: it is a word there."""
        metadata = gguf_of_bpe(byte_bpe("gpt-2"), "gpt-2")
        parts = ["<E", "OT", "<EOT", "<EOT>"]
        metadata["tokenizer.ggml.tokens"] += parts
        metadata["tokenizer.ggml.token_type"] += [1] * 4
        metadata["tokenizer.ggml.merges"] += ["< E", "O T", "<E OT", "<EOT >"]
        ours = from_metadata(metadata, "m")
        index = ours.token_id("<EOT>")
        assert index is not None and index not in ends_of_generation(ours, ())
        assert ours.decode([index]) == "<EOT>"

    def test_harmony_ends_messages_within_a_turn(self) -> None:
        metadata = gguf_of_bpe(byte_bpe(), "smollm")
        metadata["tokenizer.ggml.tokens"] += ["<|return|>"]
        metadata["tokenizer.ggml.token_type"] += [3]
        ours = from_metadata(metadata, "m")
        texts = {ours.token_text(i) for i in ends_of_generation(ours, ())}
        assert {"<|return|>", "<|call|>"} <= texts and "<|end|>" not in texts


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
        ({"tokenizer.ggml.pre": "exotic-9b"}, "'exotic-9b'.*not known; known are.*smollm"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'.*not supported.*gpt2, llama"),
        ({"tokenizer.ggml.model": None}, "holds no vocabulary"),
        ({"tokenizer.ggml.tokens": None}, "holds no vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "damaged"),
        ({"tokenizer.ggml.merges": ["nope nothing"]}, "lacks the merges"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=rf"m\.gguf.*{words}"):
        from_metadata(gguf_of_bpe(byte_bpe(), "smollm") | change, "m.gguf")


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
