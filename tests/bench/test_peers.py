"""Peers as data: what each runs, what it needs on disk, and what it says when it is not there (OPS-9)."""

import json
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.peers.api import GGUF_TYPES, WIDTHS, Checkpoint, ServerNeed, lacking, read_shape
from octavo.bench.peers.llamacpp import LlamaCppPeer
from octavo.bench.peers.octavo import OctavoPeer
from octavo.bench.peers.transformers import TransformersPeer
from octavo.bench.peers.vllm import VllmPeer
from octavo.config.args import given_from_flags, server_config
from octavo.config.env import read_env
from octavo.config.flags import Parser
from octavo.entrypoints.commands.arguments import COMMANDS, add_arguments

CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000,
}  # fmt: skip
NEED = ServerNeed(slots=32, tokens_per_slot=512)


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    gguf = {width: tmp_path / f"tiny.{kind}.gguf" for width, kind in GGUF_TYPES.items()}
    return Checkpoint(name="tiny", folder=folder, gguf=gguf, shape=read_shape(folder))


def test_a_shape_counts_what_a_decoder_has(model: Checkpoint):
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64  # q, k and v, o
    assert model.shape.layer_weights == 2 * (attention + 3 * 64 * 128)
    assert model.shape.head_weights == 64 * 1000
    assert model.shape.kv_bytes_per_token == 2 * 2 * 32 * 2


def test_a_head_size_that_is_not_said_is_the_hidden_size_over_heads(tmp_path: Path):
    config = {k: v for k, v in CONFIG.items() if k not in ("head_dim", "num_key_value_heads")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    assert (shape.head_dim, shape.num_kv_heads) == (16, 4)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"hidden_size": 1}'])
def test_a_folder_that_is_no_model_is_named(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json does not describe"):
        read_shape(tmp_path)


def test_kv_memory_holds_all_slots_with_room(model: Checkpoint):
    exact = 32 * 512 * model.shape.kv_bytes_per_token
    assert exact * 1.25 <= NEED.kv_bytes(model.shape) < exact * 1.25 + 2**20
    assert NEED.kv_bytes(model.shape) % 2**20 == 0


def test_octavos_command_is_one_that_octavo_takes(model: Checkpoint):
    launch = OctavoPeer().launch(model, "bf16", NEED, 4321)
    assert launch.command[1:5] == ("-P", "-m", "octavo.entrypoints.cli", "serve")
    parser = Parser(prog="octavo serve")
    add_arguments(parser, COMMANDS["serve"])
    given = given_from_flags(parser.parse_args(launch.command[5:]), COMMANDS["serve"].sections, read_env({}))
    assert server_config(given).port == launch.port == 4321


@pytest.mark.parametrize(("width", "scheme"), [("int8", "int8_per_channel"), ("int4", "int4_group")])
def test_octavo_quantizes_while_it_reads(model: Checkpoint, width: str, scheme: str):
    command = OctavoPeer().launch(model, width, NEED, 1).command
    assert command[command.index("--quantization") + 1] == scheme
    assert "--quantization" not in OctavoPeer().launch(model, "bf16", NEED, 1).command


@pytest.mark.parametrize("eager", [False, True])
def test_vllm_runs_in_its_environment_with_what_its_guide_asks(model: Checkpoint, tmp_path: Path, eager: bool):
    for file in ("tcmalloc/libtcmalloc_minimal.so.4", "vl/lib/libiomp5.so"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    launch = VllmPeer(tmp_path, eager=eager).launch(model, "bf16", NEED, 4321)
    assert launch.command[0] == str(tmp_path / "vl/bin/python")
    assert ("--enforce-eager" in launch.command) == eager
    assert launch.env["LD_PRELOAD"].count(":") == 1
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"]
    assert launch.extra == {"ignore_eos": True}


def test_vllm_preloads_only_what_is_there(model: Checkpoint, tmp_path: Path):
    assert VllmPeer(tmp_path, eager=True).launch(model, "bf16", NEED, 1).env["LD_PRELOAD"] == ""


@pytest.mark.parametrize("width", WIDTHS)
def test_llamacpp_reads_the_file_of_the_width_with_a_context_for_every_slot(
    model: Checkpoint, tmp_path: Path, width: str
):
    peer = LlamaCppPeer(tmp_path)
    assert GGUF_TYPES[width] in str(lacking(peer, model, width))
    model.gguf[width].touch()
    assert lacking(peer, model, width) is None
    command = peer.launch(model, width, NEED, 1).command
    assert command[command.index("--model") + 1] == str(model.gguf[width])
    assert command[command.index("--ctx-size") + 1] == str(32 * 512)
    assert command[command.index("--parallel") + 1] == "32"


def test_what_is_not_installed_says_what_makes_it(tmp_path: Path):
    for peer in (VllmPeer(tmp_path, eager=True), LlamaCppPeer(tmp_path), TransformersPeer(tmp_path)):
        assert "scripts/peers/setup.sh" in str(peer.available())
    assert OctavoPeer().available() is None


def test_vllm_is_installed_when_its_package_is_there(tmp_path: Path):
    peer = VllmPeer(tmp_path, eager=True)
    (tmp_path / "vl/bin").mkdir(parents=True)
    (tmp_path / "vl/bin/python").touch()
    assert "vllm is not installed" in str(peer.available())
    (tmp_path / "vl/lib/python3.11/site-packages/vllm").mkdir(parents=True)
    (tmp_path / "vl/lib/python3.11/site-packages/vllm/__init__.py").touch()
    assert peer.available() is None


def test_a_width_that_a_peer_lacks_is_said(model: Checkpoint, tmp_path: Path):
    assert lacking(VllmPeer(tmp_path, eager=True), model, "int8") == "vllm-eager has no int8"
    assert lacking(TransformersPeer(tmp_path), model, "bf16") is None
    (model.folder / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in str(lacking(TransformersPeer(tmp_path), model, "bf16"))


def test_transformers_runs_the_works_of_one_stream(model: Checkpoint, tmp_path: Path):
    peer = TransformersPeer(tmp_path)
    assert peer.works == {"W1", "W3", "W6"}
    assert peer.launch(model, "bf16", NEED, 7).command[-3:] == ("7", "--name", "tiny")
