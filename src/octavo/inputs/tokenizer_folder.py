"""A tokenizer from a Hugging Face folder with a `tokenizer.json`.

Promises: the ids that Transformers 5 gives for the same folder. Like it, the post-processor in
`tokenizer.json` says whether BOS and EOS are added; `add_bos_token` and `add_eos_token` beside it do not.
And like it, a folder that declares Llama's own tokenizer class gets that class's rules for spaces, whatever
older versions wrote into `tokenizer.json`.
Does not know: chat templates (see `chat`), or folders without `tokenizer.json` (see `tokenizer_hf`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from octavo.base.errors import LoadError
from octavo.config.facts_hf import read_json
from octavo.inputs.pieces import SPACE_MARK, decoder_kinds
from octavo.inputs.tokenizer_fast import FastTokenizer, SpecialTokens, with_fixed_ids


def read_if_there(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when the file is not there, `LoadError` when it is damaged."""
    return read_json(path) if path.is_file() else {}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, completed from the older `special_tokens_map.json` as Transformers does."""
    config = read_if_there(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_if_there(folder / "special_tokens_map.json")
    return config


def special_tokens(config: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens a folder names, each a string or an object with `content`."""
    named = {key: text for key, value in config.items() if key.endswith("_token") and (text := _content(value))}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        named |= {key: text for key, value in extra.items() if (text := _content(value))}
    return SpecialTokens(bos=named.get("bos_token"), eos=named.get("eos_token"), named=named)


def load_folder(folder: Path) -> FastTokenizer:
    """Read `tokenizer.json` and the special tokens named beside it."""
    core = _read_core(folder / "tokenizer.json")
    config = read_tokenizer_config(folder)
    specials = special_tokens(config)
    if _declares_llama(folder, config) and _is_sentencepiece_bpe(core):
        _use_llama_spaces(core, config)
    try:
        _add_missing(core, config, specials)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise LoadError(
            f"{folder / 'tokenizer_config.json'} is damaged: its added tokens cannot be understood"
        ) from None
    return FastTokenizer(core, specials)


def _read_core(file: Path) -> Core:
    """The library's tokenizer, with every added token under the id that the file gives it."""
    try:
        text = file.read_text(encoding="utf-8")
        core = Core.from_str(text)
        if any(core.token_to_id(token["content"]) != token["id"] for token in _added_tokens(text)):
            core = with_fixed_ids(json.loads(text), {})
    except Exception as e:  # the library raises the bare class
        raise LoadError(f"{file} cannot be read as a tokenizer: {e}") from None
    return core


def _added_tokens(text: str) -> list[dict[str, Any]]:
    """The list of a `tokenizer.json` that the library has read; a whole one takes long to parse, and this stands first."""
    start = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
    found: list[dict[str, Any]] = [] if start is None else json.JSONDecoder().raw_decode(text, start.end())[0]
    return found


def _declares_llama(folder: Path, config: Mapping[str, Any]) -> bool:
    """True where Transformers 5 takes its Llama class; for other model types it follows `tokenizer.json`."""
    declared = str(config.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer"
    return declared and read_if_there(folder / "config.json").get("model_type") in (None, "", "llama")


def _is_sentencepiece_bpe(core: Core) -> bool:
    return isinstance(core.model, models.BPE) and "ByteLevel" not in decoder_kinds(core.decoder)


def _use_llama_spaces(core: Core, config: Mapping[str, Any]) -> None:
    """A space before the text only, or before each stretch between special tokens where `legacy` says so."""
    adds_space = config.get("add_prefix_space") is not False
    scheme = "never" if not adds_space else "always" if config.get("legacy") else "first"
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)


def _add_missing(core: Core, config: Mapping[str, Any], specials: SpecialTokens) -> None:
    """Tokens that only the configuration names enter the vocabulary; those that are in it keep their flags."""
    present = {token.content for token in core.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    by_id = [AddedToken(**spec) for _, spec in sorted(listed.items(), key=lambda item: int(item[0]))]
    core.add_tokens([token for token in by_id if token.content not in present])
    present |= {token.content for token in by_id}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    values = [config.get(role, specials.named.get(role)) for role in specials.named] + list(_values(extra))
    named = {text: value for value in values if (text := _content(value))}
    core.add_special_tokens([_token(value) for text, value in named.items() if text not in present])


def _token(value: Any) -> AddedToken:
    """A special token from its text, or from an object with its flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    flags = {flag: value[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized") if flag in value}
    return AddedToken(value["content"], special=True, **flags)


def _values(extra: Any) -> Iterable[Any]:
    return extra.values() if isinstance(extra, Mapping) else extra


def _content(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
