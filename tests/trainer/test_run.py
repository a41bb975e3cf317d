"""Runs with checkpoints: resuming changes nothing, damage is noticed, and bad numbers stop every rank."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from planner.errors import EnvironmentProblem, ExitCode
from planner.trainer.loggers import make_loggers

STEPS, EVERY = 8, 4


def losses(output: Path) -> dict[int, tuple[float, float]]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


def status(output: Path) -> dict:
    return json.loads((output / "status.json").read_text())


def checkpoint(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step-{step:08d}"


def flip_one_bit(folder: Path) -> None:
    shard = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


@pytest.fixture(scope="module")
def finished(run_job, make_plan, tmp_path_factory) -> Path:
    """An uninterrupted run of 8 steps with checkpoints after 4 and 8."""
    output = tmp_path_factory.mktemp("run") / "whole"
    options = {"steps": STEPS, "checkpoint_every": EVERY, "output": str(output)}
    assert run_job("train", make_plan("dp=2,zero=1,mbs=2", "tied-llama"), **options) == ExitCode.OK
    return output


@pytest.fixture
def interrupted(finished, tmp_path) -> Path:
    """A copy of the finished run as it was after step 4."""
    output = tmp_path / "copy"
    shutil.copytree(finished, output)
    shutil.rmtree(checkpoint(output, STEPS))
    return output


def test_a_run_leaves_metrics_measurements_and_a_verdict(finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    keys = ["step", "loss", "grad_norm", "learning_rate", "tokens", "step_seconds", "peak_memory_bytes"]
    keys += ["tokens_per_second_per_device", "mfu"]
    assert all(list(line) == keys for line in lines)
    assert lines[-1]["tokens"] == STEPS * 8 * 32
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert status(finished) == {"state": "done", "step": STEPS, "reason": ""}
    measured = json.loads((finished / "measurements.json").read_text())
    assert measured["step_seconds"] > 0
    assert measured["time"]["optimizer"]["seconds"] > 0
    assert measured["memory"]["runtime"]["num_bytes"] is None
    assert "resident memory" in measured["memory"]["runtime"]["reason"]
    assert 50e6 < measured["peak_memory_bytes"][0] < 4e9


def test_resuming_under_the_same_layout_repeats_every_bit(finished, interrupted, run_job, make_plan):
    plan = make_plan("dp=2,zero=1,mbs=2", "tied-llama")
    assert run_job("train", plan, steps=STEPS, output=str(interrupted)) == ExitCode.OK
    assert losses(interrupted) == losses(finished)


@pytest.mark.parametrize(
    "layout",
    ["dp=1,mbs=4", "pp=2,mbs=2", pytest.param("tp=2,pp=2,dp=2,zero=1,mbs=2", marks=pytest.mark.slow)],
)
def test_resuming_under_another_layout_goes_on_alike(layout, finished, interrupted, run_job, make_plan):
    assert run_job("train", make_plan(layout, "tied-llama"), steps=STEPS, output=str(interrupted)) == ExitCode.OK
    found, wanted = losses(interrupted), losses(finished)
    assert found.keys() == wanted.keys()
    for step, (loss, norm) in wanted.items():
        assert found[step] == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-4))


def test_a_pipeline_checkpoint_opens_without_a_pipeline(run_job, make_plan, tmp_path):
    run_job("train", make_plan("pp=2,mbs=2", "tied-llama"), steps=EVERY, output=str(tmp_path))
    run_job("train", make_plan("dp=2,zero=3,mbs=2", "tied-llama"), steps=EVERY + 1, output=str(tmp_path))
    assert list(losses(tmp_path)) == list(range(1, EVERY + 2))


def cut_a_shard(folder: Path) -> None:
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


def rewrite(folder: Path, name: str, change) -> None:
    """Change a document and give it the correct hash, as only a bug or a deliberate change would."""
    document = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(change(document)))
    if name != "manifest.json":
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        rewrite(folder, "manifest.json", lambda manifest: manifest | {name: digest})


def leave_out(folder: Path, name: str) -> None:
    rewrite(folder, "manifest.json", lambda manifest: {key: manifest[key] for key in manifest if key != name})


def change_state(**changes):
    return lambda folder: rewrite(folder, "state.json", lambda state: state | changes)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip_one_bit, r"__\d_0.distcp is not what was saved"),
        pytest.param(cut_a_shard, "__0_0.distcp is not what was saved", marks=pytest.mark.slow),
        pytest.param(
            lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp is missing", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda folder: (folder / "manifest.json").unlink(),
            "manifest.json: No such file or directory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda folder: (folder / "manifest.json").write_text("[1, 2]"),
            "manifest.json is no JSON object",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
            "manifest.json is no JSON object",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda folder: (folder / "manifest.json").write_text("{}"),
            "manifest.json does not name .metadata",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda folder: leave_out(folder, "__1_0.distcp"),
            "manifest.json does not name __1_0.distcp",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda folder: rewrite(folder, "manifest.json", lambda m: m | {"/dev/zero": ""}),
            "/dev/zero is missing",
            marks=pytest.mark.slow,
        ),
        (lambda folder: rewrite(folder, "state.json", lambda _: {"step": STEPS}), "state.json has no `data`"),
        pytest.param(
            lambda folder: rewrite(folder, "state.json", lambda _: []),
            "state.json is no JSON object",
            marks=pytest.mark.slow,
        ),
        pytest.param(change_state(step=-5), "state.json is of step -5", marks=pytest.mark.slow),
        pytest.param(change_state(model=None), "state.json has a model .* that cannot be read", marks=pytest.mark.slow),
        pytest.param(
            change_state(loss_scale=3),
            "state.json has a .* scale of the loss that cannot be read",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_damaged_checkpoint_is_told_and_the_older_one_used(damage, why, finished, run_job, make_plan, tmp_path):
    output = tmp_path / "copy"
    shutil.copytree(finished, output)
    damage(checkpoint(output, STEPS))
    plan, messages = make_plan("dp=2,zero=1,mbs=2", "tied-llama"), tmp_path / "stderr"
    assert run_job("train", plan, steps=STEPS, output=str(output), stderr=str(messages)) == ExitCode.OK
    assert losses(output) == losses(finished)
    told = [line for line in messages.read_text().splitlines() if "checkpoint" in line]
    assert re.fullmatch(f"checkpoint of step 8 is rejected: {why}.*; step 4 is used in its place", told[0])
    assert told[1:] == ["going on from the checkpoint of step 4, of 8 steps"]


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(finished, run_job, make_plan, tmp_path):
    output = tmp_path / "copy"
    shutil.copytree(finished, output)
    flip_one_bit(checkpoint(output, STEPS))
    plan = make_plan("dp=2,zero=1,mbs=2", "tied-llama")
    with pytest.raises(
        RuntimeError, match=r"EnvironmentProblem: the checkpoint of step 8 in .* is damaged: __\d_0.dist"
    ):
        run_job("train", plan, steps=STEPS + 1, output=str(output), resume=str(STEPS))
    assert checkpoint(output, STEPS).exists()
    flip_one_bit(checkpoint(output, EVERY))
    with pytest.raises(RuntimeError, match=r"EnvironmentProblem: no checkpoint in .* is intact: step 8: .*; step 4: "):
        run_job("train", plan, steps=STEPS, output=str(output))


@pytest.mark.parametrize("pattern", [".metadata", "__0_0.distcp"])
def test_a_checkpoint_cannot_run_code(pattern, interrupted, run_job, make_plan, tmp_path):
    """The attacker also corrects the manifest, so only the allow-lists prevent the attack."""

    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "attacked",))

    folder = checkpoint(interrupted, EVERY)
    harmful = pickle.dumps(Attack())
    whole = (folder / pattern).read_bytes()
    (folder / pattern).write_bytes(harmful if pattern == ".metadata" else harmful + whole[len(harmful) :])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[pattern] = hashlib.sha256((folder / pattern).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RuntimeError, match="EnvironmentProblem: cannot load") as refusal:
        run_job("train", make_plan("dp=1,mbs=4", "tied-llama"), steps=STEPS, output=str(interrupted))
    assert "weights_only" not in str(refusal.value)
    assert not (tmp_path / "attacked").exists()


def test_a_save_that_fails_leaves_the_checkpoint_before(interrupted, run_job, make_plan):
    """A limit on the size of files replaces the full disk."""
    plan = make_plan("dp=2,zero=1,mbs=2", "tied-llama")
    with pytest.raises(RuntimeError, match=r"EnvironmentProblem: cannot save .* are free there"):
        run_job("train", plan, steps=STEPS, output=str(interrupted), file_limit=20_000)
    finished = [path.name for path in (interrupted / "checkpoints").glob("step-*")]  # a draft may be left behind
    assert finished == [checkpoint(interrupted, EVERY).name]
    assert run_job("train", plan, steps=STEPS, output=str(interrupted)) == ExitCode.OK


@pytest.mark.parametrize(
    ("rank", "moment"),
    [
        pytest.param(1, "before its shard", marks=pytest.mark.slow),
        pytest.param(0, "before the hashes", marks=pytest.mark.slow),
        pytest.param(0, "before the state", marks=pytest.mark.slow),
        pytest.param(0, "before the manifest", marks=pytest.mark.slow),
        (0, "before the new name"),
    ],
)
def test_a_kill_in_the_middle_of_a_save_loses_nothing(rank, moment, finished, interrupted, run_job, make_plan):
    """A draft is not a checkpoint before it is renamed; the run continues from the previous checkpoint, bit by bit."""
    plan = make_plan("dp=2,zero=1,mbs=2", "tied-llama")
    with pytest.raises(RuntimeError, match=f"rank {1 - rank}: .*(gloo|Connection)"):
        run_job("train", plan, steps=STEPS, output=str(interrupted), dying_rank=rank, die=moment)
    left = sorted(path.name for path in (interrupted / "checkpoints").iterdir())
    assert left == [f".{checkpoint(interrupted, STEPS).name}.tmp", checkpoint(interrupted, EVERY).name]
    assert run_job("train", plan, steps=STEPS, output=str(interrupted)) == ExitCode.OK
    assert losses(interrupted) == losses(finished)
    assert not list((interrupted / "checkpoints").glob(".*"))


def test_a_line_of_metrics_that_was_cut_short_is_no_obstacle(finished, interrupted, run_job, make_plan):
    metrics = interrupted / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 9, "los')
    assert run_job("train", make_plan("dp=2,zero=1,mbs=2", "tied-llama"), steps=STEPS, output=str(interrupted)) == 0
    assert losses(interrupted) == losses(finished)


def test_a_finished_run_is_left_as_it_is(finished, run_job, make_plan, tmp_path):
    output, messages = tmp_path / "copy", tmp_path / "stderr"
    shutil.copytree(finished, output)
    (output / "measurements.json").write_text('{"num_steps": 8}')
    plan = make_plan("dp=2,zero=1,mbs=2", "tied-llama")
    assert run_job("train", plan, steps=STEPS, output=str(output), stderr=str(messages)) == ExitCode.OK
    assert (output / "measurements.json").read_text() == '{"num_steps": 8}'
    assert (output / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    assert f"is at step {STEPS} of {STEPS}, so no step is trained; --steps" in messages.read_text()


def test_going_back_to_a_checkpoint_gives_up_the_later_ones(finished, run_job, make_plan, tmp_path):
    output = tmp_path / "copy"
    shutil.copytree(finished, output)
    (output / "checkpoints" / ".step-00000007.tmp").mkdir()  # as a kill during a save leaves it
    options = {"steps": EVERY + 1, "output": str(output), "resume": str(EVERY)}
    run_job("train", make_plan("dp=1,mbs=4", "tied-llama"), **options)
    found = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert found == [checkpoint(output, step).name for step in (EVERY, EVERY + 1)]


def test_a_checkpoint_of_another_model_is_refused(interrupted, run_job, make_plan):
    with pytest.raises(RuntimeError, match=r"InputError: .* is of another model"):
        run_job("train", make_plan("dp=1,mbs=4", "gpt"), steps=STEPS, output=str(interrupted))


def test_other_data_are_refused(interrupted, run_job, make_plan, tmp_path):
    """A run continues with samples that it has not seen; with other data it would silently skip the first samples."""
    (tmp_path / "data.txt").write_bytes(bytes(range(256)) * 100)
    plan, options = make_plan("dp=1,mbs=4", "tied-llama"), {"steps": STEPS, "output": str(interrupted)}
    with pytest.raises(RuntimeError, match=r"InputError: .* was trained on other data"):
        run_job("train", plan, data=[str(tmp_path / "data.txt")], **options)
    with pytest.raises(RuntimeError, match=r"InputError: .* was trained on other data"):
        run_job("train", plan, validation=0.1, **options)


def test_one_bad_number_stops_all_ranks_before_they_update(run_job, make_plan, tmp_path):
    plan = make_plan("pp=2,dp=2,zero=1,mbs=2")
    code = run_job("train", plan, steps=STEPS, output=str(tmp_path), poison_rank=3)
    assert code == ExitCode.DIVERGED
    assert status(tmp_path)["state"] == "diverged"
    assert status(tmp_path)["step"] == 0
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("options", "kept"), [({}, (4, 5)), ({"keep_checkpoints": 3, "async_save": True}, (3, 4, 5))])
def test_only_the_newest_checkpoints_stay(options, kept, run_job, make_plan, tmp_path):
    run_job("train", make_plan("dp=1,mbs=8"), steps=5, output=str(tmp_path), checkpoint_every=1, **options)
    found = sorted((tmp_path / "checkpoints").iterdir())
    assert found == [checkpoint(tmp_path, step) for step in kept]


def test_a_checkpoint_written_during_training_is_of_its_step(finished, run_job, make_plan, tmp_path):
    """The weights change during the write: without a real copy, the checkpoint would be of a later step."""
    plan = make_plan("dp=2,zero=1,mbs=2", "tied-llama")
    options = {"steps": STEPS, "output": str(tmp_path), "async_save": True, "keep_checkpoints": STEPS}
    assert run_job("train", plan, checkpoint_every=1, **options) == ExitCode.OK
    for step in range(EVERY + 1, STEPS + 1):
        shutil.rmtree(checkpoint(tmp_path, step))
    assert run_job("train", plan, **options) == ExitCode.OK
    assert losses(tmp_path) == losses(finished)


def test_a_save_in_the_background_that_fails_is_told(interrupted, run_job, make_plan):
    plan, options = make_plan("dp=2,zero=1,mbs=2", "tied-llama"), {"async_save": True, "file_limit": 20_000}
    with pytest.raises(RuntimeError, match=r"EnvironmentProblem: cannot save .* are free there"):
        run_job("train", plan, steps=STEPS, output=str(interrupted), checkpoint_every=1, **options)
    assert [path.name for path in (interrupted / "checkpoints").glob("step-*")] == [checkpoint(interrupted, EVERY).name]


@pytest.mark.parametrize(
    "layout",
    ["pp=2,mbs=2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp=2,pp=2,mbs=2", "dp=2,zero=2,mbs=2"))],
)
def test_held_out_samples_have_a_loss(layout, run_job, make_plan, tmp_path):
    """All windows of these data are equal, and the weights do not change, so training and validation must agree."""
    tokens = np.random.default_rng(1).integers(0, 256, 32).astype(np.uint16)
    np.save(tmp_path / "data.npy", np.append(np.tile(tokens, 100), tokens[0]))
    plan = make_plan(layout, learning_rate=1e-30)
    options = {"data": [str(tmp_path / "data.npy")], "validation": 0.25, "validate_every": 2}
    assert run_job("train", plan, steps=3, output=str(tmp_path / "run"), **options) == ExitCode.OK
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["validation_loss" in line for line in lines] == [False, True, True]
    assert lines[1]["validation_loss"] == pytest.approx(lines[0]["loss"], abs=1e-5)


@pytest.mark.slow
def test_validation_changes_nothing_of_the_training(run_job, make_plan, tmp_path):
    """The same samples are held out; only their losses are computed more often."""
    plan, runs = make_plan("dp=2,zero=1,mbs=2", "tied-llama"), []
    for every in (1, 100):
        options = {"output": str(tmp_path / str(every)), "validate_every": every, "validation": 0.1}
        assert run_job("train", plan, steps=4, **options) == ExitCode.OK
        runs.append(losses(tmp_path / str(every)))
    assert runs[0] == runs[1]


def test_a_step_is_recorded_on_request(run_job, make_plan, tmp_path):
    assert run_job("train", make_plan("dp=2,mbs=2"), steps=3, output=str(tmp_path), profile=2) == ExitCode.OK
    for rank in range(2):
        trace = json.loads((tmp_path / "profile" / f"rank-{rank}.json").read_text())
        assert any("gloo:all" in str(event.get("name")) for event in trace["traceEvents"])
    ranks = json.loads((tmp_path / "measurements.json").read_text())["ranks"]
    assert len(ranks["cpu_seconds"]) == 2
    assert 1 <= ranks["largest_over_median"] < 2


def test_metrics_go_where_they_are_asked_to(run_job, make_plan, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run_job("train", make_plan("dp=1,mbs=8"), steps=3, output=str(tmp_path), tensorboard=True) == ExitCode.OK
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    written = {event.step: event.value for event in found.Scalars("loss")}
    assert written == {step: pytest.approx(loss, rel=1e-6) for step, (loss, _) in losses(tmp_path).items()}


RECORDS = [{"step": 1, "loss": 5.5, "mfu": None}, {"step": 2, "loss": 5.25, "mfu": 0.5}]


def log_to_wandb(output: Path, plan) -> None:
    for logger in (loggers := make_loggers(output, plan, tensorboard=False, wandb="a-project")):
        for record in RECORDS:
            logger.log(record)
    for logger in loggers:
        logger.close()


def test_weights_and_biases_gets_every_number(make_plan, monkeypatch, tmp_path):
    run, module = Mock(), Mock()
    module.init.return_value = run
    monkeypatch.setitem(sys.modules, "wandb", module)
    (tmp_path / "run-7").mkdir()
    log_to_wandb(tmp_path / "run-7", make_plan("dp=2,mbs=2"))
    given = module.init.call_args.kwargs
    assert (given["project"], given["id"], given["resume"]) == ("a-project", "run-7", "allow")
    assert given["config"]["learning_rate"] == 3e-3
    assert "dp=2" in given["config"]["layout"]
    assert [(each.args[0], each.kwargs) for each in run.log.call_args_list] == [
        ({"step": 1, "loss": 5.5}, {"step": 1}),
        ({"step": 2, "loss": 5.25, "mfu": 0.5}, {"step": 2}),
    ]
    run.finish.assert_called_once_with()


def test_without_its_library_a_logger_says_what_to_install(make_plan, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentProblem, match=r"wandb is not installed\n.*parallel-planner\[logging\]"):
        log_to_wandb(tmp_path, make_plan("dp=1"))


def test_weights_and_biases_writes_a_run_offline(make_plan, monkeypatch, tmp_path):
    """The library itself accepts the data, without a network."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "run").mkdir()
    log_to_wandb(tmp_path / "run", make_plan("dp=1"))
    (written,) = tmp_path.glob("run/wandb/offline-run-*/run-run.wandb")
    parts, end = (b"a-project", b"learning_rate", b"loss", b"5.25"), time.monotonic() + 30
    while not all(part in written.read_bytes() for part in parts):  # a process of its own writes it
        assert time.monotonic() < end
        time.sleep(0.05)
