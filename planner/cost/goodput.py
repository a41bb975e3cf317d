"""Share of a run's time that remains for training after failures and checkpoints.

Failures strike the run at random, even while the run restarts. The time between failures is exponential with mean M. A
checkpoint blocks training for d seconds after every t seconds of training, and can be read w seconds later (w is 0 if
the writing itself blocks). After a failure the run restarts in R seconds from the last checkpoint that can be read.

The mean time between two failures is M. After each failure, restarts take M (exp(R / M) - 1) on average, including
restarts that fail themselves. With p = t + d the n-th checkpoint after a restart can be read at n p + w, so the
expected number of checkpoints between two failures is

    sum over n of P(stretch > n p + w) = exp(-w / M) / (exp(p / M) - 1)

and each saves t seconds of training. The effective share is the saved time divided by the elapsed time:

    E = t exp(-(R + w) / M) / (M (exp((t + d) / M) - 1)).

With w = 0 this formula is Daly's complete model.

Source: Young (CACM 17, 1974) and Daly (Future Generation Computer Systems 22, 2006) for w = 0; the delay w is derived
here. A simulation (tests/cost/test_goodput.py) shows that the formula is exact; the papers' approximations are not
used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.adapters import num_trained_params
from planner.cost.optimizers import moment_bytes_per_param
from planner.elementary import expm1
from planner.errors import InputError
from planner.sums import sum_of
from planner.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.numbers import Number
    from planner.specs.cluster import ClusterSpec
    from planner.specs.job import Job, PoolJob

_SPARES: Final = (0, 1, 2, 4, 8, 16, 32)
"""Numbers of spare hosts for which the waiting share is reported."""
_LEAST_SHARE: Final = 1e-6
"""A run that keeps a smaller share of its time is refused: even a minute of training would take two years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """Time between interruptions of a run, and the costs of interruptions and checkpoints; all in seconds.

    between: mean time between two failures of the run (M).
    restart: time from a failure until training continues (R).
    blocked: time that a checkpoint stops training (d).
    readable_after: time from the end of this stop until the checkpoint can be read (w).
    """

    between: float
    restart: float
    blocked: float
    readable_after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Size of a checkpoint, and the time in which all hosts in use write or read it together."""

    num_bytes: float
    weight_bytes: float
    optimizer_bytes: float
    bytes_per_second: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Shares of a run's time for training, checkpoints and failures.

    effective_share: share of the run's time spent in steps that are kept. This and the following shares sum to one:
        checkpoint_share (training stopped for saving), lost_share (steps done again, and saving that was lost with
        them), restart_share, waiting_share (for a host, if there are too few spares).
    interval_seconds: training time between two checkpoints.
    best_interval_seconds: the interval that makes effective_share largest.
    waiting_by_spares: pairs of a number of spare hosts and the waiting share with that number.
    """

    interruptions: Interruptions
    checkpoint_bytes: float
    interval_seconds: float
    best_interval_seconds: float
    effective_share: float
    best_effective_share: float
    checkpoint_share: float
    lost_share: float
    restart_share: float
    waiting_share: float
    waiting_by_spares: tuple[tuple[int, float], ...]


def effective_share(interruptions: Interruptions, interval_seconds: Number) -> Number:
    """Share of the time spent in kept steps, with a checkpoint after every `interval_seconds` of training; broadcasts.

    Source: the module's text; Daly (2006), complete model, for checkpoints that can be read at once.
    """
    each, mean = interruptions, interruptions.between
    lost = math.exp(-min((each.restart + each.readable_after) / mean, 700.0))
    return interval_seconds / mean * lost / expm1(np.minimum((interval_seconds + each.blocked) / mean, 700.0))


def best_interval_seconds(interruptions: Interruptions) -> float:
    """Training time between checkpoints that makes `effective_share` largest.

    The derivative vanishes if (1 - t / M) exp((t + d) / M) = 1. The solution starts from sqrt(2 d M) (Young) and
    continues with Newton's method. A checkpoint does not begin before the previous one can be read.

    Source: Young (1974) for the first step; the condition is the derivative of `effective_share`.
    """
    mean, blocked = interruptions.between, interruptions.blocked / interruptions.between
    x = min(math.sqrt(2 * blocked), 0.999)  # t / M
    for _ in range(100):
        value, slope = math.log1p(-x) + x + blocked, -x / (1 - x)
        step = value / slope if slope else 0.0
        x = min(max(x - step, x / 2), (1 + x) / 2, 1 - 1e-15)
        if abs(step) <= 1e-12 * x:
            break
    return max(x * mean, interruptions.readable_after - interruptions.blocked)


def waiting_share(hosts_out: float, spare_hosts: int) -> float:
    """Share of the time in which a run waits for a host.

    hosts_out: mean number of hosts in repair if the run never waited.

    The run stops when more hosts are in repair than there are spares, and hosts of a stopped run do not fail. The share
    follows from Erlang's loss formula with spares + 1 servers, for any distribution of repair times.

    Source: Erlang (1917), formula B.
    """
    blocked = 1.0
    for servers in range(1, spare_hosts + 2):
        blocked = hosts_out * blocked / (servers + hosts_out * blocked)
    return blocked


def checkpoint_of(job: PoolJob, in_use: Sequence[tuple[ClusterSpec, int]]) -> Checkpoint:
    """A checkpoint on the devices in use: for each trained parameter, the weight and the optimizer's state.

    Gradients are not saved. Every host in use writes and reads its part.

    Source: definition; rates of independent hosts add up. BLOOM's checkpoint has 2.3 TB (bigscience,
    train/tr11-176B-ml/README.md): 176e9 parameters of 14 bytes, weights 2, master weights 4 and moments 8.
    """
    states, count = job.state_bytes, num_trained_params(job.model, job.training)
    weights, optimizer = states.weights * count, (states.master + moment_bytes_per_param(job)) * count
    hosts = [math.ceil(devices / pool.devices_per_host) for pool, devices in in_use]
    rate = sum_of(pool.failures.storage_bandwidth * num for (pool, _), num in zip(in_use, hosts, strict=True))
    return Checkpoint(
        num_bytes=weights + optimizer,
        weight_bytes=weights,
        optimizer_bytes=optimizer,
        bytes_per_second=rate,
        seconds=(weights + optimizer) / rate,
    )


def interruptions_of(job: PoolJob, in_use: Sequence[tuple[ClusterSpec, int]]) -> Interruptions:
    """Interruptions of a run on the devices in use, which belong to one cluster or to pools of a mixed cluster.

    An asynchronous checkpoint blocks training only while each device copies its state to the host's memory, at the PCIe
    rate of the cluster document. Without this rate, training is blocked until the checkpoint is written.

    Source: definitions; rates of independent devices add up.
    """
    failures = [pool.failures for pool, _ in in_use]
    rate = sum_of(count / pool.failures.device_mtbf for pool, count in in_use)
    saved = checkpoint_of(job, in_use)
    size, seconds = saved.num_bytes, saved.seconds
    copies = [pool.host.bandwidth * pool.host.efficiency for pool, _ in in_use if pool.host]
    is_aside = job.training.asynchronous_checkpoints and len(copies) == len(in_use)
    blocked = size / sum_of(count for _, count in in_use) / min(copies) if is_aside else seconds
    restart = max(each.notice + each.restart for each in failures) + seconds
    return Interruptions(
        between=1 / rate, restart=restart, blocked=blocked, readable_after=seconds if is_aside else 0.0
    )


def kept_share(job: Job, in_use: Sequence[tuple[ClusterSpec, int]]) -> float:
    """Effective share of a run's time if the training document counts failures, else 1.

    Source: `goodput`.
    """
    return goodput(job.pools[0], in_use).effective_share if job.training.failures else 1.0


def goodput(job: PoolJob, in_use: Sequence[tuple[ClusterSpec, int]]) -> Goodput:
    """Shares of a run's time on the devices in use, from the failure data of the cluster and training documents.

    Source: the module's text; shares of restarts by `Interruptions`: 1 - exp(-R / M).

    Raises:
        InputError: next to no step is kept, so that the run would never end.
    """
    each = interruptions_of(job, in_use)
    best = best_interval_seconds(each)
    interval = job.training.checkpoint_interval or best
    spec = in_use[0][0].failures
    out = spec.evicting * spec.repair / each.between
    waiting = 0.0 if spec.spare_hosts is None else waiting_share(out, spec.spare_hosts)
    effective, most = ((1 - waiting) * float(effective_share(each, at)) for at in (interval, best))
    if effective < _LEAST_SHARE:
        every, restart, saved = map(format_seconds, (each.between, each.restart, interval))
        raise InputError(
            "failures and checkpoints leave no time for training",
            where="failures",
            hint=f"a failure every {every}, {restart} for a restart, a checkpoint every {saved}: change device_mtbf, "
            "restart, storage_bandwidth or checkpoint_interval, use fewer devices, or leave out --failures",
        )
    restarting = -(1 - waiting) * math.expm1(-each.restart / each.between)
    saving = effective * each.blocked / interval
    return Goodput(
        interruptions=each,
        checkpoint_bytes=checkpoint_of(job, in_use).num_bytes,
        interval_seconds=interval,
        best_interval_seconds=best,
        effective_share=effective,
        best_effective_share=most,
        checkpoint_share=saving,
        lost_share=1 - waiting - effective - saving - restarting,
        restart_share=restarting,
        waiting_share=waiting,
        waiting_by_spares=tuple((spares, waiting_share(out, spares)) for spares in _SPARES),
    )
