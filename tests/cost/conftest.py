"""Jobs for the cost model's tests."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from planner.specs.load import load_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.specs.job import PoolJob


@pytest.fixture(scope="session")
def make_job() -> Callable[..., PoolJob]:
    """A job from shipped documents; `settings` are `--set` assignments."""

    @cache
    def make(
        model: str = "gpt3-175b",
        cluster: str = "dgx-a100",
        *,
        gpus: int = 64,
        batch: int = 64,
        sequence: int = 2048,
        precision: str | None = None,
        engine: str = "megatron",
        settings: tuple[str, ...] = (),
        **extra: Any,
    ) -> PoolJob:
        return load_job(
            model=model,
            cluster=cluster,
            training=None,
            engine=engine,
            nodes=None,
            gpus=gpus,
            sequence_length=sequence,
            global_batch_size=batch,
            precision=precision,
            settings=settings,
            **extra,
        )

    return make
