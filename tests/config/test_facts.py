"""Facts equal what the reference configurations say, in old and new layouts (EXE-21, INP-22)."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.base.errors import LoadError
from octavo.base.params import SamplingParams
from octavo.config.facts import ModelFacts, RopeFacts, model_place, read_generation_defaults, read_model_facts
from tests.support.checkpoints import (
    smollm2_f32,
    smollm2_gguf,
    tiny_config,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_swa,
)
from tests.support.gguf_files import write_gguf


def folder_with(tmp_path: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(architecture, **changes)))
    return tmp_path


def facts_with(tmp_path: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelFacts:
    return read_model_facts(folder_with(tmp_path, architecture, **changes))


MAKERS = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "swa": tiny_swa,
    "swa mixed": lambda: tiny_swa(mixed=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_facts_agree_with_the_reference_configuration(name: str) -> None:
    from transformers import AutoConfig

    from tests.models.oracle import facts_of

    folder = MAKERS[name]()
    expected = dataclasses.asdict(facts_of(AutoConfig.from_pretrained(folder)))
    found = dataclasses.asdict(read_model_facts(folder))
    for key in ("source", "raw", "rope", "bos_token_id", "eos_token_ids"):
        del expected[key], found[key]
    assert found == expected


def test_ids_and_places(tmp_path: Path) -> None:
    facts = facts_with(tmp_path, eos_token_id=[1, 3])
    assert (facts.bos_token_id, facts.eos_token_ids) == (0, (1, 3))
    assert (facts.source, facts.format) == (str(tmp_path), "hf")
    assert facts.raw["vocab_size"] == 512


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_type_has_two_names(tmp_path: Path, key: str) -> None:
    assert facts_with(tmp_path, **{"dtype": None, key: "bfloat16"}).dtype == "bfloat16"


def test_a_type_that_is_not_said_is_that_of_the_weights(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model_facts(folder).dtype == "bfloat16"


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("layout", ["new", "old", "older"])
def test_rotary_scaling_reads_the_same_from_every_layout(tmp_path: Path, layout: str) -> None:
    if layout == "new":
        changes: dict[str, Any] = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    else:
        word = "rope_type" if layout == "old" else "type"
        changes = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {word: "llama3", **LLAMA3}}
    assert facts_with(tmp_path, **changes).rope == RopeFacts(theta=5e5, kind="llama3", scaling=LLAMA3)


def test_rotary_parameters_default_when_nothing_is_said(tmp_path: Path) -> None:
    assert facts_with(tmp_path, rope_parameters=None, rope_theta=2e4).rope == RopeFacts(theta=2e4)
    assert facts_with(tmp_path, rope_parameters=None).rope == RopeFacts(theta=1e4)
    assert facts_with(tmp_path, rope_parameters=None, partial_rotary_factor=0.5, model_type="phi").rope.partial == 0.5
    assert facts_with(tmp_path, rope_parameters=None, partial_rotary_factor=0.5).rope.partial == 1.0  # as Llama's code


def test_yarn_takes_the_trained_length_from_where_it_is(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    facts = facts_with(tmp_path, rope_parameters=yarn)
    assert facts.rope.scaling == {"factor": 4.0, "original_max_position_embeddings": 2048}
    assert facts.max_position == 8192
    facts = facts_with(tmp_path, rope_parameters={**yarn, "original_max_position_embeddings": 1024})
    assert facts.max_position == 4096
    facts = facts_with(tmp_path, max_position_embeddings=8192, rope_parameters=yarn | {"original_max_position_embeddings": 2048})  # fmt: skip
    assert facts.max_position == 8192


def test_llama3_scaling_does_not_stretch_a_length_that_is_already_declared(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    assert facts_with(tmp_path, rope_parameters=rope).max_position == 2048


def test_rotary_parameters_by_layer_are_refused_unless_equal(tmp_path: Path) -> None:
    one, other = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e6}
    equal = {"full_attention": one, "sliding_attention": one}
    assert facts_with(tmp_path, rope_parameters=equal).rope == RopeFacts(theta=1e4)
    with pytest.raises(LoadError, match="different rotary parameters by layer"):
        facts_with(tmp_path, rope_parameters={"full_attention": one, "sliding_attention": other})


QWEN = {"sliding_window": 64, "num_hidden_layers": 4, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 32}, (32, 32)),
        ("MistralForCausalLM", {}, (4096, 4096)),  # the reference's default when the key is missing
        ("LlamaForCausalLM", {"sliding_window": 32}, (None, None)),
        ("Qwen2ForCausalLM", {**QWEN, "max_window_layers": 3}, (None, None, None, 64)),
        ("Qwen2ForCausalLM", {**QWEN, "max_window_layers": 0}, (64,) * 4),
        ("Qwen2ForCausalLM", {**QWEN, "use_sliding_window": False}, (None,) * 4),
        ("Qwen2ForCausalLM", QWEN, (None,) * 4),  # max_window_layers is 28 by default
        ("Qwen3ForCausalLM", {**QWEN, "layer_types": ["sliding_attention", "full_attention"] * 2}, (64, None) * 2),
    ],
)
def test_windows_by_layer(
    tmp_path: Path, architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert facts_with(tmp_path, architecture, **changes).layer_windows == windows


def test_a_null_window_is_no_window(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "MistralForCausalLM")
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model_facts(folder).layer_windows == (None, None)


def test_heads_and_biases(tmp_path: Path) -> None:
    facts = facts_with(tmp_path, num_key_value_heads=None, head_dim=None, attention_bias=True, mlp_bias=True)
    assert (facts.num_kv_heads, facts.head_dim) == (4, 16)
    assert (facts.attention_bias, facts.attention_out_bias, facts.mlp_bias, facts.qk_norm) == (True, True, True, False)
    facts = facts_with(tmp_path, "Qwen2ForCausalLM", attention_bias=None)
    assert (facts.attention_bias, facts.attention_out_bias) == (True, False)
    assert facts_with(tmp_path, "Qwen3ForCausalLM").qk_norm


def test_quantization_is_told_and_not_judged(tmp_path: Path) -> None:
    assert facts_with(tmp_path, quantization_config={"quant_method": "awq"}).quantization == {"quant_method": "awq"}
    assert facts_with(tmp_path).quantization is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "64"}, "hidden_size must be a positive whole number, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, got 0"),
        ({"hidden_size": 65, "head_dim": None}, "hidden_size 65 is not a multiple of num_attention_heads 4"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a number"),
        ({"vocab_size": 10**30}, "vocab_size is 1000.*which no model has"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, which no model has"),
        ({"quantization_config": 5}, "quantization_config must be an object, got 5"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be above 0"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be above 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "factor of the rotary embedding must be"),
        ({"rope_parameters": {"rope_type": "linear", "factor": math.inf}}, "factor of the rotary embedding must be"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor of the rotary embedding must be"),
    ],
)
def test_a_wrong_config_is_named_with_its_key(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(LoadError, match=rf"config\.json.*{why}"):
        config = {k: v for k, v in (tiny_config() | changes).items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        read_model_facts(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "why"), [(["full_attention"], "list 2 layers"), (["x", "y"], "'x' are not supported")]
)
def test_wrong_layer_types_are_named(tmp_path: Path, kinds: list[str], why: str) -> None:
    with pytest.raises(LoadError, match=why):
        facts_with(tmp_path, "MistralForCausalLM", sliding_window=8, layer_types=kinds)


# ---- places -----------------------------------------------------------------------------------


def test_places_that_hold_no_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        read_model_facts(tmp_path / "nowhere")
    with pytest.raises(LoadError, match=r"neither config\.json nor a GGUF file.*interrupted download"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ')
    with pytest.raises(LoadError, match=r"config\.json is not valid JSON \(an interrupted download\?\)"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LoadError, match="must hold a JSON object"):
        read_model_facts(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(LoadError, match="is not a GGUF file"):
        read_model_facts(tmp_path / "weights.bin")


def test_a_gguf_file_alone_in_its_folder_is_found(tmp_path: Path) -> None:
    file = write_gguf(tiny_llama(), tmp_path / "m.gguf")
    assert model_place(tmp_path) == file
    assert read_model_facts(tmp_path).format == "gguf"
    assert read_generation_defaults(tmp_path) == ((1,), {})
    shutil.copy(file, tmp_path / "n.gguf")
    with pytest.raises(LoadError, match=r"holds 2 GGUF files \(m\.gguf, n\.gguf\)"):
        read_model_facts(tmp_path)


# ---- GGUF -------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", [tiny_llama, tiny_qwen2, tiny_qwen3])
def test_a_gguf_file_says_the_same_as_its_folder(tmp_path: Path, maker: Any) -> None:
    folder = maker()
    found = dataclasses.asdict(read_model_facts(write_gguf(folder, tmp_path / "m.gguf")))
    expected = dataclasses.asdict(read_model_facts(folder))
    for key in ("source", "format", "raw"):
        del found[key], expected[key]
    assert found == expected


def test_the_real_file_says_the_same_as_its_folder() -> None:
    found, expected = (dataclasses.asdict(read_model_facts(p)) for p in (smollm2_gguf(), smollm2_f32()))
    assert {k for k in found if found[k] != expected[k]} == {"source", "format", "raw", "quantization"}
    assert (
        found["quantization"] == {"quant_method": "gguf", "types": {"Q4_1": 210, "Q8_0": 1}}
        and expected["quantization"] is None
    )


def test_gguf_rotary_scaling(tmp_path: Path) -> None:
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    }
    facts = read_model_facts(write_gguf(tiny_llama(), tmp_path / "y.gguf", metadata=yarn))
    expected = {"factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 16.0}
    assert facts.rope == RopeFacts(theta=1e4, kind="yarn", scaling=expected)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    facts = read_model_facts(write_gguf(tiny_llama(), tmp_path / "l.gguf", metadata=linear))
    assert facts.rope == RopeFacts(theta=1e4, kind="linear", scaling={"factor": 2.0})
    with pytest.raises(LoadError, match="rotary scaling 'longrope'"):
        read_model_facts(
            write_gguf(tiny_llama(), tmp_path / "x.gguf", metadata={"llama.rope.scaling.type": "longrope"})
        )


def empty_gguf(path: Path, arch: str, **keys: int) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "near"),
    [
        ("gemma3", None),
        ("mamba", None),
        ("qwen4", None),
        ("qwen2moe", None),
        ("deepseek2", None),
        ("lama", "llama"),
        ("Llama", "llama"),
    ],
)
def test_an_unknown_gguf_architecture_is_said_with_those_there_are(tmp_path: Path, arch: str, near: str | None) -> None:
    """F61: a near name only where it was surely meant."""
    with pytest.raises(LoadError) as caught:
        read_model_facts(empty_gguf(tmp_path / "m.gguf", arch))
    said = str(caught.value)
    assert f"the GGUF architecture {arch!r} is not supported; these are: llama, mistral, qwen2, qwen3" in said
    assert ("did you mean" in said) is (near is not None) and (near is None or said.endswith(f"did you mean {near}?"))


def test_a_gguf_mixture_of_experts_is_not_read_as_a_dense_model(tmp_path: Path) -> None:
    """F10: `llama` with experts, before its tensors are looked at; 0 experts are none."""
    with pytest.raises(LoadError, match=r"llama\.expert_count is 8, and mixture of experts is not supported here"):
        read_model_facts(empty_gguf(tmp_path / "m.gguf", "llama", expert_count=8))
    metadata = {"llama.expert_count": 0}
    assert read_model_facts(write_gguf(tiny_llama(), tmp_path / "d.gguf", metadata=metadata)).num_layers == 2


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_a_folder_with_experts_is_not_read_as_a_dense_model(tmp_path: Path, key: str) -> None:
    """F10: the same for a known architecture's config.json."""
    with pytest.raises(LoadError, match=f"{key} is 8, and mixture of experts is not supported"):
        facts_with(tmp_path, **{key: 8})


UNKNOWN: list[dict[str, Any]] = [
    {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12},
    {"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "num_attention_heads": 12},
    {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 384},
    {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": {"hidden_size": 8}},
    {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {}},
    {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 768},
    {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": -1},
    {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rope_parameters": [1]},
    {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4"},
    {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"},
]


@pytest.mark.parametrize("config", UNKNOWN, ids=lambda config: config["architectures"][0])
def test_an_unknown_architecture_is_said_before_its_keys_are_read(tmp_path: Path, config: dict[str, Any]) -> None:
    """F61: neither "lacks 'hidden_size'" nor a name that has nothing to do with it."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError) as caught:
        read_model_facts(tmp_path)
    known = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    assert str(caught.value).endswith(
        f"the architecture {config['architectures'][0]!r} is not supported; these are: {known}"
    )


def test_a_slip_of_the_pen_is_pointed_out(tmp_path: Path) -> None:
    """F61."""
    for wrong, right in (
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("MistalForCausalLM", "MistralForCausalLM"),
        ("Qwen2ForCausalLm", "Qwen2ForCausalLM"),
    ):
        with pytest.raises(LoadError, match=rf"did you mean {right}\?$"):
            facts_with(tmp_path, architectures=[wrong])


def test_architectures_of_plugins_are_known(tmp_path: Path) -> None:
    """F61: the plugin's own keys are read as any; packages are looked at for an unknown name only."""
    asked: list[int] = []

    def more() -> tuple[str, ...]:
        asked.append(1)
        return ("MineForCausalLM",)

    (tmp_path / "config.json").write_text(json.dumps(tiny_config(architectures=["MineForCausalLM"])))
    assert read_model_facts(tmp_path, more=more).architecture == "MineForCausalLM"
    read_model_facts(tiny_llama(), more=more)
    assert asked == [1]


def test_gguf_sampling_defaults(tmp_path: Path) -> None:
    said = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "tokenizer.ggml.eot_token_id": 3}
    file = write_gguf(tiny_llama(), tmp_path / "m.gguf", metadata=said)
    assert read_generation_defaults(file) == ((1, 3), {"temperature": 0.7, "top_k": 20})


# ---- generation_config.json -------------------------------------------------------------------


def test_generation_defaults_have_the_names_of_sampling_parameters(tmp_path: Path) -> None:
    said = {"eos_token_id": [7, 8], "temperature": 1, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**said, "do_sample": True, "max_new_tokens": 99, "transformers_version": "5", "min_p": None})
    )
    eos, sampling = read_generation_defaults(tmp_path)
    assert eos == (7, 8)
    assert sampling == {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05, "max_tokens": 99}
    assert isinstance(sampling["temperature"], float)


@pytest.mark.parametrize(
    "content",
    ['{"temperature": -5}', '{"temperature": NaN}', '{"top_p": -0.5}', '{"top_k": -7}'],
)
def test_generation_defaults_that_no_request_could_have_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(LoadError, match=r"generation_config\.json: (temperature|top_p|top_k) must be"):
        read_generation_defaults(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"), ("temperature", True), ("temperature", [0.7]), ("temperature", 10**400), ("top_p", "0.9"),
        ("top_k", 20.5), ("top_k", "20"), ("top_k", False), ("min_p", {}), ("repetition_penalty", "1.1"),
        ("max_new_tokens", "64"), ("max_new_tokens", 1e99), ("max_new_tokens", 0.5), ("do_sample", "yes"),
        ("eos_token_id", "2"), ("eos_token_id", [1, "2"]), ("eos_token_id", 1.5), ("eos_token_id", True),
    ],
)  # fmt: skip
def test_generation_defaults_of_a_wrong_type_end_the_start(tmp_path: Path, name: str, value: object) -> None:
    """F24: with the file and the value; nothing falls back to neutral values in silence."""
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(LoadError, match=rf"generation_config\.json: {name} must be .*, got ") as caught:
        read_generation_defaults(tmp_path)
    assert repr(value)[:40] in str(caught.value)


def test_generation_defaults_may_be_written_as_floats_and_nulls(tmp_path: Path) -> None:
    """F24: a whole number is one however it is written; null is nothing said."""
    said = {
        "top_k": 20.0,
        "max_new_tokens": 64.0,
        "temperature": 1,
        "top_p": None,
        "eos_token_id": None,
        "do_sample": None,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_generation_defaults(tmp_path) == ((), {"top_k": 20, "max_tokens": 64, "temperature": 1.0})


def test_an_end_of_a_wrong_type_in_config_json_is_named(tmp_path: Path) -> None:
    """F24: the neighbouring file."""
    with pytest.raises(LoadError, match=r"config\.json: eos_token_id must be a token id or a list of them, got '2'"):
        facts_with(tmp_path, eos_token_id="2")


def test_an_author_may_mean_the_most_probable_token(tmp_path: Path) -> None:
    """F19: `top_p` 0 and its neighbours start."""
    said = {"top_p": 0, "top_k": -1, "min_p": 1, "temperature": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_generation_defaults(tmp_path) == ((), said)
    assert SamplingParams(**said).greedy


def test_deep_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(LoadError, match="nested too deeply"):
        read_model_facts(tmp_path)


def test_generation_defaults_that_the_author_turned_off_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "eos_token_id": 2}')
    assert read_generation_defaults(tmp_path) == ((2,), {})


def test_no_generation_config_is_no_default(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == ((), {})


def test_reading_facts_does_not_load_torch() -> None:
    code = "import sys, octavo.config.facts, octavo.config.pull; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_neutral_defaults_do_not_look_at_the_authors_values(tmp_path):
    """`--generation-config neutral` starts also where a value of the author's is wrong; EOS ids still count."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": -5}')
    with pytest.raises(LoadError, match="temperature"):
        read_generation_defaults(tmp_path)
    assert read_generation_defaults(tmp_path, neutral=True) == ((3, 4), {})
