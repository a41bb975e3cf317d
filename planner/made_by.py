"""Identifies the version that prices a plan, by a digest of all files that determine its prices."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

from planner.plan_parts import MadeBy
from planner.specs.by_name import calibrations_of, shipped_calibration
from planner.specs.job import job_on
from planner.specs.library import PACKAGE
from planner.version import VERSION

if TYPE_CHECKING:
    from planner.specs.calibration import Calibration, CalibrationEntry, Evidence, Spread
    from planner.specs.job import Job

_FORMULAS: Final = (
    "cost/**/*.py", "elementary.py", "errors.py", "layout.py", "numbers.py", "once.py", "sums.py", "units.py",
    "specs/architectures.yaml", "specs/batch.py", "specs/blocks.py", "specs/calibration.py", "specs/cluster.py",
    "specs/document.py", "specs/engine.py", "specs/failures.py", "specs/files.py", "specs/generations.py",
    "specs/job.py", "specs/library.py", "specs/model.py", "specs/objective*", "specs/recipe*", "specs/recompute.py",
    "specs/text.py", "specs/training.py", "specs/yaml.py",
)  # fmt: skip
"""Files of the formulas and of all modules they import. Models, clusters and engine profiles are in the plan."""


def made_by(job: Job) -> MadeBy:
    """The version and calibration that price this job now."""
    pools = job.pools
    corrections = tuple(pool.calibration for pool in pools), pools[0].evidence, pools[0].spread
    calibration: Literal["shipped", "own"] = "shipped" if corrections == _of(job, shipped_calibration()) else "own"
    return MadeBy(planner_version=VERSION, digest=_digest(calibration), calibration=calibration)


def with_shipped_corrections(job: Job) -> Job:
    """The job with the corrections that this version ships, and with the evidence on their forecast errors."""
    return with_corrections(job, shipped_calibration())


def with_corrections(job: Job, corrections: Calibration) -> Job:
    """The job with a calibration's corrections for its devices and engine, and with its evidence."""
    entries, evidence, spread = _of(job, corrections)
    common = ("model", "training", "engine", "risk", "headroom", "allow_tp_across_nodes", "allow_offload")
    kept = {name: getattr(job, name) for name in common}
    return job_on(job.cluster, entries, evidence=evidence, spread=spread, **kept)


def with_corrections_of_any_engine(job: Job) -> Job | None:
    """The job with the corrections fitted to all engines together.

    The result is None with the user's own corrections, or with several pools.
    """
    if len(job.pools) > 1 or job.pools[0].calibration != _of(job, shipped_calibration())[0][0]:
        return None
    own_layers = job.engine.compute.model_copy(update={"layers_of": ""})
    anybody = job.engine.model_copy(update={"name": "", "compute": own_layers})
    (entry,) = calibrations_of(job.cluster, job.model, job.training, anybody, shipped_calibration())
    return replace(job.pools[0], calibration=entry)


def _of(job: Job, corrections: Calibration) -> tuple[tuple[CalibrationEntry, ...], tuple[Evidence, ...], Spread]:
    """Corrections for each pool, the evidence, and the spread of the bands.

    A mixed cluster has no evidence, because no runs on mixed clusters are published.
    """
    entries = calibrations_of(job.cluster, job.model, job.training, job.engine, corrections)
    return entries, corrections.evidence if len(job.cluster.pools) == 1 else (), corrections.spread


@cache
def _digest(calibration: Literal["shipped", "own"]) -> str:
    """Hash of version and formulas, and of the shipped corrections if they are used.

    A wheel and a checkout have the same hash.
    """
    found = hashlib.sha256(VERSION.encode())
    paths = {path for pattern in _FORMULAS for path in PACKAGE.glob(pattern)}
    if calibration == "shipped":
        paths.add(PACKAGE / "calibration.json")
    names = {path.relative_to(PACKAGE).as_posix(): path for path in paths}
    for name in sorted(names):
        content = names[name].read_bytes()
        found.update(f"\n{name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]
