"""Options that programs have in any of their releases, for planner/emit/read/facts.yaml.

`python tools/upstream_options.py CLONES PACKAGES` prints the part `options` of that document. CLONES is a folder with a
clone of each repository, `OWNER+NAME/.git` or `OWNER+NAME/repo` (bare), with its tags; PACKAGES is a folder with wheels
or source packages of some releases of transformers and DeepSpeed. Options are words such as "--name" and fields of
data classes in the files that declare them; no file is run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPTION: Final = re.compile(r"""['"]--([A-Za-z][\w.-]*)['"]""")
_FIELD: Final = re.compile(r"^    ([A-Za-z]\w*)\s*:\s*\S", re.MULTILINE)
_PREVIEW: Final = re.compile(r"rc|dev|[ab]\d")
_MOST_RELEASES: Final = 30
FACTS: Final = Path(__file__).parent.parent / "planner" / "emit" / "read" / "facts.yaml"

# group of options, repository, pattern of the files that declare them, and whether fields of classes are options
_MEGATRON: Final = (
    r"megatron/(training/|post_training/|rl/)?arguments\.py|megatron/core/(\w+/)*\w*config\.py"
    r"|megatron/training/config/\w+\.py|pretrain_\w+\.py"
)
_SWIFT: Final = (
    r"swift/(llm/)?(argument|arguments|utils|trainers|rlhf_trainers|megatron|ray|pipelines)/(.*/)?"
    r"\w*(arg|config|mixin)\w*\.py|swift/llm/(utils/)?argument\.py"
)
_TRL: Final = r"trl/(trainer|experimental/\w+|scripts)/(\w*config|utils)\.py|trl/scripts/\w+\.py"
REPOSITORIES: Final = (
    ("megatron", "NVIDIA/Megatron-LM", _MEGATRON, True),
    ("megatron", "deepspeedai/Megatron-DeepSpeed", r"megatron/arguments\.py|pretrain_\w+\.py", False),
    ("megatron", "bigscience-workshop/Megatron-DeepSpeed", r"megatron/arguments\.py|pretrain_\w+\.py", False),
    ("megatron", "alibaba/Pai-Megatron-Patch", r"megatron_patch/arguments\.py", False),
    ("launchers", "huggingface/accelerate", r"src/accelerate/commands/launch\.py", False),
    ("llama_factory", "hiyouga/LLaMA-Factory", r"src/\w+/(\w+/)?hparams/\w+\.py|src/llmtuner/.*parser\.py", True),
    ("openrlhf", "OpenRLHF/OpenRLHF", r"openrlhf/cli/\w+\.py|examples/train_\w+\.py", False),
    ("ms_swift", "modelscope/ms-swift", _SWIFT, True),
    ("trl", "huggingface/trl", _TRL, True),
)
PACKAGES: Final = (
    ("trainer", "transformers-", r"transformers/training_args(_seq2seq)?\.py", True),
    ("launchers", "deepspeed-", r".*/launcher/(runner|launch)\.py|.*deepspeed/__init__\.py", False),
)


def _git(place: Path, *words: str) -> str:
    words = ("git", "--git-dir", str(place), *words)
    return subprocess.run(words, capture_output=True, text=True, check=True, errors="replace").stdout


def _of_clone(clones: Path, repository: str, pattern: str) -> Iterator[str]:
    """Each text that a file with such a path has had, in releases over all years and today."""
    folder = clones / repository.replace("/", "+")
    place = next(each for each in (folder / ".git", folder / "repo" / ".git", folder / "repo") if each.exists())
    tags = [tag for tag in _git(place, "tag", "--sort=creatordate").split() if not _PREVIEW.search(tag)]
    seen = set()
    for tag in (*tags[:: max(len(tags) // _MOST_RELEASES, 1)], *tags[-1:], "HEAD"):
        for line in _git(place, "ls-tree", "-r", tag).splitlines():
            about, path = line.split("\t")
            if re.fullmatch(pattern, path) and (blob := about.split()[2]) not in seen:
                seen.add(blob)
                yield _git(place, "cat-file", "-p", blob)


def _of_package(path: Path, pattern: str) -> Iterator[str]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from (wheel.read(name).decode() for name in wheel.namelist() if re.fullmatch(pattern, name))
        return
    with tarfile.open(path) as packed:
        for each in packed:
            if each.isfile() and re.fullmatch(pattern, each.name) and (file := packed.extractfile(each)):
                yield file.read().decode()


def names_of(text: str, *, has_fields: bool) -> set[str]:
    """Names of the options that a file of Python declares, with `_` for `-`."""
    found = {name.replace("-", "_") for name in _OPTION.findall(text)}
    return found | (set(_FIELD.findall(text)) if has_fields else set())


def main() -> None:
    """Print the options of each group."""
    clones, packages = map(Path, sys.argv[1:3])
    found: dict[str, set[str]] = {}
    for group, repository, pattern, has_fields in REPOSITORIES:
        for text in _of_clone(clones, repository, pattern):
            found.setdefault(group, set()).update(names_of(text, has_fields=has_fields))
    for group, start, pattern, has_fields in PACKAGES:
        for path in sorted(packages.glob(f"{start}*")):
            for text in _of_package(path, pattern):
                found.setdefault(group, set()).update(names_of(text, has_fields=has_fields))
    harmless = re.compile(yaml.safe_load(FACTS.read_text())["harmless"])
    for group, names in sorted(found.items()):
        print(f"  {group}: >-")
        kept = sorted(name for name in names if not harmless.search(name))
        print(textwrap.indent(textwrap.fill(" ".join(kept), 116), "    "))


if __name__ == "__main__":
    main()
