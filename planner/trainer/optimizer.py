"""AdamW with a cosine schedule, and the gradient norm over the whole mesh."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from planner.trainer.parallelize import local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor, nn

    from planner.specs.training import TrainingSpec


class _AdamW(torch.optim.AdamW):
    """AdamW on this rank's parts of DTensors; its state stays DTensors, which checkpoints reshard.

    DTensor would decide how each tensor of the update is placed, for half a second on the CPU before the first update.
    """

    def _init_group(self, group: Any, *lists: Any) -> Any:
        found = super()._init_group(group, *lists)  # type: ignore[no-untyped-call] # torch's
        for tensors in lists:
            tensors[:] = map(local_tensor, tensors)
        return found


def make_optimizer(parameters: Mapping[str, nn.Parameter], training: TrainingSpec) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019); its state is allocated immediately, so memory does not grow at step 2.

    Weight decay applies to matrices and embeddings, not to biases and norms. `fused` updates in place, without the
    temporary copies of the multi-tensor form.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decays = parameter.ndim >= 2 and not name.endswith("bias")
        groups.setdefault(training.weight_decay if decays else 0.0, []).append(parameter)
    optimizer = _AdamW(
        [{"params": members, "weight_decay": decay} for decay, members in groups.items()],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def learning_rate(step: int, num_steps: int, training: TrainingSpec) -> float:
    """Linear warm-up, then half a cosine down to `min_learning_rate_ratio`; `step` counts from 1.

    Source: Loshchilov and Hutter 2017 (SGDR), with the warm-up of Vaswani et al. 2017.
    """
    warmup = min(training.warmup_steps, num_steps)
    if step <= warmup:
        return training.learning_rate * step / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    low = training.min_learning_rate_ratio
    return training.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def squared_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """This rank's part of the squared gradient norm; the sum over all ranks is the whole model's squared norm.

    An element that several ranks hold (replicas, norms under tensor parallelism) is divided by their number, so that it
    counts once. `parameters` must not contain second copies of tied weights.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        copies = 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            copies = math.prod(size for size, placement in sizes if placement.is_replicate())
        by_copies.setdefault(copies, []).append(local_tensor(gradient))
    return torch.stack([get_total_norm(grads) ** 2 / copies for copies, grads in by_copies.items()]).sum()


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, training: TrainingSpec, *, scale: float) -> None:
    """Undo the loss scale, and scale the gradients down if their global norm exceeds `gradient_clip`."""
    share = (training.gradient_clip / (norm + 1e-6)).clamp(max=1.0) / scale  # as torch.nn.utils.clip_grads_with_norm_
    torch._foreach_mul_([local_tensor(p.grad) for p in parameters if p.grad is not None], share)  # torch.optim uses it
