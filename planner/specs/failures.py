"""The part of a cluster document about failures: how often devices fail, and how a run recovers."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from planner.specs.document import Bandwidth, InputDocument, Seconds

_HOUR: Final = 3600.0


class FailureSpec(InputDocument):
    """How often devices interrupt a run, and the cost of each interruption.

    device_mtbf: mean time between failures of one device, including its host, adapter, links and software: device hours
    divided by unexpected interruptions. The default is the median of the runs of tests/published/failures.csv that
    state both; that table marks the figures that were read at their source.
    notice: time from the failure until the run is stopped. The default is half of the ten minutes after which NCCL's
    watchdog aborts a collective (torch.distributed, default_pg_nccl_timeout); a crash is noticed sooner.
    restart: time from the stop until training continues, without reading the checkpoint: diagnosis, a new host, start
    of the processes, communicators, compilation. MegaScale (Jiang et al., NSDI 2024, section 6.3) takes less than ten
    minutes for detection and diagnosis together; the default assumes five minutes after `notice`.
    evicting: share of the interruptions that remove a host. For Llama 3 (arXiv 2407.21783, section 3.3.4), 78 % of the
    interruptions were hardware failures, confirmed or suspected.
    repair: time until such a host is back; the default of one day is an assumption.
    spare_hosts: hosts that stand by for this run; without a value a replacement is always available.
    storage_bandwidth: rate at which one host writes or reads a checkpoint while all hosts do; the default of 1 GB/s is
    an assumption.
    """

    device_mtbf: Seconds = Field(default=50_700 * _HOUR, gt=0)
    notice: Seconds = Field(default=300.0, ge=0)
    restart: Seconds = Field(default=300.0, ge=0)
    evicting: float = Field(default=0.78, ge=0, le=1)
    repair: Seconds = Field(default=24 * _HOUR, gt=0)
    spare_hosts: int | None = Field(default=None, ge=0, le=1_000_000)
    storage_bandwidth: Bandwidth = Field(default=1e9, gt=0)
