"""Which class builds which architecture.

Promises: looking up an architecture imports only its own file and touches no device (PLG-9); an unknown one is an
error that lists close ones.
Does not know: weights, or any model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from octavo.base.errors import LoadError
from octavo.plugins.registry import Registry

_LLAMA: Final = "octavo.models.catalogue.llama:LlamaForCausalLM"
ARCHITECTURES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": _LLAMA,  # SmolLM and SmolLM2 too
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}
PLUGIN_GROUP: Final = "octavo.models"

Architectures = Registry[Any]  # classes that satisfy models.build.Model


def architectures(plugins: Sequence[str] | None = ()) -> Architectures:
    """The built-in architectures, and those of installed packages named in `plugins` (None: all of them)."""
    registry: Architectures = Registry("architecture", ARCHITECTURES, error=LoadError)
    if plugins is None or plugins:
        registry.discover(PLUGIN_GROUP, plugins)
    return registry


def resolve(architecture: str, registry: Architectures | None = None) -> Any:
    """The class of an architecture by the name in `config.json`. Raises `LoadError` for an unknown one."""
    return (architectures() if registry is None else registry).load(architecture)
