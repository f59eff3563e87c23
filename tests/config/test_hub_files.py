"""Which files of a repository are fetched: one model, whole, or a sentence that says what there is to choose from."""

import pytest

from octavo.base.errors import LoadError
from octavo.config.hub_files import HubFile, choose_files, tag_of
from octavo.config.names import hub_name

HF = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors",
    "README.md",
    ".gitattributes",
    ".octavo.json",
]
QUANTS = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-UD-Q4_K_M.gguf", "m-f16.gguf", "mmproj-m-F16.gguf"]
SPLIT = [f"Q6_K/m-Q6_K-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def choose(name: str, paths: list[str]):
    return choose_files(hub_name(name), [HubFile(path=p, size=1) for p in paths])


@pytest.mark.parametrize(
    ("name", "paths", "expected"),
    [
        ("me/a", HF, ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]),
        ("me/a", [*HF, *QUANTS], ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]),
        ("me/a", ["config.json", "consolidated.safetensors", "model-00001-of-00002.safetensors",
                  "model-00002-of-00002.safetensors", "onnx/config.json", "onnx/x.safetensors", "LICENSE.txt",
                  "merges.txt", "vocab.json", "tokenizer.model", "additional_chat_templates/rag.jinja"],
         ["additional_chat_templates/rag.jinja", "config.json", "merges.txt", "model-00001-of-00002.safetensors",
          "model-00002-of-00002.safetensors", "tokenizer.model", "vocab.json"]),
        ("me/a:Q4_K_M", QUANTS, ["m-Q4_K_M.gguf"]),
        ("me/a:q4_k_m", QUANTS, ["m-Q4_K_M.gguf"]),
        ("me/a:ud-q4_k_m", QUANTS, ["m-UD-Q4_K_M.gguf"]),
        ("me/a:F16", QUANTS, ["m-f16.gguf"]),
        ("me/a:m-Q8_0.gguf", QUANTS, ["m-Q8_0.gguf"]),
        ("me/a:Q6_K", [*QUANTS, *SPLIT], SPLIT),
        ("me/a", SPLIT, SPLIT),
        ("me/a", QUANTS, ["m-Q4_K_M.gguf"]),
        ("me/a", ["config.json", "m-IQ4_XS.gguf"], ["m-IQ4_XS.gguf"]),
        ("me/a", ["strange.gguf"], ["strange.gguf"]),
        ("me/a:Q8_0", [*HF, "m-Q8_0.gguf"], ["m-Q8_0.gguf"]),
    ],
)  # fmt: skip
def test_f54_one_model_is_chosen_and_whole(name: str, paths: list[str], expected: list[str]) -> None:
    """F54."""
    assert sorted(f.path for f in choose(name, paths).files) == sorted(expected)


def test_f54_a_choice_that_nobody_made_is_said() -> None:
    """F54."""
    made = choose("me/a", QUANTS)
    assert made.tag == "Q4_K_M"
    assert made.why is not None and "taking Q4_K_M" in made.why
    assert choose("me/a:Q8_0", QUANTS).why is None
    assert choose("me/a", ["m-Q8_0.gguf"]).why is None


@pytest.mark.parametrize(
    ("name", "paths", "words"),
    [
        ("me/a:Q5_K_M", QUANTS, "no GGUF file with the tag Q5_K_M; it has Q4_K_M, Q8_0, UD-Q4_K_M, F16"),
        ("me/a:Q4", QUANTS, "no GGUF file with the tag Q4;"),
        ("me/a:Q8_0", ["a-1b-Q8_0.gguf", "b-3b-Q8_0.gguf"], "can mean 2 files; say which: me/a:a-1b-Q8_0.gguf, me/a:b-3b"),
        ("me/a", ["a-1b-Q8_0.gguf", "b-3b-Q8_0.gguf"], "one of a-1b-Q8_0.gguf, b-3b-Q8_0.gguf"),
        ("me/a", ["a-IQ2_S.gguf", "a-IQ3_S.gguf"], "TAG is one of IQ2_S, IQ3_S"),
        ("me/a:Q6_K", SPLIT[:2], "it holds 2 of 3"),
        ("me/a:Q6_K", HF, "holds no GGUF files"),
        ("me/a", ["config.json", "pytorch_model.bin"], "Python pickles"),
        ("me/a", ["model.safetensors"], "neither safetensors with a config.json nor a GGUF file"),
        ("me/a", ["README.md"], "no model that can be served"),
        ("me/a", [], "no model that can be served"),
        ("me/a", ["mmproj-F16.gguf"], "no model that can be served"),
    ],
)  # fmt: skip
def test_f54_what_cannot_be_chosen_says_what_there_is(name: str, paths: list[str], words: str) -> None:
    """F54."""
    with pytest.raises(LoadError) as caught:
        choose(name, paths)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("path", "tag"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"), ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"), ("x-iq4_xs.gguf", "IQ4_XS"),
        ("x-bf16.gguf", "BF16"), ("x-MXFP4_MOE.gguf", "MXFP4_MOE"), ("x-tq1_0.gguf", "TQ1_0"), ("x.gguf", None),
        ("UD/x-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL"), ("Q4.gguf", "Q4"), ("Qwen2.gguf", None),
    ],
)  # fmt: skip
def test_tags_are_read_from_names_of_files(path: str, tag: str | None) -> None:
    assert tag_of(path) == tag
