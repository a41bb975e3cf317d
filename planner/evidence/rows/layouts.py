"""The layout that a row of a table states: degrees, chunks, shards, offload and recomputed operators."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from planner.errors import InputError
from planner.evidence.rows.knowledge import UnpricedRun, knowledge
from planner.layout import Assumed
from planner.search.given import split_with_ends
from planner.specs.pipeline_letters import Pieces, pieces_of_letters
from planner.specs.recompute import canonical, policy_fault
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from planner.evidence.rows.runs import Run
    from planner.specs.engine import EngineSpec
    from planner.specs.model import ModelSpec
    from planner.specs.recipe import Offload

_LARGEST_DEGREE: Final = 1_000_000
_LARGEST_PIPELINE: Final = 10_000


def degrees_of(run: Run, assumed: list[Assumed]) -> dict[str, int]:
    """The degrees tp, pp, cp and dp.

    If the stated dp contradicts the number of GPUs, as in expert-dp columns, the number of GPUs takes precedence.
    """
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    if max(tp, cp) > _LARGEST_DEGREE or pp > _LARGEST_PIPELINE:
        raise UnpricedRun(f"tp {tp}, pp {pp}, cp {cp}")
    inner, dp = tp * pp * cp, run.dp or 0
    if not run.gpus and not dp:
        raise UnpricedRun("number of GPUs not stated")
    if run.gpus and run.gpus % inner == 0:
        dp = run.gpus // inner
        if run.dp and run.dp != dp:
            assumed.append(Assumed(key="dp", value=str(dp), rule=f"by the number of GPUs, not {run.dp}"))
    elif run.gpus and not 0 < inner * dp <= run.gpus:
        raise UnpricedRun(f"tp * pp * cp = {inner} does not divide {run.gpus} GPUs")
    return {"tp": tp, "pp": pp, "cp": cp, "dp": dp}


def layout_of(
    run: Run, model: ModelSpec, engine: EngineSpec, degrees: Mapping[str, int], assumed: list[Assumed]
) -> dict[str, Any]:
    """The layout keys that the row states; other keys are None or left out."""
    tp, pp, dp = degrees["tp"], degrees["pp"], degrees["dp"]
    experts = _experts(run, model, tp * degrees["cp"] * dp) if model.moe is not None else {}
    pipeline = _pipeline(run, model, engine, pp, assumed)
    offload = _offload(run, assumed)
    zero = _zero(run) if dp * degrees["cp"] > 1 else 0
    if not zero and offload not in ("none", "activations"):
        zero = _zero(run) or 1  # the host updates shards, also those of one device
    if zero == 3 and pp > 1 and 3 in engine.pipeline.zero_stages and engine.memory.whole_gradients == "piped":
        zero = 1  # FSDP2: without a word of it, a pipeline's weights and gradients stay whole between microbatches
        rule = "fully_shard does not reshard under a pipeline by default"
        assumed.append(Assumed(key="zero", value="1", rule=rule))
    own = {
        "zero": zero,
        "hsdp": _hsdp(run, dp) if zero else 1,
        "sp": run.sp and min(run.sp, 1) if tp > 1 else None,
        "recompute": _recompute(run, engine, assumed),
        "offload": offload,
    }
    without = {"hsdp": 1, "offload": "none"}
    stated = {key: value for key, value in own.items() if value != without.get(key)}
    return {**degrees, **experts, "mbs": run.microbatch or run.mbs, **pipeline, **stated}


def _experts(run: Run, model: ModelSpec, ranks: int) -> dict[str, int]:
    """Degrees of expert parallelism and, if stated, of expert tensor parallelism.

    Both divide the ranks tp * cp * dp.
    """
    ep = run.ep or 1
    assert model.moe is not None
    if ranks % (ep * (run.etp or 1)) or model.moe.num_experts % ep:
        raise UnpricedRun(f"expert parallelism {ep} over {ranks} ranks and {model.moe.num_experts} experts")
    return {"ep": ep, "etp": run.etp} if run.etp else {"ep": ep}


def _pipeline(run: Run, model: ModelSpec, engine: EngineSpec, pp: int, assumed: list[Assumed]) -> dict[str, Any]:
    """Schedule, chunks of a stage and their layers, where the row states them; empty without a pipeline.

    A blank cell means the engine's default of one chunk. A source that says nothing of chunks, in a table that asks for
    them, is a tuned run: its stages are interleaved if the engine can do so.
    """
    if pp > model.num_layers:
        raise UnpricedRun(f"{pp} pipeline stages for {model.num_layers} layers")
    if pp == 1:
        return {}
    words, stated = run.flags.lower(), run.interleave or run.vpp
    schedule = next((schedule for word, schedule in knowledge("aliases")["schedules"].items() if word in words), None)
    if schedule:
        return {"schedule": schedule} | ({"dp": None} if schedule == "dualpipe" else {})
    if pieces := _stated_pieces(run, model, pp):
        lists = ["/".join(map(str, each)) for each in pieces]
        stated_mtp = {"mtp": lists[1]} if model.mtp_layers and lists[1] else {}
        return {"interleave": len(pieces.layers) // pp, "layers_per_stage": lists[0], **stated_mtp}
    if engine.pipeline.divides_by_cost:
        return {"layers_per_stage": "/".join(map(str, _layers_of_equal_cost(model, pp)))}
    if not stated:
        interleaves = stated == 0 and "interleaved" in engine.pipeline.schedules
        interleaves = interleaves or re.search(r"(?<!non-)(?<!not )interleav", words) is not None
        return {"schedule": "interleaved"} if interleaves else {}
    if stated * pp <= model.num_layers:
        return {"interleave": max(1, stated)}
    layers, mtp = model.num_layers, model.mtp_layers
    counts = [count for count in range(1, min(stated, layers) + 1) if stated % count == 0]
    most = max(v for v in counts if v == 1 or layers % (v * pp) == 0 or split_with_ends(layers, mtp, v * pp))
    rule = f"the most of {stated} chunks that hold layers, embedding and loss counted as layers"
    assumed.append(Assumed(key="interleave", value=str(most), rule=rule))
    return {"interleave": most}


def _layers_of_equal_cost(model: ModelSpec, pp: int) -> Iterator[int]:
    """Layers of each stage, if a stage ends with the block by which the costs so far exceed its share of the whole.

    A layer costs 4 h h + 3 h f, whatever it holds, and the head h V. The program leaves stages between the layers and
    the end of the model empty; here each of them has a layer.

    Source: nanotron, models/base.py (build_model), models/llama.py (get_block_compute_costs).
    """
    layers, h = model.num_layers, model.hidden_size
    layer = 4 * h * h + 3 * h * model.ffn_hidden_size
    whole = layers * layer + h * model.vocab_size
    ends = [min((k + 1) * whole // (layer * pp) + 1, layers - max(0, pp - 2 - k)) for k in range(pp)]
    return (end - start for start, end in pairwise([0, *ends]))


def _stated_pieces(run: Run, model: ModelSpec, pp: int) -> Pieces | None:
    """Layers of each chunk, and chunks of layers for multi-token prediction, as in the recipe's list.

    The list stands in its column or after the words `pipeline layout` of a flag: counts such as `13|11` and `4*14|1`,
    or the letters of Megatron-Core. None without a list.
    """
    in_flags = re.search(r"(?:pipeline|pp)[\w \-]*layout\W*([^;]+)", run.flags, re.IGNORECASE)
    stated = run.pipeline_layout or (in_flags[1] if in_flags else "")
    if not stated:
        return None
    found = _pieces_of(stated)
    if sum(found.layers) != model.num_layers or len(found.layers) % pp:
        raise UnpricedRun(f"pipeline layout {printable(stated, 40)} of {model.num_layers} layers")
    return found


def _pieces_of(stated: str) -> Pieces:
    """The pieces of each chunk from counts of layers, or from letters; empty if the text is neither."""
    if letters := re.search(r"E[Etm|L\d*(), ]*L", stated):
        try:
            return pieces_of_letters(letters[0])
        except InputError:
            return Pieces((), ())
    parts = [re.fullmatch(r"\s*(\d{1,5})\s*(?:[x*]\s*(\d{1,4}))?\D*", part) for part in re.split(r"[|/,]", stated)]
    counts = (int(part[1]) for part in parts if part for _ in range(int(part[2] or 1)))
    return Pieces(tuple(counts) if all(parts) else (), ())


def _offload(run: Run, assumed: list[Assumed]) -> Offload:
    """The tensors that the run keeps on its hosts; `full` offload includes the checkpointed activations."""
    words = run.flags.lower()
    if run.cpu_offload:
        rule = f"activations of {printable(run.cpu_offload, 40)} wait on the host, and a layout can say all or none"
        assumed.append(Assumed(key="offload", value="none", rule=rule))
    for word, offload in knowledge("aliases")["offloads"].items():
        if word in words and (offload != "params+states" or _zero(run) == 3):
            return offload  # type: ignore[no-any-return]
    return "optimizer" if run.offload else "none"


def _zero(run: Run) -> int | None:
    """The stated ZeRO stage; None if the row states none."""
    if run.zero_stage is not None and run.zero_stage <= 3:
        return run.zero_stage
    in_words = re.search(r"[0-3]", run.zero)
    return int(in_words[0]) if in_words else None


def _hsdp(run: Run, dp: int) -> int:
    """Number of replicas of the sharded group; the text `hsdp (shard 8 in node ...)` means 8 ranks per group."""
    words = f"{run.zero} {run.flags}".lower()
    if "hsdp" not in words and "hybrid_shard" not in words:
        return 1
    shard = re.search(r"shard\D{0,3}(\d{1,6})", words)
    size = int(shard[1]) if shard else run.gpus_per_node or 8
    return dp // size if size and dp % size == 0 else 1


def _recompute(run: Run, engine: EngineSpec, assumed: list[Assumed]) -> str | None:
    """The stated recompute policy: by Megatron's modules, for some layers, or by the engine's own name; else None."""
    kind, _, modules = run.recompute.lower().partition(":")
    stated = run.recompute_policy.lower() or kind.split(" ")[0]
    if stated == "full" and run.recompute_layers:
        return f"full:{run.recompute_layers}"
    if stated != "selective":
        return stated if stated in ("none", "full") else None
    named = "+".join(re.findall(r"[a-z_]+", run.recompute_modules.lower() or modules))
    if named and not policy_fault(named):
        return canonical(named)
    words = f"{run.recompute} {run.flags}".lower()
    if "every" in words and ("layer" in words or "block" in words):
        number = re.search(r"every (\d+)", words)
        if number is None and "other" not in words:
            assumed.append(Assumed(key="recompute", value="every:2", rule="every how many layers is not stated"))
        return f"every:{number[1]}" if number else "every:2"
    if engine.can.recomputes("selective"):
        return "selective"
    # selection by operator keeps the matrix products: the recomputed operators are cheap
    assumed.append(Assumed(key="recompute", value="none", rule=f"{engine.name} has no selective policy; it is cheap"))
    return "none"
