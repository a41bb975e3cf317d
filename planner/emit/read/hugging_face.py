"""Readers for files of Accelerate and DeepSpeed and of programs built on them: Trainer, TRL, Axolotl, LLaMA-Factory.

Each reader converts its file into the keys that `planner.emit.programs.hugging_face` writes and reads.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import names_beside, translated
from planner.emit.programs import accelerate
from planner.emit.programs.hugging_face import AT_LOAD, PLAIN, flat
from planner.emit.read import HOSTS, METHOD, MODEL, PROGRAM, RANKS, Reader
from planner.emit.read.conditions import UNSET
from planner.emit.read.methods import NAMES
from planner.emit.read.options import document_of, mapping_of, option_words, options_of, with_ranks
from planner.emit.read.overrides import sizes_of
from planner.errors import InputError
from planner.specs.training import UNKNOWN_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.emit.target import Value, Values

_FSDP: Final = "accelerate.fsdp_config.fsdp_"
_NAMES: Final = names_beside(__file__)
_SWIFT, _AXOLOTL, _FACTORY, _FACTORY_V1 = (
    _NAMES[program] for program in ("ms_swift", "axolotl", "llama_factory", "llama_factory_v1")
)
_OF_TRL, _OF_OLD_TRL, _FROM_SCRATCH, _LENGTHS = (set(_NAMES[each]) for each in _NAMES["sets"])
DEFAULTS: Final[dict[str, Value]] = _NAMES["defaults"]
"""The Trainer's values for keys that a file leaves out."""


def _engine(values: Values) -> str:
    at_load = any(key.startswith(AT_LOAD) for key in values)  # transformers cuts the model, and Accelerate shards it
    if values.get("accelerate.distributed_type") == "FSDP" or values.get("fsdp") or at_load:
        return "fsdp"
    if not values.get(PLAIN) and not _has_deepspeed(values):
        hint = "one more --from gives the file of Accelerate or DeepSpeed; or --engine fsdp, --engine deepspeed"
        raise InputError("no file says which program shards the model, and how far", hint=hint)
    return "deepspeed"


def _has_deepspeed(values: Values) -> bool:
    return any(key.startswith("deepspeed.") for key in values)


def _assumed(values: Values) -> dict[str, str]:
    """The rule for plain data parallelism, which no file names and ZeRO-0 of DeepSpeed prices; or of a shipped file."""
    if shipped := next((values[key] for key in values if key.endswith(".shipped")), None):
        return {"zero": f"{shipped} is not here; as the program that ships it has it"}
    is_plain = values.get(PLAIN) and _engine(values) == "deepspeed" and not _has_deepspeed(values)
    return dict.fromkeys(("engine", "zero"), "nothing shards: plain data parallelism (DDP)") if is_plain else {}


# --- Accelerate and DeepSpeed ------------------------------------------------------------------------------------


def _accelerate_values(text: str) -> Values:
    found = translated(flat(document_of(text), "accelerate."), _NAMES["accelerate"])
    kind = found.get("accelerate.distributed_type")
    if kind == "NO" or str(kind).startswith("MULTI_"):
        found[PLAIN] = True
    if "accelerate.num_processes" in found:  # without a launcher of several there is one, whatever the file says
        found[RANKS] = 1 if kind == "NO" else found["accelerate.num_processes"]
    return {key: value for key, value in found.items() if value is not None}


def _deepspeed_values(text: str) -> Values:
    return {f"deepspeed.{key}": value for key, value in _filled_in(text, "zero_optimization").items()}


def _fsdp_values(text: str) -> Values:
    """A file of Trainer's `--fsdp_config`, or of ms-swift's `--fsdp`, which has the former as a part."""
    found = document_of(text)
    own = found.pop("fsdp", None)
    found = found.get("fsdp_config", found)
    return {"fsdp": own, **flat({key.removeprefix("fsdp_"): found[key] for key in found}, _FSDP)}


def _run_values(text: str) -> Values:
    """A file of TrainingArguments, or of a program built on them, that a command line names."""
    readers = (each for each in READERS if not each.is_shell and each.recognises(text))
    return next((each.values for each in readers), _trainer_file)(text)


# --- Trainer and TRL ---------------------------------------------------------------------------------------------


def _of_trainer(own: Values) -> dict[str, Value]:
    found = {_OF_LAUNCH.sub(_FSDP, key): value for key, value in own.items()}
    if str(found.get("fsdp", "")).endswith(".json"):
        found["fsdp_config"] = found.pop("fsdp")
    if found.pop("num_machines", None):  # else each host of a launcher around Accelerate has its processes
        found.pop(HOSTS, None)
    return translated(found, _NAMES["trainer"])


_OF_LAUNCH: Final = re.compile(r"^fsdp_(?!config|min_num|transformer)")  # not the Trainer's own


def _with_weights(found: Values) -> Values:
    """The values with the named model as the weights that the training starts from."""
    name = str(found.get(MODEL) or "")
    return {"weights": UNKNOWN_WEIGHTS if UNSET.search(name) else name, **found} if name else found


def _of_run(found: Values) -> Values:
    """The values of a whole run, with those that its program takes by default, and the weights that it starts from.

    Files of programs with defaults of their own have them already. Releases of TRL before 0.20 have the Trainer's, and
    options that newer ones have not. The Trainer replaces `auto`; a run without adapters has no use for their options.
    """
    no_adapters = "false" in (str(found.get(each)).lower() for each in ("use_peft", "use_lora"))
    left_out = (_BY_TRL, *(_OF_ADAPTERS if no_adapters else ()))
    said = {key: value for key, value in found.items() if value is not None and not key.startswith(left_out)}
    said = {key: value for key, value in said.items() if value != "auto" or key == "vllm_device"}
    if "weights" in said or {MODEL, "per_device_train_batch_size"}.isdisjoint(said):
        return said
    start: dict[str, Value] = {} if _OF_TRL.isdisjoint(said) else {"learning_rate": 2e-5}
    if _BY_TRL in found and _OF_OLD_TRL.isdisjoint(said):
        own = _NAMES["trl"][found[_BY_TRL]]
        start |= {key: value for key, value in own.items() if key != "bf16" or "fp16" not in said}
    if _LENGTHS.isdisjoint([*said, *start]) and _BY_TRL not in found:
        start["launch.length"] = "unsaid"
    weights = {"weights": UNKNOWN_WEIGHTS} if _FROM_SCRATCH.isdisjoint(said) else {}
    return {**DEFAULTS, **start, **weights, **_with_weights(said)}


_BY_TRL: Final = "launch.trl"
"""Key of a command of TRL; its value is `sft` for supervised fine-tuning."""


def _trainer_options(text: str) -> Values:
    """Options of the program and of its launcher, and the configuration file that stands alone among the words."""
    words = [each.removesuffix(".commands.launch") for each in option_words(text)]
    found = {**with_ranks(options_of(words), words, text), **(sizes_of(text) if "llamafactory" in text else {})}
    scripts = (f"{each.replace('.', '/')}.py" if before == "-m" else each for before, each in pairwise(words))
    found[PROGRAM] = next((each for each in scripts if each.endswith(".py")), None)
    alone = [each for before, each in pairwise(words) if _YAML.fullmatch(each) and not _TAKES.fullmatch(before)]
    if alone:
        found |= {match[1]: match[2] for word in words if (match := _OVERRIDE.fullmatch(word))}
        found = {"config": alone[0], **{_OF_FILES.get(key, key): value for key, value in found.items()}}
    elif "finetuning_type" in found:
        return _of_trainer(_of_factory(found))
    if "accelerate" not in words or found.pop("multi_gpu", None):
        found[PLAIN] = True
    is_bare = str(found.get("use_peft")).lower() == "true" and {"lora_r", "lora_rank"}.isdisjoint(found)
    if found.keys().isdisjoint(_OF_OLD_TRL) and (of_trl := next(filter(None, map(_OF_TRLS.fullmatch, words)), None)):
        found[_BY_TRL] = "sft" if "sft" in (*words, of_trl[1]) else "other"
    if is_bare and any(map(_OWN_SCRIPT.fullmatch, words)):
        raise InputError("the script's own code sets the rank of adapters", where="use_peft", hint="--lora_r N says it")
    return _of_trainer(found)


_OWN_SCRIPT: Final = re.compile(rf"(?!(?:.*/)?(?:run_)?(?:{NAMES}|sft)(?:_vlm)?\.py).*\.py")
"""Matches the name of a script that is not TRL's."""
_OF_TRLS: Final = re.compile(r"trl|(?:.*/)?(?:trl|examples)/scripts/(\w+)\.py")
_YAML: Final = re.compile(r"[^=]+\.ya?ml")
_TAKES: Final = re.compile(r"--[^=]+")
"""An option whose value is the next word."""
_OVERRIDE: Final = re.compile(r"([a-z_]\w*)=(.*)", re.DOTALL)


def _trainer_file(text: str) -> Values:
    return _of_trainer(flat(document_of(text)))


# --- ms-swift without Megatron -------------------------------------------------------------------------------------


def _swift_options(text: str) -> Values:
    words = option_words(text)
    found = with_ranks({**options_of(words), **sizes_of(text)}, words, text)
    return _of_swift(
        {"rlhf_type": "dpo", **found} if re.search(r"\bswift(?: |/cli/|\.cli\.)(?:main )?rlhf\b", text) else found
    )


def _of_swift(found: Values) -> Values:
    """The values with ms-swift's defaults for adapters, recomputation and precision.

    Weights are loaded in 16 bits; DeepSpeed keeps its own copy of them in 32 bits. Source: ms-swift, docs/source_en/
    Instruction/Command-line-parameters.md.
    """
    if {"sft_type", "gradient_accumulation_steps"} <= found.keys():  # without the number, release 2 has one of its own
        found = translated({"lora_target_modules": "DEFAULT", **found}, _NAMES["ms_swift_2"])
    own = {**_SWIFT["defaults"], **found, PLAIN: True}
    own["train_type"] = own.pop("tuner_type", own["train_type"])
    if own["train_type"] == "full" and "deepspeed" not in own and own["torch_dtype"] == "bfloat16":
        own["dtype"] = own.pop("torch_dtype")
    return _with_weights(_of_trainer(translated(own, _SWIFT)))


# --- OpenRLHF ---------------------------------------------------------------------------------------------------

_OPENRLHF: Final = re.compile(r"\bopenrlhf\.cli\.train_(\w+)")


def _openrlhf_options(text: str) -> Values:
    """Keys and values of OpenRLHF's supervised fine-tuning, which DeepSpeed runs; other commands name their method."""
    renamed, method = _NAMES["openrlhf_renamed"], _OPENRLHF.search(text)
    if method and method[1].startswith("ppo"):  # the length of a prompt with its answer
        renamed = {key: name for key, name in renamed.items() if key != "data.max_len"}
    own = {renamed.get(key, key): value for key, value in options_of(option_words(text)).items()}
    if method and method[1] != "sft":
        own[METHOD] = method[1]
    own = {"target_modules": "all-linear", "use_peft": str(own.get("lora_rank", 0)) != "0", **own}
    found = translated({"param_dtype": "bf16", **own}, _NAMES["openrlhf"])
    return _with_weights({**DEFAULTS, **_NAMES["openrlhf_defaults"], **found})


# --- Axolotl -----------------------------------------------------------------------------------------------------

_PRECISIONS: Final = ("bf16", "fp16", "bfloat16", "float16", "float32")
_OF_FSDP: Final = re.compile(r"fsdp_config\.(fsdp_)?")
_OF_ADAPTERS: Final = ("lora_", "peft_", "load_in_")


def _filled_in(text: str, *parts: str) -> Values:
    """Keys and values of a file, without keys that are left empty; `parts` are mappings, if the file has them."""
    data = document_of(text)
    for part in parts:
        mapping_of(data.get(part) or {}, part)
    return {key: value for key, value in flat(data).items() if value is not None}


def _axolotl_values(text: str) -> Values:
    """Values of a file of Axolotl, of whose matrix products alone some run in 8 bits (utils/schemas/config.py)."""
    own = {_OF_FSDP.sub(_FSDP, key): value for key, value in _filled_in(text, "fsdp_config").items()}
    if own.pop("fsdp", None) or any(key.startswith(_FSDP) for key in own):
        own["accelerate.distributed_type"] = "FSDP"
    own |= {key: own.pop(key, None) for key in ("lora_target_linear", "adapter")}  # the last win
    if own["adapter"] and "lora_r" not in own:
        raise InputError("adapters need a rank", where="adapter", hint="lora_r: 16 states it")
    if own.keys().isdisjoint(_PRECISIONS):
        own["bf16"] = True
    found = translated({**_AXOLOTL["defaults"], **own}, _AXOLOTL)
    if any(key.startswith("liger_kernel_config.") and found[key] for key in found):
        found = {"liger_kernel_config.fused_linear_cross_entropy": False, **found, "use_liger_kernel": True}
    return _with_weights({PLAIN: True, **found})


# --- LLaMA-Factory -----------------------------------------------------------------------------------------------


def _of_factory(found: Values) -> Values:
    own = {**_FACTORY["defaults"], **found}
    if own["finetuning_type"] == "lora" and any(own.get(key) for key in _FACTORY["adds_tokens"]):
        own.setdefault("additional_target", "embedding and head")  # model/adapter.py, resize_vocab
    if own["finetuning_type"] != "full" and own.keys().isdisjoint(_PRECISIONS):
        own["dtype"] = "bfloat16"  # as the weights of today's models are saved
    return {PLAIN: True, **translated(own, _FACTORY), **({"launch.ray": True} if "ray_num_workers" in own else {})}


def _factory_v1_values(text: str) -> Values:
    """Values of LLaMA-Factory v1, whose plugins name the sharding, the adapters and the bits of the weights."""
    own = {**_FACTORY_V1["defaults"], **_filled_in(text, "dist_config", "peft_config", "quant_config")}
    if own.get("dist_config.name") != "deepspeed":
        own.pop("dist_config.config_file", None)
    plain = {} if own.get("dist_config.name") else {PLAIN: True}
    return {**plain, **translated(own, _FACTORY_V1)}


_OF_FILES: Final = {**_AXOLOTL["renamed"], **_FACTORY["renamed"]}
"""Keys of the files of Axolotl and LLaMA-Factory, which their command lines change."""
_READS: Final = {
    "axolotl": _axolotl_values,
    "llama_factory": lambda text: _of_factory(_filled_in(text)),
    "ms_swift": lambda text: _of_swift(_filled_in(text)),
    "llama_factory_v1": _factory_v1_values,
    "accelerate": _accelerate_values,
    "deepspeed": _deepspeed_values,
    "trainer": _trainer_file,
    "fsdp": _fsdp_values,
    "run": _run_values,
    "swift_command": _swift_options,
    "openrlhf_command": _openrlhf_options,
    "trainer_command": _trainer_options,
}
"""Name of a kind of files -> function that reads their text."""
_NAMED: Final = {key: _READS[kind] for key, kind in _NAMES["named"].items()}
"""Keys whose value is the name of a file -> function that reads this file."""


def _reader(
    reads: str, keys: Sequence[str] = (), signs: Sequence[str] = (), lacks: Sequence[str] = (), **row: Any
) -> Reader:
    """A reader of a row of the document: of YAML or JSON that has all keys, or of commands with these signs.

    keys: patterns of keys, each at the start of a line or after a brace or comma.
    """
    of_file = [rf"""(^|[{{,])\s*["']?({key})["']?\s*:""" for key in keys]
    return Reader(
        engine=_engine,
        target=accelerate.TARGET,
        files=_NAMED,
        assumed=_assumed,
        complete=_of_run,
        signs=(*signs, *of_file),
        lacks=tuple(lacks),
        is_shell=bool(signs),
        values=_READS[reads],
        renamed=_NAMES[reads]["renamed"] if "writes" in row else {},
        **row,
    )


READERS: Final = tuple(_reader(**row) for row in _NAMES["readers"])
