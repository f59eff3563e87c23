"""`LLM`: the engine as a Python class.

Promises: one result for each prompt, in the order of the prompts, whatever their lengths (INP-4, OFL-01); the
same token ids as the server would use for the same prompt; nothing is computed when one prompt is invalid.
Does not know: how prompts become tokens, or how the engine computes.

    with LLM("path/to/model") as llm:
        for output in llm.generate(["Hello", "The capital of France is"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from octavo.base.errors import ClientError, EngineDead
from octavo.base.outputs import RequestOutput, StatsSnapshot
from octavo.base.params import SamplingParams, shown
from octavo.entrypoints.llm_arguments import without_foreign
from octavo.observe.log import get_logger
from octavo.serving.info import EngineInfo
from octavo.serving.intake import placed, priority_warning
from octavo.serving.progress import open_progress
from octavo.serving.startup import open_offline
from octavo.serving.sync_engine import SyncEngine

if TYPE_CHECKING:
    from octavo.inputs.limits import RequestLimits
    from octavo.inputs.renderer import EngineInput, Renderer
    from octavo.inputs.tokenizer import Tokenizer

logger = get_logger(__name__)

Prompt = str | Mapping[str, Any] | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
T = TypeVar("T")
_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids"})


class Offline(Protocol):
    """What this class needs of the front that it opens."""

    @property
    def engine(self) -> SyncEngine: ...
    @property
    def renderer(self) -> "Renderer": ...
    @property
    def limits(self) -> "RequestLimits": ...
    @property
    def info(self) -> EngineInfo: ...
    def close(self) -> None: ...


class LLM:
    """A model in this process.

    `model` is a folder, a GGUF file, or a name to pull; the built-in SmolLM2 when not given. `options` are
    keywords by the names of the options reference (`max_model_len=4096`, `max_num_seqs=16`, ...); a misspelled
    one is an error that names the nearest. Arguments of other engines' offline class are accepted where they change
    nothing here, with one warning. `multiprocessing=True` runs the engine in a process of its own.

    Safe to use from several threads. It closes by itself when it is dropped and when the program ends; to free its
    memory before, use it as a context manager or call `close()`. A process forked from this one has no engine
    (threads do not come along) and is told so; it leaves this one's engine alone.

    Owns: its engine.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        opener: Callable[[Mapping[str, Any]], Offline] = open_offline,
        **options: Any,
    ) -> None:
        self._process = os.getpid()
        if model is not None:
            options["model"] = str(model)
        options = without_foreign(options, logger.warning)
        self._frontend: Offline | None = opener(options)
        # Runs when this object is dropped, and at the latest at the interpreter's end, while threads and modules are
        # still whole: a destructor would come too late then.
        self._end = weakref.finalize(self, _end, self._frontend, self._process)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Continue each prompt; one result for each, in order.

        A prompt is a string, a list of token ids, `{"prompt": str}` or `{"prompt_token_ids": [int, ...]}`; `prompts`
        is one, or any iterable of them. `sampling_params` hold for all prompts, or are a list with one for each; when not
        given, the model's defaults are used. `use_tqdm` shows progress on a terminal.
        Raises `ClientError` when a prompt or its parameters cannot be served; then nothing was computed.
        """
        frontend = self._open_frontend("generate")
        given = _prompts(prompts)
        inputs = [_numbered(i, len(given), self._input, frontend, prompt) for i, prompt in enumerate(given)]
        return self._run(frontend, inputs, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int = 0,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several; one result for each, in order.

        A conversation is a list of messages (`{"role": "user", "content": "..."}`), rendered with the model's chat
        template or with `chat_template`. With `continue_final_message` the last message is continued instead of
        answered, and `add_generation_prompt` is off unless it is given.
        """
        frontend = self._open_frontend("chat")
        conversations = _conversations(messages)
        options: dict[str, Any] = {
            "tools": None if tools is None else _listed("tools", tools),
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }

        def render(frontend: Offline, conversation: Sequence[Message]) -> "EngineInput":
            return frontend.renderer.chat(_listed("a conversation", conversation), **options)

        inputs = [_numbered(i, len(conversations), render, frontend, c) for i, c in enumerate(conversations)]
        return self._run(frontend, inputs, sampling_params, use_tqdm, priority)

    def get_tokenizer(self) -> "Tokenizer":
        """The model's tokenizer, the one that prompts go through."""
        return self._open_frontend("get_tokenizer").renderer.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's author recommends, else neutral values (INP-22)."""
        return SamplingParams(**self._open_frontend("get_default_sampling_params").info.default_sampling)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, also while requests run; False when some old content can still be found."""
        return bool(self._open_frontend("reset_prefix_cache").engine.call("reset_prefix_cache"))

    def stats(self) -> StatsSnapshot:
        """Counters and gauges of the engine now: running and waiting requests, cache hits, preemptions, ..."""
        return cast(StatsSnapshot, self._open_frontend("stats").engine.call("stats"))

    def close(self) -> None:
        """Stop the engine and free its memory; may be called twice."""
        frontend, self._frontend = self._frontend, None
        if frontend is not None and self._end.detach() and os.getpid() == self._process:
            frontend.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_frontend(self, method: str) -> Offline:
        frontend = self._frontend
        if frontend is None:
            raise EngineDead(f"LLM.{method} was called after close(); make a new LLM")
        if os.getpid() != self._process:
            raise EngineDead(f"LLM.{method} was called in a forked process, which has no engine; make a new LLM there")
        if not frontend.engine.alive():
            raise EngineDead(f"LLM.{method}: the engine is gone; make a new LLM")
        return frontend

    @staticmethod
    def _input(frontend: Offline, prompt: Any) -> "EngineInput":
        if isinstance(prompt, str):
            return frontend.renderer.text(prompt)
        if _is_ids(prompt):
            return frontend.renderer.tokens(prompt)
        if not isinstance(prompt, Mapping):
            raise ClientError(
                f"a prompt must be a string, a list of token ids or a dict, got {shown(prompt)}", param="prompts"
            )
        known = _PROMPT_KEYS & prompt.keys()
        if len(known) != 1 or len(prompt) != 1:
            raise ClientError(
                f"a prompt dict must have exactly one of 'prompt' and 'prompt_token_ids', got {sorted(map(str, prompt))}",
                param="prompts",
            )
        if "prompt" in known:
            if not isinstance(prompt["prompt"], str):
                raise ClientError(f"'prompt' must be a string, got {type(prompt['prompt']).__name__}", param="prompt")
            return frontend.renderer.text(prompt["prompt"])
        return frontend.renderer.tokens(prompt["prompt_token_ids"])

    def _run(
        self, frontend: Offline, inputs: "list[EngineInput]", params: Params, use_tqdm: bool, priority: int
    ) -> list[RequestOutput]:
        each = self._params(frontend, params, inputs)
        told = [warning for one in inputs for warning in one.warnings]
        for warning in dict.fromkeys([*told, *filter(None, [priority_warning(priority, frontend.info)])]):
            logger.warning("%s", warning)
        progress = open_progress(len(inputs), sys.stderr, time.monotonic) if use_tqdm else None
        return frontend.engine.generate(list(zip(inputs, each, strict=True)), progress=progress, priority=priority)

    @staticmethod
    def _params(frontend: Offline, params: Params, inputs: "list[EngineInput]") -> list[SamplingParams]:
        """One for each input; the defaults ask for no more tokens than the context has room for."""
        if params is None:
            default = SamplingParams(**frontend.info.default_sampling)

            def fit(frontend: Offline, one: "EngineInput") -> SamplingParams:
                return frontend.limits.check(one, default, max_tokens_is_default=True)

            return [_numbered(i, len(inputs), fit, frontend, one) for i, one in enumerate(inputs)]
        if isinstance(params, SamplingParams):
            return [params] * len(inputs)
        if isinstance(params, str | bytes | Mapping):
            raise _no_params(params)
        each = _listed("sampling_params", params)
        for one in each:
            if not isinstance(one, SamplingParams):
                raise _no_params(one)
        if len(each) != len(inputs):
            raise ClientError(
                f"sampling_params must be one or as many as the prompts: got {len(each)} for {len(inputs)} prompts",
                param="sampling_params",
            )
        return each


def _prompts(prompts: Any) -> list[Any]:
    """One prompt, or several, as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if callable(listed := getattr(prompts, "tolist", None)):  # an array or a tensor, of one prompt or several
        prompts = listed()
    given = _listed("prompts", prompts)
    return [given] if given and all(_is_id(one) for one in given) else given


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_ids(prompt: object) -> bool:
    """A list of ids of any kind, arrays included; what is in it is checked where ids are read."""
    return isinstance(prompt, list | tuple) or hasattr(prompt, "tolist")


def _conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation, or several, as a list of conversations."""
    if isinstance(messages, str | Mapping):
        raise ClientError(
            "messages must be a list of messages such as {'role': 'user', 'content': '...'}, or a list of such lists",
            param="messages",
        )
    given = _listed("messages", messages)
    num_messages = sum(isinstance(m, Mapping) for m in given)
    if given and num_messages == len(given):
        return [given]
    if num_messages:
        raise ClientError("messages must be messages or conversations, not a mix of both", param="messages")
    return given


def _listed(name: str, given: Any) -> list[Any]:
    """The entries of any iterable."""
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise ClientError(f"{name} must be a list, got {type(given).__name__}", param=name.split()[-1])
    return list(given)


def _no_params(given: Any) -> ClientError:
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    return ClientError(
        f"sampling_params must be SamplingParams, or a list of them with one for each prompt, got {kind}",
        param="sampling_params",
    )


def _numbered(index: int, total: int, render: Callable[[Offline, Any], T], frontend: Offline, item: Any) -> T:
    """`render(front, item)`, with the item's place in the list in the error's message."""
    try:
        return render(frontend, item)
    except ClientError as error:
        raise placed(error, index, total) from None


def _end(frontend: Offline, process: int) -> None:
    """Close an engine that nobody will use again, in the process that made it: a forked one has none of its threads."""
    if os.getpid() == process:
        frontend.engine.forget_calls()
        frontend.close()
