"""How vocabularies inside GGUF files cut text before they merge it: every name, and the rule it means, as data.

Promises: each name of `tokenizer.ggml.pre` that llama.cpp's table knows is here, with its rule or with the reason why it
is refused.
Does not know: vocabularies, or files (see `tokenizer_gguf`).

A rule is that of the `tokenizer.json` which the model's authors published; where the two are known to differ in
spelling only, the authors' spelling is kept. Names that share a rule share its habits too, but for those said here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers

# Steps that are more than one regular expression; any other step is an expression whose matches stand alone.
GPT2: Final = "<GPT-2>"  # GPT-2's words, and then bytes as printable characters
BYTES: Final = "<bytes>"  # bytes as printable characters
EACH_DIGIT: Final = "<each digit>"
DIGITS: Final = "<digits>"
PUNCTUATION: Final = "<punctuation>"

# Pieces of expressions. `_ENDINGS` are English contractions, written in any case.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_HIRAGANA_AND_KATAKANA = "\u3040-\u309f\u30a0-\u30ff"
_CJK = "\u4e00-\u9fa5"
_CJK_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_ASIAN_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_KOREAN_AND_CHINESE = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|[{_CJK}{_HIRAGANA_AND_KATAKANA}]+"
)


def _cased(ending: str, tail: str, *, han: bool = True) -> str:
    """Words that change at a capital, as OpenAI's o200k has them; `tail` is what follows the words."""
    capitals, small = _CAPITALS, _SMALL
    if not han:
        capitals, small = (part[:-1] + r"&&[^\p{Han}]]" for part in (capitals, small))
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{capitals}*{small}+{ending}|{first}{capitals}+{small}*{ending}|{tail}"


_O200K = _cased(_ENDINGS + "?", rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}")
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_BLANKS}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_MARKS}|{_BLANKS}"
_DEEPSEEK_V3_WORDS = rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK_V3 = rf"{_DEEPSEEK_V3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
_CASCADE = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"

RULES: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt-2": (GPT2,),
    "smollm": (EACH_DIGIT, GPT2),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]", BYTES),
    "falcon": (PUNCTUATION, GPT2, DIGITS, r"[0-9][0-9][0-9]"),
    "llama-bpe": (_LLAMA3, BYTES),
    "jais-2": (rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+|{_CASCADE}", BYTES),
    "minicpm5": (r"\p{N}{1,3}", rf"{_ENDINGS}|{_WORD}|\p{{N}}+|{_MARKS}|{_BLANKS}", BYTES),
    "qwen2": (_QWEN2, BYTES),
    "qwen35": (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
        BYTES,
    ),
    "ufakzeka": (rf"{_WORD}|\p{{N}}|{_MARKS}|{_BLANKS}", BYTES),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2, BYTES),
    "seed-coder": (rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}", BYTES),
    "bailingmoe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        BYTES,
    ),
    "exaone-moe": (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        BYTES,
    ),
    "tekken": (_cased("", rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"), BYTES),
    "gpt-4o": (_O200K, BYTES),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _O200K, BYTES),
    "kimi-k2": (
        rf"[\p{{Han}}]+|{_cased(_ENDINGS + '?', '', han=False)}\p{{N}}{{1,3}}|{_MARKS}|{_BLANKS}",
        BYTES,
    ),
    "youtu": (
        _KOREAN_AND_CHINESE,
        _cased(_ENDINGS + "?", rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"),
        BYTES,
    ),
    "deepseek-llm": (
        "[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_MARKS, r"\s+$", _CJK_AND_HANGUL, EACH_DIGIT, BYTES,
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, EACH_DIGIT, BYTES),
    "deepseek-v3": (r"\p{N}{1,3}", f"[{_CJK}{_HIRAGANA_AND_KATAKANA}]+", _DEEPSEEK_V3, BYTES),
    "spark2_5": (
        r"\p{N}{1,3}",
        f"[{_CJK}{_HIRAGANA_AND_KATAKANA}]+",
        rf"{_DEEPSEEK_V3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        EACH_DIGIT,
        BYTES,
    ),
    "afmoe": (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN_SCRIPTS, _DEEPSEEK_V3, BYTES),
    "bloom": (_BLOOM, BYTES),
    "viking": (_BLOOM, EACH_DIGIT, BYTES),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))", BYTES),
    "chameleon": (
        r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", EACH_DIGIT,
        r"[\p{P}!-/:-@\[-`{-~]", GPT2,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """What goes with a name: its rule, and what the published tokenizer does beside it."""

    rule: str  # in RULES
    whole_words: bool = False  # a word that is an entry is taken without merging
    adds_bos: bool = False  # where the file does not say
    nfc: bool = False


def _named(rule: str, names: str, **habits: bool) -> dict[str, Habit]:
    return {name: Habit(rule=rule, **habits) for name in names.split()}


NAMES: Final[Mapping[str, Habit]] = {
    **_named("default", "default"),
    **_named("llama-bpe", "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", whole_words=True, adds_bos=True),
    **_named("llama-bpe", "dbrx smaug-bpe glm4 chatglm-bpe"),
    **_named("jais-2", "jais-2"),
    **_named("minicpm5", "minicpm5", whole_words=True),
    **_named("qwen2", "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", nfc=True),
    **_named("qwen2", "stablelm2 hunyuan grok-2 solar-open"),
    **_named("qwen35", "qwen35", nfc=True),
    **_named("ufakzeka", "ufakzeka"),
    **_named("laguna", "laguna"),
    **_named("seed-coder", "seed-coder"),
    **_named("bailingmoe", "bailingmoe bailingmoe2 llada-moe"),
    **_named("exaone-moe", "exaone-moe"),
    **_named("tekken", "tekken", whole_words=True, adds_bos=True),
    **_named("gpt-4o", "gpt-4o llama4 kanana2 talkie minimax-m2"),
    **_named("gpt-4o", "granite-embed-multi-97m", whole_words=True),
    **_named("tiny_aya", "tiny_aya cohere2moe"),
    **_named("kimi-k2", "kimi-k2"),
    **_named("youtu", "youtu", whole_words=True),
    **_named("deepseek-llm", "deepseek-llm"),
    **_named("deepseek-coder", "deepseek-coder"),
    **_named("deepseek-v3", "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    **_named("spark2_5", "spark2_5"),
    **_named("afmoe", "afmoe"),
    **_named("falcon", "falcon"),
    **_named("smollm", "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    **_named("smollm", "command-r", nfc=True),
    **_named("gpt-2", "gpt-2 gpt2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling"),
    **_named("gpt-2", "mpt olmo modern-bert", nfc=True),
    **_named("bloom", "bloom poro-chat gpt3-finnish"),
    **_named("viking", "viking"),
    **_named("superbpe", "superbpe"),
    **_named("chameleon", "chameleon", adds_bos=True),
}  # fmt: skip

_VISIBLE_SPACES = "its vocabulary writes spaces as U+2581 and merges characters, not bytes, which is not supported"
REFUSED: Final[Mapping[str, str]] = {
    "gemma4": _VISIBLE_SPACES,
    "granite-embed-multi-311m": _VISIBLE_SPACES,
    "sarvam-moe": _VISIBLE_SPACES,
    "whitespace": "its vocabulary merges characters, not bytes, which is not supported",
}


UNNAMED: Final = "default"  # for files that name none, as llama.cpp reads them


def build(habit: Habit) -> Any:
    """The `tokenizers` pre-tokenizer of a habit's rule."""
    steps = [_step(step) for step in RULES[habit.rule]]
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _step(step: str) -> Any:
    if step in (GPT2, BYTES):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step == GPT2)
    if step in (EACH_DIGIT, DIGITS):
        return pre_tokenizers.Digits(individual_digits=step == EACH_DIGIT)
    if step == PUNCTUATION:
        return pre_tokenizers.Punctuation(behavior="contiguous")
    return pre_tokenizers.Split(Regex(step), behavior="isolated")
