"""Tokenizers that only Transformers can read, from a child process.

Promises: torch and transformers stay out of the process that asks. Where Transformers makes a fast
tokenizer (nearly always: it converts `tokenizer.model`), the child hands it over and ends; else it stays
and answers calls one at a time.
Does not know: how a folder is read when it has a `tokenizer.json`.

Run as a module, this file is the child: `python -m octavo.inputs.tokenizer_hf FOLDER`. It speaks JSON
lines on its standard input and output and ends when its input closes.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tokenizers import Tokenizer as Core

from octavo.base.errors import LoadError, ServerError
from octavo.base.interpreter import interrupts_held, leave_interrupts, module_command
from octavo.base.packages import install_command
from octavo.config.facts_hf import read_json
from octavo.inputs.tokenizer_fast import FastTokenizer, SpecialTokens, without_surrogates

VOCABULARIES = (
    "tokenizer.model", "tokenizer.model.v3", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "vocab.json",
    "vocab.txt",
)  # fmt: skip

WITHOUT_VOCABULARY = frozenset({"ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer"})  # classes that need no file


def load_through_child(folder: Path) -> "FastTokenizer | ChildTokenizer":
    """The tokenizer of a folder without `tokenizer.json`; raises `LoadError` with Transformers' own reason."""
    if not any((folder / name).is_file() for name in VOCABULARIES) and not _needs_no_vocabulary(folder):
        raise LoadError(
            f"{folder} has no tokenizer: it holds no tokenizer.json, tokenizer.model or vocab.json; put the model's "
            "tokenizer files beside its weights"
        )
    child = _Child(folder)
    hello = child.receive()
    if "error" in hello:
        child.close()
        raise LoadError(f"the tokenizer in {folder} cannot be read: {hello['error']}")
    if "core" in hello:
        child.close()
        named = hello["named"]
        specials = SpecialTokens(bos=named.get("bos_token"), eos=named.get("eos_token"), named=named)
        return FastTokenizer(Core.from_str(hello["core"]), specials)
    return ChildTokenizer(child, hello)


def _needs_no_vocabulary(folder: Path) -> bool:
    file = folder / "tokenizer_config.json"
    return file.is_file() and read_json(file).get("tokenizer_class") in WITHOUT_VOCABULARY


class _Child:
    """The child process and its pipes.

    Owns: the process; the lock keeps each question and its answer together.
    """

    def __init__(self, folder: Path) -> None:
        command = module_command("octavo.inputs.tokenizer_hf", str(folder))
        with interrupts_held():
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")  # fmt: skip
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _end, self._process)

    def receive(self) -> dict[str, Any]:
        """The next line the child says."""
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise ServerError("the tokenizer's child process has ended; restart the server")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **question: Any) -> Any:
        """One question and its answer."""
        with self._lock:
            try:
                pipe = _pipe(self._process.stdin)
                pipe.write(json.dumps(question) + "\n")
                pipe.flush()
            except (OSError, ValueError):
                raise ServerError("the tokenizer's child process has ended; restart the server") from None
            answer = self.receive()
        if "error" in answer:
            raise ServerError(f"the tokenizer failed: {answer['error']}")
        return answer["value"]


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ServerError("the tokenizer's child process has no pipe")
    return stream


def _end(process: "subprocess.Popen[str]") -> None:
    """Close the pipes, which ends the child, and wait for it."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()


class ChildTokenizer:
    """Satisfies `tokenizer.Tokenizer` by asking the child. It cannot protect text: `protect` changes nothing.

    Owns: nothing mutable; the child is its own.
    """

    def __init__(self, child: _Child, facts: Mapping[str, Any]) -> None:
        self._child = child
        self.vocab_size: int = facts["vocab_size"]
        self.bos_token_id: int | None = facts["bos"]
        self.eos_token_id: int | None = facts["eos"]
        self.special_ids: frozenset[int] = frozenset(facts["special_ids"])
        self.end_ids: frozenset[int] = frozenset()
        self.adds_bos: bool = facts["adds_bos"]
        self.template_variables: Mapping[str, str] = facts["named"]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._child.ask(op="encode", text=without_surrogates(text), special=add_special_tokens)
        return ids

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids`."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        text: str = self._child.ask(
            op="decode", ids=known, skip=skip_special_tokens, spaces=spaces_between_special_tokens
        )
        return text

    def token_id(self, text: str) -> int | None:
        """The id whose entry is written exactly so."""
        index: int | None = self._child.ask(op="id", text=text)
        return index

    def token_text(self, token_id: int) -> str:
        """One token's own text."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own text as bytes."""
        return self.token_text(token_id).encode()

    def open_stream(self, *, skip_special_tokens: bool) -> None:
        """No fast path: each call crosses a process border."""
        return

    def protect(self, text: str) -> str:
        """The text as it is."""
        return text

    def unprotect(self, text: str) -> str:
        """The text as it is."""
        return text

    def close(self) -> None:
        """End the child process."""
        self._child.close()


# ---- the child ---------------------------------------------------------------------------------


def _describe(tokenizer: Any) -> dict[str, Any]:
    """What the child says first: the whole fast tokenizer, or the facts of one that must be asked."""
    named = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is not None:
        return {"core": core.to_str(), "named": named}
    start = tokenizer.encode("", add_special_tokens=True)
    bos = tokenizer.bos_token_id
    return {
        "named": named,
        "vocab_size": max(tokenizer.get_vocab().values(), default=-1) + 1,
        "bos": bos,
        "eos": tokenizer.eos_token_id,
        "special_ids": sorted(set(tokenizer.all_special_ids)),
        "adds_bos": bos is not None and start[:1] == [bos],
    }


def _answer(tokenizer: Any, question: Mapping[str, Any]) -> Any:
    if question["op"] == "encode":
        return list(tokenizer.encode(question["text"], add_special_tokens=question["special"]))
    if question["op"] == "id":
        return tokenizer.get_vocab().get(question["text"])
    return tokenizer.decode(
        question["ids"],
        skip_special_tokens=question["skip"],
        spaces_between_special_tokens=question["spaces"],
        clean_up_tokenization_spaces=False,
    )


def _safely(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return make()
    except Exception as e:  # whatever a tokenizer's own code raises belongs to the question, not to the child
        return {"error": f"{type(e).__name__}: {e}".splitlines()[0][:500]}


def child_main(folder: str) -> None:
    """Load the tokenizer, say what it is, then answer until the input closes."""
    leave_interrupts()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def say(message: Mapping[str, Any]) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    # tokenizers do not need torch, and it takes seconds to import
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)  # else it says on every start that torch is missing
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - optional, and only this child may load it
    except ImportError:
        say(
            {
                "error": f"it needs Transformers: add a tokenizer.json, or {install_command('slow-tokenizers', package='transformers')}"
            }
        )
        return
    loaded: list[Any] = []

    def load() -> dict[str, Any]:
        loaded.append(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        return _describe(loaded[0])

    hello = _safely(load)
    say(hello)
    if "error" in hello or "core" in hello:
        return
    for line in sys.stdin:
        question = json.loads(line)
        say(_safely(lambda question=question: {"value": _answer(loaded[0], question)}))  # type: ignore[misc]


if __name__ == "__main__":
    child_main(sys.argv[1])
