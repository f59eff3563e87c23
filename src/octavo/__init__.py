"""Octavo: an engine for LLM inference and serving that a person can read.

The public names are listed in `__all__`; everything else is private and may change.
Importing this package loads nothing heavy: names are resolved on first use, so that
`octavo --help` and the control plane never pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.base.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.base.params import SamplingParams
    from octavo.entrypoints.llm import LLM

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "octavo.entrypoints.llm",
    "SamplingParams": "octavo.base.params",
    "RequestOutput": "octavo.base.outputs",
    "CompletionOutput": "octavo.base.outputs",
    "Logprob": "octavo.base.outputs",
}

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use (PEP 562)."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public, for completion and help; nothing is imported for it."""
    return sorted({*globals(), *__all__})
