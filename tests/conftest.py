"""Fixtures that several areas share: the option that rewrites golden files, and a plan made by hand."""

from __future__ import annotations

import gc
import json
import os
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped] # it ships no types
import pytest
from hypothesis import settings

from planner.cost.band import Band
from planner.cost.ledger import LineName, MemoryLine, StageMemory, TimeLine
from planner.layout import Layout
from planner.plan import Plan, RunnerUp, checksum, plan_to_json
from planner.plan_parts import Certificate, MadeBy, SearchOptions
from planner.reading import read_plan
from planner.run_arguments import RunArguments
from planner.show.schema import answer_schemas
from planner.specs.by_name import load_engine
from planner.specs.calibration import UNCALIBRATED
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

settings.register_profile("planner", deadline=None)  # a loaded machine is no failure
settings.load_profile("planner")

GOLDEN = Path(__file__).parent / "golden"

# A shell starts what it puts into the background with SIGINT ignored, and children inherit that. Tests that
# interrupt a child need the usual behaviour, whatever started pytest.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Processes under test are those of a user. The one hides what a full buffer does at the end; with the other each of
# them compiles the planner anew.
for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(name, None)
GIB = 2**30


def _with_engine(job: Any, **changes: dict[str, Any]) -> Any:
    parts = {part: getattr(job.engine, part).model_copy(update=update) for part, update in changes.items()}
    return replace(job, engine=job.engine.model_copy(update=parts))


@pytest.fixture(scope="session")
def with_engine() -> Callable[..., Any]:
    """A job with another engine profile: `with_engine(job, memory={"logits_bytes": 0})`."""
    return _with_engine


@pytest.fixture(scope="session")
def schemas_of_answers() -> dict[str, dict[str, Any]]:
    """The published schemas of all answers, which take a second to make."""
    return answer_schemas()


@pytest.fixture(scope="session")
def validator_of(schemas_of_answers: dict[str, dict[str, Any]]) -> Callable[[str], jsonschema.Draft202012Validator]:
    """`validator_of(name)` checks documents by the schema of an answer; the schema itself is checked once."""

    @cache
    def made(name: str) -> jsonschema.Draft202012Validator:
        jsonschema.Draft202012Validator.check_schema(schemas_of_answers[name])
        return jsonschema.Draft202012Validator(schemas_of_answers[name])

    return made


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what is produced now")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the collector of cycles, and keep it from what they leave: modules and thousands of tests.

    These live until the end. The collector would walk through them again and again, for a third of the time of the
    collection, and with every test that makes many objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file of tests/golden; `pytest --update-golden` writes it instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{name} moved; look, then run `make golden`"

    return check


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off progress lines, which a search shows on a loaded machine; tests of progress set their own time."""
    monkeypatch.setattr("planner.show.progress._LINE_SECONDS", 3600.0)


def make_memory(stages: Sequence[Sequence[float]], *, limit_gib: float = 76.0) -> tuple[StageMemory, ...]:
    """Memory of stages, each given as GiB of the six lines."""
    names = list(LineName)[:6]
    return tuple(
        StageMemory(
            stage=stage,
            limit_bytes=limit_gib * GIB,
            most_bytes=limit_gib * GIB,
            device_chance=0.97 if sum(sizes) <= limit_gib else 0.3,
            lines=tuple(
                MemoryLine(name=name, num_bytes=size * GIB, formula=f"formula of {name}", source=f"source of {name}")
                for name, size in zip(names, sizes, strict=True)
            ),
        )
        for stage, sizes in enumerate(stages)
    )


def make_time(**seconds: tuple[float, float]) -> tuple[TimeLine, ...]:
    """Lines of a step from name=(busy, hidden)."""
    return tuple(
        TimeLine(
            name=LineName(name),
            busy_seconds=busy,
            hidden_seconds=hidden,
            formula=f"formula of {name}",
            source=f"source of {name}",
            bound="infiniband" if name.endswith("comm") else "matmul",
        )
        for name, (busy, hidden) in seconds.items()
    )


def make_plan(**changes: Any) -> Plan:
    """A plan with numbers written by hand, so that no change of the cost model changes them."""
    layout = Layout(
        tp=8,
        pp=4,
        dp=4,
        zero=1,
        mbs=2,
        interleave=1,
        sp=1,
        recompute=("selective",) * 4,
        layers_per_stage=(24, 24, 24, 23),
    )
    plan = Plan(
        model=ModelSpec.model_validate(_MODEL),
        cluster=ClusterSpec.model_validate(_CLUSTER),
        training=TrainingSpec(sequence_length=2048, global_batch_size=1536, tokens=300e9),
        engine=load_engine("torch"),
        layout=layout,
        memory=make_memory(
            [
                (10.5, 10.5, 15.75, 24.0, 2.5, 1.5),
                (10.0, 10.0, 15.0, 18.0, 1.0, 1.5),
                (10.0, 10.0, 15.0, 12.0, 1.0, 1.5),
                (10.25, 10.25, 15.5, 6.0, 5.25, 1.5),
            ]
        ),
        time=make_time(
            compute=(30.0, 0.0),
            recompute=(1.2, 0.0),
            embedding_and_loss=(0.9, 0.0),
            tp_comm=(4.5, 0.0),
            pp_comm=(0.6, 0.45),
            bubble=(2.4, 0.0),
            dp_comm=(1.5, 1.25),
            optimizer=(0.1, 0.0),
        ),
        step_seconds=39.5,
        low_step_seconds=37.1,
        high_step_seconds=42.3,
        calibration=(UNCALIBRATED,),
        band=Band(low=0.94, high=1.07, num_near=12, axes="tp+pp"),
        tokens_per_second_per_device=622.2,
        mfu=0.4371,
        hfu=0.4529,
        flops_convention="6 per parameter and token, attention whole",
        runners_up=(
            RunnerUp(
                layout=replace(layout, dp=8, pp=2, layers_per_stage=(48, 47), recompute=("full",) * 2),
                step_seconds=41.0,
                peak_bytes=74.2 * GIB,
                reason="3.8% slower: loses recompute 5.1 s",
            ),
            RunnerUp(
                layout=replace(layout, mbs=1, recompute=("none", "none", "selective", "selective")),
                step_seconds=41.9,
                peak_bytes=61.0 * GIB,
                reason="6.1% slower: loses tp comm 1.9 s, bubble 500 ms; saves memory 12.7 GiB",
            ),
        ),
        certificate=Certificate(
            objective="throughput",
            status="optimal",
            solver="cbc",
            objective_seconds=39.5,
            gap=0.0,
            dynamic_program_seconds=39.5,
            num_cuts=98,
            num_cuts_pruned=0,
            num_legal=1234,
            num_pruned={"memory": 800, "time bound": 400},
            num_priced=34,
            num_decided=21,
            num_columns=50,
        ),
        made_by=MadeBy(planner_version="0.0.1", digest="written by hand", calibration="own"),
        options=SearchOptions(headroom=0.05, allow_tp_across_nodes=False, allow_offload=False),
    )
    return replace(plan, **changes)


@pytest.fixture(name="make_plan")
def make_plan_fixture() -> Callable[..., Plan]:
    """`make_plan`, for tests that change a part of the plan."""
    return make_plan


@pytest.fixture(name="make_memory")
def make_memory_fixture() -> Callable[..., tuple[StageMemory, ...]]:
    """`make_memory`, for tests that need other stages."""
    return make_memory


@pytest.fixture
def plan() -> Plan:
    """The plan of `make_plan`."""
    return make_plan()


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path) -> Path:
    """The plan of `make_plan` as a file, with a recompute policy of its engine and the figures of this version."""
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(replace(plan, layout=replace(plan.layout, recompute=("full",) * 4))))
    path.write_text(plan_to_json(read_plan(path)))
    return path


@pytest.fixture
def stamped() -> Callable[[dict[str, Any]], str]:
    """A changed plan document as text, with the checksum that fits the changed document."""
    return lambda document: json.dumps(document | {"checksum": checksum(document)})


EVERY_ARGUMENT = RunArguments(
    data=("a b", "hf:x"), tokenizer=Path("t"), document_mask=True, validation=0.25, weights=Path("w"), export=Path("e"),
    steps=7, resume="12", checkpoint_every=3, keep_checkpoints=1, async_save=True, async_tp=True, validate_every=9,
    profile=2, tensorboard=True, wandb="p",
)  # fmt: skip


@pytest.fixture(params=[RunArguments(), EVERY_ARGUMENT], ids=["none", "all"])
def run_arguments(request: pytest.FixtureRequest) -> RunArguments:
    """Arguments of a run: all defaults, or none of them the default."""
    found: RunArguments = request.param
    return found


_MODEL = {
    "name": "gpt-95l", "architecture": "gpt", "num_layers": 95, "hidden_size": 12288, "num_heads": 96,
    "ffn_hidden_size": 49152, "vocab_size": 51200, "max_sequence_length": 2048,
}  # fmt: skip
_CLUSTER = {
    "name": "dgx-a100",
    "device": {
        "name": "a100-80gb", "kind": "cuda", "memory": "80 GiB", "peak": {"bf16": "312 TFLOP/s"},
        "memory_bandwidth": "2039 GB/s", "num_processors": 108, "reserved_memory": "1.5 GiB",
        "efficiency": {
            "matmul": 0.75, "matmul_half_depth": 100.0, "attention": 0.5, "memory": 0.8, "launch": "5 us",
            "layer_floor": "200 us",
        },
    },
    "devices_per_host": 8,
    "hosts": 17,
    "links": (
        {"name": "nvlink", "spans": "8 devices", "bandwidth": "300 GB/s", "latency": "3 us", "kind": "switch",
         "efficiency": 0.8},
        {"name": "infiniband", "spans": "cluster", "bandwidth": "25 GB/s", "latency": "8 us", "kind": "fat-tree",
         "efficiency": 0.8},
    ),
    "price": "2.00 USD/h",
}  # fmt: skip


# --- hostile text, for everything that shows a user's words -----------------------------------------------------------

RUN = "window.owned=1"
HOSTILE = [
    "</script><script>" + RUN + "</script>",
    "<script>" + RUN + "</script>",
    "<img src=x onerror=" + RUN + ">",
    "<svg onload=" + RUN + ">",
    "<svg><script>" + RUN + "</script></svg>",
    '" onmouseover="' + RUN,
    "' onfocus='" + RUN + "' autofocus='",
    "javascript:" + RUN,
    "<a href=javascript:" + RUN + ">x</a>",
    "<iframe srcdoc='<script>parent." + RUN + "</script>'></iframe>",
    "<style>*{display:none}</style>",
    "</style><script>" + RUN + "</script>",
    "</title><script>" + RUN + "</script>",
    "<!--",
    "--><script>" + RUN + "</script>",
    "]]><script>" + RUN + "</script>",
    "<meta http-equiv=refresh content='0;url=http://example.invalid'>",
    "<base href=http://example.invalid>",
    "<link rel=stylesheet href=http://example.invalid/x.css>",
    "{{ 7 * 7 }}{% raw %}{{ headline }}",
    "${" + RUN + "}`+" + RUN + "+`",
    "&lt;script&gt;&#60;script&#62;" + RUN,
    "[/bold][red]x",
    "\x1b[2J\x1b]0;t\x07",
    "a\u202eb\u2066c",
    "a\nb\tc\u2028d\u2029e",
    "$(touch owned)`touch owned`",
    "\x00\x7f\x9b31m",
    "\ud800",
    "A" * 10_000,
]


def with_text(plan: Plan, text: str) -> Plan:
    """The plan with the text in every place that can hold a user's words; the documents are not validated again."""
    (cluster,) = plan.cluster.pools
    device = cluster.device.model_copy(update={"name": text})
    links = tuple(link.model_copy(update={"name": text}) for link in cluster.links)
    memory = tuple(
        replace(stage, lines=tuple(replace(line, formula=text, source=text) for line in stage.lines))
        for stage in plan.memory
    )
    return replace(
        plan,
        model=plan.model.model_copy(update={"name": text}),
        cluster=plan.cluster.model_copy(update={"name": text, "device": device, "links": links}),
        engine=plan.engine.model_copy(update={"name": text}),
        time=tuple(replace(line, formula=text, source=text, bound=text) for line in plan.time),
        memory=memory,
        flops_convention=text,
        idle_reason=text,
        options=replace(plan.options, pins=(text,)),
    )


@pytest.fixture(params=HOSTILE, ids=range(len(HOSTILE)))
def hostile_text(request: pytest.FixtureRequest) -> str:
    """Each text of `HOSTILE`."""
    return str(request.param)


@pytest.fixture(scope="session")
def hostile_texts() -> list[str]:
    """All texts of `HOSTILE`."""
    return HOSTILE


@pytest.fixture(scope="session")
def hostile() -> Callable[[Plan, str], Plan]:
    """`with_text`."""
    return with_text
