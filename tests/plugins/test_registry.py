"""Names to implementations: lazy, explained, and no plugin brings another down."""

import sys
from importlib.metadata import EntryPoint

import pytest

from octavo.base.errors import ConfigError, LoadError
from octavo.plugins.registry import Plugins, PluginState, Registry, near_names, parse_selection

GROUP = "octavo.general"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module with a counter of imports, a good plugin and one that fails when called."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "octavo_test_good.py").write_text(
        "calls = []\ndef hello(*args):\n    calls.append(args)\ndef angry(*args):\n    raise ValueError('no\\nway')\n"
    )
    (tmp_path / "octavo_test_broken.py").write_text("import a_module_that_is_not_there\n")
    yield tmp_path
    for name in ("octavo_test_good", "octavo_test_broken"):
        sys.modules.pop(name, None)


def entry_points(**values):
    return lambda group: [EntryPoint(name, value, group) for name, value in values.items()]


# ---- Registry ---------------------------------------------------------------------------------


def test_looking_imports_nothing_and_loading_imports_one(package):
    registry = Registry("thing", {"good": "octavo_test_good:hello", "broken": "octavo_test_broken:x"})
    assert registry.names() == ("good", "broken") and "good" in registry
    assert [e.state for e in registry.explain()] == [PluginState.KNOWN, PluginState.KNOWN]
    assert "octavo_test_good" not in sys.modules
    assert registry.load("good").__name__ == "hello"
    assert registry.load("good") is registry.load("good")
    assert "octavo_test_broken" not in sys.modules


def test_an_unknown_name_shows_the_near_ones():
    registry = Registry("attention backend", {"torch_sdpa": "a:b", "cpu": "c:d"}, error=LoadError)
    with pytest.raises(LoadError, match="no attention backend named 'torch_sdp'; did you mean 'torch_sdpa'"):
        registry.load("torch_sdp")
    with pytest.raises(LoadError, match="there are: cpu, torch_sdpa"):
        registry.load("zzz")


def test_near_names_ignore_case():
    assert near_names("llamaforcausallm", ["LlamaForCausalLM", "GPT2Model"])[0] == "LlamaForCausalLM"
    assert near_names("qqqq", ["LlamaForCausalLM"]) == ()


def test_a_failed_import_is_explained_and_may_be_tried_again(package):
    registry = Registry("thing", {"broken": "octavo_test_broken:x"})
    with pytest.raises(ConfigError, match=r"thing 'broken' \(octavo_test_broken:x, from built in\).*ModuleNotFound"):
        registry.load("broken")
    (line,) = registry.explain()
    assert line.state is PluginState.FAILED and "a_module_that_is_not_there" in (line.error or "")
    (package / "octavo_test_broken.py").write_text("x = 5\n")
    sys.modules.pop("octavo_test_broken", None)
    import importlib

    importlib.invalidate_caches()
    assert registry.load("broken") == 5
    assert registry.explain()[0].error is None


def test_names_are_not_replaced_by_accident():
    registry = Registry("thing", {"a": "m:x"})
    with pytest.raises(ConfigError, match="registered already"):
        registry.register("a", "m:y")
    registry.register("a", 7, replace=True)
    registry.register("b", 8, first=True)
    assert registry.load("a") == 7 and registry.names() == ("b", "a")


@pytest.mark.parametrize("target", ["module", "module:", ":attribute"])
def test_a_target_must_name_module_and_attribute(target):
    with pytest.raises(ConfigError, match="module:attribute"):
        Registry("thing", {"a": target})


def test_entry_points_join_lazily_and_win_over_built_in_names(package):
    registry = Registry("model", {"a": "m:x"})
    scan = entry_points(a="octavo_test_good:hello", b="octavo_test_broken:x")
    for _ in range(2):
        registry.discover("octavo.models", scan=scan)
    assert registry.names() == ("a", "b") and "octavo_test_good" not in sys.modules
    assert registry.load("a").__name__ == "hello"
    other = Registry("model", {})
    other.discover("octavo.models", selected=("b",), scan=scan)
    assert other.names() == ("b",)


# ---- Plugins ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "names"), [(None, None), ("", ()), (" , ", ()), ("a", ("a",)), (" a, b ,", ("a", "b"))]
)
def test_not_set_and_empty_differ(value, names):
    """PLG-2."""
    assert parse_selection(value) == names


def test_one_failure_stops_no_other_and_is_visible(package):
    """PLG-3."""
    plugins = Plugins(
        GROUP, selected=None, scan=entry_points(bad="octavo_test_broken:x", good="octavo_test_good:hello")
    )
    assert set(plugins.load()) == {"good"}
    states = {e.name: e for e in plugins.explain()}
    assert states["good"].state is PluginState.LOADED and states["bad"].state is PluginState.FAILED
    assert "ModuleNotFoundError" in (states["bad"].error or "")
    assert any("'bad'" in line for line in plugins.notices())


def test_selection_is_by_name_and_a_missing_one_is_said(package):
    """PLG-2."""
    plugins = Plugins(GROUP, selected=("god",), scan=entry_points(good="octavo_test_good:hello"))
    assert plugins.load() == {}
    states = {e.name: e for e in plugins.explain()}
    assert states["good"].state is PluginState.NOT_SELECTED
    assert states["god"].state is PluginState.MISSING and "did you mean 'good'" in (states["god"].error or "")
    assert Plugins(GROUP, selected=(), scan=entry_points(good="octavo_test_good:hello")).load() == {}


def test_a_required_plugin_that_fails_is_fatal(package):
    """PLG-3."""
    scan = entry_points(bad="octavo_test_broken:x", angry="octavo_test_good:angry")
    with pytest.raises(ConfigError, match="plugin 'bad' is required"):
        Plugins(GROUP, selected=(), required=("bad",), scan=scan).load()
    with pytest.raises(ConfigError, match="plugin 'nobody' is required"):
        Plugins(GROUP, selected=None, required=("nobody",), scan=scan).load()
    with pytest.raises(ConfigError, match=r"plugin 'angry' is required but not in use \(.*\): ValueError: no$"):
        Plugins(GROUP, selected=(), required=("angry",), scan=scan).call()


def test_calling_isolates_failures_and_is_safe_to_repeat(package):
    """PLG-1."""
    scan = entry_points(angry="octavo_test_good:angry", good="octavo_test_good:hello")
    plugins = Plugins(GROUP, selected=None, scan=scan)
    plugins.call(1)
    plugins.call(2)
    import octavo_test_good

    assert octavo_test_good.calls == [(1,), (2,)]
    assert {e.name: e.state for e in plugins.explain()} == {"angry": PluginState.FAILED, "good": PluginState.LOADED}


def test_plugins_that_add_surface_must_be_named(package):
    """PLG-4."""
    scan = entry_points(routes="octavo_test_good:hello")
    quiet = Plugins("octavo.endpoints", selected=None, named_only=True, scan=scan)
    assert quiet.load() == {}
    assert any("was not named" in line for line in quiet.notices())
    assert set(Plugins("octavo.endpoints", selected=("routes",), named_only=True, scan=scan).load()) == {"routes"}


def test_a_failed_scan_may_be_tried_again(package):
    """PLG-3: and a scan that worked is not repeated."""
    scans = []

    def scan(group):
        scans.append(group)
        if len(scans) == 1:
            raise OSError("disk asleep")
        return entry_points(good="octavo_test_good:hello")(group)

    plugins = Plugins(GROUP, selected=None, scan=scan)
    with pytest.raises(OSError):
        plugins.load()
    assert set(plugins.load()) == set(plugins.load()) == {"good"}
    assert len(scans) == 2
