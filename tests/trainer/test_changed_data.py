"""A run goes on only with the bytes that it began with; a changed file stops it, and nothing is overwritten."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner import data_files
from planner.data_files import RECORD, confirmed, write_record
from planner.errors import ExitCode, InputError
from planner.launch import launch
from planner.plan import write_plan
from planner.run_arguments import RunArguments

CONTENT = bytes(range(32, 127)) * 4_000


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "data.txt"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def begin(make_plan, data, tmp_path):
    """A function that starts a run on the data, in the same folder each time."""

    def start(steps: int, *further: str, layout: str = "dp=2,zero=1,mbs=2") -> subprocess.Popen:
        write_plan(make_plan(layout), tmp_path / "plan.json", replace=True)
        words = [sys.executable, "-m", "planner", "launch", str(tmp_path / "plan.json"), f"--output={tmp_path / 'out'}"]
        words += [f"--data={data}", f"--steps={steps}", *further]
        return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    return start


def overwritten(path: Path) -> None:
    """Other bytes everywhere but in 64 blocks that stand evenly in the file; size and time of change stay."""
    before, size = path.stat(), len(CONTENT)
    kept = [number * (size - 4096) // 63 for number in range(64)]
    content = bytearray(b"x" * size)
    for start in kept:
        content[start : start + 4096 // 8] = CONTENT[start : start + 4096 // 8]
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def extended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"one more")


def replaced(path: Path) -> None:
    other = path.with_name("other.txt")
    other.write_bytes(CONTENT[::-1])
    other.replace(path)


CHANGES = {
    overwritten: "other bytes",
    extended: "extended since the run began: from 380,000 to 380,008 bytes",
    replaced: "other bytes",
    lambda path: os.truncate(path, 1000): "cut since the run began: from 380,000 to 1,000 bytes",
}


def as_of_an_earlier_version(output: Path) -> None:
    """Let the newest checkpoint hold a hash of samples of the data, as versions without a record wrote it."""
    newest = max((output / "checkpoints").glob("step-*"))
    state, manifest = newest / "state.json", newest / "manifest.json"
    content = json.loads(state.read_text())
    content["data"] = f"{'0' * 64} {content['data'].partition(' ')[2]}"
    state.write_text(json.dumps(content))
    digest = hashlib.sha256(state.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"state.json": digest}))


def test_a_run_goes_on_with_its_own_data_only(begin, data, tmp_path):
    pytest.importorskip("torch")
    output, plan = tmp_path / "out", tmp_path / "plan.json"
    _, messages = (run := begin(4, layout="dp=1,mbs=2")).communicate(timeout=120)  # every rank compares its data
    assert run.returncode == ExitCode.OK, messages
    left = {path: path.read_bytes() for path in output.rglob("*.json*")}
    for change, words in CHANGES.items():
        change(data)
        with pytest.raises(InputError, match=words) as refused:
            launch(plan, output=output, arguments=RunArguments(data=(str(data),), steps=8))
        assert "--output" in str(refused.value)
        assert {path: path.read_bytes() for path in output.rglob("*.json*")} == left  # metrics, state and plan
        data.write_bytes(CONTENT)  # with another time, and after the change by `replaced` another inode
    as_of_an_earlier_version(output)
    _, messages = (run := begin(8, layout="dp=1,mbs=2")).communicate(timeout=120)
    assert run.returncode == ExitCode.OK, messages
    assert "knows only samples of its data" in messages
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 8


def test_data_that_are_cut_end_a_run_before_its_first_checkpoint(begin, data, tmp_path):
    """Without a checkpoint, a second attempt would train all steps on what is left."""
    pytest.importorskip("torch")
    metrics, run = tmp_path / "out" / "metrics.jsonl", begin(1_000_000, "--checkpoint-every=1000000")
    end = time.monotonic() + 90
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.truncate(data, 1000)
    _, messages = run.communicate(timeout=120)
    assert run.returncode == ExitCode.BAD_INPUT, messages
    # the read faults, or the size is looked at first: which of both depends on the moment
    assert "a file was cut while it was mapped (SIGBUS)" in messages or "bring the data back" in messages
    assert "data.txt was cut since the run began: from 380,000 to 1,000 bytes" in messages
    assert metrics.read_text().splitlines()


def test_a_large_file_is_compared_at_its_ends_and_in_blocks_between(tmp_path, monkeypatch):
    for name, value in {"WHOLE_BYTES": 10_000, "END_BYTES": 1_000, "NUM_BLOCKS": 8, "BLOCK_BYTES": 100}.items():
        monkeypatch.setattr(data_files, name, value)
    path = tmp_path / "large.npy"
    path.write_bytes(bytes(20_000))
    write_record(confirmed([str(path)], tmp_path), tmp_path)
    for place, is_read in ((0, True), (999, True), (1_050, True), (1_150, False), (3_300, True), (19_999, True)):
        content = bytearray(20_000)
        content[place] = 1
        path.write_bytes(content)
        if is_read:
            with pytest.raises(InputError, match=r"large\.npy holds other bytes"):
                confirmed([str(path)], tmp_path)
        else:
            assert confirmed([str(path)], tmp_path)[0].num_bytes == 20_000


def test_as_many_files_are_needed_as_at_the_start(data, tmp_path):
    write_record(confirmed([str(data), "hf:a-data-set"], tmp_path), tmp_path)
    with pytest.raises(InputError, match="began with 1 data files, and 2 are given"):
        confirmed([str(data), str(data)], tmp_path)
    (tmp_path / RECORD).write_text("{")  # as a crash of the host leaves it
    assert len(confirmed([str(data), str(data)], tmp_path)) == 2
