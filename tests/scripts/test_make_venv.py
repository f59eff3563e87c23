"""What cannot serve is refused: a CUDA build of torch without a GPU, a native core that does not compile."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_venv.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("make_venv", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(version, *needs):
    return json.dumps({"install": [{"metadata": {"version": version, "requires_dist": list(needs)}}]})


@pytest.mark.parametrize(
    ("answer", "gpu", "forced", "refused"),
    [
        (report("2.13.0", "numpy", "nvidia-cublas; platform_system == 'Linux'"), False, None, True),
        (report("2.13.0", "cuda-toolkit[cublas]==13.0"), False, None, True),
        (report("2.13.0+cpu", "numpy"), False, None, False),
        (report("2.13.0", "numpy"), False, None, False),
        (report("2.13.0", "nvidia-cublas"), True, None, False),
        (report("2.13.0", "nvidia-cublas"), False, "1", False),
    ],
)
def test_the_build_that_pip_would_take_decides(script, monkeypatch, capsys, answer, gpu, forced, refused):
    monkeypatch.setattr(script, "pip", lambda *args, **kw: answer)
    monkeypatch.setattr(script, "has_gpu", lambda: gpu)
    monkeypatch.delenv("TORCH_CUDA", raising=False)
    if forced:
        monkeypatch.setenv("TORCH_CUDA", forced)
    if refused:
        with pytest.raises(SystemExit) as left:
            script.refuse_cuda_without_gpu("torch==2.13.0")
        assert left.value.code == 1
        assert "TORCH_INDEX=URL" in capsys.readouterr().err
    else:
        script.refuse_cuda_without_gpu("torch==2.13.0")


def test_an_index_that_gives_no_torch_is_named(script, monkeypatch):
    args = ["install", "--quiet", "--index-url", "https://127.0.0.1:9/cpu", "torch==2.13.0"]
    monkeypatch.setenv("TORCH_INDEX", "https://127.0.0.1:9/cpu")
    assert "no torch==2.13.0 from TORCH_INDEX=https://127.0.0.1:9/cpu" in script.failed(args)
    assert "package index?" in script.failed(["install", "--quiet", "-r", "runtime.lock"])


def test_the_environment_is_made_again_when_what_decides_it_changes(script):
    assert script.fingerprint(True) != script.fingerprint(False)
    assert script.fingerprint(True) == script.fingerprint(True)
    assert script.torch_requirement() == "torch==2.13.0"


def test_every_lock_line_pins_a_version(script):
    for lock in script.LOCKS.glob("*.lock"):
        for line in lock.read_text().splitlines():
            assert line.startswith("#") or "==" in line, f"{lock.name}: {line}"
            assert "://" not in line


@pytest.mark.parametrize(
    ("built", "compiler", "dev", "said"),
    [
        (True, True, True, ""),
        (False, False, True, "there is no C++ compiler"),
        (False, True, False, "pip install -v"),
        (False, True, True, "pip install -v"),
    ],
)
def test_a_missing_core_is_told_and_refused_where_it_could_have_been_built(
    script, monkeypatch, capsys, tmp_path, built, compiler, dev, said
):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {0 if built else 1}\n")
    python.chmod(0o755)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PYTHON", python)
    monkeypatch.setattr(script.shutil, "which", lambda name: name if compiler else None)
    if dev and compiler and not built:
        with pytest.raises(SystemExit):
            script.report_core(dev)
    else:
        script.report_core(dev)
    out, err = capsys.readouterr()
    assert said in out + err and bool(out + err) == bool(said)
