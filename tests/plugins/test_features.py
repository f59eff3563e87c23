"""Features join by the table and by entry points; a deleted folder is a feature less (frame 1)."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.plugins import features
from octavo.plugins.registry import Registry
from tests.support import checkpoints

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "octavo"
FOLDERS = sorted(path.name for path in (PACKAGE / "features").iterdir() if (path / "__init__.py").exists())

GENERATE = """
import json, sys
from octavo import LLM, SamplingParams
settings = json.loads(sys.argv[2])
with LLM(sys.argv[1], num_kv_blocks=16, num_threads=1, dtype="float32", **settings) as llm:
    params = SamplingParams(max_tokens=16, ignore_eos=True, logit_bias={9: 5.0})
    (out,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    print(json.dumps(out.outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A package beside Octavo whose one entry point is a feature; the environment that finds it."""
    site = tmp_path_factory.mktemp("site")
    (site / "octavo_ban").mkdir()
    (site / "octavo_ban" / "__init__.py").touch()
    shutil.copy(ROOT / "tests" / "support" / "ban_feature.py", site / "octavo_ban" / "feature.py")
    about = site / "octavo_ban-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo-ban\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[octavo.features]\nban = octavo_ban.feature:FEATURE\n")
    return {**os.environ, "PYTHONPATH": str(site)}


def run(code, *args, env=None):
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(*args, env):
    return subprocess.run(
        [sys.executable, "-P", "-m", "octavo.entrypoints.cli", *args],
        capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"multiprocessing": True}], ids=["in this process", "in another"])
def test_a_feature_joins_by_an_entry_point_alone(installed, settings):
    model = str(checkpoints.tiny_llama())
    with_it, later, without = (
        json.loads(run(GENERATE, model, json.dumps({**settings, **more}), env=installed))
        for more in ({"ban_repeats": True}, {"ban_repeats": True, "ban_after": 8}, {})
    )
    repeats = [a == b for a, b in itertools.pairwise(without)]
    assert any(repeats[:6]) and without[:8] == later[:8]
    assert not any(a == b for a, b in itertools.pairwise(with_it))
    assert not any(a == b for a, b in itertools.pairwise(later[8:]))


def test_its_options_are_flags_variables_and_help(installed):
    model = str(checkpoints.tiny_llama())
    shown = command("serve", "--help", "all", env=installed).stdout
    assert "--[no-]ban-repeats" in shown and "--ban-after" in shown
    explained = command("explain-config", model, "--ban-repeats", env={**installed, "OCTAVO_BAN_AFTER": "3"}).stdout
    assert re.search(r"^--ban-repeats\s+on\s+flag", explained, re.MULTILINE)
    assert re.search(r"^--ban-after\s+3\s+environment", explained, re.MULTILINE)
    wrong = command("plan", model, "--ban-after", "-1", env=installed)
    assert wrong.returncode != 0 and "--ban-after must not be negative, got -1." in wrong.stderr


def test_PLG_2_one_that_was_not_selected_is_not_there_and_is_listed(installed):
    model = str(checkpoints.tiny_llama())
    for selection, code in (("", 2), ("other", 2), ("ban", 0)):
        env = {**installed, "OCTAVO_PLUGINS": selection}
        done = command("explain-config", model, "--ban-repeats", env=env)
        assert done.returncode == code, done.stderr
    assert (
        "octavo.features  ban  octavo-ban  octavo_ban.feature:FEATURE  loaded"
        in command("plugins", env=installed).stdout
    )


def test_nothing_is_imported_for_a_feature_that_nobody_asks_for():
    halves = (".data", ".control")
    code = (
        GENERATE
        + f"print([n for n in sys.modules if n.startswith('octavo.features.') and any(h in n for h in {halves})])"
    )
    lines = run(code, str(checkpoints.tiny_llama()), "{}").splitlines()
    assert lines[-1] == "[]"


GONE = """
import sys

class Gone:  # as if the folder had been deleted
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith("octavo.features.FOLDER."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Gone())
"""
HELP = """
from octavo.entrypoints.cli import main
main(["serve", "--help", "all"])
"""


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_engine_without_one_folder_starts_and_serves(folder):
    gone = GONE.replace("FOLDER", folder)
    assert len(json.loads(run(gone + GENERATE, str(checkpoints.tiny_llama()), "{}"))) == 16
    assert "--max-model-len" in run(gone + HELP)
    imports = "import octavo.entrypoints.http.app, octavo.engine.startup, octavo.executor.host"
    assert run(gone + imports) == ""


ROUTE = """
from octavo.entrypoints.cli import main
sys.exit(main(["route", "--help"]))
"""


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_command_whose_folder_is_gone_says_so_and_the_others_work(folder):
    done = subprocess.run(
        [sys.executable, "-c", GONE.replace("FOLDER", folder) + ROUTE], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (
        (1, "octavo: octavo route needs the feature 'router', which is not installed here.\n")
        if folder == "router"
        else (0, "")
    )


def test_what_is_not_installed_is_said_and_a_broken_one_is_not_hidden():
    known = Registry(
        "feature", {"gone": "octavo.features.gone.feature:FEATURE", "transfer": features.FEATURES["transfer"]}
    )
    assert list(features.present(known)) == ["transfer"] and features.absent(known) == ("gone",)
    broken = Registry("feature", {"broken": "octavo.features.transfer.feature:NOTHING"})
    with pytest.raises(Exception, match=r"feature 'broken' .* could not be loaded"):
        features.present(broken)
