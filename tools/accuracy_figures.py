"""The figures that judge a change of the cost model; each row is forecast by a fit without its family of publishers."""

from __future__ import annotations

import math
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from band_widths import one_family_of, spread_of
from calibrate import (
    Sample,
    evidence_of,
    family_folds,
    fits_without,
    held_out_ratios,
    read_samples,
    source_folds,
)
from memory_runs import assumes_recompute, memory_runs, memory_spreads, spread_of_run

from planner.cost.band import Band, band_of
from planner.cost.chance import UNLIKELY
from planner.cost.memory_band import MemoryDistribution
from planner.evidence.compare.groups import kinds_of
from planner.evidence.compare.score import Row, score
from planner.evidence.compare.sweeps import sweeps
from planner.specs.job import RISK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from planner.evidence.rows.runs import Run

LARGEST: Final = "hf-ultrascale"
"""A source that is reported separately: it has a quarter of all rows, on a network that no other source has."""

_RECIPE: Final[dict[str, Any]] = {
    **dict.fromkeys(("recompute_modules", "pipeline_layout", "cuda_graphs", "dispatcher", "cpu_offload"), ""),
    **dict.fromkeys(("recompute_layers", "moe_a2a_overlap", "mtp_layers")),
    "fp8_recipe": "",
}
"""Columns that come from a run's recipe and that a stranger hardly types, blank."""

_FEW: Final = 4
_MANY: Final = 20
_CHUNK: Final = 64
_FEWEST_LAYOUTS: Final = 4
FITS: Final = 1 - RISK


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Every row of a table, priced once, and forecasts by fits without the row's family of publishers.

    rows: all rows; the predictions of rows that the fit uses are held-out predictions.
    ratios: measured over predicted seconds of each sample.
    blanked: `ratios` with the cells of each run's recipe left out, as a stranger would state the run.
    of_sources: the same ratios by fits without the row's source alone; they are the evidence behind shipped bands.
    """

    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]
    ratios: NDArray[np.float64]
    blanked: NDArray[np.float64]
    of_sources: NDArray[np.float64]


class _Priced(NamedTuple):
    row: Row
    sample: Sample | None
    blanked: Sample | None  # without the recipe's cells


def hold_out(runs: Sequence[Run], processes: int = 1) -> HeldOut:
    """Price every run, and forecast each run by a fit of the runs of other families of publishers."""
    chunks = [runs[start : start + _CHUNK] for start in range(0, len(runs), _CHUNK)]
    if processes > 1:
        with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
            priced = [each for chunk in pool.map(_priced, chunks) for each in chunk]
    else:
        priced = [each for chunk in chunks for each in _priced(chunk)]
    samples = tuple(each.sample for each in priced if each.sample)
    folds = family_folds(samples)
    fits = fits_without(samples, folds)
    of_strangers = [each.blanked or each.sample for each in priced if each.sample]
    ratios, blanked = (held_out_ratios(each, folds, fits) for each in (samples, of_strangers))
    of_sources = held_out_ratios(samples, source_folds(samples))
    places = [number for number, each in enumerate(priced) if each.sample]
    rows = [each.row for each in priced]
    for place, sample, ratio in zip(places, samples, ratios, strict=True):
        rows[place] = replace(rows[place], predicted_seconds=sample.measured_seconds / float(ratio))
    return HeldOut(
        rows=tuple(rows),
        samples=samples,
        ratios=ratios,
        blanked=blanked,
        of_sources=of_sources,
    )


def _priced(runs: Sequence[Run]) -> list[_Priced]:
    found = []
    for run in runs:
        blank = replace(run, **_RECIPE)
        samples = [next(iter(read_samples([each])), None) for each in (run, *([blank] if blank != run else []))]
        found.append(_Priced(score(run), samples[0], samples[-1]))
    return found


def kinds(held: HeldOut) -> list[tuple[str, ...]]:
    """The kinds of each sample (`planner.evidence.compare.groups.kinds_of`)."""
    rows = {row.run.id: row for row in held.rows}
    return [kinds_of(rows[sample.run]) for sample in held.samples]


def held_out_bands(
    samples: Sequence[Sample], ratios: NDArray[np.float64], held: NDArray[np.float64] | None = None
) -> list[Band]:
    """The band of each sample, from the evidence of other families and from the spread chosen for this evidence.

    ratios: those of `HeldOut.of_sources`, of which shipped bands are made.
    held: those of `HeldOut.ratios`; without them, bands that rest on one family are not wider.
    """
    bands: dict[int, Band] = {}
    folds = family_folds(samples)
    for fold in set(folds):
        others = [i for i, own in enumerate(folds) if own != fold]
        evidence = evidence_of([samples[i] for i in others], ratios[others])
        spread = spread_of(evidence)
        if held is not None:
            unseen = evidence_of([samples[i] for i in others], held[others])
            spread = spread.model_copy(update={"one_family": one_family_of(evidence, unseen, spread)})
        for i, own in enumerate(folds):
            if own == fold:
                bands[i] = band_of(evidence, spread, **samples[i].kind)
    return [bands[i] for i in range(len(samples))]


def sizes(ratios: Sequence[float] | NDArray[np.float64]) -> tuple[float, float, float]:
    """Median, mean and 90th percentile of |ratio - 1| in percent; the percentile is always the value of some row."""
    errors = 100 * np.abs(np.asarray(ratios) - 1)
    return float(np.median(errors)), float(errors.mean()), float(np.quantile(errors, 0.9, method="lower"))


class Figure(NamedTuple):
    """One line of the table; `aim` is the value that a change should approach."""

    name: str
    num_rows: int
    value: str
    aim: str = ""


def figures(held: HeldOut) -> list[Figure]:
    """All figures, in a fixed order."""
    return [*_times(held), *_bands(held), *memory_figures(held), *_ranking(held)]


def memory_figures(held: HeldOut) -> list[Figure]:
    """Errors by counter, bands of peaks, and verdicts on runs that ran out of memory."""
    return [*_memory(held), *_outcomes(held)]


def _times(held: HeldOut) -> list[Figure]:
    samples, ratios = held.samples, held.ratios

    def where(name: str, test: Callable[[Sample], bool], aim: str = "") -> list[Figure]:
        chosen = ratios[[test(sample) for sample in samples]]
        return [Figure(name, len(chosen), _three(sizes(chosen)), aim)] if len(chosen) else []

    fitted = np.array([not sample.fit for sample in samples])
    apart = [
        line
        for name, mask in (("in a fit", fitted), ("in no fit", ~fitted))
        if mask.any()
        for line in _headlines(name, held, mask)
    ]
    of_kinds, all_kinds = [], kinds(held)
    for kind in sorted({kind for own in all_kinds for kind in own}):
        of_kinds += _headlines(kind, held, np.array([kind in own for own in all_kinds]))
    experts = np.array([bool(sample.keys["experts"]) for sample in samples])
    if experts.any():
        value = _three(sizes(held.blanked[experts]))
        of_kinds.append(Figure("experts, recipe cells blank, pooled", int(experts.sum()), value))
    own = list(_by_family(held).values())
    large = [sizes(values) for values in own if len(values) >= _FEW]
    macro = [Figure(f"mean over {len(large)} families", sum(map(len, own)), _three(np.mean(large, axis=0)), "10 13 22")]
    return [
        *where(f"all but {LARGEST}, pooled", lambda s: s.source != LARGEST, "6.5 11 24"),
        *apart,
        *of_kinds,
        *(macro if large else []),
        *where(LARGEST, lambda s: s.source == LARGEST, "25 45 100"),
        *where("aleph-alpha-layouts", lambda s: s.source == "aleph-alpha-layouts", "10 13 28"),
        *where("experts", lambda s: bool(s.keys["experts"]), "9 15 30"),
        *where("mbridge-memory", lambda s: s.source == "mbridge-memory", "20 25 40"),
        *where("megatron-sc21-t1", lambda s: s.source == "megatron-sc21-t1", "mean <= 3"),
        *where("megatron-sc21-t2", lambda s: s.source == "megatron-sc21-t2"),
        *where("korthikanti-t5", lambda s: s.source == "korthikanti-t5", "mean <= 4.6"),
    ]


def _headlines(name: str, held: HeldOut, mask: NDArray[np.bool_]) -> list[Figure]:
    """Errors of some runs: pooled, then the mean of the figures of their families and of their sources."""
    found = [Figure(f"{name}, pooled", int(mask.sum()), _three(sizes(held.ratios[mask])))]
    for what in ("family", "source"):
        members = defaultdict(list)
        for sample, ratio, is_in in zip(held.samples, held.ratios, mask, strict=True):
            if is_in:
                members[getattr(sample, what)].append(ratio)
        mean = np.mean([sizes(own) for own in members.values()], axis=0)
        found.append(Figure(f"{name}, mean over {len(members)} by {what}", int(mask.sum()), _three(mean)))
    return found


def _three(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def _by_family(held: HeldOut) -> dict[str, list[float]]:
    found = defaultdict(list)
    for sample, ratio in zip(held.samples, held.ratios, strict=True):
        if sample.source != LARGEST and not sample.fit:
            found[sample.family].append(float(ratio))
    return found


def _bands(held: HeldOut) -> list[Figure]:
    if len({sample.family for sample in held.samples}) < 2:
        return []
    bands = held_out_bands(held.samples, held.of_sources, held.ratios)
    inside: dict[str, list[bool]] = defaultdict(list)
    for sample, ratio, found in zip(held.samples, held.ratios, bands, strict=True):
        inside[sample.family].append(bool(found.low <= ratio <= found.high))
    every = [each for own in inside.values() for each in own]
    means = [float(np.mean(own)) for own in inside.values() if len(own) >= _FEW]
    width = float(np.median([found.high / found.low for found in bands]))
    many = sorted((family for family, own in inside.items() if len(own) >= _MANY), key=lambda f: np.mean(inside[f]))
    return [
        Figure("band: inside, pooled", len(every), f"{np.mean(every):.0%}"),
        Figure(f"band: inside, mean over {len(means)} families", len(every), f"{np.mean(means):.0%}", "77 to 84 %"),
        Figure("band: median high / low", len(every), f"{width:.2f}", "<= 1.6"),
        *(Figure(f"band: inside, {f}", len(inside[f]), f"{np.mean(inside[f]):.0%}", ">= 62 %") for f in many),
    ]


def _memory(held: HeldOut) -> list[Figure]:
    told = defaultdict(list)
    for row in held.rows:
        if row.memory_error is not None:
            for kind in ("all counters", row.run.mem_class or "not stated"):
                told[kind].append(1 + row.memory_error)
    aims = {"allocated": "mean 3", "device": "mean 8", "reserved": "mean 25"}
    return [
        Figure(
            f"memory, {kind}",
            len(own),
            f"{_three(sizes(own))}; told / measured {np.median(own):.2f}",
            aims.get(kind, ""),
        )
        for kind, own in sorted(told.items())
    ] + _memory_bands(held)


def _memory_bands(held: HeldOut) -> list[Figure]:
    """The share of runs inside the band from other families, and verdicts on known outcomes."""
    runs, families = memory_runs(held.rows), {row.run.source_set: row.run.family for row in held.rows}
    apart = {row.run.source_set for row in held.rows if row.run.fit}
    unsure: dict[str, list[bool]] = {"ran": [], "ran, in a fit": [], "ran, in no fit": []}
    inside: dict[str, list[bool]] = defaultdict(list)
    chances: list[tuple[float, bool]] = []
    widths: list[float] = []
    for family in sorted({families[run.source] for run in runs}):
        spreads = memory_spreads([run for run in runs if families[run.source] != family])
        for run in [run for run in runs if families[run.source] == family]:
            found = spread_of_run(spreads, run)
            if found is None:
                continue
            told = MemoryDistribution(location=found.location, scale=found.scale)
            if run.counter == "needed" and run.kind != "exact":
                chance = float(told.chance(math.exp(run.log)))
                chances.append((chance, run.kind == "above"))
                if run.kind == "below":
                    for name in ("ran", "ran, in no fit" if run.source in apart else "ran, in a fit"):
                        unsure[name].append(UNLIKELY <= chance < FITS)
            elif run.counter != "needed":
                inside[family].append(told.quantile(0.1) <= math.exp(run.log) <= told.quantile(0.9))
                widths.append(told.quantile(0.9) / told.quantile(0.1))
    if not widths:
        return []
    every = [each for own in inside.values() for each in own]
    mean = np.mean([np.mean(own) for own in inside.values()])
    return [
        Figure("memory band: inside, pooled", len(every), f"{np.mean(every):.0%}", "77 to 84 %"),
        Figure(f"memory band: inside, mean over {len(inside)} families", len(every), f"{mean:.0%}", "77 to 84 %"),
        Figure("memory band: median high / low", len(every), f"{np.median(widths):.2f}"),
        *_reliability(chances),
        *(
            Figure(f"{name}: told it may not fit", len(own), _share(own), "<= 12 %")
            for name, own in unsure.items()
            if own
        ),
    ]


def _reliability(chances: Sequence[tuple[float, bool]]) -> list[Figure]:
    """For each verdict, the number of runs that ran out of memory.

    chances: pairs of a run's chance of fitting and whether it ran out of memory.
    """
    lines = [
        ("fits, 95 % and more", FITS, 2.0, "<= 8 %"),
        ("may not fit, 5 to 95 %", UNLIKELY, FITS, "20 to 80 %"),
        ("does not fit, below 5 %", -1.0, UNLIKELY, ">= 92 %"),
    ]
    ran = [chance < UNLIKELY for chance, ran_out in chances if not ran_out]
    found = []
    for name, low, high, aim in lines:
        own = [ran_out for chance, ran_out in chances if low <= chance < high]
        if own:
            found.append(Figure(f"told {name}: ran out", len(own), _share(own), aim))
    return [*found, *([Figure("ran: told it does not fit", len(ran), _share(ran), "<= 2 %")] if ran else [])]


def _outcomes(held: HeldOut) -> list[Figure]:
    oom: dict[str, list[bool]] = defaultdict(list)
    ran, stated = [], []
    for row in held.rows:
        if row.setup is None or row.peak_bytes is None:
            continue
        above = row.peak_bytes > row.setup.job.cluster.device.memory
        if row.run.oom:
            oom[row.run.source_set].append(above)
        elif row.measured_seconds:
            ran.append(above)
            if not assumes_recompute(row):
                stated.append(above)
    every = [above for own in oom.values() for above in own]
    return [
        *([Figure("ran out of memory: told above the whole", len(every), _share(every), ">= 88 %")] if every else []),
        *(Figure(f"ran out of memory, {source}", len(own), _share(own)) for source, own in oom.items() if len(own) > 9),
        *([Figure("ran, policy stated: told above it", len(stated), _share(stated), "<= 2 %")] if stated else []),
        *([Figure("ran, all: told above it", len(ran), _share(ran))] if ran else []),
    ]


def _share(hits: Sequence[bool]) -> str:
    return f"{np.mean(hits):.1%} ({sum(hits)})"


def _ranking(held: HeldOut) -> list[Figure]:
    found = [sweep for sweep in sweeps(held.rows) if sweep.num_rows >= _FEWEST_LAYOUTS]
    if not found:
        return []
    pairs: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for sweep in found:
        own = pairs[sweep.source]
        own[0], own[1], own[2] = own[0] + sweep.ordered_pairs, own[1] + sweep.clear_pairs, own[2] + 1
    regret = [100 * sweep.regret for sweep in found]
    ordered, clear = (sum(own[i] for own in pairs.values()) for i in (0, 1))
    aims = {"aleph-alpha-layouts": ">= 85 %", LARGEST: ">= 84 %", "internevo": ">= 81 %"}
    by_source = sorted((source for source, own in pairs.items() if own[1]), key=lambda s: pairs[s][0] / pairs[s][1])
    return [
        Figure(
            "sweeps: regret, mean / median", len(found), f"{np.mean(regret):.1f} / {np.median(regret):.1f}", "5 / 0.5"
        ),
        Figure("sweeps: pairs in order", clear, f"{ordered / max(clear, 1):.1%}", "85 %"),
        *(
            Figure(
                f"pairs, {source} ({pairs[source][2]} sweeps)",
                pairs[source][1],
                f"{pairs[source][0] / pairs[source][1]:.1%}; regret "
                f"{np.mean([100 * sweep.regret for sweep in found if sweep.source == source]):.1f}",
                aims.get(source, ""),
            )
            for source in by_source
        ),
    ]


def to_text(found: Sequence[Figure]) -> str:
    """The figures as a table for a terminal."""
    width = max(len(figure.name) for figure in found)
    wide = max(len(figure.value) for figure in found)
    head = f"{'whole families held out':{width}}  {'rows':>6}  {'median / mean / p90, %':{wide}}  aim"
    lines = [f"{f.name:{width}}  {f.num_rows:6}  {f.value:{wide}}  {f.aim}".rstrip() for f in found]
    return "\n".join([head, *lines]) + "\n"
