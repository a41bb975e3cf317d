"""What failures and checkpoints leave of the time of a run.

Failures of the run strike at random, M seconds apart in the mean (exponential), also while it restarts. A checkpoint
blocks training for d seconds after every t seconds of it, and can be read w seconds after that (0 where the writing
itself blocks). After a failure the run restarts in R seconds from the last checkpoint that can be read.

Between two failures lie M seconds in the mean, and after each one M (exp(R / M) - 1) of restarts, those counted in that
fail themselves. With p = t + d the n-th checkpoint after a restart can be read at n p + w, so a stretch keeps

    sum over n of P(stretch > n p + w) = exp(-w / M) / (exp(p / M) - 1)

checkpoints in the mean, each worth t. Effective training time is what is kept over what passes:

    E = t exp(-(R + w) / M) / (M (exp((t + d) / M) - 1)).

With w = 0 that is Daly's complete model.

Source: Young (CACM 17, 1974) and Daly (Future Generation Computer Systems 22, 2006) for w = 0; the delay w is our own
step. What is exact here is shown by a simulation (tests/cost/test_goodput.py), not by these papers' approximations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.adapters import num_trained_params
from planner.cost.optimizers import moment_bytes_per_param
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.numbers import Number
    from planner.specs.cluster import ClusterSpec
    from planner.specs.job import Job, PoolJob

_SPARES: Final = (0, 1, 2, 4, 8, 16, 32)
"""Numbers of spare hosts whose worth is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """How often a run is interrupted, and what that and its checkpoints cost; all in seconds.

    between: mean time between two failures of the run (M). restart: from a failure until training goes on (R).
    blocked: what a checkpoint stops training for (d). readable_after: from there until it can be read (w).
    """

    between: float
    restart: float
    blocked: float
    readable_after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Where the time of a run goes that fails and saves.

    effective_share: share of the run's time that goes into steps that are kept. The other shares and it add up to one:
    checkpoint_share (training stopped for saving), lost_share (steps done again, and saving that was lost with them),
    restart_share, waiting_share (for a host, where there are too few spares).
    interval_seconds: training between two checkpoints; best_interval_seconds: with which the share is largest.
    waiting_by_spares: spare hosts and the share of the time that the run would wait with them.
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
    """Share of the time that becomes kept steps, with checkpoints after `interval_seconds` of training; broadcasts.

    Source: the module's text; Daly (2006), complete model, for checkpoints that can be read at once.
    """
    each, mean = interruptions, interruptions.between
    lost = math.exp(-min((each.restart + each.readable_after) / mean, 700.0))
    return interval_seconds / mean * lost / np.expm1(np.minimum((interval_seconds + each.blocked) / mean, 700.0))


def best_interval_seconds(interruptions: Interruptions) -> float:
    """Training between checkpoints with which `effective_share` is largest.

    The derivative vanishes where (1 - t / M) exp((t + d) / M) = 1; sqrt(2 d M) is the first step (Young), Newton's
    method the rest. A checkpoint is not begun before the one before can be read.

    Source: Young (1974) for the first step; the condition is the derivative of `effective_share`.
    """
    mean, blocked = interruptions.between, interruptions.blocked / interruptions.between
    x = min(math.sqrt(2 * blocked), 0.999)  # t / M
    for _ in range(100):
        value, slope = math.log1p(-x) + x + blocked, -x / (1 - x)
        step = value / slope if slope else 0.0
        x = min(max(x - step, x / 2), (1 + x) / 2)
        if abs(step) <= 1e-12 * x:
            break
    return max(x * mean, interruptions.readable_after - interruptions.blocked)


def waiting_share(hosts_out: float, spare_hosts: int) -> float:
    """Share of the time that a run waits for a host, with `hosts_out` hosts in repair in the mean if it never waited.

    The run stops when one host more is out than there are spares, and a stopped run breaks no host: Erlang's loss
    formula with spares + 1 servers, whatever the distribution of repairs.

    Source: Erlang (1917), formula B.
    """
    blocked = 1.0
    for servers in range(1, spare_hosts + 2):
        blocked = hosts_out * blocked / (servers + hosts_out * blocked)
    return blocked


def checkpoint_bytes(job: PoolJob) -> float:
    """Bytes of a checkpoint: of each parameter that is trained what computes, what the update keeps, and no gradient.

    Source: definition. BLOOM's has 2.3 TB (bigscience, train/tr11-176B-ml/README.md): 176e9 parameters of 14 bytes,
    weights 2, master weights 4 and moments 8.
    """
    states = job.state_bytes
    return (states.weights + states.master + moment_bytes_per_param(job)) * num_trained_params(job.model, job.training)


def interruptions_of(job: PoolJob, in_use: Sequence[tuple[ClusterSpec, int]]) -> Interruptions:
    """What interrupts a run on the devices in use: those of one cluster, or of pools of a mixed one.

    Every host that is used writes and reads its part of a checkpoint. A checkpoint that is written while training goes
    on blocks it for the copy to the hosts' memory: the state that a device has by PCIe, as the host's document says, or
    for the whole writing where that has no bandwidth.

    Source: definitions; rates of independent devices add up.
    """
    failures = [pool.failures for pool, _ in in_use]
    hosts = [math.ceil(count / pool.devices_per_host) for pool, count in in_use]
    rate = sum_of(count / pool.failures.device_mtbf for pool, count in in_use)
    size = checkpoint_bytes(job)
    seconds = size / sum_of(each.storage_bandwidth * num for each, num in zip(failures, hosts, strict=True))
    copies = [pool.host.bandwidth * pool.host.efficiency for pool, _ in in_use if pool.host]
    is_aside = job.training.asynchronous_checkpoints and len(copies) == len(in_use)
    blocked = size / sum_of(count for _, count in in_use) / min(copies) if is_aside else seconds
    restart = max(each.notice + each.restart for each in failures) + seconds
    return Interruptions(
        between=1 / rate, restart=restart, blocked=blocked, readable_after=seconds if is_aside else 0.0
    )


def kept_share(job: Job, in_use: Sequence[tuple[ClusterSpec, int]]) -> float:
    """Effective training time where the training document counts failures, else 1.

    Source: `goodput`.
    """
    return goodput(job.pools[0], in_use).effective_share if job.training.failures else 1.0


def goodput(job: PoolJob, in_use: Sequence[tuple[ClusterSpec, int]]) -> Goodput:
    """Where the time of a run goes on the devices in use, by what documents of cluster and training say of failures.

    Source: the module's text; shares of restarts by `Interruptions`: 1 - exp(-R / M).
    """
    each = interruptions_of(job, in_use)
    best = best_interval_seconds(each)
    interval = job.training.checkpoint_interval or best
    spec = in_use[0][0].failures
    out = spec.evicting * spec.repair / each.between
    waiting = 0.0 if spec.spare_hosts is None else waiting_share(out, spec.spare_hosts)
    effective, most = ((1 - waiting) * float(effective_share(each, at)) for at in (interval, best))
    restarting = -(1 - waiting) * math.expm1(-each.restart / each.between)
    saving = effective * each.blocked / interval
    return Goodput(
        interruptions=each,
        checkpoint_bytes=checkpoint_bytes(job),
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
