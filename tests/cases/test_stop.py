"""Stop strings and stop tokens end an answer where they should: STP-01, STP-05, STP-06."""

import threading

import pytest

from tests.support import checkpoints
from tests.support.live import live

SEGMENTS = ["A", "B", "CD", "EF", "GH", "IJ", "K"]


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    with live(checkpoints.chain(tmp_path_factory.mktemp("c") / "m", SEGMENTS), num_kv_blocks=64, num_threads=1,
              max_model_len=256) as server:  # fmt: skip
        yield server


CASES = [
    (["DEFG"], "BC", "BCDEFG", "DEFG", 4),
    (["GH"], "BCDEF", "BCDEFGH", "GH", 4),
    (["B"], "", "B", "B", 1),
    (["CDEFGHIJ"], "B", "BCDEFGHIJ", "CDEFGHIJ", 5),
    (["EFX", "H"], "BCDEFG", "BCDEFGH", "H", 4),
    (["EFGH", "FG"], "BCDE", "BCDEFG", "FG", 4),
    (["nothing"], "BCDEFGHIJK", "BCDEFGHIJK", None, None),
    (["K!"], "BCDEFGHIJK", "BCDEFGHIJK", None, None),
]


@pytest.mark.parametrize(("stop", "text", "with_stop", "reason", "tokens"), CASES)
def test_stp01_stop_strings_are_cut_and_never_leak(letters, stop, text, with_stop, reason, tokens):
    for included, expected in ((False, text), (True, with_stop)):
        body = {"stop": stop, "max_tokens": 20, "include_stop_str_in_output": included}
        answer = letters.complete("A", **body)
        choice = answer["choices"][0]
        assert choice["text"] == expected
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == reason
        if tokens is not None:
            assert answer["usage"]["completion_tokens"] == tokens
        events = letters.events("/v1/completions", prompt="A", temperature=0, **body)
        deltas = [c["text"] for e in events for c in e["choices"]]
        assert "".join(deltas) == expected
        for i in range(len(deltas)):
            assert expected.startswith("".join(deltas[: i + 1])), "nothing is ever taken back"


def test_stp01_text_before_min_tokens_is_not_searched(letters):
    assert letters.text("A", stop=["B", "K"], min_tokens=2, max_tokens=20) == "BCDEFGHIJ"


@pytest.mark.parametrize("ids", [[99999999], [-1], [2**31], [2**63], ["a"], [1.5], [True], 7])
def test_stp05_stop_ids_out_of_the_vocabulary_are_refused_and_harm_nobody(chat135m, ids):
    alone = chat135m.text("The sky is", max_tokens=24)
    beside: list[str] = []
    thread = threading.Thread(target=lambda: beside.append(chat135m.text("The sky is", max_tokens=24)))
    thread.start()
    body = {"stop_token_ids": ids, "min_tokens": 2, "max_tokens": 8}
    answer = chat135m.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **body)
    thread.join()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "stop_token_ids" in error["message"]
    if isinstance(ids, list) and type(ids[0]) is int:
        assert "49151" in error["message"] or "49152" in error["message"], "the message names the range"
    assert beside == [alone]


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    path = checkpoints.chain(tmp_path_factory.mktemp("s") / "m", ["a", "b", "c", "<X>", "d"], specials=["<X>"])
    with live(path, num_kv_blocks=64, num_threads=1, max_model_len=256) as server:
        yield server


def test_stp06_a_special_stop_token_does_not_eat_its_neighbours(special):
    x = special.post("/tokenize", prompt="<X>", add_special_tokens=False).json()["tokens"][0]
    for streamed in (False, True):
        ask = special.streamed_text if streamed else special.text
        assert ask("a", stop_token_ids=[x], skip_special_tokens=True, max_tokens=9) == "bc"
        assert ask("a", stop_token_ids=[x], skip_special_tokens=False, max_tokens=9) == "bc"
        assert ask("a", skip_special_tokens=True, max_tokens=9) == "bcd"
        assert ask("a", skip_special_tokens=False, max_tokens=9).startswith("bc<X>d")
