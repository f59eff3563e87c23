"""Building on meta, the weight map, and what is said of tensors that do not fit."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from octavo.base.errors import ConfigError, LoadError
from octavo.base.kvspec import FullAttentionSpec, SlidingWindowSpec
from octavo.models.build import GGUFNames, WeightMap, WeightTarget, build_model
from octavo.models.catalogue.llama import LlamaForCausalLM
from octavo.models.filling import materialize, place, wanted, weight_bytes
from octavo.models.registry import resolve
from octavo.ops.pages import ModelMemory
from tests.models.oracle import PagedRun, context_of, facts_of, fill, hf_logits, pair

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LLAMA = facts_of(LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]))
Q = "model.layers.1.self_attn.qkv_proj.weight"


# ---- the map ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("model.layers.1.self_attn.q_proj.weight", WeightTarget(Q, "q")),
        ("model.layers.1.self_attn.v_proj.bias", WeightTarget("model.layers.1.self_attn.qkv_proj.bias", "v")),
        ("model.layers.0.mlp.up_proj.weight", WeightTarget("model.layers.0.mlp.gate_up_proj.weight", "up")),
        ("model.layers.0.mlp.down_proj.weight", WeightTarget("model.layers.0.mlp.down_proj.weight")),
        ("model.norm.weight", WeightTarget("model.norm.weight")),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("lm_head.weight", WeightTarget("lm_head.weight")),
        ("something.new", WeightTarget("something.new")),
    ],
)
def test_names_of_a_checkpoint(name, target):
    assert LlamaForCausalLM.weight_map(LLAMA).target(name) == target


def test_a_tied_head_is_skipped():
    tied = dataclasses.replace(LLAMA, tie_embeddings=True)
    assert LlamaForCausalLM.weight_map(tied).target("lm_head.weight") is None


def test_beginnings_may_be_renamed_before_fusing():
    weights = WeightMap(fused={"wq": ("qkv", "q")}, renamed=(("transformer.h.", "layers."), ("transformer.", "x.")))
    assert weights.target("transformer.h.3.wq.weight") == WeightTarget("layers.3.qkv.weight", "q")
    assert weights.target("wq.weight") == WeightTarget("qkv.weight", "q")


@pytest.mark.parametrize(
    ("name", "hf"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.13.attn_q.weight", "model.layers.13.self_attn.q_proj.weight"),
        ("blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("blk.2.ffn_norm.weight", "model.layers.2.post_attention_layernorm.weight"),
        ("blk.2.attn_q_norm.weight", "model.layers.2.self_attn.q_norm.weight"),
        ("rope_freqs.weight", "model.rotary.frequency_divisors"),
        ("blk.2.unheard_of.weight", None),
    ],
)
def test_names_of_a_gguf_file(name, hf):
    assert LlamaForCausalLM.weight_map(LLAMA).gguf.hf_name(name) == hf


def test_llamas_gguf_rows_are_interleaved_and_qwens_are_not():
    names = LlamaForCausalLM.weight_map(LLAMA).gguf
    heads = [names.interleaved_heads(f"blk.1.{stem}.weight", LLAMA) for stem in ("attn_q", "attn_k", "attn_v")]
    assert heads == [4, 2, None]
    qwen = facts_of(Qwen3Config(**SMALL, architectures=["Qwen3ForCausalLM"]))
    assert LlamaForCausalLM.weight_map(qwen).gguf.interleaved_heads("blk.1.attn_q.weight", qwen) is None


def test_the_documented_undoing_of_interleaved_rows():
    """llama.cpp's conversion puts feature i and i + d/2 of a head side by side; undone, the order is ours again."""
    heads, dim = 2, 6
    weight = torch.randn(heads * dim, 3)
    converted = torch.cat([weight[h * dim + i :: dim // 2][:2] for h in range(heads) for i in range(dim // 2)])
    undone = converted.view(heads, dim // 2, 2, 3).transpose(1, 2).reshape(weight.shape)
    assert torch.equal(undone, weight)


def test_no_gguf_names_is_an_empty_map():
    assert GGUFNames(names={}).hf_name("blk.0.attn_q.weight") is None


# ---- building ---------------------------------------------------------------------------------


def test_what_a_checkpoint_must_bring_is_what_transformers_has():
    theirs, _, facts = pair(LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"], attention_bias=True))
    weights = LlamaForCausalLM.weight_map(facts)
    assert wanted(build_model(context_of(facts))) == {weights.target(name) for name in theirs.state_dict()}


def test_a_model_built_on_meta_and_filled_later_is_the_same():
    config = LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    theirs, _, facts = pair(config)
    model = build_model(context_of(facts, device="meta"))
    assert all(p.is_meta for p in model.parameters())
    plain = build_model(context_of(facts, device="meta", forced_ops={"linear": "reference"}))
    tables = sum(b.numel() * b.element_size() for b in plain.buffers())
    assert weight_bytes(plain) - tables == 4 * sum(p.numel() for p in theirs.parameters())
    materialize(model, ModelMemory())
    fill(model, facts, theirs.state_dict())
    line = list(range(9))
    (logits,) = PagedRun(model, 1, 16).step({0: line}).values()
    torch.testing.assert_close(logits, hf_logits(theirs, line), atol=1e-4, rtol=0)


def test_layers_say_what_they_need_of_the_cache():
    facts = facts_of(MistralConfig(**SMALL, architectures=["MistralForCausalLM"], sliding_window=None))
    facts = dataclasses.replace(facts, layer_windows=(None, 7))
    model = build_model(context_of(facts, device="meta", dtype=torch.bfloat16, block_size=32))
    common = {"block_size": 32, "num_kv_heads": 2, "head_dim": 4, "dtype": "bfloat16"}
    assert [layer.spec for layer in model.attention_layers] == [
        FullAttentionSpec(**common),
        SlidingWindowSpec(**common, window=7),
    ]
    assert [layer.layer_id for layer in model.attention_layers] == [0, 1]


def test_the_block_size_is_the_backends_when_not_given():
    assert context_of(LLAMA, block_size=None).attention.block_size == 64


def test_a_backend_or_scheme_that_cannot_serve_is_said_before_building():
    with pytest.raises(ConfigError, match="no attention backend named 'flash'"):
        context_of(LLAMA, attention_backend="flash")
    with pytest.raises(ConfigError, match="quantized with awq"):
        context_of(dataclasses.replace(LLAMA, quantization={"quant_method": "awq"}))


# ---- placing ----------------------------------------------------------------------------------


@pytest.fixture
def model():
    return build_model(context_of(LLAMA))


@pytest.mark.parametrize(
    ("target", "shape", "message"),
    [
        (
            WeightTarget(Q, "q"),
            (16, 15),
            r"qkv_proj.weight \(shard q\) does not fit: its shape is \[16, 15\].*\[16, 16\]",
        ),
        (
            WeightTarget(Q, "k"),
            (16, 16),
            r"\(shard k\) does not fit: its shape is \[16, 16\], the model's is \[8, 16\]",
        ),
        (WeightTarget(Q), (32, 16), "qkv_proj.weight, which this architecture does not have"),
        (WeightTarget("model.norm.weight"), (15,), r"model.norm.weight does not fit: its shape is \[15\].*\[16\]"),
        (WeightTarget("model.norm.bias"), (16,), "model.norm.bias, which this architecture does not have"),
        (WeightTarget("model.layers.2.mlp.down_proj.weight"), (16, 24), "model.layers.2.mlp.down_proj.weight, which"),
        (WeightTarget("lm_head.bias"), (50,), "lm_head.bias, which this architecture does not have"),
        (WeightTarget("model.embed_tokens.weight"), (51, 16), r"its shape is \[51, 16\], the model's is \[50, 16\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(model, target, shape, message):
    """EXE-21."""
    with pytest.raises(LoadError, match=message):
        place(model, target, torch.zeros(shape))


def test_an_unknown_architecture_lists_those_there_are():
    """F61: and one that was surely meant."""
    with pytest.raises(LoadError, match=r"'LlamaForCausalLMs' is not supported; these are: .*; did you mean Llama"):
        resolve("LlamaForCausalLMs")
    with pytest.raises(LoadError, match=r"'Qwen3MoeForCausalLM' is not supported; these are: .*Qwen3ForCausalLM$"):
        resolve("Qwen3MoeForCausalLM")
