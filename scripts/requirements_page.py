"""Write `docs/requirements.md`: every requirement by id, in one line, with where it is tested.

    python scripts/requirements_page.py --specification FOLDER   texts from there, tests from the tree
    python scripts/requirements_page.py                          texts as they are on the page, tests from the tree
    python scripts/requirements_page.py --check                  fail when the page is not what would be written

Source, tests and commits cite these ids; the page is where they lead.
"""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "requirements.md"
HEAD: Final = """# Requirements

What the specification asks for, by the ids that source, tests and commits cite. Each line is shortened from the
specification; a test file stands beside each id that it cites. An id without one is not built, or is tested
under another's name. Written by `scripts/requirements_page.py`.
"""
MOST_CHARS: Final = 160
_ENTRY: Final = re.compile(r"^- (?:\*\*)?([A-Z]{3}-\d+)(?:\*\*)?:? (.+)$", re.MULTILINE)
_TITLE: Final = re.compile(r"^# (.+?) \(([A-Z]{3})\)", re.MULTILINE)
_ROW: Final = re.compile(r"^\| ([A-Z]{3}-\d+) \| (.*?) \| (.*?) \|$", re.MULTILINE)
_SECTION: Final = re.compile(r"^## (.+?) \(([A-Z]{3})\)$", re.MULTILINE)


def shortened(text: str) -> str:
    """The first sentence, or as much of it as there is room for; never half a word."""
    text = " ".join(text.replace("|", "/").split())
    sentence = re.split(r"(?<=[.;])\s", text, maxsplit=1)[0].rstrip(".;:")
    if len(sentence) <= MOST_CHARS:
        return sentence
    return sentence[:MOST_CHARS].rsplit(" ", 1)[0].rstrip(",") + " ..."


def of_specification(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Titles by prefix, and one line for each id."""
    titles: dict[str, str] = {}
    texts: dict[str, str] = {}
    for path in sorted(folder.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (title := _TITLE.search(text)) is not None:
            titles[title[2]] = title[1]
            texts |= {name: shortened(line) for name, line in _ENTRY.findall(text)}
    return titles, texts


def of_page() -> tuple[dict[str, str], dict[str, str]]:
    """The same, from the page as it is."""
    text = PAGE.read_text(encoding="utf-8")
    return {p: title for title, p in _SECTION.findall(text)}, {name: line for name, line, _ in _ROW.findall(text)}


def cited(folder: Path) -> dict[str, set[str]]:
    """Which Python files under a folder cite which id. Ranges (`SCH-1 to 4`) count for their ends."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.rglob("*.py")):
        for name in re.findall(r"\b[A-Z]{3}-\d+\b", path.read_text(encoding="utf-8")):
            found[name].add(path.relative_to(folder).as_posix())
    return found


def page(titles: dict[str, str], texts: dict[str, str]) -> str:
    """The whole page."""
    tests = cited(ROOT / "tests")
    out = [HEAD]
    for prefix, title in sorted(titles.items()):
        out += [f"\n## {title} ({prefix})\n", "| id | what | tests |", "|---|---|---|"]
        names = sorted((n for n in texts if n.startswith(f"{prefix}-")), key=lambda n: int(n[4:]))
        out += [f"| {name} | {texts[name]} | {', '.join(sorted(tests[name]))} |" for name in names]
    return "\n".join(out) + "\n"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specification", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    wanted = page(*(of_specification(args.specification) if args.specification else of_page()))
    if not args.check:
        PAGE.write_text(wanted, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != wanted:
        print(f"{PAGE.relative_to(ROOT)} is out of date; run python scripts/requirements_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
