"""State in words whether a plan fits into memory, and check this and its schedule before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import InputError, Mistake, NothingFitsError
from planner.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.cost.ledger import StageMemory
    from planner.layout import Assumed
    from planner.plan import Plan


def check_fits(plan: Plan, *, force_unfit: bool = False, tell: Callable[[str], None] = lambda _: None) -> None:
    """Accept a plan that fits, warn about a plan that may not fit, and refuse a plan that does not fit, or may not.

    force_unfit: only warn about a plan that is refused otherwise.
    tell: a function that receives the warning, one sentence.

    Raises:
        NothingFitsError: the plan does not fit, and `force_unfit` is false.
        InputError: whether the plan fits is unknown, and `force_unfit` is false.
    """
    if plan.verdict == "fits":
        return
    if plan.verdict == "unknown" and not force_unfit:
        raise undecided(plan.assumed)
    words = f"this plan {plan.verdict.replace('fit', 'fit into memory')}: {fit_words(plan)}"
    if plan.verdict == "does not fit" and not force_unfit:
        hint = "`planner explain PLAN` shows by how much; --force-unfit goes on all the same"
        raise NothingFitsError(words, hint=hint)
    tell(words)


def check_schedule(plan: Plan) -> None:
    """Refuse a schedule that the engine cannot run; `explain` can price such a plan."""
    if plan.layout.schedule not in plan.engine.pipeline.schedules:
        raise InputError(
            f"the plan's schedule is {plan.layout.schedule}, which engine {plan.engine.name} does not run",
            hint=f"it runs {', '.join(plan.engine.pipeline.schedules)}",
        )


def undecided(assumed: Sequence[Assumed], where: str = "") -> InputError:
    """The error that names the keys that leave a verdict unknown, each with the option that settles it."""
    keys = [each for each in assumed if each.settled_by]
    return InputError(
        *(
            Mistake(
                message=f"whether it fits is unknown: {each.key}={each.value} ({each.rule})",
                where=where,
                hint=f"{each.settled_by} with --from FILE settles it",
            )
            for each in keys
        )
    )


def fit_words(plan: Plan) -> str:
    """The memory that the worst stage needs, the memory of its device, and the chance that it fits.

    If the verdict is unknown, the keys that leave it so come first, and there is no chance.
    """
    stage = plan.worst_stage
    if stage.host is not None and not stage.host_fits and not plan.unknown_because:
        over, chance = format_bytes(stage.missing_bytes), f"chance of fitting {chance_words(stage.chance_of_fitting)}"
        return f"each device of stage {stage.stage} keeps {over} too much in its host's memory; {chance}"
    whole = format_bytes(whole_bytes(plan, stage))
    words = f"stage {stage.stage} needs {format_bytes(stage.total_bytes)} of {whole}"
    free, asked = 1 - stage.total_bytes / whole_bytes(plan, stage), plan.options.headroom
    if asked and 0 <= free < asked:
        words += f", which leaves {free:.1%} free and not the {asked:.1%} asked for"
    if plan.unknown_because:
        return f"{', '.join(plan.unknown_because)} without a price; for the rest {words}"
    return f"{words}; chance of fitting {chance_words(stage.chance_of_fitting)}"


def whole_bytes(plan: Plan, stage: StageMemory) -> float:
    """All memory that a program can have on a device of the stage."""
    pools = {pool.name: pool for pool in plan.cluster.pools}
    pool = pools[plan.layout.pools[stage.stage]] if plan.layout.pools else plan.cluster.pools[0]
    return pool.device.memory


def chance_words(chance: float | None) -> str:
    """A chance in whole percent, rounded down; only certain outcomes are 0 or 100 %, and None is unknown."""
    if chance is None:
        return "unknown"
    percent = int(chance * 100 + 1e-9)
    if percent == 0:
        return "<1%" if chance > 0 else "0%"
    return ">99%" if percent == 99 else f"{percent}%"
