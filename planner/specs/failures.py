"""What a cluster's document says about failures: how often devices fail, and how a run comes back."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from planner.specs.document import Bandwidth, Document, Seconds

_HOUR: Final = 3600.0


class FailureSpec(Document):
    """How often devices interrupt a run, and what each interruption costs.

    device_mtbf: mean time between failures of one device, everything around it counted in (host, adapter, links,
    software): device hours over unexpected interruptions. The default is the median of the runs of
    tests/published/failures.csv that state both; the table says which of its figures were read at their source.
    notice: from the failure until the run is stopped. The default is half of the ten minutes after which NCCL's
    watchdog gives up on a collective (torch.distributed, default_pg_nccl_timeout); a crash is noticed sooner.
    restart: from there until training goes on, without reading the checkpoint: diagnosis, a new host, start of the
    processes, communicators, compilation. MegaScale (Jiang et al., NSDI 2024, section 6.3) takes less than ten minutes
    for detection and diagnosis together; five minutes beside `notice` are assumed.
    evicting: share of the interruptions that take the host out. Of those of Llama 3 (arXiv 2407.21783, section 3.3.4)
    78 % are confirmed or suspected to be the hardware's.
    repair: until such a host is back; a day is assumed.
    spare_hosts: hosts that stand by for this run; without it a replacement is always at hand.
    storage_bandwidth: what one host writes or reads of a checkpoint, while all hosts do; 1 GB/s is assumed.
    """

    device_mtbf: Seconds = Field(default=50_700 * _HOUR, gt=0)
    notice: Seconds = Field(default=300.0, ge=0)
    restart: Seconds = Field(default=300.0, ge=0)
    evicting: float = Field(default=0.78, ge=0, le=1)
    repair: Seconds = Field(default=24 * _HOUR, gt=0)
    spare_hosts: int | None = Field(default=None, ge=0, le=1_000_000)
    storage_bandwidth: Bandwidth = Field(default=1e9, gt=0)
