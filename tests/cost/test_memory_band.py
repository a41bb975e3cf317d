"""The distribution of memory that applies to a job, and its display by explain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.answers.peak import memory_band_of
from planner.cost.memory_band import MemoryDistribution, memory_distribution
from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.calibration import MemorySpread, Spread


def test_a_job_takes_its_engine_s_distribution_and_that_of_all_without(make_job):
    layout = parse_layout("tp=1,pp=1,dp=8", num_layers=32, num_devices=8)
    memory = (
        MemorySpread(counter="device", engine="megatron-bridge", location=0.1, scale=0.05),
        MemorySpread(counter="device", location=0.0, scale=0.1),
    )
    job = replace(
        make_job("llama3-8b", engine="megatron-bridge", gpus=8, batch=64), spread=Spread(unseen=2.0, memory=memory)
    )
    assert memory_distribution(job, layout) == MemoryDistribution(location=0.1, scale=0.05)
    assert memory_distribution(job, layout, "allocated") is None
    other = replace(job, engine=job.engine.model_copy(update={"name": "new"}))
    assert memory_distribution(other, layout) == MemoryDistribution(location=0.0, scale=0.1)
    needed = MemorySpread(counter="needed", location=0.02, scale=0.03)
    both = replace(job, spread=Spread(unseen=2.0, memory=(*memory, needed)))
    assert memory_distribution(both, layout) == MemoryDistribution(location=0.02, scale=0.03)
    assert memory_distribution(both, layout, "device") == MemoryDistribution(location=0.1, scale=0.05)
    adapters = replace(job, training=job.training.model_copy(update={"lora_rank": 8}))
    assert memory_distribution(adapters, layout) == memory_distribution(job, layout)
    nf4 = adapters.training.model_copy(update={"frozen_weights": "nf4"})
    assert memory_distribution(replace(adapters, training=nf4), layout).scale == pytest.approx(2.0 * 0.05)


def test_the_band_is_of_the_stage_that_is_fullest(make_job):
    layout = parse_layout("tp=1,pp=1,dp=8", num_layers=32, num_devices=8)
    spread = Spread(memory=(MemorySpread(counter="device", location=-0.05, scale=0.1, num_rows=7),))
    job = replace(make_job("llama3-8b", engine="megatron-bridge", gpus=8, batch=64), spread=spread)
    plan = plan_for_layout(job, layout)
    found, told = memory_band_of(job, plan), MemoryDistribution(location=-0.05, scale=0.1)
    assert found.low_bytes == pytest.approx(plan.memory[0].total_bytes * told.quantile(0.1))
    assert found.high_bytes == pytest.approx(plan.memory[0].total_bytes * told.quantile(0.9))
    whole = job.cluster.device.memory
    assert found.chance_of_fitting == pytest.approx(told.chance(whole / plan.memory[0].total_bytes))
    assert memory_band_of(replace(job, spread=Spread()), plan) is None
