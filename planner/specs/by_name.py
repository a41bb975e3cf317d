"""Load models, engines, devices and corrections by their shipped name, and the user's own documents by path."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.errors import InputError
from planner.specs import library
from planner.specs.model import ModelSpec
from planner.specs.text import any_of, did_you_mean, printable, quoted
from planner.specs.validate import validate
from planner.specs.yaml import Node, WrongKind, read_yaml, shipped_yaml
from planner.units import whole_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.specs.calibration import Calibration, CalibrationEntry
    from planner.specs.cluster import AnyCluster, DeviceSpec
    from planner.specs.engine import EngineSpec
    from planner.specs.library import Kind
    from planner.specs.training import TrainingSpec

_SHIPPED_CALIBRATION: Final = Path(__file__).parents[1] / "calibration.json"
_PAGE: Final = re.compile(r"https?://(?:www\.)?huggingface\.co/([^/]+/[^/?#]+).*")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_PROFILE_OF: Final = {
    **dict.fromkeys(("nemo", "bridge", "mbridge"), "megatron-bridge"),
    **dict.fromkeys(("megatron-lm", "mcore", "megatron-core", "swift", "ms-swift", "verl"), "megatron"),
    **dict.fromkeys(("fsdp2", "accelerate", "trainer", "trl", "transformers", "axolotl", "llama-factory"), "fsdp"),
    **dict.fromkeys(("zero", "zero2", "zero3"), "deepspeed"),
    **dict.fromkeys(("pytorch", "planner"), "torch"),
    "titan": "torchtitan",
}
"""Names of other programs, and common words, that people type in place of an engine profile's name."""


def model_names() -> tuple[str, ...]:
    """Names of the shipped models."""
    return library.names("models")


def engine_names() -> tuple[str, ...]:
    """Names of the engines for which plans are made."""
    return library.names("engines")


def priced_engine_names() -> tuple[str, ...]:
    """Names of the engine profiles that only price published runs."""
    return library.names("evidence/profiles")


def model_source(name: str) -> str:
    """The source of a shipped model's shapes."""
    return library.header("models", name)


def load_model(name: str) -> ModelSpec:
    """Load a model by its shipped name, or from the path of a YAML file, a Hugging Face config.json or its folder.

    Raises:
        InputError: unknown name, or a document with mistakes.
    """
    return validate(ModelSpec, model_tree(name))


def model_notes(name: str) -> tuple[str, ...]:
    """Notes on a model: the parts of a Hugging Face config.json that planning leaves out, and what "128k" was read as.

    Raises:
        InputError: a document with mistakes.
    """
    if config := config_path(name):
        from planner.specs.huggingface import read_config

        return read_config(config, str(config)).notes
    counts = {key: (text, whole_of(text, key)) for key, text in model_tree(name).plain.items()}
    return tuple(f"{key}: {text} is {count:,}" for key, (text, count) in counts.items() if count != text)


def load_device(name: str) -> DeviceSpec:
    """Load a shipped device by name.

    Raises:
        InputError: a document with mistakes.
    """
    from planner.specs.cluster import DeviceSpec

    return validate(DeviceSpec, shipped_yaml(library.path_of("clusters/devices", name)))


def load_engine(name: str) -> EngineSpec:
    """Load an engine profile by name, also one that only prices published runs.

    Raises:
        InputError: unknown name.
    """
    from planner.specs.engine import EngineSpec

    return validate(EngineSpec, engine_tree(name))


def load_calibration(path: Path) -> Calibration:
    """Corrections from the user's own calibration file.

    Raises:
        InputError: all mistakes of the document at once.
        EnvironmentProblem: the file cannot be read.
    """
    from planner.specs.calibration import Calibration

    try:
        return validate(Calibration, read_yaml(path))
    except WrongKind as error:
        hint = "`planner calibrate RUNS... -o FILE` writes corrections"
        raise InputError(error.mistakes[0].message, where="--calibration", hint=hint) from None


def other_engines(before: str, has_it: Callable[[EngineSpec], bool]) -> str:
    """`before`, followed by the `--engine` options of all engines for which `has_it` is true.

    The text is empty if there is no such engine.
    """
    names = [engine.name for engine in _shipped_engines() if has_it(engine)]
    return f"{before}--engine {any_of(names)}" if names else ""


@cache
def _shipped_engines() -> tuple[EngineSpec, ...]:
    return tuple(map(load_engine, engine_names()))


@cache
def shipped_calibration() -> Calibration:
    """Corrections fitted to published runs; `make calibrate` writes them."""
    from planner.specs.calibration import Calibration

    return Calibration.model_validate_json(_SHIPPED_CALIBRATION.read_text(encoding="utf-8"))


def calibrations_of(
    cluster: AnyCluster, model: ModelSpec, training: TrainingSpec, engine: EngineSpec, corrections: Calibration
) -> tuple[CalibrationEntry, ...]:
    """The corrections for the devices of each pool; a uniform cluster is one pool."""
    from planner.specs.calibration import find_entry

    return tuple(
        find_entry(
            corrections,
            device=pool.device.name,
            engine=engine.name,
            precision=training.precision,
            experts=model.moe is not None,
            layers_of=engine.compute.layers_of,
            kernel=engine.compute.attention_kernel,
        )
        for pool in cluster.pools
    )


def model_tree(name: str) -> Node:
    """A model's document before it is checked, by shipped name or path; a Hugging Face config.json is translated first.

    Raises:
        InputError: unknown name, or a document that cannot be read.
    """
    config = config_path(name)
    if config:
        from planner.specs.huggingface import read_config

        return read_config(config, str(config)).tree
    page = _PAGE.fullmatch(name)
    name = page[1] if page else name
    return named_tree("models", of_hub(name) or name)


def of_hub(name: str) -> str:
    """The shipped model with this id on the Hugging Face Hub, such as `Qwen/Qwen2.5-14B`; empty if there is none.

    A shipped model matches if its source is the id's page, or if its name equals the id's last part.
    """
    owner, _, own = name.lower().partition("/")
    if not owner or not own or not _HUB_ID.fullmatch(name) or is_there(Path(name)):
        return ""
    page = re.compile(rf"huggingface\.co/{re.escape(name)}(?![\w.-])", re.IGNORECASE)
    same = (known for known in model_names() if known == own or page.search(model_source(known)))
    return next(same, "")


def config_path(name: str) -> Path | None:
    """The Hugging Face config.json at the path `name`, which is a JSON file or a folder that contains one."""
    if not name or name in model_names():
        return None
    path = Path(name)
    if path.suffix == ".json" or not (is_there(path) and path.is_dir()):
        return path if path.suffix == ".json" else None
    from planner.specs.huggingface import CONFIG_NAME

    return path / CONFIG_NAME


@cache
def engine_tree(name: str) -> Node:
    """An engine profile's document before it is checked.

    Raises:
        InputError: unknown name.
    """
    known = (*engine_names(), *priced_engine_names())
    if name not in known:
        listing = f"engines are {', '.join(engine_names())}; `planner engines` says what each is"
        profile = _PROFILE_OF.get(name.lower().replace("_", "-"))
        hint = f"write --engine {profile}" if profile else did_you_mean(name, known, otherwise=listing)
        raise InputError(f"unknown engine {quoted(name)}", where=f"--engine {printable(name, 40)}", hint=hint)
    kind: Kind = "engines" if name in engine_names() else "evidence/profiles"
    return shipped_yaml(library.path_of(kind, name), f"{kind}/{name}.yaml")


def training_tree(path: str | None) -> Node:
    """A training document before it is checked; empty without a path.

    Raises:
        InputError: a document that cannot be read.
    """
    return Node(data={}, where="") if path is None else read_yaml(Path(path), path)


def named_tree(kind: Kind, name: str) -> Node:
    """A document before it is checked, by shipped name or else by path.

    Raises:
        InputError: unknown name, or a document that cannot be read.
    """
    known = library.names(kind)
    if name in known:
        return shipped_yaml(library.path_of(kind, name), f"{kind}/{name}.yaml")
    listing = f"`planner {kind}` lists what is shipped; a path of your own ends in .yaml"
    if not name:
        raise InputError(f"the {kind.removesuffix('s')} is empty", hint=listing)
    if kind == "models" and _HUB_ID.fullmatch(name) and not name.endswith(_SUFFIXES) and not is_there(Path(name)):
        close = did_you_mean(name.rpartition("/")[2].lower(), known)
        other = "save the config.json of its page and name the folder; `planner models` lists what is shipped"
        hint = f"{close} Otherwise {other}" if close else other
        raise InputError(f"{quoted(name)} is no shipped model and no file", hint=hint)
    if "/" in name or name.endswith(_SUFFIXES) or is_there(Path(name)):
        return read_yaml(Path(name), name)
    raise InputError(
        f"unknown {kind.removesuffix('s')} {quoted(name)}", hint=did_you_mean(name, known, otherwise=listing)
    )


def is_there(path: Path) -> bool:
    """Whether a file or folder exists at a path that a user typed."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False
