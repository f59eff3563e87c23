"""A model of a few lines for tests of the worker: the token after t is t + 1, or what `answers` says."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octavo.attention.api import AttentionNeed
from octavo.attention.layer import Attention, AttentionFactory
from octavo.attention.sdpa import SdpaBackend
from octavo.config.facts import DeviceFacts, ModelFacts
from octavo.ops.registry import OpRegistry
from octavo.worker.worker import WorkerLimits

VOCAB, HEADS, DIM = 50, 1, 8


class ToyModel(nn.Module):
    """Hidden states are one-hot next tokens; two attention layers run and are ignored.

    Owns: nothing.
    """

    def __init__(self, factory: AttentionFactory, answers: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        need = AttentionNeed(
            num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, scale=1.0, dtype=torch.float32, kv_dtype=torch.float32
        )
        self.layers = nn.ModuleList(factory.layer(i, need) for i in range(2))
        self.attention_layers: tuple[Attention, ...] = tuple(self.layers)  # type: ignore[arg-type]
        self.answers = answers or (lambda tokens: (tokens + 1) % VOCAB)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        q = torch.ones(len(token_ids), HEADS, DIM)
        for layer in self.layers:
            layer(q, q, q)
        return torch.nn.functional.one_hot(self.answers(token_ids), VOCAB).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden * 5


class ToyLoaded:
    """What loading the toy gives."""

    weight_bytes = 0

    def __init__(self, answers: Callable[[Tensor], Tensor] | None = None) -> None:
        self.backend = SdpaBackend()
        device, ops = toy_device(), OpRegistry().bind(toy_device(), torch.float32)
        factory = AttentionFactory(backend=self.backend, device=device, ops=ops, block_size=4, kv_dtype=torch.float32)
        self.model = ToyModel(factory, answers)
        self.specs = tuple(layer.spec for layer in self.model.attention_layers)


def toy_device() -> DeviceFacts:
    return DeviceFacts(kind="cpu", name="toy", memory_total_bytes=1 << 34, memory_available_bytes=1 << 33, num_cores=1)


def toy_facts() -> ModelFacts:
    return ModelFacts(
        source="toy", format="hf", architecture="Toy", model_type="toy", vocab_size=VOCAB, hidden_size=VOCAB,
        intermediate_size=8, num_layers=2, num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, max_position=64,
        dtype="float32",
    )  # fmt: skip


def toy_limits(**changes: object) -> WorkerLimits:
    fields: dict[str, object] = {
        "facts": toy_facts(), "device": "cpu", "max_model_len": 40, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    }  # fmt: skip
    return WorkerLimits(**{**fields, **changes})  # type: ignore[arg-type]
