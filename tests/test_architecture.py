"""Rules of CONTRIBUTING.md that a machine can check.

Every rule is a function from {module name: source} to a list of violations. It is applied to the package, and to a few
lines that break it, so that a rule that stops finding anything is noticed.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pydantic
import pytest

import planner
from planner.made_by import _FORMULAS
from planner.specs.document import Document

Sources = dict[str, str]
Rule = Callable[[Sources], list[str]]

PACKAGE = Path(planner.__file__).parent

LAYERS = (
    ("elementary", "errors", "later", "numbers", "once", "sums", "units", "version"),
    ("specs", "engines"),
    ("data_files", "layout", "layout_text", "run_arguments"),
    ("cost",),
    ("plan", "plan_file", "plan_parts", "made_by", "no_plan", "verdict"),
    ("search",),
    ("own_program",),
    (
        "answers",
        "asked",
        "describe",
        "emit",
        "evidence",
        "foreign",
        "launch",
        "measure",
        "reading",
        "shipped",
        "show",
        "verify",
    ),
    ("api",),
    ("",),  # planner/__init__.py: the Python API
    ("serve",),
    ("cli", "commands", "__main__"),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
TRAINER_MAY_IMPORT = (
    *("errors", "units", "specs", "layout", "plan", "plan_file", "data_files", "run_arguments", "cost.ledger"),
)
MAY_PRINT = ("cli", "commands", "launch", "show", "trainer", "__main__")  # launch passes on what the ranks print


def read_sources() -> Sources:
    """Every module of the package, by its name below `planner`."""
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


parsed = cache(ast.parse)


def part_of(module: str) -> str:
    return module.partition(".")[0]


def imports_of(source: str) -> Iterator[str]:
    """Modules of the package that a source imports anywhere, also in functions and for type checking."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from planner import x` names a module or a value of planner/__init__.py
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (
            name.removeprefix("planner").removeprefix(".") for name in names if f"{name}.".startswith("planner.")
        )


def resolve(name: str, sources: Sources) -> str:
    """The module that contains an imported name: `specs.model.ModelSpec` is in `specs.model`."""
    while name and name not in sources:
        name = name.rpartition(".")[0]
    return name


def places_of(source: str) -> Iterator[str]:
    """Modules that a source names as `module:variable`, which `planner.later` imports when they are asked for."""
    texts = (node.value for node in ast.walk(parsed(source)) if isinstance(node, ast.Constant))
    yield from (text.partition(":")[0] for text in texts if re.fullmatch(r"[a-z_.]+:[A-Za-z_]+", str(text)))


def import_graph(sources: Sources) -> dict[str, set[str]]:
    """Modules and their imports; planner/__init__.py is the module ""."""
    return {
        module: {resolve(name, sources) for name in imports_of(source)}
        | {place for place in places_of(source) if place in sources} - {module}
        for module, source in sources.items()
    }


def imports_point_one_way(sources: Sources) -> list[str]:
    wrong = [
        f"{module}: give `{part_of(module)}` a layer"
        for module in sources
        if part_of(module) not in {*LEVEL, "trainer"}
    ]
    for module, imported in import_graph(sources).items():
        for target in sorted(imported):
            here, there = part_of(module), part_of(target)
            if "trainer" in (here, there):
                continue  # the next rule
            if LEVEL.get(there, 99) > LEVEL.get(here, 99):
                wrong.append(f"{module} imports {target}, which is above it")
    return wrong


PARTS = {
    "search": {"space": 0, "bounds": 1, "optimum": 2},
    "evidence": {"rows": 0, "inputs": 4, "check": 5},
}
"""Parts of packages by their level; a part that is not listed is at level 3."""


def parts_of_packages_point_one_way(sources: Sources) -> list[str]:
    """In `search` and `evidence`, each part imports only from its own level and from those below it."""

    def level(module: str) -> int:
        package, part = module.split(".")[:2]
        return PARTS[package].get(part, 3)

    return [
        f"{module} imports {target}, which is above it"
        for module, imported in import_graph(sources).items()
        for target in sorted(imported)
        for package in PARTS
        if module.startswith(f"{package}.") and target.startswith(f"{package}.") and level(target) > level(module)
    ]


def trainer_stands_apart(sources: Sources) -> list[str]:
    wrong = []
    for module, imported in import_graph(sources).items():
        for target in sorted(imported):
            if part_of(target) == "trainer" and part_of(module) != "trainer":
                wrong.append(f"{module} imports {target}")
            allowed = target in TRAINER_MAY_IMPORT or part_of(target) in ("trainer", "specs")
            if part_of(module) == "trainer" and not allowed:
                wrong.append(f"{module} imports {target}")
    return wrong


def imports_have_no_cycle(sources: Sources) -> list[str]:
    graph = import_graph(sources)
    wrong = []
    for module in graph:
        reached: set[str] = set()
        todo = list(graph[module])
        while todo:
            target = todo.pop()
            if target not in reached:
                reached.add(target)
                todo += graph[target]
        if module in reached:
            wrong.append(f"{module} imports itself through others")
    return wrong


def formulas_name_their_source(sources: Sources) -> list[str]:
    wrong = []
    for module, source in sources.items():
        if part_of(module) != "cost" or module == "cost.ledger":  # it adds up what the formulas return
            continue
        for node in parsed(source).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or not returns_number(node):
                continue
            if "Source:" not in (ast.get_docstring(node) or ""):
                wrong.append(f"{module}.{node.name} returns a number and names no `Source:`")
    return wrong


def returns_number(function: ast.FunctionDef) -> bool:
    annotation = ast.unparse(function.returns) if function.returns else ""
    return bool(set(re.findall(r"\w+", annotation)) & {"Any", "Flag", "float", "int", "Number", "NDArray"})


def dataclasses_are_frozen(sources: Sources) -> list[str]:
    """All dataclasses that may leave their module; a private dataclass may be its module's working memory."""
    wrong = []
    for module, source in sources.items():
        for node in ast.walk(parsed(source)):
            for decorator in node.decorator_list if isinstance(node, ast.ClassDef) and node.name[0] != "_" else []:
                text = ast.unparse(decorator)
                missing = [word for word in ("frozen", "slots", "kw_only") if f"{word}=True" not in text]
                if text.partition("(")[0].endswith("dataclass") and missing:
                    wrong.append(f"{module}.{node.name} is not {', '.join(missing)}")
    return wrong


CONVERSIONS = {1e3, 1e6, 1e9, 1e12, 1e15, 60, 3600, 86400} | {1024.0**power for power in range(1, 5)}


def units_are_converted_in_one_place(sources: Sources) -> list[str]:
    wrong = []
    for module, source in sources.items():
        if module == "units":
            continue
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
                found = [side for side in (node.left, node.right) if constant(side) in CONVERSIONS]
                wrong += [f"{module}:{node.lineno} converts by {ast.unparse(side)}" for side in found]
    return wrong


def constant(node: ast.expr) -> float | None:
    """Value of a literal number or a power of literals, such as 1024**3."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = constant(node.left), constant(node.right)
        return base**power if base is not None and power is not None else None
    return None


def elementary_functions_are_alike_everywhere(sources: Sources) -> list[str]:
    """Exempt are the fit to measured runs, which rounds its results, and the trainer, where torch computes."""
    ours = r"exp|expm1|log|log1p|log10|sin|cos|tan|arccos|arcsin|arctan|tanh|power|float_power|cbrt"
    return [
        f"{module}: {call} of NumPy; planner.elementary has what is alike on every processor"
        for module, source in sources.items()
        if module != "evidence.fit" and part_of(module) != "trainer"
        for call in re.findall(rf"\bnp\.(?:{ours})\b", source)
    ]


def output_is_printed_in_one_place(sources: Sources) -> list[str]:
    wrong = []
    for module, source in sources.items():
        if part_of(module) in MAY_PRINT:
            continue
        for node in ast.walk(parsed(source)):
            text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if text in ("print", "pprint", "click.echo", "echo", "sys.stdout.write", "sys.stderr.write"):
                wrong.append(f"{module}:{getattr(node, 'lineno', 0)} calls {text}")
    return wrong


RULES: dict[Rule, tuple[Sources, ...]] = {
    imports_point_one_way: (
        {"layout": "from planner.cost.ledger import MemoryLine", "cost.ledger": ""},
        {"specs.model": "def f():\n    import planner.search.search", "search.search": ""},
        {"search.recommendation": "from planner.answers.sweep import sweep", "answers.sweep": ""},
        {"units": "from planner import cli", "cli": "", "": ""},
        {"helpers": ""},
    ),
    parts_of_packages_point_one_way: (
        {"search.space.rules": "from planner.search.optimum.pricing import f", "search.optimum.pricing": ""},
        {"search.bounds.of_layers": "from planner.search.search import search", "search.search": ""},
        {"search.space.rules": "from planner.search.search import search", "search.search": ""},
        {"evidence.rows.jobs": "from planner.evidence.fit import learn", "evidence.fit": ""},
    ),
    trainer_stands_apart: (
        {"launch": "from planner.trainer.model import Block", "trainer.model": ""},
        {"trainer.model": "from planner.cost.memory import memory_lines", "cost.memory": ""},
        {"trainer.model": "from planner.search import search", "search": "", "search.search": ""},
    ),
    imports_have_no_cycle: (
        {"specs.a": "from planner.specs.b import B", "specs.b": "from planner.specs.a import A"},
        {"cost.a": "import planner.cost.b", "cost.b": "import planner.cost.c", "cost.c": "import planner.cost.a"},
    ),
    formulas_name_their_source: (
        {"cost.flops": 'def flops(n: int) -> float:\n    """Six per parameter."""\n    return 6.0 * n'},
        {"cost.flops": "def flops(n: Number) -> Number:\n    return 6 * n"},
        {"cost.flops": "def split(n: int) -> tuple[float, ...]:\n    return (n / 2, n / 2)"},
    ),
    dataclasses_are_frozen: (
        {"plan": "@dataclass\nclass Plan:\n    a: int"},
        {"plan": "@dataclass(frozen=True, slots=True)\nclass Plan:\n    a: int"},
        {"plan": "@dataclasses.dataclass(slots=True, kw_only=True)\nclass Plan:\n    a: int"},
    ),
    units_are_converted_in_one_place: (
        {"explain": "gib = num_bytes / 1024**3"},
        {"cost.flops": "flops = 312 * 1e12"},
        {"launch": "hours = seconds / 3600"},
        {"cost.memory": "gib = num_bytes / 2**30"},
    ),
    elementary_functions_are_alike_everywhere: ({"cost.band": "np.log(ratios)"}, {"search.a": "f = np.exp"}),
    output_is_printed_in_one_place: (
        {"search.search": "print('solving')"},
        {"plan": "import sys\nsys.stdout.write('done')"},
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule: Rule) -> None:
    assert rule(read_sources()) == []


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        pytest.param(rule, broken, id=f"{rule.__name__}-{n}")
        for rule, cases in RULES.items()
        for n, broken in enumerate(cases)
    ],
)
def test_rule_finds_what_it_forbids(rule: Rule, broken: Sources) -> None:
    assert len(rule(broken)) >= 1


def test_all_that_formulas_import_is_in_the_digest_of_a_plan() -> None:
    graph = import_graph(read_sources())
    reached = {name for name in graph if part_of(name) == "cost"}
    todo = list(reached)
    while todo:
        new = graph[todo.pop()] - reached - {""}
        reached |= new
        todo += new
    digested = {path for pattern in _FORMULAS for path in PACKAGE.glob(pattern)}
    files = {PACKAGE / f"{name.replace('.', '/')}.py" for name in reached}
    assert {path for path in files if path.exists()} <= digested


def test_formulas_are_found_at_all() -> None:
    formulas = [
        node.name
        for module, source in read_sources().items()
        if part_of(module) == "cost"
        for node in parsed(source).body
        if isinstance(node, ast.FunctionDef) and returns_number(node)
    ]
    assert len(formulas) >= 10


def planning_modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "planner.")]
    return [name for name in names if not name.startswith("planner.trainer") and not name.endswith("__main__")]


def test_planning_never_loads_torch() -> None:
    pytest.importorskip("torch")
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted(name for name in sys.modules if name.split('.')[0] == 'torch')))\n"
    )
    command = [sys.executable, "-c", program, json.dumps(planning_modules())]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == []


def test_a_price_and_a_comparison_load_no_search_and_no_table_of_another_program(tmp_path: Path) -> None:
    program = (
        "import contextlib, io, json, pathlib, sys\n"
        "from planner import api, cli\n"
        "from planner.plan import write_plan\n"
        "plan = api.estimate_layout('gpt2', 'dgx-h100', layout='mbs=1', gpus=8, global_batch=16)\n"
        "write_plan(plan, pathlib.Path(path := sys.argv[1]))\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    codes = [cli.main(each) for each in (['explain', path], ['diff', path, path], ['models'])]\n"
        "print(json.dumps([codes, sorted(sys.modules)]))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "plan.json")]
    codes, loaded = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert codes == [0, 0, 0]
    heavy = ("pulp", "planner.search.search", "planner.search.optimum", "planner.search.bounds")
    assert [name for name in loaded if name.startswith(heavy)] == []
    # whether a program of the plan's engine runs the layout is a question to this program's table alone
    tables = {name for name in loaded if name.startswith("planner.emit.programs.") and name.count(".") == 3}
    assert tables <= {"planner.emit.programs.torch"}, tables


def subclasses(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


def test_documents_are_frozen_and_strict() -> None:
    for name in planning_modules():
        importlib.import_module(name)
    ours = [each for each in subclasses(pydantic.BaseModel) if each.__module__.startswith("planner.")]
    assert len(ours) >= 6
    for each in ours:
        assert issubclass(each, Document)
        assert each.model_config["frozen"] is True
        assert each.model_config["extra"] == "forbid"
        assert each.model_config["strict"] is True
