"""Options and values at the ends of what is allowed give an answer or a message, never an error of arithmetic."""

from __future__ import annotations

import contextlib
import math

import pytest

import planner
from planner.errors import InputError
from planner.specs.change import change_job
from planner.specs.load import load_job

JOB = {"model": "tiny-gpt", "cluster": "dgx-a100", "gpus": 2, "global_batch": 8}
RUN = ("training.tokens=1e9", "training.deadline=30 d", "training.price=2 USD/h")
ENDS = ("1e-40", "1e-20", "1e-9", "1", "1e9", "1e20", "1e24")
FIELDS = {
    "training.tokens": "", "training.deadline": " s", "training.price": " USD/h", "training.checkpoint_interval": " s",
    "cluster.price": " USD/h", "cluster.failures.device_mtbf": " s", "cluster.failures.restart": " s",
    "cluster.failures.notice": " s", "cluster.failures.repair": " s", "cluster.failures.storage_bandwidth": " GB/s",
    "nvlink.bandwidth": " GB/s", "nvlink.latency": " s", "device.memory": " GiB", "device.memory_bandwidth": " GB/s",
    "device.power": " W", "device.peak.bf16": " TFLOP/s", "device.efficiency.matmul_half_depth": "",
    "device.efficiency.launch": " s", "engine.compute.host_factor": "", "engine.memory.states.mixed.moment": "",
}  # fmt: skip


def finite(value: object) -> bool:
    """Whether all numbers of a document are finite."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


SLOW = [pytest.param(path, ENDS, marks=pytest.mark.slow) for path in FIELDS]


@pytest.mark.parametrize(
    ("path", "numbers"),
    [
        ("cluster.failures.device_mtbf", ("1e-9", "1e9")),
        ("training.checkpoint_interval", ("1e-20", "1e20")),
        ("training.deadline", ("1e24",)),
        *SLOW,
    ],
)
def test_values_at_the_ends(path: str, numbers: tuple[str, ...]) -> None:
    for number in numbers:
        settings = (*RUN, f"{path}={number}{FIELDS[path]}")
        with contextlib.suppress(planner.PlannerError):  # a message with the reason is an answer, too
            plan = planner.plan_job(**JOB, settings=settings, failures=True, objective="cost")
            assert plan.run is not None
            assert finite(vars_of(plan.run)), number


def vars_of(run: object) -> dict[str, object]:
    return {name: getattr(run, name) for name in type(run).__slots__}


@pytest.mark.parametrize("risk", [0.0, 5e-324, 1e-300, 1e-17, 9.9e-7, 0.951, 1.0])
def test_a_risk_that_no_evidence_supports_is_refused(risk: float) -> None:
    with pytest.raises(InputError, match="is not a risk") as caught:
        planner.plan_job(**JOB, risk=risk)
    assert caught.value.mistakes[0].hint == "valid: 0.0001% to 95%"
    with pytest.raises(InputError, match="risk"):
        change_job(load_job(model="tiny-gpt", cluster="dgx-a100", global_batch_size=8), f"risk={risk!r}")


@pytest.mark.parametrize("risk", [1e-6, 0.001, 0.95])
def test_a_risk_at_the_ends_is_priced(risk: float) -> None:
    assert planner.plan_job(**JOB, risk=risk).memory[0].limit_bytes > 0


def test_a_run_that_fails_faster_than_it_restarts_is_refused_with_the_times() -> None:
    settings = ("training.tokens=1e9", "cluster.failures.device_mtbf=1 s")
    with pytest.raises(InputError, match="leave no time for training") as caught:
        planner.plan_job(**JOB, settings=settings, failures=True).to_json()
    assert "a failure every 500 ms, 600 s for a restart" in caught.value.mistakes[0].hint  # two devices; 300 + 300 s
    slow = ("training.tokens=1e9", "cluster.failures.device_mtbf=1 d")
    assert planner.plan_job(**JOB, settings=slow, failures=True).run.seconds > 0


def test_a_whole_number_and_its_float_give_equal_bytes() -> None:
    assert planner.plan_job(**JOB, within=0).to_json() == planner.plan_job(**JOB, within=0.0).to_json()
    texts = [planner.plan_job(**JOB, headroom=each, seq_len=128).to_json() for each in (0, 0.0)]
    assert texts[0] == texts[1]
