"""Arguments of a run besides its plan, defined once: the command line, scripts and the trainer read them here."""

# ruff: noqa: RUF009 - `_option` makes fields

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.units import parse_share

if TYPE_CHECKING:
    from collections.abc import Callable


OF_OTHER_PROGRAMS: Final = frozenset({"data", "tokenizer", "weights"})
"""Fields that are also options of programs other than the planner's own trainer."""


def _option(text: str, metavar: str = "", read: Callable[[str], Any] = str, default: Any = None) -> Any:
    """A field that is an option of the same name; `read` parses the option's text or raises ValueError."""
    return field(default=default, metadata={"help": text, "metavar": metavar, "read": read})


def _read_held_out(text: str) -> float:
    share = parse_share(text)
    if share > 1 / 2:
        raise ValueError(f"{text!r} leaves less for training than for validation")
    return share


def _read_resume(text: str) -> str:
    if text not in ("auto", "never") and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is neither auto nor never nor a step")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """Arguments of a run besides its plan.

    Fields that are None leave the choice to the plan or the trainer; counts (`read` is int) are at least 1.
    """

    data: tuple[str, ...] = _option(
        "Training data: a text, .jsonl, .parquet or .npy file, or hf:NAME.", "SOURCE", default=()
    )
    tokenizer: Path | None = _option("A tokenizer.json; by default bytes are tokens.", "PATH", Path)
    document_mask: bool = _option("Keep packed documents from attending to each other.", default=False)
    validation: float = _option("Share of samples to hold out; at most 50%.", "SHARE", _read_held_out, default=0.0)
    weights: Path | None = _option("Hugging Face model to start from.", "DIR", Path)
    export: Path | None = _option("Write a Hugging Face model here after the last step.", "DIR", Path)
    steps: int | None = _option("Number of optimizer steps; by default the plan's number.", "N", int)
    resume: str = _option("Checkpoint to start from.", "auto|never|STEP", _read_resume, default="auto")
    checkpoint_every: int | None = _option("Steps between checkpoints; by default one every ten minutes.", "N", int)
    keep_checkpoints: int = _option("Number of checkpoints to keep.", "N", int, default=2)
    async_save: bool = _option("Write checkpoints while training continues.", default=False)
    async_tp: bool = _option("Overlap tensor-parallel collectives with products; on GPUs, with tp.", default=False)
    validate_every: int = _option("Steps between two losses of the held-out samples.", "N", int, default=100)
    profile: int | None = _option("Record step N with torch's profiler.", "N", int)
    tensorboard: bool = _option("Write metrics for TensorBoard too.", default=False)
    wandb: str | None = _option("Send metrics to Weights & Biases too.", "PROJECT")

    def options(self) -> tuple[str, ...]:
        """The options as words of a command; options with their default value are left out."""
        words: list[str] = []
        for each in fields(self):
            value, name = getattr(self, each.name), option_name(each.name)
            if value is True:
                words.append(name)
            elif value != each.default:
                words += [f"{name}={part}" for part in (value if isinstance(value, tuple) else (value,))]
        return tuple(words)


def option_name(name: str) -> str:
    """The option of a field, as in `--keep-checkpoints`."""
    return f"--{name.replace('_', '-')}"
