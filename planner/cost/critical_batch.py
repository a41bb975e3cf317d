"""Useful sizes of a batch: published fits of the critical and the best batch, and learning rates for other batches.

The fits give only an order of magnitude, because they come from other data and often from much smaller models. To know
the critical batch of a run, measure the run's gradient noise scale (McCandlish et al., 2018, appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from planner.cost.flops import model_flops_per_step
from planner.cost.parameters import num_active_params

if TYPE_CHECKING:
    from planner.specs.model import ModelSpec
    from planner.specs.training import TrainingSpec

TOKENS_PER_PARAMETER: Final = 20.0
"""Tokens of a run without a token budget: compute-optimal training. Source: Hoffmann et al., Chinchilla (2022)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimate:
    """A batch size from the literature, in tokens.

    kind: `critical`, or `best` for the batch with the lowest loss.
    """

    name: str
    kind: str
    num_tokens: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvice:
    """Published estimates for a batch of `batch_tokens` in a run of `run_tokens`.

    run_tokens_assumed: whether `run_tokens` is assumed (20 per parameter), because the training document has no budget.
    extra_tokens: tokens for a given loss, divided by the tokens that a very small batch needs.
    extra_steps: steps for a given loss, divided by the steps that a very large batch needs.

    Both ratios use the critical batch of Kaplan et al. A batch of exactly the critical size has 2 for both.
    """

    batch_tokens: float
    run_tokens: float
    run_tokens_assumed: bool
    estimates: tuple[BatchEstimate, ...]
    extra_tokens: float
    extra_steps: float


def expected_loss(num_params: float, num_tokens: float) -> float:
    """Loss in nats per token of a model of `num_params` parameters after one pass over `num_tokens` tokens.

    ((N_c / N)^(a_N / a_D) + D_c / D)^a_D with a_N = 0.076, a_D = 0.103, N_c = 6.4e13, D_c = 1.8e13.

    Source: Kaplan et al., Scaling laws for neural language models (2020), equation 1.5 and table 2.
    """
    alpha_params, alpha_tokens = 0.076, 0.103
    by_size = (6.4e13 / num_params) ** (alpha_params / alpha_tokens)
    return float((by_size + 1.8e13 / num_tokens) ** alpha_tokens)


def critical_batch_tokens(loss: float) -> float:
    """Tokens of the critical batch: it needs twice the steps of a huge batch, and twice the tokens of a tiny batch.

    2e8 tokens / loss^(1 / 0.21).

    Source: Kaplan et al. (2020), equation 1.4, fitted to the gradient noise scale of McCandlish et al. (2018).
    """
    return float(2e8 / loss ** (1 / 0.21))


def step_law_batch_tokens(num_tokens: float) -> float:
    """Tokens of the batch with the lowest loss after `num_tokens` tokens of training: 0.58 D^0.571.

    Source: Li et al., Step Law (arXiv 2503.04715, 2025).
    """
    return float(0.58 * num_tokens**0.571)


def deepseek_batch_tokens(flops: float) -> float:
    """Tokens of the batch with nearly the lowest loss for a compute budget: 0.2920 C^0.3271.

    Source: DeepSeek LLM (arXiv 2401.02954, 2024), section 3.1, equation 1; fitted from 1e17 to 2e19 FLOPs.
    """
    return float(0.2920 * flops**0.3271)


def extra_tokens(batch_tokens: float, critical_tokens: float) -> float:
    """Tokens for a given loss, divided by the tokens that a very small batch needs: 1 + B / B_crit.

    Source: McCandlish et al., An empirical model of large-batch training (2018): (S/S_min - 1)(E/E_min - 1) = 1.
    """
    return 1.0 + batch_tokens / critical_tokens


def extra_steps(batch_tokens: float, critical_tokens: float) -> float:
    """Steps for a given loss, divided by the steps that a very large batch needs: 1 + B_crit / B.

    Source: McCandlish et al. (2018): (S/S_min - 1)(E/E_min - 1) = 1.
    """
    return 1.0 + critical_tokens / batch_tokens


def linear_learning_rate(learning_rate: float, batch: float, other_batch: float) -> float:
    """The learning rate for another batch by the linear rule, which holds for plain SGD with small batches.

    Source: Goyal et al. (2017), section 2.1.
    """
    return learning_rate * other_batch / batch


def square_root_learning_rate(learning_rate: float, batch: float, other_batch: float) -> float:
    """The learning rate for another batch by the square root rule, which holds for Adam and related optimizers.

    Source: Krizhevsky, One weird trick (2014); Malladi et al. (2022) for Adam.
    """
    return float(learning_rate * (other_batch / batch) ** 0.5)


def batch_advice(model: ModelSpec, training: TrainingSpec) -> BatchAdvice:
    """Published batch sizes for this model and token budget, and the extra tokens and steps of the chosen batch.

    Source: the functions of this module.
    """
    params = num_active_params(model)
    tokens = training.tokens or TOKENS_PER_PARAMETER * params
    batch_tokens = float(training.step_tokens)
    flops = model_flops_per_step(model, training) / batch_tokens * tokens
    critical = critical_batch_tokens(expected_loss(params, tokens))
    deepseek, step_law = deepseek_batch_tokens(flops), step_law_batch_tokens(tokens)
    estimates = (
        BatchEstimate(name="noise scale", kind="critical", num_tokens=critical, source="Kaplan et al. (2020), eq. 1.4"),
        BatchEstimate(name="Step Law", kind="best", num_tokens=step_law, source="Li et al. (2025)"),
        BatchEstimate(name="DeepSeek LLM", kind="best", num_tokens=deepseek, source="DeepSeek LLM (2024), eq. 1"),
    )
    return BatchAdvice(
        batch_tokens=batch_tokens,
        run_tokens=tokens,
        run_tokens_assumed=training.tokens is None,
        estimates=estimates,
        extra_tokens=extra_tokens(batch_tokens, critical),
        extra_steps=extra_steps(batch_tokens, critical),
    )
