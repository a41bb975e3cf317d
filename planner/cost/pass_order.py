"""The order in which each stage of a pipeline runs its passes, for every schedule."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from planner.cost.schedule import exists, round_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from planner.specs.recipe import Schedule

Kind = Literal["F", "B", "I", "W"]
"""Letters of torch: forward (F), whole backward (B), backward for the inputs (I), backward for the weights (W)."""


class Operation(NamedTuple):
    """One pass of one microbatch through one model chunk; `chunk` counts in model order.

    overlapped: whether the operation runs in a pair with the next or previous operation: a forward and a backward pass
    that hide each other's communication (F&B of DualPipe).
    """

    kind: Kind
    microbatch: int
    chunk: int
    overlapped: bool = False


def operations(
    schedule: Schedule, pp: int, stage: int, num_microbatches: int, interleave: int = 1
) -> tuple[Operation, ...]:
    """The order in which a stage (0 is the first) runs its operations.

    `interleave` is the number of chunks of a stage; `interleaved` with one chunk is 1F1B. The schedule must exist
    (`exists`). `pipedream` has the order of `1f1b`; it updates the weights after every backward pass.

    Source: Huang et al., GPipe (2019); Narayanan et al. (SC 2021); Qi et al., Zero Bubble (2023); DeepSeek, DualPipe.
    Schedules that torch implements have the order of torch.distributed.pipelining.
    """
    m = num_microbatches
    assert 0 <= stage < pp
    assert m >= 1
    assert exists(schedule, pp, m, interleave) or (schedule, interleave) == ("interleaved", 1)
    if schedule == "zbv":
        return tuple(op for op in _numbered(_zbv_passes(pp, stage, m), pp, stage) if op.microbatch < m)
    if schedule == "dualpipev":
        return tuple(_numbered(_dualpipev_passes(pp, stage, m), pp, stage))
    if schedule == "zb-h1":
        return tuple(_zb_h1(pp, stage, m))
    return tuple(_one_forward_one_backward(schedule, pp, stage, m, interleave))


def _warmup(schedule: Schedule, pp: int, stage: int, m: int, interleave: int) -> int:
    """Number of forward passes before the first pair of a forward and a backward pass."""
    if schedule == "naive":
        return 0
    if schedule == "gpipe":
        return m
    behind = pp - stage - 1
    if schedule == "interleaved":
        return min(m * interleave, 2 * behind + (interleave - 1) * int(round_size(pp, m)))
    return min(m, behind)


def _one_forward_one_backward(schedule: Schedule, pp: int, stage: int, m: int, interleave: int) -> Iterator[Operation]:
    """Forward passes to warm up, then pairs of a forward and a backward pass, then the remaining backward passes."""
    size = int(round_size(pp, m)) if interleave > 1 else 1
    assert m % size == 0
    forward = [(i, k) for first in range(0, m, size) for k in range(interleave) for i in range(first, first + size)]
    warmup = _warmup(schedule, pp, stage, m, interleave)
    for position in range(m * interleave + warmup):
        if position < len(forward):
            i, k = forward[position]
            yield Operation("F", i, k * pp + stage)
        if position >= warmup:
            i, k = forward[position - warmup]
            yield Operation("B", i, (interleave - 1 - k) * pp + stage)


def _zb_h1(pp: int, stage: int, m: int) -> Iterator[Operation]:
    """1F1B with the weights' backward pass delayed by `stage` microbatches, so that this pass fills the drain."""
    warmup = min(m, pp - stage - 1)
    for position in range(m + warmup):
        if position < m:
            yield Operation("F", position, stage)
        if position >= warmup:
            yield Operation("I", position - warmup, stage)
        if position >= warmup + stage:
            yield Operation("W", position - warmup - stage, stage)
    for microbatch in range(max(0, m - stage), m):
        yield Operation("W", microbatch, stage)


_Pass = tuple[Kind, int, bool]
"""Kind of pass; chunk of the stage (0 is its first in model order, 1 its second); whether it is overlapped."""


def _passes(text: str, times: int = 1) -> list[_Pass]:
    """Parse "F0 I1 W1" into the kind and chunk of each pass; "F0&B1" is an overlapped pair."""
    found: list[_Pass] = []
    for word in text.split():
        parts = word.split("&")
        found += [(part[0], int(part[1]), len(parts) > 1) for part in parts]  # type: ignore[misc]  # a Kind
    return found * times


def _numbered(passes: Iterable[_Pass], pp: int, stage: int) -> Iterator[Operation]:
    """Give each pass the next microbatch of its kind and chunk; a whole backward pass counts as I and W."""
    chunks = (stage, 2 * pp - 1 - stage)
    counted: Counter[tuple[str, int]] = Counter()
    for kind, k, overlapped in passes:
        key = ("I" if kind == "B" else kind, k)
        yield Operation(kind, counted[key], chunks[k], overlapped)
        counted[key] += 1
        if kind == "B":
            counted["W", k] += 1


def _zbv_passes(pp: int, stage: int, m: int) -> list[_Pass]:
    """The passes of ZB-V for at least 2 p - 1 microbatches; the caller drops passes of microbatches from m on."""
    behind = pp - stage
    fill = _passes("F0", 2 * behind - 1) + _passes("F1 F0", stage) + _passes("F1 I1 W1", behind)
    steady = _passes("F0 I0 W0 F1 I1 W1", max(0, m - 2 * pp + 1) + stage) + _passes("I0 W0 F1 I1 W1", behind - 1)
    drain = _passes("I0 I1", stage) + _passes("I0 W0", behind) + _passes("W1", stage) + _passes("W0", stage)
    return fill + steady + drain


def _dualpipev_passes(pp: int, stage: int, m: int) -> list[_Pass]:
    """The eight steps of DualPipeV."""
    behind = pp - stage - 1
    steady = _passes("F0&B1 F1&B0", m - 2 * pp + stage + 1)
    if not behind:  # the last stage runs the passes of its first pair one by one, which shortens the fill
        steady = _passes("F0 B1 F1&B0") + steady[4:]
    last = [1, 0] * (stage + 1)  # chunks of the last backward passes; the second half is split to fill the drain
    whole, split = last[: stage + 1], last[stage + 1 :]
    late = split + [0] * behind  # chunks whose weight gradients are still to be computed, oldest first
    return [
        *_passes("F0", 2 * behind),
        *_passes("F0 F1", stage + 1),
        *_passes("I1 W1 F1", behind),
        *steady,
        *_passes("B1 F1&B0", behind),
        *_passes(" ".join(f"B{k}" for k in whole)),
        *_passes(" ".join(f"I{k}" for k in split)),
        *_passes(" ".join(f"W{k} I0" for k in late[:behind])),
        *_passes(" ".join(f"W{k}" for k in late[behind:])),
    ]
