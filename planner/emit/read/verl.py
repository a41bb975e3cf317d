"""Reader for verl: reinforcement learning, where FSDP or Megatron-Core runs the actor's training step.

Source: verl, verl/trainer/config (ppo_trainer.yaml, actor/*.yaml, engine/*.yaml), docs/examples/config.rst. A critic or
a reward model on the same devices has no price, so that there is no verdict on the actor's memory beside it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from planner.emit.adapters import adapters_of, parts_of
from planner.emit.names import names_beside, only_read, translated
from planner.emit.programs.hugging_face import flat
from planner.emit.read import METHOD, Reader
from planner.emit.read.conditions import whole_number
from planner.emit.read.options import document_of, option_words, overrides_of
from planner.errors import InputError
from planner.specs.mistakes import Mistakes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.emit.target import Given, Values

_ACTOR: Final = "actor_rollout_ref.actor"
_OPTIMIZER: Final = "optim.override_optimizer_config.optimizer"
_TUNED_BY_TOKENS: Final = "data.use_dynamic_bsz"
"""Key of fine-tuning, which all its newer files have; `newer` in the document has its default."""


def _values(text: str) -> Values:
    every, rows = overrides_of(option_words(text)), _NAMES["training"]
    name = str(every.get("config_name") or "").removesuffix(".yaml")
    said = {key: value for key, value in every.items() if "." in key}  # other keys are a launcher's
    if "megatron" in name or "model_engine=megatron" in text:
        said.setdefault(f"{_ACTOR}.strategy", "megatron")
    if script := re.search(_NAMES["other_script"], text, re.MULTILINE):
        said["launch.script"] = script[1]
    is_own = name and not re.fullmatch(_NAMES["shipped"], name)  # a file over verl's own, which has the defaults
    before = {"config": f"{name}.yaml"} if is_own else rows["defaults"]
    return translated({**before, **said, METHOD: None}, rows)  # the table has the lengths and the engine


def _of_document(text: str) -> Values:
    """A file over verl's own; values that are other keys' are left out, because verl's default is as good."""
    said = {key: value for key, value in flat(document_of(text)).items() if "." in key and "${" not in str(value)}
    return translated({**_NAMES["training"]["defaults"], **said, METHOD: None}, _NAMES["training"])


def _of_fine_tuning(text: str) -> Values:
    """Supervised fine-tuning in the keys of an actor; `engine=megatron` decides whose keys those of `engine` are."""
    words, rows = option_words(text), _NAMES["sft"]
    told = {**overrides_of(words), **dict(word.split("=", 1) for word in words if re.fullmatch(r"\w+=.*", word))}
    said = {**rows["defaults"], **rows["older" if "fsdp_sft_trainer" in text else "newer"], **told}
    part = f"{_ACTOR}.megatron" if told.get("engine") == "megatron" else f"{_ACTOR}.fsdp_config"
    found = translated({key: value for key, value in said.items() if "." in key or key in rows["renamed"]}, rows)
    return {re.sub(r"^engine(?=\.)", part, key): value for key, value in found.items()} | {METHOD: None}


def _is_megatron(values: Values) -> bool:
    said = str(values.get(f"{_ACTOR}.strategy", ""))
    return said == "megatron" or (not said and any(key.startswith(f"{_ACTOR}.megatron.") for key in values))


def _read_degrees(given: Given) -> dict[str, Any]:
    is_megatron, start = _is_megatron(given.values), f"{_ACTOR}.megatron."
    mistakes = Mistakes()
    found = {
        field: (mistakes.attempt(given.whole, start + key, 1) or 1) if is_megatron else 1
        for field, key in _NAMES["degrees"].items()
    }
    ulysses = [mistakes.attempt(given.whole, key, 1) or 1 for key in _NAMES["ulysses"]]
    mistakes.raise_if_any()
    is_cut = given.flag(f"{start}sequence_parallel", default=True)
    if not is_megatron:
        found["layout.cp"] = max(ulysses)
    elif found["layout.tp"] > 1:
        found["layout.sp"] = int(is_cut)
    is_dense = given.model is None or given.model.moe is None
    if is_dense or start + _NAMES["degrees"]["layout.etp"] not in given:
        found["layout.etp"] = 1 if is_dense else found["layout.tp"]
    return {field: number for field, number in found.items() if number > 1 or field != "layout.interleave"}


def _read_sharding(given: Given) -> Mapping[str, Any]:
    """ZeRO stage: FSDP shards all states, Megatron-Core only optimizer states. fsdp_size -1 means all ranks."""
    if _is_megatron(given.values):
        return {"layout.zero": 1}
    start = f"{_ACTOR}.fsdp_config."
    found = dict(given.choice(f"{start}model_dtype", _NAMES["stored"], "fp32"))
    found |= given.choice(f"{start}dtype", _NAMES["computed"], "bfloat16")
    found["layout.zero"] = 3 if given.flag(f"{start}reshard_after_forward", default=True) else 2
    size = given.text(key := f"{start}fsdp_size", "-1")
    if size == "-1" or not given.num_devices:
        return found
    shards = given.whole(key)
    if not shards or given.num_devices % shards:
        raise InputError(f"{shards} does not divide {given.num_devices} devices", where=key)
    return found | {"layout.hsdp": given.num_devices // shards}


def _read_batch(given: Given) -> Mapping[str, Any]:
    """Batch sizes; the global batch is prompts x answers per prompt. Source: verl, workers/fsdp_workers.py.

    Microbatches of a number of tokens are the largest of whole sequences that divide the batch of a rank evenly; ranks
    that share sequences share the number, too. Source: workers/actor/dp_actor.py (max_token_len).
    """
    mini, answers = given.whole(f"{_ACTOR}.ppo_mini_batch_size"), given.whole("actor_rollout_ref.rollout.n", 1) or 1
    prompt, answer = given.whole("data.max_prompt_length", 512), given.whole("data.max_response_length", 512)
    found: dict[str, Any] = {"training.sequence_length": prompt + answer}
    if mini:
        prompts = whole_number(str(given.values.get("data.train_batch_size"))) or mini
        mini = min(mini, prompts * given.whole("actor_rollout_ref.rollout.n_agent", 1))  # all that was generated
        found["training.global_batch_size"] = mini * answers
    micro = given.whole(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    if given.flag(key := _TUNED_BY_TOKENS if _TUNED_BY_TOKENS in given else f"{_ACTOR}.use_dynamic_bsz"):
        most, own = given.whole(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384), mini * answers // _replicas(given)
        most *= _read_degrees(given)["layout.cp"]
        sizes = range(min(most // max(prompt + answer, 1), max(own, 1)), 0, -1)
        micro = next((size for size in sizes if own % size == 0), 1)
        if micro not in (own, most / (prompt + answer)):  # else the largest microbatch has this many whole sequences
            given.doubt(key, "microbatches of a number of tokens have no price", "layout.mbs")
    elif not micro and (every := given.whole(key := f"{_ACTOR}.ppo_micro_batch_size")):  # of all ranks, until 2025
        if not (micro := every // (ranks := _replicas(given))):
            raise InputError(f"{every} are fewer than one for each of {ranks} ranks, which verl refuses", where=key)
        if answers > 1:  # as the forks of then have it: Search-R1, Logic-RL, DeepScaleR
            given.doubt(key, f"before release 0.2 it counts prompts, each with {answers} answers", "layout.mbs")
    return found | ({"layout.mbs": micro} if micro else {})


def _replicas(given: Given) -> int:
    degrees = _read_degrees(given)
    return int(max(given.num_devices // (degrees["layout.tp"] * degrees["layout.pp"] * degrees["layout.cp"]), 1))


def _read_recompute(given: Given) -> Mapping[str, Any]:
    start = f"{_ACTOR}.megatron.override_transformer_config."
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    kind = given.text(f"{start}recompute_granularity", "none")
    method, number = given.text(f"{start}recompute_method", "uniform"), given.whole(f"{start}recompute_num_layers", 1)
    if kind != "selective" or "core_attn" in given.text(f"{start}recompute_modules", "core_attn"):
        given.get(f"{start}recompute_modules")
    if not _is_megatron(given.values):
        if is_open := given.get(key) == "by release":
            given.doubt(key, "by default nothing was recomputed until release 0.3", "layout.recompute")
        kind = "full" if is_open or given.flag(key, default=True) else "none"
    elif kind == "full" and method == "block":
        kind = f"full:{number}"
    return {"layout.recompute": kind if kind.startswith(("full", "selective")) else "none"}


def _read_offload(given: Given) -> Mapping[str, Any]:
    """Offload of the actor's step. What the other keys offload while answers are generated is back for this step.

    Source: verl, workers/fsdp_workers.py and megatron_workers.py (update_actor); engine/fsdp.yaml (offload_policy).
    """
    on_host = [given.flag(f"{_ACTOR}.{key}") for key in ("fsdp_config.offload_policy", f"{_OPTIMIZER}_cpu_offload")]
    if given.number(key := f"{_ACTOR}.{_OPTIMIZER}_offload_fraction", 1.0) < 1:
        given.doubt(key, "a part of the states on the host has no price", "layout.offload")
    return {"layout.offload": "optimizer" if any(on_host) else "none"}


def _read_adapters(given: Given) -> Mapping[str, Any]:
    """Adapters: of FSDP by PEFT's names, of Megatron-Core by Megatron-Bridge's, since release 0.7."""
    keys = _NAMES["adapters"]["megatron" if _is_megatron(given.values) else "fsdp"]
    rank, parts = given.whole(keys[0]), parts_of(given, keys[1], "all-linear")
    return adapters_of(given, keys[1], rank, parts) if rank else {}


def _read_objective(given: Given) -> Mapping[str, Any]:
    """The reference model and the rollout engine during the step of the actor, and a critic, which has no price.

    FSDP keeps a reference model on the host. One kernel takes the log-probabilities of an actor without an entropy
    bonus, and writes the gradient over the logits. Fine-tuning has next tokens as its objective, and the kernel since
    its newer program.

    Source: verl b178a3cd, workers/fsdp_workers.py (CPUOffload) and megatron_workers.py; trainer/ppo/utils.py
    (need_critic, need_reference_policy); trainer/config/rollout/rollout.yaml; workers/actor/dp_actor.py;
    workers/engine/fsdp/transformer_impl.py (logprobs_from_logits); trainer/fsdp_sft_trainer.py (CrossEntropyLoss).
    """
    loss = {} if _is_megatron(given.values) or given.number(f"{_ACTOR}.entropy_coeff") else {"training.loss": "fused"}
    if "algorithm.adv_estimator" not in given:
        return loss if _TUNED_BY_TOKENS in given else {}
    if given.flag("trainer.val_only"):
        raise InputError("this run only validates, and trains nothing", where="trainer.val_only")
    if given.flag("critic.enable", default=given.text(key := "algorithm.adv_estimator") == "gae"):
        given.doubt(key, "the critic's weights and states on the same devices have no price")
    diverges = [given.flag(key) for key in (f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")]
    on_host = not _is_megatron(given.values) or given.flag("actor_rollout_ref.ref.megatron.param_offload")
    own = "policy" if _read_adapters(given) else "host" if on_host else "resident"
    found: dict[str, Any] = {"training.objective": "grpo", "training.reference": own if any(diverges) else "none"}
    if not given.flag("actor_rollout_ref.rollout.free_cache_engine", default=True):
        found["training.rollout_memory"] = given.number("actor_rollout_ref.rollout.gpu_memory_utilization", 0.5)
    return found | loss


_NAMES: Final = names_beside(__file__)

TABLE: Final = only_read(
    _NAMES, _read_degrees, _read_sharding, _read_batch, _read_recompute, _read_offload, _read_adapters, _read_objective
)

READER: Final = Reader(
    **_NAMES["readers"]["command"],
    values=_values,
    engine=lambda values: "megatron" if _is_megatron(values) else "fsdp",
    target=TABLE,
    files={"config": _of_document},
)
FILE: Final = replace(READER, **_NAMES["readers"]["file"], values=_of_document)
SFT: Final = replace(READER, **_NAMES["readers"]["sft"], values=_of_fine_tuning, renamed=_NAMES["sft"]["renamed"])
READERS: Final = (READER, FILE, SFT)
