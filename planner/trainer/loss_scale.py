"""The factor that keeps small fp16 gradients from becoming zero; fp16 has few bits for the exponent."""

from __future__ import annotations

FIRST, LEAST, GROWS_AFTER = 2.0**16, 1.0, 2000  # as in torch.amp.GradScaler, which has no minimum


class LossScale:
    """The loss scale of Micikevicius et al. 2018: multiply the loss by `factor`, and divide the gradients by it.

    The factor is a power of two, so scaling does not round. If gradients overflow, the factor is halved and the step
    repeated. After `GROWS_AFTER` steps without overflow, the factor is doubled. With any precision but fp16, the factor
    is always 1.
    """

    def __init__(self, precision: str) -> None:
        self.dynamic = precision == "fp16"
        self.factor = FIRST if self.dynamic else 1.0
        self.good_steps = 0

    @property
    def state(self) -> list[float]:
        """The factor, and the number of good steps since it changed; checkpoints keep both."""
        return [self.factor, self.good_steps]

    @state.setter
    def state(self, kept: list[float]) -> None:
        self.factor, self.good_steps = float(kept[0]), int(kept[1])

    def shrinks(self) -> bool:
        """Halve the factor after an overflow; false if that does not help."""
        if not self.dynamic or self.factor <= LEAST:
            return False
        self.factor, self.good_steps = self.factor / 2, 0
        return True

    def note_good_step(self) -> None:
        """Count a step without overflow."""
        self.good_steps += 1
        if self.dynamic and self.good_steps >= GROWS_AFTER:
            self.factor, self.good_steps = self.factor * 2, 0
