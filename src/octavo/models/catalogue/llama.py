"""Llama and the models that differ from it by a flag: SmolLM, Mistral, Qwen2, Qwen3.

Touvron et al., Llama 2, 2023: pre-norm blocks of rotary attention and a gated MLP. Mistral (Jiang et al., 2023) adds
a sliding window; Qwen2 (2024) a bias on q, k and v; Qwen3 (2025) a norm on each head of q and k.

Promises: the same logits as the Transformers implementation, within rounding.
Does not know: batches or caches: tokens are one flat line, attention finds its memory in the forward context.
"""

from typing import Final

import torch
from torch import nn

from octavo.config.facts import ModelFacts
from octavo.layers.embedding import Embedding, LMHead, StoredTiedHead, TiedHead, tied_head
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.layers.pointwise import RMSNorm, gated_activation
from octavo.layers.rotary import RotaryTable
from octavo.models.build import BuildContext, GGUFNames, WeightMap

FUSED: Final = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
}
GGUF_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
INTERLEAVED_IN_GGUF: Final = {"LlamaForCausalLM", "MistralForCausalLM"}


class SelfAttention(nn.Module):
    """Rotary attention with grouped key/value heads.

    Owns: its projections.
    """

    def __init__(self, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        facts, need = ctx.facts, ctx.need(layer)
        queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
        self.qkv_proj = ColumnLinear(
            facts.hidden_size,
            {"q": queries, "k": keys, "v": keys},
            heads={"q": facts.num_heads, "k": facts.num_kv_heads, "v": facts.num_kv_heads},
            bias=facts.attention_bias,
            scheme=ctx.scheme,
            group=ctx.parallel.tp,
        )
        self.o_proj = RowLinear(
            queries, facts.hidden_size, bias=facts.attention_out_bias, scheme=ctx.scheme, group=ctx.parallel.tp
        )
        self.attn = ctx.attention.layer(layer, need)
        if facts.qk_norm:
            self.q_norm = RMSNorm(facts.head_dim, facts.norm_eps, dtype=ctx.dtype, ops=ctx.ops)
            self.k_norm = RMSNorm(facts.head_dim, facts.norm_eps, dtype=ctx.dtype, ops=ctx.ops)
        self._qk_norm = facts.qk_norm
        self._rotary = ctx.ops.rotary
        self._sizes = list(self.qkv_proj.sizes())
        self._head_dim = facts.head_dim

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        num_tokens = x.shape[0]
        heads = (num_tokens, -1, self._head_dim)
        query, key, value = (part.view(heads) for part in self.qkv_proj(x).split(self._sizes, dim=-1))
        if self._qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self._rotary(query, key, cos_sin)
        return self.o_proj(self.attn(query, key, value).reshape(num_tokens, self._sizes[0]))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)).

    Owns: its projections.
    """

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        facts, wide = ctx.facts, ctx.facts.intermediate_size
        self.gate_up_proj = ColumnLinear(
            facts.hidden_size,
            {"gate": wide, "up": wide},
            bias=facts.mlp_bias,
            scheme=ctx.scheme,
            group=ctx.parallel.tp,
        )
        self.down_proj = RowLinear(
            wide, facts.hidden_size, bias=facts.mlp_bias, scheme=ctx.scheme, group=ctx.parallel.tp
        )
        self._activation = gated_activation(facts.activation, ctx.ops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activation(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer. The residual stream travels beside x, so that each norm adds and norms in one operator.

    Owns: its attention, MLP and norms.
    """

    def __init__(self, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        size, eps = ctx.facts.hidden_size, ctx.facts.norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=ctx.dtype, ops=ctx.ops)
        self.self_attn = SelfAttention(ctx, layer)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=ctx.dtype, ops=ctx.ops)
        self.mlp = MLP(ctx)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, cos_sin), residual)
        return self.mlp(x), residual


class Trunk(nn.Module):
    """Embedding, layers and the last norm.

    Owns: all weights but the head's.
    """

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        facts = ctx.facts
        gather = ctx.ops.gather_rows
        self.embed_tokens = Embedding(
            facts.vocab_size, facts.hidden_size, dtype=ctx.dtype, gather=gather, group=ctx.parallel.tp
        )
        self.rotary = RotaryTable(facts.rope, facts.head_dim, facts.max_position, ctx.max_model_len, gather=gather)
        blocks = [Block(ctx, layer) for layer in range(facts.num_layers)]
        self.layers = nn.ModuleList(blocks)
        self.attention_layers = tuple(block.self_attn.attn for block in blocks)  # by layer id
        self.norm = RMSNorm(facts.hidden_size, facts.norm_eps, dtype=ctx.dtype, ops=ctx.ops)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, residual, cos_sin = self.embed_tokens(token_ids), None, self.rotary(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, cos_sin)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    """A decoder with an output head.

    Owns: the whole model.
    """

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        facts, group = ctx.facts, ctx.parallel.tp
        self.model = Trunk(ctx)
        self.lm_head: LMHead | TiedHead | StoredTiedHead
        if facts.tie_embeddings:
            self.lm_head = tied_head(self.model.embed_tokens, scheme=ctx.scheme, linear=ctx.ops.linear, group=group)
        else:
            self.lm_head = LMHead(facts.vocab_size, facts.hidden_size, bias=False, scheme=ctx.scheme, group=group)
        self.attention_layers = self.model.attention_layers

    @staticmethod
    def weight_map(facts: ModelFacts) -> WeightMap:
        """Hugging Face's names are ours, but for the fused projections."""
        interleaved = facts.architecture in INTERLEAVED_IN_GGUF
        return WeightMap(
            fused=FUSED,
            skipped=(r"rope_factors_(long|short)\.weight",),  # a GGUF file's; the facts hold them
            tied={"lm_head.weight": "model.embed_tokens.weight"} if facts.tie_embeddings else {},
            gguf=GGUFNames(
                names=GGUF_NAMES,
                exact={"rope_freqs.weight": "model.rotary.frequency_divisors"},
                interleaved={"blk.{}.attn_q": "query", "blk.{}.attn_k": "key"} if interleaved else {},
            ),
        )

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T] int64 each -> hidden states [T, hidden]."""
        return self.model(token_ids, positions)  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]
