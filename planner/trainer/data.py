"""Training samples: windows of tokens that depend only on their number in the run.

The corpus, the seed and a sample's number determine its content. Layout, world size and restarts have no influence: all
layouts train on the same batches, and a resumed run continues where it stopped.
"""

from __future__ import annotations

import bisect
import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from planner.errors import InputError
from planner.trainer.sources import end_of_document, fingerprint, open_sources

if TYPE_CHECKING:
    from pathlib import Path

    from planner.trainer.sources import Tokens

WHOLE: Final = "sha256:"
"""Beginning of a fingerprint of whole files; fingerprints of checkpoints of earlier versions are of samples."""


def open_corpus(
    names: tuple[str, ...],
    *,
    sequence_length: int,
    vocab_size: int,
    seed: int,
    tokenizer: Path | None = None,
    validation: float = 0.0,
    document_mask: bool = False,
    cache: Path | None = None,
) -> Corpus:
    """Open data sources, as `open_sources` reads them.

    validation: share of windows that is held out.
    document_mask: documents do not attend to each other.

    Raises:
        EnvironmentProblem: a file cannot be read, or a library is missing.
        InputError: a file is of an unknown kind, or too short for a single sample.
    """
    end = end_of_document(names, tokenizer, vocab_size) if document_mask else None
    sources = open_sources(names, tokenizer=tokenizer, vocab_size=vocab_size, cache=cache)
    return Corpus(
        sources,
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        seed=seed,
        validation=validation,
        document_end=end,
        fingerprint=f"{WHOLE}{fingerprint(names, tokenizer, cache and cache.parent)} validation={validation}"
        f"{' document_mask' * document_mask}",
    )


def document_starts(tokens_BS: torch.Tensor, end: int) -> torch.Tensor:
    """For each position, the start of its document; a document ends with the token `end`, or with the sequence."""
    positions = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    begins = torch.zeros_like(tokens_BS)
    begins[:, 1:] = positions[:, 1:] * (tokens_BS[:, :-1] == end)
    return begins.cummax(dim=1).values


class Corpus:
    """Token arrays in windows that do not overlap; an epoch visits each window once.

    The last of every 1 / `validation` consecutive windows is held out, so that validation samples all parts of the
    data.
    document_end: the token that separates documents for attention, or None.
    fingerprint: values by which a resumed run recognises its data.
    """

    def __init__(
        self,
        sources: list[Tokens],
        *,
        sequence_length: int,
        vocab_size: int,
        seed: int,
        validation: float = 0.0,
        document_end: int | None = None,
        fingerprint: str = "",
    ) -> None:
        self._sources, self._length, self._vocab_size, self._seed = sources, sequence_length, vocab_size, seed
        self.document_end, self.fingerprint = document_end, fingerprint
        # one token more than the inputs: targets are shifted by one
        self._ends = list(accumulate(max(0, len(source) - 1) // sequence_length for source in sources))
        self._period = round(1 / validation) if validation else 0
        self.num_held_out = self._ends[-1] // self._period if self._period else 0
        self.num_windows = self._ends[-1] - self.num_held_out
        if self.num_windows < 1:
            raise InputError(
                f"the data hold {sum(map(len, sources))} tokens, a sample needs {sequence_length + 1}",
                hint="give more data with --data, or a shorter --seq-len",
            )

    def _window_of(self, sample: int) -> int:
        """Window of a sample: i -> (a i + b) mod n, with a and b drawn for each epoch and a coprime to n.

        For every n, this rule visits each window exactly once per epoch, without a table.
        """
        epoch, position = divmod(sample, self.num_windows)
        draw = np.random.default_rng((self._seed, epoch))
        factor, offset = (int(value) for value in draw.integers(1, max(2, self.num_windows), size=2))
        while math.gcd(factor, self.num_windows) != 1:
            factor += 1
        number = (factor * position + offset) % self.num_windows
        return number + number // (self._period - 1) if self._period else number

    def _read(self, window: int) -> np.ndarray[Any, Any]:
        index = bisect.bisect_right(self._ends, window)
        first = self._ends[index - 1] if index else 0
        start = (window - first) * self._length
        tokens: np.ndarray[Any, Any] = self._sources[index][start : start + self._length + 1].astype(np.int64)
        return tokens

    def batch(self, first_sample: int, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of consecutive samples, each int64 of shape (num_samples, S).

        Raises:
            InputError: a token id outside the vocabulary.
        """
        return self._tensors([self._window_of(first_sample + i) for i in range(num_samples)])

    def held_out_batch(self, first_sample: int, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets as in `batch`, from the held-out windows in order.

        Sample numbers are below `num_held_out`.
        """
        return self._tensors([(first_sample + i + 1) * self._period - 1 for i in range(num_samples)])

    def _tensors(self, windows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = np.stack([self._read(window) for window in windows])
        if int(rows.max()) >= self._vocab_size:
            raise InputError(f"the data hold token id {int(rows.max())}, the vocabulary has {self._vocab_size}")
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
