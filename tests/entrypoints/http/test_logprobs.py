"""Log-probabilities beside the text they belong to, for tokenizers of every kind (OUT-2, OUT-25, LOG-02)."""

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from octavo.inputs.tokenizer_fast import FastTokenizer, SpecialTokens
from tests.entrypoints.http.events import chat_stream, text_stream
from tests.entrypoints.http.toy import BOS, EOS, MARK, text_script
from tests.entrypoints.http.toy_server import Served, toy_server
from tests.support.decoders import KINDS

TEXT = "hello hello world, the quick brown fox"


def of_kind(kind: str, *, adds_bos: bool) -> FastTokenizer:
    """A tokenizer of a kind, which begins texts with <s> if asked."""
    core: Tokenizer = Tokenizer.from_str(KINDS[kind]()._core.to_str())
    core.add_special_tokens(["<s>"])
    if adds_bos:
        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    return FastTokenizer(core, SpecialTokens(bos="<s>"))


def scored(served: Served, stream: bool, **body: object) -> tuple[str, dict[str, list]]:
    """The text of the one choice, and its scores, all chunks of a stream together."""
    if not stream:
        (choice,) = served.complete(**body).json()["choices"]
        return choice["text"], choice["logprobs"]
    found = text_stream(served.complete(**body, stream=True))
    parts = [c["choices"][0]["logprobs"] for c in found.chunks if c["choices"][0]["logprobs"]]
    return found.texts[0], {key: [x for part in parts for x in part[key]] for key in parts[0]}


def check_joined(text: str, scores: dict[str, list]) -> None:
    """The tokens are the text, and stand where the offsets say."""
    assert "".join(scores["tokens"]) == text
    assert scores["text_offset"] == [len("".join(scores["tokens"][:i])) for i in range(len(scores["tokens"]))]
    assert len({len(column) for column in scores.values()}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("kind", ["byte-bpe", "byte-fallback-bpe", "unigram"])
def test_the_echoed_tokens_joined_are_the_text(kind: str, adds_bos: bool, stream: bool) -> None:
    """F13: also where words carry the space before them, and where a BOS was added that is not in the text."""
    tokenizer = of_kind(kind, adds_bos=adds_bos)
    answer = tokenizer.encode("hello world the lazy dog", add_special_tokens=False)[:6]
    with toy_server(lambda _: answer, tokenizer=tokenizer, adds_bos=adds_bos) as served:
        ids = tokenizer.encode(TEXT)
        text, scores = scored(served, stream, prompt=TEXT, echo=True, logprobs=1, max_tokens=len(answer))
        assert text.startswith(TEXT) and len(text) > len(TEXT)
        check_joined(text, scores)
        assert len(scores["tokens"]) == len(ids) + len(answer)
        assert scores["token_logprobs"][0] is None
        if adds_bos:
            assert scores["tokens"][0] == ""
        alone = scored(served, stream, prompt=TEXT, echo=True, logprobs=1, max_tokens=0)
        assert alone[0] == TEXT
        check_joined(*alone)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["byte-bpe", "byte-fallback-bpe", "unigram", "wordpiece", "word-level"])
def test_an_echo_of_token_ids_shows_their_special_tokens(kind: str, stream: bool) -> None:
    """F94, F13: text and tokens agree, and both show what was sent."""
    tokenizer = of_kind(kind, adds_bos=False)
    bos, end = tokenizer.bos_token_id, next(i for i in tokenizer.special_ids if tokenizer.token_text(i) == "<end>")
    words = tokenizer.encode("hello world", add_special_tokens=False)
    prompt = [bos, *words, end, *words]
    with toy_server(lambda _: words, tokenizer=tokenizer) as served:
        text, scores = scored(served, stream, prompt=prompt, echo=True, logprobs=0, max_tokens=2)
        check_joined(text, scores)
        assert text.startswith("<s>") and "<end>" in text
        without_scores = served.complete(prompt=prompt, echo=True, max_tokens=2).json()["choices"][0]["text"]
        assert without_scores == text


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_half_a_character_is_the_same_in_text_and_tokens(stream: bool) -> None:
    """F13: what cannot be a character is a replacement character in the text and in the tokens."""
    with toy_server(text_script("!")) as served:
        text, scores = scored(served, stream, prompt=[65, 0xC3], echo=True, logprobs=0, max_tokens=1)
        check_joined(text, scores)
        assert text.startswith("A\ufffd") and text.endswith("!")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, list("abcdef")),
        ({"ignore_eos": True, "max_tokens": 8}, [*"abcdefxx"]),
        ({"stop": ["cd"]}, ["a", "b"]),
        ({"stop": ["cd"], "include_stop_str_in_output": True}, list("abcd")),
        ({"stop_token_ids": [ord("c")]}, ["a", "b"]),
        ({"stop_token_ids": [ord("c")], "include_stop_str_in_output": True}, ["a", "b", "c"]),
        ({"skip_special_tokens": False}, list("abcdef")),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, [*"abcdef", "</s>"]),
        ({"max_tokens": 3}, list("abc")),
    ],
)
def test_what_is_not_in_the_text_has_no_entry(body: dict, tokens: list[str], stream: bool) -> None:
    """F14: neither EOS, nor a stop token, nor the tokens of a stop string; completions and chats alike."""
    with toy_server(text_script("abcdef")) as served:
        body = {"max_tokens": 20, **body}
        text, scores = scored(served, stream, prompt="q", logprobs=0, **body)
        assert (text, scores["tokens"]) == ("".join(tokens), tokens)
        check_joined(text, scores)
        answer = served.chat(logprobs=True, stream=stream, **body)
        if stream:
            found = [c["choices"][0]["logprobs"] for c in chat_stream(answer).chunks if c["choices"]]
            content = [entry for each in found if each for entry in each["content"]]
        else:
            (choice,) = answer.json()["choices"]
            content = choice["logprobs"]["content"]
            assert choice["message"]["content"] == text
        assert [entry["token"] for entry in content] == tokens
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == text


def test_an_answer_of_nothing_but_the_end_has_an_empty_list() -> None:
    """F14."""
    with toy_server(lambda _: [EOS]) as served:
        (choice,) = served.complete(prompt="q", logprobs=1).json()["choices"]
        assert choice["text"] == "" and choice["logprobs"]["tokens"] == []
        assert served.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"] == []


def test_a_special_token_within_the_text_has_an_entry_without_text() -> None:
    """F14: entries stay as many as tokens, so that scores can be counted; joined they are still the text."""
    with toy_server(lambda _: [97, MARK, 98, EOS]) as served:
        text, scores = scored(served, False, prompt="q", logprobs=0)
        assert (text, scores["tokens"]) == ("ab", ["a", "", "b"])
        content = served.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
        assert [(entry["token"], entry["bytes"]) for entry in content] == [("a", [97]), ("", []), ("b", [98])]


def test_token_ids_and_usage_still_count_what_is_hidden() -> None:
    """F14: the end was generated: it is in token_ids and in usage."""
    with toy_server(text_script("ab")) as served:
        answer = served.complete(prompt="q", logprobs=0, return_token_ids=True).json()
        assert answer["choices"][0]["token_ids"] == [97, 98, EOS]
        assert answer["usage"]["completion_tokens"] == 3


def test_a_bos_that_the_client_wrote_is_shown() -> None:
    """F13: added ones have no text; written ones are the text."""
    with toy_server(adds_bos=True) as served:
        text, scores = scored(served, False, prompt="<s>hi", echo=True, logprobs=0, max_tokens=0)
        assert (text, scores["tokens"]) == ("<s>hi", ["<s>", "h", "i"])
        text, scores = scored(served, False, prompt="hi", echo=True, logprobs=0, max_tokens=0)
        assert (text, scores["tokens"], scores["text_offset"]) == ("hi", ["", "h", "i"], [0, 0, 1])
        text, _ = scored(served, False, prompt=[BOS, 104], echo=True, logprobs=0, max_tokens=0)
        assert text == "<s>h"
