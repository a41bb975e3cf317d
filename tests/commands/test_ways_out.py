"""If `planner plan` exits with 3, it says what would help, and names no next command; each way out is planned here."""

from __future__ import annotations

import io
import json
from tempfile import TemporaryDirectory

import pytest

import planner
from planner.cli import main
from planner.commands import plan
from planner.commands.console import Console
from planner.errors import ExitCode

SLOW = pytest.mark.slow
JOBS = (
    {"model": "llama3.2-1b", "gpus": 2, "global_batch": 8, "seq_len": 2048, "engine": "fsdp"},
    {"model": "gpt2-xl", "gpus": 2, "global_batch": 8, "engine": "megatron", "pin": "tp=1", "forbid": "zero=0"},
    {"model": "llama3.2-1b", "gpus": 2, "global_batch": 8, "seq_len": 2048, "engine": "deepspeed", "headroom": 0.1},
)


def planned(asked: dict, *, nodes=None, clusters=(), as_json=False, output=None) -> tuple[int, str]:
    """The exit code and the standard output of `planner plan`."""
    console = Console(out=io.StringIO(), err=io.StringIO())
    options = {"console": console, "as_json": as_json, **asked}
    if clusters:
        return plan.compare(options.pop("model"), clusters, **options), console.out.getvalue()
    size = {"sizes": nodes} if nodes else {"output": output, "force": True}
    return plan.run(options.pop("model"), "dgx-a100", **size, **options), console.out.getvalue()


def with_change(change: str, asked: dict) -> dict:
    """The keywords and hosts of the same plan with one or two changes, read from their words."""
    changed, settings = dict(asked), list(asked.get("settings", ()))
    for each in change.replace(",", "").split(" and "):
        words = each.removeprefix("adapters alone (").removesuffix(")").split()
        if each == "no headroom":
            changed["headroom"] = 0
        elif each.startswith("--allow"):
            changed[each.removeprefix("--").replace("-", "_")] = True
        elif "hosts instead of" in each:
            changed["gpus"] = int(words[0]) * asked["gpus"]
        elif "sequences of" in each:
            changed["global_batch"], changed["seq_len"] = int(words[0]), int(words[3])
        else:
            settings += [f"training.{key}={value}" for key, value in zip(words[::2], words[1::2], strict=False)]
            if words[0] in ("optimizer", "lora_rank"):
                settings.append("training.memory_recipe=engine")
            if words[0] == "deadline":
                settings[-1] = f"training.deadline={words[1]} {words[2]}"
    return {**changed, "settings": settings}


def searched(asked: dict) -> planner.Plan:
    """The plan of a search of its own."""
    return planner.plan_job(**{"cluster": "dgx-a100", "within": 0, **asked})


def smallest_bytes(asked: dict) -> float:
    """The least memory that a layout needs, by a search for it."""
    return planner.plan_job(**asked, cluster="dgx-a100", objective="memory").memory[0].total_bytes


CASES = [(job, share) for job in JOBS for share in (0.6, 0.95, 1.02, 1.2)]
FAST = [(JOBS[0], 0.95), (JOBS[0], 1.2), (JOBS[2], 1.02)]


@pytest.mark.parametrize(
    ("job", "share"), [*FAST, *(pytest.param(*each, marks=SLOW) for each in CASES if each not in FAST)]
)
def test_memory_around_the_cliff(job: dict, share: float, tmp_path) -> None:
    asked = {**job, "settings": [f"device.memory={share * smallest_bytes(job) / 2**30:.4f}GiB"]}
    code, text = planned(asked, output=tmp_path / "plan.json")
    assert (code == ExitCode.NOTHING_FITS) == ("What would fit" in text) == ("\nNext\n" not in text)
    found = searched(asked)
    assert (code == ExitCode.OK) == found.fits
    again, document = planned(asked, as_json=True)
    document = json.loads(document)
    assert (again, document["fits"]) == (code, code == ExitCode.OK)
    assert ("remedies" in document) == (code == ExitCode.NOTHING_FITS)
    for each in document.get("remedies", ()):
        helped = searched(with_change(each["change"], asked))
        assert helped.fits, each["change"]
        assert helped.step_seconds == pytest.approx(each["step_seconds"])
        assert helped.chance_of_fitting == pytest.approx(each["chance_of_fitting"])
    for each in document.get("pins", ()):
        left = {"pin": (), "forbid": ()} | (
            {"forbid": job["forbid"]} if each["pin"] == job["pin"] else {"pin": job["pin"]}
        )
        helped = searched(asked | left)
        assert (each["remedy"] is not None) == helped.fits


@pytest.mark.parametrize(
    ("objective", "share"),
    [
        ("gpus", 0.7),
        ("cost", 1.3),
        *(pytest.param("gpus", share, marks=SLOW) for share in (0.2, 0.97, 1.3)),
        *(pytest.param("cost", share, marks=SLOW) for share in (0.2, 0.7, 0.97)),
    ],
)
def test_a_deadline_around_what_can_be_met(objective: str, share: float) -> None:
    job = {"model": "llama3.2-1b", "global_batch": 256, "seq_len": 2048, "forbid": "zero=0", "pin": "pp=1,mbs<=1"}
    job |= {"gpus": 8}
    fastest = planner.plan_job(**job, cluster="dgx-a100", settings="training.tokens=20B")
    budget = [f"training.deadline={share * fastest.run.high_seconds:.0f} s", "training.tokens=20B"]
    asked = {**job, "objective": objective, "settings": budget}
    code, text = planned(asked)
    assert code == (ExitCode.OK if searched(asked).run.meets_deadline else ExitCode.NOTHING_FITS)
    assert (code == ExitCode.NOTHING_FITS) == ("What would meet the deadline" in text) == ("\nNext\n" not in text)
    ways = json.loads(planned(asked, as_json=True)[1]).get("remedies", [])
    assert ([each["change"].split()[0] for each in ways if "dead" in each["change"]] == ["deadline"]) == bool(ways)
    for each in ways:
        helped = searched(with_change(each["change"], asked))
        assert helped.fits
        assert helped.run.meets_deadline, each["change"]
        assert helped.step_seconds == pytest.approx(each["step_seconds"])
        if "hosts instead of" in each["change"]:
            fewer = with_change(each["change"], asked)
            assert not searched(fewer | {"gpus": fewer["gpus"] - 8}).run.meets_deadline


def test_a_missed_deadline_of_another_objective_is_told_and_ends_with_0() -> None:
    job = {"model": "tiny-gpt", "global_batch": 8, "settings": ["training.tokens=1e12", "training.deadline=1 s"]}
    for objective in ("throughput", "memory"):
        code, text = planned({**job, "objective": objective})
        assert (code, "MISSES the deadline" in text, "What would" in text) == (ExitCode.OK, True, False)
        assert planner.shortfall(planner.plan_job(**job, cluster="dgx-a100", objective=objective), objective) is None


def test_sizes_and_clusters_on_which_nothing_fits() -> None:
    job = {"model": "llama2-7b", "seq_len": 2048, "global_batch": 64, "engine": "torchtitan"}
    largest = {**job, "settings": ["device.memory=9GiB"]}
    code, text = planned(largest, nodes=range(1, 2))
    assert (code, "What would fit on dgx-a100" in text) == (ExitCode.NOTHING_FITS, True)
    ways = json.loads(planned(largest, nodes=range(1, 2), as_json=True)[1])["remedies"]
    alone = planner.shortfall(planner.plan_job(**largest, cluster="dgx-a100", nodes=1))
    assert [each["change"] for each in ways] == [each.change for each in alone.remedies()]
    assert ways
    code, text = planned({**job, "gpus": 4}, clusters=["g6", "rtx4090-box"])
    assert (code, "What would fit on rtx4090-box" in text) == (ExitCode.NOTHING_FITS, True)
    assert planned({**job, "gpus": 4}, clusters=["rtx4090-box", "p5"])[1].count("What would") == 0
    code, text = planned({**job, "gpus": 1}, clusters=["g6", "g5"])
    assert (code, "What would fit on g" in text) == (ExitCode.NOTHING_FITS, True)


def test_between_fits_and_does_not_fit_the_command_names_what_fits(capsys) -> None:
    tight = "plan llama2-7b rtx4090-box --gpus 4 --seq-len 2048 --global-batch 64 --engine torchtitan"
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.chdir(folder)
        assert main([*tight.split(), "-o", "tight.json"]) == ExitCode.NOTHING_FITS
        found = planner.read_plan("tight.json")
    said = capsys.readouterr().out
    assert found.verdict == "may not fit", "the chance is at least 5 %, so that a plan is shown and written"
    assert "--allow-offload" in said[said.index("What would fit") :]
    assert "planner emit" not in said
    assert "\nNext" not in said
    offload = next(each for each in planner.shortfall(found).remedies() if each.change == "--allow-offload")
    assert offload.step_seconds < found.step_seconds
    assert offload.chance_of_fitting > 0.95
