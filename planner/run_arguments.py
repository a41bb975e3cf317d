"""Arguments of a run besides its plan, defined once: the command line, scripts and the trainer read them here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.units import parse_share

if TYPE_CHECKING:
    from collections.abc import Callable


OF_OTHER_PROGRAMS: Final = frozenset({"data", "tokenizer", "weights"})
"""Fields that programs other than the planner's own trainer take too."""


def _option(text: str, metavar: str = "", read: Callable[[str], Any] = str) -> dict[str, Any]:
    """Metadata that makes a field an option of the same name; `read` parses the option's text or raises ValueError."""
    return {"help": text, "metavar": metavar, "read": read}


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

    data: tuple[str, ...] = field(
        default=(), metadata=_option("Text, .jsonl, .parquet or .npy file, or hf:NAME.", "SOURCE")
    )
    tokenizer: Path | None = field(default=None, metadata=_option("A tokenizer.json; else bytes.", "PATH", Path))
    document_mask: bool = field(default=False, metadata=_option("Packed documents do not attend to each other."))
    validation: float = field(default=0.0, metadata=_option("Samples to hold out; up to 50%.", "SHARE", _read_held_out))
    weights: Path | None = field(default=None, metadata=_option("A Hugging Face model to start from.", "DIR", Path))
    export: Path | None = field(default=None, metadata=_option("Write one here after the last step.", "DIR", Path))
    steps: int | None = field(
        default=None, metadata=_option("Optimizer steps; the plan's own number by default.", "N", int)
    )
    resume: str = field(
        default="auto", metadata=_option("Which checkpoint to start from.", "auto|never|STEP", _read_resume)
    )
    checkpoint_every: int | None = field(
        default=None, metadata=_option("Steps between checkpoints; every ten minutes by default.", "N", int)
    )
    keep_checkpoints: int = field(default=2, metadata=_option("How many stay.", "N", int))
    async_save: bool = field(default=False, metadata=_option("Write checkpoints while the training goes on."))
    async_tp: bool = field(
        default=False, metadata=_option("Compiled layers multiply while pieces arrive; on GPUs, with tp.")
    )
    validate_every: int = field(
        default=100, metadata=_option("Steps between losses of the held-out samples.", "N", int)
    )
    profile: int | None = field(default=None, metadata=_option("Record step N with torch's profiler.", "N", int))
    tensorboard: bool = field(default=False, metadata=_option("Write metrics for TensorBoard too."))
    wandb: str | None = field(default=None, metadata=_option("Send metrics to Weights & Biases too.", "PROJECT"))

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
