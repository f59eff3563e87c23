"""One meaning a word: a public class name stands once, ids lead to a page, and the spine names no feature (frame 8, 1)."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from octavo.config.schema import ServerConfig
from octavo.plugins import features

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "octavo"


def public_classes():
    """Every public class of the package, with the modules that define one of that name."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def test_a_public_class_name_stands_once():
    assert {name: where for name, where in public_classes().items() if len(where) > 1} == {}


def test_requirement_ids_lead_to_the_page():
    page = set(
        re.findall(
            r"^\| ([A-Z]{3}-\d+) \|", (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    prefixes = {name[:3] for name in page}
    cited = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"\b[A-Z]{3}-[1-9]\d*\b", path.read_text(encoding="utf-8"))
        if name[:3] in prefixes
    }
    assert len(page) == 226 and cited - page == set()


def test_the_spine_names_no_feature():
    """Frame 1: but for the one table, no line outside a feature's folder speaks of it or of one of its options."""
    options = {name for section in features.all_sections().values() for name in section.__dataclass_fields__}
    of_server = ServerConfig.__dataclass_fields__.keys()
    of_features = {name for name in options - of_server if "_" in name and not name.endswith("_s")}
    words = {*features.FEATURES, *of_features, *(name.replace("_", "-") for name in of_features)}
    assert {"transfer", "router", "kv_tier", "kv-role", "load_weight"} <= words
    speaks = re.compile(rf"\b({'|'.join(sorted(words))})\b|octavo\.features\.\w")
    lines = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "features" and path != PACKAGE / "plugins" / "features.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if speaks.search(line)
    ]
    assert lines == []
