"""Windows on a request's tokens, and which tokens end it.

Promises: a window cannot change the list that it shows; a prompt that leaves no room in the context is refused here.
Does not know: how far a request has come.

Owns: nothing.
"""

from collections.abc import Sequence
from typing import overload

from octavo.base.errors import ContextLengthError
from octavo.base.requests import EngineRequest


class TokensView(Sequence[int]):
    """A window on a request's running token list that cannot change it (REQ-2).

    Owns: nothing; it shows what the list holds when it is read.
    """

    __slots__ = ("_start", "_stop", "_tokens")

    def __init__(self, tokens: list[int], start: int = 0, stop: int | None = None) -> None:
        self._tokens = tokens
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return (len(self._tokens) if self._stop is None else self._stop) - self._start

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[self._start : self._stop][index]


def end_for_length(num_prompt: int, max_tokens: int | None, max_model_len: int) -> int:
    """Number of tokens at which a request ends for length."""
    wants_output = max_tokens is None or max_tokens > 0
    if num_prompt == 0:
        raise ContextLengthError("the prompt is empty; send at least one token", param="prompt")
    if num_prompt + wants_output > max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and leaves no room in a context of {max_model_len}; shorten it",
            param="prompt",
        )
    return max_model_len if max_tokens is None else min(num_prompt + max_tokens, max_model_len)


def stop_ids(source: EngineRequest) -> dict[int, int | None]:
    """Token ids that end the request, each with the `stop_reason` to report."""
    ids: dict[int, int | None] = {token: token for token in source.sampling.stop_token_ids}
    if not source.sampling.ignore_eos:
        ids.update(dict.fromkeys(source.eos_token_ids))
    return ids
