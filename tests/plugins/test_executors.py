"""An option chooses what runs the worker; a package may bring it (EXE-2)."""

import pytest

from octavo.base.errors import ConfigError
from octavo.config.schema import DeviceConfig
from octavo.engine.startup import make_executor
from tests.support import checkpoints, plugin_package

TOY = """
import sys
from octavo.executor.uniproc import UniprocExecutor

class Toy(UniprocExecutor):
    def load(self, config, progress):
        print("the toy executor loads", file=sys.stderr, flush=True)
        return super().load(config, progress)
"""
BROUGHT = {"octavo.executors": {"toy": "toyexecutor:Toy", "broken": "nowhere:Executor"}}
OPTION = "--distributed-executor-backend"


@pytest.mark.parametrize("process", ["--multiprocessing", "--no-multiprocessing"])
def test_EXE_2_a_package_brings_an_executor(tmp_path, process):
    plugin_package.write(tmp_path, "toyexecutor", TOY, BROUGHT)
    done = plugin_package.complete(tmp_path, checkpoints.tiny_llama(), OPTION, "toy", process)
    assert done.returncode == 0, done.stderr
    assert "the toy executor loads" in done.stderr


@pytest.mark.parametrize(
    ("name", "plugins", "says"),
    [
        ("toi", None, "there is no executor named 'toi'; did you mean 'toy'?"),
        ("toy", "", "there is no executor named 'toy'; there are: uni"),
        ("broken", None, "executor 'broken' (nowhere:Executor, from toyexecutor) could not be loaded"),
    ],
)
def test_EXE_2_one_that_is_not_there_is_said(tmp_path, name, plugins, says):
    plugin_package.write(tmp_path, "toyexecutor", TOY, BROUGHT)
    env = {} if plugins is None else {"OCTAVO_PLUGINS": plugins}
    done = plugin_package.complete(tmp_path, checkpoints.tiny_llama(), OPTION, name, **env)
    assert done.returncode == 1
    assert says in done.stderr.strip().splitlines()[-1]
    assert "weights" not in done.stderr


def test_EXE_2_the_built_in_one_is_the_default():
    executor = make_executor(DeviceConfig(device="cpu"), ())
    try:
        assert type(executor).__name__ == "UniprocExecutor" and executor.probe().kind == "cpu"
    finally:
        executor.stop()
    with pytest.raises(ConfigError, match="no executor named 'mp'; there are: uni"):
        make_executor(DeviceConfig(distributed_executor_backend="mp"), ())
