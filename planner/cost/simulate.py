"""Execute pipeline schedules operation by operation, to check the closed forms and to price unequal stages exactly.

A schedule is the order in which each stage runs its operations; times do not change this order. The order is therefore
computed first. Then every operation starts as soon as the previous operation on its stage has ended and its input from
the neighbour has arrived.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.compute import PassSeconds
from planner.cost.pass_order import operations
from planner.layout import stage_of_chunk

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from planner.specs.recipe import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Start and end of every operation of one step; the arrays have shape (operations,), stage after stage.

    Two overlapped operations have the same start and the same end.
    hidden: seconds of each operation that its pair hides. A stage holds a microbatch from the start of its forward pass
    to the end of its backward pass.
    """

    schedule: Schedule
    pp: int
    interleave: int
    stage: NDArray[np.int64]
    kind: NDArray[np.str_]
    microbatch: NDArray[np.int64]
    chunk: NDArray[np.int64]
    overlapped: NDArray[np.bool_]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    hidden: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """Seconds from the first forward pass to the end of the last operation."""
        return float(np.max(self.end))

    @property
    def busy_seconds(self) -> NDArray[np.float64]:
        """Seconds that each stage works; shape (stages,)."""
        share = np.where(self.overlapped, 0.5, 1.0)  # the interval of a pair is in the arrays twice
        work = np.bincount(self.stage, weights=share * (self.end - self.start), minlength=self.pp)
        return np.asarray(work, dtype=float)

    def peak_held(self, per_chunk: ArrayLike, share_until_weight: float = 1.0) -> NDArray[np.float64]:
        """The largest amount that each stage holds at any time; shape (stages,).

        per_chunk: amount that a chunk holds for one microbatch, such as bytes of activations; shape (chunks,).
        share_until_weight: the share of this amount that a chunk with a split backward pass still holds until its
        weight gradients are computed.
        """
        size = np.broadcast_to(np.asarray(per_chunk, dtype=float), (self.pp * self.interleave,))
        return _peaks(self._changes(share_until_weight) * size[self.chunk], self.stage)

    @property
    def peak_in_flight(self) -> NDArray[np.float64]:
        """Microbatches that each stage holds at its peak, in units of the whole stage; shape (stages,)."""
        return self.peak_held(1.0) / self.interleave

    def _changes(self, share_until_weight: float) -> NDArray[np.float64]:
        kinds = {"F": 1.0, "B": -1.0, "I": share_until_weight - 1.0, "W": -share_until_weight}
        return np.select([self.kind == kind for kind in kinds], list(kinds.values()))


def _peaks(changes: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.float64]:
    """The largest running sum within each group; every group's changes sum to zero."""
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    return np.asarray(np.maximum.reduceat(np.cumsum(changes[order]), first))


def simulate(
    schedule: Schedule,
    seconds: PassSeconds,
    num_microbatches: int,
    *,
    interleave: int = 1,
    exchange: PassSeconds | None = None,
    send_seconds: ArrayLike = 0.0,
    overlapped_share: float = 1.0,
    exchange_share: float = 0.0,
) -> Timeline:
    """Execute one step of a schedule; for pipedream, the pipeline is empty at the start.

    The number of stages is the number of chunks divided by `interleave`.

    seconds: of one microbatch through each chunk of the model, in model order; every field has shape (chunks,).
        Recomputed forward passes are part of backward_input.
    exchange: the part of these seconds in communication that an overlapped pair hides while both passes compute.
    send_seconds: seconds from the end of a pass to the start of the next chunk's pass, in each direction; one number,
        or one for each boundary between chunks. A send delays only the receiver; if sends keep a stage busy, its passes
        must include them.
    overlapped_share: seconds of an overlapped pair, divided by the sum of the two passes' seconds; 1 in torch, which
        runs the two passes one after the other.
    exchange_share: share of the device that communication takes from computing while both run.
    """
    num_chunks = len(seconds.forward)
    assert num_chunks % interleave == 0
    pp = num_chunks // interleave
    orders = [operations(schedule, pp, stage, num_microbatches, interleave) for stage in range(pp)]
    sizes = [len(order) for order in orders]
    kind, microbatch, chunk, overlapped = (np.array(column) for column in zip(*chain(*orders), strict=True))
    crosses = np.diff(stage_of_chunk(schedule, pp, np.arange(num_chunks))) != 0  # the turn of a V sends nothing
    flow = _flow(kind, microbatch, chunk, num_microbatches, np.broadcast_to(send_seconds, num_chunks - 1) * crosses)
    work = _work_seconds(seconds, kind, chunk) * np.where(overlapped, overlapped_share, 1.0)
    hidden = _hidden_seconds(exchange or PassSeconds(), kind, chunk, overlapped, work, exchange_share)
    work = work - hidden
    start, end = _run(sizes, flow, work, overlapped)
    return Timeline(
        schedule=schedule,
        pp=pp,
        interleave=interleave,
        stage=np.repeat(np.arange(pp), sizes),
        kind=kind,
        microbatch=microbatch,
        chunk=chunk,
        overlapped=overlapped,
        start=start,
        end=end,
        hidden=hidden,
    )


def _work_seconds(seconds: PassSeconds, kind: NDArray[np.str_], chunk: NDArray[np.int64]) -> NDArray[np.float64]:
    kinds = {"F": seconds.forward, "B": seconds.backward, "I": seconds.backward_input, "W": seconds.backward_weight}
    return np.select([kind == k for k in kinds], [np.asarray(each, dtype=float)[chunk] for each in kinds.values()])


def _hidden_seconds(
    exchange: PassSeconds,
    kind: NDArray[np.str_],
    chunk: NDArray[np.int64],
    overlapped: NDArray[np.bool_],
    work: NDArray[np.float64],
    exchange_share: float,
) -> NDArray[np.float64]:
    """Seconds of communication that each pass of an overlapped pair hides.

    While C seconds of communication run, computing continues on the share 1 - a of the device. The W seconds of
    computing of both passes and their C seconds of communication then take max(C, W + a C). Both passes hide the same
    share of their communication.

    Source: DeepSeek-V3 (2024), sections 3.2.1 and 3.2.2.
    """
    n = int(np.max(chunk)) + 1
    kinds = {"F": exchange.forward, "B": exchange.backward}
    each = np.select([kind == k for k in kinds], [np.broadcast_to(part, n)[chunk] for part in kinds.values()])
    both = np.flatnonzero(overlapped)
    first, second = both[::2], both[1::2]  # the two passes of each pair: (pairs,)
    comm = each[first] + each[second]
    compute = work[first] + work[second] - comm
    saved = comm + compute - np.maximum(comm, compute + exchange_share * comm)
    share = np.divide(saved, comm, out=np.zeros(len(first)), where=comm > 0)
    hidden = np.zeros(len(kind))
    hidden[first], hidden[second] = share * each[first], share * each[second]
    return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """Input and output of each operation, as positions in a table of arrival times.

    The table first holds forward inputs, of shape (chunks, microbatches), and then gradients of outputs, of the same
    shape. Two further positions follow: one is filled from the start, and one is never read. A backward pass for the
    weights needs no input: it is enough that it follows earlier operations of its stage.
    """

    takes: NDArray[np.int64]
    gives: NDArray[np.int64]
    delay: NDArray[np.float64]
    arrivals: NDArray[np.float64]


def _flow(
    kind: NDArray[np.str_], microbatch: NDArray[np.int64], chunk: NDArray[np.int64], m: int, sends: NDArray[np.float64]
) -> _Flow:
    n = len(sends) + 1
    there, unread = 2 * n * m, 2 * n * m + 1
    forward, weight = kind == "F", kind == "W"
    inputs, gradients = chunk * m + microbatch, (n + chunk) * m + microbatch
    after_forward = np.where(chunk == n - 1, gradients, inputs + m)  # the last chunk continues with its backward pass
    after_backward = np.where(chunk == 0, unread, gradients - m)
    boundary = np.concatenate([[0.0], sends, [0.0]])  # before chunk c, and after it at c + 1
    arrivals = np.full(2 * n * m + 2, math.inf)
    arrivals[:m] = arrivals[there] = 0.0
    return _Flow(
        takes=np.where(forward, inputs, np.where(weight, there, gradients)),
        gives=np.where(forward, after_forward, np.where(weight, unread, after_backward)),
        delay=np.where(forward, boundary[chunk + 1], boundary[chunk]),
        arrivals=arrivals,
    )


def _run(
    sizes: list[int], flow: _Flow, work: NDArray[np.float64], overlapped: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Start and end of every operation.

    A stage runs until an input is missing. After progress, it wakes its neighbours.
    """
    takes, gives, delay, arrivals = (a.tolist() for a in (flow.takes, flow.gives, flow.delay, flow.arrivals))
    seconds, pairs = work.tolist(), overlapped.tolist()
    stops = np.cumsum(sizes).tolist()
    position = [0, *stops[:-1]]
    pp = len(sizes)
    start, end, clock = [math.nan] * len(seconds), [math.nan] * len(seconds), [0.0] * pp
    waiting, asleep = deque(range(pp)), [False] * pp
    while waiting:
        stage = waiting.popleft()
        asleep[stage] = True
        first = here = position[stage]
        now, stop = clock[stage], stops[stage]
        while here < stop:
            following = here + 2 if pairs[here] else here + 1
            ready = arrivals[takes[here]]
            if pairs[here]:
                ready = max(ready, arrivals[takes[here + 1]])
            if ready == math.inf:
                break
            begin = max(now, ready)
            now = begin + seconds[here] + (seconds[here + 1] if pairs[here] else 0.0)
            for one in range(here, following):
                start[one], end[one] = begin, now
                arrivals[gives[one]] = now + delay[one]
            here = following
        position[stage], clock[stage] = here, now
        if here > first:
            for neighbour in ((stage - 1) % pp, (stage + 1) % pp):
                if asleep[neighbour]:
                    asleep[neighbour] = False
                    waiting.append(neighbour)
    assert position == stops, "the schedule deadlocks"
    return np.array(start), np.array(end)
