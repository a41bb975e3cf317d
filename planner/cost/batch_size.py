"""What a larger global batch costs and buys besides time: tokens to the same loss, and the learning rate."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["critical_batch_tokens", "learning_rate_factors", "tokens_factor"]

_KAPLAN_LOSS: Final = (8.8e13, 0.076)
_KAPLAN_BATCH: Final = (2e8, 0.21)


def critical_batch_tokens(num_params: Any) -> Any:
    """Tokens per step at which a model trained to its own loss needs twice the least tokens and twice the least steps.

    B* / L^(1/0.21) with B* = 2e8 tokens, at the loss L = (8.8e13 / N)^0.076 of N parameters without embeddings.
    Fitted on one data set up to 1.5 billion parameters: an order of magnitude for others.

    Source: Kaplan et al., scaling laws (2020), equations 1.1 and 1.4; McCandlish et al. (2018), section 2.
    """
    scale, power = _KAPLAN_LOSS
    loss = (scale / num_params) ** power
    return _KAPLAN_BATCH[0] / loss ** (1.0 / _KAPLAN_BATCH[1])


def tokens_factor(batch_tokens: Any, critical_tokens: Any) -> Any:
    """Tokens to the same loss over the least tokens that any batch needs: 1 + B / B_critical.

    Source: McCandlish et al., large-batch training (2018), equation 2.11.
    """
    return 1.0 + batch_tokens / critical_tokens


def learning_rate_factors(batch_ratio: Any) -> tuple[Any, Any]:
    """By what a learning rate is multiplied when the batch is, with SGD (linearly) and with Adam (square root).

    Source: Goyal et al. (2017), section 2.1; Malladi et al. (2022), section 4, for Adam.
    """
    return batch_ratio, batch_ratio**0.5
