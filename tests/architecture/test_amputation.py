"""Without the folder of features the engine works, and an option that needs one says so (house rule 7)."""

import subprocess
import sys

from tests.support import checkpoints

CODE = """
import sys
from octavo import LLM, SamplingParams
from octavo.base.errors import OctavoError

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("octavo.features"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert not any(name.startswith("octavo.features") for name in sys.modules)
sys.meta_path.insert(0, Gone())
with LLM(sys.argv[1], num_kv_blocks=16, num_threads=1) as llm:
    (out,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    print(len(out.outputs[0].token_ids))
try:
    LLM(sys.argv[1], num_kv_blocks=16, num_threads=1, kv_tier=("host",))
except OctavoError as error:
    print(error)
"""


def test_the_engine_works_without_the_folder_of_features():
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(checkpoints.tiny_llama())], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    tokens, error = done.stdout.strip().splitlines()
    assert tokens == "4"
    assert error == "unknown option 'kv_tier'; it may be one of a feature that is not installed here: router, transfer"


ROUTE = """
import sys
from octavo.entrypoints.cli import main

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("octavo.features"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Gone())
sys.exit(main(["route", "--plain", "http://127.0.0.1:1"]))
"""


def test_without_the_folder_of_features_the_router_says_that_it_is_not_there():
    done = subprocess.run([sys.executable, "-c", ROUTE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == ("octavo: octavo route needs the feature 'router', which is not installed here.\n")
