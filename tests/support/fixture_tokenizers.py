"""Tokenizers of the test checkpoints, built with the tokenizers library alone.

Promises: the same arguments give the same vocabulary; every byte has a token, so any text round-trips.
Does not know: models.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TINY_SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>")

_CORPUS = """
The printer folds a large sheet three times, and the octavo has eight leaves: sixteen pages of one text.
A block is the unit of memory; a request holds blocks until it ends, and then the blocks are free again.
What is the capital of France? The capital of France is Paris, and the capital of Italy is Rome.
Once upon a time there was a small machine with two cores that answered many questions at the same time.
The weather in Paris is warm in summer and cold in winter; the weather in Rome is warm all through the year.
def function(argument): return [value for value in argument if value is not None]
{"name": "get_weather", "arguments": {"location": "Paris", "unit": "celsius"}}
One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen.
You are a helpful assistant that answers the user with short sentences. Please tell me a story about the sea.
Where there is a question there should be an answer, and where there is an answer there should be a reason.
Der Drucker faltet den Bogen dreimal. La page suit la page. El libro tiene ocho hojas. 0123456789 100 200 2048
Streaming the tokens one after another, the server sends each part of the answer as soon as it is known.
"""


def byte_alphabet() -> list[str]:
    """The character that stands for each byte 0..255 in byte-level vocabularies, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    out, spare = [""] * 256, 256
    for byte in range(256):
        if byte in printable:
            out[byte] = chr(byte)
        else:
            out[byte] = chr(spare)
            spare += 1
    return out


def as_piece(data: bytes) -> str:
    """These bytes as a byte-level vocabulary writes them."""
    alphabet = byte_alphabet()
    return "".join(alphabet[b] for b in data)


def trained_bpe(vocab_size: int = 512, *, adds_bos: bool = True) -> Tokenizer:
    """A byte-level BPE trained on a few lines of text; special tokens have the first ids (`TINY_SPECIALS`)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in TINY_SPECIALS],
        initial_alphabet=byte_alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the test corpus gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return tokenizer


def piece_tokenizer(pieces: Sequence[bytes], specials: Sequence[str]) -> Tokenizer:
    """A vocabulary of `specials`, the 256 bytes and `pieces`, in this order, without merges.

    A text between special tokens that is exactly one piece becomes that piece; any other becomes bytes.
    """
    names = [*specials, *byte_alphabet(), *(as_piece(p) for p in pieces)]
    vocab = {name: i for i, name in enumerate(names)}
    if len(vocab) != len(names):
        raise ValueError("a piece is there twice, or is one byte or a special token")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, chat_template: str | None, config: Mapping[str, Any]) -> None:
    """Write the files that a Hugging Face folder holds for a tokenizer; `config` names its special tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        **config,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
