"""From a row of a table to a job and a layout; what a row does not state is decided here, once, with the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

from planner.accuracy.knowledge import UnpricedRun, knowledge, normalized
from planner.accuracy.machines import cluster_of
from planner.accuracy.models import model_of
from planner.layout import Layout, even_split
from planner.specs.by_name import load_engine, shipped_calibration
from planner.specs.calibration import find_entry
from planner.specs.job import PoolJob
from planner.specs.text import printable
from planner.specs.training import TrainingSpec

if TYPE_CHECKING:
    from planner.accuracy.runs import Run
    from planner.specs.cluster import Precision
    from planner.specs.engine import EngineSpec, Offload, Recompute, Schedule
    from planner.specs.model import ModelSpec
    from planner.specs.recipe import MemoryRecipe

_LARGEST_BATCH: Final = 100_000_000
_LARGEST_SEQUENCE: Final = 100_000_000
_LARGEST_DEGREE: Final = 1_000_000
_LARGEST_PIPELINE: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """Why a row cannot be priced."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a row says, in the planner's own terms.

    share: batch of the row over the batch of `job`, below 1 where the microbatches were rounded up to whole ones;
    the step of the row takes this share of the job's step.
    assumed: what the row does not state and was decided here, in words.
    recomputed_share: part of the layers that recompute everything because the row would not fit otherwise.
    """

    job: PoolJob
    layout: Layout
    share: float = 1.0
    recomputed_share: float = 0.0
    assumed: tuple[str, ...] = ()

    @property
    def assumes_recompute(self) -> bool:
        """The row does not say whether activations are recomputed."""
        return any(each.startswith("recompute") for each in self.assumed)


def job_of(run: Run) -> Setup | Unsupported:
    """The job and the layout of a row, or the reason why there is none.

    The row's cells win; aliases.yaml and gpus.yaml add what no column holds. This never raises: rows of other
    people are not the user's mistakes.
    """
    try:
        return _setup(_with_knobs(run))
    except UnpricedRun as reason:
        return Unsupported(reason=str(reason))


def _setup(run: Run) -> Setup:
    if run.task.lower() in ("lora", "peft", "inference", "generation"):
        raise UnpricedRun(f"task {printable(run.task, 40)}")
    assumed: list[str] = []
    degrees = _degrees(run, assumed)
    world = degrees["tp"] * degrees["pp"] * degrees["cp"] * degrees["dp"]
    engine = engine_of(run, degrees["tp"] * degrees["pp"] * degrees["cp"] > 1)
    model = model_of(run)
    cluster = cluster_of(run, run.gpus or world)
    mbs = run.microbatch or run.mbs or _assume(1, "microbatch 1", assumed)
    batch, share = _batch(run, degrees["dp"], mbs, assumed)
    training = _training(run, model, batch, engine)
    calibration = find_entry(
        shipped_calibration(),
        device=cluster.device.name,
        engine=engine.name,
        precision=training.precision,
        experts=model.moe is not None,
    )
    job = PoolJob(
        model=model,
        cluster=cluster,
        training=training,
        engine=engine,
        allow_tp_across_nodes=True,
        calibration=calibration,
        evidence=shipped_calibration().evidence,
        spread=shipped_calibration().spread,
    )
    layout = _layout(run, job, degrees, mbs, assumed)
    return Setup(job=job, layout=layout, share=share, assumed=tuple(assumed))


def _assume(value: Any, words: str, assumed: list[str]) -> Any:
    assumed.append(words)
    return value


def _with_knobs(run: Run) -> Run:
    """The run with the cells that its source states outside its table.

    A cell of the row itself wins, but for `corrections`: cells that a table inferred and its source contradicts.
    """
    known = knowledge("aliases")
    cells = known["knobs"].get(run.source_set, {}).get(normalized(run.model), {})
    blank = {name: value for name, value in cells.items() if getattr(run, name) is None}
    for entry in known["corrections"]:
        if all(fnmatchcase(str(getattr(run, name)), pattern) for name, pattern in entry["match"].items()):
            blank |= entry["cells"]
    return replace(run, **blank) if blank else run


def _recipe(run: Run, engine: EngineSpec) -> MemoryRecipe:
    """The memory recipe that a source states for its runs; else what the engine keeps by default."""
    for entry in knowledge("aliases")["recipes"]:
        same = entry["source_set"] == run.source_set and entry["engine"] == engine.name
        if same and fnmatchcase(normalized(run.model), entry.get("model", "*")):
            return cast("MemoryRecipe", entry["memory_recipe"])
    return "engine"


# --- the engine -------------------------------------------------------------------------------------------------

_ENGINES: Final = (
    # words of the framework's name -> engine profile; the first match counts
    ("automodel", "torchtitan"),  # FSDP2, DTensor and torch pipelining, as torchtitan
    ("torchtitan", "torchtitan"),
    ("kempnerforge", "kempnerforge"),
    ("fsdp2", "torchtitan"),
    ("olmo", "torchtitan"),
    ("composer", "fsdp"),
    ("fms-fsdp", "fsdp"),
    ("paxml", "fsdp"),  # JAX: its compiler shards as FSDP does
    ("maxtext", "fsdp"),
    ("jax", "fsdp"),
    ("megatron-core", "megatron"),
    ("megatron-bridge", "megatron-bridge"),
    ("megatron-deepspeed", "deepspeed"),
    ("megatron(-deepspeed)", "deepspeed"),
    ("megatron", "megatron"),
    ("nemo", "megatron-bridge"),
    ("deepspeed", "deepspeed"),
    ("gpt-neox", "deepspeed"),
    ("fsdp", "fsdp"),
    ("alpa", "megatron-2021"),  # no fused attention, no distributed optimizer in its Megatron-like plans
)


def engine_of(run: Run, model_parallel: bool) -> EngineSpec:
    """The engine profile for a row's framework; one that nobody knows is priced as Megatron.

    Megatron-LM without fused attention is the code of 2021, or of 2022 where the source is the paper of that year or
    the run has sequence parallelism, which came then.
    Plain FSDP has no tensor, pipeline or context parallelism: such rows are of torch's composition.
    """
    words = run.framework.lower()
    name = next((engine for word, engine in _ENGINES if word in words), "megatron")
    if name == "megatron" and run.flash_attention == 0:
        name = "megatron-2022" if run.sp or "korthikanti" in run.source_set else "megatron-2021"
    if name == "fsdp" and model_parallel:
        name = "torchtitan"
    engine = _engine(name)
    once = any(word in f"{run.flags} {run.notes}".lower() for word in ("deepep", "hybridep"))
    dispatch = engine.communication.model_copy(update={"dispatches_once_per_host": True})
    return engine.model_copy(update={"communication": dispatch}) if once else engine


@cache
def _engine(name: str) -> EngineSpec:
    return load_engine(name)


# --- the workload -----------------------------------------------------------------------------------------------


def _training(run: Run, model: ModelSpec, batch: int, engine: EngineSpec) -> TrainingSpec:
    if not run.seq or run.seq > _LARGEST_SEQUENCE:
        raise UnpricedRun("sequence length not stated")
    fused = run.flash_attention != 0
    # the GPT runs of the time before fused attention trained with Megatron's default dropout of 0.1
    dropout = 0.0 if fused or model.activation == "swiglu" else 0.1
    return TrainingSpec(
        sequence_length=run.seq,
        global_batch_size=batch,
        precision=_precision(run),
        attention="flash" if fused else "unfused",
        dropout=dropout,
        memory_recipe=_recipe(run, engine),
    )


_LOW: Final[tuple[Precision, ...]] = ("fp4", "fp8")


def _precision(run: Run) -> Precision:
    """fp8 and fp4 by class; 16 bits are fp16 where the row says so or the GPU has no bf16."""
    words, kind = run.precision.lower(), run.precision_class.lower()
    for low in _LOW:
        if kind == low or (not kind and (low in words or low.replace("fp", "float") in words)):
            return low
    if kind not in ("", "16", "bf16", "fp16") or "32" in words:
        raise UnpricedRun(f"precision {printable(run.precision or kind, 40)}")
    return "fp16" if "fp16" in words or "v100" in run.gpu.lower() else "bf16"


def _batch(run: Run, dp: int, mbs: int, assumed: list[str]) -> tuple[int, float]:
    """Sequences per step in whole microbatches, and the row's own batch over that.

    What runs out of memory does so in its first microbatch, so that such a row needs no batch.
    """
    batch = run.gbs or _accumulated_batch(run, dp, mbs)
    if not batch and run.oom:
        batch = _assume(dp * mbs, "one microbatch a step", assumed)
    if not batch:
        raise UnpricedRun("global batch not stated")
    if batch < dp * mbs:
        raise UnpricedRun(f"global batch {batch} is less than dp * microbatch = {dp * mbs}")
    whole = -(-batch // (dp * mbs)) * dp * mbs
    if whole > _LARGEST_BATCH:
        raise UnpricedRun(f"global batch {batch}")
    return whole, batch / whole


def _accumulated_batch(run: Run, dp: int, mbs: int) -> int | None:
    steps = re.search(r"(?:grad_accum|ga)\s*=\s*(\d{1,6})", run.flags.lower())
    return dp * mbs * int(steps[1]) if steps else None


# --- the layout -------------------------------------------------------------------------------------------------


def _degrees(run: Run, assumed: list[str]) -> dict[str, int]:
    """tp, pp, cp and dp; the number of GPUs decides where it contradicts the stated dp, as with expert-dp columns."""
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    if max(tp, cp) > _LARGEST_DEGREE or pp > _LARGEST_PIPELINE:
        raise UnpricedRun(f"tp {tp}, pp {pp}, cp {cp}")
    inner = tp * pp * cp
    if not run.gpus:
        if not run.dp:
            raise UnpricedRun("number of GPUs not stated")
        return {"tp": tp, "pp": pp, "cp": cp, "dp": run.dp}
    if run.gpus % inner == 0:
        dp = run.gpus // inner
        if run.dp and run.dp != dp:
            assumed.append(f"dp {dp} by the number of GPUs, not {run.dp}")
        return {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
    if run.dp and inner * run.dp <= run.gpus:
        return {"tp": tp, "pp": pp, "cp": cp, "dp": run.dp}
    raise UnpricedRun(f"tp * pp * cp = {inner} does not divide {run.gpus} GPUs")


def _layout(run: Run, job: PoolJob, degrees: dict[str, int], mbs: int, assumed: list[str]) -> Layout:
    tp, pp, cp, dp = degrees["tp"], degrees["pp"], degrees["cp"], degrees["dp"]
    interleave = _interleave(run, job, degrees, mbs, assumed)
    zero = _zero(run, job.engine, pp, assumed) if dp * cp > 1 else 0
    ep, etp = _experts(run, job.model, tp, tp * cp * dp, assumed)
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=ep,
        etp=etp,
        zero=zero,
        hsdp=_hsdp(run, dp) if zero else 1,
        mbs=mbs,
        interleave=interleave,
        schedule=_schedule(run, interleave),
        sp=_sequence_parallel(run, tp, assumed),
        recompute=(_recompute(run, job.engine, assumed),) * (pp * interleave),
        offload=_offload(run),
        layers_per_stage=_layers_per_stage(job.model, pp, interleave, assumed),
    )


def _layers_per_stage(model: ModelSpec, pp: int, interleave: int, assumed: list[str]) -> tuple[int, ...]:
    """Equal chunks; where layers do not divide, and would with embedding, loss and further tokens, those count as one.

    So do the recipes of such models (--account-for-embedding-in-pipeline-split, --pipeline-model-parallel-layout).
    """
    num_chunks, ends = pp * interleave, model.num_layers + 2 + model.mtp_layers
    each, rest = divmod(ends, num_chunks)
    if num_chunks == 1 or model.num_layers % num_chunks == 0 or rest or each < 2 + model.mtp_layers:
        return even_split(model.num_layers, pp, interleave)
    assumed.append("embedding and loss count as layers")
    return (each - 1, *(each,) * (num_chunks - 2), each - 1 - model.mtp_layers)


def _offload(run: Run) -> Offload:
    """What the run keeps on its hosts; `full` offload takes the checkpointed activations too."""
    words = run.flags.lower()
    if "full cpu offload" in words:
        return "both"
    if "checkpoint-in-cpu" in words:
        return "activations"
    return "optimizer" if run.offload or "cpu offload" in words or "offload=true" in words else "none"


_INTERLEAVED: Final = ("megatron-core", "megatron-bridge", "nemo")
_MOST_LAYERS_OF_CHUNK: Final = 4


def _interleave(run: Run, job: PoolJob, degrees: dict[str, int], mbs: int, assumed: list[str]) -> int:
    """Chunks of a stage, as stated; NVIDIA's own recipes interleave, with at most 4 layers in a chunk.

    Elsewhere, and where the microbatches do not come in rounds, 1 as by default.
    """
    pp, num_layers = degrees["pp"], job.model.num_layers
    if pp > num_layers:
        raise UnpricedRun(f"{pp} pipeline stages for {num_layers} layers")
    stated = run.interleave or run.vpp
    if pp == 1:
        return 1
    if stated is None:
        tuned = any(word in run.framework.lower() for word in _INTERLEAVED)
        rounds = job.training.global_batch_size % (degrees["dp"] * mbs * pp) == 0
        own = num_layers // pp if tuned and rounds and num_layers % pp == 0 else 1
        chunks = next(
            chunks for chunks in range(1, own + 1) if own % chunks == 0 and own <= _MOST_LAYERS_OF_CHUNK * chunks
        )
        return int(_assume(chunks, f"interleave {chunks}", assumed))
    if stated * pp > num_layers:  # the ends count as layers there
        return int(_assume(num_layers // pp, f"interleave {num_layers // pp}: every chunk holds a layer", assumed))
    return max(1, stated)


def _zero(run: Run, engine: EngineSpec, pp: int, assumed: list[str]) -> int:
    """The stated stage; else what the engine does by default."""
    if run.zero_stage is not None and run.zero_stage <= 3:
        return run.zero_stage
    in_words = re.search(r"[0-3]", run.zero)
    if in_words:
        return int(in_words[0])
    offered = engine.pipeline.zero_stages if pp > 1 else engine.can.zero_stages
    # FSDP engines reshard after the forward pass by default; the others shard the optimizer alone
    default = max(offered, default=3) if engine.name in ("fsdp", "torchtitan") else min(1, max(offered, default=1))
    return int(_assume(default, f"zero {default}", assumed))


def _hsdp(run: Run, dp: int) -> int:
    """Replicas of the sharded group; `hsdp (shard 8 in node ...)` shards over 8 ranks."""
    words = f"{run.zero} {run.flags}".lower()
    if "hsdp" not in words and "hybrid_shard" not in words:
        return 1
    shard = re.search(r"shard\D{0,3}(\d{1,6})", words)
    size = int(shard[1]) if shard else run.gpus_per_node or 8
    return dp // size if size and dp % size == 0 else 1


def _experts(run: Run, model: ModelSpec, tp: int, ranks: int, assumed: list[str]) -> tuple[int, int]:
    """Degrees of expert and expert-tensor parallelism; `ep` is carved out of tp * cp * dp.

    Where the row does not say, experts are cut like the rest of the layer, which is Megatron-Core's default
    (expert_tensor_parallel_size = tensor_model_parallel_size), but for fine-grained experts, narrower than the
    model: every published recipe leaves those whole.
    """
    ep = run.ep or 1
    if model.moe is None:
        return 1, 1
    if ranks % ep or model.moe.num_experts % ep:
        raise UnpricedRun(f"expert parallelism {ep} over {ranks} ranks and {model.moe.num_experts} experts")
    if run.etp:
        if ranks % (ep * run.etp):
            raise UnpricedRun(f"ep * etp = {ep * run.etp} does not divide {ranks} ranks")
        return ep, run.etp
    wide = model.moe.ffn_hidden_size >= model.hidden_size
    etp = tp if wide and ranks % (ep * tp) == 0 else 1
    if tp > 1:
        assumed.append(f"etp {etp}")
    return ep, etp


def _schedule(run: Run, interleave: int) -> Schedule:
    words = run.flags.lower()
    named = {"zbv": "zbv", "zero bubble": "zb-h1", "zb-h1": "zb-h1", "dualpipe": "dualpipev", "gpipe": "gpipe"}
    found = next((schedule for word, schedule in named.items() if word in words), None)
    return cast("Schedule", found or ("interleaved" if interleave > 1 else "1f1b"))


def _sequence_parallel(run: Run, tp: int, assumed: list[str]) -> int:
    """As stated; else on with fused attention: both came to Megatron in 2022, and recipes switch on both."""
    if tp == 1:
        return 0
    if run.sp is not None:
        return min(run.sp, 1)
    default = 0 if run.flash_attention == 0 else 1
    return int(_assume(default, f"sp {default}", assumed))


def _recompute(run: Run, engine: EngineSpec, assumed: list[str]) -> Recompute:
    """As stated where the engine has it; else the framework's own default.

    NeMo and Megatron recompute nothing by default, torchtitan recomputes selectively. Without fused attention
    recomputing everything was the rule. Where the default does not fit, score.py adds as much
    as it takes.
    """
    stated = run.recompute_policy.lower() or run.recompute.lower().split(":")[0].split(" ")[0]
    if stated not in ("none", "selective", "full"):
        unfused = run.flash_attention == 0
        stated = "full" if unfused else "selective" if engine.name == "torchtitan" else "none"
        assumed.append(f"recompute {stated}")
    if stated == "selective" and "selective" not in engine.can.recompute:
        # per-operator selection keeps the matrix products: what is repeated is cheap
        stated = "none"
    return cast("Recompute", stated)
