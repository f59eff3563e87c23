"""Whatever somebody gives for an option ends in a start or in one sentence, never in an error that was not foreseen (F58)."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from octavo.config.args import options
from octavo.entrypoints import cli
from octavo.plugins import features
from octavo.plugins.features import engine_sections, server_sections
from tests.support.checkpoints import tiny_llama

VALUES = [
    "0", "-1", "1", "0.5", "99999999999999999999", "1e308", "nan", "inf", "", " ", "ü", "\udcff", "a" * 5000, "true",
    "None", "null", "{", "{}", "[[", "[1]", ",", "1,2", "a=b", "..", "/nonexistent/x", "/dev/null", "/proc/self/mem",
    "~nobody-here/x", "http://[", "127.0.0.1:99999", "redis://", "redis://h:99999", "s3://", "peer://", "mooncake://h", "host?size=0",
    "file:///dev/null/x?size=1MiB", "hf://x", "owner/name@", "owner/name:",
]  # fmt: skip
SECTIONS: Mapping[str, Mapping[str, type]] = {
    "explain-config": server_sections(), "plan": engine_sections(), "route": features.command("route").sections, "complete": engine_sections(),
}  # fmt: skip
OWN = {"plan": ("--memory", "--lengths"), "complete": ("--max-tokens", "--temperature", "--top-p")}
ARGUMENTS = {
    "explain-config": ["--model", "MODEL"],
    "plan": ["--model", "MODEL"],
    "route": [],
    "complete": ["hello", "--max-tokens", "1", "--no-multiprocessing", "--num-kv-blocks", "64", "--model", "MODEL"],
}


def flags(name: str) -> list[str]:
    found = [o.flag for o in options(SECTIONS[name]).values() if not isinstance(o.default, bool)]
    return [*found, *OWN.get(name, ())]


def run(command: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command in this process; a wrong value is one sentence."""
    model = str(tiny_llama())
    rest = [model if a == "MODEL" else a for a in ARGUMENTS[command]]
    if flag == "--model":
        rest = rest[:-2]
    try:
        code = cli.main([command, *rest, f"{flag}={value}"])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err
    assert code in (0, 1, 2), (flag, value[:80], code)
    assert "unexpected " not in said and "Traceback" not in said, (flag, value[:80], said[-500:])
    if code:
        assert said.strip(), (flag, value[:80])


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched, whatever a value means."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("command", "flag"), [("explain-config", f) for f in flags("explain-config")])
def test_f58_odd_values_of_an_option_are_one_sentence(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """F58."""
    for value in VALUES:
        run(command, flag, value, capsys)


@pytest.mark.parametrize("flag", OWN["plan"])
def test_f58_odd_values_of_what_plan_takes_are_one_sentence(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """F58."""
    for value in VALUES:
        run("plan", flag, value, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "flag"), [(command, flag) for command in ("plan", "route", "complete") for flag in flags(command)]
)
def test_f58_odd_values_of_an_option_are_one_sentence_at_a_start(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """F58: with an engine, where what is asked for is really taken."""
    for value in VALUES:
        run(command, flag, value, capsys)
