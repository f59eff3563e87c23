"""Which architectures there are, as data, and what to say of one that is not among them.

Promises: names are those of Hugging Face's `architectures`; nothing is imported to look one up.
Does not know: how a model is built (see `models.registry`), or which plugins are installed.
"""

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Final

_LLAMA: Final = "octavo.models.catalogue.llama:LlamaForCausalLM"
ARCHITECTURES: Final[Mapping[str, str]] = {  # name -> module:class
    "LlamaForCausalLM": _LLAMA,  # SmolLM and SmolLM2 too
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}
PLUGIN_GROUP: Final = "octavo.models"  # entry points of packages that bring more
_TRULY_NEAR: Final = 0.88  # the share of letters that agree: a slip of the pen, not another family


def not_supported(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an architecture that nobody builds; a near name only where it was surely meant."""
    near = next((other for other in known if _is_slip(name, other)), None)
    meant = "" if near is None else f"; did you mean {near}?"
    return f"{name!r} is not supported; these are: {', '.join(known)}{meant}"


def _is_slip(name: str, other: str) -> bool:
    if re.sub(r"\D", "", name) != re.sub(r"\D", "", other):  # another number is another model
        return False
    end = "forcausallm"
    mine, known = name.lower(), other.lower()
    if mine.endswith(end) and known.endswith(end):
        mine, known = mine.removesuffix(end), known.removesuffix(end)
    return difflib.SequenceMatcher(None, mine, known).ratio() >= _TRULY_NEAR
