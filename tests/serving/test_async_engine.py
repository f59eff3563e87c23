"""Streams: begun after checks, ended in every case, cancelled anywhere (REQ-5, ABT-02, OPS-11, INP-23)."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from octavo.base.errors import ClientError, EngineDead, OverloadedError
from octavo.base.outputs import RequestOutput
from octavo.base.params import SamplingParams
from octavo.base.types import FinishReason, OutputKind
from octavo.observe.stats import StatsLog
from octavo.serving.async_engine import AsyncEngine
from tests.support.toy_engine import Rule, ToyClient, hashed, scripted
from tests.support.toy_front import MAX_LEN, TEXT, async_engine, prompt, sync_engine

RULE = hashed(TEXT.vocab_size, low=5)
DELTA = SamplingParams(max_tokens=12, output_kind=OutputKind.DELTA, seed=3)
LONG = DELTA.replace(max_tokens=200)


@asynccontextmanager
async def running(
    rule: Rule = RULE, *, stats: StatsLog | None = None, max_running: int = 4, manual: bool = False, **changes: object
) -> AsyncIterator[tuple[AsyncEngine, ToyClient]]:
    client = ToyClient(rule, max_running=max_running, manual=manual)
    engine = async_engine(client, stats=stats, **changes)
    await engine.start()
    try:
        yield engine, client
    finally:
        await engine.stop()


def go(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def solo(text: str, params: SamplingParams) -> RequestOutput:
    engine = sync_engine(ToyClient(RULE))
    (result,) = engine.generate([(prompt(text), params)])
    engine.close()
    return result


def test_deltas_join_to_what_the_blocking_twin_gives() -> None:
    async def test() -> None:
        async with running() as (engine, _):
            outputs = [o async for o in engine.generate(prompt("hello"), DELTA)]
            want = solo("hello", DELTA).outputs[0]
            assert "".join(o.outputs[0].text for o in outputs) == want.text
            assert [t for o in outputs for t in o.outputs[0].token_ids] == want.token_ids
            assert outputs[-1].finished and not any(o.finished for o in outputs[:-1])
            assert engine.num_open == 0

    go(test)


def test_many_requests_at_once_do_not_mix() -> None:
    async def test() -> None:
        async with running(max_running=3) as (engine, _):

            async def one(i: int) -> None:
                params = DELTA.replace(max_tokens=1 + i % 7, n=1 + i % 3)
                stream = await engine.open(prompt(f"prompt {i % 5}"), params.replace(output_kind=OutputKind.FINAL_ONLY))
                got = await stream.last()
                assert [a.text for a in got.outputs] == [a.text for a in solo(f"prompt {i % 5}", params).outputs]

            await asyncio.gather(*(one(i) for i in range(30)))
            assert engine.num_open == 0

    go(test)


def test_equal_client_ids_are_different_requests_abt_02() -> None:
    async def test() -> None:
        async with running() as (engine, client):
            a = await engine.open(prompt("one"), DELTA, client_id="dup")
            b = await engine.open(prompt("two"), DELTA, client_id="dup")
            texts = ["".join([o.outputs[0].text async for o in s]) for s in (a, b)]
            assert texts == [solo(p, DELTA).outputs[0].text for p in ("one", "two")]
            assert a.request_id != b.request_id and "dup" not in a.request_id
            for i in range(200):  # start, drop, start again under the same id
                stream = await engine.open(prompt(f"dropped {i}"), LONG, client_id="dup")
                if i % 2:
                    await stream.__anext__()
                await stream.aclose()
            last = await (await engine.open(prompt("last"), DELTA, client_id="dup")).last()
            assert last.finished
            await until(lambda: client.num_alive == 0)

    go(test)


@pytest.mark.parametrize("way", ["aclose", "cancel", "context", "break", "drop"])
def test_a_reader_that_leaves_stops_its_request(way: str) -> None:
    async def test() -> None:
        book = StatsLog()
        async with running(manual=True, stats=book) as (engine, client):
            if way == "break":
                outputs = engine.generate(prompt("x"), LONG)
                task = asyncio.ensure_future(outputs.__anext__())
                await until(lambda: bool(client.submitted))
                client.step()
                await task
                await outputs.aclose()
            else:
                stream = await engine.open(prompt("x"), LONG)
                client.step()
                await stream.__anext__()
            if way == "aclose":
                await stream.aclose()
                await stream.aclose()
                with pytest.raises(StopAsyncIteration):
                    await stream.__anext__()
            elif way == "cancel":
                task = asyncio.create_task(stream.__anext__())  # type: ignore[arg-type]
                await settle()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif way == "context":
                async with stream:
                    pass
            elif way == "drop":
                del stream
                gc.collect()
                await settle()
            assert engine.num_open == 0
            assert client.aborts == [client.submitted[0].request_id]
            assert book.finished[FinishReason.ABORT] == 1
            client.step()
            assert client.num_alive == 0

    go(test)


def test_a_finished_stream_aborts_nothing() -> None:
    async def test() -> None:
        async with running() as (engine, client):
            async with await engine.open(prompt("x"), DELTA) as stream:
                async for _ in stream:
                    pass
            del stream
            gc.collect()
            await settle()
            assert client.aborts == []

    go(test)


def test_a_stop_string_stops_the_engine_too() -> None:
    async def test() -> None:
        ids = TEXT.encode("one two STOP three", add_special_tokens=False)
        async with running(scripted(ids, ids[-1])) as (engine, client):
            params = DELTA.replace(stop=("STOP",), max_tokens=200)
            texts = [o.outputs[0].text async for o in engine.generate(prompt("x"), params)]
            assert "".join(texts) == "one two "
            assert client.aborts == [client.submitted[0].request_id]
            await until(lambda: client.num_alive == 0)

    go(test)


def test_what_cannot_be_served_is_refused_before_the_stream() -> None:
    async def test() -> None:
        async with running() as (engine, client):
            with pytest.raises(ClientError, match="context"):
                await engine.open(prompt("x"), DELTA.replace(max_tokens=MAX_LEN))
            with pytest.raises(ClientError):
                await engine.generate(prompt("x"), DELTA.replace(max_tokens=MAX_LEN)).__anext__()
            assert client.submitted == [] and engine.num_open == 0

    go(test)


def test_too_many_waiting_requests_are_refused_until_some_start() -> None:
    async def test() -> None:
        book = StatsLog()
        async with running(manual=True, max_running=2, stats=book, max_waiting_requests=3) as (engine, client):
            streams = [await engine.open(prompt("x"), LONG) for _ in range(3)]
            with pytest.raises(OverloadedError) as refused:
                await engine.open(prompt("x"), LONG)
            assert refused.value.status == 429 and book.num_refused == 1
            client.step()  # two of three have had their first token
            await settle()
            streams.append(await engine.open(prompt("x"), LONG))
            with pytest.raises(OverloadedError):
                await engine.open(prompt("x"), LONG.replace(n=2))
            for stream in streams:
                await stream.aclose()
            streams = [await engine.open(prompt("x"), LONG) for _ in range(3)]  # leaving frees the place
            with pytest.raises(ClientError, match=r"n is 4, but .* at most 3") as never:  # F60
                await engine.open(prompt("x"), LONG.replace(n=4))
            assert never.value.status == 400 and never.value.param == "n"

    go(test)


def test_death_reaches_every_stream_and_later_requests_ops_11() -> None:
    async def test() -> None:
        book = StatsLog()
        async with running(manual=True, stats=book) as (engine, client):
            idle = await engine.open(prompt("x"), LONG)
            waiting = await engine.open(prompt("y"), LONG)
            task = asyncio.create_task(waiting.last())
            client.step()
            client.die("killed by signal 9")
            first = await idle.__anext__()  # what had come before is not lost
            assert first.outputs[0].token_ids
            with pytest.raises(EngineDead, match="signal 9"):
                await idle.__anext__()
            with pytest.raises(EngineDead, match="signal 9"):
                await task
            with pytest.raises(EngineDead, match="signal 9"):
                await engine.open(prompt("z"), LONG)
            assert not engine.alive() and not book.engine_up and engine.num_open == 0

    go(test)


def test_an_engine_that_dies_while_a_request_is_sent_leaves_no_trace() -> None:
    async def test() -> None:
        async with running(manual=True) as (engine, client):
            client._dead = RuntimeError("gone")
            with pytest.raises(EngineDead, match="gone"):
                await engine.open(prompt("x"), LONG)
            assert engine.num_open == 0

    go(test)


def test_outputs_wake_the_loop_once_and_merge_for_a_slow_reader() -> None:
    async def test() -> None:
        async with running(manual=True) as (engine, client):
            stream = await engine.open(prompt("x"), LONG)
            loop = asyncio.get_running_loop()
            wakes, original = [], loop.call_soon_threadsafe
            loop.call_soon_threadsafe = lambda *a, **k: (wakes.append(a), original(*a, **k))[1]  # type: ignore[assignment,method-assign]
            for _ in range(6):
                client.step()
            loop.call_soon_threadsafe = original  # type: ignore[method-assign]
            assert len(wakes) == 1
            output = await stream.__anext__()
            assert output.num_output_tokens == 6
            want = solo("x", LONG.replace(max_tokens=6)).outputs[0].token_ids
            assert output.outputs[0].token_ids == want[: len(output.outputs[0].token_ids)]
            await stream.aclose()

    go(test)


def test_a_drain_waits_then_aborts_with_a_reason_ops_10() -> None:
    async def test() -> None:
        async with running() as (engine, client):
            stream = await engine.open(prompt("x"), DELTA)
            assert await engine.drain(10.0)
            assert (await stream.last()).outputs[0].finish_reason == "length"
            with pytest.raises(OverloadedError, match="shutting down"):
                await engine.open(prompt("x"), DELTA)
        async with running(manual=True) as (engine, client):
            stream = await engine.open(prompt("x"), LONG)
            drain = asyncio.create_task(engine.drain(0.05))
            await until(lambda: bool(client.aborts))
            client.step()
            assert not await drain
            assert (await stream.last()).outputs[0].finish_reason == "abort"

    go(test)


def test_an_abort_from_outside_ends_the_stream_with_its_reason() -> None:
    async def test() -> None:
        async with running(manual=True) as (engine, client):
            stream = await engine.open(prompt("x"), LONG.replace(n=2))
            other = await engine.open(prompt("x"), LONG)
            await engine.abort(stream.request_id)
            await engine.abort("unknown")
            client.step()
            assert [o.finish_reason for o in (await stream.last()).outputs] == ["abort", "abort"]
            assert engine.num_open == 1
            await other.aclose()

    go(test)


def test_figures_reach_the_book_and_gauges_fall_to_zero_met_01() -> None:
    async def test() -> None:
        book = StatsLog()
        async with running(manual=True, stats=book, max_running=40) as (engine, client):
            streams = [await engine.open(prompt(f"x{i}"), LONG) for i in range(100)]
            for _ in range(3):
                client.step()
            await settle()
            assert (book.snapshot.num_running, book.snapshot.num_waiting) == (40, 60)
            for stream in streams:
                await stream.aclose()
            client.step()
            await settle()
            s = book.snapshot
            assert (s.num_running, s.num_waiting, s.num_blocks_used, s.kv_usage) == (0, 0, 0, 0.0)
            assert book.finished[FinishReason.ABORT] == 100

    go(test)


def test_a_finished_request_is_counted_with_its_latencies() -> None:
    async def test() -> None:
        book = StatsLog()
        async with running(stats=book) as (engine, _):
            await (await engine.open(prompt("x"), DELTA)).last()
            assert book.finished[FinishReason.LENGTH] + book.finished[FinishReason.STOP] == 1
            assert (book.first_token_s.count, book.end_to_end_s.count, book.queue_s.count) == (1, 1, 1)
            assert book.inter_token_s.count == book.output_tokens.sum - 1

    go(test)


def test_calls_reach_the_engine_and_stopping_ends_streams() -> None:
    async def test() -> None:
        async with running(manual=True) as (engine, client):
            assert await engine.call("reset_prefix_cache") is True and client.calls == ["reset_prefix_cache"]
            stream = await engine.open(prompt("x"), LONG)
            await engine.stop()
            with pytest.raises(EngineDead, match="stopping"):
                await stream.__anext__()

    go(test)


def test_an_engine_that_was_not_started_says_so() -> None:
    async def test() -> None:
        with pytest.raises(EngineDead, match="not started"):
            await async_engine(ToyClient(RULE)).open(prompt("x"), DELTA)

    go(test)
