"""A hand-over layer by layer between processes: the text is that of one engine, whatever is lost (PDX-3, PDX-4, PDX-13)."""

import contextlib
import signal
import time
from itertools import product

import pytest

from tests.support import checkpoints
from tests.support.disagg import OPTIONS, consumer, figures, hand_over, pair, prefill_only, producer, signal_all
from tests.support.live import spawn

LONG = [(i * 31) % 400 + 10 for i in range(150)]
PROMPTS = [LONG, LONG[1:17], LONG[2:19], LONG[3:36], [5, 6], LONG[40:]]
BODIES = ({"max_tokens": 12, "ignore_eos": True}, {"max_tokens": 9, "ignore_eos": True, "temperature": 0.9, "seed": 7})


@pytest.fixture(scope="module")
def plain():
    with spawn(str(checkpoints.tiny_llama()), *OPTIONS) as server:
        yield server


def way(folder, *more):
    return ("--kv-transport", f"file://{folder}", *more)


def appears(folder, hint, timeout_s=10.0):
    limit = time.monotonic() + timeout_s
    while not (found := list(folder.glob(f"*/{hint['lease']}"))):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found[0]


def salted(number):
    return {"cache_salt": str(number)}


def test_the_text_is_that_of_one_engine_and_both_sides_work_layer_by_layer(plain, tmp_path):
    with pair(*way(tmp_path, "--kv-by-layer", "--max-num-batched-tokens", "64")) as (prefill, decode):
        for number, (prompt, body) in enumerate(product(PROMPTS, BODIES)):
            want = plain.complete(prompt, **body)["choices"]
            assert hand_over(prefill, decode, prompt, **body, **salted(number))["choices"] == want
        count = len(PROMPTS) * len(BODIES)
        seen = figures(decode)
        assert (seen["fetched"], seen["in_step"], seen["failed"]) == (count, count, 0)
        assert figures(prefill)["tokens_saved_early"] == sum(map(len, PROMPTS)) * len(BODIES)


def test_damage_in_one_layer_and_a_writer_that_dies(plain, tmp_path):
    """What was computed on a bad layer is nobody's: not in the text, and not in the prefix cache."""
    body = BODIES[0]
    with pair(*way(tmp_path, "--kv-by-layer")) as (prefill, decode):
        want = plain.text(LONG, **body)
        hint = prefill_only(prefill, LONG)
        path = appears(tmp_path, hint) / "1.kv"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert decode.text(LONG, **body, kv_transfer_params=hint) == want
        seen = figures(decode)
        assert (seen["partly_fetched"], seen["in_step"]) == (1, 1)
        assert decode.text(LONG, **body) == want, "from the prefix cache, which has only what was computed"
        cut = prefill_only(prefill, LONG[::-1])
        path = appears(tmp_path, cut) / "0.kv"
        path.write_bytes(path.read_bytes()[:100])
        gone = prefill_only(prefill, LONG[5:])
        path = appears(tmp_path, gone)
        signal_all(prefill, signal.SIGKILL)
        prefill.process.wait()
        assert decode.text(LONG[::-1], **body, kv_transfer_params=cut) == plain.text(LONG[::-1], **body)
        path.rename(path.with_suffix(".part"))  # as if it had died before the last layer
        assert decode.text(LONG[5:], **body, kv_transfer_params=gone) == plain.text(LONG[5:], **body)
        assert figures(decode)["lost"] == 1 and decode.metrics()["octavo_kv_blocks_used"] == 0


def test_engines_of_which_one_hands_whole_prompts_over_compute_at_once_and_say_why(plain, tmp_path):
    """The handshake's metadata goes with the hint; without it the consumer waited ten seconds for nothing."""
    model, body = checkpoints.tiny_llama(), BODIES[0]
    with producer(model, *way(tmp_path, "--kv-by-layer")) as prefill, consumer(model, *way(tmp_path)) as decode:
        began = time.monotonic()
        assert hand_over(prefill, decode, LONG, **body)["choices"][0]["text"] == plain.text(LONG, **body)
        assert time.monotonic() - began < 8 and figures(decode)["other_form"] == 1
        assert "a file holds: one layer there, one block here" in "".join(decode.lines)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "options", [(), ("--async-scheduling", "--max-num-batched-tokens", "24"), ("--kv-cache-dtype", "int8")]
)
def test_whole_prompts_and_layers_give_the_same_in_any_mode(tmp_path, options, mixed):
    model = checkpoints.tiny_swa(mixed=True) if mixed else checkpoints.tiny_llama()
    seen = []
    for by_layer in ((), ("--kv-by-layer",)):
        with pair(*way(tmp_path / str(len(by_layer)), *by_layer, *options), model=model) as (prefill, decode):
            answers = [
                hand_over(prefill, decode, p, **b, **salted(p[0]))["choices"] for p, b in product(PROMPTS, BODIES)
            ]
            seen.append(answers)
            assert figures(decode)["failed"] == figures(decode)["partly_fetched"] == 0
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_readers_and_writers_that_are_killed_at_any_moment(plain, tmp_path):
    """PDX-13, layer by layer: each request ends with the right text or a plain error."""
    model, body = checkpoints.tiny_llama(), BODIES[0]
    want = {len(p): plain.text(p, **body) for p in PROMPTS}
    with consumer(model, *way(tmp_path, "--kv-by-layer")) as decode:
        for pause_s in (0.0, 0.002, 0.01, 0.05):
            with producer(model, *way(tmp_path, "--kv-by-layer")) as prefill:
                hint = prefill_only(prefill, LONG, **salted(pause_s))
                time.sleep(pause_s)
                signal_all(prefill, signal.SIGKILL)
                prefill.process.wait()
                text = decode.text(LONG, **body, **salted(pause_s), kv_transfer_params=hint)
                assert text == want[len(LONG)]
        assert decode.metrics()["octavo_kv_blocks_used"] == 0
    with producer(model, *way(tmp_path, "--kv-by-layer")) as prefill:
        hint = prefill_only(prefill, LONG)
        with contextlib.suppress(Exception), consumer(model, *way(tmp_path, "--kv-by-layer")) as decode:
            decode.stream = decode.post("/v1/completions", prompt=LONG, max_tokens=1, kv_transfer_params=hint)
            signal_all(decode, signal.SIGKILL)
            decode.process.wait()
        assert prefill.text(LONG, **body) == want[len(LONG)]
        assert prefill.metrics()["octavo_kv_blocks_used"] == 0
