"""Change one or two keys of a given layout, and price each change: what makes it fit, and what else it could be.

Every other value of tp, cp, pp, ep, microbatch, ZeRO stage, recompute, sequence parallelism and offload is tried;
interleave is 1, 2, 4 or 8. The other keys and the number of devices stay the same, so a change of a degree also changes
dp.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, combinations
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from planner.answers.changes import Change, kinds_of_training
from planner.cost.estimate import estimate, memory_of_stages
from planner.cost.segments import with_segment
from planner.layout import divisors, even_split
from planner.plan_parts import WrittenLayout
from planner.search.given import policies_of, with_policy
from planner.search.space.rules import broken_rules
from planner.specs.banned import searched_axes
from planner.specs.document import Document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from planner.layout import Layout
    from planner.specs.job import Job

_MOST_PAIRS: Final = 6
_KEYS: Final = ("sp", "zero", "interleave", "tp", "pp", "cp", "ep", "mbs", "recompute", "loss", "offload")
"""The keys of single changes, in their order; other changes of the training document only make a layout fit."""
_ADAPTERS: Final = "lora_rank"
_SWITCHES: Final = {"loss", "mlp_tiles", "expert_overlap", "attention"}
"""Keys that are one switch of a training program, and cost little time."""
_Case: TypeAlias = "tuple[Job, Layout]"


class FittingChange(Document):
    """A change of one or two keys, of the layout or of the job, that makes the layout fit."""

    change: str
    layout: WrittenLayout
    step_seconds: float
    chance_of_fitting: float


class _Step(NamedTuple):
    """A change of one key: its description, and the function that changes a job and a layout."""

    key: str
    words: str
    of: Callable[[Job, Layout], _Case | None]


def layout_remedies(job: Job, layout: Layout) -> tuple[FittingChange, ...]:
    """The fastest change of each key that makes the layout fit, or else of each pair of keys; fastest first.

    Pairs are tried if no single change except adapters makes the layout fit; otherwise only pairs with one switch of
    the engine (`_SWITCHES`) that are faster than every single change. Adapters are proposed only alone, because they
    train a different model. In a pair, each change lowers the need of the fullest device and does not suffice, or is
    legal only together with the other change.
    """
    here, steps = _need((job, layout)), list(_steps(job, layout))
    needs = {step: _need(case) if (case := step.of(job, layout)) and _is_legal(case) else None for step in steps}
    fitting = [step for step, need in needs.items() if need is not None and need <= 1]
    found = _fastest_of_each((step.key, step.words, step.of(job, layout)) for step in fitting)
    least = min((each.step_seconds for each in found if _ADAPTERS not in each.change), default=math.inf)
    helps = [
        step
        for step, need in needs.items()
        if step.key != _ADAPTERS and ":" not in step.words and (need is None or 1 < need < here)
    ]
    pairs = _fastest_of_each(
        (f"{one.key},{other.key}", f"{one.words},{other.words}", case)
        for one, other in combinations(helps, 2)
        if one.key != other.key
        and (math.isinf(least) or {one.key, other.key} & _SWITCHES)
        and (first := one.of(job, layout))  # the layout after the first change alone may be illegal
        and (case := other.of(*first))
        and _is_legal(case)
        and _need(case) <= 1
    )
    return (*found, *[each for each in pairs if each.step_seconds < least][:_MOST_PAIRS])


def single_changes(job: Job, layout: Layout) -> tuple[tuple[str, Job, Layout], ...]:
    """For each key the change that is fastest of those that fit; of keys without one, the change that lacks least.

    Each is given in words, with the job and the layout after it. A change that a rule forbids is last.
    """
    best: dict[str, tuple[tuple[int, float], str, _Case]] = {}
    for step in _steps(job, layout):
        case = step.of(job, layout) if step.key in _KEYS and ":" not in step.words else None
        if case is None:
            continue
        standing = _standing(case)
        if step.key not in best or standing < best[step.key][0]:
            best[step.key] = (standing, step.words, case)
    return tuple((words, *case) for _, words, case in (best[key] for key in _KEYS if key in best))


def _standing(case: _Case) -> tuple[int, float]:
    if not _is_legal(case):
        return 2, 0.0
    need = _need(case)
    return (0, estimate(*case).step_seconds) if need <= 1 else (1, need)


def _need(case: _Case) -> float:
    """Memory need of the fullest device or host, as a share of its limit."""
    held = [each for stage in memory_of_stages(*case) for each in (stage, stage.host) if each]
    return max(each.total_bytes / each.limit_bytes for each in held)


def _is_legal(case: _Case) -> bool:
    return not broken_rules(*case)


def _fastest_of_each(found: Iterable[tuple[str, str, _Case | None]]) -> list[FittingChange]:
    """The fastest layout for each key, fastest first."""
    best: dict[str, FittingChange] = {}
    for key, words, case in found:
        if case is None:
            continue
        job, layout = case
        priced = estimate(job, layout)
        if key not in best or priced.step_seconds < best[key].step_seconds:
            best[key] = FittingChange(
                change=words,
                layout=layout,
                step_seconds=priced.step_seconds,
                chance_of_fitting=min(stage.chance_of_fitting for stage in priced.memory),
            )
    return sorted(best.values(), key=lambda each: each.step_seconds)


# --- changes of a key -------------------------------------------------------------------------------------------


def _steps(job: Job, layout: Layout) -> Iterator[_Step]:
    """The changes that are tried, one key each."""
    yield from _degrees(job, layout)
    yield from (_on_layout("mbs", each, _with_microbatch) for each in divisors(job.training.global_batch_size))
    for zero in range(4):
        if zero != layout.zero:
            yield _on_layout("zero", zero, _with_zero)
    for interleave in (1, 2, 4, 8):
        if interleave != layout.interleave and not layout.pools and layout.schedule in ("1f1b", "interleaved"):
            yield _on_layout("interleave", interleave, _with_interleave)
    yield from (_on_layout("recompute", each, lambda _, *key: with_policy(*key)) for each in policies_of(job, layout))
    yield _on_layout("sp", 1 - layout.sp, lambda _, layout, value: replace(layout, sp=value) if layout.tp > 1 else None)
    for offload in job.engine.offload.what if job.has_hosts else ():
        yield _on_layout("offload", offload, lambda _, layout, value: replace(layout, offload=value))
    for change in chain(*kinds_of_training(job)):
        yield _on_job(change)


def _degrees(job: Job, layout: Layout) -> Iterator[_Step]:
    axes = searched_axes(job.engine)
    for key in ("tp", "cp", "ep") if job.model.moe else ("tp", "cp"):
        for value in divisors(layout.tp * layout.cp * layout.dp):
            if value != getattr(layout, key) and (value == 1 or key in axes):
                yield _on_layout(key, value, _with_degree(key))
    if layout.pools or layout.schedule not in ("1f1b", "interleaved"):
        return
    for pp in divisors(layout.world_size):
        if pp != layout.pp:
            yield _on_layout("pp", pp, _with_pipeline)


def _on_layout(key: str, value: object, change: Callable[..., Layout | None]) -> _Step:
    def changed(job: Job, layout: Layout) -> _Case | None:
        other = change(job, layout, value)
        if other is None or other == layout:
            return None
        return job, with_segment(job.cluster, replace(other, segment=0)) if layout.segment else other

    return _Step(key, f"{key}={value}", changed)


def _on_job(change: Change) -> _Step:
    def changed(job: Job, layout: Layout) -> _Case | None:
        other = change.of(job)
        return (other, layout) if other else None

    return _Step(change.kind, change.words, changed)


def _with_degree(key: str) -> Callable[..., Layout | None]:
    """A function that changes a degree inside a stage and keeps the number of devices."""

    def changed(job: Job, layout: Layout, value: int) -> Layout | None:
        if key == "ep":
            return replace(layout, ep=value)
        tp, cp = (value, layout.cp) if key == "tp" else (layout.tp, value)
        dp, rest = divmod(layout.tp * layout.cp * layout.dp, tp * cp)
        if rest or dp < 1:
            return None
        etp = tp if layout.etp == layout.tp > 1 else min(layout.etp, tp)
        sp = layout.sp if layout.tp > 1 else max(job.engine.can.sp)
        return replace(layout, tp=tp, cp=cp, dp=dp, etp=etp, sp=sp if tp > 1 else 0, hsdp=1)

    return changed


def _with_pipeline(job: Job, layout: Layout, pp: int) -> Layout | None:
    """The layout with another number of stages on the same devices, with even layers and the most common policy."""
    dp, rest = divmod(layout.world_size, pp * layout.tp * layout.cp)
    if rest or dp < 1:
        return None
    interleave = layout.interleave if pp > 1 else 1
    return _cut(job, replace(layout, dp=dp, hsdp=1), pp, interleave)


def _with_interleave(job: Job, layout: Layout, interleave: int) -> Layout | None:
    return _cut(job, layout, layout.pp, interleave) if layout.pp > 1 else None


def _cut(job: Job, layout: Layout, pp: int, interleave: int) -> Layout | None:
    chunks = pp * interleave
    if chunks > job.model.num_layers:
        return None
    return replace(
        layout,
        pp=pp,
        interleave=interleave,
        schedule="interleaved" if interleave > 1 else "1f1b",
        layers_per_stage=even_split(job.model.num_layers, pp, interleave),
        mtp=(),
        recompute=(_policy_of_most(layout),) * chunks,
    )


def _policy_of_most(layout: Layout) -> str:
    layers = dict.fromkeys(layout.recompute, 0)
    for policy, count in zip(layout.recompute, layout.layers_per_stage, strict=True):
        layers[policy] += count
    return max(layers, key=lambda policy: layers[policy])


def _with_microbatch(job: Job, layout: Layout, mbs: int) -> Layout | None:
    divides = job.training.global_batch_size % (layout.dp * mbs) == 0
    return replace(layout, mbs=mbs) if divides else None


def _with_zero(_: Job, layout: Layout, zero: int) -> Layout | None:
    return replace(layout, zero=zero, hsdp=layout.hsdp if zero else 1) if layout.dp * layout.cp > 1 else None
