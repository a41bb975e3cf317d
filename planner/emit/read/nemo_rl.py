"""Reader for files of NeMo RL, which inherit from other files by `defaults`: the training of the policy.

FSDP2 (`dtensor_cfg`) or Megatron-Core (`megatron_cfg`) trains the policy. Source: NeMo RL 7ea279ab, examples/configs/
sft.yaml; nemo_rl/models/policy.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from planner.emit.adapters import adapters_of
from planner.emit.names import names_beside, only_read, translated
from planner.emit.programs.hugging_face import flat
from planner.emit.read import METHOD, Reader
from planner.emit.read.options import document_of
from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, Values

_NAMES: Final = names_beside(__file__)
_MEGATRON: Final = "policy.megatron_cfg."
_DTENSOR: Final = "policy.dtensor_cfg."


def _values(text: str) -> Values:
    return flat(document_of(text))


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
    for key, known in _NAMES["only"].items():
        said = None if key.startswith(off) else found.get(key)
        if said is not None and not fnmatchcase(str(said).lower(), known):
            raise InputError(f"{str(said)[:40]!r} has no price here", where=key)
    own = {key: each for key, each in found.items() if not key.startswith(off)}
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
    is_on = given.flag(f"{start}activation_checkpointing")
    kind = given.text(f"{start}recompute_granularity", "full")
    zero = given.flag(f"{start}optimizer.use_distributed_optimizer") if is_megatron else 3
    key, offload = ("optimizer.optimizer_cpu_offload", "optimizer") if is_megatron else ("cpu_offload", "states+params")
    found |= {"layout.zero": int(zero), "layout.offload": offload if given.flag(start + key) else "none"}
    found["layout.recompute"] = kind if is_on else "none"
    part = f"{start}{'peft' if is_megatron else 'lora_cfg'}."
    if given.flag(f"{part}enabled"):
        if given.get(f"{part}target_modules"):
            raise InputError("adapters on named modules are not read", where=f"{part}target_modules")
        found |= adapters_of(given, f"{part}dim", given.whole(f"{part}dim", 8), ("all-linear",))
        found["training.lora_dropout"] = given.number(f"{part}dropout", 0)
    return found | _objective(given)


READER: Final = Reader(
    **_NAMES["reader"],
    values=_values,
    engine=lambda values: "megatron" if _is_megatron(values) else "fsdp",
    target=only_read("nemo-rl", "NeMo RL, the training of the policy", _NAMES, _read),
    files={"defaults": _values},
    complete=_complete,
)
