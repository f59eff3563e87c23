"""What this model can take: lengths, vocabulary, and how much may be asked for (INP-20).

Promises: parameters that come back fit the model and have a number for `max_tokens`; every refusal names
the field, the value and the range.
Does not know: where the request came from. `SamplingParams` has checked what needs no model.

Nothing is shortened silently: a prompt that does not fit, or an answer that was asked for and does not fit
behind it, is refused with both numbers.
"""

from functools import lru_cache

from octavo.base.errors import ClientError, ContextLengthError
from octavo.base.params import SamplingParams, shown
from octavo.inputs.renderer import EngineInput, check_token_ids
from octavo.inputs.tokenizer import Tokenizer

MAX_LOGPROBS = 20


class RequestLimits:
    """Checks requests against one model. Any thread may ask.

    Owns: a memo of the last lists of bad words as ids, since all prompts of a request share one.
    """

    def __init__(
        self,
        *,
        max_model_len: int,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        max_logprobs: int = MAX_LOGPROBS,
    ) -> None:
        """`max_model_len` is prompt plus answer, in tokens; ids are 0 .. vocab_size - 1.

        `max_logprobs` is the most log-probabilities per token, -1 for no limit. Without a tokenizer (which
        only `bad_words` needs) requests with bad words are refused.
        """
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._max_logprobs = max_logprobs
        self._spelled = lru_cache(maxsize=16)(self._spellings)

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        """Ids from 0 up to this one, itself not included, may be used."""
        return self._vocab_size

    def check(
        self, input: EngineInput, params: SamplingParams, *, max_tokens_is_default: bool = False
    ) -> SamplingParams:
        """`params` with `max_tokens` resolved; raises `ClientError` for what this model cannot do.

        `max_tokens_is_default` says that the number is the door's own choice and the client asked for none:
        it is then lowered to what the context leaves.
        """
        room = self._room(input)
        self._check_ids(params)
        self._check_logprobs(params)
        _check_strings(params)
        return self._resolved(params, input, room, max_tokens_is_default)

    def bad_words_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as ids: as it stands at the start of a text, and as it stands after a space."""
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise ClientError("bad_words needs a tokenizer, and this engine has none", param="bad_words")
        return self._spelled(params.bad_words)

    def _spellings(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        if self._tokenizer is None:
            return ()
        for word in words:
            bare = word.lstrip(" ")
            for spelling in (bare, " " + bare) if bare else (word,):  # spaces alone are a word too
                if ids := tuple(self._tokenizer.encode(spelling, add_special_tokens=False)):
                    self._check_bad_word(word, ids)
                    found[ids] = None
        return tuple(found)

    def _check_bad_word(self, word: str, ids: tuple[int, ...]) -> None:
        wrong = next((i for i in ids if i >= self._vocab_size), None)
        if wrong is not None:
            raise ClientError(
                f"bad_words has {shown(word)}, which becomes the token id {wrong}, and ids of this model are 0 to "
                f"{self._vocab_size - 1}: it never says so; leave that word out",
                param="bad_words",
            )

    def _room(self, input: EngineInput) -> int:
        """Tokens that the context leaves for the answer."""
        ids = input.prompt_token_ids
        if not ids:
            raise ClientError("the prompt is empty: it must have at least one token", param="prompt")
        room = self._max_model_len - len(ids)
        if room == 0:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens and the context length is {self._max_model_len}: no room is left "
                f"for one token of an answer; shorten the prompt",
                param="prompt",
            )
        if room < 0:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, more than the context length of {self._max_model_len} allows; "
                f"shorten the prompt to at most {self._max_model_len - 1} tokens",
                param="prompt",
            )
        check_token_ids("prompt", ids, self._vocab_size)
        return room

    def _check_ids(self, params: SamplingParams) -> None:
        check_token_ids("stop_token_ids", params.stop_token_ids, self._vocab_size)
        check_token_ids("allowed_token_ids", params.allowed_token_ids or (), self._vocab_size)
        for key in params.logit_bias or ():
            if not 0 <= key < self._vocab_size:
                raise ClientError(
                    f"logit_bias has the key {key}, which is not a token id of this model: ids are 0 to "
                    f"{self._vocab_size - 1}",
                    param="logit_bias",
                )

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if asked is None or self._max_logprobs == -1:
                continue
            if asked == -1 or asked > self._max_logprobs:
                what = "the whole vocabulary" if asked == -1 else str(asked)
                raise ClientError(f"{name} must be at most {self._max_logprobs} here, got {what}", param=name)

    def _resolved(
        self, params: SamplingParams, input: EngineInput, room: int, max_tokens_is_default: bool
    ) -> SamplingParams:
        asked = params.max_tokens
        if asked is None or (max_tokens_is_default and asked > room):
            if params.min_tokens > room:
                raise ContextLengthError(
                    f"min_tokens is {params.min_tokens}, but a prompt of {len(input.prompt_token_ids)} tokens leaves "
                    f"{room} of the context length of {self._max_model_len}",
                    param="min_tokens",
                )
            return params.replace(max_tokens=room)
        if asked > room:
            raise ContextLengthError(
                f"the context length is {self._max_model_len} tokens, but {len(input.prompt_token_ids) + asked} were "
                f"asked for: {len(input.prompt_token_ids)} in the prompt and {asked} in the answer; lower max_tokens "
                f"to at most {room} or shorten the prompt",
                param="max_tokens",
            )
        return params


def _check_strings(params: SamplingParams) -> None:
    """Strings that are no text (lone surrogates) cannot be sent on or ever match."""
    for name in ("stop", "bad_words"):
        for i, text in enumerate(getattr(params, name)):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ClientError(f"{name}[{i}] holds half of a surrogate pair, which is no text", param=name) from None
