"""Files and command lines as keys and values: options (`--seq-length 4096`) and overrides (`model.seq_length=4096`)."""

from __future__ import annotations

import re
import shlex
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Final

from planner.emit.read import HOSTS, RANKS, THE_FILE
from planner.emit.read.launchers import NAMES
from planner.emit.read.shell import commands_of
from planner.errors import InputError
from planner.specs.yaml import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from planner.emit.target import Value

_STARTED: Final = re.compile(r"-m|.*\.py")
"""Matches the program that a launcher starts; it ends the values of the launcher's last option."""
_OVERRIDE: Final = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)


def option_words(text: str) -> list[str]:
    """Words of the command with the most options, else of the first that names a file.

    Beside a command that a launcher starts, `python program.py` makes data, tokens or an evaluation.

    A line that starts with an option continues the previous command. What `echo` prints is no command, because scripts
    print a command before they run it.

    Raises:
        InputError: several commands train, with other batches, lengths or stages.
    """
    found: list[list[str]] = []
    text = _BRACES.sub(lambda each: " ".join(f"{each[1]}{part}{each[3]}" for part in each[2].split(",")), text)
    for words in (list(_unwrapped(command)) for command in commands_of(text)):
        if found and is_option(words[0]) and any(map(is_option, found[-1])):
            found[-1] += words
        else:
            found.append(words)
    if (count := len({*filter(None, map(_sizes, found))})) > 1:
        raise InputError(f"the script starts {count} trainings of other sizes", hint="--from a script with one of them")
    train = [words for words in found if any(_num_options(words))]
    if any(_LAUNCHER.fullmatch(word) for words in train for word in words[:4]):
        found = [words for words in found if not _PLAIN.match(" ".join(words))]
    return max(found, key=_num_options, default=[])


_BRACES: Final = re.compile(r"""(?<!\S)([^\s'"$`{}]*)\{([\w.-]+(?:,[\w.-]+)+)\}([^\s'"$`{}]*)(?!\S)""")
"""Matches a word with `{a,b}`, which a shell writes as one word for each part."""

_LAUNCHER, _PLAIN, _NO_TRAINING, _SHOWN, _OF_ONE = (
    re.compile(NAMES[key]) for key in ("launched", "plain", "no_training", "shown", "of_one")
)


def _num_options(words: list[str]) -> tuple[int, bool]:
    """The number of options of a command that may train, and whether it names a file of a run."""
    scripts = (each for before, each in pairwise(words) if each.endswith(".py") or before in ("-m", "--module"))
    runs = words[0] not in NAMES["of_shells"] and not any(
        map(_NO_TRAINING.fullmatch, (*words[:2], *islice(scripts, 1)))
    )
    return runs * sum(map(is_option, words)), runs and any(each.endswith((".yaml", ".yml", ".json")) for each in words)


def _sizes(words: list[str]) -> tuple[tuple[str, str], ...]:
    """The sizes of a training that a command starts, with their options; empty for any other command."""
    own = options_of(words) if _num_options(words)[0] else {}
    sizes = tuple((key, str(own[key])) for key in NAMES["sizes_of_trainings"] if key in own)
    return sizes if len(sizes) > 1 and not own.keys().isdisjoint(NAMES["of_trainings"]) else ()


def is_option(word: str) -> bool:
    """Whether a word is an option such as `--seq-length` or an override such as `model.num_layers=4`."""
    return word.startswith("--") or re.match(r"\+{0,2}[A-Za-z_]\w*(\.\w+)*=", word) is not None


def _unwrapped(words: Iterable[str]) -> Iterable[str]:
    """The words, with a quoted command (`bash -c "..."`) split into its own words."""
    for word in words:
        if " " in word.strip() and (re.search(r"(^|\s)--\w", word) or re.search(r"\s\w+\.\w[\w.]*=", word)):
            try:
                yield from shlex.split(word)
            except ValueError:
                yield from word.split()
        else:
            yield word


def options_of(words: Sequence[str]) -> dict[str, Value]:
    """Options of a command as keys and values; a launcher's numbers of hosts and ranks get our own keys.

    Keys have `_` instead of `-`. The last of several options with the same name wins, as in argparse. An option without
    a value is True, and an option with several values is a tuple.
    """
    found: dict[str, Value] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word == "-np" or (word == "-n" and words[0].startswith("mpi")):  # of all hosts
            found |= dict.fromkeys([RANKS], words[place]) if place < len(words) else {}
        if not word.startswith("--") or len(word) < 3:
            continue
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while place < len(words) and not equals and not is_option(words[place]):
            if values and _STARTED.fullmatch(words[place]):
                break
            values.append(words[place])
            place += 1
        key = name.replace("-", "_")
        if key.startswith(tuple(NAMES["place"])):
            continue
        if key in NAMES["launcher"]:
            values = values[:1]
        told = True if not values else values[0] if len(values) == 1 else tuple(values)
        found[NAMES["launcher"].get(key, key)] = told
    return found


def with_ranks(found: Mapping[str, Value], words: Sequence[str], text: str) -> dict[str, Value]:
    """The options of a command, with the number of ranks that it starts; Kubeflow says it in variables.

    One rank that sees several devices has no number: the Trainer copies the model to each of them, and a `device_map`
    divides it (transformers 5.23, training_args.py, `n_gpu`).
    """
    first = next((word for word in words if word not in ("nohup", "exec", "time")), "")
    ranks = {len(each.strip(",").split(",")) for each in _SHOWN.findall(text)}
    if _OF_ONE.fullmatch(first) and "llamafactory.cli" not in words:
        ranks = {1} if first.endswith("torchrun") or max(ranks, default=1) == 1 else set()
    if "hostfile" in found and HOSTS not in found:  # how many hosts it names is not known
        return {key: value for key, value in found.items() if key != RANKS}
    said = "PET_N" in text or not {HOSTS, RANKS, "num_processes", "accelerate"}.isdisjoint([*found, *words])
    return dict(found) if said or len(ranks) != 1 else {**found, RANKS: ranks.pop()}


def overrides_of(words: Sequence[str]) -> dict[str, Value]:
    """The overrides `a.b.c=value` (Hydra or OmegaConf) and the options of a command line, as keys and values."""
    found = options_of(words)
    for word in words:
        if match := _OVERRIDE.fullmatch(word):
            found[match[1]] = match[2].strip("'\"")
    return {key: None if value in ("null", "None") else value for key, value in found.items()}


def document_of(text: str) -> dict[str, Any]:
    """The keys and values of a text in YAML or JSON."""
    text = text.expandtabs() if text.lstrip().startswith("{") else text
    return mapping_of(parse_yaml(text, THE_FILE, is_foreign=True).plain)


def mapping_of(found: Any, where: str = THE_FILE) -> dict[str, Any]:
    """What a file or a part of it holds, if these are keys and values.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(found, dict):
        raise InputError("expected keys and values", where=where)
    return found
