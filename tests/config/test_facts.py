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


def test_gguf_of_an_unknown_architecture_lists_close_ones(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen4")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadError, match=r"architecture 'qwen4', which is not supported; did you mean qwen3 or qwen2"):
        read_model_facts(tmp_path / "m.gguf")


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
    ['{"temperature": -5}', '{"temperature": NaN}', '{"top_p": -0.5}', '{"top_k": -7}', '{"max_new_tokens": 1e99}'],
)
def test_generation_defaults_that_no_request_could_have_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    if "max_new_tokens" in content:  # not a whole number: as if it were not there
        assert read_generation_defaults(tmp_path) == ((), {})
        return
    with pytest.raises(LoadError, match=r"generation_config\.json: (temperature|top_p|top_k) must be"):
        read_generation_defaults(tmp_path)


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
