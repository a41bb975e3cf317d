"""No pin of a value that the search considers makes a plan faster than no pin; the documentation lists the others."""

import random
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from planner.asked import plannable
from planner.errors import InputError
from planner.layout import divisors
from planner.search.footprint import NothingFits
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.by_name import engine_names
from planner.specs.load import load_job

PAGE = Path(__file__).parents[2] / "docs" / "how-it-decides.md"


def left_out():
    """The conditions in the first column of the table of what is not searched: key, sign and value of each."""
    section = PAGE.read_text(encoding="utf-8").split("## What is not searched")[1].split("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    return [re.fullmatch(r"(\w+)(=|>|)(.*)", text).groups() for cell in cells for text in re.findall("`(.+?)`", cell)]


def is_considered(key, value):
    """Whether the table does not list this value of a key."""
    tests = {
        "": lambda _: True,
        "=": lambda given: fnmatchcase(value, given),
        ">": lambda given: int(value) > int(given),
    }
    return not any(key == name and tests[sign](given) for name, sign, given in left_out())


def test_the_table_lists_conditions_on_layouts():
    assert len(left_out()) > 10
    assert not is_considered("sp", "0")
    assert not is_considered("recompute", "full:2")
    assert not is_considered("interleave", "3")
    assert is_considered("interleave", "2")
    assert is_considered("recompute", "full")


SMALL = (  # model, its cluster, devices, memory in GiB
    ("tiny-llama", "dgx-a100", 8, (0.01, 0.02, 0.5)),
    ("llama3.2-1b", "l40s-box", 8, (12, 24, 44)),
    ("llama3-8b", "dgx-h100", 16, (24, 40, 80)),
)
MIXED = (
    *SMALL,
    ("olmoe-7b-a1b", "dgx-a100", 16, (24, 40, 80)),
    ("deepseek-v2-lite", "dgx-h100", 16, (40, 80)),
    ("moonlight-16b", "dgx-h100", 32, (40, 80)),
    ("mixtral-8x7b", "dgx-h100", 32, (40, 80)),
    ("gpt-oss-20b", "dgx-h100", 16, (40, 80)),
    ("llama2-13b", "dgx1-v100", 16, (16, 32)),
)


def drawn_job(pick, models):
    """A job on one of the engines, or None if its engine cannot run the model."""
    model, cluster, most, memory = pick.choice(models)
    settings = [f"device.memory={pick.choice(memory)} GiB"]
    settings += pick.choice([[], [], ["training.expert_overlap=true"]]) if models is MIXED else []
    job = load_job(
        model=model, cluster=cluster, engine=pick.choice(engine_names()), gpus=pick.choice([most // 2, most]),
        sequence_length=pick.choice([512, 2048]), global_batch_size=pick.choice([8, 16, 24, 64]), settings=settings,
    )  # fmt: skip
    return job, plannable(job, Constraints())


def drawn_pin(pick, job):
    """A key and a value that layouts of the job may have, in words of `--pin`, which the search considers."""
    can, n = job.engine.can, job.cluster.num_devices
    degrees = [str(value) for value in divisors(n)]
    values = {
        **dict.fromkeys(can.axes, degrees), "mbs": degrees, "hsdp": degrees, "interleave": degrees[1:],
        "zero": ["0", "1", "2", "3"], "sp": ["0", "1"], "schedule": [*job.engine.pipeline.schedules],
        "recompute": [*can.recompute, "full:1"], "offload": [*job.engine.offload.what],
    }  # fmt: skip
    while True:
        key = pick.choice([*values, "recompute", "recompute", "interleave"])
        value = pick.choice(values[key])
        if is_considered(key, value):
            return key, value


def seconds_of(found):
    """Step time of a plan; infinite if it does not fit."""
    return float("inf") if isinstance(found, NothingFits) or not found.fits else found.step_seconds


def check_pair(seed, models):
    """Compare a job's plan with the plan under a pin; draw again if the job has no layouts, or the pin leaves none."""
    pick = random.Random(seed)
    for _ in range(100):
        try:
            job, constraints = drawn_job(pick, models)
            key, value = drawn_pin(pick, job)
            pins = Constraints.parse([f"{key}={value}"]).pins
            pinned = seconds_of(search(job, replace(constraints, pins=pins)))
        except InputError:
            continue
        if pinned < float("inf"):
            free = search(job, constraints)
            names = (job.model.name, job.cluster.name, job.engine.name, f"{key}={value}")
            assert seconds_of(free) <= pinned * (1 + 1e-9), (names, str(free.layout))
            return names
    raise AssertionError("no pair of a job and a pin was found")


@pytest.mark.parametrize("seed", range(5))
def test_no_pin_makes_a_plan_faster(seed):
    check_pair(seed, SMALL)


OVERLAP = ("training.expert_overlap=true",)


@pytest.mark.parametrize(
    ("model", "cluster", "engine", "gpus", "batch", "settings", "pin"),
    [
        ("mixtral-8x7b", "dgx-h100", "hai-llm", 64, 256, (), "recompute=selective"),
        *(
            pytest.param("deepseek-v3", *each, pin, marks=pytest.mark.slow)
            for pin in ("interleave=2", "pp=16")
            for each in (
                ("gb200-nvl72", "megatron", 256, 4096, ("training.precision=fp8",)),
                ("gb200-nvl72", "megatron", 256, 4096, ("training.precision=fp8", *OVERLAP)),
                ("dgx-h100", "megatron", 1024, 4096, ("training.precision=fp8", *OVERLAP)),
                ("dgx-b200", "megatron", 256, 4096, ("training.precision=fp8", *OVERLAP)),
                ("hgx-h800", "megatron", 2048, 15360, ("training.precision=fp8", *OVERLAP)),
            )
        ),
    ],
)
def test_pins_that_once_made_a_plan_faster(model, cluster, engine, gpus, batch, settings, pin):
    job = load_job(
        model=model, cluster=cluster, engine=engine, gpus=gpus, settings=settings,
        sequence_length=8192 if model == "mixtral-8x7b" else 4096, global_batch_size=batch,
    )  # fmt: skip
    free, pinned = (search(job, Constraints.parse(pins)) for pins in ((), (pin,)))
    assert pinned.fits
    assert free.step_seconds <= pinned.step_seconds * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_no_pin_makes_the_plan_of_any_engine_faster(seed):
    check_pair(seed, MIXED)
