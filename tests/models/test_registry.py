"""Architectures by name (PLG-9)."""

import subprocess
import sys

import pytest

from octavo.models.registry import ARCHITECTURES, architectures, resolve


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_offers_what_the_loader_asks_for(name):
    cls = resolve(name)
    assert all(callable(getattr(cls, member)) for member in ("weight_map", "forward", "logits"))


def test_listing_architectures_imports_none_of_them():
    code = (
        "import sys; from octavo.models.registry import architectures; architectures().names();"
        "sys.exit(any(m.startswith('octavo.models.catalogue.') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_registry_can_be_given():
    registry = architectures()
    registry.register("MineForCausalLM", "octavo.models.catalogue.llama:LlamaForCausalLM", source="a test")
    assert resolve("MineForCausalLM", registry) is resolve("LlamaForCausalLM")
    assert "MineForCausalLM" not in architectures()
