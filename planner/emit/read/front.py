"""Read another program's file into a model, a layout and settings; list what is assumed and what is not priced."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planner.emit.read import HOSTS, MODEL, RANKS, THE_FILE
from planner.emit.read.all import READERS
from planner.emit.read.shell import UNSET
from planner.emit.read.slurm import variables_of, with_srun
from planner.emit.target import facts_of
from planner.errors import InputError, Mistake
from planner.layout import NOT_PRICED, UNKNOWN, Assumed
from planner.specs.by_name import load_engine, load_model, model_names
from planner.specs.files import kind_of, limited_text
from planner.specs.model import ModelSpec
from planner.specs.recipe import NAMED_RECIPES
from planner.specs.text import printable
from planner.specs.training import OF_THE_RUN, TrainingSpec
from planner.specs.validate import validate
from planner.specs.yaml import as_node, parse_value, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from planner.emit.read import Reader
    from planner.emit.target import Facts, Value, Values

_LEFT_BEHIND: Final = ("lora_alpha", "lora_dropout", "num_epochs", "total_epochs")
"""Keys without a field in a plan: the scaling of adapters, and epochs of programs other than the Trainer."""
_OF_THE_RATE: Final = re.compile(r"lr_|warmup|decay|epoch")
"""Matches keys of the run that are not carried; their values are shown."""
_OFF: Final = ("false", "none", "null", "no", "off", "()", "[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """The content of another program's file, in the planner's terms.

    layout: keys and values for `--layout`.
    settings: `key=value` texts for `--set`.
    num_hosts, num_devices: numbers that the file gives its launcher, or 0.
    assumed: keys of the file that are not priced.
    left_behind: keys that have no field in a plan and do not change its cost.
    lacks: degrees of a layout that the program's own files have no key for.
    """

    program: str
    engine: str
    model: ModelSpec
    layout: Mapping[str, str]
    settings: tuple[str, ...]
    num_hosts: int
    num_devices: int
    assumed: tuple[Assumed, ...]
    left_behind: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


def read_foreign(
    path: Path,
    *,
    model: str | None = None,
    define: Sequence[str] = (),
    settings: Sequence[str] = (),
    engine: str | None = None,
    num_devices: int = 0,
    per_host: int = 0,
    is_sized: bool = False,
) -> Foreign:
    """Read a file of another program, or standard input if the path is `-`.

    model: replaces the model that the file describes.
    define: `NAME=VALUE` for variables that the file does not set.
    settings: `model.KEY=VALUE` for model fields that the options in the file do not give.
    engine: replaces the program's own profile.
    num_devices: number of the job's devices, for a file without a number of devices.
    per_host: number of devices of a host, for a file that gives its launcher only a number of hosts.
    is_sized: whether the user gave the number of devices, which then replaces the file's number.

    Raises:
        InputError: values that cannot be read, or values that the file lacks and the user must give as options.
        EnvironmentProblem: the file cannot be read.
    """
    is_stream = str(path) == "-"
    shown = "standard input" if is_stream else printable(str(path), 1000)
    text = limited_text(sys.stdin.buffer, shown) if is_stream else read_text(path, shown)
    reader = _reader_of(shown, text)
    try:
        sized = num_devices // per_host if is_sized and per_host else 0
        values = dict(reader.values(_with_variables(text, define, sized) if reader.is_shell else text))
    except InputError as error:
        raise InputError(
            *(replace(each, where=each.where.replace(THE_FILE, shown)) for each in error.mistakes)
        ) from None
    if reader.is_shell:
        values = with_srun(text, values)
    hosts, ranks, name = (values.pop(key, None) for key in (HOSTS, RANKS, MODEL))
    if reader.is_shell and not is_sized:
        _check_size({"hosts": hosts, "ranks of a host": ranks}, shown)
    _check_set(reader, values, shown)
    profile = load_engine(engine or reader.engine(values))
    place = _Place(text, shown)
    spec = _model(reader, values, model, name, settings, place)
    told_devices = (1 if hosts is None else _count(hosts)) * _count(ranks)
    in_use = num_devices if is_sized else told_devices or _count(hosts) * per_host or num_devices
    facts = place.of(partial(facts_of, reader.target, values, model=spec, num_devices=in_use))
    training, assumed = dict(facts.of("training")), []
    if any(each.startswith("training.steps=") for each in settings):
        training.pop("epochs", None)
    weights = () if name is None or "weights" in training else (f"weights={printable(str(name), 80)}",)
    kept = profile.memory.states["fp32" if training.get("precision") == "fp32" else "mixed"]
    if NAMED_RECIPES.get(str(training.get("memory_recipe"))) == kept:
        del training["memory_recipe"]  # the engine's default
    layout = {key: _text(value) for key, value in facts.of("layout").items()}
    assumed += [_assumed(each, facts.misspelt) for each in facts.not_priced if not _is_off(each)]
    assumed += _of_another_model(reader, values, spec) if model else []
    if not is_sized and _count(hosts) > 1 and _count(ranks) not in (0, per_host) and per_host:
        rule = f"hosts are used whole; the file starts {_count(ranks)} ranks on each of {_count(hosts)}"
        assumed.append(Assumed(key="hosts", value=str(-(-told_devices // per_host)), rule=rule))
    return Foreign(
        program=reader.name,
        engine=profile.name,
        model=spec,
        layout=layout,
        settings=(
            *(f"training.{key}={_setting(value)}" for key, value in training.items()),
            *(f"engine.{key}={_setting(value)}" for key, value in facts.of("engine").items()),
        ),
        num_hosts=_count(hosts),
        num_devices=told_devices,
        assumed=tuple(assumed),
        left_behind=(*weights, *_left_behind(values, facts.not_carried, training)),
        lacks=reader.lacks,
    )


class _Place(NamedTuple):
    """The text and name of a file, to give a mistake about a key the file's name and the line."""

    text: str
    shown: str

    def of(self, read: Callable[[], Facts]) -> Facts:
        """The result of `read`; mistakes about a key name the key, the file and the line."""
        try:
            return read()
        except InputError as error:
            raise InputError(*map(self._placed, error.mistakes)) from None

    def _placed(self, mistake: Mistake) -> Mistake:
        line = next(filter(None, map(self._line, (mistake.where, mistake.where.rpartition(".")[2]))), 0)
        where = f"{self.shown}:{line}" if line else self.shown
        key = f"{mistake.where}: " if mistake.where else ""
        return replace(mistake, message=f"{key}{mistake.message}", where=where)

    def _line(self, key: str) -> int:
        """The last line that has the key outside comments, as an option or in YAML; 0 if there is none."""
        spelled = re.compile(rf"(?<![\w-])(--)?{re.escape(key).replace('_', '[-_]')}(?![\w-])")
        lines = enumerate(self.text.split("\n"), 1)
        return max((number for number, line in lines if spelled.search(re.split(r"(?:^|\s)#", line)[0])), default=0)


def _reader_of(shown: str, text: str) -> Reader:
    for reader in READERS:
        if reader.recognises(shown, text):
            return reader
    if kind_of(shown, text) == "a plan":
        raise InputError(f"{shown} is a plan", hint=f"`planner explain {shown}` explains it, without --from")
    kinds = "; ".join(dict.fromkeys(reader.name for reader in READERS))
    raise InputError(f"{shown} is of no kind that is known here", hint=f"known: {kinds}")


def _with_variables(text: str, define: Sequence[str], hosts: int) -> str:
    """The script; its first line now begins with assignments of Slurm's variables and of the `--define` variables."""
    slurm = (f"{name}={value}" for name, value in variables_of(text, hosts).items())
    return _defined((*slurm, *define)) + text


def _defined(define: Sequence[str]) -> str:
    lines = []
    for each in define:
        name, equals, value = each.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*|[0-9]{1,2}", name):
            raise InputError(f"{printable(each, 60)} defines no variable", where="--define", hint="as in TP=8")
        lines.append(f"{name}={shlex.quote(value)}; ")
    return "".join(lines)


_ALL_OF_A_HOST: Final = ("gpu", "auto", "-1")
"""Numbers of ranks that mean every device of a host. Source: torch, distributed/run.py, determine_local_world_size."""


def _check_size(sizes: Mapping[str, Value], shown: str) -> None:
    """Refuse numbers of hosts and ranks that cannot be read, because a size must not be guessed."""
    mistakes = []
    for what, value in sizes.items():
        if value is None or _count(value) or value in _ALL_OF_A_HOST:
            continue
        text = str(value)
        variable = re.fullmatch(r"\$\{?([A-Za-z_]\w*|[0-9]{1,2})\}?", text)
        defined = f"--define {variable[1]}=N or " if variable else ""
        why = "which the file does not set" if UNSET.search(text) else "which is no number"
        option = "--nodes N" if what == "hosts" else "--gpus N (of all hosts)"
        mistakes.append(
            Mistake(
                message=f"the number of {what} is {printable(text, 60)}, {why}",
                where=shown,
                hint=f"{defined}{option} says it",
            )
        )
    if mistakes:
        raise InputError(*mistakes)


def _check_set(reader: Reader, values: Values, shown: str) -> None:
    """Refuse keys that affect the price if their value contains a shell variable that the file does not set."""
    mistakes = []
    for key, value in values.items():
        texts = [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, str)]
        unset = next((match for each in texts if (match := UNSET.search(each))), None)
        if unset is None or any(fnmatchcase(key, pattern) for pattern in reader.target.ignores):
            continue
        name = printable(" ".join(texts), 60)
        hint = "--define NAME=VALUE sets a variable of the file" if reader.is_shell else "write the value in its place"
        mistakes.append(
            Mistake(message=f"{printable(key, 80)} is {name}, which the file does not set", where=shown, hint=hint)
        )
    if mistakes:
        raise InputError(*mistakes)


def _model(
    reader: Reader, values: Values, wanted: str | None, name: Value, settings: Sequence[str], place: _Place
) -> ModelSpec:
    """The model named by `--model`, else the model that the file describes, else the shipped model that it names."""
    if wanted is not None:
        return load_model(wanted)
    shown = place.shown
    said: dict[str, Any] = dict(place.of(partial(facts_of, reader.target, values, of_model=True)).of("model"))
    for each in settings:
        key, equals, value = each.partition("=")
        if equals and key.startswith("model.") and key.count(".") == 1:
            said[key.removeprefix("model.")] = parse_value(value, f"--set {each}").plain
    if "num_layers" in said:
        if "vocab_size" not in said:
            hint = "--set model.vocab_size=N says it, or --model names the whole model"
            raise InputError("the vocabulary is the tokenizer's, and its size is not said", where=shown, hint=hint)
        return validate(ModelSpec, as_node({"name": _name_of(shown), "architecture": "gpt", **_plain(said)}, shown))
    if name is not None and (shipped := shipped_model(str(name))):
        return load_model(shipped)
    what = f" but for the name {printable(str(name), 60)}" if name else ""
    raise InputError(f"the file does not describe the model{what}", where=shown, hint="--model names it")


def _name_of(shown: str) -> str:
    """A name for the model that a file describes: the file's name, with invalid characters replaced by `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", shown.rpartition("/")[2]).strip("-")[:64] or "model"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return _number(value) if isinstance(value, str) else value


def _number(text: str) -> Any:
    if re.fullmatch(r"[0-9]{1,15}", text):
        return int(text)
    try:
        return float(text) if re.match(r"[0-9.]", text) else text
    except ValueError:
        return text


def shipped_model(name: str) -> str | None:
    """The shipped model for a name on the Hub such as `Qwen/Qwen2.5-7B-Instruct`; None if there is none."""
    last = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    plain = re.sub(r"-(instruct|base|chat|hf|it|mcore|fp8|[0-9]{4}|v0\.\d|v\d\.\d)\b", "", last).replace("meta-", "")
    plain = plain.replace("moonlight-16b-a3b", "moonlight-16b")
    plain = re.sub(r"^(gemma)-(\d)", r"\1\2", plain)
    plain = re.sub(r"^(llama)-(\d)", r"\1\2", re.sub(r"^llama-?3\.1-", "llama3-", plain))
    return next((known for known in model_names() if known in (last, plain, plain.replace("llama-", "llama"))), None)


def _count(value: Value) -> int:
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0


def _text(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _setting(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(str, value)) + "]"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z][\w.+:/-]*", value):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _left_behind(values: Values, not_carried: Sequence[str], training: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if value and key.rpartition(".")[2] in _LEFT_BEHIND:
            yield printable(f"{key}={value}", 80)
        elif key in not_carried and not _is_off(f"={value}"):
            yield printable(f"{key}={value}" if _OF_THE_RATE.search(key) else key, 80)
    known = {*training, "learning_rate", "warmup_steps", "steps"}  # emit says these itself
    if unstated := [name for name in OF_THE_RUN if name not in known and TrainingSpec.model_fields[name].default]:
        shown = " ".join(f"{name}={TrainingSpec.model_fields[name].default}" for name in unstated)
        yield f"what the file does not say and a plan does ({shown})"


def _is_off(text: str) -> bool:
    return text.rpartition("=")[2].lower() in _OFF


def _assumed(text: str, misspelt: Mapping[str, str]) -> Assumed:
    key, _, value = text.partition("=")
    rule = f"{UNKNOWN}; did you mean {misspelt[key]}?" if key in misspelt else NOT_PRICED
    return Assumed(key=printable(key, 80), value=printable(value, 80) or "-", rule=rule)


_SHAPE: Final = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "vocab_size")


def _of_another_model(reader: Reader, values: Values, spec: ModelSpec) -> list[Assumed]:
    """A line for the sizes in the file that differ from the sizes of `--model`; the sizes of `--model` are used."""
    try:
        said = facts_of(reader.target, values, of_model=True).of("model")
    except InputError:
        return []
    sizes = {key: _number(str(said[key])) for key in _SHAPE if key in said}
    other = ", ".join(f"{key} {size}" for key, size in sizes.items() if size != getattr(spec, key))
    return [Assumed(key="model", value=spec.name, rule=f"--model; not the file's {other}")] if other else []


def with_layout(foreign: Foreign, text: str) -> Foreign:
    """The same foreign file, with the values of a `--layout` text replacing the values of the file."""
    from planner.layout import parse_assignments

    return replace(foreign, layout={**foreign.layout, **parse_assignments(text, "--layout")})


def layout_text(foreign: Foreign) -> str:
    """The layout in the syntax of `--layout`."""
    return ",".join(f"{key}={value}" for key, value in foreign.layout.items())
