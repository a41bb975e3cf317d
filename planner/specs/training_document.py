"""The training document's defaults and rules, which depend on model, devices and engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, get_args

from planner.errors import InputError
from planner.specs.batch import BatchRange, read_batch
from planner.specs.by_name import other_engines
from planner.specs.cluster import Precision
from planner.specs.settings import with_value
from planner.specs.training import TrainingSpec
from planner.specs.validate import validate
from planner.specs.yaml import Node
from planner.units import whole_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.specs.cluster import ClusterSpec, DeviceSpec
    from planner.specs.engine import EngineSpec
    from planner.specs.mistakes import Mistakes
    from planner.specs.model import ModelSpec


_PREFERRED: Final[tuple[Precision, ...]] = ("bf16", "fp16", "fp32")


def check_training(
    mistakes: Mistakes,
    tree: Node,
    model: ModelSpec | None,
    pools: Sequence[ClusterSpec],
    engine: EngineSpec | None,
) -> TrainingSpec | None:
    """The checked training document, with its defaults filled in."""
    if "global_batch_size" not in tree.entries:
        hint = (
            "--global-batch 1024 gives the sequences of an optimizer step, '4M tokens' its tokens, "
            "and from a range, 512..2048, the planner chooses; "
            "in TRAINING.yaml it is `global_batch_size: 1024`"
        )
        if model and pools and engine:  # else a misspelt name is to be seen first
            mistakes.found.append(tree.mistake("the global batch size is not given", hint))
        tree = with_default(tree, "global_batch_size", 1)
    devices = [pool.device for pool in pools]
    if devices and engine:
        of_all = [each for each in engine.can.precisions if all(each in device.peak for device in devices)]
        usual = (each for each in _PREFERRED if each in of_all)
        tree = with_default(tree, "precision", next(usual, devices[0].precisions[0]))
        for device in devices:
            mistakes.attempt(_check_precision, tree, device, engine)
    if model:
        mistakes.attempt(_check_positions, tree, model)
    _check_requirements(mistakes, tree, pools)
    return mistakes.attempt(validate, TrainingSpec, tree)


def batch_range(tree: Node) -> tuple[Node, BatchRange | None]:
    """The training document with the largest batch size, and the sizes to choose from if the user gave a choice.

    Raises:
        InputError: a choice that cannot be read.
    """
    node, length = tree.entries.get("global_batch_size"), _entry(tree, "sequence_length").data
    if node is None or not isinstance(node.data, str) or not isinstance(length, int) or length < 1:
        return tree, None
    if isinstance(whole_of(node.data), int) and not node.data.endswith("M"):  # who says 4M means tokens
        return tree, None
    try:
        batch = read_batch(node.data, length)
    except ValueError as error:
        raise InputError(node.mistake(str(error))) from None
    return with_value(tree, ("global_batch_size",), replace(node, data=batch.most)), batch


def _check_precision(tree: Node, device: DeviceSpec, engine: EngineSpec) -> None:
    node = _entry(tree, "precision")
    if node.data not in get_args(Precision):
        return  # reported by the document itself
    if node.data not in device.peak:
        has = ", ".join(device.precisions)
        raise InputError(node.mistake(f"{device.name} does not compute in {node.data}", f"it has {has}"))
    if node.data not in engine.can.precisions:
        has = ", ".join(engine.can.precisions)
        elsewhere = other_engines("; another is ", lambda each: node.data in each.can.precisions)
        hint = f"it has {has}{elsewhere}"
        raise InputError(node.mistake(f"engine {engine.name} does not train in {node.data}", hint))


def _check_positions(tree: Node, model: ModelSpec) -> None:
    """Check the sequence length: rotary positions can be extended, learned tables and images cannot."""
    node, longest = _entry(tree, "sequence_length"), model.max_sequence_length
    if model.position == "learned" and isinstance(node.data, int) and node.data > longest:
        message = f"{model.name} has learned positions for {longest} tokens, not {node.data}"
        hint = f"at most {longest}, or --set model.max_sequence_length={node.data}"
        raise InputError(node.mistake(message, hint))
    of_images = model.vision.images_per_sequence * model.vision.tokens_per_image if model.vision else 0.0
    if isinstance(node.data, int) and of_images > node.data:
        message = f"the images of a sequence of {model.name} are {of_images:,.0f} tokens, and it has {node.data:,}"
        raise InputError(node.mistake(message, "a larger --seq-len, or a smaller model.vision.images_per_sequence"))


def _check_requirements(mistakes: Mistakes, tree: Node, pools: Sequence[ClusterSpec]) -> None:
    """Check that a deadline comes with a token budget, and a budget of money with prices of all devices too."""
    given = {key: node for key, node in tree.entries.items() if node.data is not None}
    for key in ("deadline", "budget"):
        if key in given and "tokens" not in given:
            hint = f"add `tokens: 300B` to the document, or training.tokens=300B beside training.{key}"
            mistakes.found.append(given[key].mistake(f"`{key}` needs the token budget of the run", hint))
    free = [pool.name for pool in pools if pool.price is None]
    if "budget" in given and free and "price" not in given:
        root = free[0] if len(pools) > 1 else "cluster"
        hint = f"--set '{root}.price=2.50 USD/h per device'; training.price gives all devices one price"
        mistakes.found.append(given["budget"].mistake(f"`budget` needs a price, and {free[0]} has none", hint))


def with_default(tree: Node, key: str, value: Any) -> Node:
    """The document with `value` for `key`, if the key is missing."""
    if key in tree.entries:
        return tree
    return replace(tree, data={**tree.entries, key: Node(data=value, where="default")})


def _entry(tree: Node, key: str) -> Node:
    return replace(tree.entries[key], data=whole_of(tree.entries[key].data, key))
