"""Let the programs' own parsers read what `planner emit` writes: one pinned environment for each, then its tests.

`python tools/real_parsers.py [NAME ...]` builds `.real-parsers/NAME` where it is missing and runs
`tests/emit/real/test_NAME.py`. An environment sees the packages of the interpreter that runs this, so that torch
and the planner are not installed again. Megatron-LM's parser is in no package: MEGATRON_LM names a checkout, and
without one its tests skip, saying so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".real-parsers"

PACKAGES: dict[str, tuple[str, ...]] = {
    "megatron-lm": ("triton==3.9.0", "einops==0.8.2"),
    "megatron-core": ("megatron-core==0.16.1",),
}
"""Name -> what its environment has beside the planner's own; installed without dependencies."""


def environment(name: str) -> Path:
    """The interpreter of an environment, built where it is missing."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    done = folder / "packages.txt"
    wanted = "\n".join(PACKAGES[name])
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    own = next((folder / "lib").glob("python*")) / "site-packages" / "planner-environment.pth"
    own.write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES[name]], check=True)
    done.write_text(wanted, encoding="utf-8")
    return python


def main(names: list[str]) -> int:
    """Run the tests of the programs that are named, or of all."""
    if unknown := sorted(set(names) - set(PACKAGES)):
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(PACKAGES)}")
    codes = []
    for name in names or PACKAGES:
        python = environment(name)
        variables = {**os.environ, "REAL_PYTHON": str(python), "PYTHONPATH": str(ROOT)}
        test = ROOT / "tests" / "emit" / "real" / f"test_{name.replace('-', '_')}.py"
        command: list[str | Path] = [str(python), "-m", "pytest", "-q", "-rs", "-n", "0", str(test)]
        codes.append(subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
