"""A package brings a kind of cache, and what keeps its blocks (REQ-16)."""

import json

from tests.support import checkpoints, plugin_package

MODEL = """
from dataclasses import dataclass, fields
from math import ceil
from octavo.base.kvspec import KVSpec
from octavo.kvcache.policies import FullAttention
from octavo.models.catalogue.llama import LlamaForCausalLM

@dataclass(frozen=True, slots=True, kw_only=True)
class ToySpec(KVSpec):
    pass

class ToyPolicy(FullAttention):
    def __init__(self, spec):
        print("ToyPolicy for", type(spec).__name__, flush=True)
        super().__init__(spec)

class Toy(LlamaForCausalLM):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for layer in self.attention_layers:
            layer.spec = ToySpec(**{f.name: getattr(layer.spec, f.name) for f in fields(KVSpec)})
"""


POLICY = {"octavo.block_policies": {"ToySpec": "toycache:ToyPolicy"}}


def complete(tmp_path, entry_points, **env):
    """Run a model of an architecture that an installed package brings, with these entry points beside it."""
    path = checkpoints.tiny_llama(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["ToyForCausalLM"]}))
    models = {"octavo.models": {"ToyForCausalLM": "toycache:Toy"}}
    plugin_package.write(tmp_path, "toycache", MODEL, {**models, **entry_points})
    return plugin_package.complete(tmp_path, path, "--no-multiprocessing", **env)


def test_REQ_16_a_cache_that_nobody_manages_is_refused_before_weights_are_read(tmp_path):
    done = complete(tmp_path, {})
    assert done.returncode == 1
    assert "no block policy is registered for ToySpec" in done.stderr.strip().splitlines()[-1]
    assert "octavo.block_policies" in done.stderr, "it says how one is registered"
    assert "weights" not in done.stderr


def test_REQ_16_a_policy_comes_by_entry_point_and_only_where_its_package_is_in_use(tmp_path):
    done = complete(tmp_path, POLICY)
    assert done.returncode == 0, done.stderr
    assert "ToyPolicy for ToySpec" in done.stdout


def test_PLG_2_a_policy_that_was_not_selected_is_not_used(tmp_path):
    done = complete(tmp_path, POLICY, OCTAVO_PLUGINS="ToyForCausalLM")
    assert done.returncode == 1
    assert "no block policy is registered for ToySpec" in done.stderr


def test_REQ_16_a_policy_that_cannot_be_imported_says_so(tmp_path):
    done = complete(tmp_path, {"octavo.block_policies": {"ToySpec": "nowhere:ToyPolicy"}})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "block policy 'ToySpec' (nowhere:ToyPolicy, from toycache) could not be loaded" in last
