r"""Plan, explain and run the distributed training of transformer models.

Data flows in one direction, and imports follow the same direction::

    models/*.yaml   clusters/*.yaml   training.yaml   engine profile
            \            |                 |              /
             `---------- specs (frozen) = Job ----------'
                            |
     search: candidates --> layout --> cost: ledger lines --> integer program --> plan (JSON)
                                                                                   |
                                         explain, emit, launch -> torchrun -m planner.trainer plan.json

The names of `planner.api.__all__` are the Python API (docs/python.md); each is imported when it is first used.
"""

from planner.version import VERSION

TYPE_CHECKING = False  # type checkers take it for true; the module `typing` would double the time of this import
if TYPE_CHECKING:
    from planner.api import *  # noqa: F403
    from planner.api import __all__  # noqa: F401
else:

    def __getattr__(name: str) -> object:
        from importlib.util import find_spec

        if find_spec(f"planner.{name}") is None:  # else Python asks for a module that it imports next
            from planner import api

            if name in ("__all__", *api.__all__):
                return getattr(api, name)
        raise AttributeError(f"module 'planner' has no attribute {name!r}")


__version__ = VERSION


def __dir__() -> list[str]:
    from planner.api import __all__

    return sorted({*globals(), *__all__})
