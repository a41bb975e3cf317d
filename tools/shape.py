"""Report the length of functions and files, compared with well-known codebases (`make shape`).

The report is for reviewers and sets no limit, because people would meet a limit by splitting and padding code.

Only lines with code count: no blank lines, no comments, no docstrings.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
LONG_FUNCTION, LONG_FILE = 50, 400
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}

# lines of code in released sources: median and p90 of functions, share above 50; test lines per source line
ANCHORS = {
    "pre-commit": ("5", "22", "1.4%", "1.49"),
    "resolvelib": ("2", "15", "1.4%", "1.14"),
    "structlog": ("2", "13", "1.1%", "1.35"),
    "torchtitan": ("10", "43", "7.7%", "0.40"),
    "Calculon": ("4", "40", "8.3%", "0.02"),
}

Function = tuple[int, str]  # lines of code, "file:line name"


def docstring_lines(tree: ast.AST) -> set[int]:
    """Line numbers of strings that are statements of their own, such as docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def code_lines(source: str) -> set[int]:
    """Line numbers of code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(ast.parse(source)) - {source.count("\n") + 1}


def functions_of(path: Path) -> list[Function]:
    """Every function of a file, nested ones too."""
    source = path.read_text(encoding="utf-8")
    lines = code_lines(source)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = len(lines & set(range(node.lineno, (node.end_lineno or 0) + 1)))
            found.append((length, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


def has_any_of_functions(path: Path) -> list[bool]:
    """For every function of a file, whether its signature contains `Any` outside `NDArray[Any]`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            signature = f"{ast.unparse(node.args)} {ast.unparse(node.returns) if node.returns else ''}"
            found.append(re.search(r"\bAny\b", signature.replace("NDArray[Any]", "")) is not None)
    return found


def signatures_with_any(paths: Iterable[Path]) -> list[str]:
    """For each package, the number of function signatures that contain `Any`."""
    of_package: dict[str, list[bool]] = {}
    for path in paths:
        of_package.setdefault(path.relative_to(ROOT).parent.parts[:2][-1], []).extend(has_any_of_functions(path))
    return [
        f"  {sum(found) / len(found):4.0%} {package} ({sum(found)} of {len(found)})"
        for package, found in sorted(of_package.items(), key=lambda item: -sum(item[1]) / max(1, len(item[1])))
        if any(found)
    ]


def num_code_lines(paths: Iterable[Path]) -> int:
    """The number of code lines in the files."""
    return sum(len(code_lines(path.read_text(encoding="utf-8"))) for path in paths)


def num_lines(paths: Iterable[Path]) -> int:
    """The number of lines of data files and templates, without the fitted corrections, which nobody writes."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths if path.name != "calibration.json")


def percentile(values: list[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def comparison(functions: list[Function], tests_per_line: float) -> Table:
    """This project compared with the other codebases."""
    lengths = [length for length, _ in functions]
    over = sum(length > LONG_FUNCTION for length in lengths) / len(lengths)
    table = Table("", "median", "p90", f"over {LONG_FUNCTION}", "test / source", title="lines of a function")
    ours = (f"{statistics.median(lengths):.0f}", f"{percentile(lengths, 0.9)}", f"{over:.1%}", f"{tests_per_line:.2f}")
    table.add_row("planner", *ours, style="bold")
    for name, row in ANCHORS.items():
        table.add_row(name, *row)
    return table


def imports_between_parts(package: Path) -> tuple[int, int]:
    """The number of a package's top-level modules, and of its imports that cross from one sub-package to another."""
    name = ".".join(package.relative_to(ROOT).parts)
    pairs = set()
    for path in package.rglob("*.py"):
        here = path.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{name}."):
                target = str(node.module).removeprefix(f"{name}.").partition(".")[0]
                if target not in (here, here.removesuffix(".py")):
                    pairs.add((path, target))
    return len(list(package.glob("[!_]*.py"))), len(pairs)


def main() -> None:
    """Print the report."""
    console = Console()
    source, tests = sorted((ROOT / "planner").rglob("*.py")), sorted((ROOT / "tests").rglob("*.py"))
    functions = sorted((each for path in source for each in functions_of(path)), reverse=True)
    num_source, num_tests = num_code_lines(source), num_code_lines(tests)
    console.print(comparison(functions, num_tests / num_source))
    console.print(
        f"{num_source} lines of code in {len(source)} files, {num_tests} lines of tests in {len(tests)} files"
    )
    beside = {kind: num_lines((ROOT / "planner").rglob(f"*{kind}")) for kind in (".yaml", ".json", ".jinja", ".txt")}
    tools = num_code_lines((ROOT / "tools").glob("*.py"))
    shown = ", ".join(f"{num} lines of {kind}" for kind, num in beside.items())
    console.print(f"beside them in planner/: {shown}; in tools/: {tools} lines of code")
    modules, pairs = imports_between_parts(ROOT / "planner" / "search")
    console.print(f"planner/search: {modules} modules beside its sub-packages, {pairs} imports between its parts")
    console.print("longest functions:", *(f"  {length:4} {name}" for length, name in functions[:8]), sep="\n")
    console.print("signatures with `Any`, by package:", *signatures_with_any(source), sep="\n")
    files = sorted(
        ((len(path.read_text(encoding="utf-8").splitlines()), path) for path in source + tests), reverse=True
    )
    long = [f"  {length:4} {path.relative_to(ROOT)}" for length, path in files if length > LONG_FILE]
    console.print(f"files over {LONG_FILE} lines, all lines counted: {len(long)}", *long, sep="\n")


if __name__ == "__main__":
    main()
