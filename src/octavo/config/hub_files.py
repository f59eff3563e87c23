"""Which files of a repository make a model.

Promises: weights in one format, and what is needed to read text with them; of several GGUF variants exactly one, all
of its parts included; a choice that nobody made is said.
Does not know: the network, or what is inside a file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from octavo.base.errors import LoadError
from octavo.config.names import HubName

# Taken when nobody chose, in this order: the best quality that is still small, as those who publish them advise.
PREFERRED_TAGS: Final = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")

_TAG: Final = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_[A-Z0-9]+)*|BF16|FP16|F16|FP32|F32))(?![A-Z0-9])"
)
_SPLIT: Final = re.compile(r"-(\d{5})-of-(\d{5})$", re.IGNORECASE)
_NOT_A_MODEL: Final = re.compile(r"(^|/)(mmproj|imatrix)|imatrix\.gguf$", re.IGNORECASE)
_TEXT_FILES: Final = re.compile(
    r"[^/.][^/]*\.(json|jinja|model|tiktoken)|(vocab|merges)\.txt|additional_chat_templates/[^/]+\.jinja"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a repository. `digest` is `sha256:...`, or `git:...` (git's own hash), or None when not told."""

    path: str
    size: int | None  # bytes
    digest: str | None = None

    @property
    def name(self) -> str:
        """Without its folder."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChoice:
    """The files to fetch, the tag they stand for (GGUF only), and what is to be said about the choice."""

    files: tuple[HubFile, ...]
    tag: str | None = None
    why: str | None = None


def choose_files(name: HubName, files: Sequence[HubFile]) -> FileChoice:
    """What to fetch of a repository's files; raises `LoadError` when they hold no model or more than one."""
    variants = _variants(files)
    weights = [f for f in files if "/" not in f.path and f.path.endswith(".safetensors")]
    if name.tag is not None:
        return _tagged(name, variants, name.tag)
    if weights and any(f.path == "config.json" for f in files):
        own = [f for f in weights if f.name.startswith("model")] or weights  # consolidated.*: the same once more
        return FileChoice(files=(*(f for f in files if _TEXT_FILES.fullmatch(f.path)), *own))
    if variants:
        return _preferred(name, variants)
    if any(f.path.endswith((".bin", ".pt", ".pth")) for f in files):
        raise LoadError(
            f"{name} holds its weights as Python pickles (*.bin), which can run code when they are read; look for the "
            "same model in safetensors or GGUF"
        )
    raise LoadError(f"{name} holds neither safetensors with a config.json nor a GGUF file: no model that can be served")


def tag_of(path: str) -> str | None:
    """The tag in a GGUF file's name, such as Q4_K_M, or None."""
    found = _TAG.findall(_stem(path).upper())
    return found[-1] if found else None


def _stem(path: str) -> str:
    """The path without its ending and its part number: the same for all parts of a split file."""
    return _SPLIT.sub("", path[: -len(".gguf")] if path.lower().endswith(".gguf") else path)


def _variants(files: Sequence[HubFile]) -> dict[str, list[HubFile]]:
    found: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda f: f.path):
        if file.path.lower().endswith(".gguf") and not _NOT_A_MODEL.search(file.path):
            found.setdefault(_stem(file.path), []).append(file)
    return found


def _tagged(name: HubName, variants: dict[str, list[HubFile]], tag: str) -> FileChoice:
    if not variants:
        raise LoadError(f"{name.repo} holds no GGUF files, and {tag} is the tag of one; leave :{tag} out")
    asked = _stem(tag).upper()
    exact = [stem for stem in variants if asked in (stem.upper(), stem.upper().rpartition("/")[2], tag_of(stem))]
    within = re.compile(rf"(?<![A-Z0-9_]){re.escape(asked)}(?![A-Z0-9_])")
    found = exact or [stem for stem in variants if within.search(stem.upper())]
    if not found:
        raise LoadError(f"{name.repo} has no GGUF file with the tag {tag}; it has {_listed(variants)}")
    if len(found) > 1:
        names = ", ".join(f"{name.repo}:{_file_name(stem)}" for stem in found[:6])
        raise LoadError(f"{name} can mean {len(found)} files; say which: {names}{_more(found, 6)}")
    return FileChoice(files=_whole(name, variants[found[0]]), tag=tag)


def _preferred(name: HubName, variants: dict[str, list[HubFile]]) -> FileChoice:
    for tag in PREFERRED_TAGS:
        found = [stem for stem in variants if tag_of(stem) == tag]
        if len(found) == 1:
            others = len(variants) - 1
            why = f"{name.repo} holds {others + 1} GGUF variants; taking {tag} (others: {name.repo}:TAG)"
            return FileChoice(files=_whole(name, variants[found[0]]), tag=tag, why=why if others else None)
    if len(variants) == 1:
        stem, files = next(iter(variants.items()))
        return FileChoice(files=_whole(name, files), tag=tag_of(stem) or _file_name(stem))
    raise LoadError(
        f"{name} holds several models in GGUF; say which, such as {name.repo}:TAG, where TAG is one of {_listed(variants)}"
    )


def _listed(variants: dict[str, list[HubFile]]) -> str:
    """The tags to choose from; file names where tags would not tell."""
    tags = [tag_of(stem) for stem in variants]
    names = [t if t and tags.count(t) == 1 else _file_name(stem) for t, stem in zip(tags, variants, strict=True)]
    return ", ".join(names[:24]) + _more(names, 24)


def _more(names: Sequence[str], shown: int) -> str:
    return f" and {len(names) - shown} more" if len(names) > shown else ""


def _file_name(stem: str) -> str:
    return stem.rpartition("/")[2] + ".gguf"


def _whole(name: HubName, files: list[HubFile]) -> tuple[HubFile, ...]:
    """All parts of a split file, or `LoadError` where the repository lacks some."""
    match = _SPLIT.search(files[0].path[: -len(".gguf")])
    if match is not None and len(files) != int(match[2]):
        raise LoadError(f"{name} lacks parts of {files[0].name}: it holds {len(files)} of {int(match[2])}")
    return tuple(files)
