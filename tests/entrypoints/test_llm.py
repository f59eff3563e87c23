"""`LLM`: one result for each prompt, in order, for any mix (INP-4, OFL-01)."""

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from octavo.base.errors import ClientError, ConfigError, ContextLengthError, EngineDead
from octavo.base.params import SamplingParams
from octavo.config.args import options
from octavo.entrypoints.llm import LLM
from octavo.entrypoints.llm_arguments import FOREIGN, without_foreign
from octavo.inputs.chat import ChatTemplate
from octavo.inputs.renderer import Renderer
from octavo.plugins.features import engine_sections
from tests.support.toy_engine import ToyClient, hashed
from tests.support.toy_front import MAX_LEN, TEXT, ToyOffline, offline, prompt

RULE = hashed(TEXT.vocab_size, low=5)
SHORT = SamplingParams(max_tokens=4, seed=1)
HI = {"role": "user", "content": "hi"}


def opened(**changes: Any) -> tuple[LLM, ToyOffline, ToyClient]:
    client = ToyClient(RULE, max_running=5)
    frontend = offline(client, **changes)
    return LLM("folder", opener=lambda options: frontend), frontend, client


@pytest.fixture
def llm() -> Iterator[LLM]:
    with opened()[0] as llm:
        yield llm


def texts(outputs: list[Any]) -> list[list[str]]:
    return [[a.text for a in o.outputs] for o in outputs]


def test_forty_mixed_prompts_come_back_in_order_ofl_01(llm: LLM) -> None:
    prompts: list[Any] = [f"prompt number {i % 30} " * (1 + i % 4) for i in range(38)]
    prompts += [{"prompt": "a dict"}, {"prompt_token_ids": TEXT.encode("ids")}]
    params = [SamplingParams(max_tokens=1 + (i * 7) % 13, n=2, seed=i % 3) for i in range(40)]
    outputs = llm.generate(prompts, params)
    assert len(outputs) == 40 and all(len(o.outputs) == 2 for o in outputs)
    assert [o.prompt for o in outputs] == [*prompts[:38], "a dict", None]
    assert outputs[-1].prompt_token_ids == TEXT.encode("ids")
    alone = [llm.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
    assert texts(outputs) == texts(alone)


def test_one_prompt_an_empty_list_and_a_generator(llm: LLM) -> None:
    (one,) = llm.generate("hello", SHORT)
    assert one.outputs[0].finish_reason == "length" and len(one.outputs[0].token_ids) == 4
    assert llm.generate([]) == []
    assert texts(llm.generate((p for p in ["hello", "hello"]), SHORT)) == texts([one, one])
    assert texts(llm.generate(["hello"], SHORT)) == texts(llm.generate(["hello"], SHORT)) == texts([one])


def test_two_threads_at_once(llm: LLM) -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(llm.generate, [f"{k} {i}" for i in range(12)], SHORT) for k in "ab"]
        got = [texts(job.result()) for job in jobs]
    assert got == [texts(llm.generate([f"{k} {i}" for i in range(12)], SHORT)) for k in "ab"]


def test_an_invalid_prompt_raises_before_anything_is_sent() -> None:
    llm, _, client = opened()
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", "long " * MAX_LEN], SHORT)
    for wrong in (["fine", 7], [1, True], [{"text": "x"}], [{"prompt": "x", "prompt_token_ids": [1]}], [{}], [{"prompt": 3}]):  # fmt: skip
        with pytest.raises(ClientError):
            llm.generate(wrong, SHORT)  # type: ignore[arg-type]
    assert client.submitted == []
    llm.close()


def test_errors_say_which_prompt_and_what_to_do(llm: LLM) -> None:
    with pytest.raises(ClientError, match=r"prompt 1: a prompt must be a string, a list of token ids or a dict, got 2"):
        llm.generate(["fine", 2], SHORT)  # type: ignore[list-item]
    with pytest.raises(ClientError, match="got 2 for 1 prompts"):
        llm.generate("x", [SHORT, SHORT])


@pytest.mark.parametrize("wrong", [None, 5, b"text"], ids=repr)
def test_what_is_no_list_is_named(llm: LLM, wrong: Any) -> None:
    with pytest.raises(ClientError, match="prompts must be a list, got"):
        llm.generate(wrong, SHORT)
    with pytest.raises(ClientError, match="messages must be a list, got"):
        llm.chat(wrong, SHORT)
    with pytest.raises(ClientError, match=r"conversation must be a list, got|messages must be"):
        llm.chat([wrong], SHORT)
    with pytest.raises(ClientError, match="tools must be a list, got"):
        llm.chat([HI], SHORT, tools=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [5, {"n": 1}, "greedy", [None], [{"n": 1}], SamplingParams], ids=repr)
def test_parameters_must_be_parameters(llm: LLM, wrong: Any) -> None:
    with pytest.raises(ClientError, match="sampling_params must be") as caught:
        llm.generate(["x"], wrong)
    assert caught.value.param == "sampling_params"


def test_without_parameters_the_model_s_defaults_hold_and_fit_the_context() -> None:
    llm, _, client = opened(default_sampling={"temperature": 0.5, "max_tokens": 200})
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=200)
    long = "long " * 40
    llm.generate(["x", long])
    room = MAX_LEN - len(prompt(long).prompt_token_ids)
    assert [r.sampling.max_tokens for r in client.submitted] == [200, room] and room < 200
    assert client.submitted[0].sampling.temperature == 0.5
    llm.close()


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    other = [HI, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "go on"}]
    one, several = llm.chat([HI], SHORT), llm.chat([[HI], other], SHORT)
    assert len(one) == 1 and texts(several)[:1] == texts(one)
    assert [o.prompt for o in several] == ["user: hi\n", "user: hi\nassistant: yes?\nuser: go on\n"]
    assert llm.chat([], SHORT) == []
    for wrong in ("hi", HI, [HI, [HI]]):
        with pytest.raises(ClientError, match="messages must be"):
            llm.chat(wrong, SHORT)  # type: ignore[arg-type]


def test_chat_options_reach_the_template() -> None:
    llm, frontend, _ = opened()
    llm.chat([HI], SHORT)
    tools = [{"type": "function", "function": {"name": "f"}}]
    llm.chat([HI], SHORT, tools=tools, chat_template="{{ x }}", continue_final_message=True, chat_template_kwargs={"x": 1})  # fmt: skip
    plain, full = frontend.renderer.asked
    assert plain == {
        "tools": None, "chat_template": None, "chat_template_kwargs": None, "add_generation_prompt": None,
        "continue_final_message": False,
    }  # fmt: skip
    assert (full["tools"], full["chat_template"], full["chat_template_kwargs"], full["continue_final_message"]) == (
        tools, "{{ x }}", {"x": 1}, True,
    )  # fmt: skip
    llm.close()


def test_the_tokenizer_and_the_cache_can_be_reached() -> None:
    llm, _, client = opened()
    assert llm.get_tokenizer() is TEXT  # type: ignore[comparison-overlap]
    assert llm.reset_prefix_cache() is True and client.calls == ["reset_prefix_cache"]
    llm.close()


def test_options_go_to_the_opener_with_the_model() -> None:
    seen: list[Any] = []
    frontend = offline(ToyClient(RULE))

    def opener(options: Any) -> ToyOffline:
        seen.append(dict(options))
        return frontend

    LLM("folder", opener=opener, max_model_len=8).close()
    LLM(opener=opener).close()
    assert seen == [{"model": "folder", "max_model_len": 8}, {}]


def test_f66_token_ids_are_prompts_in_every_shape() -> None:
    """F66: a list of ids is a prompt, and a list of such lists are several."""
    llm = opened()[0]
    ids = TEXT.encode("hello")
    shapes: list[Any] = [
        ids, tuple(ids), [ids], [tuple(ids)], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], np.array(ids),
        np.array([ids]), [np.array(ids)], torch.tensor(ids), torch.tensor([ids]), [torch.tensor(ids)],
        {"prompt_token_ids": torch.tensor(ids)},
    ]  # fmt: skip
    for shape in shapes:
        (out,) = llm.generate(shape, SHORT)
        assert list(out.prompt_token_ids) == ids
    assert [list(o.prompt_token_ids) for o in llm.generate([ids, "hello", ids[:2]], SHORT)] == [ids, ids, ids[:2]]
    with pytest.raises(ClientError, match="prompt 1"):
        llm.generate([ids, []], SHORT)
    with pytest.raises(ValueError, match="prompt 1"):  # what scripts catch
        llm.generate([ids, 5], SHORT)
    with pytest.raises(ClientError, match="prompts must be a list, got int"):
        llm.generate(np.array(5), SHORT)
    llm.close()


def test_f66_progress_may_be_the_third_argument(llm: LLM) -> None:
    assert llm.generate("x", SHORT, False)
    assert llm.chat([HI], SHORT, False)


@pytest.mark.parametrize("name", FOREIGN)
def test_f66_arguments_of_other_engines_are_not_our_options(name: str) -> None:
    """An argument that is an option here must reach it."""
    assert name not in options(engine_sections())


def test_f66_what_changes_nothing_is_accepted_and_said_once() -> None:
    """F66: in one sentence; what is ours goes on untouched."""
    told: list[str] = []
    given = {
        "model": "m", "enforce_eager": True, "trust_remote_code": False, "tensor_parallel_size": 1, "swap_space": 4,
        "disable_log_stats": True, "pipeline_parallel_size": 1, "tokenizer": "m", "revision": None,
        "gpu_memory_utilization": 0.5, "max_num_seqs": 4, "hf_overrides": None,
    }  # fmt: skip
    assert without_foreign(given, told.append) == {
        "model": "m", "gpu_memory_utilization": 0.5, "max_num_seqs": 4, "revision": None,
    }  # fmt: skip
    assert told == [
        "not needed here, and ignored: enforce_eager, trust_remote_code, tensor_parallel_size, swap_space, "
        "disable_log_stats, pipeline_parallel_size"
    ]
    assert without_foreign({"max_num_seqs": 4, "tokenizer": None}, told.append) == {"max_num_seqs": 4}
    assert len(told) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("tensor_parallel_size", 2), ("tensor_parallel_size", True), ("trust_remote_code", True), ("tokenizer", "other"),
     ("cpu_offload_gb", 4), ("enable_chunked_prefill", False), ("disable_log_stats", False), ("task", "embed"),
     ("enable_lora", True), ("hf_overrides", {"a": 1})],
)  # fmt: skip
def test_f66_what_would_mean_something_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* is not possible: .+"):
        LLM("m", opener=lambda options: pytest.fail("started"), **{name: value})


def test_f66_the_package_lists_its_class_without_importing_it() -> None:
    code = "import sys, octavo; print('LLM' in dir(octavo), 'octavo.entrypoints.llm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False"]


def test_use_after_closing_is_a_clear_error() -> None:
    llm, frontend, _ = opened()
    llm.close()
    llm.close()
    assert frontend.num_closed == 1
    for use in (lambda: llm.generate("x"), lambda: llm.chat([HI]), llm.get_tokenizer, llm.reset_prefix_cache):
        with pytest.raises(EngineDead, match=r"after close\(\); make a new LLM"):
            use()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_and_harms_nobody() -> None:
    llm, frontend, _ = opened()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        told = ""
        try:
            llm.generate("hi", SHORT)
        except EngineDead as error:
            told = str(error)
        llm.close()
        os.write(write, f"{told} {frontend.num_closed}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "forked process" in (heard := os.read(read, 1000).decode()) and heard.endswith(" 0")
    os.close(read)
    os.close(write)
    assert llm.generate("hi", SHORT)
    llm.close()
    assert frontend.num_closed == 1


def test_a_dead_engine_is_a_clear_error() -> None:
    llm, _, client = opened()
    client.die("killed")
    with pytest.raises(EngineDead, match="make a new LLM"):
        llm.generate("x", SHORT)
    llm.close()


def test_leaving_the_context_or_dropping_the_object_closes_it() -> None:
    llm, frontend, _ = opened()
    with llm:
        pass
    assert frontend.num_closed == 1
    llm, frontend, _ = opened()
    del llm
    gc.collect()
    assert frontend.num_closed == 1


def test_a_failed_start_can_be_dropped() -> None:
    def opener(options: Any) -> ToyOffline:
        raise ClientError("no such model")

    with pytest.raises(ClientError, match="no such model"):
        LLM("nowhere", opener=opener)
    gc.collect()  # __del__ of the half-made object raises nothing (an unraisable error would fail the test)


def test_progress_is_silent_without_a_terminal(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("x", SHORT, use_tqdm=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("heeds", [True, False])
def test_a_priority_that_changes_nothing_is_said(heeds: bool, caplog: pytest.LogCaptureFixture) -> None:
    """F21."""
    with opened(heeds_priority=heeds)[0] as llm, caplog.at_level(logging.WARNING):
        llm.generate(["a", "b"], SamplingParams(max_tokens=1), priority=5, use_tqdm=False)
    assert caplog.text.count("priority 5 changes nothing") == (not heeds)


def test_tools_that_the_template_drops_are_refused_and_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """F11, F15, F16: offline as online."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    llm, frontend, _ = opened()
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
    frontend.renderer = Renderer(TEXT, ChatTemplate({"default": template}))
    with llm:
        with pytest.raises(ClientError, match="does not show tools") as caught:
            llm.chat([HI], SHORT, tools=[tool])
        assert caught.value.param == "tools"
        with pytest.raises(ClientError, match="role assistant, got user"):
            llm.chat([HI], SHORT, continue_final_message=True)
        with caplog.at_level(logging.WARNING):
            llm.chat([HI, {"role": "assistant", "content": "", "tool_calls": [call]}, HI], SHORT, use_tqdm=False)
    assert "messages[1].tool_calls[0].function.arguments is no JSON object" in caplog.text
