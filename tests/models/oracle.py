"""A Transformers model and ours with the same weights, and a paged run of ours: what model tests compare."""

import importlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from octavo.attention.batch import AttentionBatch
from octavo.config.facts import DeviceFacts, ModelFacts, RopeFacts
from octavo.forward.context import BatchShape, ForwardContext, GroupPlan, LayerBinding, entered
from octavo.models.build import BuildContext, BuildSettings, build_context, build_model
from octavo.models.filling import finish, place, wanted

CPU_FACTS = DeviceFacts(kind="cpu", name="test", memory_total_bytes=1, memory_available_bytes=1, num_cores=1)


def facts_of(config) -> ModelFacts:
    """Facts of a Transformers config object of the Llama group, read independently of the engine's own reader."""
    raw = config.to_dict()
    architecture = config.architectures[0]
    heads = config.num_attention_heads
    rope = dict(config.rope_parameters)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if raw.get("sliding_window") else "full_attention"] * config.num_hidden_layers
    bias = raw.get("attention_bias", False)
    return ModelFacts(
        source="",
        format="hf",
        architecture=architecture,
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=raw.get("head_dim") or config.hidden_size // heads,
        max_position=config.max_position_embeddings,
        dtype="float32",
        activation=config.hidden_act,
        norm_eps=config.rms_norm_eps,
        rope=RopeFacts(theta=rope["rope_theta"], kind=rope["rope_type"], scaling=rope),
        layer_windows=tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds),
        tie_embeddings=config.tie_word_embeddings,
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=raw.get("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def context_of(facts: ModelFacts, **changes) -> BuildContext:
    device = changes.pop("device", "cpu")
    settings = {
        "dtype": torch.float32,
        "device_facts": CPU_FACTS,
        "max_model_len": facts.max_position,
        "block_size": 16,
    }
    return build_context(facts, BuildSettings(**{**settings, **changes}), device)


def fill(model: nn.Module, facts: ModelFacts, tensors) -> None:
    """Give a model a checkpoint's tensors through its weight map, check that nothing is missing, and finish it."""
    weights = type(model).weight_map(facts)
    missing = set(wanted(model))
    for name, tensor in tensors.items():
        target = weights.target(name)
        if target is not None:
            place(model, target, tensor)
            missing.discard(target)
    assert not missing, sorted(str(t) for t in missing)
    finish(model)


def pair(config, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """(Transformers' model, ours, facts) with the same random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    theirs = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():  # norms that are not one, biases that are not zero
            if "norm" in name:
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
            elif name.endswith("bias"):
                tensor.normal_(std=0.5)
            else:
                tensor.normal_(std=1.5 * tensor.shape[-1] ** -0.5)
    facts = facts_of(config)
    ours = build_model(context_of(facts, dtype=dtype, **changes))
    fill(ours, facts, theirs.state_dict())
    return theirs.to(dtype), ours, facts


class PagedRun:
    """Runs a model of ours step by step over paged memory that starts as NaN, with blocks in random order.

    Owns: the memory, the block tables and how many tokens each row has.
    """

    def __init__(
        self, model: nn.Module, num_rows: int, max_len: int, *, block_size: int = 16, seed: int = 0, backend=None
    ) -> None:
        self._model, self._block_size = model, block_size
        layers = model.attention_layers
        width = -(-max_len // block_size)
        num_blocks = 1 + num_rows * width
        dtype = getattr(torch, layers[0].spec.dtype)
        shape = (num_blocks, len(layers), 2, layers[0].spec.num_kv_heads, block_size, layers[0].spec.head_dim)
        memory = torch.full(shape, float("nan")).to(dtype)
        scales = torch.full(shape[:-1], float("nan")) if layers[0].spec.is_scaled else None
        ids = np.random.default_rng(seed).permutation(np.arange(1, num_blocks))
        self._tables = ids.reshape(num_rows, width).astype(np.int32)
        self._specs = list(dict.fromkeys(layer.spec for layer in layers))  # one group for each kind of layer
        self._layers = [
            LayerBinding(
                key=memory[:, i, 0],
                value=memory[:, i, 1],
                group=self._specs.index(layer.spec),
                key_scale=None if scales is None else scales[:, i, 0],
                value_scale=None if scales is None else scales[:, i, 1],
            )
            for i, layer in enumerate(layers)
        ]
        self._builders = [(backend or model_backend(model)).builder(spec) for spec in self._specs]
        self._computed = [0] * num_rows

    def step(self, chunks: "dict[int, Sequence[int]]") -> "dict[int, torch.Tensor]":
        """Compute new tokens by row, in the given order: logits [n, vocab] by row."""
        rows = list(chunks)
        batch = AttentionBatch.of(
            query_lens=[len(chunks[r]) for r in rows],
            context_lens=[self._computed[r] for r in rows],
            block_table=self._tables[rows],
            block_size=self._block_size,
        )
        positions = [self._computed[r] + i for r in rows for i in range(len(chunks[r]))]
        context = ForwardContext(
            shape=BatchShape(num_tokens=batch.num_tokens),
            groups=tuple(
                GroupPlan(plan=b.plan(batch), slot_mapping=batch.slot_mapping_tensor()) for b in self._builders
            ),
            layers=self._layers,
        )
        tokens = torch.tensor([t for r in rows for t in chunks[r]])
        with torch.inference_mode(), entered(context):
            hidden = self._model(tokens, torch.tensor(positions))
            logits = self._model.logits(hidden)
        for r in rows:
            self._computed[r] += len(chunks[r])
        return dict(zip(rows, logits.split([len(chunks[r]) for r in rows]), strict=True))


def model_backend(model: nn.Module):
    """The backend whose layers the model holds."""
    module = importlib.import_module(type(model.attention_layers[0]._impl).__module__)
    return next(
        cls() for name, cls in vars(module).items() if name.endswith("Backend") and cls.__module__ == module.__name__
    )


def hf_logits(model, tokens: Sequence[int]) -> torch.Tensor:
    """Transformers' logits of a whole prompt, [n, vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0]
