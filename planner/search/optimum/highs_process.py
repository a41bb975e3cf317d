"""HiGHS on an MPS file as a process: `python -m planner.search.optimum.highs_process MODEL SOLUTION LIMIT`.

Unlike a library call, a solver in its own process can be stopped at once, and its crash does not end the planner. The
answer is JSON: `status`, `bound` (proved lower bound) and `values` in the order of the columns, or null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import highspy

_STATUS = {
    highspy.HighsModelStatus.kOptimal: "optimal",
    highspy.HighsModelStatus.kInfeasible: "infeasible",
    highspy.HighsModelStatus.kUnboundedOrInfeasible: "infeasible",  # no step time is below zero
    highspy.HighsModelStatus.kTimeLimit: "time limit",
}
_OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": 1e-9,
    "primal_feasibility_tolerance": 1e-9,
}


def solve_file(model: Path, solution: Path, time_limit: float) -> None:
    """Solve the MPS file `model` to a gap of zero within `time_limit` seconds and write `solution`."""
    highs = highspy.Highs()  # type: ignore[no-untyped-call] # highspy leaves it unannotated
    highs.readModel(str(model))  # before the options: a time limit would cut the reading short, without an error
    for name, value in {**_OPTIONS, "time_limit": time_limit}.items():
        highs.setOptionValue(name, value)
    highs.run()
    info = highs.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    answer = {
        "status": _STATUS.get(highs.getModelStatus(), str(highs.getModelStatus())),
        "bound": info.mip_dual_bound,
        "values": list(highs.getSolution().col_value) if found else None,
    }
    solution.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    solve_file(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
