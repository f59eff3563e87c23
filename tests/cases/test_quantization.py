"""A scheme that this machine cannot run is refused early and by name; what it can run serves: QNT-01."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.base.errors import OctavoError
from octavo.platforms.api import probe
from tests.inputs.builders import byte_bpe, gguf_of_bpe
from tests.support import checkpoints
from tests.support.gguf_files import write_gguf
from tests.support.live import spawn

OWN_TIME_S = 10.0
DEVICE = probe("cpu").name
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
    }},
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
# name: what config.json claims, the option, and what the last line must say besides the device
REFUSED = {
    "awq": (AWQ, None, ["awq (4 bits, groups of 128", "int8_per_channel, int4_group", "--quantization int4_group"]),
    "gptq with act-order": (GPTQ, None, ["gptq (4 bits, groups of 128, act-order)", "--quantization int4_group"]),
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3"}, None, ["fp8 (8 bits, e4m3)", "--quantization int8_per_channel"]),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, ["modelopt (4 bits)", "int4_group"]),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None, ["bitsandbytes (8 bits)", "int8_per"]),
    "unknown": ({"quant_method": "xyz"}, None, ["xyz, a method that is not known here"]),
    "a contradiction": (AWQ, "int8_per_channel", ["int8_per_channel contradicts the checkpoint", "awq", "leave it out"]),
    "another contradiction": (INT8, "int4_group", ["int4_group contradicts", "compressed-tensors (8 bits"]),
    "no kernel": (None, "fp8_per_tensor", ["fp8_per_tensor cannot run", "int4_group", "--quantization int8_per_channel"]),
    "another's method": (None, "awq", ["awq was asked for", "no quantization_config"]),
    "a misspelled name": (None, "int8_per_chanel", ["'int8_per_channel'"]),
}  # fmt: skip
WITHOUT_DEVICE = {"a misspelled name"}


def claiming(folder, quantization):
    """A tiny Llama whose config.json says so; its weights must not be looked at, so they are damaged."""
    shutil.copytree(checkpoints.tiny_llama(), folder)
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
        os.truncate(folder / "model.safetensors", 100)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def packed_int32(folder):
    """What AWQ and GPTQ store, with the quantization_config taken out."""
    shutil.copytree(checkpoints.tiny_llama(), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight, stem = tensors.pop(name), name.removesuffix(".weight")
        tensors[f"{stem}.qweight"] = torch.zeros(weight.shape[1], weight.shape[0] // 8, dtype=torch.int32)
        tensors[f"{stem}.scales"] = torch.zeros(1, weight.shape[0], dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder


def int8_checkpoint(folder):
    """compressed-tensors' form of a tiny Llama."""
    shutil.copytree(checkpoints.tiny_llama(), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": INT8}))
    return folder


def serve(folder, option):
    """`octavo serve` until it ends: exit code, last line, and the processor time of all its processes."""
    more = [] if option is None else ["--quantization", option]
    command = [sys.executable, "-m", "octavo.entrypoints.cli", "serve", str(folder), "--port", "0", *more]
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, text=True)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        err.seek(0)
        text = err.read()
        assert "Traceback" not in text and "ready at" not in text, text
        return process.returncode, text.strip().splitlines()[-1], used.ru_utime + used.ru_stime


@pytest.mark.parametrize("name", ["awq", "gptq with act-order", "unknown", "a contradiction", "no kernel"])
def test_qnt01_the_command_ends_soon_and_names_scheme_device_and_alternative(tmp_path, name):
    quantization, option, words = REFUSED[name]
    code, last, own_time_s = serve(claiming(tmp_path / "m", quantization), option)
    assert code > 0 and own_time_s < OWN_TIME_S
    assert DEVICE in last and "cpu" in last, last
    assert all(word in last for word in words), last


@pytest.mark.parametrize("name", REFUSED)
def test_qnt01_python_raises_the_same_before_weights_are_read(tmp_path, name):
    quantization, option, words = REFUSED[name]
    with pytest.raises(OctavoError) as error:
        LLM(str(claiming(tmp_path / "m", quantization)), quantization=option)
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert (DEVICE in text) == (name not in WITHOUT_DEVICE)


@pytest.mark.parametrize("option", [None, "int8_per_channel"])
def test_qnt01_packed_numbers_without_a_config_are_never_served(tmp_path, option):
    folder = packed_int32(tmp_path / "m")
    with pytest.raises(OctavoError, match=r"look quantized, but config\.json has no quantization_config"):
        LLM(str(folder), quantization=option)
    plain = load_file(folder / "model.safetensors")
    renamed = {n.replace(".qweight", ".weight"): t for n, t in plain.items() if not n.endswith(".scales")}
    save_file(renamed, folder / "model.safetensors")
    with pytest.raises(OctavoError, match=r"type I32.*needs floats there"):
        LLM(str(folder), quantization=option)


def text_of(model, **options):
    with LLM(str(model), max_model_len=256, weight_cache="off", **options) as llm:
        return llm.generate({"prompt_token_ids": [5, 300, 17, 44]}, GREEDY)[0].outputs[0].token_ids


def test_qnt01_what_can_run_serves(tmp_path):
    """An int8 checkpoint as it is gives what its own float weights give when they are rounded while they are read."""
    stored = text_of(int8_checkpoint(tmp_path / "m"))
    assert stored == text_of(tmp_path / "m", quantization="compressed-tensors")
    online = text_of(checkpoints.tiny_llama(), quantization='{"scheme": "int8_per_channel", "ignore": ["lm_head"]}')
    assert len(stored) == len(online) == 12
    assert stored[:4] == online[:4], "scales in bf16 and in float32 differ, but not the model"


def test_qnt01_a_gguf_file_serves_as_it_is_or_as_floats(tmp_path):
    config = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    folder = checkpoints.tiny_llama(tmp_path / "hf", **config)
    metadata = gguf_of_bpe(byte_bpe(), "smollm")
    model = write_gguf(folder, tmp_path / "m.gguf", quant="Q8_0", metadata=metadata)
    as_it_is, floats = text_of(model), text_of(model, quantization="none")
    assert as_it_is[:4] == floats[:4] == text_of(folder)[:4]
    with pytest.raises(OctavoError, match=r"int4_group contradicts the checkpoint.*gguf \(Q8_0\)"):
        LLM(str(model), quantization="int4_group")


@pytest.mark.slow
def test_qnt01_the_command_serves_an_int8_checkpoint_and_says_what_it_is(tmp_path):
    with spawn(str(int8_checkpoint(tmp_path / "m"))) as server:
        assert len(server.text("A quiet evening", max_tokens=4)) > 0
        assert any("as compressed-tensors (8 bits, int-quantized)" in line for line in server.lines)
