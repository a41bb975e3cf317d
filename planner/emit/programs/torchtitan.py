"""torchtitan's tables: commit b5bcd76c (2026-08-21) counts batches in tokens, release 0.3.0 in sequences.

Keys are the dotted fields of torchtitan's `Trainer.Config`. `model_spec.rope` and `model_spec.norm` apply to all
layers; `optimizer` holds the keywords of `default_adamw`. Source: torchtitan, config/configs.py, trainer.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import decisive, listed, names_beside, refusals, refused, still_open
from planner.emit.programs.torchtitan_file import V_0_3, check_data, render
from planner.emit.settings import follows, not_carried, number, one, pair, parts_from, parts_of, switch, whole
from planner.emit.starters.torchrun import torchrun_start
from planner.emit.target import FIELDS, Refusal, Setting, Target
from planner.errors import InputError
from planner.layout import V_SHAPED, even_split
from planner.specs.by_name import load_model
from planner.specs.model import ModelSpec
from planner.specs.validate import validate
from planner.specs.yaml import as_node

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, How, Place, Value, Values
    from planner.plan import Plan

_NAMES: Final = names_beside(__file__)
REGISTRY: Final = {name: (package, flavor) for name, (package, flavor) in _NAMES["registry"].items()}
"""Our model name -> package and flavor in torchtitan's model_registry."""
SCHEDULES: Final[dict[str, str]] = _NAMES["schedules"]
RECOMPUTE: Final = {"none": "none", "full": "FullAC", "selective": "SelectiveAC"}
_POSITIONS: Final = ("rope_theta", "rope_scaling", "norm_epsilon", "max_sequence_length")
_OTHERS: Final = (*_POSITIONS, "name", "moe")
_LLAMA: Final = "llama3"
_YARN: Final = ("deepseek_v3", "gpt_oss")
"""Packages that use YaRN's rotary positions, which a model document cannot express and which change no cost."""


# --- model -------------------------------------------------------------------------------------------------------


def _shape(model: ModelSpec) -> dict[str, Any]:
    experts = model.moe.model_dump(exclude={"imbalance"}) if model.moe else None
    return {**model.model_dump(exclude=set(_OTHERS)), "moe": experts}


@cache
def _shapes() -> tuple[tuple[dict[str, Any], tuple[str, str]], ...]:
    return tuple((_shape(load_model(name)), entry) for name, entry in REGISTRY.items())


def _entry(model: ModelSpec) -> tuple[str, str] | None:
    """Package and flavor of the registry's model with the same shape, under any name; None if no model matches."""
    shape = _shape(model)
    return next((entry for other, entry in _shapes() if other == shape), None)


_SIZES: Final = listed(_NAMES["sizes"])
_EXPERTS: Final[dict[str, str]] = _NAMES["experts"]
"""Key of `model_spec.shape` -> field of the model's experts (`moe`)."""


def _blocks(model: ModelSpec) -> dict[str, Any]:
    """Fields of a model except its sizes and the choices that torchtitan's llama3 and qwen3 blocks leave open."""
    found = _shape(model) | dict.fromkeys((*_SIZES, "architecture"))
    found["qk_norm"] = "none" if model.qk_norm == "head" else model.qk_norm
    if found["moe"]:
        found["moe"] = {key: value for key, value in found["moe"].items() if key not in _EXPERTS.values()}
    return found


@cache
def _blocks_of(experts: bool) -> dict[str, Any]:
    return _blocks(load_model("qwen3-30b-a3b" if experts else "llama3-8b"))


def missing_blocks(model: ModelSpec) -> tuple[str, ...]:
    """Fields of the model that torchtitan's blocks cannot express; a configuration exists only if there are none."""
    own, known = _blocks(model), _blocks_of(bool(model.moe))
    wrong = [key for key in own if own[key] != known[key]]
    inner = own["moe"] or {}
    within = [f"moe.{key}" for key in inner if inner[key] != known["moe"][key]] if "moe" in wrong else []
    return tuple(f"model.{key}" for each in wrong for key in (within if each == "moe" else [each]))


def _kind(model: ModelSpec) -> str:
    """The package whose blocks build a model that the registry does not have."""
    return "qwen3" if model.moe or model.qk_norm == "head" else _LLAMA


def _write_model(plan: Plan) -> Values:
    model, entry = plan.model, _entry(plan.model)
    if entry is not None:
        return {"model_spec.name": entry[0], "model_spec.flavor": entry[1]}
    shape: dict[str, Value] = {key: getattr(model, key) for key in _SIZES}
    shape["qk_norm"] = model.qk_norm == "head"
    shape |= {key: getattr(model.moe, field) if model.moe else 0 for key, field in _EXPERTS.items()}
    named = {"model_spec.name": _kind(model), "model_spec.flavor": model.name}
    return named | {f"{_SHAPE}{key}": value for key, value in shape.items()}


_SHAPE: Final = "model_spec.shape."
_ROPE: Final = "model_spec.rope."
_SCALING: Final[dict[str, tuple[str, float]]] = _NAMES["scaling"]


def _described(given: Given) -> ModelSpec | None:
    """The model that a file describes by its sizes; None if the file gives no sizes."""
    if f"{_SHAPE}num_layers" not in given:
        return None
    flags = ("tied_embeddings", "qkv_bias")
    sizes = {key: given.flag(_SHAPE + key) if key in flags else given.whole(_SHAPE + key) for key in _SIZES}
    experts = {field: given.whole(_SHAPE + key) for key, field in _EXPERTS.items()}
    base = load_model("llama3-8b").model_dump(mode="json", exclude={"architecture"})
    qk_norm = "head" if given.flag(f"{_SHAPE}qk_norm") else "none"
    document = {**base, "architecture": "llama", **sizes, "qk_norm": qk_norm, "rope_scaling": None}
    document["moe"] = experts if experts["num_experts"] else None
    return validate(ModelSpec, as_node(document, "the torchtitan file"))


def named(given: Given) -> ModelSpec | None:
    """The model that the file describes, or the shipped model of its registry entry; None if neither exists."""
    if (described := _described(given)) is not None:
        return described
    wanted = (given.text("model_spec.name"), given.text("model_spec.flavor"))
    return next((load_model(name) for name, entry in REGISTRY.items() if entry == wanted), None)


def _read_model(given: Given) -> Mapping[str, Any]:
    model = named(given)
    if model is None:
        return {}
    return {f"model.{key}": value for key, value in model.model_dump(exclude={"name", "architecture"}).items()}


def _longest(plan: Plan) -> Values:
    return {f"{_ROPE}max_context_length": max(plan.model.max_sequence_length, plan.training.sequence_length)}


def _stretches(plan: Plan) -> Values:
    scaling, of_yarn = plan.model.rope_scaling, _write_model(plan)["model_spec.name"] in _YARN
    kind: dict[str, Value] = {} if of_yarn else {f"{_ROPE}scaling": "llama" if scaling else "none"}
    return {**kind, **(parts_of(scaling, _SCALING) if scaling else {})}


def _read_scaling(given: Given) -> Mapping[str, Any]:
    kind = given.text(f"{_ROPE}scaling")
    scaled = parts_from(given, _SCALING)
    return {"model.rope_scaling": scaled if kind == "llama" else None} if kind and named(given) else {}


def _model_fault(plan: Plan) -> tuple[str, str] | None:
    model, entry = plan.model, _entry(plan.model)
    if entry is None and (missing := missing_blocks(model)):
        shown = ", ".join(missing)
        why = f"no model built as {model.name} is in torchtitan's registry, and its own is written without {shown}"
        return why, f"the registry has {', '.join(REGISTRY)}"
    package = entry[0] if entry else _kind(model)
    if model.rope_scaling and package != _LLAMA:
        why = f"model.rope_scaling, and the positions of torchtitan's {package} are not stretched so"
        return why, "plan with --set model.rope_scaling=null"
    return None


# --- layout ------------------------------------------------------------------------------------------------------


def _write_sharding(plan: Plan) -> Values:
    layout = plan.layout
    return {
        "parallelism.data_parallel_replicate_degree": layout.hsdp,
        "parallelism.data_parallel_shard_degree": layout.dp // layout.hsdp,
        "parallelism.fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
    }


def _read_sharding(given: Given) -> Mapping[str, Any]:
    """ZeRO and replicas; by default a pipeline keeps gathered parameters. Source: torchtitan, distributed/fsdp.py."""
    replicas = given.whole("parallelism.data_parallel_replicate_degree", 1)
    shards = given.text("parallelism.data_parallel_shard_degree", "-1")  # -1: all remaining ranks
    piped = given.whole("parallelism.pipeline_parallel_degree", 1) > 1
    keeps = {"default": piped, "always": False, "never": True}
    kept = given.choice("parallelism.fsdp_reshard_after_forward", keeps, "default")
    if shards == "1" and replicas > 1 and given.whole("parallelism.context_parallel_degree", 1) == 1:
        return {"layout.zero": 0, "layout.hsdp": 1}
    return {"layout.zero": 3 if not kept else 1 if piped else 2, "layout.hsdp": replicas}


def _write_pipeline(plan: Plan) -> Values:
    layout = plan.layout
    found: dict[str, Value] = {"parallelism.pipeline_parallel_degree": layout.pp}
    if layout.pp > 1:
        found |= {
            "parallelism.pipeline_parallel_schedule": SCHEDULES[layout.schedule],
            _PARTS: _parts(plan),
        }
    return found


def _parts(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Modules of each chunk in model order; torchtitan's default split gives the first and last chunk fewer layers."""
    first, parts = 0, []
    for count in plan.layout.layers_per_stage:
        parts.append([f"layers.{number}" for number in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return tuple(tuple(part) for part in parts)


def _read_pipeline(given: Given) -> Mapping[str, Any]:
    """The schedule, and the layers of each chunk: from the file's list, or from the program's default split.

    Source: torchtitan, distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part.
    """
    stages = max(given.whole("parallelism.pipeline_parallel_degree", 1), 1)
    back = {name.lower(): ours for ours, name in SCHEDULES.items()}
    key = "parallelism.pipeline_parallel_schedule"
    schedule = back.get(given.text(key, "1F1B").lower())
    ends = tuple(given.whole(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last"))
    listed, of_chunk = given.get(_PARTS), given.whole("parallelism.pipeline_parallel_layers_per_stage")
    if stages == 1:
        return {"layout.pp": 1, "layout.schedule": "1f1b", "layout.interleave": 1}
    if schedule is None:
        raise InputError(f"{given.text(key)[:80]!r} has no price here", where=key, hint=", ".join(SCHEDULES.values()))
    num_layers = given.model.num_layers if given.model else 0
    chunks = stages * (2 if schedule in ("interleaved", *V_SHAPED) else 1)
    if listed is not None:
        layers = tuple(sum(str(name).startswith("layers.") for name in part) for part in listed)
    elif num_layers:
        if of_chunk:
            chunks = -(-(num_layers + sum(ends)) // of_chunk)
        counts = list(even_split(num_layers + sum(ends), chunks, 1))
        layers = (counts[0] - ends[0], *counts[1:-1], counts[-1] - ends[1])
    else:
        return {"layout.pp": stages, "layout.schedule": schedule, "layout.interleave": chunks // stages}
    if len(layers) % stages or min(layers) < 1 or (num_layers and sum(layers) != num_layers):
        raise InputError(f"{len(layers)} chunks of {num_layers} layers on {stages} stages", where=_PARTS)
    found = {"layout.interleave": len(layers) // stages, "layout.layers_per_stage": layers}
    return {"layout.pp": stages, "layout.schedule": schedule, **found}


_PARTS: Final = "parallelism.module_fqns_per_model_part"


def _read_recompute(given: Given) -> Mapping[str, Any]:
    """The recompute policy.

    In releases up to 0.2, `selective` recomputes every n-th layer, or keeps outputs of kernels.
    """
    mode = given.text("activation_checkpoint", given.text("activation_checkpoint.mode", "SelectiveAC"))
    back = {name.lower(): ours for ours, name in RECOMPUTE.items()} | {"full": "full", "selective": "selective"}
    if mode.lower() not in back:
        raise InputError(f"{mode[:80]!r} has no price here", where="activation_checkpoint", hint=", ".join(RECOMPUTE))
    every = given.text("activation_checkpoint.selective_ac_option", "op")
    if mode == "selective" and every != "op":
        given.whole("activation_checkpoint.selective_ac_option")
        return {"layout.recompute": f"every:{every}" if every != "1" else "full"}
    return {"layout.recompute": back[mode.lower()]}


# --- training ----------------------------------------------------------------------------------------------------


def _write_tokens(plan: Plan) -> Values:
    layout, training = plan.layout, plan.training
    length = training.sequence_length
    found: dict[str, Value] = {
        "training.num_tokens_per_microbatch_per_dp_rank": layout.mbs * length,
        "training.num_tokens_per_train_step": training.global_batch_size * length,
        "training.max_context_length": length,
    }
    if layout.pp > 1:
        found["parallelism.num_pp_microbatches"] = layout.num_microbatches(training.global_batch_size)
    return found


def _write_sequences(plan: Plan) -> Values:
    """Batch sizes in sequences, for release 0.3.0: a pipeline splits a rank's batch and accumulates no gradients."""
    layout, training = plan.layout, plan.training
    found: dict[str, Value] = {
        "training.local_batch_size": layout.mbs,
        "training.global_batch_size": training.global_batch_size,
        "training.seq_len": training.sequence_length,
    }
    if layout.pp > 1:
        found["training.local_batch_size"] = training.global_batch_size // layout.dp
        found["parallelism.pipeline_parallel_microbatch_size"] = layout.mbs
    return found


def _read_batch(given: Given) -> Mapping[str, Any]:
    """Batch sizes, from tokens or sequences; -1 means one pass of all ranks. Source: trainer.py; train.py of 0.2."""
    piped = given.whole("parallelism.pipeline_parallel_degree", 1) > 1
    if "training.max_context_length" in given or "training.num_tokens_per_microbatch_per_dp_rank" in given:
        length = given.whole("training.max_context_length", 2048)
        tokens = given.whole("training.num_tokens_per_microbatch_per_dp_rank", 16384)
        passes = given.whole("parallelism.num_pp_microbatches", 1)
        passes = passes if piped else 1
        each, own = tokens // length, passes * tokens // length
        said, unit, key = given.text("training.num_tokens_per_train_step", "-1"), length, "max_context_length"
        if tokens % length or (said != "-1" and given.whole("training.num_tokens_per_train_step") % length):
            raise InputError(f"the tokens of a batch are no whole number of {length}", where=f"training.{key}")
    else:
        length, own = given.whole("training.seq_len", 2048), given.whole("training.local_batch_size", 8)
        each = given.whole("parallelism.pipeline_parallel_microbatch_size", 1)
        each = each if piped else own
        said, unit = given.text("training.global_batch_size", "-1"), 1
    found: dict[str, Any] = {"layout.mbs": each, "training.sequence_length": length}
    if said != "-1":
        return found | {"training.global_batch_size": int(said) // unit}
    ranks = 1
    for axis in ("tensor", "pipeline", "context"):
        ranks *= given.whole(f"parallelism.{axis}_parallel_degree", 1)
    replicas = given.num_devices // ranks * given.whole("training.gradient_accumulation_steps", 1)  # of forks
    return found | ({"training.global_batch_size": own * replicas} if replicas else {})


def _write_precision(plan: Plan) -> Values:
    training = plan.training
    return {
        "training.dtype": "bfloat16" if training.memory_recipe == "pure-bf16" else "float32",
        "training.mixed_precision_param": "float32" if training.precision == "fp32" else "bfloat16",
        **({"model_spec.converters": ("Float8LinearConverter",)} if training.precision == "fp8" else {}),
    }


def _read_precision(given: Given) -> Mapping[str, Any]:
    converters = given.get("model_spec.converters") or ()
    named = [str(each).lower() for each in (converters if isinstance(converters, tuple) else (converters,))]
    if unknown := [each for each in named if each not in ("float8", "quantize.linear.float8", "float8linearconverter")]:
        raise InputError(f"{unknown[0][:60]!r} has no price here", where="model.converters", hint="known: float8")
    pure = given.text("training.dtype", "float32") == "bfloat16"
    half = given.text("training.mixed_precision_param", "bfloat16") == "bfloat16" or pure
    found = {"training.precision": "fp8" if named else "bf16" if half else "fp32"}
    return found | ({"training.memory_recipe": "pure-bf16"} if pure else {})


def _write_loss(plan: Plan) -> Values:
    if plan.training.loss == "whole":
        return {"loss": "CrossEntropyLoss"}
    return {"loss": "ChunkedLossWrapper", "loss.num_chunks": plan.training.loss_chunks}


def _read_loss(given: Given) -> Mapping[str, Any]:
    """The loss, and its number of chunks; releases up to 0.2 compute all logits at once."""
    chunks = given.whole("loss.num_chunks")
    given.get("loss")
    return {"training.loss_chunks": chunks} if chunks else {"training.loss": "whole"}


_DECAYS: Final = ("cosine", "linear", "sqrt")


def _write_betas(plan: Plan) -> Values:
    return {"optimizer.betas": (plan.training.adam_beta1, plan.training.adam_beta2)}


def _read_betas(given: Given) -> Mapping[str, Any]:
    """The optimizer's betas, given as one pair or as two keys; any optimizer but Adam and AdamW is refused."""
    given.choice("optimizer.name", dict.fromkeys(("AdamW", "Adam", "adamw", "adam")), "AdamW")
    pair = given.get("optimizer.betas")
    if pair is None:
        pair = (given.number("optimizer.beta1", 0.9), given.number("optimizer.beta2", 0.95))
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise InputError("no pair of numbers", where="optimizer.betas")
    return {"training.adam_beta1": pair[0], "training.adam_beta2": pair[1]}


def _sp(given: Given) -> Mapping[str, Any]:
    """Whether sequence parallelism is used: with tensor parallelism it is on unless the file turns it off."""
    on = given.flag("parallelism.enable_sequence_parallel", default=True)
    return {"layout.sp": int(on and given.whole("parallelism.tensor_parallel_degree", 1) > 1)}


_PLAIN: Final[dict[str, Value]] = _NAMES["plain"]
"""Key -> default value, for keys whose default changes no cost; any other value is reported as not priced."""


def _read_rest(given: Given) -> Mapping[str, Any]:
    given.known |= set(_PLAIN)
    for key, value in _PLAIN.items():
        if given.values.get(key) == value:
            given.understood.add(key)
    return {}


# --- the target --------------------------------------------------------------------------------------------------

_OF_MODEL: Final = tuple(
    path for path in FIELDS if path.startswith("model.") and path.removeprefix("model.") not in _POSITIONS
)


def _settings(*, counts_tokens: bool) -> tuple[Setting, ...]:
    return (
        Setting(says=_OF_MODEL, write=_write_model, read=_read_model),
        number("model.norm_epsilon", "model_spec.norm.eps"),
        number("model.rope_theta", f"{_ROPE}theta"),
        replace(whole("model.max_sequence_length", f"{_ROPE}max_context_length"), write=_longest),
        Setting(says=("model.rope_scaling",), write=_stretches, read=_read_scaling),
        whole("layout.tp", "parallelism.tensor_parallel_degree", 1),
        pair("layout.sp", lambda plan: {"parallelism.enable_sequence_parallel": bool(plan.layout.sp)}, _sp),
        whole("layout.cp", "parallelism.context_parallel_degree", 1),
        whole("layout.ep", "parallelism.expert_parallel_degree", 1),
        # a refusal covers the field; releases up to 0.2 have a key
        replace(whole("layout.etp", "parallelism.expert_tensor_parallel_degree", 1, absent=1), says=()),
        Setting(says=("layout.dp", "layout.zero", "layout.hsdp"), write=_write_sharding, read=_read_sharding),
        pair("layout.pp layout.interleave layout.schedule layout.layers_per_stage", _write_pipeline, _read_pipeline),
        pair(
            "layout.recompute",
            lambda plan: {"activation_checkpoint": RECOMPUTE[plan.layout.recompute[0]]},
            _read_recompute,
        ),
        switch("layout.offload", "training.enable_cpu_offload", on="optimizer", off="none"),
        pair(
            "layout.mbs training.global_batch_size training.sequence_length",
            _write_tokens if counts_tokens else _write_sequences,
            _read_batch,
        ),
        Setting(says=("training.precision", "training.memory_recipe"), write=_write_precision, read=_read_precision),
        Setting(says=("training.loss", "training.loss_chunks"), write=_write_loss, read=_read_loss),
        switch("training.cuda_graphs", "training.disable_cuda_graphs", on="none", off="step", default=True),
        whole("training.steps", "training.steps", 10000),
        number("training.gradient_clip", "training.max_norm"),
        number("training.learning_rate", "optimizer.lr"),
        Setting(says=("training.adam_beta1", "training.adam_beta2"), write=_write_betas, read=_read_betas),
        number("training.adam_epsilon", "optimizer.eps"),
        number("training.weight_decay", "optimizer.weight_decay"),
        whole("training.warmup_steps", "lr_scheduler.warmup_steps", 200),
        one(
            *("training.schedule", "lr_scheduler.decay_type", lambda given: given.text("lr_scheduler.decay_type")),
            default="linear",
            told=lambda schedule: schedule if schedule in _DECAYS else "cosine",
        ),
        number("training.min_learning_rate_ratio", "lr_scheduler.min_lr_factor", default=0.0),
        whole("training.seed", "debug.seed"),
        Setting(says=(), write=lambda plan: {"compile.enable": False}, read=_read_rest),  # noqa: ARG005 - always
        not_carried("training.weights", "training.warmup_ratio", "training.epochs"),
        follows("layout.mtp", "layout.pools", "layout.segment"),
        follows("training.lora_targets", "training.lora_dropout", "training.frozen_weights"),  # unused without adapters
    )


REFUSALS: Final = (
    Refusal(says=(), fault=_model_fault),
    *refused(_NAMES["refused"]),
    *refusals(_NAMES["refuses"]),
)
IGNORED: Final = listed(_NAMES["ignores"])
"""Patterns of keys that do not change the priced bytes and seconds of a step."""
DECISIVE: Final = decisive(_NAMES["decides"])
"""Patterns of keys that decide the answer and have no price."""


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:  # noqa: ARG001 - the file says them
    return f"{torchrun_start(plan, place)} \\\n  -m torchtitan.train --module planned --config planned"


def _yours(plan: Plan, how: How) -> dict[str, str]:  # noqa: ARG001 - as the others
    check_data(how)
    return still_open(_NAMES["yours"], how)


def _target(name: str, program: str, install: str) -> Target:
    return Target(
        name=name,
        program=program,
        settings=_settings(counts_tokens=name != V_0_3),
        refuse=REFUSALS,
        render=lambda values, plan, how: render(values, plan, how, release=name),
        command=_command,
        yours=_yours,
        takes=("data", "tokenizer"),
        ignores=IGNORED,
        decides=DECISIVE,
        switches=listed(_NAMES["switches"]),
        install=f"{install}, and torchao for fp8",
    )


TARGET: Final = _target(
    "torchtitan",
    "torchtitan of commit b5bcd76c (2026-08-21) or later",
    "torchtitan from its repository, at commit b5bcd76c or later",
)
RELEASE: Final = _target(V_0_3, "torchtitan 0.3.0", "pip install torchtitan==0.3.0")
