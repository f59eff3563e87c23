"""Names to keys, a user's fields, patterns, contradictions and refusals (QNT-1 to QNT-4, QNT-12)."""

import dataclasses
import json

import pytest

from octavo.base.errors import ConfigError
from octavo.config.quantization import METHODS, SHORT_NAMES, QuantKey, QuantPlan, matches, plan_quantization, supported
from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig, ModelConfig
from tests.config.test_resolve import BF16, CPU, FACTS, GPU

GGUF = dataclasses.replace(
    FACTS, format="gguf", quantization={"quant_method": "gguf", "types": {"Q4_1": 210, "Q8_0": 1}}
)
INT8_STORED = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
    }},
}  # fmt: skip


def stored(**keys):
    return dataclasses.replace(FACTS, quantization=keys)


def plan(option=None, facts=FACTS, device=CPU):
    return plan_quantization(option, facts, device)


def test_not_set_means_what_the_checkpoint_is():
    assert plan() == QuantPlan() and plan().method == "none"
    assert plan(facts=GGUF).method == "gguf"
    own = plan(facts=stored(**INT8_STORED))
    assert (own.method, own.default, own.ignore) == (
        "compressed-tensors",
        SHORT_NAMES["int8_per_channel"],
        ("lm_head",),
    )


def test_a_short_name_is_one_exact_key():
    assert plan("int8_per_channel").default == QuantKey(
        weight="int8", activation="int8", scale="float32", group="channel"
    )
    assert plan("int8_per_channel").head == plan("int8_per_channel").default
    int4 = plan("int4_group")
    assert int4.default == QuantKey(weight="int4", activation="int8", scale="float16", group=32)
    assert int4.head.weight == "int8", "a head in 4 bits costs more than it saves"


def test_set_fields_win_one_by_one():
    got = plan(json.dumps({"scheme": "int4_group", "symmetric": False}))
    assert got.default == dataclasses.replace(SHORT_NAMES["int4_group"], symmetric=False)
    assert plan(json.dumps({"linear": {"scheme": "int4_group", "symmetric": False}})).default == got.default
    assert plan(json.dumps({"scheme": "int4_group", "head": "int4_group"})).head.weight == "int4"
    whole = {"weight": "int8", "activation": "int8", "scale": "float32", "group": "channel"}
    assert plan(json.dumps(whole)).default == SHORT_NAMES["int8_per_channel"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("int8_per_chanel", "did you mean 'int8_per_channel'"),
        ("{", "neither a name nor JSON"),
        ({}, "names no scheme; there are int8_per_channel"),
        ({"scheme": "int4_group", "grup": 3}, "no field named 'grup'; did you mean 'group'"),
        ({"weight": "int8"}, "lacks activation, scale, group"),
        ({"scheme": "int4_group", "symmetric": 1}, "symmetric cannot be 1"),
        ({"scheme": "int4_group", "group": 64}, "int4 weights have groups of 32, not 64"),
        ({"scheme": "int8_per_channel", "group": 32}, "one scale for a channel"),
        ({"scheme": "int8_per_channel", "targets": {"a": "int4_group"}, "linear": {"symmetric": True}}, "exclude each other"),
        ({"scheme": "int8_per_channel", "moe": "int4_group"}, "no mixture-of-experts"),
        ({"scheme": "int8_per_channel", "ignore": ["re:("]}, "is no regular expression"),
        ({"scheme": "int8_per_channel", "ignore": [3]}, "not 3"),
        ({"scheme": "int8_per_channel", "targets": ["x"]}, "targets must be an object"),
        ({"scheme": "int8_per_channel", "targets": {"x": "fp8_per_tensor"}}, "fp8_per_tensor for x cannot run"),
        ({"scheme": "int8_per_channel", "targets": {"x": 4}}, "scheme's name or an object"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_said(option, words):
    with pytest.raises(ConfigError, match=words.replace("(", "\\(")) as error:
        plan(option if isinstance(option, str) else json.dumps(option))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [n for n in SHORT_NAMES if n not in ("int8_per_channel", "int4_group")])
def test_what_the_device_cannot_run_is_refused_by_name_with_the_nearest(name):
    with pytest.raises(ConfigError) as error:
        plan(name)
    nearest = "int4_group" if "4" in name else "int8_per_channel"
    for words in (
        name,
        "cpu (a processor)",
        "supported are int8_per_channel, int4_group",
        f"nearest is --quantization {nearest}",
    ):
        assert words in str(error.value)


def test_a_device_without_kernels_runs_none():
    with pytest.raises(
        ConfigError, match=r"cuda .*nothing but unquantized weights.*nearest is an unquantized checkpoint"
    ):
        plan("int8_per_channel", device=GPU)
    assert supported(GPU) == "nothing but unquantized weights"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "gptq (4 bits, groups of 128, act-order)"),
        ({"quant_method": "awq", "w_bit": 4, "group_size": 128}, "awq (4 bits, groups of 128)"),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8 (8 bits, e4m3, blocks of 128x128)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt (4 bits)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes (4 bits, nf4)"),
        ({"quant_method": "xyz"}, "xyz, a method that is not known here"),
        ({"quant_method": 7}, "7, a method"),
        ({}, "unnamed method"),
        ({**INT8_STORED, "format": "pack-quantized"}, "compressed-tensors (8 bits, pack-quantized)"),
        ({**INT8_STORED, "config_groups": {}}, "compressed-tensors (int-quantized)"),
        ({**INT8_STORED, "config_groups": {"a": 3}}, "compressed-tensors"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "compressed-tensors"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_cannot_run_is_refused_with_what_can(keys, words):
    with pytest.raises(ConfigError) as error:
        plan(facts=stored(**(keys or {"unknown": 1})))
    text = str(error.value)
    for part in (
        words,
        "cpu (a processor)",
        "supported are int8_per_channel",
        "nearest is an unquantized checkpoint with",
    ):
        assert part in text, text


@pytest.mark.parametrize("change", [{"dynamic": False}, {"strategy": "tensor"}, {"symmetric": False}, {"num_bits": 4}])
def test_other_activations_than_dynamic_ones_by_token_are_refused(change):
    group = INT8_STORED["config_groups"]["group_0"]
    other = {**group, "input_activations": {**group["input_activations"], **change}}
    with pytest.raises(ConfigError, match="compressed-tensors"):
        plan(facts=stored(**{**INT8_STORED, "config_groups": {"group_0": other}}))
    with pytest.raises(ConfigError, match="compressed-tensors"):  # weights alone
        plan(facts=stored(**{**INT8_STORED, "config_groups": {"group_0": {**group, "input_activations": None}}}))


@pytest.mark.parametrize(
    ("option", "facts"),
    [
        ("int8_per_channel", stored(quant_method="awq", w_bit=4)),
        ("awq", stored(quant_method="gptq", bits=4)),
        ("none", stored(quant_method="awq")),
        ("int4_group", stored(**INT8_STORED)),
        ("int8_per_channel", GGUF),
    ],
)
def test_an_option_that_contradicts_the_checkpoint_is_named(option, facts):
    with pytest.raises(ConfigError) as error:
        plan(option, facts)
    for part in (option, str(facts.quantization["quant_method"]), "contradicts", "leave it out", "cpu (a processor)"):
        assert part in str(error.value)


def test_an_option_that_agrees_with_the_checkpoint_is_the_checkpoints():
    assert plan("gguf", GGUF) == plan(facts=GGUF)
    assert plan("none", GGUF) == QuantPlan(), "as floats"
    both = stored(**INT8_STORED)
    assert plan("int8_per_channel", both) == plan("compressed-tensors", both) == plan(facts=both)
    with pytest.raises(ConfigError, match="cannot run on cpu"):
        plan("awq", stored(quant_method="awq"))


@pytest.mark.parametrize("method", [m for m in METHODS if m not in SHORT_NAMES])
def test_a_checkpoints_method_without_its_metadata_is_refused(method):
    with pytest.raises(ConfigError, match=f"{method} was asked for on cpu .*no quantization_config"):
        plan(method)


def test_a_name_that_is_both_waits_for_the_checkpoint():
    """Only without metadata does the online form apply: then it is the short name that cannot run (QNT-3)."""
    with pytest.raises(ConfigError, match="--quantization mxfp4 cannot run"):
        plan("mxfp4")
    with pytest.raises(ConfigError, match="checkpoint's weights are quantized with mxfp4"):
        plan("mxfp4", stored(quant_method="mxfp4"))


NAMES = [f"model.layers.{i}.{part}" for i in range(12) for part in ("self_attn.q_proj", "mlp.down_proj")] + ["lm_head"]


def test_patterns_are_names_globs_and_expressions():
    assert matches("lm_head", "lm_head") and not matches("lm_head", "model.lm_head")
    assert matches("model.layers.[01].*", NAMES[0]) and not matches("model.layers.0", NAMES[0])
    assert matches("re:.*down_proj", NAMES[1]) and matches(r"re:model\.layers\.0\.", NAMES[0])
    assert not matches("re:down_proj", NAMES[1]), "an expression begins at the beginning"


def test_targets_and_ignore_choose_by_layer_and_the_first_that_matches_wins():
    got = plan(
        json.dumps(
            {
                "scheme": "int8_per_channel",
                "ignore": ["*.0.mlp.down_proj"],
                "targets": {"*.1.*": {"scheme": "int4_group", "symmetric": False}, "*down_proj": "int4_group"},
            }
        )
    )
    int4 = SHORT_NAMES["int4_group"]
    assert got.key_of("model.layers.0.mlp.down_proj") is None
    assert got.key_of("model.layers.1.mlp.down_proj") == dataclasses.replace(int4, symmetric=False)
    assert got.key_of("model.layers.2.mlp.down_proj") == int4
    assert got.key_of("model.layers.2.self_attn.q_proj") == got.key_of("lm_head") == SHORT_NAMES["int8_per_channel"]
    got.check_names(NAMES)


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("model.layers.0.mlp.down_prj", "model.layers.0.mlp.down_proj"),
        ("down_proj", "mlp.down_proj"),
        ("re:.*dwn_proj", "mlp.down_proj"),
        ("*.q_prj", "self_attn.q_proj"),
        ("lmhead", "lm_head"),
        ("zzz", "model.layers.0.self_attn.q_proj"),
    ],
)
def test_a_pattern_that_matches_no_layer_lists_near_names(pattern, near):
    for given in ({"ignore": [pattern]}, {"targets": {pattern: "int4_group"}}):
        with pytest.raises(ConfigError) as error:
            plan(json.dumps({"scheme": "int8_per_channel", **given})).check_names(NAMES)
        assert repr(pattern) in str(error.value) and near in str(error.value)


# ---- as a decision ------------------------------------------------------------------------------


def decided(facts, **model):
    return resolve(EngineConfig(model=ModelConfig(**model)), facts, BF16)


def test_a_gguf_file_is_computed_as_it_is_unless_float32_was_asked_for():
    got = decided(GGUF)
    assert got.config.model.quantization == "gguf"
    assert any(d.field == "model.quantization" and "GGUF" in d.why for d in got.decisions)
    exact = decided(GGUF, dtype="float32")
    assert exact.config.model.quantization == "none"
    assert decided(GGUF, dtype="float32", quantization="gguf").config.model.quantization == "gguf"
    slow = resolve(EngineConfig(), GGUF, CPU)  # float32 for want of bfloat16 is not asked for
    assert (slow.config.model.dtype, slow.config.model.quantization) == ("float32", "gguf")


def test_what_resolves_can_be_planned_again():
    for facts in (FACTS, GGUF, stored(**INT8_STORED)):
        resolved = decided(facts).config.model.quantization
        assert plan(resolved, facts) == plan(facts=facts)
    assert decided(FACTS).config.model.quantization is None
    assert decided(FACTS, quantization="int4_group").config.model.quantization == "int4_group"


def test_refusals_come_with_the_configuration():
    with pytest.raises(ConfigError, match="awq"):
        decided(stored(quant_method="awq"))
