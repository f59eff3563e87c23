"""Incremental text equals the whole text, for every tokenizer kind (OUT-20, OUT-21, OUT-23, OUT-24)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.inputs.tokenizer_fast import FastTokenizer
from octavo.outputs.detokenizer import REPLACEMENT, Detokenizer, NoText, TokenDecoder
from tests.support.decoders import KINDS, Breaking, NoFastPath, tokenizer

BYTE_KINDS = ("byte-bpe", "byte-fallback-bpe")
STR_01 = "xé\U0001f9d1歪 done"


def pieces(decoder: TokenDecoder, ids: list[int], **options: object) -> list[str]:
    text = Detokenizer(decoder, **options)  # type: ignore[arg-type]
    return [*(text.step(i) for i in ids), text.flush()]


def paths(kind: str) -> list[TokenDecoder]:
    """The fast path, its slow twin, and a fast path that breaks now and then."""
    inner = tokenizer(kind)
    return [inner, NoFastPath(inner), Breaking(inner, 3), Breaking(inner, 7)]


def byte_ids(kind: str, data: bytes) -> list[int]:
    """One token for each byte, as STR-01 asks."""
    inner = tokenizer(kind)
    by_bytes = {inner.token_bytes(i): i for i in reversed(range(inner.vocab_size)) if i not in inner.special_ids}
    if kind == "byte-bpe":
        return [by_bytes[bytes([b])] for b in data]
    core = inner._core  # the byte tokens have the same bytes as the plain ones
    return [core.token_to_id(f"<0x{b:02X}>") for b in data]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_text_of_all_ids_out_23(kind: str, data: st.DataObject) -> None:
    inner = tokenizer(kind)
    text = data.draw(
        st.lists(st.sampled_from(["the", "quick", "fox", "hello", "words", "zebra", "é", "\U0001f9d1", "歪"]))
    )
    ids = inner.encode(" ".join(text), add_special_tokens=False)
    for decoder in paths(kind):
        got = pieces(decoder, ids)
        assert "".join(got) == inner.decode(ids)
        assert all(REPLACEMENT not in piece for piece in got)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_of_whole_tokens_join_to_the_text_of_all_ids_out_23(kind: str, data: st.DataObject) -> None:
    """Random ids, special ones among them, as long as each is text by itself."""
    inner = tokenizer(kind)
    whole = [
        i for i in range(inner.vocab_size)
        if REPLACEMENT not in inner.decode([i], skip_special_tokens=False)
        and not (kind == "byte-fallback-bpe" and 1 <= i <= 256)
    ]  # fmt: skip
    ids = data.draw(st.lists(st.sampled_from(whole), max_size=40))
    for skip in (True, False):
        for decoder in paths(kind):
            assert "".join(pieces(decoder, ids, skip_special_tokens=skip)) == inner.decode(
                ids, skip_special_tokens=skip
            )


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_characters_split_into_bytes_come_out_whole_str_01(kind: str) -> None:
    ids = byte_ids(kind, STR_01.encode())
    for decoder in paths(kind):
        got = pieces(decoder, ids)
        assert "".join(got) == STR_01
        assert not any(REPLACEMENT in piece for piece in got)
        assert got[0] == "x" and got[1] == ""  # the first byte of é waits for the second
        assert got[-1] == ""


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=60))
def test_any_bytes_at_all_join_to_the_text_of_all_bytes(data: bytes) -> None:
    """Malformed bytes too, in a byte-level vocabulary: the window is cut without a change to the text."""
    ids = byte_ids("byte-bpe", data)
    for decoder in paths("byte-bpe"):
        assert "".join(pieces(decoder, ids)) == data.decode(errors="replace")


@pytest.mark.parametrize("kind", BYTE_KINDS)
@settings(max_examples=50, deadline=None)
@given(text=st.text(min_size=1, max_size=12), broken=st.integers(1, 3))
def test_a_character_that_is_never_completed_comes_out_at_the_end_only(kind: str, text: str, broken: int) -> None:
    if kind == "byte-fallback-bpe":  # its decoder gives up a whole run of bytes at once; letters end the run
        ids = tokenizer(kind).encode("hello", add_special_tokens=False)
    else:
        ids = byte_ids(kind, text.replace(REPLACEMENT, "").encode())
    tail = byte_ids(kind, "\U0001f9d1".encode()[:broken])
    for decoder in paths(kind):
        got = pieces(decoder, ids + tail)
        assert not any(REPLACEMENT in piece for piece in got[:-1])
        assert set(got[-1]) == {REPLACEMENT}
        assert "".join(got) == decoder.decode(ids + tail)


@pytest.mark.parametrize("unit", [b"\xf0", b"\x9f", b"\xff\xfe", b"\xe6\xad"])
def test_cost_of_a_token_does_not_grow_even_with_malformed_text(unit: bytes) -> None:
    ids = byte_ids("byte-bpe", unit) * 500
    decoder = NoFastPath(tokenizer("byte-bpe"))
    text = "".join(pieces(decoder, ids))
    assert text == (unit * 500).decode(errors="replace")
    assert decoder.num_decoded < 50 * len(ids)


def test_a_run_of_skipped_special_tokens_is_cheap_and_keeps_the_space_after_it() -> None:
    inner = tokenizer("byte-fallback-bpe")
    end = next(iter(inner.special_ids))
    hello, world = inner.encode("hello", add_special_tokens=False), inner.encode("world", add_special_tokens=False)
    ids = hello + [end] * 300 + world
    for decoder in (inner, NoFastPath(inner)):
        assert "".join(pieces(decoder, ids)) == inner.decode(ids) == "hello world"
    slow = NoFastPath(inner)
    pieces(slow, ids)
    assert slow.num_decoded < 50 * len(ids)


def test_a_broken_stream_is_replaced_and_used_again_out_20() -> None:
    inner = tokenizer("byte-bpe")
    breaking = Breaking(inner, 5)
    ids = inner.encode("the quick brown fox jumps over the lazy dog again and again", add_special_tokens=False)
    assert "".join(pieces(breaking, ids)) == inner.decode(ids)
    assert breaking.num_opened > 2
    assert breaking.num_steps > len(ids) // 2  # most tokens still took the fast path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_follow_the_option_out_24(kind: str, skip: bool) -> None:
    inner = tokenizer(kind)
    end = next(i for i in inner.special_ids if inner.token_text(i) == "<end>")
    ids = [*inner.encode("hello", add_special_tokens=False), end, *inner.encode("words", add_special_tokens=False)]
    for decoder in paths(kind):
        text = "".join(pieces(decoder, ids, skip_special_tokens=skip))
        assert text == inner.decode(ids, skip_special_tokens=skip)
        assert ("<end>" in text) is not skip


def test_without_spaces_between_special_tokens_the_decoder_is_asked_to_do_it() -> None:
    class Spacing(NoFastPath):
        def decode(self, ids, *, skip_special_tokens=True, spaces_between_special_tokens=True):  # type: ignore[no-untyped-def]
            return (" " if spaces_between_special_tokens else "").join(f"<{i}>" for i in ids)

        def open_stream(self, *, skip_special_tokens):  # type: ignore[no-untyped-def]
            raise AssertionError("the fast path cannot honour this option")

    spacing = Spacing(tokenizer("byte-bpe"))
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert "".join(pieces(spacing, [1, 2, 3], **options)) == "<1><2><3>"


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_a_prompt_continues_it(kind: str) -> None:
    """prompt + answer reads as one text: the space that begins an answer is not lost."""
    inner = tokenizer(kind)
    prompt = inner.encode("the quick brown", add_special_tokens=False)
    answer = inner.encode("the quick brown fox jumps", add_special_tokens=False)[len(prompt) :]
    for decoder in paths(kind):
        text = "".join(pieces(decoder, answer, context=prompt[-6:]))
        assert inner.decode(prompt) + text == inner.decode(prompt + answer)


def test_a_character_begun_by_the_prompt_is_completed_by_the_answer() -> None:
    ids = byte_ids("byte-bpe", "a\U0001f9d1b".encode())
    for decoder in paths("byte-bpe"):
        assert "".join(pieces(decoder, ids[3:], context=ids[:3])) == "\U0001f9d1b"


def test_holding_tells_whether_text_is_out() -> None:
    text = Detokenizer(tokenizer("byte-bpe"))
    first, second = byte_ids("byte-bpe", "é".encode())
    assert not text.holding
    assert text.step(first) == "" and text.holding
    assert text.step(second) == "é" and not text.holding
    assert text.flush() == ""


def test_without_detokenizing_there_is_no_text() -> None:
    text = NoText()
    assert (text.step(1), text.flush(), text.holding) == ("", "", False)


def test_the_twins_are_what_they_say() -> None:
    inner = tokenizer("byte-bpe")
    assert isinstance(inner, FastTokenizer)
    assert inner.open_stream(skip_special_tokens=True) is not None
    assert NoFastPath(inner).open_stream(skip_special_tokens=True) is None
