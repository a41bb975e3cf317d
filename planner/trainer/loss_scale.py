"""The factor that keeps small gradients above zero in fp16, which has few bits for the exponent."""

from __future__ import annotations

FIRST, LEAST, GROWS_AFTER = 2.0**16, 1.0, 2000  # as torch.amp.GradScaler, which knows no least


class LossScale:
    """Micikevicius et al. 2018: loss and gradients are `factor` times what they are, and divided before the update.

    A power of two, so that scaling itself rounds nothing. Gradients that overflow halve it, and the step is
    repeated; `GROWS_AFTER` steps without that double it. Other precisions keep a factor of one.
    """

    def __init__(self, precision: str) -> None:
        self.dynamic = precision == "fp16"
        self.factor = FIRST if self.dynamic else 1.0
        self.good_steps = 0

    @property
    def state(self) -> list[float]:
        """Factor, and good steps since it changed: what a checkpoint keeps."""
        return [self.factor, self.good_steps]

    @state.setter
    def state(self, kept: list[float]) -> None:
        self.factor, self.good_steps = float(kept[0]), int(kept[1])

    def shrinks(self) -> bool:
        """After an overflow: halve the factor; false where it is no help."""
        if not self.dynamic or self.factor <= LEAST:
            return False
        self.factor, self.good_steps = self.factor / 2, 0
        return True

    def note_good_step(self) -> None:
        """After an update."""
        self.good_steps += 1
        if self.dynamic and self.good_steps >= GROWS_AFTER:
            self.factor, self.good_steps = self.factor * 2, 0
