"""The output of `planner emit`: the files of a program, the start script, and the plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.emit.programs import PROGRAMS
from planner.emit.settings import field_of
from planner.emit.start import Start
from planner.emit.starters import STARTERS
from planner.emit.target import Given, How, refusals, values_of
from planner.errors import InputError
from planner.plan import folder_for, write_plan, write_text
from planner.run_arguments import RunArguments, option_name
from planner.specs.by_name import other_engines
from planner.specs.text import any_of
from planner.specs.training import OF_THE_RUN, TrainingSpec
from planner.verdict import check_fits, check_schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.emit.target import Target
    from planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Files that run a plan.

    texts: file name -> text.
    script: the name of the file that a user starts.
    still_yours: placeholder -> meaning; the program does not run until the user has replaced all placeholders.
    advice: sentences about values that nobody gave; the program also runs without these values.
    """

    texts: dict[str, str]
    script: str
    still_yours: dict[str, str]
    advice: tuple[str, ...] = ()


def target_of(plan: Plan, to: str | None, tell: Callable[[str], None] = lambda _: None) -> Target:
    """The program that runs a plan: `to`, or by default the first program in the engine's profile.

    If this default refuses the plan and its `otherwise` does not, that one runs it; `tell` is called with the reason.

    Raises:
        InputError: the profile of the plan's engine does not name the program `to`, or names no program at all.
    """
    emits = [each for each in plan.engine.emits if each in PROGRAMS]
    if not emits:
        hint = "its layout can be explained; plan again with another --engine to carry it out"
        raise InputError(f"nothing can be emitted for engine {plan.engine.name} ({plan.engine.program})", hint=hint)
    if (name := to or emits[0]) not in emits:
        own = "plan from the program's own file: `planner plan --from FILE`"
        again = other_engines("plan again with ", lambda engine: name in engine.emits) or own
        wanted = f"`planner emit PLAN --to {emits[0]}` writes what runs it, or {again}"
        raise InputError(f"the plan is made for {plan.engine.name}, and {name} is another program", hint=wanted)
    target = PROGRAMS[name]
    faults = refusals(target, plan) if to is None and target.otherwise in emits else []
    if faults and not refusals(PROGRAMS[target.otherwise], plan):
        tell(f"{target.name} does not run this plan: {faults[0][0]}; these are files of {target.otherwise}")
        return PROGRAMS[target.otherwise]
    return target


def bundle_of(
    plan: Plan,
    to: str | None = None,
    on: str = "torchrun",
    *,
    how: How,
    force_unfit: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """All files that run a plan, without the plan itself; data and tokenizer are given as absolute paths.

    tell: called with a warning if the plan may not fit, or if another program than the default runs it.

    Raises:
        InputError: the program or the starter cannot express the plan; the message names the field and the option to
            plan with.
        NothingFitsError: the plan does not fit, and `force_unfit` is false.
    """
    target = target_of(plan, to, tell)
    check_schedule(plan)
    check_fits(plan, force_unfit=force_unfit, tell=tell)
    how = replace(how, arguments=_absolute(_taken(target, how.arguments), hub=target.name != "torch"))
    yours = {**target.yours(plan, how), **STARTERS[on].yours}
    start = Start(plan=plan, target=target, values=values_of(target, plan), how=how)
    texts = {**target.render(start.values, plan, how), **STARTERS[on].write(start)}
    advice = (*_defaults_in(plan), *not_carried(target, plan, how), *target.advice(plan, how))
    return Bundle(texts=texts, script=STARTERS[on].script, still_yours=yours, advice=advice)


_RARELY_MEANT: Final = {"learning_rate": "learning rate", "warmup_steps": "warm-up steps", "steps": "steps"}


def _defaults_in(plan: Plan) -> tuple[str, ...]:
    """A sentence that lists the values of the run that equal the planner's defaults; perhaps nobody chose them.

    A plan does not say whether the user gave a value, so the sentence claims neither.
    """
    default = {name: TrainingSpec.model_fields[name].default for name in _RARELY_MEANT}
    names = [name for name in _RARELY_MEANT if getattr(plan.training, name) == default[name]]
    names = [name for name in names if name != "steps" or plan.training.epochs is None]
    if not names:
        return ()
    shown = ", ".join(f"{_RARELY_MEANT[name]} {default[name]:g}" for name in names)
    sets = " ".join(f"--set training.{name}=..." for name in names)
    return (f"{shown}: equal to the defaults; where nobody chose them, {sets}",)


def not_carried(target: Target, plan: Plan, how: How) -> tuple[str, ...]:
    """A sentence for each value of the run that the emitted files do not carry, with the value that they run with.

    The program's own table reads what it wrote, as it reads the files of other authors.
    """
    given = Given(values_of(target, plan), model=plan.model, num_devices=plan.layout.world_size)
    found: dict[str, Any] = {}
    for setting in target.settings:
        if setting.read and any(path in _PATHS for path in setting.says):
            found |= {path: _PATHS[path] for path in setting.says if path in _PATHS} | dict(setting.read(given))
    if how.smoke or how.arguments.weights:
        found.pop("training.weights", None)
    sentences = []
    for path in _PATHS.keys() & found.keys():
        own, value = field_of(plan, path), _shown(found[path])
        if path == "training.epochs" and found[path] is None:
            value = f"steps={plan.training.steps}"
        is_moot = own is None or (path == "training.steps" and plan.training.epochs)
        if not is_moot and value != _shown(own):
            sentences.append(f"{path}={_shown(own)}, which {target.name} is not told; it has {value}")
    return tuple(sorted(sentences))


_PATHS: Final = {f"training.{name}": TrainingSpec.model_fields[name].default for name in OF_THE_RUN}


def _shown(value: Any) -> str:
    """The value as text, with the digits that count when a value that was read is compared with the one written."""
    return "none" if value is None else f"{value:.6g}" if isinstance(value, int | float) else str(value)


def _taken(target: Target, arguments: RunArguments) -> RunArguments:
    """The run's options, unchanged; InputError if the program does not support one of them."""
    given = {each.name for each in fields(RunArguments) if getattr(arguments, each.name) != each.default}
    if foreign := sorted(option_name(name) for name in given - set(target.takes)):
        takes = any_of([option_name(name) for name in target.takes]) or "no options of a run"
        hint = f"it takes {takes}; its own options stand behind those of the script"
        raise InputError(f"{', '.join(foreign)}: of the planner's own trainer", where=f"--to {target.name}", hint=hint)
    return arguments


def write_bundle(
    plan: Plan,
    folder: Path,
    to: str | None = None,
    on: str = "torchrun",
    *,
    how: How | None = None,
    force: bool = False,
    force_unfit: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[Path, ...], Bundle]:
    """Write the plan and its files into a folder, which is created if missing; returns the paths, with the script last.

    Raises:
        InputError: as `bundle_of`; or a path exists and `force` is false, or is not a file. Nothing is written then.
        NothingFitsError: as `bundle_of`.
        EnvironmentProblem: the folder cannot be written.
    """
    made = bundle_of(plan, to, on, how=how or How(), force_unfit=force_unfit, tell=tell)
    plan_path = folder / "plan.json"
    texts = {folder / name: text for name, text in sorted(made.texts.items(), key=lambda each: each[0] == made.script)}
    for path in (plan_path, *texts):
        if path.exists() and not (force and path.is_file()):
            why = "exists" if path.is_file() else "is not a file"
            raise InputError(f"{path} {why}", hint="add --force to replace a file, or choose another folder")
    with folder_for(folder):
        write_plan(plan, plan_path, replace=force)
        for path, text in texts.items():
            write_text(path, [text], replace=force)
            if text.startswith("#!"):
                path.chmod(0o755)
    return (plan_path, *texts), made


def _absolute(arguments: RunArguments, *, hub: bool) -> RunArguments:
    """The arguments with absolute paths; names on the Hub stay unchanged.

    hub: whether the program looks up a tokenizer or weights, such as `meta-llama/Meta-Llama-3-70B`, on the Hub.
    """
    data = tuple(each if each.startswith("hf:") else str(Path(each).absolute()) for each in arguments.data)
    given = {each.name: getattr(arguments, each.name) for each in fields(arguments)}
    paths: dict[str, Any] = {
        name: path.absolute()
        for name, path in given.items()
        if isinstance(path, Path) and not (hub and name in ("tokenizer", "weights") and _is_hub_name(path))
    }
    return replace(arguments, data=data, **paths)


def _is_hub_name(path: Path) -> bool:
    """Whether a path does not exist and has the form of a Hub name, `ORGANIZATION/NAME`."""
    return not path.is_absolute() and len(path.parts) == 2 and path.parts[0] not in (".", "..") and not path.exists()
