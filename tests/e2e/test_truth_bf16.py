"""In bfloat16 Octavo is no further from Transformers' float32 than Transformers' own bfloat16.

Measured as the mean Kullback-Leibler divergence of the next token's distribution, teacher-forced over 64 texts of 128
tokens in the slow suite and 8 of 64 in `make test`.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.config.facts import read_model_facts
from octavo.models.build import BuildSettings
from octavo.models.loader import WeightSource, load_model
from octavo.platforms.api import probe
from tests.models.oracle import PagedRun, hf_logits
from tests.support import checkpoints

DOCS = Path(__file__).resolve().parents[2] / "docs"


def texts(path: Path, count: int, length: int) -> list[list[int]]:
    """`count` pieces of plain text of `length` tokens: the pages of the documentation."""
    words = "\n".join(page.read_text() for page in sorted(DOCS.glob("adr/*.md")) + sorted(DOCS.glob("*.md")))
    ids = AutoTokenizer.from_pretrained(path)(words)["input_ids"]
    assert len(ids) >= count * length
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def divergence(truth: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(truth || other) in nats, by position: [n]."""
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (truth, other))
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "length"), [(8, 64), pytest.param(64, 128, marks=pytest.mark.slow)])
def test_bfloat16_is_as_near_to_float32_as_transformers_own(count, length):
    path = checkpoints.smollm2_f32()
    settings = BuildSettings(dtype=torch.bfloat16, device_facts=probe("cpu"), max_model_len=1024, block_size=64)
    loaded = load_model(read_model_facts(path), settings, WeightSource())
    wide = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    narrow = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    ours, theirs = [], []
    for tokens in texts(path, count, length):
        truth = hf_logits(wide, tokens)
        run = PagedRun(loaded.model, 1, length, block_size=64, backend=loaded.backend)
        ours.append(divergence(truth, run.step({0: tokens})[0]))
        theirs.append(divergence(truth, hf_logits(narrow, tokens)))
    mine, hf = torch.cat(ours).mean().item(), torch.cat(theirs).mean().item()
    print(f"mean KL divergence to float32: Octavo {mine:.2e}, Transformers {hf:.2e} nats")
    assert mine <= hf
