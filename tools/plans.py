"""Report the cost of the recommendation compared with the proven minimum, on the jobs of published runs (`make plans`).

    python tools/plans.py [TABLE] [--source NAME ...] [--every N]
    python tools/plans.py --ten
    python tools/plans.py --beaten [--every N]
    python tools/plans.py --published

Each job of the table is planned once, whatever layouts its rows ran. The report has

- the cost and the gain of each choice that differs from the minimum,
- the memory of each plan's fullest device,
- the number of plans with idle devices, and the number with more than 8 chunks per stage; for both, also the number of
  plans for which an equally good layout without this feature exists,
- for rows that the maker of the program or device tuned, the forecast of their layout compared with the plan's.

`--beaten` counts the plans that are slower than a layout of their list, a runner-up or the minimum, and better than it
in no key. `--published` sets the plan and the minimum of DeepSeek-V3 on 2,048 H800 beside a step with equal stages, and
plans beside published layouts: those of pipeline_layouts.yaml, and those of the table's rows that ran DeepSeek-V3.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from planner.cost.band import axes_of, features_of
from planner.cost.estimate import estimate, memory_of_stages
from planner.cost.microbatch import num_microbatches
from planner.cost.prices import layout_prices
from planner.cost.schedule import step_seconds
from planner.errors import InputError
from planner.evidence.rows.jobs import Unsupported, job_of
from planner.evidence.rows.runs import read_runs
from planner.plan_parts import WITHIN
from planner.search import recommendation
from planner.search.footprint import NothingFits
from planner.search.given import given_layout
from planner.search.near_ties import runner_up
from planner.search.ranking import keys_of
from planner.search.search import search
from planner.search.space.arrays import TIE
from planner.search.space.constraints import Condition, Constraints
from planner.show.words import short_layout
from planner.specs.load import load_job
from planner.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from planner.evidence.rows.jobs import Setup
    from planner.evidence.rows.runs import Run
    from planner.layout import Degrees, Layout
    from planner.numbers import Flag
    from planner.plan import Plan
    from planner.search.found import Assigned, Found
    from planner.specs.job import Job

TABLE: Final = Path(__file__).parents[1] / "tests" / "published" / "measurements.csv"
PIPELINES: Final = TABLE.parent / "pipeline_layouts.yaml"
VENDORS: Final = (
    "megatron-bridge",
    "dgxc",
    "nemo-24.07",
    "nemo-longseq",
    "mlperf-gpt3",
    "nemotron4-15b",
    "mbridge-cards",
)
"""Sources in which the makers of the program or of the devices chose the layouts for speed."""
NEAR: Final = 0.03  # a vendor's layout is as good as the plan if its step is longer by at most this share
FAR: Final = 0.10  # a plan whose step is shorter by more than this share is doubtful: the vendor tuned its layout
FULL: Final = 0.97
TEN: Final = (
    ("GPT-3 175B, 1,024 A100", "gpt3-175b", "dgx-a100", "megatron", 128, 2048, 1536),
    ("Llama-3-70B, 128 H100", "llama3-70b", "dgx-h100", "megatron", 16, 8192, 1024),
    ("Llama-3-70B, 128 H100, torch", "llama3-70b", "dgx-h100", "torch", 16, 8192, 1024),
    ("Llama-3-8B, 32 H100, torchtitan", "llama3-8b", "dgx-h100", "torchtitan", 4, 8192, 256),
    ("Llama-2-13B, 64 A100", "llama2-13b", "dgx-a100", "megatron", 8, 4096, 512),
    ("Megatron 1T, 3,072 A100", "megatron-1t", "dgx-a100", "megatron", 384, 2048, 3072),
    ("Llama-3-405B, 16,384 H100", "llama3-405b", "dgx-h100", "megatron", 2048, 8192, 2048),
    ("Mixtral 8x7B, 64 H100", "mixtral-8x7b", "dgx-h100", "megatron", 8, 4096, 1024),
    ("Qwen3-30B-A3B, 32 H100", "qwen3-30b-a3b", "dgx-h100", "megatron", 4, 4096, 1024),
    ("DeepSeek-V3, 2,048 H800", "deepseek-v3", "hgx-h800", "megatron", 256, 4096, 15360),
    ("DeepSeek-V3, 2,048 H800, fp8", "deepseek-v3", "hgx-h800", "megatron", 256, 4096, 15360, "fp8"),
    ("DeepSeek-V3, 1,024 GB200", "deepseek-v3", "gb200-nvl72", "megatron", 256, 4096, 8192),
)
"""Name, model, cluster, engine, hosts, sequence length, global batch, and precision, of jobs with a comment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A distinct job, the rows that ran it, and its plan (None if no layout is legal or fits)."""

    job: Job
    rows: tuple[tuple[Run, Setup], ...]
    plan: Plan | None

    @property
    def name(self) -> str:
        """Source, model and size."""
        run = self.rows[0][0]
        return f"{run.source_set} {run.model}, {self.job.cluster.num_devices} x {self.job.cluster.pools[0].device.name}"

    @property
    def filled(self) -> float:
        """Forecast memory of the plan's fullest stage, as a share of a device's whole memory."""
        assert self.plan is not None
        return max(stage.total_bytes for stage in self.plan.memory) / self.job.pools[0].whole_memory_bytes


def distinct_jobs(runs: Iterable[Run]) -> list[tuple[Job, tuple[tuple[Run, Setup], ...]]]:
    """The jobs that differ in at least one document, with their rows; rows without a price are left out."""
    found: dict[tuple[str, ...], list[tuple[Run, Setup]]] = {}
    for run in runs:
        setup = job_of(run)
        if not isinstance(setup, Unsupported):
            job = setup.job
            documents = (job.model, job.cluster, job.training, job.engine)
            found.setdefault(tuple(each.model_dump_json() for each in documents), []).append((run, setup))
    return [(rows[0][1].job, tuple(rows)) for rows in found.values()]


def planned(job: Job, rows: tuple[tuple[Run, Setup], ...], top: int = 0) -> Planned:
    """The job with its plan, as `planner plan` makes it.

    Tensor parallelism stays inside the scale-up domain, unless a row of the job crosses it. Published layouts are
    always priced without this rule.
    """
    crosses = any(setup.layout.tp > job.cluster.scale_up_devices for _, setup in rows)
    job = replace(job, allow_tp_across_nodes=crosses)
    try:
        plan = search(job, Constraints(), within=WITHIN, top=top)
    except InputError:
        plan = None
    return Planned(job=job, rows=rows, plan=None if isinstance(plan, NothingFits) else plan)


class _LeavesIdle(Condition):
    """The condition that a layout leaves devices idle, which cannot be written on the command line."""

    is_numeric = True

    def holds(self, degrees: Degrees) -> Flag:
        return np.asarray(degrees.tp * degrees.pp * degrees.cp * degrees.dp < int(self.value))


def needless(each: Planned) -> tuple[str, ...]:
    """Features of a plan that are not needed: a new search finds an equally good layout without the feature.

    Equally good means within the window, and not worse in any earlier key.
    """
    plan = each.plan
    assert plan is not None
    assert plan.minimum is not None
    num_devices, found = plan.cluster.num_devices, list[str]()
    forbidden = {
        "machines": _LeavesIdle(key="world_size", sign="<", value=str(num_devices)),
        "chunks": Condition(key="interleave", sign=">", value="8"),
    }
    has = {"machines": plan.layout.world_size < num_devices, "chunks": plan.layout.interleave > 8}
    longest = plan.minimum.step_seconds * (1 + WITHIN)
    for key in (key for key, it_has in has.items() if it_has):
        without = Constraints(forbidden=((forbidden[key],),))
        try:
            least = search(each.job, without, top=0)
            if isinstance(least, NothingFits) or least.fits != plan.fits or least.step_seconds > longest:
                continue
            other = search(each.job, without, within=longest / least.step_seconds - 1, top=0)
        except InputError:  # no legal layout lacks the feature
            continue
        assert not isinstance(other, NothingFits)
        mine, theirs = (asdict(keys_of(each.job, one.layout)) for one in (plan, other))
        before = list(mine)[: list(mine).index(key)]
        if [theirs[name] for name in before] <= [mine[name] for name in before]:
            found.append(key)
    return tuple(found)


def own_keys(job: Job, layout: Layout) -> tuple[int, ...]:
    """The keys of the ranking, counted from the layout itself and not by `planner.search.ranking`."""
    (pool,) = job.cluster.pools
    stages = [layout.layers_per_stage[stage :: layout.pp] for stage in range(layout.pp)]
    loops = any(policy.startswith(("full:", "every:")) for policy in layout.recompute)
    risk = 1 - min(stage.chance_of_fitting for stage in memory_of_stages(job, layout))
    kind = job.engine.name, job.model.moe is not None, features_of(job, layout)
    runs = [each.axes for each in job.evidence if (each.engine, each.experts, each.features) == kind]
    return (
        math.ceil(layout.world_size / pool.devices_per_host),
        int(bool(runs) and axes_of(layout) not in runs),
        sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep)),
        int(loops or len(set(layout.recompute)) > 1),
        layout.interleave,
        0 if job.headroom is not None else (risk > 0.01) + (risk > 0.05),
        int(len({layers for stage in stages[1:-1] for layers in stage}) > 1),
    )


def beaten_by(job: Job, rows: tuple[tuple[Run, Setup], ...]) -> tuple[Plan | None, list[Layout]]:
    """The plan of a job, and the layouts of its list, its runners-up and its minimum that beat it in each key."""
    listed: list[Layout] = []
    own = recommendation.shortlist

    def shortlist(found: Found, window: recommendation.Window) -> list[Assigned]:
        result = own(found, window)
        listed.extend(map(found.layout_of, result))
        return result

    recommendation.shortlist = shortlist
    try:
        each = planned(job, rows, top=10)
    finally:
        recommendation.shortlist = own
    plan = each.plan
    if plan is None:
        return None, []
    listed += [runner.layout for runner in plan.runners_up]
    listed += [plan.minimum.layout] if plan.minimum else []
    mine, others = own_keys(job, plan.layout), dict.fromkeys(listed)
    faster = [each for each in others if estimate(job, each).step_seconds < plan.step_seconds * (1 - TIE)]
    pairs = ((each, zip(own_keys(job, each), mine, strict=True)) for each in faster)
    return plan, [each for each, keys in pairs if all(one <= other for one, other in keys)]


def costs(found: Sequence[Planned]) -> Table:
    """The cost of the choices compared with the minima, over all jobs with a plan."""
    plans = [each.plan for each in found if each.plan is not None]
    above = [plan.minimum.above for plan in plans if plan.minimum is not None]
    fills = [each.filled for each in found if each.plan is not None]
    table = Table("jobs", "of them", title=f"the easiest to run within {WITHIN:.0%} of the minimum")
    extra = [needless(each) for each in found if each.plan is not None]
    differ = sum(plan.minimum is not None and plan.minimum.layout != plan.layout for plan in plans)
    rows = [
        ("distinct jobs", len(found)),
        ("with a plan", len(plans)),
        ("whose plan is not the minimum", differ),
        ("cost of the choice, median", f"{median(above):.2%}"),
        ("cost of the choice, 90 in 100", f"{np.quantile(above, 0.9):.2%}"),
        ("cost of the choice, most", f"{max(above):.2%}"),
        ("plans with idle devices", sum(plan.layout.world_size < plan.cluster.num_devices for plan in plans)),
        ("of these with a layout without, as good, in the window", sum("machines" in each for each in extra)),
        ("plans with more than 8 chunks a stage", sum(plan.layout.interleave > 8 for plan in plans)),
        ("of these with a layout without, as good, in the window", sum("chunks" in each for each in extra)),
        (f"plans above {FULL:.0%} of the memory that a program can have", sum(each > FULL for each in fills)),
        ("median share of that memory", f"{median(fills):.1%}"),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    return table


def differences(found: Sequence[Planned]) -> Table:
    """Jobs whose plan is not the minimum: the loss in the objective, and the key that is better."""
    title = "answers that differ from the minimum"
    table = Table("job", "minimum", "plan", "costs", "for", title=title, show_lines=True)
    for each in found:
        if each.plan is None or each.plan.minimum is None or each.plan.minimum.layout == each.plan.layout:
            continue
        least = each.plan.minimum
        layouts = (short_layout(layout) for layout in (least.layout, each.plan.layout))
        table.add_row(each.name, *layouts, f"{least.above:.2%}", least.reason)
    return table


def vendors(found: Sequence[Planned]) -> tuple[str, Table]:
    """How many of the vendors' layouts are as good as the plan by this cost model, and a table of the other layouts."""
    table = Table("row", "its layout", "plan", "its price", title="vendors' layouts that are dearer", show_lines=True)
    num_near = num_far = num_rows = 0
    most = 0.0
    for each in found:
        for run, setup in each.rows if each.plan is not None else ():
            if run.source_set not in VENDORS:
                continue
            plan = each.plan
            assert plan is not None
            priced, own = estimate(each.job, setup.layout), estimate(each.job, plan.layout)
            num_rows += 1
            most = max(most, own.step_seconds / priced.step_seconds if priced.fits else 0.0)
            num_far += priced.step_seconds > own.step_seconds * (1 + FAR)
            if priced.step_seconds <= own.step_seconds * (1 + NEAR):
                num_near += 1
                continue
            why = runner_up(each.job, plan.layout, own, setup.layout, priced).reason
            layouts = (short_layout(layout) for layout in (setup.layout, plan.layout))
            table.add_row(f"{run.id} {each.name}", *layouts, why)
    near, far = (f" ({num / num_rows:.0%})" if num_rows else "" for num in (num_near, num_far))
    words = f"vendors' rows whose layout is at most {NEAR:.0%} dearer than the plan: {num_near} of {num_rows}{near}"
    words = f"{words}; more than {FAR:.0%} dearer: {num_far}{far}"
    return f"{words}; a plan takes at most {most:.3f} of a row that fits", table


def sized(model: str, cluster: str, engine: str, nodes: int, length: int, batch: int, **others: Any) -> Job:
    """The job of a shipped model on hosts of a shipped cluster."""
    others |= {"nodes": nodes, "sequence_length": length, "global_batch_size": batch}
    return load_job(model=model, cluster=cluster, engine=engine, **others)


def both_answers() -> None:
    """Print the minimum and the plan of these jobs, the length of the list, and the layout with published runs."""
    for name, model, cluster, engine, nodes, length, batch, *precision in TEN:
        job = sized(model, cluster, engine, nodes, length, batch, precision=precision[0] if precision else None)
        plan = planned(job, (), top=3).plan
        if plan is None or plan.minimum is None:
            print(f"{name}: no plan")
            continue
        least, peak = plan.minimum, max(stage.total_bytes for stage in plan.memory)
        print(f"{name}")
        print(f"  minimum  {short_layout(least.layout)}: {least.step_seconds:.4g} s, {format_bytes(least.peak_bytes)}")
        print(f"  plan     {short_layout(plan.layout)}: {plan.step_seconds:.4g} s, {format_bytes(peak)}")
        told = plan.certificate and plan.certificate.recommendation
        listed = f"of {told.num_listed} listed, " if told else ""
        print(f"           {listed}{least.above:.1%} above, for {least.reason or 'nothing: it is the minimum'}")
        if other := plan.with_runs:
            runs = f"{other.num_runs} runs with {other.axes} by {', '.join(other.families)}"
            print(f"  runs     {short_layout(other.layout)}: {other.step_seconds:.4g} s, {runs}")


def above_balance(job: Job, layout: Layout) -> float:
    """The step of a layout divided by its step if all stages took their mean: same work, bubble and tail.

    Source: planner.cost.schedule.step_seconds.
    """
    priced, m = estimate(job, layout), float(num_microbatches(job, layout))
    mean = float(np.mean(layout_prices(job, layout).microbatch_seconds))
    return priced.step_seconds / float(step_seconds(m, layout.interleave, mean, mean * layout.pp, priced.tail_seconds))


def balances() -> None:
    """Print the step of DeepSeek-V3 on 2,048 H800 against the balance, with and without ends as pieces."""
    for precision in ("fp8", "bf16"):
        for ends in ("true", "false"):
            others = {"precision": precision, "settings": (f"engine.pipeline.places_ends={ends}",)}
            job = sized("deepseek-v3", "hgx-h800", "megatron", 256, 4096, 15360, **others)
            plan = planned(job, ()).plan
            assert plan is not None
            assert plan.minimum is not None
            print(f"DeepSeek-V3, 2,048 H800, {precision}, ends are pieces: {ends}")
            for name, layout in (("minimum", plan.minimum.layout), ("plan", plan.layout)):
                step = f"{estimate(job, layout).step_seconds:.2f} s, {above_balance(job, layout):.3f} of its balance"
                print(f"  {name:8} {step}: {short_layout(layout)}")


def published_pipelines() -> dict[str, float]:
    """The plan's step divided by the published layout's, for each layout of PIPELINES on 1,024 H100."""
    ratios: dict[str, float] = {}
    plans: dict[str, tuple[Job, float]] = {}
    for name, each in yaml.safe_load(PIPELINES.read_text(encoding="utf-8")).items():
        if each["model"] not in plans:
            job = sized(each["model"], "dgx-h100", "megatron", 128, 4096, 4096)
            plan = planned(job, ()).plan
            assert plan is not None
            plans[each["model"]] = job, plan.step_seconds
        job, seconds = plans[each["model"]]
        layout, _ = given_layout(job, f"{each['degrees']},{each['places']}")
        ratios[name] = seconds / estimate(job, layout).step_seconds
        print(f"{each['model']}, {name}: the plan takes {ratios[name]:.3f} of {short_layout(layout)}")
    return ratios


def main() -> None:
    """Plan every job and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--source", action="append", help="rows of this source alone; may be repeated")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th job")
    parser.add_argument("--ten", action="store_true", help="the jobs of docs/how-it-decides.md alone")
    parser.add_argument("--beaten", action="store_true", help="count plans that are slower and in no key better")
    parser.add_argument("--published", action="store_true", help="DeepSeek-V3's balance, and published layouts")
    given = parser.parse_args()
    if given.ten:
        both_answers()
        return
    runs = [run for run in read_runs(given.table) if not given.source or run.source_set in given.source]
    if given.published:
        balances()
        published_pipelines()
        runs = [run for run in runs if run.model == "DeepSeek-V3"]
        line, _ = vendors([planned(*each) for each in distinct_jobs(runs)])
        print(line)
        return
    jobs = distinct_jobs(runs)[:: given.every]
    if given.beaten:
        answers = [beaten_by(*each) for each in jobs]
        plans = sum(plan is not None for plan, _ in answers)
        print(f"{len(jobs):,} jobs, {plans:,} plans, beaten in each key: {sum(bool(by) for _, by in answers):,}")
        return
    found = []
    for number, (job, rows) in enumerate(jobs, start=1):
        found.append(planned(job, rows))
        if number % 10 == 0 or number == len(jobs):
            sys.stderr.write(f"\r{number:,} of {len(jobs):,} jobs")
            sys.stderr.flush()
    sys.stderr.write("\n")
    console = Console(width=200)
    if not any(each.plan for each in found):
        console.print("no job has a plan")
        return
    line, table = vendors(found)
    for part in (costs(found), differences(found), line, table):
        console.print(part)


if __name__ == "__main__":
    main()
