"""LLaMA-Factory and Axolotl: plans of Accelerate and DeepSpeed in the keys of the programs that are built on them.

The document beside this module has the keys. Plans that are made from files of these programs are written so.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from planner.emit.hosts import yaml_file
from planner.emit.names import names_beside, refusals, refused, translated
from planner.emit.programs import accelerate, deepspeed
from planner.emit.programs.hugging_face import nested, yours
from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import How, Place, Target, Values
    from planner.plan import Plan


_NAMES: Final = names_beside(__file__)


def own_keys(form: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """The keys of the program's own file, nested, for keys and values of Accelerate's or DeepSpeed's table.

    `dtype` is only for runs without `bf16`: with it these programs load frozen weights in 16 bits by themselves.
    """
    values = {key: value for key, value in values.items() if key != "dtype" or not values["bf16"]}
    ratio = values.get("warmup_steps")
    if isinstance(ratio, float) and ratio < 1:
        values = {**{key: value for key, value in values.items() if key != "warmup_steps"}, "warmup_ratio": ratio}
    return nested({**form["adds"], **translated(values, form)})


def _render(form: Mapping[str, Any], base: Target, values: Values, plan: Plan, how: How) -> dict[str, str]:
    texts = {name: text for name, text in base.render(values, plan, how).items() if name in form["keeps"]}
    more = {"deepspeed": deepspeed.FILE} if deepspeed.FILE in texts else {}
    more |= {"weights": str(how.arguments.weights)} if how.arguments.weights else {}
    return {form["file"]: yaml_file(plan, own_keys(form, {**values, **more})), **texts}


def _command(form: Mapping[str, Any], base: Target, values: Values, plan: Plan, how: How, place: Place | None) -> str:
    base = base if accelerate.FILE in form["keeps"] else deepspeed.TARGET  # whose command is torchrun's
    started = base.command(values, plan, how, place)
    return started.replace("train.py training.yaml", f"-m {form['module']} {form['file']}")


def _yours(form: Mapping[str, Any], plan: Plan, how: How) -> dict[str, str]:
    if how.smoke:
        raise InputError("its data are files of your own", where="--smoke", hint="--to says another program")
    return {key: text for key, text in yours(plan, how).items() if "weights" in text} | dict(form["yours"])


def _target(name: str, form: Mapping[str, Any], base: Target) -> Target:
    refuse = refusals(_NAMES["refuses"] | form["refuses"])
    plans = (*_NAMES["refused"], *form.get("refused", {}).get(base.name, ()))
    return replace(
        base,
        name=f"{name}-{base.name}",
        program=f"{form['module'].partition('.')[0]}, with {base.program}",
        refuse=(*base.refuse, *refuse, *refused(plans)),
        otherwise=base.name,
        render=partial(_render, form, base),
        command=partial(_command, form, base),
        yours=partial(_yours, form),
        takes=("weights",),
        install=f"pip install {name}, and {base.install.removeprefix('pip install ')}",
    )


LLAMA_FACTORY, LLAMA_FACTORY_DEEPSPEED, AXOLOTL, AXOLOTL_DEEPSPEED = (
    _target(name, _NAMES[name], base)
    for name in ("llama-factory", "axolotl")
    for base in (accelerate.TARGET, deepspeed.TARGET)
)
