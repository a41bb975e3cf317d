"""Create the virtual environment and install the planner with pinned dependencies (`make setup`).

This program itself needs only the machine's interpreter and the standard library. A torch of at least 2.11 that the
environment already has is kept, because the user chooses the build that fits the machine's driver.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST_TORCH = (2, 11)
TORCH_SECTION = "# --- torch"
ASK_TORCH = "import importlib.metadata as m; t = m.distribution('torch'); print(t.version); print(t.locate_file(''))"


def is_new_enough(version: str) -> bool:
    """Whether a torch version such as "2.13.0+cpu" is new enough to keep."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= LEAST_TORCH


def torch_of(python: str | Path) -> tuple[str, Path] | None:
    """Version and folder of the torch that an interpreter can import; None if there is none to keep."""
    answer = subprocess.run([python, "-c", ASK_TORCH], capture_output=True, text=True, check=False)
    if answer.returncode:
        return None
    version, folder = answer.stdout.splitlines()[-2:]
    return (version, Path(folder)) if is_new_enough(version) else None


def create(venv: Path) -> Path:
    """Create the environment unless it exists; returns its interpreter."""
    python = venv / "bin" / "python"
    if python.exists():
        return python
    torch = torch_of(sys.executable)
    command = [sys.executable, "-m", "venv", str(venv)]
    in_venv = sys.prefix != sys.base_prefix
    if torch and not in_venv:
        command.append("--system-site-packages")
    print("+", " ".join(command), flush=True)
    if subprocess.run(command, check=False).returncode:
        sys.exit("cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv")
    if torch and in_venv:
        # --system-site-packages gives access to the base interpreter, not to the active environment
        site_packages = next((venv / "lib").glob("python3*/site-packages"))
        (site_packages / "active_environment.pth").write_text(f"{torch[1]}\n", encoding="utf-8")
    return python


def constraints(*, keep_torch: bool) -> str:
    """The pinned versions. If the present torch is kept, torch and the packages that only torch needs are left out."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return text.partition(TORCH_SECTION)[0] if keep_torch else text


def install(venv: Path, python: Path, torch_index: str, group: str) -> None:
    """Install the tools of a dependency group; with `dev` the build backend and the planner itself, editable, too."""
    torch = torch_of(python)
    inherited = torch is not None and venv not in torch[1].parents
    if torch:
        print(f"keeping torch {torch[0]}", flush=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    # pip reads dependency groups only from version 25.1 on, and a fresh environment may hold an older one
    tools = [*project["dependency-groups"][group]]
    steps = [tools]
    if group == "dev":
        # the build backend is installed too, so that it is pinned; for --editable it needs the package editables
        tools += [*project["build-system"]["requires"], "editables"]
        steps.append(["--no-build-isolation", "--editable", f"{ROOT}[train]"])
    # a tool in the outer environment would satisfy pip, but the new environment would lack its command
    tools += ["--ignore-installed"] if inherited else []
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder, "constraints.txt")
        pinned.write_text(constraints(keep_torch=torch is not None), encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(pinned)]
        pip += ["--no-compile"]  # Python compiles what is imported; of the large packages that is a small part
        pip += ["--extra-index-url", torch_index] if torch_index else []
        for what in steps:
            print("+ pip install", " ".join(what), flush=True)
            if subprocess.run([*pip, *what], check=False).returncode:
                sys.exit("pip could not install the dependencies; its message is above")


def main() -> None:
    """Read the command line, create the environment, install."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch-index", default="", help="another package index, for the build of torch")
    parser.add_argument("--group", default="dev", help="the dependency group to install")
    arguments = parser.parse_args()
    venv = arguments.venv.absolute()
    install(venv, create(venv), arguments.torch_index, arguments.group)


if __name__ == "__main__":
    main()
