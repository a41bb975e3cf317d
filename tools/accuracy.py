"""Write docs/accuracy.md, and the table of README.md, from the published runs (`make accuracy`).

With `--figures` the program only prints the figures by which a change of the cost model is judged.

Whole families of publishers are held out: each run is forecast by a fit without any run of its family. Errors are
|measured / predicted - 1| of the step time.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from accuracy_figures import figures, held_out_bands, hold_out, kinds, memory_figures, to_text
from calibrate import fitted_ratios

from planner.evidence.compare.sweeps import sweeps
from planner.evidence.rows.runs import read_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accuracy_figures import Figure, HeldOut
    from calibrate import Sample
    from numpy.typing import NDArray

    from planner.cost.band import Band
    from planner.evidence.rows.runs import Run

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "accuracy.md", ROOT / "README.md"
BEGIN, END = "<!-- accuracy: written by `make accuracy` -->", "<!-- accuracy: end -->"
WORST = 30
FEW = 4
OF_FAMILY = 4  # worst runs shown of one family

HEAD = """# How accurate forecasts are

<!-- written by `make accuracy`; edit tools/accuracy.py instead -->

This page compares forecasts with {num_runs} published runs of other programs. `tests/published/measurements.csv` names
every source, and `families.csv` beside it the family of publishers of each source. {num_measured} of the runs have a
measured step time, and the planner can price {num_priced} of these.

What this evidence hardly holds: {tuned} of the priced runs fine-tune a trained model, {adapted} train adapters, {amd}
are on GPUs of AMD, and {consumer} on a consumer card, of few publishers each. Expect errors as in the table of kinds.

- An error is |measured / predicted - 1| of the step time, in percent: median / mean / 90th percentile. Rates in FLOP/s
  are never compared, because sources count them in ways that differ by a third.
- *Held out*: the forecast comes from a fit without any run of the same family of publishers. Sources of one family
  share authors, programs and machines, so a sibling in the fit would flatter the forecast. *Source held out*: the
  siblings stay in the fit. *Fitted*: the forecast comes from the shipped fit of all runs.
- *Pooled* counts every run alike. *By family* is the mean of the families' own errors, over all families with at least
  {few} runs.
- The fit has factors for device, engine, precision, kind of layers and links, but never a factor for one model.
  The {unfitted} runs of {unfitted_sources} enter no fit (column `fit` of `families.csv`): they test it. They are the
  tables of Narayanan et al. (SC 2021) and Korthikanti et al. (2022), and every run that was added in November 2026,
  because a fit with the latter forecasts held-out families worse.
- If a row leaves out a setting, a fixed rule fills it in, mostly with the engine's default. The rule for recompute is
  the least that is likely to fit; a pipeline is interleaved if the source does not state its chunks. No rule knows
  whether the run succeeded or ran out of memory.
"""

KINDS = """Few publishers have runs of these kinds, so the mean by family says more than the pooled figures. A run may
be of several kinds. The last line leaves out what the recipes of runs with experts say beyond the layout (graphs,
dispatcher, overlap, modules of recompute, layers of stages), which a stranger does not type."""

BANDS = """A band is meant to hold 8 of 10 runs. In this table the band of a run comes from the forecast errors of other
families, and so does the factor that widens the band for new kinds of layouts. The interval score, in log time, is the
width of the band plus ten times the distance of a run outside the band. A smaller score is better."""

MEMORY = """The table shows the errors of the peak memory for each counter that sources read, and the band of the peak.
It also shows how many runs ran out of memory, by the answer that the planner gave beforehand (*told*). The chance of
fitting is the probability that the run needs at most the whole memory that a program can use. Bands and chances come
from the runs of other families, whether or not they publish their memory. Rows that do not say whether activations are
recomputed are left out."""

RANKING = """A sweep is a set of at least {} layouts of one job on one cluster, with one release and one kind of
attention. Regret says how much slower the layout that the planner calls best is than the fastest measured layout. The
column of pairs counts the pairs of layouts whose measured times differ by more than 3 %. If a layout was run several
times, it counts once, by its median."""

CONSTANTS = """No fit changes these constants, and no source states them. The table quotes what was said when they were
set. If a constant was chosen on published runs, the errors of these runs in the tables above are too favourable."""

PEER_SOURCES: Final = {
    "aleph-alpha-layouts": ("11 / 16 / 33", "16 / 18 / 33", "15 / 20 / 40"),
    "internevo": ("23 / 21 / 30", "53 / 44 / 61", "7 / 11 / 17"),
    "mlperf-gpt3": ("11 / 16 / 33", "25 / 24 / 39", "43 / 39 / 52"),
    "tprimat": ("71 / 87 / 136", "89 / 114 / 169", "15 / 27 / 23"),
    "hf-ultrascale": ("43 / 110 / 303", "59 / 142 / 326", "48 / 112 / 243"),
}
"""SimuMax 4dcaae5, Calculon caa4b11 and llm-analysis d841e40; each has a constant per GPU fitted in its favour."""

PEER_PAIRS: Final = {"aleph-alpha-layouts": (80, 85, 84), "hf-ultrascale": (84, 77, 77), "internevo": (81, 52, 81)}
"""Percentage of pairs in the right order, for the same three programs."""

PEERS = """Each model was run on those rows of a source that it can price. It has a constant for each GPU that was
fitted on the same rows, which is in its favour. Our forecasts are held out. For each model, one run was checked against
the numbers that its authors publish."""

PEERS_OLD = """
Over the sources of an earlier version of the table of runs (776 rows):

| model | rows | median / mean / p90 |
|---|---|---|
| Calculon | 267 | 9.8 / 15.2 / 33.2 |
| llm-analysis | 596 | 23.0 / 37.9 / 73.1 |
| SimuMax | 436 | 9.6 / 14.0 / 29.7 |
"""


class Scored(NamedTuple):
    """A table of runs with held-out and in-sample forecasts.

    fitted: measured over predicted step time, with the in-sample forecast, (samples,).
    """

    held: HeldOut
    runs: dict[str, Run]
    fitted: NDArray[np.float64]

    @property
    def samples(self) -> Sequence[Sample]:
        """The rows that were measured and can be priced."""
        return self.held.samples


def cut(sample: Sample) -> str:
    """The kind of layout of a run, by the groups of the README."""
    if sample.keys["experts"]:
        return "experts"
    if "cp" in sample.axes:
        return "context parallel"
    if "fsdp" in sample.axes:
        return "FSDP and ZeRO-3"
    return "data parallel alone" if sample.axes == "dp" else "dense, tensor and pipeline parallel"


def score(path: Path, processes: int = 2) -> Scored:
    """Read, price and forecast every run of a table."""
    runs = read_runs(path)
    held = hold_out(runs, processes)
    return Scored(held=held, runs={run.id: run for run in runs}, fitted=fitted_ratios(held.samples))


def sizes(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median, mean and 90th percentile of the errors, in percent; shape (3,)."""
    errors = 100 * np.abs(ratios - 1)
    return np.array([np.median(errors), errors.mean(), np.quantile(errors, 0.9)])


def three(values: Iterable[float]) -> str:
    """Figures in percent, separated by slashes."""
    return " / ".join(f"{value:.1f}" for value in values)


def by_family(scored: Scored, ratios: NDArray[np.float64], mask: NDArray[np.bool_]) -> str:
    """Each family's figures, averaged over all families.

    Families with few runs are left out, unless there are no others.
    """
    members = defaultdict(list)
    for sample, ratio, is_in in zip(scored.samples, ratios, mask, strict=True):
        if is_in:
            members[sample.family].append(ratio)
    large = [own for own in members.values() if len(own) >= FEW] or list(members.values())
    return three(np.mean([sizes(np.array(own)) for own in large], axis=0))


def table(
    scored: Scored, name: str, key: Callable[[Sample], str | tuple[str, ...]], *, everything: bool = False
) -> list[str]:
    """Errors by the groups of one key, the worst group first; a sample may be in several groups or in none."""
    found = [(own,) if isinstance(own := key(sample), str) else own for sample in scored.samples]
    held, of_sources = scored.held.ratios, scored.held.of_sources
    masks = {value: np.array([value in own for own in found]) for value in {each for own in found for each in own}}
    values = sorted(masks, key=lambda value: (-sizes(held[masks[value]])[0], value))
    if everything:
        values = ["all", *values]
        masks["all"] = np.ones(len(found), dtype=np.bool_)
    lines = [
        f"| {name} | runs | held out, pooled | held out, by family | source held out, pooled | fitted, pooled |",
        "|---|---|---|---|---|---|",
    ]
    for value in values:
        mask = masks[value]
        cells = [three(sizes(held[mask])), by_family(scored, held, mask)]
        cells += [three(sizes(each[mask])) for each in (of_sources, scored.fitted)]
        lines.append(f"| {value} | {mask.sum()} | {' | '.join(cells)} |")
    return lines


def of_kinds(scored: Scored) -> list[str]:
    """Errors by kinds of runs that few publishers have; a run may be of several, and of none."""
    found = dict(zip((sample.run for sample in scored.samples), kinds(scored.held), strict=True))
    experts = np.array(["experts" in each for each in found.values()])
    lines = table(scored, "kind", lambda sample: found[sample.run])
    if experts.any():
        cells = (sizes(scored.held.blanked[experts]), by_family(scored, scored.held.blanked, experts))
        lines.append(f"| experts, recipe blank | {experts.sum()} | {three(cells[0])} | {cells[1]} | | |")
    return lines


def worst(scored: Scored) -> list[str]:
    """The runs with the largest errors, at most a few of each family."""
    seen: Counter[str] = Counter()
    lines = ["| run | source | model | devices | axes | measured / predicted |", "|---|---|---|---|---|---|"]
    for i in np.argsort(-np.abs(np.log(scored.held.ratios)), kind="stable"):
        sample = scored.samples[i]
        seen[sample.family] += 1
        if seen[sample.family] > OF_FAMILY or len(lines) == WORST + 2:
            continue
        run = scored.runs[sample.run]
        devices = f"{run.gpus} {run.gpu}"
        cells = (run.id, sample.source, run.model, devices, sample.axes, f"{scored.held.ratios[i]:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def interval_score(found: Band, ratio: float) -> float:
    """Interval score of a band in log time: its width, plus ten times the distance of a run outside the band.

    Source: Gneiting and Raftery, Strictly proper scoring rules (JASA 2007), section 6.2, for a band of 80 %.
    """
    low, high, log = np.log([found.low, found.high, ratio])
    return float(high - low + 10 * max(low - log, 0.0) + 10 * max(log - high, 0.0))


def bands(scored: Scored) -> list[str]:
    """Coverage, width and interval score of the bands: of all runs, then of each family, the least covered first."""
    found = held_out_bands(scored.samples, scored.held.of_sources, scored.held.ratios)
    members = defaultdict(list)
    for sample, band, ratio in zip(scored.samples, found, scored.held.ratios, strict=True):
        row = (band.low <= ratio <= band.high, band.high / band.low, interval_score(band, float(ratio)))
        members[sample.family].append(row)

    def line(name: str, count: int, inside: float, width: float, points: float) -> str:
        return f"| {name} | {count} | {inside:.0%} | {width:.2f} | {points:.2f} |"

    every = np.array([row for own in members.values() for row in own], dtype=float)
    own = {family: np.array(rows, dtype=float) for family, rows in members.items()}
    large = [rows for rows in own.values() if len(rows) >= FEW] or list(own.values())
    means = np.mean([(rows[:, 0].mean(), np.median(rows[:, 1]), rows[:, 2].mean()) for rows in large], axis=0)
    return [
        "| family | runs | inside | median high / low | interval score |",
        "|---|---|---|---|---|",
        line("all, pooled", len(every), every[:, 0].mean(), float(np.median(every[:, 1])), every[:, 2].mean()),
        line(f"mean over {len(large)} families", len(every), *means),
        *(
            line(family, len(rows), rows[:, 0].mean(), float(np.median(rows[:, 1])), rows[:, 2].mean())
            for family, rows in sorted(own.items(), key=lambda each: (each[1][:, 0].mean(), each[0]))
        ),
    ]


def ranking(scored: Scored) -> list[str]:
    """Regret and pairs of each source, worst first, compared with the peer that orders most pairs correctly."""
    members = defaultdict(list)
    for sweep in sweeps(scored.held.rows):
        if sweep.num_rows >= FEW:
            members[sweep.source].append(sweep)
    lines = [
        "| source | sweeps | mean regret | by chance | pairs in order | best of three peers |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for source, own in members.items():
        pairs, ordered = sum(s.clear_pairs for s in own), sum(s.ordered_pairs for s in own)
        regret, chance = (100 * float(np.mean([getattr(s, name) for s in own])) for name in ("regret", "random_regret"))
        peer = f"{max(PEER_PAIRS[source])} %" if source in PEER_PAIRS else ""
        share = f"{ordered} of {pairs} ({ordered / pairs:.0%})" if pairs else "none"
        cells = f"| {source} | {len(own)} | {regret:.1f} % | {chance:.1f} % | {share} | {peer} |"
        rows.append((ordered / pairs if pairs else 2.0, cells))
    return [*lines, *(cells for _, cells in sorted(rows))]


def peers(scored: Scored) -> list[str]:
    """Errors of three other cost models by source, compared with this one."""
    lines = ["| source | ours, held out | SimuMax | Calculon | llm-analysis |", "|---|---|---|---|---|"]
    for source, theirs in PEER_SOURCES.items():
        mask = np.array([sample.source == source for sample in scored.samples])
        if mask.any():
            ours = " / ".join(f"{value:.0f}" for value in sizes(scored.held.ratios[mask]))
            lines.append(f"| {source} | {ours} | {' | '.join(theirs)} |")
    return lines


_SAID: Final = re.compile(
    r"(?:[^.\"]|\.(?=\d))*\b(?:[Aa]ssumed|[Cc]hosen (?:with|on)|[Hh]eld-out runs)\b(?:[^.\"]|\.(?=\d))*"
)


def constants() -> list[str]:
    """Sentences of the code, and lines of profiles and devices, that say that a constant is assumed or chosen."""
    lines = ["| where | what was said |", "|---|---|"]
    for path in sorted([*ROOT.glob("planner/cost/**/*.py"), ROOT / "tools" / "band_widths.py"]):
        lines += [_said(path, said) for said in _SAID.findall(path.read_text(encoding="utf-8"))]
    profiles = (*ROOT.glob("planner/engines/*.yaml"), *ROOT.glob("planner/evidence/profiles/*.yaml"))
    for path in sorted([*profiles, *ROOT.glob("clusters/**/*.yaml")]):
        text = path.read_text(encoding="utf-8").splitlines()
        for line, following in zip(text, [*text[1:], ""], strict=True):
            if re.search(r"#.*\b(assumed|chosen)\b", line):
                key = following.split("#")[0] if line.lstrip().startswith("#") else ""
                lines.append(_said(path, f"{key} {line}"))
    return lines


def _said(path: Path, text: str) -> str:
    said = " ".join(text.split()).replace("|", "\\|")
    return f"| {path.relative_to(ROOT)} | {said[:240]} |"


def memory(found: Iterable[Figure]) -> list[str]:
    """Memory figures, and figures of runs that ran out of memory."""
    return ["| what | rows | value |", "|---|---|---|", *(f"| {f.name} | {f.num_rows} | {f.value} |" for f in found)]


def page(scored: Scored) -> str:
    """The whole of docs/accuracy.md."""
    measured = sum(run.measured_step_seconds is not None for run in scored.runs.values())
    apart = [sample for sample in scored.samples if sample.fit]
    head = HEAD.format(
        num_runs=len(scored.runs),
        num_priced=len(scored.samples),
        num_measured=measured,
        few=FEW,
        **_scarce(scored),
        unfitted=len(apart),
        unfitted_sources=", ".join(
            f"`{source}`" for source in sorted({r.source_set for r in scored.runs.values() if r.fit})
        ),
    )
    keys: dict[str, Callable[[Sample], str]] = {
        "axes": lambda sample: sample.axes,
        "device": lambda sample: str(sample.keys["device"]),
        "engine": lambda sample: str(sample.keys["engine"]),
        "family of publishers": lambda sample: sample.family,
        "source": lambda sample: sample.source,
        "precision": lambda sample: str(sample.keys["precision"]),
        "architecture": lambda sample: scored.runs[sample.run].arch or "not stated",
    }
    sections = {
        "By how the run is cut": table(scored, "cut", cut, everything=True),
        "By use": table(scored, "sources", lambda sample: "in no fit" if sample.fit else "in a fit"),
        "By kind": [KINDS, "", *of_kinds(scored)],
        **{f"By {name}": table(scored, name, key) for name, key in keys.items()},
        "Worst runs": worst(scored),
        "Error bands": [BANDS, "", *bands(scored)],
        "Memory": [MEMORY, "", *memory(memory_figures(scored.held))],
        "Choosing among layouts": [RANKING.format(FEW), "", *ranking(scored)],
        "Other cost models on the same rows": [PEERS, "", *peers(scored), PEERS_OLD.rstrip()],
        "Constants set by hand": [CONSTANTS, "", *constants()],
    }
    return "\n".join([head, *(f"## {title}\n\n{_lines(lines)}\n" for title, lines in sections.items())])


def _scarce(scored: Scored) -> dict[str, int]:
    """How many of the priced runs are of kinds that hardly anybody published."""
    tasks = [scored.runs[sample.run].task for sample in scored.samples]
    adapted = sum("adapters" in sample.features for sample in scored.samples)
    amd = sum(str(sample.keys["device"]).startswith("mi") for sample in scored.samples)
    consumer = sum("consumer cards" in each for each in kinds(scored.held))
    return {"tuned": tasks.count("sft"), "adapted": adapted, "amd": amd, "consumer": consumer}


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def readme_table(scored: Scored) -> str:
    """The table of README.md between its two marks."""
    return _lines([BEGIN, *table(scored, "cut", cut, everything=True), END])


def main(arguments: Sequence[str]) -> None:
    """Write the page and the README's table from a table of runs."""
    path = Path(arguments[-1])
    if arguments[0] == "--figures":
        sys.stdout.write(to_text(figures(hold_out(read_runs(path), processes=2))))
        return
    scored = score(path)
    PAGE.write_text(page(scored), encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    README.write_text(before + readme_table(scored) + rest.partition(END)[2], encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)} and the table of {README.name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
