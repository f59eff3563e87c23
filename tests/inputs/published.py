"""Pre-tokenizers as the models' own tokenizer.json files hold them, written out here apart from the engine's table.

Promises: one entry for each rule, in the library's own JSON form; which names mean which rule is said here once more.
Does not know: Octavo.
"""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.inputs.builders import CORPUS, SPECIALS

MORE_TEXT = """
Zahlen: 1 22 333 4444 55555 666666 7777777 1,234,567.89 0x1F 3rd 2nd 10km ٣٤٥ ½ ² Ⅷ
日本語のテキスト、ひらがなとカタカナ。한국어 텍스트입니다! ไทย ภาษา ខ្មែរ မြန်မာ עברית العربية हिन्दी में पाठ বাংলা
iPhone McDonald XMLHttpRequest camelCase SCREAMING_CASE Don'T can'T İstanbul'da Ankara'nın
\tfor i in range(10):\r\n\t\tprint(i)  # done...\r\n\r\n/* a */ //b \\n <tag/> {x}[y](z) ~!@#$%^&*_+`-=
"""
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = {**GPT2, "use_regex": False}
EACH_DIGIT = {"type": "Digits", "individual_digits": True}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def words(*patterns: str) -> list[dict[str, Any]]:
    return [*map(split, patterns), BYTES]


CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
YOUTU_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_LETTERS = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"  # the file lists these letters one by one
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

RULES: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [GPT2],
    "smollm": [EACH_DIGIT, GPT2],
    "default": words(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        GPT2,
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ],
    "llama-bpe": words(CL100K),
    "jais-2": words(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}"
    ),
    "minicpm5": words(
        r"\p{N}{1,3}",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "qwen2": words(QWEN2),
    "qwen35": words(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "ufakzeka": words(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "laguna": words(r"[^\n]+|[\n]+", QWEN2),
    "seed-coder": words(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "bailingmoe": words(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "exaone-moe": words(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "tekken": words(TEKKEN),
    "gpt-4o": words(O200K),
    "tiny_aya": words(r"\d{1,3}(?=(?:\d{3})*\b)", O200K),
    "kimi-k2": words(KIMI),
    "youtu": words(
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        YOUTU_WORDS,
    ),
    "deepseek-llm": [
        split("[\r\n]"),
        split(DEEPSEEK_LETTERS),
        split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        split(r"\s+$"),
        split("[一-龥ࠀ-一가-퟿]+"),
        EACH_DIGIT,
        BYTES,
    ],
    "deepseek-coder": [
        split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-퟿]+"), EACH_DIGIT, BYTES,
    ],
    "deepseek-v3": words(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3),
    "spark2_5": words(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]"
        r"|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    "afmoe": words(
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        DEEPSEEK_V3,
    ),
    "bloom": words(BLOOM),
    "viking": [split(BLOOM), EACH_DIGIT, BYTES],
    "superbpe": words(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "chameleon": [
        split("<sentinel:[0-9]+>"), split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"), split("([\t\n]|    |  )"), EACH_DIGIT,
        split(r"[\p{P}!-/:-@\[-`{-~]"), GPT2,
    ],
}  # fmt: skip

# Which rule each name of llama.cpp's table means, and what goes with it: w - words that are entries are not merged,
# n - NFC. "refused" are those whose vocabularies are not byte-level.
_TABLE = """
llama-bpe w: llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano
llama-bpe -: dbrx smaug-bpe glm4 chatglm-bpe
qwen2 n: qwen2 deepseek-r1-qwen kormo f2llmv2 megrez
qwen2 -: stablelm2 hunyuan grok-2 solar-open
gpt-2 -: gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum
gpt-2 -: exaone4 jais trillion granite-docling
gpt-2 n: mpt olmo modern-bert
smollm -: smollm starcoder refact codeshell exaone minerva-7b mellum2
smollm n: command-r
gpt-4o -: gpt-4o llama4 kanana2 talkie minimax-m2
gpt-4o w: granite-embed-multi-97m
deepseek-v3 -: deepseek-v3 hunyuan-dense hy_v4 joyai-llm
bailingmoe -: bailingmoe bailingmoe2 llada-moe
bloom -: bloom poro-chat gpt3-finnish
tiny_aya -: tiny_aya cohere2moe
= -: default falcon jais-2 ufakzeka laguna seed-coder exaone-moe kimi-k2 deepseek-llm deepseek-coder spark2_5 afmoe
= -: viking superbpe chameleon
= w: tekken minicpm5 youtu
= n: qwen35
refused -: gemma4 granite-embed-multi-311m sarvam-moe whitespace
"""


def _table() -> dict[str, tuple[str, str]]:
    out = {}
    for line in _TABLE.strip().splitlines():
        head, _, names = line.partition(":")
        rule, habits = head.split()
        out |= {name: (name if rule == "=" else rule, habits) for name in names.split()}
    return out


NAMES = _table()


@cache
def _trained(rule: str, habits: str, vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE(ignore_merges="w" in habits))
    state = {"type": "Sequence", "pretokenizers": RULES[rule]}
    blank = json.loads(tokenizer.to_str()) | {"pre_tokenizer": state}
    tokenizer = Tokenizer.from_str(json.dumps(blank))
    if "n" in habits:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((CORPUS + MORE_TEXT).splitlines(keepends=True), trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return str(tokenizer.to_str())


def published(name: str, vocab_size: int = 900) -> Tokenizer:
    """A small vocabulary trained with the rule that a name means, as its tokenizer.json would hold it."""
    return Tokenizer.from_str(_trained(*NAMES[name], vocab_size))
