"""Where chat templates are kept in a model's files.

Promises: every template a folder or a GGUF file holds, by name, with the precedence Transformers gives
them: files of their own before what `tokenizer_config.json` holds.
Does not know: what a template means.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.base.gguf import is_gguf, read_gguf
from octavo.config.facts import gguf_alone
from octavo.inputs import tokenizer_folder, tokenizer_gguf

GGUF_KEY = "tokenizer.chat_template"


def read_templates(source: str) -> dict[str, str]:
    """Template texts by name; the one without a name is `default`."""
    path = gguf_alone(Path(source))
    if path.is_dir():
        return _from_folder(path)
    return _from_gguf(read_gguf(path, with_tensors=False).metadata) if is_gguf(path) else {}


def read_variables(source: str) -> dict[str, str]:
    """The special tokens that templates may name, as text."""
    path = gguf_alone(Path(source))
    if path.is_dir():
        return dict(tokenizer_folder.special_tokens(tokenizer_folder.read_tokenizer_config(path)).named)
    if is_gguf(path):
        return dict(tokenizer_gguf.special_tokens(read_gguf(path, with_tensors=False).metadata).named)
    return {}


def _from_folder(folder: Path) -> dict[str, str]:
    found = {}
    if (main := folder / "chat_template.jinja").is_file():
        found["default"] = main.read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = extra.read_text(encoding="utf-8")
    if found:
        return found
    for name in ("tokenizer_config.json", "chat_template.json"):
        if named := _named(tokenizer_folder.read_if_there(folder / name).get("chat_template")):
            return named
    return {}


def _named(value: Any) -> dict[str, str]:
    """A template, a list of `{name, template}`, or an object of both."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        pairs = [(item.get("name"), item.get("template")) for item in value if isinstance(item, Mapping)]
        return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}


def _from_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in metadata.items():
        if key == GGUF_KEY:
            found["default"] = value
        elif key.startswith(GGUF_KEY + "."):
            found[key.removeprefix(GGUF_KEY + ".")] = value
    return found
