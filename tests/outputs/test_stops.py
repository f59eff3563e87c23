"""Stop strings across token borders (OUT-22, STP-01)."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.outputs.stops import StopScanner

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def scan(chunks: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    scanner = StopScanner(stops, include=include)
    sent = []
    for chunk in chunks:
        sent.append(scanner.feed(chunk))
        if scanner.matched is not None:
            return sent, scanner.matched
    return [*sent, scanner.flush()], None


def one_by_one(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The slow twin: read a character at a time and look at the end."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(LETTERS, STOPS, st.lists(st.integers(1, 4)))
def test_any_chunking_cuts_where_reading_by_character_cuts(text: str, stops: list[str], sizes: list[int]) -> None:
    chunks, at = [], 0
    for size in [*sizes, len(text)]:
        chunks.append(text[at : at + size])
        at += size
    want, stop = one_by_one(text, stops)
    sent, matched = scan(chunks, stops)
    assert ("".join(sent), matched) == (want, stop)
    sent, matched = scan(chunks, stops, include=True)
    assert "".join(sent) == want + (stop or "")


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    sent = ""
    for at, letter in enumerate(text):
        sent += scanner.feed(letter)
        if scanner.matched is not None:
            return
        seen = text[: at + 1]
        assert sent + scanner.held == seen
        assert len(scanner.held) <= max(map(len, stops)) - 1
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert len(scanner.held) == longest


def test_a_stop_string_inside_and_across_tokens_is_never_sent_stp_01() -> None:
    chunks = ["B", "CD", "EF", "GH", "IJ", "K"]
    assert scan(chunks, ["DEFG"]) == (["B", "C", "", ""], "DEFG")
    assert scan(chunks, ["DEFG"], include=True) == (["B", "C", "", "DEFG"], "DEFG")


def test_the_stop_string_that_completes_first_wins() -> None:
    assert scan(["xabcdef"], ["abcdef", "cd"]) == (["xab"], "cd")
    assert scan(["xabcdef"], ["cd", "abcdef"]) == (["xab"], "cd")


def test_of_two_that_complete_together_the_longer_wins() -> None:
    for stops in (["bc", "abc"], ["abc", "bc"]):
        assert scan(["xabc"], stops) == (["x"], "abc")


def test_a_false_start_is_sent_as_soon_as_it_is_one() -> None:
    scanner = StopScanner(["\n\nUser:"])
    assert scanner.feed("end\n") == "end"
    assert scanner.feed("\n") == ""
    assert scanner.feed("\nU") == "\n"  # two of the three line ends may still begin it
    assert scanner.held == "\n\nU"
    assert scanner.feed("nit") == "\n\nUnit"


def test_nothing_comes_after_a_match() -> None:
    scanner = StopScanner(["a"])
    assert scanner.feed("xa") == "x"
    assert scanner.feed("more") == "" and scanner.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    scanner = StopScanner([])
    assert scanner.feed("abc") == "abc" and scanner.held == "" and scanner.flush() == ""
