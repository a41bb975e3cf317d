"""Turn a row of a table into input for `planner explain`: documents, options, and an incomplete layout.

The rules of planner/search/given.py fill the layout's missing keys, as for `--layout`. This module chooses
all other missing values, and lists each choice.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from planner.errors import InputError
from planner.evidence.rows.knowledge import UnpricedRun, first_match, knowledge, normalized
from planner.evidence.rows.layouts import degrees_of, layout_of
from planner.evidence.rows.machines import cluster_of
from planner.evidence.rows.models import model_of
from planner.layout import Assumed
from planner.search.given import given_layout
from planner.specs.by_name import load_engine
from planner.specs.load import load_job
from planner.specs.text import printable
from planner.specs.uniform import uniform_job

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from planner.evidence.rows.runs import Run
    from planner.layout import Layout
    from planner.specs.cluster import ClusterSpec, Precision
    from planner.specs.engine import EngineSpec
    from planner.specs.job import PoolJob
    from planner.specs.model import ModelSpec

_LARGEST: Final = 100_000_000
"""The most sequences of a step, and the most tokens of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """Why a row cannot be priced."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A row as command-line input: two documents, options of a workload, and a layout.

    options: keywords of `planner.specs.load.load_job`, each an option of the command line.
    share: the row's batch divided by the priced batch, which is larger if its microbatches were rounded up to a whole
    number. The row's step takes this share of the priced step.
    assumed: values (except keys of the layout) that the row leaves out or states only approximately.
    unknown_framework: no engine profile describes the row's program.
    """

    model: ModelSpec
    cluster: ClusterSpec
    options: dict[str, Any]
    layout: str
    share: float
    assumed: tuple[Assumed, ...]
    unknown_framework: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The job and the whole layout of a row, with all assumptions about both."""

    job: PoolJob
    layout: Layout
    share: float = 1.0
    assumed: tuple[Assumed, ...] = ()
    unknown_framework: bool = False


def job_of(run: Run) -> Setup | Unsupported:
    """The job and the layout of a row, or the reason why the row cannot be priced.

    The row's cells take precedence; aliases.yaml and gpus.yaml add values that no column has. The function never
    raises, because a published row is not the user's mistake.
    """
    try:
        return setup_of(question_of(run))
    except UnpricedRun as reason:
        return Unsupported(reason=str(reason))


def setup_of(question: Question) -> Setup:
    """The job and the layout of a question, read as by the command line.

    Raises:
        UnpricedRun: the command line would refuse the question; the error has the reason.
    """
    try:
        job = uniform_job(load_job(model=question.model, cluster=question.cluster, **question.options))
        layout, filled = given_layout(job, question.layout)
    except InputError as error:
        raise UnpricedRun("; ".join(each.message for each in error.mistakes)) from None
    return Setup(
        job=job,
        layout=layout,
        share=question.share,
        assumed=(*question.assumed, *filled),
        unknown_framework=question.unknown_framework,
    )


def question_of(run: Run) -> Question:
    """The question for a row: its documents, options and layout.

    Raises:
        UnpricedRun: the row lacks a value that cannot be assumed, or has a setting that is not priced.
    """
    run = _with_knobs(run)
    assumed: list[Assumed] = []
    degrees = degrees_of(run, assumed)
    engine, is_unknown = engine_of(run, degrees["tp"] * degrees["pp"] * degrees["cp"] > 1, assumed)
    model = model_of(run)
    cluster = cluster_of(run, run.gpus or degrees["tp"] * degrees["pp"] * degrees["cp"] * degrees["dp"])
    run = _with_microbatch(run, degrees, assumed)
    batch, share = _batch(run, degrees["dp"], run.microbatch or run.mbs or 1, assumed)
    if not run.seq or run.seq > _LARGEST:
        raise UnpricedRun("sequence length not stated")
    layout = layout_of(run, model, engine, degrees, assumed)
    settings = _settings(run, model, engine, layout, assumed)
    if is_unknown:
        settings["engine.stands_for"] = json.dumps(printable(run.framework, 40) or "not stated")
    missing = _missing_abilities(engine, model, layout, settings)
    microbatches = batch // (degrees["dp"] * (run.microbatch or run.mbs or 1))
    if engine.pipeline.needs_filling and microbatches < degrees["pp"] and layout.get("schedule") != "gpipe":
        rule = f"the run has {microbatches} microbatches for {degrees['pp']} stages"
        missing.append(Assumed(key="engine.pipeline.needs_filling", value="false", rule=rule))
    assumed += missing
    options = {
        "engine": engine.name,
        "sequence_length": run.seq,
        "global_batch_size": batch,
        "precision": _precision(run),
        "settings": tuple(f"{path}={value}" for path, value in settings.items())
        + tuple(f"{each.key}={each.value}" for each in missing),
        "allow_tp_across_nodes": True,
    }
    return Question(
        model=model,
        cluster=cluster,
        options=options,
        layout=",".join(f"{key}={value}" for key, value in layout.items() if value is not None),
        share=share,
        assumed=tuple(assumed),
        unknown_framework=is_unknown,
    )


def _with_knobs(run: Run) -> Run:
    """The run with cells that its source states outside its table.

    A cell of the row itself takes precedence, except over `corrections`: cells that a table inferred and its source
    contradicts.
    """
    known = knowledge("aliases")
    cells = known["knobs"].get(run.source_set, {}).get(normalized(run.model), {})
    blank = {name: value for name, value in cells.items() if getattr(run, name) is None}
    for entry in known["corrections"]:
        if all(fnmatchcase(str(getattr(run, name)), pattern) for name, pattern in entry["match"].items()):
            blank |= entry["cells"]
    return replace(run, **blank) if blank else run


# --- the engine -------------------------------------------------------------------------------------------------


def engine_of(run: Run, model_parallel: bool, assumed: list[Assumed]) -> tuple[EngineSpec, bool]:
    """The engine profile for a row's framework, and whether the framework is unknown.

    An unknown framework is priced with the nearest profile: FSDP's if weights are sharded, else Megatron's. A framework
    that is described only as similar to Megatron also counts as unknown. Megatron-LM without fused attention means the
    code of 2021, or the code of 2022 if the source is the paper of 2022 or the run has sequence parallelism, which was
    added in 2022. Plain FSDP has no tensor, pipeline or context parallelism, so rows with these axes use torch's
    composition.
    """
    words, entry = run.framework.lower(), _framework(run)
    is_unknown = entry is None or ("-like" in words and entry["engine"].startswith("megatron"))
    name = entry["engine"] if entry else "fsdp" if run.zero_stage == 3 else "megatron"
    if run.zero_stage == 3 and name.startswith("megatron"):
        name = "megatron-fsdp"
    if name == "megatron" and run.flash_attention == 0 and not is_unknown:
        name = "megatron-2022" if run.sp or "korthikanti" in run.source_set else "megatron-2021"
    if name == "fsdp" and model_parallel:
        name = "torchtitan"
    if is_unknown:
        rule = f"framework {printable(run.framework, 40) or '(blank)'} is not known: priced as {name}"
        assumed.append(Assumed(key="engine", value=name, rule=rule))
    return _engine(name), is_unknown


def _framework(run: Run) -> Mapping[str, Any] | None:
    return first_match(f"{run.framework} {run.release}".lower(), knowledge("aliases")["frameworks"])


_engine: Final = cache(load_engine)


def _missing_abilities(
    engine: EngineSpec, model: ModelSpec, layout: Mapping[str, Any], settings: Mapping[str, str]
) -> list[Assumed]:
    """Settings that give the profile the abilities that the row's program obviously has."""
    can, hosts, policy, offload = engine.can, engine.offload, layout.get("recompute"), layout.get("offload", "none")
    piped = layout["pp"] > 1
    zeros = engine.pipeline.zero_stages if piped else can.zero_stages
    axes = [axis for axis in ("tp", "pp", "dp", "cp", "ep", "etp") if (layout.get(axis) or 1) > 1]
    new = [] if not policy or can.recomputes(policy) else [policy.partition(":")[0]]
    some = "_some" if policy and ":" in policy else ""
    on_host = [policy] if "activations" in offload or offload == "both" else []
    # key -> what the profile has, and what the row needs
    needs: dict[str, tuple[Sequence[Any], Iterable[Any]]] = {
        f"engine.{'pipeline' if piped else 'can'}.zero_stages": (zeros, [layout.get("zero")]),
        "engine.can.axes": (can.axes, axes),
        "engine.can.sp": (can.sp, [layout.get("sp")]),
        f"engine.can.recompute{some}": (can.recompute_some if some else can.recompute, new),
        "engine.can.losses": (can.losses, [settings.get("training.loss")]),
        "engine.can.cuda_graphs": (can.cuda_graphs, [settings.get("training.cuda_graphs")]),
        "engine.offload.what": (hosts.what, [offload]),
        "engine.offload.activations_of": (hosts.activations_of, on_host),
        "engine.can.model_features": (can.model_features, sorted(model.features)),
    }
    values = {
        key: f"[{', '.join(map(str, (*has, *more)))}]"
        for key, (has, needed) in needs.items()
        if (more := [each for each in needed if each not in (None, *has)])
    }
    if layout.get("hsdp", 1) > 1 and not can.replicates_shards:
        values["engine.can.replicates_shards"] = "true"
    rule = "the run's program has it, and its profile does not"
    return [Assumed(key=key, value=value, rule=rule) for key, value in values.items()]


# --- the workload -----------------------------------------------------------------------------------------------


def _settings(
    run: Run, model: ModelSpec, engine: EngineSpec, layout: Mapping[str, Any], assumed: list[Assumed]
) -> dict[str, str]:
    """Settings in addition to the options: of the training document, and of the engine if the row states more."""
    words = f"{run.flags} {run.notes} fp8_recipe={run.fp8_recipe}".lower()
    task = run.task.lower()
    if any(word in task for word in knowledge("aliases")["no_training"]):
        raise UnpricedRun(f"task {printable(run.task, 40)}")
    found = dict((_framework(run) or {}).get("settings", {}))
    if run.flash_attention == 0:
        found["training.attention"] = "unfused"
        if model.activation != "swiglu" and engine.can.dropout:
            rule = "the GPT runs of the time before fused attention trained with Megatron's default dropout"
            assumed.append(Assumed(key="training.dropout", value="0.1", rule=rule))
            found["training.dropout"] = "0.1"
    found |= _stated_in_words(words)
    if (recipe := _recipe(run, engine)) != "engine":
        found["training.memory_recipe"] = recipe
    if any(word in task for word in knowledge("aliases")["adapters"]):
        found |= _adapters(f"{task}; {words}", model, assumed)
    dispatcher = run.dispatcher or next((word for word in ("deepep", "hybridep") if word in words), "")
    if dispatcher and model.moe is not None:
        found["engine.communication.dispatches_once_per_host"] = str(dispatcher != "alltoall").lower()
    found.setdefault("training.loss", "whole")
    if "tiled mlp" in words and model.moe is None and run.seq:  # as many as DeepSpeed makes (ulysses_sp.py, TiledMLP)
        tiles = -(-run.seq // ((run.cp or 1) * model.hidden_size))
        found |= {"training.mlp_tiles": str(tiles), "engine.can.mlp_tiles": "true"}
    if run.mean_sample_tokens:
        found["training.mean_sample_tokens"] = str(round(run.mean_sample_tokens))
    found["training.cuda_graphs"] = _graphs(run)
    overlaps = _overlaps_experts(run) if run.moe_a2a_overlap is None else run.moe_a2a_overlap
    if overlaps and model.moe is not None and (run.ep or 1) > 1:
        in_chunks = layout.get("schedule") == "interleaved" or layout.get("interleave", 1) > 1
        found["training.expert_overlap"] = str(layout["pp"] == 1 or in_chunks).lower()
    return found


def _stated_in_words(words: str) -> dict[str, str]:
    """Settings whose words stand in the flags or notes of a row (`words` of aliases.yaml); the first match counts."""
    found: dict[str, str] = {}
    for entry in knowledge("aliases")["words"]:
        if re.search(entry["match"], words):
            found = entry["settings"] | found
    return found


def _overlaps_experts(run: Run) -> bool:
    """Whether a flag says that the exchanges of experts overlap with computation."""
    flags = (re.sub(r"[_-]", " ", flag) for flag in run.flags.lower().split(";"))
    return any(
        "overlap" in flag and re.search(r"\b(?:ep|experts?|moe)\b", flag) and not re.search(r"\b(?:off|no|not)\b", flag)
        for flag in flags
    )


def _graphs(run: Run) -> str:
    """The part of the run that CUDA graphs capture: whole steps, or layers; graphs of only the router are ignored."""
    stated, flags = run.cuda_graphs.lower(), re.sub(r"[\s_-]+", "_", run.flags.lower())
    if not stated:
        stated = "local" if re.search(r"(?<!no_)cuda_?graph", flags) else "none"
    if "full_iteration" in stated + flags or "full_cuda_graph" in flags:
        return "step"
    scopes = stated.partition(":")[2]
    return "layers" if stated != "none" and (not scopes or "attn" in scopes) else "none"


def _adapters(words: str, model: ModelSpec, assumed: list[Assumed]) -> dict[str, str]:
    """Adapters of the stated rank (8 by default, as in peft and NeMo), beside the matrices that flags name."""
    rank = re.search(r"(?:rank|dim|\br)\s*[=:]?\s*(\d{1,4})\b", words)
    if rank is None:
        assumed.append(Assumed(key="training.lora_rank", value="8", rule="the default of peft and of NeMo's recipes"))
    found = {"training.lora_rank": rank[1] if rank else "8"}
    flags = "\n".join(flag for flag in words.split(";") if re.search(r"targets|rank|linear|qkv", flag))
    named = [name for name, pattern in knowledge("aliases")["targets"].items() if re.search(pattern, flags)]
    if targets := [name for name in named if name != "gate" or model.activation == "swiglu"]:
        found["training.lora_targets"] = f"[{', '.join(targets)}]"
    if "qlora" in words or "nf4" in words:
        found["training.frozen_weights"] = "nf4"
    return found


def _recipe(run: Run, engine: EngineSpec) -> str:
    """The memory recipe that a row or a source states; otherwise the engine's default."""
    if run.memory_recipe:
        return printable(run.memory_recipe, 40)
    for entry in knowledge("aliases")["recipes"]:
        same = entry["source_set"] == run.source_set and entry["engine"] == engine.name
        if same and fnmatchcase(normalized(run.model), entry.get("model", "*")):
            return str(entry["memory_recipe"])
    return "engine"


_LOW: Final[tuple[Precision, ...]] = ("fp4", "fp8")


def _precision(run: Run) -> Precision:
    """The precision by its class, or by its words; 16 bits mean fp16 if the row says so or the GPU has no bf16."""
    words, kind = run.precision.lower(), run.precision_class.lower()
    for low in _LOW:
        if kind == low or (not kind and (low in words or low.replace("fp", "float") in words)):
            return low
    of_16_bits = kind in ("16", "bf16", "fp16") or (not kind and (not words or "16" in words))
    if of_16_bits:
        return "fp16" if re.search(r"(?<!b)(?:fp|float)16|half", words) or "v100" in run.gpu.lower() else "bf16"
    if (kind or words) in ("32", "fp32", "float32"):
        return "fp32"
    raise UnpricedRun(f"precision {printable(run.precision or kind, 40)}")


def _with_microbatch(run: Run, degrees: Mapping[str, int], assumed: list[Assumed]) -> Run:
    """The row with a microbatch size; some libraries make one microbatch per stage, which fills a blank cell."""
    entry, ranks = _framework(run), degrees["dp"] * degrees["pp"]
    if run.microbatch or run.mbs or degrees["pp"] == 1 or not run.gbs or run.gbs % ranks:
        return run
    if entry is None or entry.get("microbatches") != "stages":
        return run
    rule = f"{printable(run.framework, 40)} makes as many microbatches as stages"
    assumed.append(Assumed(key="mbs", value=str(run.gbs // ranks), rule=rule))
    return replace(run, microbatch=run.gbs // ranks)


def _batch(run: Run, dp: int, mbs: int, assumed: list[Assumed]) -> tuple[int, float]:
    """Sequences of a step, rounded to whole microbatches, and the row's own batch divided by them.

    A run that ran out of memory failed in its first microbatch, so its row needs no batch.
    """
    steps = re.search(r"(?:grad_accum|ga)\s*=\s*(\d{1,6})", run.flags.lower())
    batch = run.gbs or (dp * mbs * int(steps[1]) if steps else None)
    if not batch and run.oom:
        batch = dp * mbs
        assumed.append(Assumed(key="global_batch", value=str(batch), rule="one microbatch a step shows its memory"))
    if not batch:
        raise UnpricedRun("global batch not stated")
    if batch < dp * mbs:
        raise UnpricedRun(f"global batch {batch} is less than dp * microbatch = {dp * mbs}")
    whole = -(-batch // (dp * mbs)) * dp * mbs
    if whole > _LARGEST:
        raise UnpricedRun(f"global batch {batch}")
    if whole != batch:
        assumed.append(Assumed(key="global_batch", value=str(whole), rule=f"{batch} in whole microbatches"))
    return whole, batch / whole
