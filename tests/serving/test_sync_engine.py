"""The blocking twin: order, transactions, threads (OFL-01)."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.base.errors import ClientError, EngineDead
from octavo.base.params import SamplingParams
from octavo.base.types import OutputKind
from octavo.serving.progress import NoProgress, ProgressLine, open_progress
from octavo.serving.sync_engine import SyncEngine
from tests.support.toy_engine import ToyClient, hashed, scripted
from tests.support.toy_front import MAX_LEN, TEXT, prompt, sync_engine

RULE = hashed(TEXT.vocab_size, low=5)


def items(count: int, first: int = 0) -> list[tuple[object, SamplingParams]]:
    return [
        (prompt(f"prompt {i % 7}"), SamplingParams(max_tokens=1 + (i * 5) % 11, n=1 + i % 2, seed=i))
        for i in range(first, first + count)
    ]


def texts(outputs: list) -> list[list[str]]:  # type: ignore[type-arg]
    return [[a.text for a in o.outputs] for o in outputs]


@pytest.fixture
def engine() -> SyncEngine:
    client = ToyClient(RULE, max_running=3)
    engine = sync_engine(client)
    yield engine  # type: ignore[misc]
    engine.close()


def test_results_are_in_order_and_equal_to_one_by_one_runs_ofl_01(engine: SyncEngine) -> None:
    work = items(40)
    together = engine.generate(work)
    alone = [engine.generate([item])[0] for item in work]
    assert texts(together) == texts(alone)
    assert [o.prompt for o in together] == [i.prompt for i, _ in work]  # type: ignore[attr-defined]
    assert all(o.finished for o in together) and [len(o.outputs) for o in together] == [p.n for _, p in work]


def test_nothing_in_nothing_out_and_calls_in_a_row(engine: SyncEngine) -> None:
    assert engine.generate([]) == []
    assert texts(engine.generate(items(5))) == texts(engine.generate(items(5))) == texts(engine.generate(items(5)))


def test_threads_get_their_own_results(engine: SyncEngine) -> None:
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda k: texts(engine.generate(items(15, k))), range(4)))
    assert got == [texts(engine.generate(items(15, k))) for k in range(4)]


def test_one_invalid_item_submits_nothing() -> None:
    client = ToyClient(RULE)
    engine = sync_engine(client)
    with pytest.raises(ClientError, match="context"):
        engine.generate([*items(3), (prompt("x"), SamplingParams(max_tokens=MAX_LEN))])
    assert client.submitted == []
    engine.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_wait_aborts_what_was_sent(error: type[BaseException]) -> None:
    class Interrupting(NoProgress):
        def advance(self, *, requests: int = 0, tokens: int = 0) -> None:
            raise error

    client = ToyClient(scripted([], 70))
    engine = sync_engine(client)
    work = [(prompt("x"), SamplingParams(max_tokens=MAX_LEN - 10, n=n)) for n in (1, 2)]
    with pytest.raises(error):
        engine.generate(work, progress=Interrupting())
    assert set(client.aborts) == {r.request_id for r in client.submitted} and len(client.aborts) == 3
    again = engine.generate([(prompt("x"), SamplingParams(max_tokens=3))])  # the engine is still good
    assert again[0].num_output_tokens == 3
    assert engine._routes == {}
    engine.close()


def test_the_asked_output_kind_does_not_matter(engine: SyncEngine) -> None:
    for kind in OutputKind:
        (result,) = engine.generate([(prompt("x"), SamplingParams(max_tokens=5, output_kind=kind))])
        assert result.num_output_tokens == len(result.outputs[0].token_ids)


def test_stop_strings_stop_the_engine_too() -> None:
    ids = TEXT.encode("one two STOP three", add_special_tokens=False)
    client = ToyClient(scripted(ids, ids[-1]))
    engine = sync_engine(client)
    (result,) = engine.generate([(prompt("x"), SamplingParams(max_tokens=200, stop=["STOP"]))])
    assert (result.outputs[0].text, result.outputs[0].stop_reason) == ("one two ", "STOP")
    assert client.aborts == ["0"]
    engine.close()


def test_logprobs_of_prompt_and_answer(engine: SyncEngine) -> None:
    params = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1)
    (result,) = engine.generate([(prompt("hello world"), params)])
    answer = result.outputs[0]
    assert [next(iter(e)) for e in answer.logprobs or ()] == answer.token_ids
    assert [list(e) for e in answer.logprobs or ()] == [
        [t, t + 1] for t in answer.token_ids
    ]  # chosen, then the likeliest
    assert answer.cumulative_logprob == -len(answer.token_ids)
    entries = result.prompt_logprobs or []
    assert entries[0] is None and [next(iter(e)) for e in entries[1:] if e] == result.prompt_token_ids[1:]


def test_death_ends_a_call_under_way_and_all_later_ones() -> None:
    client = ToyClient(RULE, manual=True)
    engine = sync_engine(client)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            engine.generate(items(3))
        except EngineDead as e:
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    while not client.submitted:
        pass
    client.step()
    client.die("out of memory")
    thread.join(10)
    assert [str(e) for e in failed] == ["out of memory"]
    with pytest.raises(EngineDead, match="out of memory"):
        engine.generate(items(1))
    assert not engine.alive() and engine._routes == {}


def test_closing_twice_is_fine_and_says_so_afterwards() -> None:
    engine = sync_engine(ToyClient(RULE))
    engine.close()
    engine.close()
    with pytest.raises(EngineDead, match="closed"):
        engine.generate(items(1))


def test_calls_reach_the_engine(engine: SyncEngine) -> None:
    assert engine.call("reset_prefix_cache") is True


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_on_a_terminal_and_nothing_elsewhere() -> None:
    now = [0.0]
    out = Terminal()
    line = open_progress(4, out, lambda: now[0])
    for _ in range(4):
        now[0] += 0.04
        line.advance(requests=1, tokens=10)
    line.close()
    shown = out.getvalue().split("\r")[1:]
    assert "1/4" in shown[0] and "4/4" in shown[-1] and shown[-1].endswith("\n")
    assert len(shown) < 6 and "#" * 30 in shown[-1] and "250 output tokens/s" in shown[-1]
    assert isinstance(line, ProgressLine)
    assert isinstance(open_progress(4, io.StringIO(), lambda: 0.0), NoProgress)
    assert isinstance(open_progress(4, None, lambda: 0.0), NoProgress)  # F66: a program without a terminal at all
    closed = io.StringIO()
    closed.close()
    assert isinstance(open_progress(4, closed, lambda: 0.0), NoProgress)
    assert isinstance(open_progress(0, Terminal(), lambda: 0.0), NoProgress)
