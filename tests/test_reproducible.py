"""Equal inputs give equal bytes under every Python.

Since 3.12 the built-in `sum` compensates the rounding of floats. A document that depends on `sum` differs in its last
digit between 3.11 and 3.12. Here both ways of summing are tried, and the other Pythons of this machine run the planner
if they have its dependencies. NumPy's elementary functions differ in the last digit between versions and between
processors; here they are replaced by functions that are off by one digit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
JOBS = {
    "pipeline": "plan gpt3-175b dgx-a100 --nodes 8 --seq-len 2048 --global-batch 64 --set training.tokens=300e9",
    "experts": "plan mixtral-8x7b dgx-h100 --nodes 4 --seq-len 4096 --global-batch 256 --set cluster.price=2.35USD/h",
    "latent": "explain deepseek-v3 dgx-h100 --nodes 32 --seq-len 4096 --global-batch 2048 --engine megatron "
    "--layout pp=16,ep=16,tp=1,zero=1,mbs=1,sp=0 --collectives --batch",
    "batch": "plan llama3-8b dgx-a100 --nodes 1 --seq-len 8192 --global-batch 32..48 --set training.tokens=1e12",
    "offload": "explain llama2-7b dgx-a100 --nodes 1 --seq-len 4096 --global-batch 64 "
    "--layout zero=2,offload=optimizer --engine deepspeed",
}
COMPENSATED = """
import builtins, math
plain = builtins.sum
def compensated(values, start=0):
    values = [start, *values]
    floats = len(values) > 1 and all(type(each) is float for each in values[1:])
    return math.fsum(values) if floats else plain(values[1:], start)
builtins.sum = compensated
"""
ROUNDED = """
import builtins, functools, operator
builtins.sum = lambda values, start=0: functools.reduce(operator.add, values, start)
"""
NUDGED = """
import numpy
def nudged(plain):
    return lambda *values, **options: numpy.nextafter(plain(*values, **options), numpy.inf)
for name in ("exp", "expm1", "log", "log1p", "log10", "sin", "cos", "arccos", "tanh", "float_power", "cbrt"):
    setattr(numpy, name, nudged(getattr(numpy, name)))
"""
COLUMN = """
import numpy
plain = numpy.unique
def unique(values, **options):
    found = plain(values, **options)
    if options.get("axis") is None or not options.get("return_inverse"):
        return found
    return (*found[:-1], found[-1].reshape(-1, *[1] * (values.ndim - 1)))
numpy.unique = unique
"""
RUN = "\nimport sys\nfrom planner.cli import main\nsys.exit(main(sys.argv[1:]))\n"


def document(job: str, before: str = "", python: str = sys.executable) -> str:
    command = [python, "-c", before + RUN, *JOBS[job].split(), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode in (0, 3), done.stderr
    assert done.stdout.startswith("{")
    return done.stdout


@pytest.mark.parametrize(
    "job",
    [pytest.param(each, marks=pytest.mark.slow) if each in ("experts", "latent", "batch") else each for each in JOBS],
)
def test_no_document_depends_on_how_sum_rounds(job: str) -> None:
    assert document(job, ROUNDED) == document(job, COMPENSATED)


def test_numpy_2_0_0_has_positions_of_rows_in_a_column() -> None:
    assert document("pipeline", COLUMN) == document("pipeline")


@pytest.mark.parametrize(
    "job", [pytest.param(each, marks=pytest.mark.slow) if each != "experts" else each for each in JOBS]
)
def test_no_document_depends_on_how_numpy_rounds(job: str) -> None:
    assert document(job, NUDGED) == document(job)


def other_pythons() -> dict[str, bool]:
    """Other Pythons of 3.11 or newer on this machine, by path; true: this Python can run the planner."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders = [*map(Path, os.environ["PATH"].split(os.pathsep)), *sorted(home.glob("3.*/bin"))]
    program = (
        f"import sys; assert {sys.version_info[:2]} != sys.version_info[:2] >= (3, 11); print('known', flush=True)\n"
        "import click, jinja2, numpy, pulp, pydantic, rich, yaml; print('able')"
    )
    found = {}
    for python in {str(path): None for folder in folders for path in folder.glob("python3.[0-9]*[0-9]")}:
        said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False).stdout.split()
        if said:
            found[python] = "able" in said
    return found


def test_other_pythons_print_the_same_plan() -> None:
    found = other_pythons()
    if not any(found.values()):
        pytest.skip(f"no other Python here has what the planner needs: {', '.join(found) or 'there is none'}")
    for python in (each for each, able in found.items() if able):
        assert document("experts", python=python) == document("experts")
