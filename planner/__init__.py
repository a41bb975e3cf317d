r"""Plan, explain and run the distributed training of transformer models.

Data flows in one direction, and imports follow the same direction::

    models/*.yaml   clusters/*.yaml   training.yaml   engine profile
            \            |                 |              /
             `---------- specs (frozen) = Job ----------'
                            |
     search: candidates --> layout --> cost: ledger lines --> integer program --> plan (JSON)
                                                                                   |
                                         explain, emit, launch -> torchrun -m planner.trainer plan.json

The names below are the Python API (docs/python.md). Each name is imported when it is first used.
"""

from planner.version import VERSION

TYPE_CHECKING = False  # type checkers take it for true; the module `typing` would double the time of this import
if TYPE_CHECKING:
    from planner.api import (
        NoLayoutFits,
        Plan,
        PlannerError,
        clusters,
        compare_clusters,
        compare_sizes,
        engine_profiles,
        estimate_layout,
        explain_layout,
        models,
        plan_job,
        read_plan,
        shortfall,
    )
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'planner' has no attribute {name!r}")
        from planner import api

        return getattr(api, name)


__all__ = [
    "NoLayoutFits",
    "Plan",
    "PlannerError",
    "clusters",
    "compare_clusters",
    "compare_sizes",
    "engine_profiles",
    "estimate_layout",
    "explain_layout",
    "models",
    "plan_job",
    "read_plan",
    "shortfall",
]

__version__ = VERSION


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
