"""The Python file that passes a plan to torchtitan: a function that returns a `Trainer.Config`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.emit.hosts import head_lines
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.emit.target import How, Value, Values
    from planner.plan import Plan

FILE: Final = "planned.py"
MODEL_FILE: Final = "planned_model.py"
MODEL: Final = files("planner.emit.programs").joinpath("torchtitan_model.py.txt").read_text(encoding="utf-8")
"""Source text of the module that builds models missing from torchtitan's registry."""
DATA: Final = "DATASET"
TOKENIZER: Final = "TOKENIZER_PATH"
V_0_3: Final = "torchtitan-0.3"

_SECTIONS: Final = {
    "parallelism": "ParallelismConfig",
    "training": "TrainingConfig",
    "optimizer": "default_adamw",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "debug": "DebugConfig",
    "compile": "CompileConfig",
}
_KINDS: Final = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_OLD_NAMES: Final = {"max_context_length": "max_seq_len"}
"""Field of rotary positions -> name of this field in release 0.3.0."""


def check_data(how: How) -> None:
    """Refuse mock data, which exists only in torchtitan's repository, and a mix of several kinds of data."""
    if how.smoke:
        hint = "in its checkout, --tokenizer tests/assets/tokenizer --data tests/assets/c4_test/data.json run at once"
        raise InputError("--smoke: torchtitan has no mock data of its own", where="--to torchtitan", hint=hint)
    if how.arguments.data:
        _kind(how.arguments.data)


def _kind(data: tuple[str, ...]) -> str:
    """The first argument of `load_dataset`: a name on the Hub, or the kind of the data files."""
    if data[0].startswith("hf:") and len(data) == 1:
        return data[0].removeprefix("hf:")
    kinds = {"hub" if each.startswith("hf:") else Path(each).suffix for each in data}
    if len(kinds) > 1 or not kinds <= set(_KINDS):
        num_sets = sum(each.startswith("hf:") for each in data)
        words = {"": "a file without an ending", "hub": f"{num_sets} data set{'s' * (num_sets > 1)} of the Hub"}
        shown = " and ".join(words.get(kind, f"a file that ends in {kind}") for kind in sorted(kinds))
        hint = f"give files of one kind ({', '.join(_KINDS)}) with a column `text`, or one hf:NAME"
        raise InputError(
            f"torchtitan reads files of one kind or one data set, and not {shown}", where="--data", hint=hint
        )
    return _KINDS[kinds.pop()]


def render(values: Values, plan: Plan, how: How, *, release: str) -> dict[str, str]:
    """The text of the Python file, with all keys of the table, data and tokenizer, by file name."""
    version = "torchtitan 0.3.0" if release == V_0_3 else "torchtitan of 2026-08-21 or later"
    data = (_data_0_3 if release == V_0_3 else _data)(how.arguments.data)
    imports, converters, kind = list(data.imports), "", str(values["activation_checkpoint"])
    shape = _of(values, "model_spec.shape")
    if "model_spec.converters" in values:
        imports.append("from torchtitan.components.quantization import Float8LinearConverter")
        converters = ", converters=[Float8LinearConverter.Config()]"
    loss, classes = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))", "CrossEntropyLoss"
    if "loss.num_chunks" in values:
        loss = f"ChunkedLossWrapper.Config(num_chunks={values['loss.num_chunks']!r}, loss_fn={loss})"
        classes = f"ChunkedLossWrapper, {classes}"
    if kind != "none":
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {kind}")
    imports += [
        f"from torchtitan.components.loss import {classes}",
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
        "from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig",
        "from torchtitan.models.common import RMSNorm, RoPE",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        "from planned_model import model_of"
        if shape
        else f"from torchtitan.models.{values['model_spec.name']} import model_registry",
        "from torchtitan.trainer import Trainer",
    ]
    lines = [
        *_model(values, shape, converters),
        *_assigned(values, "rope", "RoPE", release),
        *_assigned(values, "norm", "RMSNorm", release),
        "return Trainer.Config(",
        "    model_spec=model_spec,",
        *(line for section, name in _SECTIONS.items() for line in _called(values, section, name)),
        f"    activation_checkpoint={'None' if kind == 'none' else f'{kind}.Config()'},",
        f"    loss={loss},",
        f"    hf_assets_path={str(how.arguments.tokenizer or TOKENIZER)!r},",
        f"    dataloader={data.loader},",
        ")",
    ]
    head = f'"""{head_lines(plan)[0]}\n{head_lines(plan)[1]}\nFor {version}.\n"""\n'
    before = [
        *sorted(imports, key=lambda line: ("torchtitan" in line or "planned_model" in line, line)),
        "",
        *data.before,
    ]
    parts = [head, *before, "", "def planned():", *(f"    {line}" for line in lines)]
    module = {MODEL_FILE: MODEL} if shape else {}
    return {FILE: "".join(f"{part}\n" for part in parts), **module}


def _model(values: Values, shape: Values, converters: str) -> list[str]:
    """Lines that build the model, from the registry or from the sizes of the model."""
    name, flavor = values["model_spec.name"], values["model_spec.flavor"]
    if not shape:
        return [f"model_spec = model_registry({flavor!r}{converters})"]
    sizes = [f"    {key}={value!r}," for key, value in shape.items()]
    last = [f"   {converters.removeprefix(',')},"] if converters else []
    return ["model_spec = model_of(", f"    {name!r},", f"    {flavor!r},", *sizes, *last, ")"]


def _of(values: Values, section: str) -> dict[str, Value]:
    start = f"{section}."
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}


def _literal(value: Any) -> str:
    """The Python literal of a value; nested tuples become lists, as torchtitan's dataclasses require."""
    nested = isinstance(value, tuple) and any(isinstance(each, tuple) for each in value)
    return repr([list(each) for each in value]) if nested else repr(value)


def _called(values: Values, section: str, name: str) -> list[str]:
    given = [f"        {key}={_literal(value)}," for key, value in _of(values, section).items()]
    return [f"    {section}={name}(", *given, "    ),"] if given else []


def _assigned(values: Values, part: str, kind: str, release: str) -> list[str]:
    """Lines that override, in all layers, the registry's values that differ from the plan."""
    found = _of(values, f"model_spec.{part}")
    names = {key: _OLD_NAMES.get(key, key) if release == V_0_3 else key for key in found}
    head = f"for _, {part}, _, _ in model_spec.model.traverse({kind}.Config):"
    return [head, *(f"    {part}.{names[key]} = {value!r}" for key, value in found.items())] if found else []


def _loading(data: tuple[str, ...]) -> tuple[str, str]:
    """The path and the further keywords for `datasets.load_dataset`, as Python text."""
    files = "" if data[0].startswith("hf:") else f"data_files={list(data)!r}"
    return repr(_kind(data)), files


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """Python text that loads the data: imports, lines before the function, and the loader's configuration."""

    imports: tuple[str, ...]
    before: tuple[str, ...] = ()
    loader: str


def _data(data: tuple[str, ...]) -> _Data:
    names = "ConcatThenSplitPackingConfig, GrainDataLoader"
    further: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    if data:
        names += ", HuggingFaceStreamingSource, SingleDatasetConfig"
        further = ("from torchtitan.hf_datasets.text_datasets import TextProcessor",)
        path, files = _loading(data)
        more = f", load_dataset_kwargs=dict({files})" if files else ""
        before = (
            f"{DATA} = SingleDatasetConfig(",
            f"    source=HuggingFaceStreamingSource.Config(path={path}, split='train'{more}),",
            "    processor=TextProcessor.Config(),",
            "    post_filters=(lambda sample: sample is not None,),",
            ")",
            "",
        )
    return _Data(
        imports=(f"from torchtitan.components.data import {names}", *further),
        before=before,
        loader=f"GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset={DATA}))",
    )


def _data_0_3(data: tuple[str, ...]) -> _Data:
    loader = f"HuggingFaceTextDataLoader.Config(dataset={DATA})"
    module = "from torchtitan.hf_datasets.text_datasets import"
    if not data:
        return _Data(imports=(f"{module} HuggingFaceTextDataLoader",), loader=loader)
    path, files = _loading(data)
    more = f", {files}" if files else ""
    before = (
        f"{DATA} = 'planned'",
        f"DATASETS[{DATA}] = DatasetConfig(",
        f"    path={path},",
        f"    loader=partial(load_dataset, split='train', streaming=True{more}),",
        "    sample_processor=lambda sample: sample['text'],",
        ")",
        "",
    )
    imports = (
        *("from functools import partial", "from datasets import load_dataset"),
        *("from torchtitan.hf_datasets import DatasetConfig", f"{module} DATASETS, HuggingFaceTextDataLoader"),
    )
    return _Data(imports=imports, before=before, loader=loader)
