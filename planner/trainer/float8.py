"""Matrix products in 8 bits: torchao's linear layers replace torch's; torchao is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from planner.errors import EnvironmentProblem

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.trainer.model import Transformer

MULTIPLE = 16
"""Sizes must be multiples of this number (torch._scaled_mm); tensor-parallel parts of other sizes stay in 16 bits."""


def apply_float8(part: Transformer, layout: Layout, *, emulate: bool) -> None:
    """Replace the linear maps of the layers by 8-bit maps; weights keep their names, and are still gathered in 16 bits.

    Each tensor is scaled by its largest value. Inputs and weights use e4m3, gradients e5m2 (Micikevicius et al. 2022,
    FP8 Formats for Deep Learning). Head, router and routed experts stay in 16 bits, as the plan prices them.
    emulate: round to 8 bits and multiply in 16 bits, for devices without 8-bit products.

    Raises:
        EnvironmentProblem: torchao is missing.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise EnvironmentProblem(
            "precision fp8 needs torchao, which is not installed", hint="pip install 'parallel-planner[fp8]'"
        ) from None

    def fits(module: nn.Module, name: str) -> bool:
        assert isinstance(module, nn.Linear)
        sizes = (module.in_features, module.out_features)
        return not name.endswith("router") and all(size % (MULTIPLE * layout.tp) == 0 for size in sizes)

    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(part.layers, module_filter_fn=fits, config=config)
