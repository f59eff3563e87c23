"""Offline figures come from the engine's own times, over prompts that are never repeated."""

import pytest

from octavo.base.errors import ServerError
from octavo.base.outputs import CompletionOutput, RequestOutput, RequestTimes
from octavo.bench.offline import Batches, latency, latency_table, throughput, throughput_table
from octavo.bench.workloads import random_prompts
from octavo.entrypoints.llm import LLM
from tests.support import checkpoints


class Toy:
    """Answers with times of its own: the first token after 2 s, each further one after 0.5 s.

    Owns: the batches it was given, and its clock.
    """

    def __init__(self, fail=()):
        self.batches, self.now, self.fail = [], 0.0, fail

    def clock(self):
        return self.now

    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert not use_tqdm
        self.batches.append(prompts)
        start, found = self.now, []
        for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            n = params.max_tokens
            times = RequestTimes(arrived_s=start, first_token_s=start + 2.0, finished_s=start + 2.0 + 0.5 * (n - 1))
            self.now = max(self.now, times.finished_s)
            found.append(
                RequestOutput(
                    request_id=str(i),
                    prompt=None,
                    prompt_token_ids=prompt["prompt_token_ids"],
                    outputs=[CompletionOutput(index=0)],
                    finished=True,
                    num_output_tokens=n,
                    times=times,
                    error="broken" if i in self.fail else None,
                )
            )
        return found


def test_latency_counts_batches_after_the_warm_up_and_repeats_no_prompt():
    toy = Toy()
    found = latency(
        toy, Batches(input_len=8, output_len=5, batch_size=3, iterations=4, warmups=2, ids=(0, 10_000)), clock=toy.clock
    )
    assert [len(b) for b in toy.batches] == [3] * 6
    prompts = [tuple(p["prompt_token_ids"]) for b in toy.batches for p in b]
    assert len(set(prompts)) == 18
    assert (found.prefill_s.num, found.prefill_s.mean) == (4, 2.0)
    assert (found.tpot_s.num, found.tpot_s.mean) == (12, 0.5)
    assert found.e2e_s.mean == 4.0
    assert (found.decode_tok_s, found.prefill_tok_s) == (6.0, 12.0)
    assert "4 batches of 3" in latency_table(found)


def test_one_token_has_no_time_of_a_further_one():
    toy = Toy()
    found = latency(
        toy, Batches(input_len=8, output_len=1, batch_size=1, iterations=1, warmups=0, ids=(0, 99)), clock=toy.clock
    )
    assert (found.tpot_s.num, found.decode_tok_s) == (0, 0.0)
    assert latency_table(found)


def test_a_failed_request_ends_a_latency_measurement_with_its_error():
    toy = Toy(fail={1})
    work = Batches(input_len=8, output_len=2, batch_size=3, iterations=1, warmups=0, ids=(0, 99))
    with pytest.raises(ServerError, match="1 of 3 requests of a batch failed: broken"):
        latency(toy, work, clock=toy.clock)


def test_throughput_counts_whole_answers_and_shows_failures():
    toy = Toy(fail={1})
    items = random_prompts(3, input_len=10, output_len=5, ids=(0, 99))
    found = throughput(toy, items, clock=toy.clock)
    assert (found.num_ok, found.num_failed, found.errors) == (2, 1, {"broken": 1})
    assert (found.prompt_tokens, found.output_tokens, found.wall_s) == (20, 10, 4.0)
    assert (found.output_tok_s, found.total_tok_s) == (2.5, 7.5)
    text = throughput_table(found)
    assert "2 of 3 requests" in text
    assert "FAILED: 1 x broken" in text


@pytest.fixture(scope="module")
def llm():
    options = {"dtype": "float32", "multiprocessing": False, "num_threads": 1, "max_model_len": 128}
    with LLM(str(checkpoints.tiny_llama()), **options) as llm:
        yield llm


def test_the_real_engine_gives_every_figure(llm):
    found = latency(llm, Batches(input_len=9, output_len=4, batch_size=2, iterations=2, warmups=1, ids=(10, 500)))
    assert 0 < found.prefill_s.p50 < found.e2e_s.p50
    assert (found.tpot_s.num, found.e2e_s.num) == (4, 2)
    assert found.tpot_s.min > 0
    items = random_prompts(5, input_len=(4, 30), output_len=(1, 6), ids=(10, 500))
    sums = throughput(llm, items)
    assert (sums.num_ok, sums.num_failed, sums.cached_tokens) == (5, 0, 0)
    assert sums.prompt_tokens == sum(len(i.prompt) for i in items)
    assert sums.output_tokens == sum(i.max_tokens for i in items)
