"""Workloads: which prompts are sent, how many tokens each asks for, and when each is sent (OPS-8).

Promises: the same arguments give the same workload, on every machine; prompts made here are distinct, so that a
prefix cache finds what a data set says is shared and nothing else.
Does not know: HTTP, servers, or tokenizers: random prompts are token ids, or words where a server takes text only.

Times are seconds after the start of the run; rates are requests per second.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.base.errors import ConfigError

Prompt = str | tuple[int, ...]
IdRange = tuple[int, int]  # lowest id, and one above the highest
Length = int | tuple[int, int]  # exactly so many tokens, or lowest and highest of an even spread

DEFAULT_IDS: IdRange = (1000, 10_000)  # ordinary words in the vocabularies of today
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
    "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side",
    "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law",
    "car", "city", "community", "name", "president", "team", "minute", "idea", "body", "information", "back",
    "parent", "face", "others", "level", "office", "door", "health", "person", "art", "war", "history", "party",
    "result", "change", "morning", "reason", "research", "girl", "guy", "moment", "air", "teacher", "force",
    "education",
)  # fmt: skip


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One request: its prompt and how many tokens it asks for.

    `prompt` is text or token ids. The items of one `conversation` are sent one after the other. The first
    `num_shared` ids or characters of the prompt are the same in other items, so the client keeps their bytes once.
    """

    prompt: Prompt
    max_tokens: int
    at_s: float = 0.0
    conversation: int | None = None
    num_shared: int = 0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Items and how they are sent.

    `concurrency` is the most requests open at once (closed loop); None opens each at its `at_s` whatever the server
    does (open loop). With `real_history`, an item of a conversation is its own turn only, and the client puts the
    turns and the server's answers before it; else each prompt is whole.
    """

    name: str
    items: tuple[Item, ...]
    concurrency: int | None = None
    stream: bool = True
    ignore_eos: bool = True
    temperature: float | None = 0.0  # None: the server's default
    real_history: bool = False


def random_prompts(
    num: int,
    *,
    input_len: Length,
    output_len: Length,
    seed: int = 0,
    ids: IdRange = DEFAULT_IDS,
    text: bool = False,
) -> tuple[Item, ...]:
    """`num` distinct prompts of random ids (or words, about a token each, with `text`); lengths in tokens."""
    rng = random.Random(f"random {seed}")
    return tuple(
        Item(prompt=_prompt(rng, _length(rng, input_len), ids, text), max_tokens=_length(rng, output_len))
        for _ in range(_positive("requests", num))
    )


def shared_prefix(
    num: int,
    *,
    prefix_len: int,
    input_len: Length,
    output_len: Length,
    num_prefixes: int = 1,
    seed: int = 0,
    ids: IdRange = DEFAULT_IDS,
    text: bool = False,
) -> tuple[Item, ...]:
    """`num` prompts, each one of `num_prefixes` prefixes of `prefix_len` tokens, then `input_len` tokens of its own."""
    rng = random.Random(f"shared prefix {seed}")
    prefixes = [_prompt(rng, prefix_len, ids, text) for _ in range(_positive("prefixes", num_prefixes))]
    items = []
    for i in range(_positive("requests", num)):
        own = _prompt(rng, _length(rng, input_len), ids, text)
        prefix = prefixes[i % num_prefixes]
        items.append(Item(prompt=_joined(prefix, own), max_tokens=_length(rng, output_len), num_shared=len(prefix)))
    return tuple(items)


def multi_turn(
    num_conversations: int,
    *,
    turns: int,
    input_len: Length,
    output_len: Length,
    prefix_len: int = 0,
    seed: int = 0,
    ids: IdRange = DEFAULT_IDS,
    text: bool = False,
) -> tuple[Item, ...]:
    """Conversations whose every turn repeats what came before, then asks `input_len` tokens more.

    With `text` each item is its own turn, for a workload with `real_history`. Token ids cannot carry the server's
    answers, so random ids stand for them: what the server said is then not found in its cache, what it was sent is.
    """
    rng = random.Random(f"multi turn {seed}")
    prefix = _prompt(rng, prefix_len, ids, text)
    items = []
    for conversation in range(_positive("conversations", num_conversations)):
        history: Prompt = prefix
        for _ in range(_positive("turns", turns)):
            own, max_tokens = _prompt(rng, _length(rng, input_len), ids, text), _length(rng, output_len)
            prompt = _joined(history, own)
            shared = len(prefix) if history else 0
            items.append(Item(prompt=prompt, max_tokens=max_tokens, conversation=conversation, num_shared=shared))
            history = "" if text else _joined(prompt, _prompt(rng, max_tokens, ids, text))
    return tuple(items)


def from_jsonl(
    path: str | Path, *, num: int | None = None, output_len: int | None = None, turns: bool = False, skip: int = 0
) -> tuple[Item, ...]:
    """Prompts from a file of JSON lines or of one JSON list: `num` of them (all when None) after the first `skip`.

    A row is `{"prompt": TEXT or [IDS]}`, ShareGPT's `{"conversations": [{"from": ..., "value": ...}]}` or OpenAI's
    `{"messages": [{"role": ..., "content": ...}]}`. It asks for `output_len` tokens, else its own `max_tokens`, else a
    quarter of the characters of its answer. Of a conversation the first turn is taken; with `turns` all are, as one
    conversation each, for a workload with `real_history`; then `num` counts conversations. A conversation in which
    no user speaks is passed over. Raises `ConfigError` where the file cannot be used.
    """
    found: list[list[Item]] = []
    for number, row in enumerate(_rows(Path(path)), 1):
        turn_items = [
            Item(prompt=prompt, max_tokens=_wanted(row, answer, output_len, f"{path}, row {number}"))
            for prompt, answer in _turns(row, f"{path}, row {number}")[: None if turns else 1]
        ]
        if turn_items:
            found.append(turn_items)
    asked = len(found) - skip if num is None else num
    if asked < 1 or skip + asked > len(found):
        raise ConfigError(f"{path} has {len(found)} prompts, but {skip + max(asked, 1)} are needed.")
    kept = found[skip : skip + asked]
    if not turns:
        return tuple(row[0] for row in kept)
    return tuple(msgspec.structs.replace(item, conversation=c) for c, row in enumerate(kept) for item in row)


def poisson(items: Sequence[Item], rate: float, seed: int = 0) -> tuple[Item, ...]:
    """Arrivals at random, `rate` a second on average; times between them are exponential."""
    return ramp(items, rate, rate, seed)


def burst(items: Sequence[Item], rate: float, size: int, seed: int = 0) -> tuple[Item, ...]:
    """Groups of `size` arrive at one moment; the groups are Poisson, so that `rate` requests a second come on average."""
    _positive("requests in a burst", size)
    firsts = poisson([items[i] for i in range(0, len(items), size)], _rate(rate) / size, seed)
    return tuple(msgspec.structs.replace(item, at_s=firsts[i // size].at_s) for i, item in enumerate(items))


def ramp(items: Sequence[Item], start_rate: float, end_rate: float, seed: int = 0) -> tuple[Item, ...]:
    """Poisson arrivals whose rate goes straight from `start_rate` to `end_rate` over the run.

    The first item arrives at 0. Later ones follow by inversion: with rate(t) = a + (b - a) t / T and T chosen so that
    all items are expected within T, item i comes when the integral of the rate reaches a sum of i exponentials.
    """
    rng = random.Random(f"arrivals {seed}")
    low, high = _rate(start_rate), _rate(end_rate)
    num = len(items)
    total_s = 2 * num / (low + high) if num else 0.0
    found, wanted = [], 0.0
    for item in items:
        found.append(msgspec.structs.replace(item, at_s=_when(wanted, low, high, total_s)))
        wanted += rng.expovariate(1.0)
    return tuple(found)


def evenly(items: Sequence[Item], rate: float) -> tuple[Item, ...]:
    """Arrivals at equal distances."""
    step = 1 / _rate(rate)
    return tuple(msgspec.structs.replace(item, at_s=i * step) for i, item in enumerate(items))


def _rows(path: Path) -> list[Mapping[str, Any]]:
    try:
        data = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the data set {path} cannot be read: {error.strerror}.") from None
    rows: list[Any] = []
    try:
        if data.startswith(b"["):
            rows = msgspec.json.decode(data)
        else:
            for line in data.splitlines():
                rows.append(msgspec.json.decode(line) if line.strip() else None)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        where = "" if data.startswith(b"[") else f", line {len(rows) + 1}"
        raise ConfigError(f"the data set {path}{where} is not JSON: {error}.") from None
    rows = [row for row in rows if row is not None]
    if not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"the data set {path} must hold JSON objects, one a row.")
    return rows


def _turns(row: Mapping[str, Any], where: str) -> list[tuple[Prompt, str]]:
    """What the user says in this row, and what was answered."""
    if "prompt" in row:
        prompt = row["prompt"]
        ids = isinstance(prompt, list) and bool(prompt) and all(type(t) is int for t in prompt)
        if not ids and not (isinstance(prompt, str) and prompt):
            raise ConfigError(f"{where}: the prompt must be text or a list of token ids, and not be empty.")
        answer = next((row[k] for k in ("completion", "response", "output") if isinstance(row.get(k), str)), "")
        return [(tuple(prompt) if ids else prompt, answer)]
    messages = row.get("conversations", row.get("messages"))
    if not isinstance(messages, list):
        raise ConfigError(f"{where}: it has none of 'prompt', 'conversations' and 'messages'.")
    found: list[tuple[Prompt, str]] = []
    system = ""
    for message in messages:
        who, said = message.get("from", message.get("role")), message.get("value", message.get("content"))
        if not isinstance(said, str):
            raise ConfigError(f"{where}: a message without text cannot be sent.")
        if who == "system":
            system = said + "\n\n"
        elif who in ("human", "user"):
            found.append((system + said, ""))
            system = ""
        elif found:
            found[-1] = (found[-1][0], found[-1][1] + said)
    return found


def _wanted(row: Mapping[str, Any], answer: str, output_len: int | None, where: str) -> int:
    own = row.get("max_tokens")
    if output_len is not None:
        return output_len
    if own is not None:
        if type(own) is not int or own < 1:
            raise ConfigError(f"{where}: max_tokens must be a whole number of at least 1.")
        return own
    if answer:
        return max(len(answer) // 4, 1)
    raise ConfigError(f"{where}: it says neither max_tokens nor an answer; give --output-len.")


def _when(wanted: float, low: float, high: float, total_s: float) -> float:
    """The time at which the integral of the rate is `wanted`; after `total_s` the rate stays at `high`."""
    slope = (high - low) / total_s if total_s else 0.0
    reached = (low + high) / 2 * total_s
    if wanted > reached:
        return total_s + (wanted - reached) / high
    if abs(slope) < 1e-12:
        return wanted / low
    return 2 * wanted / (low + math.sqrt(low * low + 2 * slope * wanted))


def _prompt(rng: random.Random, length: int, ids: IdRange, text: bool) -> Prompt:
    if text:
        return "".join(f"{rng.choice(WORDS)} " for _ in range(length))
    low, high = ids
    if not 0 <= low < high:
        raise ConfigError(f"a range of token ids must be LOW:HIGH with 0 <= LOW < HIGH, got {low}:{high}.")
    return tuple(rng.randrange(low, high) for _ in range(length))


def _joined(first: Prompt, second: Prompt) -> Prompt:
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return (*first, *second)  # both are ids: one data set makes one kind


def _length(rng: random.Random, length: Length) -> int:
    if isinstance(length, int):
        return length
    return rng.randint(*length)


def _positive(what: str, number: int) -> int:
    if number < 1:
        raise ConfigError(f"the number of {what} must be at least 1, got {number}.")
    return number


def _rate(rate: float) -> float:
    if not 0 < rate < float("inf"):
        raise ConfigError(f"a rate must be more than 0 requests per second, got {rate:g}.")
    return rate


def total_tokens(items: Iterable[Item]) -> int:
    """Most tokens that these items can ask for together."""
    return sum(item.max_tokens for item in items)
