"""Print how large the package is, what is larger than the house likes, and how it grew since the last commit.

Promises: figures for people to read; it never fails.
Does not know: why something is large; whoever made it so says it in the commit.
"""

import ast
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "octavo"
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 400, 50, 7


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods."""
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_before() -> int | None:
    """Lines of the package in the commit before this one, where git knows it."""
    done = subprocess.run(
        ["git", "grep", "-c", "", "HEAD~1", "--", "src/octavo/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return None
    return sum(int(line.rsplit(":", 1)[1]) for line in done.stdout.splitlines())


def main() -> None:
    """Print the report."""
    files = {p: p.read_text(encoding="utf-8") for p in sorted(SOURCE.rglob("*.py"))}
    lengths = {p: t.count("\n") for p, t in files.items()}
    sizes, big, wide = [], [], []
    for path, text in files.items():
        for fn in functions(ast.parse(text)):
            length = (fn.end_lineno or fn.lineno) - fn.lineno + 1
            sizes.append(length)
            where = f"{path.relative_to(ROOT)}:{fn.lineno} {fn.name}"
            if length > MAX_FUNCTION:
                big.append((length, where))
            count = len(fn.args.args) + len(fn.args.kwonlyargs)
            if count > MAX_PARAMETERS:
                wide.append((count, where))
    total = sum(lengths.values())
    before = lines_before()
    tests = sum(p.read_text(encoding="utf-8").count("\n") for p in (ROOT / "tests").rglob("*.py"))
    print(
        f"package: {len(files)} files, {total} lines"
        + (f" ({total - before:+d} since the last commit)" if before else "")
    )
    print(f"tests: {tests} lines, {tests / max(1, total):.2f} of the package")
    print(f"file length: median {statistics.median(lengths.values()):.0f}, longest {max(lengths.values())}")
    print(f"function length: median {statistics.median(sizes):.0f}, longest {max(sizes)}")
    for title, rows in (
        (f"files over {MAX_FILE} lines", [(n, str(p.relative_to(ROOT))) for p, n in lengths.items() if n > MAX_FILE]),
        (f"functions over {MAX_FUNCTION} lines", big),
        (f"functions with more than {MAX_PARAMETERS} parameters", wide),
    ):
        print(f"{title}: {len(rows)}")
        for size, where in sorted(rows, reverse=True)[:12]:
            print(f"  {size:5d}  {where}")


if __name__ == "__main__":
    main()
