"""Custom logits processors: by option, from a package, and what becomes of one that is broken (OUT-5)."""

import httpx
import pytest

from tests.support import checkpoints, plugin_package
from tests.support.live import spawn

MODULE = """
class Only:
    keeps_argmax = False

    def __init__(self, context):
        self.vocab_size = context.vocab_size

    def enter(self, slot, request_id, params):
        return params.presence_penalty == 0.25  # who asks for it, in this test

    def leave(self, slot):
        pass

    def apply(self, logits, rows, index):
        logits[:, :7] = -float("inf")
        logits[:, 8:] = -float("inf")

class Raises(Only):
    def apply(self, logits, rows, index):
        raise LookupError("the moon is full")

class Broken:
    def __init__(self, context):
        raise LookupError("no moon")

class NoMethods:
    def __init__(self, context):
        pass
"""
BROUGHT = {"octavo.logits_processors": {"only": "toylogits:Only"}}


def ask(server, **body):
    asked = {
        "prompt": [3, 4, 5],
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **body,
    }
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)


def ids(answer):
    return answer.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("by", ["option", "package"])
def test_OUT_5_a_processor_changes_the_answers_that_it_is_for(tmp_path, by):
    plugin_package.write(tmp_path, "toylogits", MODULE, BROUGHT if by == "package" else {})
    option = ["--logits-processors", "toylogits:Only"] if by == "option" else []
    env = plugin_package.environment(tmp_path)
    with spawn("--model", str(checkpoints.tiny_llama()), "--num-threads", "1", *option, env=env) as server:
        plain = ids(ask(server))
        assert ids(ask(server, presence_penalty=0.25)) == [7, 7, 7]
        assert ids(ask(server)) == plain != [7, 7, 7]


def test_OUT_5_one_that_raises_ends_the_request_that_it_was_for(tmp_path):
    plugin_package.write(tmp_path, "toylogits", MODULE, {})
    env = plugin_package.environment(tmp_path)
    option = ["--logits-processors", "toylogits:Raises"]
    with spawn("--model", str(checkpoints.tiny_llama()), "--num-threads", "1", *option, env=env) as server:
        plain = ids(ask(server))
        failed = ask(server, presence_penalty=0.25)
        assert failed.status_code == 500
        assert "logits processor Raises failed" in failed.json()["error"]["message"]
        assert ids(ask(server)) == plain


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("toylogits:Broken", "logits processor 'toylogits:Broken' could not be made: LookupError('no moon')"),
        ("toylogits:NoMethods", "has no keeps_argmax, enter, leave, apply"),
        ("toylogits:Absent", "could not be loaded: AttributeError"),
        ("toylogits", "must be registered as 'module:attribute', got 'toylogits'"),
    ],
)
def test_OUT_5_one_that_cannot_be_made_ends_the_start_in_one_sentence(tmp_path, target, says):
    plugin_package.write(tmp_path, "toylogits", MODULE, {})
    done = plugin_package.complete(tmp_path, checkpoints.tiny_llama(), "--logits-processors", target)
    assert done.returncode == 1
    assert says in done.stderr.strip().splitlines()[-1]
