"""Tokenizers and GGUF metadata for the tests of `inputs`, trained on a few lines of text.

Promises: small, the same every time, and made by the `tokenizers` and `sentencepiece` libraries alone.
"""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = """
The printer folds a large sheet three times, and the octavo has eight leaves: sixteen pages of one text.
What's the capital of France? The capital of France is Paris; they've said it'll rain, I'm sure you'd agree.
def function(argument):
    return [value for value in argument if value is not None]   # 12345 items, 3.14159
{"name": "get_weather", "arguments": {"location": "Paris", "unit": "celsius"}}
Der Drucker faltet den Bogen dreimal. La página sigue la página. Ça va très bien, naïve façade.
你是一个有用的人工智能助手。今天天气很好,我们去公园吧。 Привет, как дела? Всё хорошо, спасибо.
HELLO World, CamelCaseWords and snake_case_words; 100 200 2048 1000000 tokens per second!!! ... --- ***
user assistant system tool You are a helpful assistant. Today Date: 26 Jul 2024
"""
TEXTS = (
    "",
    " ",
    "Hello world",
    " Hello  world ",
    "What's up? They've said it'll rain; I'M SURE you'd agree. don't DON'T",
    "12345 items, 3.14159 and 1000000 or 7 x٣٤ ½ ²",
    "a\n\nb\r\n\r\n  c\t\td \n e   ",
    "你是一个有用的人工智能助手。今天天气很好!",
    "Ça va très bien, nai\u0308ve façade; e\u0301 vs é",
    "Привет, КАК дела? CamelCaseWords XMLHttpRequest",
    "def f(x):\n    return [v for v in x]  # ok\n\n\n",
    "emoji 🙂👩‍👩‍👧 zero\u200bwidth \u00a0nbsp",
    "path/to/file.txt//more\n/x $100 + <tag> `code` ^~|",
    "....!!!???---***'''\"\"\"",
)
SPECIALS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|User|>", "<|Assistant|>",
    "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
    "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "[INST]", "[/INST]", "[gMASK]", "<sop>", "<|start|>",
    "<|message|>", "<|channel|>", "<|call|>", "<|observation|>", "<|end_of_turn|>",
)  # fmt: skip
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def pre_tokenizer(name: str) -> Any:
    """The pre-tokenizer as the models' own tokenizer.json files hold it."""
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizer("gpt-2")])
    return _split({"llama-bpe": LLAMA_PATTERN, "qwen2": QWEN_PATTERN, "tekken": TEKKEN_PATTERN}[name])


@cache
def _bpe_json(pre: str, vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</think>", normalized=False)])
    return str(tokenizer.to_str())


def byte_bpe(pre: str = "smollm", *, adds_bos: bool = False, vocab_size: int = 700) -> Tokenizer:
    """A byte-level BPE; `<s>` has id 0, and `<tool_call>` is an added token that is not special."""
    tokenizer = Tokenizer.from_str(_bpe_json(pre, vocab_size))
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return tokenizer


@cache
def sentencepiece_model(kind: str = "bpe", *, byte_fallback: bool = True, vocab_size: int = 500) -> bytes:
    """A SentencePiece model as Llama's: dummy prefix, spaces kept, digits split, identity normalization."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.strip().splitlines()),
        model_writer=out,
        model_type=kind,
        vocab_size=vocab_size,
        byte_fallback=byte_fallback,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        character_coverage=0.98,
        user_defined_symbols=["<|user|>"],
        control_symbols=["[INST]"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return out.getvalue()


def gguf_of_bpe(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """The metadata that a converter writes for a byte-level BPE."""
    model = json.loads(tokenizer.to_str())["model"]
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(i) for i in range(size)],
        "tokenizer.ggml.token_type": [(3 if added[i].special else 4) if i in added else 1 for i in range(size)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def gguf_of_sentencepiece(model: bytes) -> dict[str, Any]:
    """The metadata that a converter writes for a SentencePiece model."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(sp.get_piece_size())

    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return 2
        if sp.is_control(i):
            return 3
        return 6 if sp.is_byte(i) else 4 if sp.id_to_piece(i) == "<|user|>" else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
    }


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file with this vocabulary and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def save_folder(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """A Hugging Face folder with this tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
