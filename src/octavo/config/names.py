"""What a model is called, and what that name means.

Promises: one reading of a name everywhere: a path, the built-in model, or `owner/name[@revision][:TAG]` on a hub; a
name that is none of them is an error which says how names look.
Does not know: whether the model is here, or anywhere.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from octavo.base.errors import LoadError
from octavo.base.params import shown

EMBEDDED_NAME: Final = "SmolLM2-135M-Instruct"
EMBEDDED_FILE: Final = f"{EMBEDDED_NAME}.Q4_1.gguf"
# Its author's advice (model card); the file itself has no place for it.
EMBEDDED_SAMPLING: Final[Mapping[str, float]] = {"temperature": 0.2, "top_p": 0.9}
SHAPE: Final = "owner/name, owner/name@revision or owner/name:Q4_K_M"

_EMBEDDED: Final = frozenset({EMBEDDED_NAME.lower(), EMBEDDED_FILE.lower(), "smollm2"})
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[-.](?![-.]|$|[/@:]))*"  # the hub's own rule: no double or last dash or dot
_HUB: Final = re.compile(
    rf"(?:https://(?:huggingface\.co|hf\.co)/)?(?P<repo>{_PART}/{_PART})"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?(?::(?P<tag>[A-Za-z0-9][A-Za-z0-9._/-]*))?"
)
_LONGEST_SHOWN: Final = 200  # in a message: the end of a path says most
_LONGEST: Final = 96  # characters of a repository's name, owner included (the hub's limit), and of the rest


def is_embedded(name: str) -> bool:
    """True for the names by which people call the model that needs no name; `owner/name` is never one of them."""
    return name.lower() in _EMBEDDED


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model on a hub: a repository, a revision of it (None: the newest) and one file's tag (None: the whole)."""

    repo: str  # owner/name
    revision: str | None = None
    tag: str | None = None  # Q4_K_M, or the name of a GGUF file

    def __str__(self) -> str:
        """As people write it."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.tag}" if self.tag else "")

    @property
    def folder(self) -> str:
        """The name of its folder in the cache; two names never share one, whatever the case of the tag."""
        parts = [self.repo.replace("/", "--")]  # "--" is in no repository's name
        if self.revision:
            parts.append("@" + quote(self.revision, safe=""))
        if self.tag:
            parts.append(quote(self.tag.upper(), safe=""))
        return "--".join(parts)


def hub_name(name: str) -> HubName:
    """Read `owner/name[@revision][:TAG]`; raises `LoadError` for what cannot be one."""
    match = _HUB.fullmatch(name)
    if match is None or any(len(part or "") > _LONGEST for part in match.groups()):
        raise LoadError(
            f"{shown(name, _LONGEST_SHOWN)} is neither a model folder, nor a GGUF file, nor a name such as {SHAPE}, "
            f"nor the built-in model ({EMBEDDED_NAME}); 'octavo list' shows what is here"
        )
    return HubName(repo=match["repo"], revision=match["revision"], tag=match["tag"])
