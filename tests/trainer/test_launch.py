"""`planner launch`: commands, folders and outcomes, including real runs under torchrun."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from planner.emit.programs.torch import Host, torchrun_command, torchrun_commands
from planner.errors import EnvironmentProblem, ExitCode, InputError, NothingFitsError
from planner.launch import launch, supervise
from planner.launch.attempts import SECONDS_TO_MEET, Attempt
from planner.layout_text import parse_layout
from planner.plan import write_plan
from planner.reading import read_plan
from planner.run_arguments import RunArguments

PROGRAM = (
    "import sys\n"
    "from pathlib import Path\n"
    "from planner.run_arguments import RunArguments\n"
    "from planner.launch import launch\n"
    "plan, output, steps = sys.argv[1:]\n"
    "sys.exit(launch(Path(plan), output=Path(output), arguments=RunArguments(steps=int(steps))))\n"
)
FIRST = Attempt(number=0, start="first", port=29500, resume="auto")


@pytest.fixture
def plan_path(make_plan, tmp_path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(make_plan("dp=2,zero=1,mbs=2"), path)
    return path


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path):
    """End runs that a failed test leaves behind, because they would slow down the next tests."""
    yield
    for process, words in words_of_processes():
        if any(str(tmp_path) in word for word in words):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def words_of_processes() -> list[tuple[int, list[str]]]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append((int(entry.name), (entry / "cmdline").read_bytes().decode().split("\0")))
    return found


def parent_of(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def start(plan_path: Path, output: Path, steps: int) -> subprocess.Popen:
    arguments = [sys.executable, "-c", PROGRAM, str(plan_path), str(output), str(steps)]
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def steps_done(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def ranks_of(output: Path) -> list[int]:
    """Processes that train into `output`: children of torchrun's agent, which has the same command line."""
    found = {process for process, words in words_of_processes() if f"--output={output}" in words}
    return sorted(process for process in found if parent_of(process) in found)


def test_the_command_runs_one_process_for_each_device(make_plan):
    command = torchrun_command(
        make_plan("tp=2,dp=2,mbs=2"),
        Path("p.json"),
        output=Path("out dir"),
        arguments=RunArguments(data=("a", "b"), steps=7),
    )
    assert command == (
        "torchrun", "--standalone", "--nproc-per-node=4", "--max-restarts=0", "-m", "planner.trainer", "p.json",
        "--output=out dir", "--data=a", "--data=b", "--steps=7",
    )  # fmt: skip


def test_torchrun_reads_the_command_as_it_is_meant(make_plan):
    run = pytest.importorskip("torch.distributed.run")
    command = torchrun_command(
        make_plan("dp=2,mbs=2"), Path("p.json"), output=Path("out"), arguments=RunArguments(steps=7, resume="3")
    )
    arguments = run.get_args_parser().parse_args(command[1:])
    assert arguments.nproc_per_node == "2"
    assert arguments.max_restarts == 0
    assert arguments.training_script == "planner.trainer"
    assert arguments.training_script_args == ["p.json", "--output=out", "--steps=7", "--resume=3"]


def on_two_hosts(plan):
    return replace(plan, cluster=plan.cluster.model_copy(update={"devices_per_host": 2, "hosts": 2}))


def filled(text: str, number: int, address: str = "127.0.0.1", port: str = "29400") -> str:
    """The command that somebody types on a host: the one below the comment that has its number, filled in."""
    found = re.findall(r"^# hosts? (\d+)(?: to (\d+))?:\n((?:[^#].*\n)+)", text, re.MULTILINE)
    (command,) = (each for first, last, each in found if int(first) <= number <= int(last or first))
    command = command.replace("\\\n", " ").replace("NUMBER", str(number))
    return command.replace("=HOST", f"={address}").replace("=PORT", f"={port}")


def test_several_hosts_share_a_command(make_plan, tmp_path, capsys):
    plan = on_two_hosts(make_plan("tp=2,dp=2,mbs=2"))
    text = torchrun_commands(plan, Path("p.json"), output=Path("out"), arguments=RunArguments())
    assert text.count("torchrun") == 1
    for number in (0, 1):
        assert shlex.split(filled(text, number))[:7] == [
            "torchrun", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}", "--master-addr=127.0.0.1",
            "--master-port=29400", "--max-restarts=0",
        ]  # fmt: skip
    write_plan(plan, tmp_path / "plan.json")
    with pytest.raises(InputError, match="--node-rank and --master-addr are missing"):
        launch(tmp_path / "plan.json", output=tmp_path / "out")
    assert launch(tmp_path / "plan.json", output=tmp_path / "out", dry_run=True) == ExitCode.OK
    assert "# hosts 0 to 1:\n" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("layout", "ranks"), [("dp=3,mbs=2", [2, 1]), ("pp=5,mbs=1", [2, 2, 1]), ("dp=4", [2, 2])])
def test_hosts_are_filled_one_after_the_other(layout, ranks, make_plan):
    shape = parse_layout(layout, num_layers=8, num_devices=1)
    assert ranks_typed(replace(on_two_hosts(make_plan("dp=1,mbs=1")), layout=shape)) == ranks


def test_a_screen_has_the_commands_of_any_number_of_hosts(make_plan):
    plan = on_two_hosts(make_plan("dp=1,mbs=1"))
    large = replace(plan, layout=replace(plan.layout, dp=100_001))
    text = torchrun_commands(large, Path("p.json"), output=Path("out"), arguments=RunArguments())
    assert len(text.splitlines()) <= 10
    assert [f"--nproc-per-node={ranks}" in filled(text, n) for n, ranks in ((0, 2), (49_999, 2), (50_000, 1))] == [
        True
    ] * 3


def ranks_typed(plan):
    text = torchrun_commands(plan, Path("p.json"), output=Path("out"), arguments=RunArguments())
    hosts = range(int(text.split("--nnodes=")[1].split()[0]))
    return [int(filled(text, number).split("--nproc-per-node=")[1].split()[0]) for number in hosts]


def test_torchrun_numbers_the_ranks_by_host(make_plan):
    """With any rendezvous but the static one, torchrun ignores --node-rank."""
    run = pytest.importorskip("torch.distributed.run")
    text = torchrun_commands(
        on_two_hosts(make_plan("dp=4")), Path("p.json"), output=Path("out"), arguments=RunArguments()
    )
    arguments = run.get_args_parser().parse_args(shlex.split(filled(text, 1, "10.0.0.1"))[1:])
    config, _, _ = run.config_from_args(arguments)
    assert config.rdzv_backend == "static"
    assert config.rdzv_configs["rank"] == 1
    assert config.rdzv_endpoint == "10.0.0.1:29400"


def test_a_plan_without_a_file_has_no_command(monkeypatch, plan_path, tmp_path):
    with plan_path.open() as plan:
        monkeypatch.setattr(sys, "stdin", plan)
        with pytest.raises(InputError, match="needs the plan's file"):
            launch(Path("-"), output=tmp_path / "out", dry_run=True)


def test_the_step_to_resume_from_holds_until_a_checkpoint_follows(plan_path, tmp_path, monkeypatch):
    """Two starts whose ranks die at once, then one whose ranks die after a checkpoint, then the end."""
    pytest.importorskip("torch")
    asked = []

    def run_once(command, *_):
        asked.append(next((each for each in command if each.startswith("--resume=")), "auto"))
        if len(asked) == 3:
            (tmp_path / "out" / "checkpoints" / "step-00000007").rename(
                tmp_path / "out" / "checkpoints" / "step-00000006"
            )
        state = "running" if len(asked) < 4 else "done"
        (tmp_path / "out" / "status.json").write_text(json.dumps({"state": state, "step": 5}))
        return ExitCode.RANK_FAILED

    (tmp_path / "out" / "checkpoints" / "step-00000007").mkdir(parents=True)
    write_plan(read_plan(plan_path), tmp_path / "out" / "plan.json")
    monkeypatch.setattr("planner.launch.supervise._run_once", run_once)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert launch(plan_path, output=tmp_path / "out", arguments=RunArguments(resume="5")) == ExitCode.OK
    assert asked == ["--resume=5", "--resume=5", "--resume=5", "auto"]


@pytest.mark.parametrize(("code", "attempts"), [(ExitCode.RANK_FAILED, 3), (1, 1)])
def test_ranks_that_die_before_the_first_step_are_started_again(
    plan_path, tmp_path, monkeypatch, capsys, code, attempts
):
    """They are not started again if torchrun itself has failed because its hosts have not met."""
    pytest.importorskip("torch")
    asked = []
    monkeypatch.setattr("planner.launch.supervise._run_once", lambda *words: asked.append(words) or code)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert launch(plan_path, output=tmp_path / "out") == ExitCode.RANK_FAILED
    assert len(asked) == attempts
    assert "a rank ended without a word at step 0" in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 1])
def test_torchrun_waits_for_other_hosts_as_long_as_it_is_said(number, make_plan, tmp_path, monkeypatch):
    run = pytest.importorskip("torch.distributed.run")
    asked = []
    monkeypatch.setattr("planner.launch.supervise._run_once", lambda *words: asked.append(words[0]) or 1)
    monkeypatch.setattr("planner.launch.attempts.Follower.join", lambda *_: None if asked else FIRST)
    write_plan(on_two_hosts(make_plan("dp=4,mbs=2")), tmp_path / "plan.json")
    host = {"node_rank": number, "master_addr": "127.0.0.1", "master_port": free_port()}
    launch(tmp_path / "plan.json", output=tmp_path / "out", **host)
    config, _, _ = run.config_from_args(run.get_args_parser().parse_args(asked[0][1:]))
    assert int(config.rdzv_configs["timeout"]) == SECONDS_TO_MEET
    assert config.rdzv_configs["rank"] == number


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_hosts_that_never_meet_are_told_in_a_line(number, make_plan, tmp_path):
    """The other host does not exist; torchrun gives up after a second."""
    pytest.importorskip("torch")
    plan = on_two_hosts(make_plan("dp=4,mbs=2"))
    write_plan(plan, tmp_path / "plan.json")
    host = Host(number=number, address="127.0.0.1", port=free_port())
    command = torchrun_command(
        plan, tmp_path / "plan.json", output=tmp_path / "out", arguments=RunArguments(steps=1), host=host
    )
    program = [sys.executable, "-m", "planner.trainer.agent", "--rdzv-conf=timeout=1", *command[1:]]
    run = subprocess.run(program, stderr=subprocess.PIPE, text=True, check=False)
    assert run.returncode == ExitCode.ENVIRONMENT
    assert "error: the hosts have not met: " in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_rank_that_dies_while_it_starts_is_started_again(plan_path, tmp_path):
    pytest.importorskip("torch")
    output = tmp_path / "out"
    run = start(plan_path, output, 3)
    wait_for(lambda: len(ranks_of(output)) == 2)
    os.kill(ranks_of(output)[1], signal.SIGKILL)  # while it builds its model, or in its first step
    _, messages = run.communicate(timeout=150)
    assert run.returncode == ExitCode.OK, messages
    assert "starting again" in messages
    assert steps_done(output) == 3


def test_only_the_first_of_a_run_says_that_a_peer_is_gone(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from planner.trainer.verdict import forget_failures, is_first_loss, record_failure  # needs torch

    monkeypatch.setenv("MASTER_PORT", "1")
    assert [is_first_loss(tmp_path) for _ in range(3)] == [True, False, False]
    forget_failures(tmp_path)
    assert record_failure(tmp_path, "broken", ExitCode.RANK_FAILED, 0)
    assert not is_first_loss(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "2")
    assert is_first_loss(tmp_path)


def test_a_plan_that_it_cannot_run_is_refused(make_plan, tmp_path):
    plan = make_plan("dp=2,mbs=2")
    other = plan.engine.model_copy(update={"name": "megatron", "emits": ()})
    write_plan(replace(plan, engine=other), tmp_path / "megatron.json")
    with pytest.raises(InputError, match="made for megatron"):
        launch(tmp_path / "megatron.json", output=tmp_path / "out")
    write_plan(replace(plan, options=replace(plan.options, headroom=0.99999)), tmp_path / "large.json")
    with pytest.raises(NothingFitsError, match="does not fit"):
        launch(tmp_path / "large.json", output=tmp_path / "out")


def test_without_torch_it_says_what_to_install(plan_path, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentProblem, match=r"parallel-planner\[train\]"):
        launch(plan_path, output=tmp_path / "out")


def test_without_torchao_a_plan_in_fp8_says_what_to_install(make_plan, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real(name) if name != "torchao" else None)
    plan = make_plan("dp=2,mbs=2", precision="fp8")
    device = plan.cluster.device.model_copy(update={"peak": plan.cluster.device.peak | {"fp8": 4e11}})
    write_plan(replace(plan, cluster=plan.cluster.model_copy(update={"device": device})), tmp_path / "plan.json")
    with pytest.raises(EnvironmentProblem, match=r"fp8 needs torchao.*\n.*parallel-planner\[fp8\]"):
        launch(tmp_path / "plan.json", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pieces_between_ranks_need_ranks_with_gpus(plan_path, tmp_path):
    with pytest.raises(InputError, match="--async-tp is for tensor parallelism on GPUs"):
        launch(plan_path, output=tmp_path / "out", arguments=RunArguments(async_tp=True))


def test_a_folder_of_something_else_is_left_alone(plan_path, make_plan, tmp_path):
    pytest.importorskip("torch")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        launch(plan_path, output=foreign)
    other = tmp_path / "other"
    other.mkdir()
    write_plan(make_plan("dp=1,mbs=2", "gpt"), other / "plan.json")
    with pytest.raises(InputError, match="run of another plan"):
        launch(plan_path, output=other)
    same = tmp_path / "same"
    same.mkdir()
    write_plan(make_plan("dp=1,mbs=2", steps=9), same / "plan.json")
    with pytest.raises(InputError, match="holds a run already"):
        launch(plan_path, output=same, arguments=RunArguments(resume="never"))
    before = json.loads((same / "plan.json").read_text()) | {"format": 1}
    (same / "plan.json").write_text(json.dumps({key: before[key] for key in ("format", "model", "training")}))
    with pytest.raises(InputError, match="holds a run already"):  # that an earlier planner began
        launch(plan_path, output=same, arguments=RunArguments(resume="never"))
    (same / "plan.json").write_text("[]")
    with pytest.raises(InputError, match="is not a plan"):
        launch(plan_path, output=same)


def test_an_edited_plan_starts_no_run(plan_path, tmp_path):
    plan_path.write_text(plan_path.read_text().replace('"learning_rate": 0.003', '"learning_rate": 3.0'))
    with pytest.raises(InputError, match="was edited"):
        launch(plan_path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused(plan_path, tmp_path):
    pytest.importorskip("torch")
    output = tmp_path / "out"
    output.mkdir()
    with (output / ".lock").open("w") as lock:
        for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):  # a shared lock would let two launchers in
            fcntl.flock(lock, kind)
            with pytest.raises(EnvironmentProblem, match="under way"):
                launch(plan_path, output=output)


@pytest.fixture
def stopped(plan_path, tmp_path, monkeypatch) -> Path:
    """A run that was asked to stop; its temporary files have a separate folder."""
    pytest.importorskip("torch")
    output = tmp_path / "out"
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    first = start(plan_path, output, 100_000)
    wait_for(lambda: steps_done(output) > 2)
    first.send_signal(signal.SIGTERM)
    _, messages = first.communicate(timeout=60)
    assert first.returncode == ExitCode.PREEMPTED
    assert "Traceback" not in messages
    assert f"step {steps_done(output)} is saved in {output}/checkpoints; the same command" in " ".join(messages.split())
    assert "going on from" not in messages
    return output


def test_a_run_stops_on_request(stopped):
    status = json.loads((stopped / "status.json").read_text())
    assert status["state"] == "saved"
    assert status["step"] == steps_done(stopped)
    left = {path.name.partition("_")[0] for path in (stopped.parent / "temporary").iterdir()}
    assert left <= {"torchinductor"}  # a cache of torch, which has the same name each time


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_later(stopped, plan_path):
    saved = steps_done(stopped)
    steps = saved + 3
    second = start(plan_path, stopped, steps)
    _, messages = second.communicate(timeout=60)
    assert second.returncode == ExitCode.OK, messages
    assert messages.count(f"going on from the checkpoint of step {saved}, of {steps} steps") == 1
    assert steps_done(stopped) == steps
    assert "loss" in messages


def test_a_mistake_in_the_data_is_told_without_a_traceback(plan_path, tmp_path):
    pytest.importorskip("torch")
    words = ["launch", str(plan_path), f"--output={tmp_path / 'out'}", f"--data={tmp_path / 'none.txt'}"]
    result = subprocess.run(
        [sys.executable, "-m", "planner", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == ExitCode.ENVIRONMENT
    assert result.stderr.count("cannot read") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_rank_is_started_again(plan_path, tmp_path, how):
    """A rank in which a library aborts shows what it was doing."""
    pytest.importorskip("torch")
    output = tmp_path / "out"
    run = start(plan_path, output, 400)
    wait_for(lambda: steps_done(output) > 2)
    os.kill(ranks_of(output)[1], how)
    _, messages = run.communicate(timeout=150)
    assert ("Fatal Python error: Aborted" in messages and "trainer.py" in messages) == (how == signal.SIGABRT)
    assert run.returncode == ExitCode.OK, messages
    assert "starting again" in messages
    assert steps_done(output) == 400


def test_only_a_rank_without_a_heartbeat_is_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervise, "SECONDS_OF_SILENCE", 0.3)
    monkeypatch.setattr(supervise, "SECONDS_BETWEEN_LOOKS", 0.0)
    hearts, ranks = supervise._Hearts(tmp_path), [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    (tmp_path / "heartbeats").mkdir()
    beats = [tmp_path / "heartbeats" / f"rank-{number}" for number in range(3)]
    for beat, process in zip(beats, (ranks[0].pid, ranks[1].pid, 1), strict=True):
        beat.write_text(f"{os.uname().nodename if process > 1 else 'elsewhere'} {process}")
    try:
        while ranks[1].poll() is None:
            beats[0].touch()
            hearts.end_the_silent()
            time.sleep(0.02)
        assert ranks[1].returncode == -signal.SIGKILL
        assert ranks[0].poll() is None
        assert "rank-1 has not moved for" in capsys.readouterr().err
    finally:
        for each in ranks:
            each.kill()
            each.wait()


@pytest.mark.slow
def test_a_rank_that_stands_still_is_ended_and_started_again(plan_path, tmp_path):
    """The other rank waits for it in a collective, and would wait for five minutes."""
    pytest.importorskip("torch")
    output = tmp_path / "out"
    run = start(plan_path, output, 3000)
    wait_for(lambda: steps_done(output) > 2)
    victim = ranks_of(output)[1]
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: not Path(f"/proc/{victim}").exists(), 30)
    run.send_signal(signal.SIGTERM)
    _, messages = run.communicate(timeout=120)
    assert "rank-1 has not moved for 20 s: ending process" in messages


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_random_kills_change_no_bit(make_plan, tmp_path):
    """Random ranks die at random steps, some during a save; every loss equals the loss without kills."""
    pytest.importorskip("torch")
    write_plan(make_plan("dp=2,zero=1,mbs=2"), tmp_path / "plan.json")
    chance, steps = random.Random(20), 20 * 12
    program = PROGRAM.replace("steps=int(steps)", "steps=int(steps), checkpoint_every=3")
    arguments = [sys.executable, "-c", program, str(tmp_path / "plan.json")]
    calm = subprocess.run([*arguments, str(tmp_path / "calm"), str(steps)], capture_output=True, check=False)
    assert calm.returncode == ExitCode.OK
    output = tmp_path / "killed"
    run = subprocess.Popen([*arguments, str(output), str(steps)], stderr=subprocess.DEVNULL)
    for kill in range(20):
        goal = kill * 11 + chance.randint(4, 11)  # behind a new checkpoint: three kills without one end the run
        wait_for(lambda goal=goal: steps_done(output) >= goal and len(ranks_of(output)) == 2, 240)
        victim = chance.choice(ranks_of(output))
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda victim=victim: victim not in ranks_of(output), 60)
    assert run.wait(timeout=240) == ExitCode.OK
    found, wanted = (
        [(line["step"], line["loss"], line["grad_norm"]) for line in map(json.loads, text.splitlines())]
        for text in ((folder / "metrics.jsonl").read_text() for folder in (output, tmp_path / "calm"))
    )
    assert found == wanted


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphans(plan_path, tmp_path):
    pytest.importorskip("torch")
    output = tmp_path / "out"
    run = start(plan_path, output, 100_000)
    wait_for(lambda: steps_done(output) > 2)
    assert len(ranks_of(output)) == 2
    run.kill()
    run.communicate(timeout=30)
    wait_for(lambda: not ranks_of(output), 10)


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(make_plan, tmp_path):
    pytest.importorskip("torch")
    write_plan(make_plan("dp=2,mbs=2"), tmp_path / "plan.json")
    run = start(tmp_path / "plan.json", tmp_path / "out", 100_000)
    wait_for((tmp_path / "out" / "plan.json").exists)
    time.sleep(0.5)  # the ranks are importing torch and look for no request yet
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    _, messages = run.communicate(timeout=20)
    assert run.returncode == ExitCode.INTERRUPTED
    assert "nothing is saved; the same command begins at step 1" in messages
    wait_for(lambda: not ranks_of(tmp_path / "out"), 10)


@pytest.mark.slow
def test_ranks_that_are_still_starting_end_with_their_launcher(plan_path, tmp_path):
    pytest.importorskip("torch")
    output = tmp_path / "out"
    run = start(plan_path, output, 100_000)
    wait_for(lambda: ranks_of(output))  # there, but too early to have asked to die with their parent
    run.send_signal(signal.SIGINT)
    time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=30)
    assert run.returncode == ExitCode.INTERRUPTED
    wait_for(lambda: not ranks_of(output), 30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_the_command_of_several_hosts_trains_on_them(make_plan, tmp_path):
    """Both hosts are this machine; the printed command is run unchanged, with number and address filled in."""
    pytest.importorskip("torch")
    plan = on_two_hosts(make_plan("pp=2,dp=2,zero=1,mbs=2"))
    write_plan(plan, tmp_path / "plan.json")
    text = torchrun_commands(plan, tmp_path / "plan.json", output=tmp_path / "out", arguments=RunArguments(steps=3))
    port, path = str(free_port()), f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    typed = [filled(text, number, port=port) for number in (0, 1)]
    hosts = [subprocess.Popen(["bash", "-c", line], env={**os.environ, "PATH": path}) for line in typed]
    assert [host.wait(timeout=120) for host in hosts] == [0, 0]
    assert steps_done(tmp_path / "out") == 3


@pytest.mark.slow
def test_hosts_with_different_plans_do_not_start(make_plan, tmp_path):
    """The second host's file has another learning rate; otherwise it would train, and nobody would notice."""
    pytest.importorskip("torch")
    paths = (tmp_path / "a.json", tmp_path / "b.json")
    for path, rate in zip(paths, (1e-3, 2e-3), strict=True):
        write_plan(on_two_hosts(make_plan("dp=4,mbs=2", learning_rate=rate)), path)
    port, hosts = str(free_port()), []
    for number, path in enumerate(paths):
        words = ["planner.cli", "launch", path, "--output", tmp_path / "out", "--node-rank", number, "--steps", 1]
        words += ["--master-addr", "127.0.0.1", "--master-port", port]
        program = [sys.executable, "-c", "from planner.cli import run; run()", *map(str, words[1:])]
        hosts.append(subprocess.Popen(program, stderr=subprocess.PIPE, text=True))
    messages = [host.communicate(timeout=180)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [ExitCode.BAD_INPUT] * 2
    assert sum("ranks 2, 3 have another plan than rank 0" in text for text in messages) == 1


@pytest.fixture
def start_host(make_plan, tmp_path):
    """A function that starts the launcher of one of two hosts, both of which are this machine."""
    write_plan(on_two_hosts(make_plan("dp=4,mbs=2")), tmp_path / "plan.json")
    program = [sys.executable, "-c", "from planner.cli import run; run()", "launch", str(tmp_path / "plan.json")]
    program += ["--output", str(tmp_path / "out"), "--steps", "100", "--checkpoint-every", "20"]
    program += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]

    def start_one(number: int) -> subprocess.Popen:
        with (tmp_path / f"stderr-{number}").open("a") as messages:
            return subprocess.Popen([*program, str(number)], stdout=subprocess.DEVNULL, stderr=messages)

    return start_one


@pytest.mark.slow
@pytest.mark.parametrize("killed", [[-1], [0, -1]])
def test_several_launchers_train_together_after_a_kill(killed, start_host, tmp_path):
    """Each host has its own launcher; when a rank on one or both hosts dies, all ranks start again."""
    pytest.importorskip("torch")
    output = tmp_path / "out"
    hosts = [start_host(number) for number in range(2)]
    wait_for(lambda: steps_done(output) > 30)
    ranks = ranks_of(output)
    for which in killed:
        os.kill(ranks[which], signal.SIGKILL)
    assert [host.wait(timeout=200) for host in hosts] == [ExitCode.OK] * 2
    assert steps_done(output) == 100
    assert "host 1 enters attempt 1" in (tmp_path / "stderr-1").read_text()
    assert not ranks_of(output)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_launcher_that_is_started_again_alone_meets_the_others(number, start_host, tmp_path):
    """As Kubernetes does for one pod. The other launcher continues; no step is lost or done twice."""
    pytest.importorskip("torch")
    output = tmp_path / "out"
    hosts = [start_host(number) for number in range(2)]
    wait_for(lambda: steps_done(output) > 30)
    hosts[number].kill()
    hosts[number].wait()
    lost = {f"--node-rank={number}", f"--output={output}"}
    wait_for(lambda: not any(lost <= set(words) for _, words in words_of_processes()), 30)
    hosts[number] = start_host(number)
    assert [host.wait(timeout=200) for host in hosts] == [ExitCode.OK] * 2
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == list(range(1, 101))
    assert not ranks_of(output)


@pytest.mark.slow
def test_sigterm_to_torchrun_itself_saves_too(make_plan, tmp_path):
    """A batch system does this if nobody uses `planner launch`."""
    pytest.importorskip("torch")
    write_plan(make_plan("dp=2,mbs=2"), tmp_path / "plan.json")
    output = tmp_path / "out"
    command = torchrun_command(
        make_plan("dp=2,mbs=2"), tmp_path / "plan.json", output=output, arguments=RunArguments(steps=100_000)
    )
    run = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *command[1:]], stderr=subprocess.DEVNULL)
    wait_for(lambda: steps_done(output) > 2)
    run.send_signal(signal.SIGTERM)
    run.wait(timeout=60)
    status = json.loads((output / "status.json").read_text())
    assert status["state"] == "saved"
    assert (output / "checkpoints" / f"step-{status['step']:08d}" / "manifest.json").exists()
