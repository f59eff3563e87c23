"""PD-01: the decode side dies or never comes. Leases end the matter, and late readers are fenced."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.test_disagg import eventually
from tests.support import checkpoints
from tests.support.disagg import OPTIONS, figures, pair, prefill_only, signal_all
from tests.support.live import spawn

LEASE = ("--kv-lease-s", "3")
PROMPT = [(i * 31) % 400 + 10 for i in range(150)]


@pytest.fixture(scope="module")
def want():
    with spawn(str(checkpoints.tiny_llama()), *OPTIONS) as server:
        return server.text(PROMPT, max_tokens=8, ignore_eos=True)


def used(server):
    return server.metrics()["octavo_kv_blocks_used"]


def test_a_decode_side_that_never_asks_costs_one_lease():
    with pair(*LEASE) as (prefill, _):
        prefill_only(prefill, PROMPT)
        assert used(prefill) == 10 and figures(prefill)["leases"] == 1
        began = time.monotonic()
        eventually(lambda: used(prefill) == 0, 6)
        assert 2.5 < time.monotonic() - began < 4.5
        assert figures(prefill)["leases_expired"] == 1


def test_a_decode_side_that_is_killed_costs_one_lease():
    with pair(*LEASE) as (prefill, decode):
        with ThreadPoolExecutor(8) as pool:
            hints = list(pool.map(lambda i: prefill_only(prefill, [i + 10, *PROMPT]), range(8)))
            asked = [
                pool.submit(decode.post, "/v1/completions", prompt=[i + 10, *PROMPT], kv_transfer_params=hint)
                for i, hint in enumerate(hints)
            ]
            signal_all(decode, signal.SIGKILL)
            began = time.monotonic()
            eventually(lambda: used(prefill) == 0, 8)
            assert time.monotonic() - began < 4 + 1
            assert all(future.exception() is not None or future.result().status_code for future in asked)
        ended = figures(prefill)
        assert ended["leases"] == 0 and ended["leases_expired"] + ended["leases_done"] + ended["leases_aborted"] == 8


def test_a_decode_side_that_was_frozen_is_refused_and_computes_again(want):
    with pair(*LEASE) as (prefill, decode):
        hint = prefill_only(prefill, PROMPT)
        signal_all(decode, signal.SIGSTOP)
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(
                decode.complete(PROMPT, max_tokens=8, ignore_eos=True, kv_transfer_params=hint)["choices"][0]["text"]
            )
        )
        asking.start()
        eventually(lambda: used(prefill) == 0, 6)
        prefill.text([9, 8, *PROMPT], max_tokens=4)  # whose blocks are used again
        time.sleep(2)
        signal_all(decode, signal.SIGCONT)
        asking.join(30)
        assert answers == [want] and figures(prefill)["leases_expired"] == 1
        seen = figures(decode)
        assert seen["fetched"] == 0 and seen["lost"] + seen["failed"] == 1


def test_a_decode_side_with_a_long_queue_keeps_its_leases(want):
    # One request runs at a time, and the first takes several leases.
    with pair(
        "--kv-lease-s",
        "1",
        "--max-num-seqs",
        "1",
        "--num-kv-blocks",
        "600",
        model=checkpoints.tiny_llama(max_position_embeddings=8192),
    ) as (
        prefill,
        decode,
    ):
        body = {"max_tokens": 7000, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            slow = pool.submit(decode.text, "a long story", **body)
            eventually(lambda: decode.metrics()["octavo_requests_running"] == 1)
            hint, began = prefill_only(prefill, PROMPT), time.monotonic()
            answer = pool.submit(decode.complete, PROMPT, max_tokens=8, ignore_eos=True, kv_transfer_params=hint)
            got = answer.result(120)
            waited = time.monotonic() - began
            assert slow.result(120)
        assert waited > 1.5, "the machine was too fast for this test: let it generate more"
        assert figures(prefill)["leases_expired"] == 0 and figures(decode)["fetched"] == 1
        assert got["usage"]["prompt_tokens_details"]["cached_tokens_by_source"] == {"remote": 149}
