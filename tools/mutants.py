"""Generate mutants for `tools/mutate.py`: small changes of a Python file that a test should notice."""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping

Node = TypeVar("Node", bound=ast.AST)

CONTEXT = 60  # characters shown on either side of a change

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Div, ast.Mult),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
_PAIRS = (
    *(("min", "max"), ("minimum", "maximum"), ("any", "all"), ("floor", "ceil"), ("argmin", "argmax")),
    *(("less", "less_equal"), ("greater", "greater_equal"), ("equal", "not_equal"), ("logical_and", "logical_or")),
)
OTHER_NAME = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
UNORDERED = {*OTHER_NAME, "isinstance", "issubclass", "zip", "getattr", "hasattr", "gcd"}  # arguments stay in order
KEPT_ARGUMENTS = ("description", "strict", "hint")  # text of a schema, an assertion of zip, text of an error
LEFT_ALONE = ("annotation", "returns", "decorator_list", "bases", "format_spec")  # fields of the tree
ASKED = {ast.If: "test", ast.While: "test", ast.IfExp: "test"}  # fields that hold a condition


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A file with one change.

    function: qualified name of the function around the change; None for code that runs at import, such as default
    values.
    lines: lines of the statement around the change, or of the function that runs later; None for a module.
    code: the source line, stripped.
    change: the expression, "before -> after".
    removed, added: the statement before and after, shortened to the text around the change.
    """

    path: str
    line: int
    function: str | None
    lines: range | None
    code: str
    change: str
    removed: str
    added: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """A node with its replacements; the node is `field` of `parent`, at `index` if the field is a list."""

    parent: ast.AST
    field: str
    index: int | None
    old: ast.AST
    new: ast.AST
    function: str | None
    lines: range | None

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def draw(sources: Mapping[str, str], count: int, generator: random.Random) -> Iterator[Mutant]:
    """Distinct mutants: draws a file by its number of code lines, then a line with sites, then one site of the line."""
    trees = {path: ast.parse(source) for path, source in sorted(sources.items())}
    weights = [len({getattr(node, "lineno", 0) for node in ast.walk(tree)}) for tree in trees.values()]
    lines = {path: _by_line(tree) for path, tree in trees.items()}
    seen: set[str] = set()
    for _ in range(100 * count):  # a short file may have fewer mutants than asked for
        (path,) = generator.choices(list(trees), weights)
        if lines[path] and len(seen) < count:
            mutant = _mutant(path, sources[path], trees[path], generator.choice(generator.choice(lines[path])))
            if mutant is not None and mutant.source not in seen:
                seen.add(mutant.source)
                yield mutant


def _mutant(path: str, source: str, tree: ast.Module, site: _Site) -> Mutant | None:
    """The file with the change of a site; None if the change has no effect or does not compile."""
    before, change = ast.unparse(tree), f"{ast.unparse(site.old)} -> {ast.unparse(site.new)}"
    site.put(site.new)
    try:
        after = ast.unparse(tree)
        compile(after, path, "exec")
    except (SyntaxError, ValueError):
        return None
    finally:
        site.put(site.old)
    if after == before:
        return None
    line = _line(site.old)
    code = source.splitlines()[line - 1].strip()
    removed, added = _difference(before, after)
    return Mutant(
        path=path,
        line=line,
        function=site.function,
        lines=site.lines,
        code=code,
        change=change,
        removed=removed,
        added=added,
        source=after,
    )


def _difference(before: str, after: str) -> tuple[str, str]:
    """The first line that differs, before and after the change, shortened around the difference."""
    old, new = next(pair for pair in zip(before.splitlines(), after.splitlines(), strict=False) if pair[0] != pair[1])
    place = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    cut = slice(max(0, place - CONTEXT), place + CONTEXT)
    return old[cut].strip(), new[cut].strip()


def _by_line(tree: ast.Module) -> list[list[_Site]]:
    lines: dict[int, list[_Site]] = defaultdict(list)
    for site in _sites(tree):
        lines[_line(site.old)].append(site)
    return [lines[line] for line in sorted(lines)]


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _sites(
    parent: ast.AST, lines: range | None = None, scope: tuple[str, ...] = (), function: str | None = None
) -> Iterator[_Site]:
    """Sites below a node; `scope` is its qualified name; lines and function are as in `Mutant`."""
    for field, value in ast.iter_fields(parent):
        if field in LEFT_ALONE or isinstance(parent, ast.Raise):
            continue
        runs_in = function or (".".join(scope) if isinstance(parent, ast.FunctionDef) and field == "body" else None)
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or _is_left_alone(node):
                continue
            own = _header(node) if runs_in and isinstance(node, ast.stmt) else lines
            for new in _replacements(node, condition=ASKED.get(type(parent)) == field or field == "ifs"):
                yield _Site(parent=parent, field=field, index=index, old=node, new=new, function=runs_in, lines=own)
            inner = scope
            if not runs_in and isinstance(node, ast.FunctionDef | ast.ClassDef):
                inner = (*scope, node.name)
            if isinstance(node, ast.FunctionDef | ast.Lambda) and not runs_in:  # its default values run at import
                body = node.body if isinstance(node, ast.Lambda) else node.body[0]
                own = range(body.lineno, (node.end_lineno or 0) + 1)
            yield from _sites(node, own, inner, runs_in)


def _header(node: ast.stmt) -> range:
    """Lines of a statement without the lines of nested statements."""
    last = node.end_lineno or node.lineno
    if body := getattr(node, "body", None):
        last = max(node.lineno, body[0].lineno - 1)
    return range(node.lineno, last + 1)


def _is_left_alone(node: ast.AST) -> bool:
    """Whether no test can notice a change of the node: docstrings, imports, types, error texts, invariants."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Call):
        return _name(node).endswith("Error") or _name(node) == "Mistake"
    if isinstance(node, ast.keyword):
        return node.arg in KEPT_ARGUMENTS
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Assert)


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _replacements(node: ast.AST, *, condition: bool) -> Iterator[ast.AST]:
    """The possible replacements of a node."""
    if isinstance(node, ast.stmt):
        yield from _other_statements(node)
    elif isinstance(node, ast.expr):
        if condition and not (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            yield ast.UnaryOp(ast.Not(), node)
        yield from _other_expressions(node)


def _other_statements(node: ast.stmt) -> Iterator[ast.stmt]:
    """Replacements of a statement: an empty statement, or another assignment."""
    if isinstance(node, ast.AugAssign):
        yield from (_changed(node, op=other()) for other in OPERATORS.get(type(node.op), ()))
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom)
    guard = isinstance(node, ast.If) and not node.orelse
    if call or guard or isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break):
        yield ast.Pass()


def _other_expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.BinOp() | ast.BoolOp():
            yield from (_changed(node, op=other()) for other in OPERATORS.get(type(node.op), ()))
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
                yield node.left
        case ast.Compare(ops=[op, *more]):
            yield from (_changed(node, ops=[other(), *more]) for other in OPERATORS[type(op)])
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp(body=one, orelse=other):
            yield _changed(node, body=other, orelse=one)
        case ast.Constant(value=bool() | int() | float() as value):
            yield from map(ast.Constant, _other_numbers(value))
        case ast.Call():
            yield from _other_calls(node)


def _other_numbers(value: float) -> tuple[float, ...]:
    if isinstance(value, bool):
        return (not value,)
    return (value + 1, value - 1) if isinstance(value, int) else (value * 2 or 1.0,)


def _other_calls(node: ast.Call) -> Iterator[ast.Call]:
    """The call of a similar function, without one of the keyword arguments, or with the first two arguments swapped."""
    name = _name(node)
    if other := OTHER_NAME.get(name):
        new = ast.Name(other) if isinstance(node.func, ast.Name) else _changed(node.func, attr=other)
        yield _changed(node, func=new)
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in KEPT_ARGUMENTS:
            yield _changed(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])
    if name not in UNORDERED and len(node.args) > 1 and not any(isinstance(each, ast.Starred) for each in node.args):
        first, second, *others = node.args
        yield _changed(node, args=[second, first, *others])


def _changed(node: Node, **fields: object) -> Node:
    """A copy of the node with other fields, at the same position."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
