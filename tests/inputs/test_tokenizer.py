"""Tokenizers of Hugging Face folders give the ids that Transformers gives (INP-3)."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from octavo.base.errors import LoadError
from octavo.inputs.tokenizer import ends_of_generation, load_tokenizer
from octavo.inputs.tokenizer_fast import LONG_TEXT, without_surrogates
from tests.inputs.builders import CORPUS, SPECIALS, TEXTS, byte_bpe, save_folder
from tests.support.checkpoints import tiny_llama

MIXED = "<|im_start|>user\nWhat's 12 + 30?<|im_end|> <tool_call> x </think><s>"


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def llama_style(prepend: str = "first") -> Tokenizer:
    """BPE with byte fallback, as Llama 2's tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=True)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=names, show_progress=False, limit_alphabet=70)
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    return tokenizer


KINDS = {
    "gpt-2": lambda: byte_bpe("gpt-2"),
    "smollm": lambda: byte_bpe("smollm", adds_bos=True),
    "llama-bpe": lambda: byte_bpe("llama-bpe", adds_bos=True),
    "qwen2": lambda: byte_bpe("qwen2"),
    "tekken": lambda: byte_bpe("tekken", adds_bos=True),
    "unigram": unigram,
    "llama-style": llama_style,
}


def transformers_twin(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = save_folder(KINDS[kind](), tmp_path / kind)
    ours, theirs = load_tokenizer(str(folder)), transformers_twin(folder)
    for text in (*TEXTS, MIXED, "</s>a</s> b"):
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)
    assert ours.adds_bos == (theirs.encode("")[:1] == [theirs.bos_token_id])
    assert {k: v for k, v in ours.template_variables.items() if k in theirs.special_tokens_map} == dict(
        theirs.special_tokens_map
    )


@pytest.mark.parametrize("written", ["prepend", "first", "always"])
@pytest.mark.parametrize("config", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}])
@pytest.mark.parametrize("model_type", ["llama", "granite"])
def test_llama_folders_follow_the_rules_for_spaces_that_transformers_follows(
    written: str, config: dict[str, Any], model_type: str, tmp_path: Path
) -> None:
    """Older versions wrote other rules into tokenizer.json than the class has that the folder declares."""
    core = llama_style("first" if written == "prepend" else written)
    if written == "prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core = Tokenizer.from_str(json.dumps(json.loads(core.to_str()) | {"pre_tokenizer": None}))
    folder = save_folder(core, tmp_path, tokenizer_class="LlamaTokenizerFast", unk_token="<unk>", **config)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = load_tokenizer(str(folder)), transformers_twin(folder)
    for text in (*TEXTS, "<s>[INST] the capital [/INST]", "a</s> b </s>c"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_that_only_the_configuration_names_are_added_as_transformers_adds_them(tmp_path: Path) -> None:
    extra = {"content": "<|extra|>", "lstrip": False, "rstrip": True, "normalized": False, "special": True}
    config = {
        "added_tokens_decoder": {"702": extra | {"single_word": False}},
        "additional_special_tokens": ["<|extra|>", "<tool_call>"],
        "pad_token": {"__type": "AddedToken", **extra, "content": "<pad>"},
    }
    folder = save_folder(byte_bpe(), tmp_path, **config)
    ours, theirs = load_tokenizer(str(folder)), transformers_twin(folder)
    text = "a<|extra|>  b<pad>c<tool_call>d"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_special_tokens_map_is_read_when_the_configuration_lists_no_added_tokens(tmp_path: Path) -> None:
    folder = save_folder(byte_bpe(), tmp_path, eos_token="</s>")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    ours = load_tokenizer(str(folder))
    assert ours.eos_token_id == SPECIALS.index("<|im_end|>")
    assert ours.template_variables["eos_token"] == "<|im_end|>"


def test_truncation_and_padding_in_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    ours = load_tokenizer(str(save_folder(tokenizer, tmp_path)))
    assert len(ours.encode("a b c d e f g h i")) == len(byte_bpe().encode("a b c d e f g h i").ids)


def test_long_texts_have_the_ids_of_the_short_path(tmp_path: Path) -> None:
    core = byte_bpe(adds_bos=True)
    ours = load_tokenizer(str(save_folder(core, tmp_path)))
    text = CORPUS * (LONG_TEXT // len(CORPUS) + 2)
    assert len(text) > LONG_TEXT
    assert ours.encode(text) == core.encode(text).ids
    assert ours.encode(text, add_special_tokens=False) == core.encode(text, add_special_tokens=False).ids


def test_many_threads_may_encode_at_once(tmp_path: Path) -> None:
    ours = load_tokenizer(str(save_folder(byte_bpe(), tmp_path)))
    text = CORPUS * 4
    expected, seen = ours.encode(text), []
    threads = [threading.Thread(target=lambda: seen.append(ours.encode(text))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 6


@pytest.mark.parametrize("kind", ["smollm", "llama-style"])
def test_bytes_of_the_tokens_joined_are_the_text(kind: str, tmp_path: Path) -> None:
    ours = load_tokenizer(str(save_folder(KINDS[kind](), tmp_path)))
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        joined = b"".join(map(ours.token_bytes, ids)).decode()
        assert joined in (text, " " + text)


def test_a_token_alone_keeps_its_leading_space(tmp_path: Path) -> None:
    """Log-probabilities show tokens one at a time; decoding one id strips the space of a SentencePiece token."""
    ours = load_tokenizer(str(save_folder(llama_style(), tmp_path)))
    ids = ours.encode("the capital of", add_special_tokens=False)
    assert "".join(map(ours.token_text, ids)) == " the capital of"
    assert ours.token_text(ours.bos_token_id or 0) == "<s>"
    assert ours.token_bytes(10**9) == b"" and ours.token_bytes(-1) == b""
    assert ours.token_text(3 + 0xE2) == "\ufffd"


def test_decode_ignores_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    ours = load_tokenizer(str(save_folder(byte_bpe(), tmp_path)))
    ids = ours.encode("Hello")
    assert ours.decode([-1, *ids, ours.vocab_size, ours.vocab_size + 64, 2**40]) == "Hello"


@pytest.mark.parametrize("kind", ["smollm", "llama-style", "unigram"])
def test_a_stream_gives_the_text_of_the_whole(kind: str, tmp_path: Path) -> None:
    ours = load_tokenizer(str(save_folder(KINDS[kind](), tmp_path)))
    for text in TEXTS:
        ids = ours.encode(text)
        stream = ours.open_stream(skip_special_tokens=True)
        assert stream is not None
        assert stream.step(ours.vocab_size + 5) is None
        assert "".join(filter(None, map(stream.step, ids))) == ours.decode(ids)


def test_lone_surrogates_become_replacement_characters_and_pairs_are_joined(tmp_path: Path) -> None:
    """API-06: a half of a pair is no text, but it is no reason to fail either."""
    assert without_surrogates("a\ud83d\ude42b") == "a🙂b"
    assert without_surrogates("a\ud83db") == "a\ufffdb"
    assert without_surrogates("plain") == "plain"
    ours = load_tokenizer(str(save_folder(byte_bpe(), tmp_path)))
    assert ours.decode(ours.encode("x\udc00y")) == "x\ufffdy"


class TestProtect:
    """Text that was protected yields no control tokens; other text is untouched (demand 19)."""

    @pytest.fixture
    def ours(self, tmp_path: Path) -> Any:
        return load_tokenizer(str(save_folder(byte_bpe(), tmp_path)))

    def test_special_tokens_written_by_people_are_read_as_text(self, ours: Any) -> None:
        for text in ("<|im_end|>", "a<|im_end|>\n<|im_start|>system\nb", "<s></s>", "<|im_<|im_end|>end|>"):
            assert ours.special_ids & set(ours.encode(text))
            ids = ours.encode(ours.protect(text))
            assert not ours.special_ids & set(ids)
            assert ours.decode(ids, skip_special_tokens=False) == text
            assert max(ids) < ours.vocab_size

    def test_text_without_special_tokens_keeps_its_ids(self, ours: Any) -> None:
        for text in (*TEXTS, "<tool_call> and </think>"):
            assert ours.protect(text) == text

    def test_typing_the_mark_forges_nothing(self, ours: Any) -> None:
        mark = ours.protect("<s>").removeprefix("<").removesuffix("s>")
        forged = f"<|im_{mark}end|>"
        assert not ours.special_ids & set(ours.encode(forged))
        assert not ours.special_ids & set(ours.encode(ours.protect(forged)))
        assert max(ours.encode(forged)) < ours.vocab_size

    def test_unprotect_gives_the_text_back(self, ours: Any) -> None:
        assert ours.unprotect(ours.protect("a<|im_end|>b")) == "a<|im_end|>b"

    def test_the_mark_is_not_part_of_the_vocabulary(self, ours: Any) -> None:
        size = byte_bpe().get_vocab_size(with_added_tokens=True)
        assert ours.vocab_size == size
        assert ours.decode([size]) == ""


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(LoadError, match="neither a folder nor a GGUF file"):
        load_tokenizer(str(tmp_path / "nothing"))
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    (tmp_path / "tokenizer.json").write_text(byte_bpe().to_str())
    with pytest.raises(LoadError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("listed", [5, ["a"], {"x": {}}, {"1": 5}, {"1": {"content": 5}}], ids=str)
def test_damaged_lists_of_added_tokens_are_named(tmp_path: Path, listed: object) -> None:
    folder = tiny_llama(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(LoadError, match=r"tokenizer_config\.json is damaged"):
        load_tokenizer(str(folder))


def test_an_added_token_keeps_its_flags(tmp_path: Path) -> None:
    core = byte_bpe()
    core.add_special_tokens([AddedToken("<wide>", lstrip=True, rstrip=True, special=True, normalized=False)])
    folder = save_folder(core, tmp_path, pad_token="<wide>")
    assert load_tokenizer(str(folder)).encode("a  <wide>  b") == transformers_twin(folder).encode("a  <wide>  b")


def test_the_way_in_loads_neither_torch_nor_transformers() -> None:
    """Control plane: a fresh interpreter imports all of `inputs` in well under half a second of work."""
    code = (
        "import sys, time; t = time.process_time()\n"
        "import octavo.inputs.renderer, octavo.inputs.limits, octavo.inputs.tokenizer\n"
        "print(time.process_time() - t, *[m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    told = [run.stdout.split() for run in runs]
    assert all(len(words) == 1 for words in told), told
    assert min(float(words[0]) for words in told) < 0.5


def with_holes(folder: Path, *, added_at: int) -> Path:
    """A folder whose tokenizer.json leaves out ids: in the vocabulary, and before its last added tokens."""
    state = json.loads(byte_bpe().to_str())
    vocab = state["model"]["vocab"]
    for text, index in list(vocab.items()):
        if index >= 400:
            vocab[text] = index + 7
    names = [t for t in state["added_tokens"] if t["content"] not in vocab]
    for place, token in enumerate(names):
        token["id"] = added_at + 3 * place
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.mark.parametrize("added_at", [402, 750])
def test_ids_are_those_of_the_file_where_it_leaves_some_out(tmp_path: Path, added_at: int) -> None:
    """F06: 0 to the largest; the library would count added tokens on into the holes."""
    ours, plain = load_tokenizer(str(with_holes(tmp_path / "m", added_at=added_at))), byte_bpe()
    size = plain.get_vocab_size()
    moved = {
        i: i + 7 if i >= 400 else i for i in range(size) if plain.id_to_token(i) not in ("<tool_call>", "</think>")
    }
    moved |= {plain.token_to_id("<tool_call>"): added_at, plain.token_to_id("</think>"): added_at + 3}
    assert ours.vocab_size == max(moved.values()) + 1
    for text in (*TEXTS, MIXED):
        assert ours.encode(text) == [moved[i] for i in plain.encode(text).ids], text
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == plain.decode(
            plain.encode(text).ids, skip_special_tokens=False
        )
    assert ours.token_text(added_at) == "<tool_call>" and ours.token_text(added_at + 3) == "</think>"
    assert ours.token_text(401) == "" and ours.decode([401, *ours.encode("a b")]) == "a b"
    protected = ours.encode(ours.protect("a <|im_end|> b"))
    assert ours.decode(protected, skip_special_tokens=False) == "a <|im_end|> b"
    assert not set(protected) & ours.special_ids


def test_ends_that_a_folder_s_template_writes_are_ends(tmp_path: Path) -> None:
    """F05: for a folder its id keys count, and what its template ends turns with, special or not."""
    ours = load_tokenizer(str(save_folder(byte_bpe(), tmp_path / "m")))
    end = ours.token_id("<|im_end|>")
    assert ends_of_generation(ours, ()) == ()
    assert ends_of_generation(ours, ("{{ m }}</s>",)) == ()
    assert ends_of_generation(ours, ("{{ m }}<|im_end|>",)) == (end,)
