"""Every command on the page of benchmarks has options that exist, and its files are there (OPS-12)."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from octavo.bench.compare import make_plan
from octavo.bench.works import works
from octavo.config.flags import Parser
from octavo.entrypoints.commands.arguments import BENCH, add_arguments

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
COMPARES = [line for line in LINES if line.startswith("octavo")]


@pytest.mark.parametrize("line", COMPARES)
def test_a_command_of_the_page_is_understood(line: str, tmp_path: Path):
    program, bench, part, *args = shlex.split(line)
    assert (program, bench, part) == ("octavo", "bench", "compare")
    parser = Parser(prog="octavo bench compare")
    add_arguments(parser, BENCH[part])
    config = (
        '{"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 9}'
    )
    for name in ("smollm2-135m-bf16", "llama3.2-1b-shape"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(config)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text(config)
    args = [arg.replace("path/to/model", str(mine)) for arg in args]
    assert make_plan(parser.parse_args([*args, "--peers-dir", str(tmp_path)])).peers


def test_the_page_has_every_work_and_its_scripts_exist():
    assert set(re.findall(r"^\| (W\d) \|", PAGE, re.MULTILINE)) == set(works(1))
    scripts = {line.split()[0] for line in LINES} - {"octavo"}
    assert scripts and all((ROOT / script).exists() for script in scripts)


@pytest.mark.parametrize("script", ["setup.sh", "make_gguf.sh"])
def test_the_scripts_are_shell(script: str):
    path = ROOT / "scripts" / "peers" / script
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["sh", "-n", str(path)], capture_output=True).returncode == 0
