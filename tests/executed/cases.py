"""The table of runs: lines of planner/specs/executed.yaml, and plans drawn by seed."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import planner
from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.load import load_job

if TYPE_CHECKING:
    from planner.plan import Plan

STEPS, BATCH, LENGTH = 4, 8, 32
SHAPE: dict[str, Any] = {
    "name": "tiny", "architecture": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2,
    "ffn_hidden_size": 128, "vocab_size": 256, "max_sequence_length": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "tied": SHAPE | {"tied_embeddings": True},
    "gpt": SHAPE | {"architecture": "gpt", "num_kv_heads": 4, "tied_embeddings": True},
    "moe": SHAPE | {"ffn_hidden_size": 96, "moe": {"num_experts": 4, "experts_per_token": 2, "ffn_hidden_size": 96}},
}
RUN = ("steps=4", "schedule=constant", "warmup_steps=0", "learning_rate=0.01", "precision=fp32", "dropout=0")
"""A constant rate, high enough that a wrong update shows in the next loss."""
OWN = {"torch": ("training.warmup_steps=2",)}  # its schedule is always a cosine, which its reference repeats
EXECUTED = yaml.safe_load((Path(planner.__file__).parent / "specs" / "executed.yaml").read_text(encoding="utf-8"))
ENGINES = {program: row["engine"] for program, row in EXECUTED["programs"].items()}


@dataclass(frozen=True, slots=True)
class Case:
    program: str
    axis: str
    model: str
    layout: str
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.program, self.axis, self.model, self.layout, *self.settings))

    @property
    def world(self) -> int:
        keys = dict(each.split("=") for each in self.layout.split(","))
        return math.prod(int(keys.get(axis, 1)) for axis in ("dp", "tp", "cp", "pp"))


def stated(program: str) -> list[Case]:
    """One axis at a time: the lines of the data file."""
    rows = EXECUTED["programs"].get(program, {}).get("executed", {}).items()
    return [
        Case(program, str(axis), model, layout, tuple(settings))
        for axis, text in rows
        for model, layout, *settings in [text.split()]
    ]


def drawn(program: str, count: int = 12) -> list[Case]:
    """Plans drawn by seed among the axes of the data file, on at most 8 ranks."""
    random_of, axes = random.Random(program), {*EXECUTED["programs"][program]["executed"]}
    found: dict[str, Case] = {}
    of_trainer = program in ("accelerate", "deepspeed")
    while len(found) < count:
        tp, pp = (random_of.choice((1, 2)) if axis in axes else 1 for axis in ("tp", "pp"))
        dp = random_of.choice((1, 2))
        chunks = random_of.choice((1, 2)) if "interleave" in axes and pp > 1 else 1
        zeros = [zero for zero in range(4) if f"zero={zero}" in axes and (zero < 2 or pp == 1)] or [0]
        layout = f"tp={tp},pp={pp},dp={dp},interleave={chunks},zero={random_of.choice(zeros)}"
        layout += f",mbs={random_of.choice((1, 2))},recompute={random_of.choice(('none', 'full'))}"
        model = random_of.choice(("llama", "tied"))
        if of_trainer and tp > 1:  # what both refuse: a pipeline of cut layers, cut and tied weights
            layout, model = layout.replace("pp=2", "pp=1").replace("tp=2", "tp=2,sp=0"), "llama"
        if of_trainer and random_of.random() < 0.5:  # the other way to use two more ranks
            more = {"accelerate": ("ep=2", "moe"), "deepspeed": ("cp=2", model)}[program]
            if tp == 1 and "pp=2" not in layout and (dp == 2 or program == "deepspeed"):
                layout, model = f"{layout},{more[0]}", more[1]
                layout = re.sub("zero=.", "zero=3", layout)
        found.setdefault(layout, Case(program, "drawn", model, layout))
    return list(found.values())


def plan_of(case: Case, folder: Path) -> Plan:
    """The plan of a case; its model is a document in the folder."""
    document = folder / "model.yaml"
    document.write_text(yaml.safe_dump(MODELS[case.model]), encoding="utf-8")
    job = load_job(
        model=str(document), cluster="local-cpu" if case.program == "torch" else "dgx-h100",
        engine=ENGINES[case.program], gpus=case.world, global_batch_size=BATCH, sequence_length=LENGTH,
        settings=(*(f"training.{each}" for each in RUN), *OWN.get(case.program, ()), *case.settings),
    )  # fmt: skip
    layout = parse_layout(case.layout, num_layers=job.model.num_layers, num_devices=case.world)
    return plan_for_layout(job, layout)
