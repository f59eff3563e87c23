"""Write docs/options.md from the schema: one definition of an option gives its reference, too (OPS-2).

Promises: the page holds every option with its flag, variable, key, unit, choices and default. `--check` fails when the
page in the repository is not the one that the schema gives.
Does not know: what options do beyond their help text.
"""

import sys
from pathlib import Path

from octavo.config.args import SERVER_SECTIONS, Option, options
from octavo.config.env import NAMES
from octavo.plugins import features

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
START = """# Options

This page is made by `make docs` from `src/octavo/config/schema.py`.
An option has one name everywhere: a flag, an environment variable, a key in a YAML file (`--config FILE`) and a
keyword of `octavo.LLM`. A flag or keyword wins over the environment, the environment over the file, the file over
the default. What is not set is decided at the start or means what its text says; `octavo explain-config` shows what
is in force and why. A variable that begins with `OCTAVO_` and is nearly the name of an option is an error; any other
that is no option is ignored with a warning.
"""


def row(option: Option) -> str:
    """One line of the table."""
    default = f"`{option.shown_default}`" if option.shown_default else "not set"
    kind = ", ".join(f"`{c}`" for c in option.choices) or option.unit or {"size": "bytes"}.get(option.kind, "")
    return f"| `{option.flag}` | `{option.variable}` | {kind} | {default} | {option.help} |"


def page() -> str:
    """The whole page."""
    parts = [START]
    sections = {**SERVER_SECTIONS, **features.all_sections()}
    known = options(sections)
    for section, kind in sections.items():
        title = (kind.__doc__ or section).splitlines()[0].rstrip(".")
        parts.append(f"\n## {title}\n\n| flag | variable | value | default | |\n|---|---|---|---|---|")
        parts += [row(o) for o in known.values() if o.section == section]
    parts.append("\n## Environment only\n\n| variable | |\n|---|---|")
    parts += [f"| `{name}` | {text} |" for name, text in NAMES.items()]
    return "\n".join(parts) + "\n"


def main() -> int:
    """Write or check the page."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != page():
            print("docs/options.md is not what the schema gives; run make docs", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
