"""Training samples: windows of tokens, chosen by their number in the run and by nothing else.

A sample's content depends on the corpus, the seed and the sample's number. Layout, world size and restarts
cannot change it, so any layout trains on the same batches and a resumed run continues where it stopped.
"""

from __future__ import annotations

import bisect
import json
import math
import sysconfig
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planner.errors import EnvironmentProblem, InputError

__all__ = ["Corpus", "open_corpus"]

BYTE_VOCABULARY = 256


def open_corpus(paths: tuple[Path, ...], *, sequence_length: int, vocab_size: int, seed: int) -> Corpus:
    """Open data files; without any, the sources of the running Python's standard library.

    Text and JSONL (key `text`) become bytes; `.npy` files hold token ids as uint16 or uint32 and are mapped,
    not loaded.

    Raises:
        EnvironmentProblem: a file that cannot be read.
        InputError: a file of another kind, or one too short for a single sample.
    """
    sources = [_open(path) for path in paths] if paths else [_standard_library()]
    if vocab_size < BYTE_VOCABULARY and any(source.dtype == np.uint8 for source in sources):
        raise InputError(
            f"vocab_size {vocab_size} is too small for bytes",
            hint=f"use a vocabulary of at least {BYTE_VOCABULARY}, or .npy files of token ids",
        )
    return Corpus(sources, sequence_length=sequence_length, vocab_size=vocab_size, seed=seed)


class Corpus:
    """Token arrays cut into windows that do not overlap; an epoch visits each window once."""

    def __init__(
        self, sources: list[np.ndarray[Any, Any]], *, sequence_length: int, vocab_size: int, seed: int
    ) -> None:
        self._sources, self._length, self._vocab_size, self._seed = sources, sequence_length, vocab_size, seed
        # one token more than the inputs: targets are shifted by one
        self._ends = list(accumulate((len(source) - 1) // sequence_length for source in sources))
        self.num_windows = self._ends[-1]
        if self.num_windows < 1:
            raise InputError(
                f"the data hold {sum(map(len, sources))} tokens, a sample needs {sequence_length + 1}",
                hint="give more data with --data, or a shorter --seq-len",
            )

    def _window_of(self, sample: int) -> int:
        """Window of a sample: i -> (a i + b) mod n with a and b drawn for each epoch, a coprime to n.

        A full cycle without a table: every epoch visits each window exactly once, whatever n.
        """
        epoch, position = divmod(sample, self.num_windows)
        draw = np.random.default_rng((self._seed, epoch))
        factor, offset = (int(value) for value in draw.integers(1, max(2, self.num_windows), size=2))
        while math.gcd(factor, self.num_windows) != 1:
            factor += 1
        return (factor * position + offset) % self.num_windows

    def _read(self, window: int) -> np.ndarray[Any, Any]:
        index = bisect.bisect_right(self._ends, window)
        first = self._ends[index - 1] if index else 0
        start = (window - first) * self._length
        return self._sources[index][start : start + self._length + 1].astype(np.int64)

    def batch(self, first_sample: int, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of consecutive samples, each int64 of shape (num_samples, S).

        Raises:
            InputError: a token id outside the vocabulary.
        """
        rows = np.stack([self._read(self._window_of(first_sample + i)) for i in range(num_samples)])
        if int(rows.max()) >= self._vocab_size:
            raise InputError(f"the data hold token id {int(rows.max())}, the vocabulary has {self._vocab_size}")
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _open(path: Path) -> np.ndarray[Any, Any]:
    try:
        if path.suffix == ".npy":
            return _open_tokens(path)
        if path.suffix == ".jsonl":
            return _read_jsonl(path)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def _open_tokens(path: Path) -> np.ndarray[Any, Any]:
    tokens: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise ValueError(f"holds {tokens.dtype} of shape {tokens.shape}; token files are 1-D uint16 or uint32")
    return tokens


def _read_jsonl(path: Path) -> np.ndarray[Any, Any]:
    texts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            record = json.loads(line) if line.strip() else {"text": ""}
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise ValueError(f"line {number} has no text under the key `text`")  # noqa: TRY004 # the data, not a type
            texts.append(record["text"])
    return np.frombuffer("\n".join(texts).encode(), dtype=np.uint8)


def _standard_library() -> np.ndarray[Any, Any]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8)
