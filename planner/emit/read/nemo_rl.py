"""Reader for files of NeMo RL, which inherit from other files by `defaults`: the training of the policy.

FSDP2 (`dtensor_cfg`) or Megatron-Core (`megatron_cfg`) trains the policy. Source: NeMo RL 7ea279ab, examples/configs/
sft.yaml; nemo_rl/models/policy.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from planner.emit.adapters import adapters_of, parts_of
from planner.emit.names import names_beside, only_read, translated
from planner.emit.programs.hugging_face import flat
from planner.emit.read import METHOD, Reader
from planner.emit.read.options import document_of, option_words, overrides_of
from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, Values

_NAMES: Final = names_beside(__file__)
_MEGATRON: Final = "policy.megatron_cfg."
_DTENSOR: Final = "policy.dtensor_cfg."


def _values(text: str) -> Values:
    return flat(document_of(text))


def _options(text: str) -> Values:
    """Overrides of a command, which may be the text that a script leaves to `ray.sub` in a variable."""
    found = overrides_of(option_words(f"{text}\n$COMMAND\n"))
    return {key: value for key, value in found.items() if "." in key or key == "config"}


def _is_megatron(values: Values) -> bool:
    return str(values.get(f"{_MEGATRON}enabled")).lower() == "true"


def _complete(found: Values) -> Values:
    """The values of all files, without those of the way of training that is off.

    Raises:
        InputError: the files train by a method without a price.
    """
    if other := next((key for key in found if key.partition(".")[0] in _NAMES["methods"]), None):
        raise InputError("this method of NeMo RL has no price", where=other, hint=_NAMES["instead"])
    if not _is_megatron(found) and str(found.get(f"{_DTENSOR}enabled")).lower() != "true":
        raise InputError("neither dtensor_cfg nor megatron_cfg is enabled", where="policy")
    off = _DTENSOR if _is_megatron(found) else _MEGATRON
    own = {key: each for key, each in found.items() if not key.startswith(off)}
    for key, known in _NAMES["only"].items():
        if own.get(key) is not None and not fnmatchcase(str(own[key]).lower(), known):
            raise InputError(f"{str(own[key])[:40]!r} has no price here", where=key)
    return {METHOD: None, **translated(own, _NAMES["launch"])}


def _objective(given: Given) -> dict[str, Any]:
    """Fields of the method: a reference model is swapped in from the host, and an engine for answers sleeps meanwhile.

    Source: NeMo RL 7ea279ab, models/policy/workers/dtensor_policy_worker.py (use_reference_model); algorithms/grpo.py
    (setup, _resolve_logprob_skip_flags).
    """
    sections = {key.partition(".")[0] for key in given.values}
    found = dict(next((row for name, row in _NAMES["objectives"].items() if name in sections), {}))
    if found.get("objective") == "grpo":
        diverges = given.number("loss_fn.reference_policy_kl_penalty", 0.01) > 0
        found["reference"] = "host" if diverges else "none"
        found["forward_passes"] = int(diverges) + (not given.flag("loss_fn.force_on_policy_ratio"))
        if given.text(key := "policy.generation.backend", "vllm") not in ("vllm", "sglang"):
            given.doubt(key, "the memory that it keeps during a training step is not known")
    return {f"training.{key}": value for key, value in found.items()}


def _read(given: Given) -> Mapping[str, Any]:
    """The layout, the batch and the adapters; the rows of the document are those of the part that trains."""
    is_megatron = _is_megatron(given.values)
    start = _MEGATRON if is_megatron else _DTENSOR
    found: dict[str, Any] = {
        field: given.whole(key if "." in key else start + key, 1) or 1
        for field, key in (_NAMES["both"] | _NAMES["megatron" if is_megatron else "dtensor"]).items()
        if "." not in key or key in given.values
    }
    found |= {"layout.sp": int(given.flag(f"{start}sequence_parallel"))} if found["layout.tp"] > 1 else {}
    kind = given.text(f"{start}recompute_granularity", "full")
    zero = given.flag(f"{start}optimizer.use_distributed_optimizer") if is_megatron else 3
    is_away = given.flag(start + ("optimizer.optimizer_cpu_offload" if is_megatron else "cpu_offload"))
    found |= {"layout.zero": int(zero), "layout.offload": "optimizer" if is_away else "none"}
    found["layout.recompute"] = kind if given.flag(f"{start}activation_checkpointing") else "none"
    part = f"{start}{'peft' if is_megatron else 'lora_cfg'}."
    if given.flag(f"{part}enabled"):
        parts = parts_of(given, f"{part}target_modules", "all-linear")
        found |= adapters_of(given, f"{part}dim", given.whole(f"{part}dim", 8), parts)
        found["training.lora_dropout"] = given.number(f"{part}dropout", 0)
    return found | _objective(given)


READER: Final = Reader(
    **_NAMES["reader"],
    values=_values,
    engine=lambda values: "megatron" if _is_megatron(values) else "fsdp",
    target=only_read(_NAMES, _read),
    files={"config": _values, "defaults": _values},
    complete=_complete,
)

COMMAND: Final = replace(READER, **_NAMES["command"], values=_options, is_shell=True)
