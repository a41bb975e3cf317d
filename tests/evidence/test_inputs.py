"""A user's own runs as files: files that are read, files that are left out with a message, files refused by line."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import statistics
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.api import calibrate_runs, estimate_layout, read_plan
from planner.cli import cli
from planner.errors import EnvironmentProblem, InputError
from planner.evidence.inputs import read_inputs
from planner.plan import write_plan

RECORDED = Path(__file__).parent / "recorded"
PUBLISHED = Path(__file__).parents[1] / "published" / "measurements.csv"
JOB = {"gpus": 2, "global_batch": 32, "seq_len": 128}


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder as `planner launch` leaves it: the plan, and the record of twelve steps on two processes of a CPU."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_plan(estimate_layout("tiny-gpt", "local-cpu", layout="dp=2,zero=1", **JOB), folder / "plan.json")
    shutil.copy(RECORDED / "tiny-gpt-dp2.metrics.jsonl", folder / "metrics.jsonl")
    return folder


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder: Path, found: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))


def table(path: Path, *rows: dict[str, str], columns: list[str] | None = None) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


ROW = {"model": "llama3-8b", "gpu": "H100", "gpus": "8", "seq": "8192", "gbs": "64", "framework": "torchtitan",
       "precision": "bf16", "tp": "1", "dp": "8", "mbs": "1", "zero_stage": "3", "step_s": "11.0"}  # fmt: skip


# --- the loop -----------------------------------------------------------------------------------------------------


def test_a_recorded_run_is_learnt_from_and_plans_better(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    measured = statistics.median(each["step_seconds"] for each in records(run)[2:])
    said = CliRunner().invoke(cli, ["calibrate", str(run), "-o", "mine.json"], catch_exceptions=False)
    assert said.exit_code == 0
    words = ["plan", "tiny-gpt", "local-cpu", "--gpus", "2", "--global-batch", "32", "--seq-len", "128",
             "--pin", "tp=1,pp=1,zero=1", "-o", "plan.json"]  # fmt: skip
    assert CliRunner().invoke(cli, [*words, "--calibration", "mine.json"], catch_exceptions=False).exit_code == 0
    before, after = read_plan(run / "plan.json").step_seconds, read_plan("plan.json").step_seconds
    assert abs(measured / after - 1) < abs(measured / before - 1)
    assert read_plan("plan.json").low_step_seconds is not None  # of a CPU nobody published runs: it has a band now


def test_a_plan_that_was_corrected_already_is_learnt_from_as_if_it_were_not(run) -> None:
    calibration, learnt, _ = calibrate_runs([run])
    (run.parent / "mine.json").write_text(calibration.model_dump_json())
    own = estimate_layout("tiny-gpt", "local-cpu", layout="dp=2,zero=1", calibration=run.parent / "mine.json", **JOB)
    write_plan(own, run / "plan.json", replace=True)
    assert calibrate_runs([run])[1] == learnt


def test_a_calibration_for_other_devices_is_noted_and_its_band_names_the_users_own_runs(tmp_path) -> None:
    calibration, _, _ = calibrate_runs([table(tmp_path / "runs.csv", ROW, ROW | {"step_s": "11.5"})])
    (tmp_path / "mine.json").write_text(calibration.model_dump_json())
    words = ["--nodes", "1", "--seq-len", "8192", "--global-batch", "64", "--engine", "torchtitan",
             "--layout", "zero=3,recompute=full", "--calibration", str(tmp_path / "mine.json")]  # fmt: skip
    same, other = (
        CliRunner().invoke(cli, ["explain", "llama3-8b", cluster, *words]) for cluster in ("dgx-h100", "dgx-a100")
    )
    assert "has no corrections for a100-80gb with engine torchtitan" in other.stderr
    assert "it has: h100-80gb with engine torchtitan" in other.stderr
    assert "no corrections" not in same.stderr
    assert "rests on 2 runs of --calibration" in " ".join(same.stdout.split())


def test_kinds_of_work_that_the_users_runs_did_not_have_widen_the_band(tmp_path) -> None:
    calibration, _, _ = calibrate_runs([table(tmp_path / "runs.csv", ROW, ROW | {"step_s": "11.5"})])
    (tmp_path / "mine.json").write_text(calibration.model_dump_json())
    job = {"nodes": 1, "seq_len": 8192, "global_batch": 64, "engine": "torchtitan"}

    def band(model: str, layout: str, **others: str):
        found = estimate_layout(model, "dgx-h100", layout=layout, calibration=tmp_path / "mine.json", **job, **others)
        return found.band

    same, fp8 = (band("llama3-8b", "zero=3,recompute=full", precision=each) for each in ("bf16", "fp8"))
    experts = band("qwen3-30b-a3b", "zero=3,ep=2,recompute=full")
    assert (same.unseen, fp8.unseen, experts.unseen) == ((), ("fp8",), ("experts", "ep"))
    assert experts.low < fp8.low < same.low < 1 < same.high < fp8.high < experts.high


@pytest.mark.parametrize("name", ["nosuch.json", "."])
def test_a_calibration_that_is_not_there_is_refused(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"^{re.escape(name)} (does not exist|is a directory)"):
        estimate_layout("tiny-gpt", "local-cpu", layout="dp=2,zero=1", calibration=name, **JOB)


# --- what is read and left out ------------------------------------------------------------------------------------


def test_warm_up_restarts_and_gaps_are_read_for_what_they_are(run) -> None:
    steady = [{"step": n, "step_seconds": 1.0, "loss": 2.0} for n in range(1, 31)]
    slow_starts = [each | {"step_seconds": 60.0} for each in steady[:2]]
    again = [each | {"step_seconds": 90.0} for each in steady[18:20]]
    write(run, [*slow_starts, *steady[2:10], *steady[14:25], *again, *steady[20:]])
    notes: list[str] = []
    (found,) = read_inputs([run], tell=notes.append)
    assert found.measured_seconds == 1.0
    assert any("started again 1 times (line 22)" in note for note in notes)
    assert any("4 steps between" in note for note in notes)


def test_steps_without_a_finite_loss_do_not_count(run) -> None:
    good = [{"step": n, "step_seconds": 1.0, "loss": 2.0} for n in range(1, 9)]
    bad = [{"step": n, "step_seconds": 9.0, "loss": float("nan")} for n in range(9, 30)]
    write(run, [*good, *bad])
    notes: list[str] = []
    (found,) = read_inputs([run], tell=notes.append)
    assert found.measured_seconds == 1.0
    assert "metrics.jsonl:9: 21 steps without a finite loss" in notes[0]


def test_a_cpu_may_be_faster_than_the_one_that_was_measured(run) -> None:
    write(run, [each | {"step_seconds": 0.01} for each in records(run)])
    notes: list[str] = []
    assert read_inputs([run], tell=notes.append)[0].measured_seconds == 0.01
    assert any("as short as the forecast" in note for note in notes)


def test_rows_that_cannot_be_priced_are_named_by_line(tmp_path) -> None:
    path = table(tmp_path / "runs.csv", ROW, ROW | {"gpu": "abacus"}, ROW | {"step_s": ""})
    notes: list[str] = []
    (found,) = read_inputs([path], tell=notes.append)
    assert found.measured_seconds == 11.0
    assert [note.partition(":")[2][:2] for note in notes if "left out" in note] == ["3:", "4:"]
    assert "abacus" in notes[0]


def test_what_a_row_leaves_open_is_said_and_a_row_of_an_unknown_program_is_left_out(tmp_path) -> None:
    path = table(tmp_path / "runs.csv", ROW, ROW | {"framework": "torchtitn"}, ROW | {"dp": "99"})
    notes: list[str] = []
    assert len(read_inputs([path], tell=notes.append)) == 2
    assert any("runs.csv:3: left out, because framework `torchtitn`" in note and "torchtitan" in note for note in notes)
    assert any("dp=8 is assumed in line 4: by the number of GPUs, not 99" in note for note in notes)
    assert not any("rows are equal" in note for note in notes)


def test_equal_rows_are_said(tmp_path) -> None:
    notes: list[str] = []
    rows = (ROW | {"id": str(number)} for number in range(3))
    assert (
        len(read_inputs([table(tmp_path / "runs.csv", *rows, ROW | {"id": "3", "mbs": "2"})], tell=notes.append)) == 4
    )
    assert any("runs.csv:2: 3 rows are equal to this one" in note for note in notes)


def test_columns_are_known_in_any_case_and_behind_any_separator(tmp_path) -> None:
    (found,) = read_inputs([table(tmp_path / "runs.csv", ROW)])
    names = {"model": " Model", "zero_stage": "Zero stage", "step_s": "STEP_S"}
    (other,) = read_inputs([table(tmp_path / "other.csv", {names.get(key, key): cell for key, cell in ROW.items()})])
    text = (tmp_path / "runs.csv").read_text().replace(",", ";")
    (tmp_path / "third.csv").write_text(text)
    (third,) = read_inputs([tmp_path / "third.csv"])
    assert found.layout == other.layout == third.layout
    assert found.measured_seconds == other.measured_seconds == third.measured_seconds


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "where", "words"),
    [
        ({"step_s": "11,0 s"}, "runs.csv:3", "column step_s: `11,0 s`"),
        ({"tp": "two"}, "runs.csv:3", "column tp: `two` is not a whole number"),
        ({"gpus": "8.5"}, "runs.csv:3", "column gpus"),
        ({"step_s": "nan"}, "runs.csv:3", "`nan` is not a number"),
        ({"step_s": "0"}, "runs.csv:3", "0 is not a time"),
        ({"step_s": "11,5"}, "runs.csv:3", "`11,5` is not a number"),
        ({"step_s": "0.011"}, "runs.csv:3", "times the peak FLOPs"),
        ({"zero_stage": "7"}, "runs.csv:3", "no stage 7"),
        ({"recompute_policy": "ful"}, "runs.csv:3", "`ful` is no policy"),
    ],
)
def test_a_cell_that_is_no_number_is_refused_by_line(cells, where: str, words: str, tmp_path) -> None:
    with pytest.raises(InputError) as error:
        read_inputs([table(tmp_path / "runs.csv", ROW, ROW | cells, columns=list(ROW | cells))])
    (mistake,) = error.value.mistakes
    assert mistake.where.endswith(where)
    assert words in mistake.message
    assert mistake.hint


@pytest.mark.parametrize(
    ("line", "column", "words"),
    [
        ('{"step": 4, "step_seconds": nope}', 29, "no record"),
        ('{"step": 4}', 1, "no record"),
        ('{"step": 4, "step_seconds": NaN, "loss": 1}', 1, "step 4 took nan seconds"),
        ('{"step": 4, "step_seconds": -1, "loss": 1}', 1, "step 4 took -1.0 seconds"),
    ],
)
def test_a_line_that_is_no_step_is_refused_by_line(line: str, column: int, words: str, run) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(InputError) as error:
        read_inputs([run])
    assert error.value.mistakes[0].where == f"{run}/metrics.jsonl:13:{column}"
    assert words in error.value.mistakes[0].message


def test_mistakes_of_all_inputs_are_told_at_once(run, tmp_path) -> None:
    write(run, records(run)[:4])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as error:
        read_inputs([run, tmp_path / "empty", tmp_path / "none.log", table(tmp_path / "no.csv", {"model": "a"})])
    said = [each.message for each in error.value.mistakes]
    assert [each[:24] for each in said] == [
        "2 of 4 logged steps coun", "no run: plan.json is mis", "no such file or folder", "lacks the columns gpu, g"
    ]  # fmt: skip
    assert all(each.hint for each in error.value.mistakes)


def test_every_start_has_its_own_warm_up(run) -> None:
    starts = [[{"step": n, "step_seconds": 60.0 if n < 3 else 1.0} for n in range(1, 5)] for _ in range(4)]
    write(run, [each for start in starts for each in start])
    assert read_inputs([run])[0].measured_seconds == 1.0


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1e999, "step_seconds": 1}',
        '{"step": 1, "step_seconds": 1' + "0" * 400 + "}",
        '{"step": 1' + "0" * 400 + ', "step_seconds": 1}',
        '{"step": 1' + "0" * 5000 + ', "step_seconds": 1}',
        '{"step": 4, "step_seconds": 1, "loss": [1]}',
        '{"step": 4, "step_seconds": 1, "loss": 1' + "0" * 400 + "}",
        "[" * 100_000,
        "[1, 2]",
        "null",
        "",
        "\0",
    ],
)
def test_a_record_that_is_no_step_is_never_a_traceback(line: str, run) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(InputError, match=r"no record of a step|is binary") as error:
        read_inputs([run])
    assert error.value.mistakes[0].hint


# --- which files are read -----------------------------------------------------------------------------------------


def test_a_folder_of_run_folders_is_all_of_them(run, tmp_path) -> None:
    for name in ("c", "a"):
        shutil.copytree(run, tmp_path / "runs" / name)
    (tmp_path / "runs" / "b").mkdir()
    shutil.copy(run / "plan.json", tmp_path / "runs" / "b")
    (tmp_path / "runs" / "notes.txt").write_text("of mine")
    notes: list[str] = []
    found = read_inputs([tmp_path / "runs"], tell=notes.append)
    assert [each.where for each in found] == [str(tmp_path / "runs" / name) for name in ("a", "c")]
    assert notes == [f"{tmp_path}/runs/b: no metrics.jsonl and no log, so the folder is left out"]
    (tmp_path / "nothing" / "below").mkdir(parents=True)
    with pytest.raises(InputError, match=r"no run: plan\.json is missing") as error:
        read_inputs([tmp_path / "nothing"])
    assert error.value.mistakes[0].where == str(tmp_path / "nothing")


def test_a_name_that_no_file_can_have_is_told() -> None:
    with pytest.raises(EnvironmentProblem, match=r"cannot read a.*: File name too long"):
        read_inputs([Path("a" * 5000)])


def test_the_example_of_the_help_works(run, tmp_path, monkeypatch) -> None:
    shutil.copytree(run, tmp_path / "runs" / "plan")
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(cli, ["calibrate", "runs/", "-o", "mine.json"], catch_exceptions=False)
    assert said.exit_code == 0


def test_a_file_with_two_names_counts_once(run, tmp_path) -> None:
    (tmp_path / "link").symlink_to(run)
    once = read_inputs([run])
    for again in (run, run / ".." / "run", tmp_path / "link", run / "metrics.jsonl"):
        notes: list[str] = []
        assert read_inputs([run, again], tell=notes.append) == once
        assert notes == [f"{again}: read before, as {run}, and counted once"]
    path = table(tmp_path / "runs.csv", ROW)
    assert len(read_inputs([path, tmp_path / "run" / ".." / "runs.csv"])) == 1


def test_the_log_that_is_read_of_several_is_named(run) -> None:
    megatron = " iteration {n:8}/ 100 | elapsed time per iteration (ms): 9000.0 | lm loss: 2.0 |\n"
    plan = estimate_layout("llama3-8b", "dgx-h100", layout="tp=4,dp=2", engine="megatron", gpus=8, global_batch=64)
    write_plan(plan, run / "plan.json", replace=True)
    (run / "metrics.jsonl").unlink()
    for name in ("a.log", "b.log", "c.log"):
        (run / name).write_text("".join(megatron.format(n=n) for n in range(9)) if name == "c.log" else "other")
    notes: list[str] = []
    (found,) = read_inputs([run], tell=notes.append)
    assert found.where == str(run / "c.log")
    assert f"{run}: c.log is read, the last of its logs by name, and not a.log, b.log" in notes
    assert read_inputs([run, run / "c.log"]) == [found]


def test_a_log_through_a_pipe_is_read(run) -> None:
    lines = "".join(f" iteration {n}/ 100 | elapsed time per iteration (ms): 9000.0 |\n" for n in range(2000))
    plan = estimate_layout("llama3-8b", "dgx-h100", layout="tp=4,dp=2", engine="megatron", gpus=8, global_batch=64)
    write_plan(plan, run / "plan.json", replace=True)
    read, write_ = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(write_, lines.encode()), os.close(write_)))
    writer.start()
    (found,) = read_inputs([Path(f"/dev/fd/{read}")], plan=run / "plan.json")
    writer.join()
    os.close(read)
    assert found.measured_seconds == 9.0


def test_the_reasons_come_before_nothing_is_left(tmp_path) -> None:
    path = table(tmp_path / "runs.csv", ROW | {"gpu": "abacus"}, ROW | {"step_s": ""})
    notes: list[str] = []
    with pytest.raises(InputError) as error:
        read_inputs([path], tell=notes.append)
    said = [each.message for each in error.value.mistakes]
    assert len(notes) == 2
    assert said == [*notes, "no run is left to learn from"]
    assert "abacus" in said[0]
