"""`zip(prompts, outputs)` always fits: OFL-01."""

import threading

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ClientError
from tests.support import checkpoints
from tests.support.clients import together
from tests.support.prompts import prompts

LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(checkpoints.tiny_llama()), dtype="float32", num_kv_blocks=1024, num_threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def real(chat_path):
    with LLM(str(chat_path), dtype="float32", num_kv_blocks=512, max_model_len=512, num_threads=1) as engine:
        yield engine


def greedy(max_tokens):
    """Greedy parameters of this length."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def mixed(count, longest=34):
    """Prompts of mixed length, and parameters of mixed length."""
    rng = np.random.default_rng(count)
    return prompts(count), [greedy(int(rng.choice([n for n in LENGTHS if n <= longest]))) for _ in range(count)]


def run(engine, given, params=GREEDY):
    """Generate without a progress bar."""
    return engine.generate(given, params, use_tqdm=False)


def texts(outputs):
    """The text of every answer."""
    return [[each.text for each in out.outputs] for out in outputs]


def check_order(outputs, given, params):
    """One output for each prompt, its own, with as many answers as were asked for."""
    assert len(outputs) == len(given)
    for out, prompt, each in zip(outputs, given, params, strict=True):
        assert out.prompt == prompt
        assert out.finished
        assert len(out.outputs) == each.n
        assert [o.index for o in out.outputs] == list(range(each.n))
        assert all(len(o.token_ids) == each.max_tokens for o in out.outputs)
        assert all(o.finish_reason == "length" for o in out.outputs)


def test_ofl01_the_real_model_answers_in_the_order_of_the_prompts(real, reference):
    given, params = mixed(40, longest=5)
    outputs = run(real, given, params)
    check_order(outputs, given, params)
    for i in range(0, 40, 5):
        (alone,) = run(real, given[i], params[i])
        reference.check_same(alone.prompt_token_ids, alone.outputs[0].token_ids, outputs[i].outputs[0].token_ids)


def test_ofl01_any_mix_equals_one_by_one_runs(llm):
    given, params = mixed(40)
    outputs = run(llm, given, params)
    check_order(outputs, given, params)
    assert texts(outputs) == [texts(run(llm, p, s))[0] for p, s in zip(given, params, strict=True)]
    assert len({o.request_id for o in outputs}) == 40


@pytest.mark.parametrize("options", [{"max_num_seqs": 3}, {"async_scheduling": True}, {"scheduling_policy": "priority"},
                                     {"num_kv_blocks": 20, "max_model_len": 256}], ids=str)  # fmt: skip
def test_ofl01_the_order_is_kept_however_they_run(llm, options):
    given, params = mixed(24)
    truth = texts(run(llm, given, params))
    settings = {"dtype": "float32", "num_kv_blocks": 1024, "num_threads": 1, "block_size": 16, **options}
    with LLM(str(checkpoints.tiny_llama()), **settings) as other:
        outputs = run(other, given, params)
    check_order(outputs, given, params)
    assert texts(outputs) == truth


def test_ofl01_several_answers_for_each_prompt(llm):
    given = prompts(10)
    params = [SamplingParams(n=1 + i % 3, temperature=1, seed=i, max_tokens=6, ignore_eos=True) for i in range(10)]
    outputs = run(llm, given, params)
    check_order(outputs, given, params)
    assert texts(outputs) == [texts(run(llm, p, s))[0] for p, s in zip(given, params, strict=True)]
    (two,) = run(llm, "Hello", SamplingParams(n=2, temperature=1, seed=1, max_tokens=12))
    assert two.outputs[0].text != two.outputs[1].text


def test_ofl01_duplicates_of_one_prompt(llm):
    outputs = run(llm, ["The same"] * 12 + ["Another"] + ["The same"] * 3)
    assert len(outputs) == 16
    assert [o.prompt for o in outputs] == ["The same"] * 12 + ["Another"] + ["The same"] * 3
    same = texts(outputs[:12] + outputs[13:])
    assert same == [same[0]] * 15
    assert texts(outputs[12:13]) == texts(run(llm, "Another"))


def test_ofl01_every_shape_of_input(llm):
    ids = list(llm.get_tokenizer().encode("Hello there"))
    (plain,) = run(llm, "Hello there")
    assert run(llm, []) == []
    assert run(llm, iter(())) == []
    assert llm.chat([], GREEDY, use_tqdm=False) == []
    assert texts(run(llm, (p for p in ["Hello there", "x"])))[0] == texts([plain])[0]
    assert texts(run(llm, ("Hello there",))) == texts([plain])
    for given in ({"prompt": "Hello there"}, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], ids, [ids]):
        (out,) = run(llm, given)
        assert list(out.prompt_token_ids) == ids
        assert texts([out]) == texts([plain])
    outputs = run(llm, ["x", {"prompt_token_ids": ids}, {"prompt": "y"}, "Hello there"])
    assert [o.prompt for o in outputs] == ["x", None, "y", "Hello there"]
    assert texts(outputs[1:2]) == texts(outputs[3:]) == texts([plain])


def test_ofl01_calls_in_a_row_lose_nothing(llm):
    given, params = mixed(12)
    first = texts(run(llm, given, params))
    for _ in range(2):
        outputs = run(llm, given, params)
        check_order(outputs, given, params)
        assert texts(outputs) == first
    assert len(run(llm, prompts(3))) == 3


def test_ofl01_threads_get_their_own_results(llm):
    shares = [prompts(40)[i::4] for i in range(4)]
    params = [greedy(4 + i) for i in range(4)]
    truth = [texts(run(llm, share, p)) for share, p in zip(shares, params, strict=True)]
    for _ in range(2):
        found = together([lambda s=s, p=p: run(llm, s, p) for s, p in zip(shares, params, strict=True)])
        assert [texts(outputs) for outputs in found] == truth
        for outputs, share, each in zip(found, shares, params, strict=True):
            check_order(outputs, share, [each] * len(share))


def test_ofl01_a_chat_for_each_conversation(llm):
    conversations = [[{"role": "user", "content": text}] for text in prompts(10)]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert len(outputs) == 10
    for i, conversation in enumerate(conversations):
        assert conversation[0]["content"] in outputs[i].prompt
    alone = [llm.chat(c, GREEDY, use_tqdm=False)[0] for c in conversations]
    assert texts(outputs) == texts(alone)
    assert len(llm.chat([conversations[0]], GREEDY, use_tqdm=False)) == 1


def test_ofl01_early_ends_do_not_change_the_order(llm):
    """Stop strings, stop ids and EOS end some answers long before others."""
    plain = run(llm, prompts(8), greedy(24))
    params = []
    for i, out in enumerate(plain):
        answer = out.outputs[0]
        stop = {"stop": [answer.text[4:7]]} if i % 3 == 0 else {}
        stop |= {"stop_token_ids": [answer.token_ids[i]]} if i % 3 == 1 else {}
        params.append(SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **stop))
    outputs = run(llm, prompts(8), params)
    assert [o.prompt for o in outputs] == prompts(8)
    assert texts(outputs) == [texts(run(llm, p, s))[0] for p, s in zip(prompts(8), params, strict=True)]
    assert {o.outputs[0].finish_reason for o in outputs} == {"stop", "length"}


WRONG = {
    "too long": ["fine", "z" * 9000],
    "an unknown id": ["fine", {"prompt_token_ids": [5, 99999]}],
    "empty ids": ["fine", {"prompt_token_ids": []}],
    "an empty list": ["fine", []],
    "text among ids": ["fine", [5, "x"]],
    "an id that is no whole number": ["fine", [5, 1.5]],
    "a number": ["fine", 5],
    "two keys": ["fine", {"prompt": "x", "prompt_token_ids": [5]}],
    "no text": ["fine", {"prompt": 5}],
}


@pytest.mark.parametrize("name", WRONG)
def test_ofl01_a_wrong_prompt_is_an_error_with_its_place_and_no_additional_output(llm, name):
    before = llm.stats().output_tokens
    for params in (GREEDY, None, [GREEDY, GREEDY]):
        with pytest.raises(ClientError, match="prompt 1"):
            run(llm, WRONG[name], params)
    assert llm.stats().output_tokens == before, "nothing was computed"
    assert len(run(llm, ["fine"])) == 1


def test_ofl01_as_many_parameters_as_prompts(llm):
    for params in ([GREEDY], [GREEDY] * 3, []):
        with pytest.raises(ClientError, match="as many as the prompts"):
            run(llm, ["a", "b"], params)


def test_ofl01_an_interrupted_call_leaves_nothing_behind(llm):
    """Ctrl-C in the middle of a call: its requests are stopped, and the next call gets only its own."""

    class Interrupted(BaseException):
        pass

    def endless():
        yield from prompts(5)
        raise Interrupted

    with pytest.raises(Interrupted):
        run(llm, endless())
    done = threading.Event()

    class Progress:
        def advance(self, **_):
            raise Interrupted

        def close(self):
            done.set()

    inputs = [(llm._frontend.renderer.text(p), greedy(200)) for p in prompts(5)]
    with pytest.raises(Interrupted):
        llm._frontend.engine.generate(inputs, progress=Progress())
    assert done.is_set()
    given, params = mixed(6)
    check_order(run(llm, given, params), given, params)
    assert llm.stats().num_running == 0
    assert llm.stats().num_blocks_used == 0
