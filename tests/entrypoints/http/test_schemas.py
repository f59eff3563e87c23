"""The parts that need no server: prompts, fields, parameters, log-probabilities, keys."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from octavo.base.errors import ClientError
from octavo.base.outputs import Logprob
from octavo.base.params import SamplingParams
from octavo.base.types import OutputKind
from octavo.entrypoints.http.fields import read_fields
from octavo.entrypoints.http.logprobs import Bytes, Pieces, chat_logprobs, completion_logprobs, finite
from octavo.entrypoints.http.prompts import split_prompts
from octavo.entrypoints.http.sampling import _COPIED, chat_params, completion_params
from octavo.entrypoints.http.schemas import NOT_SERVED, ChatRequest, CompletionRequest, GenerateRequest
from octavo.http.edge import Keyring, clean_id
from octavo.outputs.detokenizer import Detokenizer
from tests.entrypoints.http.toy import ToyTokenizer
from tests.http.test_body import json_values

NOTHING: dict[str, list] = {  # values that ask for what is done anyway, field by field; null is one everywhere
    "suffix": [""], "use_beam_search": [False], "length_penalty": [1, 1.0], "early_stopping": [False],
    "structured_outputs": [{}], "grammar": [""], "logits_processors": [[]], "prompt_embeds": [[]], "functions": [[]],
    "function_call": ["none", "auto"], "mm_processor_kwargs": [{}],
}  # fmt: skip
VALUES = [True, False, 0, 0.0, 1, 1.0, -1, 2, "", "x", "none", "auto", [], ["a"], {}, {"a": 1}]


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    """F12, F90: `true` is not 1, `false` is not 0, and an empty value is not always nothing."""
    harmless = [None, *NOTHING.get(name, [])]
    for value in [*VALUES, *harmless]:
        for kind, body in ((CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": []})):
            if any(type(value) is type(h) and value == h for h in harmless):
                assert read_fields(kind, {**body, name: value})[1] == []
                continue
            with pytest.raises(ClientError) as caught:
                read_fields(kind, {**body, name: value})
            assert caught.value.param == name and caught.value.code == "not_available"


def any_number(_number: int) -> None:
    """As many prompts as there are."""


INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "prompt_logprobs", "priority")


@pytest.mark.parametrize("name", [*INTEGERS, "logprobs", "best_of", "top_logprobs", "max_completion_tokens"])
def test_whole_numbers_are_integers(name: str) -> None:
    """F91: `2.0` is 2; fractions, booleans and numbers beyond all measure are refused by name."""
    kind, body = (ChatRequest, {"messages": []}) if name in ("top_logprobs", "max_completion_tokens") else (CompletionRequest, {"prompt": "a"})  # fmt: skip
    request, _ = read_fields(kind, {**body, name: 2.0})
    assert getattr(request, name) == 2 and type(getattr(request, name)) is int
    for wrong in (2.5, True, "2", 1e300, -1e300, math.inf, math.nan):
        with pytest.raises(ClientError) as caught:
            read_fields(kind, {**body, name: wrong})
        assert caught.value.param == name


def test_whole_numbers_are_token_ids() -> None:
    """F91."""
    request, _ = read_fields(CompletionRequest, {"prompt": [1.0, 2], "stop_token_ids": [3.0, 4], "allowed_token_ids": [5.0], "logit_bias": {"6": 1}})  # fmt: skip
    assert (request.stop_token_ids, request.allowed_token_ids) == ([3, 4], [5])
    assert split_prompts(request.prompt, any_number) == [[1, 2]] and split_prompts([[1.0], [2]], any_number) == [
        [1],
        [2],
    ]
    for name in ("stop_token_ids", "allowed_token_ids"):
        for wrong in (1.5, True, math.inf, "1"):
            with pytest.raises(ClientError, match=rf"{name}\[1\]"):
                read_fields(CompletionRequest, {"prompt": "a", name: [1, wrong]})


def test_the_newer_name_of_the_limit_wins() -> None:
    """F20."""
    request, _ = read_fields(ChatRequest, {"messages": [], "max_tokens": 20, "max_completion_tokens": 3})
    assert chat_params(request, {}).max_tokens == 3


@given(st.dictionaries(st.sampled_from([*ChatRequest.model_fields, "zorp"]), json_values, max_size=6))
def test_any_values_give_a_request_or_a_clients_error(body: dict) -> None:
    """INP-20: no value of any field is worse than a 400 with a field's name."""
    for kind, params in ((ChatRequest, chat_params), (CompletionRequest, completion_params)):
        try:
            request, _ = read_fields(kind, body)
            params(request, {})
        except ClientError as error:
            assert error.status == 400 and error.message


def test_every_sampling_field_is_copied_or_handled() -> None:
    """A field that is added to `SamplingParams` must not be forgotten here."""
    handled = {"logprobs", "prompt_logprobs", "logit_bias", "output_kind", "detokenize"}
    assert set(SamplingParams.__struct_fields__) == set(_COPIED) | handled
    assert set(_COPIED) <= set(GenerateRequest.model_fields)
    assert not NOT_SERVED.keys() & (ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys())


def test_parameters_follow_the_request_then_the_author_then_neutral() -> None:
    """INP-22."""
    defaults = {"temperature": 0.6, "top_k": 20}
    chat, _ = read_fields(ChatRequest, {"messages": [], "top_k": 5})
    params = chat_params(chat, defaults)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 5, 1.0, None)
    assert params.output_kind is OutputKind.FINAL_ONLY
    text, _ = read_fields(CompletionRequest, {"prompt": "a", "stream": True, "temperature": 0})
    params = completion_params(text, defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (0, 20, 16)
    assert params.output_kind is OutputKind.DELTA


def test_misspelled_names_are_found_and_strange_ones_are_not() -> None:
    for wrong, right in [
        ("temprature", "temperature"), ("max_token", "max_tokens"), ("maxTokens", "max_tokens"), ("Stop", "stop"),
        ("top-p", "top_p"), ("frequency_penality", "frequency_penalty"), ("seeds", "seed"),
    ]:  # fmt: skip
        with pytest.raises(ClientError, match=f"'{right}'"):
            read_fields(CompletionRequest, {"prompt": "a", wrong: 1})
    for strange in ("mirostat", "top_a", "typical_p", "dry_multiplier", "cache_prompt", "n_probs", "id_slot", "x"):
        _, warnings = read_fields(CompletionRequest, {"prompt": "a", strange: 1})
        assert len(warnings) == 1 and strange in warnings[0]


@given(
    st.lists(st.integers() | st.booleans() | st.floats() | st.text(max_size=2) | st.lists(st.integers()), max_size=5)
)
def test_prompts_come_back_whole_or_are_refused(prompt: list) -> None:
    try:
        prompts = split_prompts(prompt, any_number)
    except ClientError as error:
        assert error.param.startswith("prompt")
        return
    assert prompts in (prompt, [prompt])  # 2.0 equals 2
    assert all(isinstance(p, str) or all(type(t) is int for t in p) for p in prompts)


def test_a_number_of_prompts_is_refused_before_anything_looks_at_them() -> None:
    """F80: what would be 400 for its number costs no look at each entry."""

    def three_at_most(number: int) -> None:
        if number > 3:
            raise ClientError(f"{number}", param="prompt")

    with pytest.raises(ClientError, match="4"):
        split_prompts([[1], [2], "not looked at", None], three_at_most)
    assert split_prompts([1, 2, 3, 4, 5], three_at_most) == [[1, 2, 3, 4, 5]]
    with pytest.raises(ClientError, match=r"prompt\[1\] must be a string"):
        split_prompts(["a", 5], three_at_most)


@pytest.mark.parametrize(("wrong", "shown"), [("a", "a string"), (None, "null"), (1.5, "1.5"), (True, "true"), ([1], "a list")])  # fmt: skip
@pytest.mark.parametrize("place", [1, 3])
def test_the_first_wrong_token_id_is_named(place: int, wrong: object, shown: str) -> None:
    """F80, F91: also behind whole floats and before others that are wrong."""
    prompt = [1, 2.0, 3, 4, 5.5, "x"]
    prompt[place] = wrong
    with pytest.raises(ClientError) as caught:
        split_prompts(prompt, any_number)
    assert str(caught.value).startswith(f"prompt[{place}] must be a token id, got {shown}")


def test_of_many_wrong_ids_one_is_complained_about() -> None:
    """F80: complaints about each of 262,144 entries took 3 s, and other streams stood still for one of them."""
    for wrong in ("a", 5.5, True):
        with pytest.raises(ClientError) as caught:
            read_fields(CompletionRequest, {"prompt": "a", "stop_token_ids": [1, 2.0, *[wrong] * 5]})
        assert caught.value.param == "stop_token_ids[2]" and "must be an integer" in str(caught.value)
        whole = CompletionRequest.model_fields["stop_token_ids"]
        with pytest.raises(ValidationError) as told:
            TypeAdapter(whole.annotation).validate_python([1, 2.0, *[wrong] * 5], strict=True)
        assert told.value.error_count() == 1


def test_a_token_id_has_one_bias() -> None:
    """F80's field, and the rule of all names: two spellings of one id are two values for one thing, refused by name."""
    with pytest.raises(ClientError, match="logit_bias gives the token id 5 twice"):
        read_chat = read_fields(ChatRequest, {"messages": [], "logit_bias": {"5": 1, "05": 2}})[0]
        chat_params(read_chat, {})


def test_numbers_that_json_has_no_word_for() -> None:
    assert finite(-math.inf) == finite(math.nan) == finite(-10_000) == -9999.0
    assert finite(-1.5) == -1.5


def test_candidates_are_ranked_and_the_chosen_comes_first() -> None:
    tokenizer = ToyTokenizer()
    entry = {99: Logprob(-3.0, 9, "c"), 97: Logprob(-0.5, 1, "a"), 98: Logprob(-1.0, 2, "b")}
    told = chat_logprobs([entry], 2, Bytes(tokenizer)).content[0]
    assert (told.token, told.bytes) == ("c", [99]) and [t.token for t in told.top_logprobs] == ["a", "b"]
    shape = completion_logprobs([99], [entry], 2, Pieces(Detokenizer(tokenizer)).of([99]))
    assert shape.top_logprobs == [{"a": -0.5, "b": -1.0, "c": -3.0}]


@given(st.text(max_size=20))
def test_offsets_count_characters_however_they_are_cut(text: str) -> None:
    """OUT-25: a character spread over tokens begins where its first byte does."""
    text = text.encode("utf-8", "replace").decode()
    pieces = Pieces(Detokenizer(ToyTokenizer()), start=7).of(text.encode(), last=True)
    assert [begin for begin, _ in pieces] == [7 + i for i, c in enumerate(text) for _ in c.encode()]
    assert "".join(piece for _, piece in pieces) == text


def test_keys_are_compared_whole() -> None:
    ring = Keyring(["one", "two"])
    assert ring.admits(b"Bearer one") and ring.admits(b"bearer  two ")
    for wrong in (b"", b"Bearer", b"Bearer ", b"Bearer on", b"Bearer onetwo", b"Basic one", b"one"):
        assert not ring.admits(wrong)
    assert Keyring([]).admits(b"")


@given(st.text(max_size=300))
def test_ids_are_fit_for_headers_and_logs(text: str) -> None:
    cleaned = clean_id(text)
    assert len(cleaned) <= 128 and cleaned.isascii() and (cleaned.isprintable() or not cleaned)
    assert json.dumps(cleaned)
