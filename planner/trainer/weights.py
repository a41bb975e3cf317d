"""Start from a Hugging Face checkpoint, or write one as safetensors, on all ranks at once."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from planner.errors import EnvironmentProblem, InputError
from planner.trainer.hugging_face import is_no_parameter, pieces_of, whole_config
from planner.trainer.model import Transformer, canonical_name
from planner.trainer.parallelize import set_share
from planner.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from planner.specs.model import ModelSpec
    from planner.trainer.hugging_face import Piece
    from planner.trainer.trainer import Trainer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_FILE_BYTES = parse_quantity("4 GiB", "bytes")
NAMES_SHOWN = 5


# --- reading ------------------------------------------------------------------------------------------------------


def load_weights(trainer: Trainer, folder: Path) -> None:
    """Give every parameter its share of a Hugging Face checkpoint; every rank calls this function.

    Each rank maps the files and reads only the tensors of its own stage.

    Raises:
        EnvironmentProblem: the folder cannot be read, or safetensors is not installed.
        InputError: tensors or shapes differ from the model's, or the checkpoint's blocks compute something else.
    """
    with _told(folder), _Checkpoint(folder) as checkpoint, torch.no_grad():
        _check_config(folder, trainer.plan.model)
        checkpoint.check(trainer)
        for name, parameter in trainer.parameters().items():
            pieces = pieces_of(canonical_name(name, trainer.plan.model), trainer.plan.model)
            whole = checkpoint.parameter(pieces, parameter.shape, name)
            set_share(parameter, whole.to(parameter.device, parameter.dtype))


def _check_config(folder: Path, spec: ModelSpec) -> None:
    """Refuse a checkpoint that has the model's tensors, but whose blocks compute something else."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != ("llama3" if spec.rope_scaling else "default"):
        ours = "the model of the plan" if kind in ("llama3", "default") else "this trainer"
        raise InputError(
            f"{path} has rotary positions of type {kind}, which {ours} has not",
            hint=f"plan with {folder} as MODEL",
        )
    if config.get("model_type") == "qwen3_moe" and not config.get("norm_topk_prob", False):
        raise InputError(f"{path} does not normalise the weights of the chosen experts, which this trainer does")


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise EnvironmentProblem(
            f"{folder} needs safetensors, which is not installed", hint="pip install 'parallel-planner[weights]'"
        ) from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot read or write {folder}: {error.strerror or error}") from None


class _Checkpoint:
    """The memory-mapped files of a folder; a context manager."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / INDEX
        files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [SINGLE]
        self._folder, self._stack = folder, contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        for file in files:
            if not (folder / file).exists():
                raise EnvironmentProblem(f"cannot read {folder / file}: it is not there")
            opened = self._stack.enter_context(safe_open(folder / file, framework="pt"))
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _name(self, name: str) -> str:
        """A tensor's full name; GPT-2's own checkpoint leaves out the first part."""
        return name if name in self._file_of else name.removeprefix("transformer.")

    def check(self, trainer: Trainer) -> None:
        """Refuse a checkpoint of another model."""
        spec = trainer.plan.model
        with torch.device("meta"):
            names = {name for name, _ in Transformer(spec).named_parameters()}
        wanted = {self._name(piece.name) for name in names for piece in pieces_of(name, spec)}
        found = {name for name in self._file_of if not is_no_parameter(name, spec)}
        for what, missing in (("lacks", wanted - found), ("holds, beside the model's,", found - wanted)):
            if missing:
                shown = ", ".join(sorted(missing)[:NAMES_SHOWN])
                raise InputError(
                    f"{self._folder} {what} {len(missing)} tensors: {shown}",
                    hint="plan with this checkpoint's own config.json as MODEL",
                )

    def parameter(self, pieces: tuple[Piece, ...], shape: torch.Size, name: str) -> Tensor:
        """The whole value of one parameter."""
        parts = [self._piece(piece) for piece in pieces]
        whole = torch.stack(parts) if len(shape) == len(parts[0].shape) + 1 else parts[0]
        if whole.shape != shape:
            raise InputError(
                f"{pieces[0].name} in {self._folder} makes {name} {tuple(whole.shape)}, not {tuple(shape)}"
            )
        return whole

    def _piece(self, piece: Piece) -> Tensor:
        name = self._name(piece.name)
        tensor: Tensor = self._file_of[name].get_tensor(name)
        tensor = tensor.chunk(piece.num_parts, dim=-1)[piece.part]
        return tensor.t() if piece.transposed else tensor


# --- writing ------------------------------------------------------------------------------------------------------


def export_weights(trainer: Trainer, folder: Path, source: Path | None = None) -> None:
    """Write the model as a Hugging Face checkpoint into a new folder; every rank calls this function.

    The ranks of a stage gather one parameter after another, and each rank keeps and writes some of the tensors. Weights
    are written in bf16, or in fp32 if the training is in fp32.
    source: the checkpoint that the run started from; its configuration and tokenizer are copied.

    Raises:
        EnvironmentProblem: the folder cannot be written, or safetensors is not installed.
        InputError: no known checkpoint format has the model's blocks.
    """
    draft = folder.with_name(f".{folder.name}.tmp")
    dtype = torch.float32 if trainer.plan.training.precision == "fp32" else torch.bfloat16
    with _told(folder):
        if dist.get_rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        dist.barrier()
        parts: list[list[tuple[str, dict[str, int]]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, _write_own(trainer, draft, dtype))
        if dist.get_rank() == 0:
            _write_index(draft, [each for part in parts for each in part])
            _write_config(trainer, draft, dtype, source)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        dist.barrier()


def _write_own(trainer: Trainer, draft: Path, dtype: torch.dtype) -> list[tuple[str, dict[str, int]]]:
    """Write this rank's tensors; returns each file with the bytes of its tensors by name."""
    from safetensors.torch import save_file

    written: list[tuple[str, dict[str, int]]] = []
    kept: dict[str, Tensor] = {}

    def flush() -> None:
        if kept:
            file = f"rank-{dist.get_rank():05d}-{len(written):05d}.safetensors"
            save_file(kept, draft / file, metadata={"format": "pt"})
            written.append((file, {name: tensor.nbytes for name, tensor in kept.items()}))
            kept.clear()

    for name, tensor in _own_tensors(trainer, dtype):
        if sum(each.nbytes for each in kept.values()) + tensor.nbytes > MAX_FILE_BYTES:
            flush()
        kept[name] = tensor
    flush()
    return written


def _own_tensors(trainer: Trainer, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors that this rank writes; the ranks of a stage take turns."""
    spec, layout = trainer.plan.model, trainer.plan.layout
    stage_size = layout.world_size // layout.pp
    turn = dist.get_rank() % stage_size  # ranks of a stage are neighbours: pp is the slowest axis
    waiting: dict[str, dict[int, Tensor]] = defaultdict(dict)
    number = 0
    for ours, parameter in trainer.own_parameters().items():
        whole = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        pieces = pieces_of(ours, spec)
        values = whole.unbind() if len(pieces) > 1 or whole.ndim > 2 else (whole,)  # stacked experts
        for piece, value in zip(pieces, values, strict=True):
            waiting[piece.name][piece.part] = value.t() if piece.transposed else value
            if len(waiting[piece.name]) < piece.num_parts:
                continue
            parts = [part for _, part in sorted(waiting.pop(piece.name).items())]
            if number % stage_size == turn:
                joined = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
                yield piece.name, joined.to("cpu", dtype).contiguous().clone()
            number += 1


def _write_index(draft: Path, files: list[tuple[str, dict[str, int]]]) -> None:
    """Give the files their usual names, and write an index of the tensors."""
    if len(files) == 1:
        (draft / files[0][0]).rename(draft / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (file, tensors) in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (draft / file).rename(draft / name)
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(num_bytes for _, tensors in files for num_bytes in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (draft / INDEX).write_text(json.dumps(document, indent=1) + "\n")


def _write_config(trainer: Trainer, draft: Path, dtype: torch.dtype, source: Path | None) -> None:
    name = str(dtype).removeprefix("torch.")
    config = whole_config(trainer.plan.model, name)
    if source is not None:
        for path in (*source.glob("tokenizer*"), *source.glob("*_config.json"), *source.glob("*.model")):
            shutil.copy(path, draft)
        original = source / "config.json"
        config = json.loads(original.read_text()) | {"torch_dtype": name} if original.exists() else config
    (draft / "config.json").write_text(json.dumps(config, indent=1) + "\n")
