"""A hook of mkdocs: the page of the cost model lists the functions of planner/cost when the site is built."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Append the list to docs/cost-model.md; other pages are unchanged. mkdocs calls this function by its name."""
    return markdown + formula_reference() if page.file.src_uri == "cost-model.md" else markdown


def formula_reference() -> str:
    """The docstrings of planner/cost, module by module."""
    parts = []
    for path in sorted((ROOT / "planner" / "cost").glob("[a-z]*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        parts.append(f"\n## cost/{path.name}\n\n{ast.get_docstring(module)}\n")
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
        parts += [f"\n### {f.name}\n\n```text\n{signature(f)}\n\n{ast.get_docstring(f)}\n```\n" for f in functions]
    return "".join(parts)


def signature(function: ast.FunctionDef) -> str:
    """A function's signature on one line."""
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{function.name}({ast.unparse(function.args)}){returns}"
