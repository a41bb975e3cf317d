"""Megatron-LM: write a plan as options of `pretrain_gpt.py`, for releases of August 2026 (d98e8a64) and later."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import names_beside, still_open
from planner.emit.programs.megatron_family import DECISIVE, FAMILY, IGNORED, LOSS, PRETRAIN, REFUSALS, connections
from planner.emit.starters.torchrun import torchrun_start
from planner.emit.target import Setting, Target
from planner.specs.training import OF_MEGATRON, UNKNOWN_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from planner.emit.target import Given, How, Place, Value, Values
    from planner.plan import Plan

CHECKOUT: Final = "MEGATRON_PATH"
_YOURS: Final = names_beside(__file__)
DATA, TOKENIZER = (placeholder for placeholder, _ in _YOURS.values())


def as_flags(values: Values, *, dashes: bool = True) -> Iterator[tuple[str, ...]]:
    """The words of each option: `--key value`, `--key` alone for True, or `--key` followed by several values."""
    for key, value in values.items():
        name = f"--{key.replace('_', '-') if dashes else key}"
        if value is True:
            yield (name,) if dashes else (name, "true")
        elif value is not False and value is not None:
            yield (name, *(shown(each) for each in (value if isinstance(value, tuple) else (value,))))


def shown(value: Any) -> str:
    """The text of an option's value; floats keep all digits."""
    return repr(value) if isinstance(value, float) else str(value)


def _write_weights(plan: Plan) -> Values:
    """The checkpoint to start from, in Megatron-LM's form; a run that is continued with --load starts from its own."""
    weights = plan.training.weights
    if weights is None:
        return {}
    own = weights.removeprefix(OF_MEGATRON) if weights.startswith(OF_MEGATRON) else UNKNOWN_WEIGHTS
    return {"pretrained_checkpoint": own}


def _read_weights(given: Given) -> Mapping[str, Any]:
    """The weights; --finetune alone starts from those of --load. Source: checkpointing.py, load_checkpoint."""
    is_new = given.flag("finetune")
    weights = given.text("pretrained_checkpoint", given.text("load") if is_new else "")
    if not weights:
        return {"training.weights": UNKNOWN_WEIGHTS} if is_new else {}
    return {"training.weights": weights if weights == UNKNOWN_WEIGHTS else f"{OF_MEGATRON}{weights}"}


def _read_batch(given: Given) -> Mapping[str, Any]:
    """Without a global batch, each replica computes one microbatch. Source: arguments.py, validate_args."""
    tp, pp, cp = (
        given.whole(f"{each}_parallel_size", 1) or 1 for each in ("tensor_model", "pipeline_model", "context")
    )
    replicas = 0 if "global_batch_size" in given else given.num_devices // (tp * pp * cp)
    return {"training.global_batch_size": given.whole("micro_batch_size") * replicas} if replicas else {}


def data_of(plan: Plan, how: How) -> dict[str, Value]:
    """Options for data and tokenizer: the user's, placeholders, or mock data without a real tokenizer."""
    if how.smoke:  # NullTokenizer adds one token
        start = dict.fromkeys(_write_weights(plan))  # at random
        return start | {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": plan.model.vocab_size - 1}
    tokenizer = str(how.arguments.tokenizer or TOKENIZER)
    data: tuple[str, ...] = how.arguments.data or (DATA,)
    return {"data_path": data, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer}


def yours_of(plan: Plan, how: How) -> dict[str, str]:
    """Placeholder -> meaning, for what the plan does not decide."""
    found = {f"${CHECKOUT}": "a checkout of Megatron-LM of August 2026 or later, set before the script is started"}
    found |= still_open(_YOURS, how)
    if _write_weights(plan).get("pretrained_checkpoint") == UNKNOWN_WEIGHTS and not how.smoke:
        found[UNKNOWN_WEIGHTS] = "a checkpoint of Megatron-LM, with the weights that the training starts from"
    return found


def _command(values: Values, plan: Plan, how: How, place: Place | None) -> str:
    """The torchrun command with all options; options that the user adds come last and override them."""
    options = "".join(f" \\\n  {shlex.join(words)}" for words in as_flags({**values, **data_of(plan, how)}))
    program = f'"${{{CHECKOUT}:?set it to a checkout of Megatron-LM}}/pretrain_gpt.py"'
    return f"{torchrun_start(plan, place)} \\\n  {program}{options}"


TARGET: Final = Target(
    name="megatron",
    program="Megatron-LM of August 2026 or later, pretrain_gpt.py",
    settings=(
        *FAMILY,
        LOSS,
        Setting(says=("training.weights",), write=_write_weights, read=_read_weights),
        # has no default, and divides the number of iterations before the first (training/training.py)
        Setting(says=(), write=lambda plan: {"eval_interval": plan.training.steps}, read=_read_batch),
    ),
    refuse=(*REFUSALS, *PRETRAIN),
    command=_command,
    yours=yours_of,
    takes=("data", "tokenizer"),
    environment=connections,
    ignores=IGNORED,
    decides=DECISIVE,
    install="git clone https://github.com/NVIDIA/Megatron-LM, and its requirements",
)
