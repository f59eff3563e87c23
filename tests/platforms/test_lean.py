"""Torch without what its compiler needs: a process of our own starts sooner, and can have the rest."""

import subprocess
import sys

import pytest

CATALOGUE = """
import sys
from octavo.platforms import lean
lean.import_torch()
import torch
assert lean._is_tried() == ("torch._meta_registrations" not in sys.modules)
"""
WHOLE = """
missing = "torch._meta_registrations" not in sys.modules
assert not hasattr(torch, "_meta_registrations") or not missing
assert lean.complete() == missing and not lean.complete()
assert torch._meta_registrations.__file__
table = torch.empty(4, 4, device="meta")
assert torch.linalg.cholesky(table).shape == torch.linalg.eigh(table)[1].shape == (4, 4)
"""
AGAIN = """
import octavo.models.build as build
seen = []
class Needy(torch.nn.Module):
    def __init__(self, ctx):
        super().__init__()
        seen.append(1)
        if "torch._meta_registrations" not in sys.modules:
            raise NotImplementedError("an operator on meta")
    @staticmethod
    def weight_map(facts):
        return build.WeightMap()
build.resolve = lambda *_: Needy
build.architectures = lambda *_: None
class Context:
    class facts: architecture = ""
    device, plugins, scheme = torch.device("meta"), (), None
build.build_model(Context)
assert len(seen) == (2 if lean._is_tried() else 1)
"""
ALREADY = """
import torch, sys
from octavo.platforms import lean
lean.import_torch()
assert torch._meta_registrations.__file__ and not lean.complete()
"""
NOT_TRIED = """
import sys
from octavo.platforms import lean
lean.TRIED = ("0.",)
lean.import_torch()
import torch
assert torch._meta_registrations.__file__ and not lean.complete()
"""


@pytest.mark.parametrize("program", [CATALOGUE + WHOLE, CATALOGUE + AGAIN, ALREADY, NOT_TRIED])
def test_what_was_left_out_comes_when_it_is_needed(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


GENERATORS = """
first = torch.Generator().manual_seed(7)
value = torch.rand(4, generator=first)
lean.complete()
assert torch.equal(value, torch.rand(4, generator=torch.Generator().manual_seed(7)))
"""


def test_random_numbers_can_be_drawn_from_a_generator_of_ones_own():
    """F51: torch.Generator() raised in an engine's process."""
    done = subprocess.run([sys.executable, "-c", CATALOGUE + GENERATORS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
