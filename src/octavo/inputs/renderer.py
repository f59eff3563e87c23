"""Text, chats and ids to the input of one request, for every door alike (INP-3).

Promises: offline and online calls give the same ids; the asynchronous calls run in a thread pool and leave
the event loop free.
Does not know: requests, limits (see `limits`), or HTTP.

How many BOS tokens. A text gets the one that the tokenizer adds, and never a second: one that was rendered
before and begins with BOS keeps its own (Transformers would put another before it). A chat begins with
exactly one whenever the tokenizer adds one, whether or not the template writes it; with
`add_special_tokens=False` the ids are those of the rendered text alone, as in Transformers.

Control tokens in people's words. Prompts for completions and what a template writes may contain special
tokens. Those in messages of any role, in tools, documents and variables, are read as plain text unless
`literal_user_text` is turned off, so nobody ends a turn by typing.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.base.errors import ClientError, ContextLengthError
from octavo.base.numbers import whole
from octavo.base.params import shown
from octavo.inputs.chat import ChatOptions, ChatTemplate
from octavo.inputs.tokenizer import Tokenizer

T = TypeVar("T")
Ints = npt.NDArray[np.integer[Any]]


class EngineInput(msgspec.Struct, frozen=True):
    """One prompt ready for the engine; `prompt` is its text where there was one.

    `warnings` are sentences for whoever sent it: what could not be made as it was meant.
    """

    prompt_token_ids: tuple[int, ...]
    prompt: str | None = None
    warnings: tuple[str, ...] = ()


class Renderer:
    """Makes `EngineInput`s. Every method may be called from any thread.

    Owns: its thread pool.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        num_threads: int = 4,
        literal_user_text: bool = True,
        allow_request_templates: bool = True,
        max_chars: int | None = None,
    ) -> None:
        """`allow_request_templates` lets a request bring its own chat template, which is code in a sandbox
        that can still run for long; servers open to strangers turn it off. `max_chars` is the longest text that
        is given to the tokenizer: more cannot fit the context, and would only take long.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._protect = tokenizer.protect if literal_user_text else None
        self._allow_request_templates = allow_request_templates
        self._max_chars = max_chars
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="octavo-render")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The model's chat templates."""
        return self._template

    def text(self, prompt: str, *, add_special_tokens: bool = True) -> EngineInput:
        """A completions prompt. Special tokens written in it are recognized; see the module about BOS."""
        if not isinstance(prompt, str):
            raise ClientError(f"prompt must be a string, got {type(prompt).__name__}", param="prompt")
        self._check_length(prompt, "prompt")
        ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        bos = self._tokenizer.bos_token_id
        if add_special_tokens and self._tokenizer.adds_bos and ids[:2] == [bos, bos]:
            del ids[0]
        return EngineInput(tuple(ids), prompt)

    def tokens(self, ids: "Sequence[int] | Ints") -> EngineInput:
        """A prompt given as ids; raises `ClientError` for anything that is not a list of integers."""
        return EngineInput(_integers("prompt", ids))

    def chat(
        self,
        messages: object,
        *,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool | None = None,
    ) -> EngineInput:
        """A conversation, through the chat template and then the tokenizer.

        `add_generation_prompt` not given means true, or false when the final message is to be continued.
        `add_special_tokens`: None for one BOS where the tokenizer adds one, False for the template's text
        alone, True for all that the tokenizer adds.
        """
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise ClientError("chat_template_kwargs must be an object", param="chat_template_kwargs")
        if chat_template is not None:
            self._check_request_template(chat_template)
        prompts = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        options = ChatOptions(
            tools=tools,
            documents=documents,
            add_generation_prompt=prompts,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            protect=self._protect,
            variables=chat_template_kwargs or {},
            special=self._tokenizer.template_variables,
        )
        warnings: list[str] = []
        try:
            marked = self._template.render(messages, options, warnings.append)
        except RecursionError:
            raise ClientError(
                "the conversation, or something beside it, is nested too deeply", param="messages"
            ) from None
        self._check_length(marked, "messages")
        ids = self._tokenizer.encode(marked, add_special_tokens=bool(add_special_tokens))
        if add_special_tokens is not False:
            ids = self._with_one_bos(ids)
        return EngineInput(tuple(ids), self._tokenizer.unprotect(marked), tuple(warnings))

    def _check_length(self, text: str, param: str) -> None:
        if self._max_chars is not None and len(text) > self._max_chars:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters and at most {self._max_chars} are read here; shorten it",
                param=param,
            )

    async def atokens(self, ids: "Sequence[int] | Ints") -> EngineInput:
        """`tokens` in the thread pool, for long prompts."""
        return await self._run(partial(self.tokens, ids))

    async def atext(self, prompt: str, *, add_special_tokens: bool = True) -> EngineInput:
        """`text` in the thread pool."""
        return await self._run(partial(self.text, prompt, add_special_tokens=add_special_tokens))

    async def achat(self, messages: object, **options: Any) -> EngineInput:
        """`chat` in the thread pool."""
        return await self._run(partial(self.chat, messages, **options))

    def detokenize(self, ids: "Sequence[int] | Ints", *, param: str = "tokens") -> str:
        """The text of ids, special tokens included; raises `ClientError` for ids outside the vocabulary."""
        checked = _integers(param, ids)
        check_token_ids(param, checked, self._tokenizer.vocab_size)
        return self._tokenizer.decode(checked, skip_special_tokens=False)

    def close(self) -> None:
        """Stop the thread pool; calls in progress end first."""
        self._pool.shutdown()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self._tokenizer.bos_token_id
        if bos is None or not self._tokenizer.adds_bos:
            return ids
        if ids[:2] == [bos, bos]:
            return ids[1:]
        return ids if ids[:1] == [bos] else [bos, *ids]

    def _check_request_template(self, asked: object) -> None:
        if not isinstance(asked, str):
            raise ClientError("chat_template must be a string", param="chat_template")
        if asked not in self._template.names and not self._allow_request_templates:
            raise ClientError(
                "this server takes no chat templates from requests; leave chat_template out", param="chat_template"
            )


def _integers(name: str, ids: object) -> tuple[int, ...]:
    """A list, array or tensor of integers as a tuple; 2.0 is the integer 2, booleans and fractions are none."""
    if callable(listed := getattr(ids, "tolist", None)):  # numpy's, torch's, the standard library's
        ids = listed()
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise ClientError(f"{name} must be a list of token ids, got {type(ids).__name__}", param=name)
    if set(map(type, ids)) <= {int}:
        return tuple(ids)
    numbers = []
    for place, given in enumerate(ids):
        if (number := whole(given)) is None:
            raise ClientError(f"{name}[{place}] must be an integer token id, got {shown(given)}", param=name)
        numbers.append(number)
    return tuple(numbers)


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise `ClientError` naming the first id outside 0 .. vocab_size - 1."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        place, wrong = next((i, x) for i, x in enumerate(ids) if not 0 <= x < vocab_size)
        raise ClientError(
            f"{name}[{place}] is {wrong}, which is not a token id of this model: ids are 0 to {vocab_size - 1}",
            param=name,
        )
