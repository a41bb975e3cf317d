"""Reader for torchtitan's files: TOML (releases up to 0.2), saved JSON, and the Python files of `planner emit`.

Each file is converted into the keys of the table. In Python files only literals are read, and nothing is run.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import names_beside, translated
from planner.emit.programs import torchtitan
from planner.emit.programs.hugging_face import flat
from planner.emit.read import MODEL, THE_FILE, Reader, has_all
from planner.emit.read.options import mapping_of, option_words, options_of
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.emit.target import Values

_PYTHON: Final = r"\A(?=[\s\S]*from torchtitan)[\s\S]*^def \w+\(\)"
_NAMES: Final = names_beside(__file__)


def _parsed(text: str) -> dict[str, Any]:
    """The sections of a file, with their keys and values."""
    try:
        if has_all((_PYTHON,), text):
            return _of_python(ast.parse(text))
        return mapping_of(json.loads(text)) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InputError(f"cannot be read: {what}", where=THE_FILE) from None


def _values(text: str) -> Values:
    sections = _parsed(text)
    spec, recompute = sections.get("model_spec"), sections.get("activation_checkpoint")
    groups = sections.get("optimizer")
    if isinstance(groups, dict) and isinstance(groups.get("param_groups"), list) and groups["param_groups"]:
        sections["optimizer"] = _of_group(groups["param_groups"])
    if isinstance(spec, dict):
        _of_first_layer(spec)
        sections["activation_checkpoint"] = _recompute(recompute)
    else:  # config/job_config.py of 0.2: every second layer by default
        given = recompute if isinstance(recompute, dict) else {}
        sections["activation_checkpoint"] = {"mode": "selective", "selective_ac_option": "2", **given}
    found = translated({key: value for key, value in flat(sections).items() if value is not None}, _NAMES["old"])
    entry = (found.get("model_spec.name"), found.get("model_spec.flavor"))
    shipped = next((name for name, each in torchtitan.REGISTRY.items() if each == entry), None)
    if "model_spec.shape.num_layers" in found and not shipped:
        found[MODEL] = str(entry[1])
    elif entry[0]:
        found = {key: value for key, value in found.items() if not key.startswith("model_spec.shape.")}
        found[MODEL] = shipped or "-".join(map(str, entry))
    return found


def _recompute(saved: Any) -> str:
    """The kind of recomputation, inferred from the fields that `saved` has.

    Source: distributed/activation_checkpoint.py.
    """
    if not saved or isinstance(saved, str):
        return saved or "none"
    return next((kind for field, kind in _NAMES["recompute"].items() if field in saved), "FullAC")


def _of_first_layer(spec: dict[str, Any]) -> None:
    """Replace a saved model by the table's keys; all its layers are assumed to equal the first layer."""
    model = spec.pop("model", None)
    layers = model.get("layers") if isinstance(model, dict) else None
    if not isinstance(layers, list) or not layers:
        return
    for part in ("rope", "norm"):
        if isinstance(inner := _at(layers[0], _NAMES[part]), dict):
            old = inner.get("max_seq_len")
            spec[part] = inner | ({"max_context_length": old} if old else {})
    if spec.get("name") in ("llama3", "qwen3"):
        shape = {key: _at(layers[0], path) for key, path in _NAMES["shape"].items()}
        shape |= {"qk_norm": shape["qk_norm"] is not None, "num_layers": len(layers)}
        shape |= {key: model.get(name) for key, name in _NAMES["whole"].items()}
        spec["shape"] = {key: value for key, value in shape.items() if value is not None}


def _at(found: Any, paths: str) -> Any:
    """The value at the first of the dotted paths, with blanks between them, that has one other than 0 and false."""
    for path in paths.split():
        inner = found
        for name in path.split("."):
            inner = inner.get(name) if isinstance(inner, dict) else None
        if inner:
            return inner
    return None


def _of_group(groups: list[Any]) -> dict[str, Any]:
    """The only parameter group of the optimizer; an optimizer with several groups is refused."""
    first = groups[0] if isinstance(groups[0], dict) else {}
    if len(groups) > 1:
        raise InputError("several groups of parameters have no price here", where="optimizer.param_groups")
    kwargs = first.get("optimizer_kwargs")
    return {**(kwargs if isinstance(kwargs, dict) else {}), "name": first.get("optimizer_name", "AdamW")}


# --- Python ------------------------------------------------------------------------------------------------------


def _of_python(tree: ast.Module) -> dict[str, Any]:
    """Literals in the call of `Trainer.Config`, and in the lines before this call that set the model."""
    found: dict[str, Any] = {}
    spec: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
            match := re.fullmatch(r"torchtitan\.models\.(\w+)", node.module or "")
        ):
            spec.update({} if match[1] == "common" else {"name": match[1]})
        elif isinstance(node, ast.Call) and (known := _ARGUMENTS.get(_name(node.func))):
            spec |= dict(zip(known, map(_literal, node.args), strict=False))
            spec |= {each.arg: _calls(each.value) for each in node.keywords if each.arg == "converters"}
            shape = {each.arg: _literal(each.value) for each in node.keywords if each.arg != "converters"}
            spec |= {"shape": shape} if "name" in known else {}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            part, key = _name(node.targets[0].value), node.targets[0].attr
            spec.setdefault(part, {})[{"max_seq_len": "max_context_length"}.get(key, key)] = _literal(node.value)
        elif isinstance(node, ast.Call) and _name(node.func) == "Trainer.Config":
            found |= {str(each.arg): _section(each.value) for each in node.keywords if each.arg != "model_spec"}
    if "training" not in found:
        hint = "a configuration of your own: torchtitan saves it with --debug.save_config_file config.json"
        raise InputError("only Python that `planner emit` wrote can be read", where=THE_FILE, hint=hint)
    kind = found.get("activation_checkpoint", {})
    classes = {key: value.pop("", "") for key, value in found.items() if isinstance(value, dict)}
    found["activation_checkpoint"] = "none" if kind is None else classes["activation_checkpoint"]
    return {**found, "model_spec": spec}


_ARGUMENTS: Final = {"model_registry": ("flavor",), "model_of": ("name", "flavor")}


def _name(node: ast.expr) -> str:
    return ast.unparse(node)[:200]


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _calls(node: ast.expr) -> list[str]:
    """Names of the classes in a list of configurations."""
    each = node.elts if isinstance(node, ast.List) else []
    return [_name(call.func).removesuffix(".Config") for call in each if isinstance(call, ast.Call)]


def _section(node: ast.expr) -> Any:
    """The keywords of a configuration call, with the class name under the key ``""``; otherwise the literal."""
    if not isinstance(node, ast.Call):
        return _literal(node)
    return {"": _name(node.func).removesuffix(".Config")} | {str(key.arg): _literal(key.value) for key in node.keywords}


READER: Final = Reader(
    **_NAMES["readers"]["file"],
    values=_values,
    engine=lambda values: "torchtitan",  # noqa: ARG005 - as the others
    target=torchtitan.TARGET,
)

_FILE: Final = "job.config_file"


def _options(text: str) -> Values:
    """Options of a command line, which replace those of the file that it names."""
    found = {key: value for key, value in options_of(option_words(text)).items() if "." in key}
    if _FILE not in found or {"model.name", "model.flavor"} & found.keys():
        hint = "give the file that torchtitan saves with --debug.save_config_file config.json"
        raise InputError("the command line names a configuration in torchtitan's own code, which is not run", hint=hint)
    return found


COMMAND: Final = replace(READER, **_NAMES["readers"]["command"], values=_options, files={_FILE: _values}, is_shell=True)
