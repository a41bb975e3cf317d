"""Public files of other programs, drawn by a seed, and how many of them `planner explain --from` reads rightly.

`python tools/drawn_files.py draw CLONES` prints the files that tests/emit/drawn/folders.yaml draws. CLONES is a folder
with a clone of each repository, `OWNER+NAME/.git` or `OWNER+NAME/repo` (bare).
`python tools/drawn_files.py count CLONES` reads each file of tests/emit/drawn/answers.yaml, whose layouts were written
by hand before any of them was read by the planner, and prints what differs and the four counts; a number behind CLONES
counts one draw alone. `whole` behind the number reads each file where it lies in its repository, so that programs that
a script starts and files that it names are found.

Files are written to a temporary folder, with the other files of the run that a row names, and never run.
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any, Final

import yaml

from planner.api import estimate_file
from planner.errors import PlannerError

_OF_LAYOUT = ("tp", "pp", "cp", "dp", "ep", "zero", "hsdp", "mbs", "recompute", "offload")
DRAWN = Path(__file__).parent.parent / "tests" / "emit" / "drawn"


def git(clones: Path, repository: str, *words: str) -> str:
    """The output of a command of git in a clone."""
    return _git(clones, repository, *words).decode()


def _git(clones: Path, repository: str, *words: str) -> bytes:
    place = clones / repository.replace("/", "+")
    places = (place / ".git", place / "repo" / ".git", place / "repo")
    found = next(each for each in places if each.exists())
    words = ("git", "--git-dir", str(found), *words)
    return subprocess.run(words, capture_output=True, check=True).stdout


def _unpacked(row: dict[str, Any], clones: Path, folder: str) -> None:
    """Programs and settings of a row's repository, in a folder; blobs that a clone lacks have no size."""
    listed = git(clones, row["repository"], "ls-tree", "-r", "-l", row["commit"]).splitlines()
    sized = (line.split("\t", 1) for line in listed if re.match(r"100\d+ blob \w+ +\d+\t", line))
    names = [name for _, name in sized if name.endswith((".py", ".sh", ".yaml", ".yml", ".json", ".toml"))]
    packed = _git(clones, row["repository"], "archive", row["commit"], "--", *names)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def drawn(clones: Path) -> list[tuple[str, str, str]]:
    """Repository, commit and path of each file that is drawn, those of each later draw behind the others."""
    listed = yaml.safe_load((DRAWN / "folders.yaml").read_text())
    found: dict[int, list[tuple[str, str, str]]] = {number: [] for number in _DRAWS}
    for each in listed["draws"]:
        repository, commit = each["repository"], each["commit"]
        paths = _matching(clones, each)
        later = max(each["count"] // 3, 1)
        for number, seed, count in (
            (1, listed["seed"], each["count"]),
            (2, listed["second_seed"], later),
            (3, listed["third_seed"], later + (each["count"] > _MANY)),
            (4, listed["fourth_seed"], later + (each["count"] > _MANY)),
        ):
            paths.sort(key=lambda path: _rank(seed, repository, path))
            found[number] += [(repository, commit, path) for path in paths[:count]]
            paths = paths[count:]
    for number, name in _USERS.items():
        for each in listed[name]:
            repository, commit, seed = each["repository"], each["commit"], listed[f"{name}_seed"]
            paths = sorted(_matching(clones, each), key=lambda path: _rank(seed, repository, path))
            found[number] += [(repository, commit, path) for path in paths[: each["count"]]]
    return [each for number in _DRAWS for each in found[number]]


def _matching(clones: Path, folder: dict[str, Any]) -> list[str]:
    listed = git(clones, folder["repository"], "ls-tree", "-r", "--name-only", folder["commit"]).splitlines()
    without = folder.get("without", "$^")
    return [path for path in listed if re.fullmatch(folder["paths"], path) and not re.search(without, path)]


_USERS: Final = {5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth", 10: "tenth"}
_DRAWS: Final = (1, 2, 3, 4, *_USERS)
_MANY: Final = 4
"""Folders with more files than this have one more in the third and the fourth draw."""


def _rank(seed: int, repository: str, path: str) -> str:
    return hashlib.sha256(f"{seed}:{repository}:{path}".encode()).hexdigest()


def _read(row: dict[str, Any], clones: Path, *, whole: bool = False) -> tuple[str, dict[str, Any], str]:
    """What became of a file (priced, refused, crashed), what was read, and the words of a refusal."""
    given = dict(row.get("given", {}))
    with tempfile.TemporaryDirectory() as folder, chdir(folder) if whole else nullcontext():
        if whole:
            _unpacked(row, clones, folder)
        paths = []
        for path in (row["path"], *row.get("files", ())):
            paths.append(Path(folder) / path)
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            paths[-1].write_text(git(clones, row["repository"], "show", f"{row['commit']}:{path}"))
        ignore, define = tuple(given.pop("ignore", ())), tuple(given.pop("define", ()))
        try:
            plan = estimate_file(paths, given.pop("cluster", "dgx-h100"), ignore=ignore, define=define, **given)
        except PlannerError as error:
            said = " | ".join(each.message for each in getattr(error, "mistakes", ())) or str(error)
            return "refused", {}, said.replace(folder + "/", "")
        except Exception as error:  # noqa: BLE001 - counted as wrong
            return "crashed", {}, repr(error)
    layout = plan.layout
    told = {key: getattr(layout, key) for key in _OF_LAYOUT}
    told["recompute"] = "/".join(dict.fromkeys(layout.recompute))
    told |= {"seq": plan.training.sequence_length, "batch": plan.training.global_batch_size}
    return "priced", told | {"lora": plan.training.lora_rank or 0, "verdict": plan.verdict}, plan.verdict


def judged(row: dict[str, Any], clones: Path, *, whole: bool = False) -> tuple[str, str]:
    """A word for how a file was read, and what differs from the answer by hand."""
    outcome, told, said = _read(row, clones, whole=whole)
    wanted = row["answer"]
    if outcome == "crashed":
        return "wrong", said
    if wanted == "unknown" and outcome == "priced" and said == "unknown":
        return "read rightly", said
    if wanted in ("refuse", "unknown"):
        return ("refused rightly", said) if outcome == "refused" else ("wrong", f"priced as {told}")
    if outcome == "refused":
        return "refused without reason", said
    differs = [
        f"{key} {told[key]}, by hand {value}"
        for key, value in wanted.items()
        if str(told[key]) not in str(value).split("|")
    ]
    return ("wrong", "; ".join(differs)) if differs else ("read rightly", said)


def main() -> None:
    """Draw or count."""
    clones = Path(sys.argv[2])
    if sys.argv[1] == "draw":
        for each in drawn(clones):
            print(*each)
        return
    rows = yaml.safe_load((DRAWN / "answers.yaml").read_text())
    counts: dict[int, Counter[str]] = {number: Counter() for number in _DRAWS}
    for row in rows:
        if sys.argv[3:] and str(row.get("draw", 1)) != sys.argv[3]:
            continue
        word, said = judged(row, clones, whole="whole" in sys.argv)
        has_layout, of = not isinstance(row["answer"], str), counts[row.get("draw", 1)]
        of.update({word: 1, "with a layout": has_layout, "priced of these": has_layout and "refused" not in word})
        print(f"{word}: {row['repository']} {row['path']}\n    {said[:400]}", flush=True)
    for number, found in counts.items():
        print(f"draw {number}:", dict(found))


if __name__ == "__main__":
    main()
