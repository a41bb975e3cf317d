"""Checkpoints that are complete or absent, verified before use, and readable under any layout.

torch.distributed.checkpoint (DCP) stores the tensors and reshards them; everything else is JSON. A checkpoint is
written under a temporary name, hashed, synced and renamed, so a crash keeps the previous checkpoint. Hashes are
compared before loading, because DCP itself would load a shard with a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from planner.errors import EnvironmentProblem, InputError
from planner.layout import format_layout
from planner.specs.model import ModelSpec
from planner.trainer.data import WHOLE
from planner.trainer.disk import sync, write_json
from planner.trainer.loss_scale import LossScale
from planner.trainer.model import canonical_name
from planner.trainer.unpickle import SafeReader
from planner.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from planner.trainer.trainer import Trainer

MANIFEST, STATE = "manifest.json", "state.json"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, newest first."""
    return sorted((int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()), reverse=True)


class Saver:
    """Writes checkpoints and keeps the newest ones; every rank makes a Saver and calls it at the same steps.

    background: copy the tensors to host memory and write them while training continues. The ranks then use a separate
    process group, so that the Saver's collectives cannot mix with the training's collectives.
    """

    def __init__(self, folder: Path, *, keep: int = 2, background: bool = False) -> None:
        self._folder, self._keep, self._background = folder, keep, background
        # gloo sends objects, and uses no GPU stream for which the training waits
        self._group = dist.new_group(backend="gloo") if background else None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, trainer: Trainer) -> None:
        """Write the state after `trainer.step_number` steps, as soon as the previous checkpoint is finished.

        Raises:
            EnvironmentProblem: the disk is full or cannot be written; older checkpoints are untouched. With
                `background`, the next call raises the error.
        """
        self.wait()
        tensors, state = _tensors(trainer, trainer.own_parameters()), _state(trainer)
        if not self._background:
            self._write(tensors, state)
            return
        staged = _on_host(tensors)
        self._thread = threading.Thread(target=self._write_and_keep_error, args=(staged, state), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written; raises as `save` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_and_keep_error(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        try:
            self._write(tensors, state)
        except Exception as error:  # noqa: BLE001 # raised again in the thread that trains
            self._error = error

    def _write(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        final, draft = self._folder / _name(state["step"]), self._folder / f".{_name(state['step'])}.tmp"
        try:
            if dist.get_rank() == 0:
                for unfinished in self._folder.glob(".step-*.tmp"):  # drafts of runs that were killed during a save
                    shutil.rmtree(unfinished, ignore_errors=True)
                draft.mkdir(parents=True)
            dist.barrier(group=self._group)
            save_tensors(tensors, checkpoint_id=draft, process_group=self._group)
            digests = _hash_own_files(draft, self._group)
            if dist.get_rank() == 0:
                _commit(draft, final, digests, state, keep=self._keep)
            dist.barrier(group=self._group)
        except (OSError, CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(draft, ignore_errors=True)
            free = format_bytes(shutil.disk_usage(next(each for each in draft.parents if each.exists())).free)
            message = f"cannot save {final}: {_cause(error)} ({free} are free there)"
            raise EnvironmentProblem(message, hint="older checkpoints are intact") from error


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, which training no longer changes."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    staged: Any = DefaultStager(options).stage(tensors)
    return dict(staged)


def restore(trainer: Trainer, folder: Path, step: int | None = None) -> int | None:
    """Load the newest intact checkpoint, or the checkpoint of `step`; every rank calls this function.

    Standard error gets one line for each newer checkpoint that is damaged.

    Returns:
        The step, or None if there is no checkpoint at all.

    Raises:
        EnvironmentProblem: all checkpoints are damaged, or the checkpoint of `step` is damaged.
        InputError: the checkpoint is of another model or other data, or `step` has no checkpoint.
    """
    steps = saved_steps(folder)
    if step is not None and step not in steps:
        raise InputError(f"no checkpoint of step {step}", hint=f"there are: {steps or 'none'}")
    rejected: dict[int, str] = {}
    for candidate in steps if step is None else [step]:
        damage = _damage(folder, candidate)
        if not damage:
            _tell(rejected, candidate)
            _load(trainer, folder / _name(candidate))
            return candidate
        rejected[candidate] = damage
    if step is not None:
        raise EnvironmentProblem(
            f"the checkpoint of step {step} in {folder} is damaged: {rejected[step]}",
            hint="give another step, or --resume auto, which takes the newest one that is intact",
        )
    if rejected:
        reasons = "; ".join(f"step {each}: {damage}" for each, damage in rejected.items())
        raise EnvironmentProblem(f"no checkpoint in {folder} is intact: {reasons}", hint="restore one from a copy")
    return None


def _tell(rejected: dict[int, str], used: int) -> None:
    if dist.get_rank() == 0:
        for step, damage in rejected.items():
            sys.stderr.write(f"checkpoint of step {step} is rejected: {damage}; step {used} is used in its place\n")


def _cause(error: BaseException) -> str:
    """The cause in one line. DCP collects the errors of all ranks; the first one is shown."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, UnpicklingError):  # torch's message advises to run the file's code
        return "a shard asks for more than tensors need; it is no checkpoint of ours, and nothing of it was run"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _tensors(trainer: Trainer, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        key = canonical_name(name, trainer.plan.model)
        state = trainer.optimizer.state[parameter]
        tensors |= {f"model.{key}": parameter.detach()}
        tensors |= {f"optimizer.{key}.{moment}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
    return tensors


def _state(trainer: Trainer) -> dict[str, Any]:
    return {
        "step": trainer.step_number,
        "samples": trainer.step_number * trainer.plan.training.global_batch_size,
        "model": trainer.plan.model.model_dump(mode="json"),
        "layout": format_layout(trainer.plan.layout),
        "data": trainer.corpus.fingerprint,
        "loss_scale": trainer.scale.state,
        "torch": torch.__version__,
    }


def _load(trainer: Trainer, checkpoint: Path) -> None:
    state = json.loads((checkpoint / STATE).read_text())
    if ModelSpec.model_validate(state["model"]) != trainer.plan.model:
        raise InputError(f"{checkpoint} is of another model", hint="give another --output, or --resume never")
    saved, own = state["data"], trainer.corpus.fingerprint
    if not saved.startswith(WHOLE) and saved.partition(" ")[2] == own.partition(" ")[2]:
        if dist.get_rank() == 0:
            words = "knows only samples of its data, as earlier versions did: whether they are the same is not checked"
            sys.stderr.write(f"note: {checkpoint} {words}\n")
    elif saved != own:
        raise InputError(
            f"{checkpoint} was trained on other data: --data, --tokenizer or --validation differ",
            hint="give the same ones, or start another run with another --output",
        )
    try:
        load_tensors(_tensors(trainer, trainer.parameters()), storage_reader=SafeReader(checkpoint))
    except CheckpointException as error:
        raise EnvironmentProblem(f"cannot load {checkpoint}: {_cause(error)}") from error
    for values in trainer.optimizer.state.values():
        values["step"].fill_(state["step"])
    trainer.step_number = int(state["step"])
    trainer.scale.state = state["loss_scale"]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_own_files(draft: Path, group: dist.ProcessGroup | None) -> dict[str, str]:
    """SHA-256 of every file of the draft; each rank hashes the files that it wrote."""
    own = list(draft.glob(f"__{dist.get_rank()}_*")) + ([draft / ".metadata"] if dist.get_rank() == 0 else [])
    for path in own:
        sync(path)
    parts: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, {path.name: _hash(path) for path in own}, group=group)
    return {name: digest for part in parts for name, digest in part.items()}


def _commit(draft: Path, final: Path, digests: dict[str, str], state: dict[str, Any], *, keep: int) -> None:
    write_json(draft / STATE, state)
    write_json(draft / MANIFEST, digests | {STATE: _hash(draft / STATE)})
    sync(draft)
    shutil.rmtree(final, ignore_errors=True)  # a rejected checkpoint of an earlier attempt
    draft.rename(final)
    sync(final.parent)
    # later steps belong to a run that was given up for an earlier checkpoint; `auto` must not use them
    later = [step for step in saved_steps(final.parent) if step > state["step"]]
    for old in later + saved_steps(final.parent)[len(later) + keep :]:
        shutil.rmtree(final.parent / _name(old), ignore_errors=True)


def _damage(folder: Path, step: int) -> str:
    """Why the checkpoint of `step` cannot be used; empty if it can.

    The ranks share the work, and all get the same answer.
    """
    checkpoint, own = folder / _name(step), ""
    try:
        manifest = _read_manifest(checkpoint)
        mine = sorted(manifest)[dist.get_rank() :: dist.get_world_size()]
        own = next((f"{name} is not what was saved" for name in mine if _hash(checkpoint / name) != manifest[name]), "")
        if not own:
            _check_state(_read_object(checkpoint / STATE), step)
    except OSError as error:
        own = f"{Path(error.filename or checkpoint).name}: {error.strerror}"
    except ValueError as error:
        own = str(error)
    answers = [""] * dist.get_world_size()
    dist.all_gather_object(answers, own)
    return next(filter(None, answers), "")


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Each file with its hash. A manifest that lacks a file, or lists a missing file, raises ValueError."""
    manifest = _read_object(checkpoint / MANIFEST)
    files = {path.name for path in checkpoint.iterdir()}
    needed = {STATE, ".metadata", *(name for name in files if name.endswith(".distcp"))}
    if left_out := sorted(needed - manifest.keys()):
        raise ValueError(f"{MANIFEST} does not name {left_out[0]}")
    if missing := sorted(manifest.keys() - files):
        raise ValueError(f"{missing[0]} is missing")
    return manifest


def _check_state(state: dict[str, Any], step: int) -> None:
    """Raise ValueError unless the state has the form that `_state` writes for `step`.

    Samples, layout and torch version are not checked; they only inform.
    """
    if state.get("step") != step:
        raise ValueError(f"{STATE} is of step {state.get('step')}")
    if lacking := sorted({"model", "data", "loss_scale"} - state.keys()):
        raise ValueError(f"{STATE} has no `{lacking[0]}`")
    try:
        ModelSpec.model_validate(state["model"])
        LossScale("fp16").state = state["loss_scale"]
    except (TypeError, LookupError, ValueError, OverflowError):
        raise ValueError(f"{STATE} has a model or a scale of the loss that cannot be read") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} is no JSON object")  # noqa: TRY004 # the file, not a type
    return document
