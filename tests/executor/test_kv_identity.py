"""F38: two engines' KV is the same, or not, by what was chosen, not by what was asked for."""

import json
import shutil

import pytest

from octavo.config.facts import read_model_facts
from octavo.config.resolve import resolve
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.startup import worker_config
from octavo.executor.host import choose_kernels, kv_identity, probe
from tests.support import checkpoints


def identity(model=None, cache=None, device=None, scheduler=None, path=None):
    """An engine's, for these options."""
    path = str(path or checkpoints.tiny_llama())
    config = EngineConfig(
        model=ModelConfig(model=path, **(model or {})),
        cache=CacheConfig(**(cache or {})),
        device=DeviceConfig(**(device or {})),
        scheduler=SchedulerConfig(**(scheduler or {})),
    )
    facts, here = read_model_facts(path), probe("cpu")
    worker = worker_config(resolve(config, facts, here, None).config, facts, here)
    return kv_identity(worker, here, choose_kernels(worker.kernels, "cpu"))


PLAIN = identity()


@pytest.mark.parametrize(
    "same",
    [
        {"cache": {"block_size": int(PLAIN["block size"])}},
        {"model": {"dtype": PLAIN["dtype"]}},
        {"cache": {"kv_cache_dtype": "bfloat16"}, "model": {"dtype": "bfloat16"}},
        {"device": {"attention_backend": PLAIN["attention backend"]}},
        {"model": {"quantization": "none"}},
        {"model": {"max_model_len": 128}},
        {"scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 64}},
        {"cache": {"num_kv_blocks": 20}},
        {"device": {"num_threads": 1}},
        {"cache": {"enable_prefix_caching": False}},
    ],
    ids=str,
)
def test_a_default_and_the_same_value_given_are_one_identity(same):
    """F38: `--block-size 64` beside the default of 64 refused a hand-over and found an empty folder."""
    dtype = same.get("model", {}).get("dtype")
    assert identity(**same) == (PLAIN if dtype is None else identity(model={"dtype": dtype}))


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"cache": {"block_size": 32}}, {"block size"}),
        ({"model": {"dtype": "float32"}}, {"dtype", "KV dtype"}),
        ({"cache": {"kv_cache_dtype": "int8"}}, {"KV dtype"}),
        ({"device": {"kernels": "reference"}}, {"kernels", "attention backend"}),
        ({"device": {"attention_backend": "torch_sdpa"}}, {"attention backend"}),
        ({"model": {"quantization": "int8_per_channel"}}, {"quantization"}),
        ({"model": {"load_format": "dummy"}}, {"weights"}),
    ],
    ids=lambda value: "+".join(sorted(value)),
)
def test_what_changes_kv_changes_the_identity_and_is_named(other, names):
    found = identity(**other)
    differing = {name for name in found if found[name] != PLAIN[name]}
    assert names <= differing <= names | {"block size"}


def test_kernels_by_name_and_the_same_ones_found_are_one_identity():
    """F38: in a process of its own, since a level counts for the whole process."""
    from octavo.models.fingerprint import core_build

    build = core_build()
    if not build:
        pytest.skip("the native core is not built")
    assert identity(device={"kernels": build[0]}) == PLAIN


def test_who_wrote_a_checkpoint_s_configuration_does_not_matter_and_what_is_computed_does(tmp_path):
    """F38: the same weights saved again by another version of a library."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints.tiny_llama(), copy)
    config = json.loads((copy / "config.json").read_text())
    again = {
        "transformers_version": "9.9",
        "_name_or_path": "elsewhere",
        **dict(reversed(config.items())),
        "eos_token_id": 7,
    }
    (copy / "config.json").write_text(json.dumps(again))
    assert identity(path=copy) == PLAIN
    (copy / "config.json").write_text(json.dumps({**again, "rms_norm_eps": 1e-3}))
    found = identity(path=copy)
    assert {name for name in found if found[name] != PLAIN[name]} == {"model"}


def test_the_served_length_does_not_count_within_what_the_model_was_trained_for(tmp_path):
    """F38: rotary scaling that grows with a text is refused beyond that (F08), and is the same for all below."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = checkpoints.tiny_llama(tmp_path / "dynamic", max_position_embeddings=256, rope_parameters=rope)
    short, trained = (identity(model={"max_model_len": n}, path=path) for n in (128, 256))
    assert short == trained and short["model"] != PLAIN["model"]
