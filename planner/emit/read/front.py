"""Read another program's files into a model, a layout and settings; list what is assumed and what is not priced.

No part of a file is run.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, replace
from functools import partial
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import names_beside
from planner.emit.programs import PROGRAMS
from planner.emit.read import HOSTS, METHOD, MODEL, OF_RECIPE, RANKS
from planner.emit.read.conditions import UNSET
from planner.emit.read.facts import facts_of
from planner.emit.read.files import File, Run, in_folder, opened, readable
from planner.emit.read.methods import check_method, method_of, settled, with_method
from planner.emit.read.slurm import variables_of
from planner.emit.target import matches
from planner.errors import InputError
from planner.layout import Assumed
from planner.specs.by_name import load_engine, load_model, model_names
from planner.specs.mistakes import Mistakes
from planner.specs.model import ModelSpec
from planner.specs.recipe import NAMED_RECIPES
from planner.specs.text import printable
from planner.specs.training import OF_THE_RUN, TrainingSpec
from planner.specs.validate import validate
from planner.specs.yaml import as_node, parse_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from planner.emit.read import Reader
    from planner.emit.target import Doubt, Value, Values

_LEFT_BEHIND: Final = ("lora_alpha", "lora_dropout", "num_epochs", "total_epochs")
"""Keys without a field in a plan: the scaling of adapters, and epochs of programs other than the Trainer."""
_OF_THE_RATE: Final = re.compile(r"lr_|warmup|decay|epoch")
"""Matches keys of the run that are not carried; their values are shown."""
_WRITTEN: Final = re.compile(r"accelerate\.(?!dynamo)")
"""Matches keys of Accelerate's own file, which `planner emit` writes anew."""
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
    paths: Path | Sequence[Path],
    *,
    model: str | None = None,
    define: Sequence[str] = (),
    args: str | None = None,
    settings: Sequence[str] = (),
    ignore: Sequence[str] = (),
    engine: str | None = None,
    num_devices: int = 0,
    per_host: int = 0,
    is_sized: bool = False,
) -> Foreign:
    """Read the files of one run of another program; the path `-` is standard input.

    model: replaces the model that the files describe.
    define: `NAME=VALUE` for variables that a script does not set.
    args: arguments of a script, as shell words.
    settings: `model.KEY=VALUE` for model fields that the options in the files do not give; those of other documents
        settle keys that have no price.
    ignore: keys, or patterns of keys, to price the files without.
    engine: replaces the program's own profile.
    num_devices: number of the job's devices, for files without a number of devices.
    per_host: number of devices of a host, for files that give their launcher only a number of hosts.
    is_sized: whether the user gave the number of devices, which then replaces the files' number.

    Raises:
        InputError: values that cannot be read, or values that the files lack and the user must give as options.
        EnvironmentProblem: a file cannot be read.
    """
    sized = num_devices // per_host if is_sized and per_host else 0
    sources = [paths] if isinstance(paths, Path) else paths
    folders = [path for path in sources if isdir(path)]  # noqa: PTH112 - it accepts names of any length
    beside = (file for path in folders if (file := readable(path / "config.json")))
    model = model or next((str(file.path) for file in beside if '"model_type"' in file.text), None)
    place = Run([file for path in sources for file in (in_folder(path) if path in folders else [opened(path)])])
    reader, values = place.read(lambda text: _with_variables(text, define, args, sized))
    shown = place.shown
    _check_defined(define, place.files)
    ignored = [pattern for each in ignore for pattern in (each, f"*.{each}")]
    values = dict(with_method("\n".join(each.text for each in place.files), values))
    place.of(partial(check_method, values, ignored))
    objective = method_of(values, ignored)
    every, values = values, {key: value for key, value in values.items() if key not in objective.read - {METHOD}}
    hosts, ranks, name, method = (values.pop(key, None) for key in (HOSTS, RANKS, MODEL, METHOD))
    if reader.is_shell and not is_sized:
        _check_size({"hosts": hosts, "ranks of a host": ranks}, shown)
    profile = load_engine(engine or place.of(partial(reader.engine, values)))
    spec = _model(reader, values, model, name, settings, place)
    told_devices = (1 if hosts is None else _count(hosts)) * _count(ranks)
    in_use = num_devices if is_sized else told_devices or _count(hosts) * per_host or num_devices
    read = partial(facts_of, reader.target, values, model=spec, num_devices=in_use, per_host=per_host)
    facts = place.of(partial(read, ignored=ignored, options=reader.options))
    training, assumed = dict(facts.of("training")), []
    if any(each.startswith("training.steps=") for each in settings):
        training.pop("epochs", None)
    given = {each.partition("=")[0] for each in settings} | ({"model"} if model else set())
    training, memory = place.of(partial(settled, objective, training, every, reader.answer, given))
    weights = () if name is None or "weights" in training else (f"weights={printable(str(name), 80)}",)
    kept = profile.memory.states["fp32" if training.get("precision") == "fp32" else "mixed"]
    if NAMED_RECIPES.get(str(training.get("memory_recipe"))) == kept:
        del training["memory_recipe"]  # the engine's default
    layout = {key: _text(value) for key, value in facts.of("layout").items()}
    filled = {"engine": profile.name, **dict.fromkeys(_DEGREES, "1"), **layout}
    rules = {key: rule for key, rule in reader.assumed(values).items() if key != "ep" or spec.moe}
    assumed += [_filled(key, filled[key], rule) for key, rule in rules.items() if key in filled]
    doubts = {**objective.doubts, **facts.doubts}
    assumed += [_open(key, every.get(key), why) for key, why in doubts.items() if why.field not in given]
    assumed += _left_out(
        ignore, {key: values[key] for key in facts.not_carried} | ({METHOD: method} if method else {}) | {MODEL: name}
    )
    assumed += [_assumed(each, facts.misspelt) for each in facts.not_priced if not _is_off(each)]
    assumed += _of_another_model(reader, values, spec) if model else []
    if not is_sized and _count(hosts) > 1 and _count(ranks) not in (0, per_host) and per_host:
        rule = f"hosts are used whole; the file starts {_count(ranks)} ranks on each of {_count(hosts)}"
        assumed.append(Assumed(key="hosts", value=str(-(-told_devices // per_host)), rule=rule))
    own = next((name for each in profile.emits if (name := f"{reader.writes}-{each}") in PROGRAMS), None)
    # by default, plans are written as the files that were read, whose programs recompute all layers or none
    written = {"emits": (own, *profile.emits), "can.recompute_some": ()} if own else {}
    return Foreign(
        program=reader.name,
        engine=profile.name,
        model=spec,
        layout=layout,
        settings=(
            *(f"training.{key}={_setting(value)}" for key, value in training.items()),
            *(f"engine.{key}={_setting(value)}" for key, value in (facts.of("engine") | memory | written).items()),
        ),
        num_hosts=_count(hosts),
        num_devices=told_devices,
        assumed=tuple(assumed),
        left_behind=(*weights, *_left_behind(values, facts.not_carried, training)),
        lacks=reader.lacks,
    )


_DEGREES: Final = ("tp", "pp", "cp", "ep")


def _check_defined(define: Sequence[str], files: Sequence[File]) -> None:
    """Refuse a definition that no file of the run reads, or that a script replaces: it would change nothing."""
    names = [name for each in define if not (name := each.partition("=")[0]).isdigit()]
    text = "\n".join(each.text for each in files)
    for name in names:
        unknown = rf".*\b{re.escape(name)}\b|\"?(?:\$\((?!\()|`)"  # the variable itself, or a command's output
        if re.search(rf"^(?:export )?{re.escape(name)}=(?!{unknown})", text, re.MULTILINE):
            words = f"the file itself sets {printable(name, 80)}, after the definition"
            raise InputError(words, where="--define", hint="change the file, or --set or --layout the value")
    if unread := [name for name in names if not re.search(rf"\$\{{?{re.escape(name)}\b", text)]:
        words = f"no file of the run reads the variable {printable(', '.join(unread), 80)}"
        raise InputError(words, where="--define", hint="--set or --layout changes a value that the file itself states")


def _with_variables(text: str, define: Sequence[str], args: str | None, hosts: int) -> str:
    """The script; its first line now sets Slurm's variables, the `--define` variables, and the arguments."""
    slurm = (f"{name}={value}" for name, value in variables_of(text, hosts).items())
    try:
        placed = dict(enumerate(shlex.split(args or ""), 1))
    except ValueError as error:
        raise InputError(str(error), where="--args", hint="quote the arguments as for a shell") from None
    lines = []
    for each in (*slurm, *define):
        name, equals, value = each.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*|[1-9][0-9]?", name):
            raise InputError(f"{printable(each, 60)} defines no variable", where="--define", hint="as in TP=8")
        if name.isdigit():
            placed[int(name)] = value
        else:
            lines.append(f"export readonly {name}={shlex.quote(value)}; ")
    if placed or args is not None:
        every = range(1, max(placed, default=0) + 1)
        words = (shlex.quote(placed[place]) if place in placed else f'"${{{place}}}"' for place in every)
        lines.append(f"set -- {' '.join(words)}; ")
    return "".join(lines) + text


_ALL_OF_A_HOST: Final = ("gpu", "auto", "-1")
"""Numbers of ranks that mean every device of a host. Source: torch, distributed/run.py, determine_local_world_size."""


def _check_size(sizes: Mapping[str, Value], shown: str) -> None:
    """Refuse numbers of hosts and ranks that cannot be read, because a size must not be guessed."""
    mistakes = Mistakes()
    for what, value in sizes.items():
        if value is None or _count(value) or value in _ALL_OF_A_HOST:
            continue
        text = str(value)
        variable = re.fullmatch(r"\$\{?([A-Za-z_]\w*|[0-9]{1,2})\}?", text)
        defined = f"--define {variable[1]}=N or " if variable else ""
        why = "which the file does not set" if UNSET.search(text) else "which is no number"
        option = "--nodes N" if what == "hosts" else "--gpus N (of all hosts)"
        mistakes.add(f"the number of {what} is {printable(text, 60)}, {why}", shown, f"{defined}{option} says it")
    mistakes.raise_if_any()


def _model(
    reader: Reader, values: Values, wanted: str | None, name: Value, settings: Sequence[str], place: Run
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
    """The value of a model's field, with numbers for texts that are one."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return parse_value(value, "the file").plain if isinstance(value, str) and _NUMBER.fullmatch(value) else value


_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def shipped_model(name: str) -> str | None:
    """The shipped model for a name on the Hub such as `Qwen/Qwen2.5-7B-Instruct`; None if there is none."""
    last = plain = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    for pattern, other in _OTHER_NAMES.items():
        plain = re.sub(pattern, other, plain)
    wanted = {each.replace(".", "-") for each in (last, plain)}
    return next((known for known in model_names() if known.replace(".", "-") in wanted), None)


_OTHER_NAMES: Final[dict[str, str]] = names_beside(__file__)["names"]
"""Pattern of a name on the Hub -> the name here of a model with the same shapes, replaced one after another."""


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
        elif key == "attn_implementation" and str(value).startswith("flash"):
            yield printable(f"{key}={value} (emitted files name sdpa, or the one kernel that a model has)", 120)
        elif key in not_carried and not _is_off(f"={value}") and not _WRITTEN.match(key):
            yield printable(f"{key}={value}" if _OF_THE_RATE.search(key) else key, 80)
    if "per_device_train_batch_size" in values and str(values.get("packing")).lower() not in ("true", "1", "yes"):
        yield "packing=false"  # the emitted train.py packs samples, as the price assumes
    known = {*training, "learning_rate", "warmup_steps", "steps"}  # emit says these itself
    if unstated := [name for name in OF_THE_RUN if name not in known and TrainingSpec.model_fields[name].default]:
        shown = " ".join(f"{name}={TrainingSpec.model_fields[name].default}" for name in unstated)
        yield f"what the file does not say and a plan does ({shown})"


def _is_off(text: str) -> bool:
    return text.rpartition("=")[2].lower() in _OFF


def _line(key: str, value: Value, rule: str, kind: Any = "assumed", settled_by: str = "") -> Assumed:
    """A line about a key of the file, whose texts are cut."""
    shown = {"key": printable(key, 80), "value": printable(_text(value), 80) or "-"}
    return Assumed(rule=rule, kind=kind, settled_by=printable(settled_by, 100), **shown)


def _filled(key: str, value: str, rule: str) -> Assumed:
    """A key that the file leaves open; what a recipe holds leaves the verdict unknown."""
    return _line(key, value, rule, *(("open", f"--layout {key}=...") if rule == OF_RECIPE else ()))


def _open(key: str, value: Value, doubt: Doubt) -> Assumed:
    """A key that leaves the verdict unknown, with the option that settles it."""
    document, _, name = doubt.field.partition(".")
    settles = {"": f"--ignore {key}", "layout": f"--layout {name}=...", "model": "--model ..."}
    return _line(key, value, doubt.why, "open", settles.get(document, f"--set {doubt.field}=..."))


def _left_out(ignore: Sequence[str], harmless: Mapping[str, Value]) -> Iterator[Assumed]:
    """The keys that `--ignore` leaves out of the price.

    Raises:
        InputError: a pattern fits no key without a price.
    """
    for each in ignore:
        found = [key for key in harmless if matches(key, (each, f"*.{each}"))]
        if not found:
            hint = "a key with a price is changed by --layout or --set"
            raise InputError(f"the file has no key {printable(each, 60)} without a price", where="--ignore", hint=hint)
        yield from (_line(key, harmless[key], "--ignore") for key in found)


def _assumed(text: str, misspelt: Mapping[str, str]) -> Assumed:
    key, _, value = text.partition("=")
    if key in misspelt:
        return _line(key, value, f"did you mean {misspelt[key]}?", "misspelt")
    return _line(key, value, "it changes no figure", "not priced")


_SHAPE: Final = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "vocab_size")


def _of_another_model(reader: Reader, values: Values, spec: ModelSpec) -> list[Assumed]:
    """A line for the sizes in the file that differ from the sizes of `--model`; the sizes of `--model` are used."""
    try:
        said = facts_of(reader.target, values, of_model=True).of("model")
    except InputError:
        return []
    sizes = {key: _plain(str(said[key])) for key in _SHAPE if key in said}
    other = ", ".join(f"{key} {size}" for key, size in sizes.items() if size != getattr(spec, key))
    return [Assumed(key="model", value=spec.name, rule=f"--model; not the file's {other}")] if other else []


def with_layout(foreign: Foreign, text: str) -> Foreign:
    """The same foreign file, with the values of a `--layout` text replacing the values of the file.

    Raises:
        InputError: neither says any degree, because all are those of a recipe.
    """
    from planner.layout_text import parse_assignments

    given = parse_assignments(text, "--layout")
    settled = {f"--layout {key}=..." for key in given}
    assumed = tuple(
        replace(each, settled_by="", rule="decided by --layout", kind="assumed") if each.settled_by in settled else each
        for each in foreign.assumed
        if each.key not in given
    )
    if {"tp", "pp", "cp"} <= {each.key for each in assumed if each.rule == OF_RECIPE}:
        hint = "--layout tp=N,pp=N,cp=N says it; `planner plan --from` finds one"
        raise InputError("the layout is that of a recipe, which only the program knows", where="--layout", hint=hint)
    return replace(foreign, layout={**foreign.layout, **given}, assumed=assumed)


def layout_text(foreign: Foreign) -> str:
    """The layout in the syntax of `--layout`."""
    return ",".join(f"{key}={value}" for key, value in foreign.layout.items())
