"""Training methods other than plain language modelling: which of them a file asks for, and what of them has no price.

A method with a price is an objective of the training document. A method that needs further models, or weights or
states of another kind, is refused. A method whose answers are generated on the same devices is priced for its training
step alone; unless the memory of what generates them is known, the verdict is unknown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planner.emit.names import listed, names_beside
from planner.emit.read import METHOD, MODEL, RANKS
from planner.emit.target import Doubt, matches
from planner.errors import InputError, Mistake
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from planner.emit.target import Value, Values

_NAMES: Final = names_beside(__file__)
_SAYS: Final = rf"stage|rl|rlhf_type|{METHOD}"
_ON: Final = r"(?!(0(\.0*)?|false|none|null|no|off|\(\))$).*"

_FURTHER_MODELS: Final = re.compile("ppo|online_dpo|nash_md|xpo")
"""Methods whose steps also train a critic, or ask a judge."""
_GENERATION: Final = Doubt("what generates answers on the same devices has no price")
_OWN_CODE: Final = Doubt("the code that runs this decides what it keeps beside the model", "training.objective")
NAMES: Final = "online_dpo|dpo|kto|orpo|cpo|bco|gkd|grpo|rloo|ppo|prm|nash_md|xpo|reward"
"""Methods that TRL's commands and scripts have names for, beside supervised fine-tuning."""
_SCRIPT: Final = re.compile(_NAMES["script"].replace("METHODS", NAMES))
"""Matches a command or a script of TRL, or a script of other people."""
_SIGNS: Final = [(key, name) for name, keys in _NAMES["signs"].items() for key in listed(keys)]
"""Key that only files of some methods have -> one of these methods."""


def with_method(text: str, values: Values) -> Values:
    """The values; a file that does not name its method gets the method of its script's name or of its keys."""
    if any(re.fullmatch(_SAYS, key) for key in values):
        return values
    script = _SCRIPT.search(text)
    sign = next((f"{name}, by {key}" for key, name in _SIGNS if values.get(key)), None)
    own = "" if script and (script[1] or script[2]) else " own"
    found = f"{next(filter(None, script.groups()))}, by the script's{own} name" if script else sign
    return {**values, METHOD: found} if found else values


def of_program(text: str) -> Values:
    """What the script that a command starts does beyond its options; the text is searched, and never run."""
    found = {name: re.search(f"(?m){sign}", text) for name, sign in _NAMES["of_program"].items()}
    return {f"program.{name}": match[0].strip() for name, match in found.items() if match}


def check_method(values: Values, ignored: Sequence[str]) -> None:
    """Refuse methods without a price.

    Raises:
        InputError: all keys that ask for such a method, each with what would have to be priced.
    """
    mistakes = [
        Mistake(
            message=f"{printable(str(value), 40)} has no price here; it needs {row['needs']}",
            where=key,
            hint=f"--ignore {key} prices the training without it",
        )
        for key, value in values.items()
        for row in _NAMES["refused"]
        if re.fullmatch(row.get("key", _SAYS), key) and re.fullmatch(row.get("value", _ON), _name(value, key))
        if not matches(key, ignored) and not any(re.fullmatch(row.get("unless", "$^"), each) for each in values)
    ]
    if mistakes:
        raise InputError(*mistakes)


class Method(NamedTuple):
    """A method with a price: fields of the training document, keys that say them, and what is unknown."""

    fields: dict[str, Any]
    read: set[str]
    doubts: dict[str, Doubt]


def method_of(values: Values, ignored: Sequence[str]) -> Method:
    """The method of a file, by the keys that name it and by further keys; without fields for plain training."""
    asks = [key for key in values if re.fullmatch(f"{_SAYS}|loss_type", key) and not matches(key, ignored)]
    said = [(key, _name(values[key])) for key in sorted(asks, key=lambda key: key == "loss_type")]
    priced = _NAMES["priced"].items()
    rows = [(*each, row) for each in said for pattern, row in priced if re.fullmatch(pattern, each[1])]
    if not rows:
        return Method({}, set(), {})
    key, name, row = rows[0]
    fields, read = dict(row), {key}
    for variant in _NAMES["variants"]:
        for each in values:
            is_of = re.fullmatch(variant["of"], fields["objective"]) and re.fullmatch(variant["key"], each)
            is_said = re.fullmatch(variant.get("value", _ON), _name(values[each]))
            if is_of and is_said and not matches(each, ignored):
                fields |= variant["fields"]
                read.add(each)
    read |= {each for each in values if matches(each, listed(_NAMES["harmless"]))}
    read |= {each for each in ("ref_model", "ref.model_name_or_path") if values.get(each, "") == values.get(MODEL)}
    rollout = _rollout(values) if fields["objective"] == "grpo" else {}
    if rollout is None or _FURTHER_MODELS.match(name):
        return Method(fields, read, {key: _GENERATION})
    of_engine = listed(_NAMES["of_rollout"])
    by_sign = fields["objective"] == "grpo" and ", by the script" not in str(values[key])
    is_trls = key != METHOD or by_sign or str(values[key]).endswith("the script's name")
    doubts = {} if is_trls else {key: _OWN_CODE}
    return Method(fields | rollout, read | {each for each in values if each.rpartition(".")[2] in of_engine}, doubts)


def settled(
    method: Method, training: Mapping[str, Any], values: Values, answer: int, given: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All fields of the training document, those of the method included, and fields of the engine's memory.

    answer: the program's default length of an answer, 0 for none.
    given: fields that the user gives.

    Raises:
        InputError: neither the file nor the user says how long a prompt and its answer are.

    Adapters have the weights without them as reference. TRL loads both models in 32 bits by default, which DeepSpeed
    casts, and gathers a reference model of FSDP2 as one unit; its sequences have 1,024 tokens. LLaMA-Factory takes
    log-probabilities from logits in 32 bits.

    Source: TRL f2cd5771, trainer/model_config.py (dtype), trainer/dpo_config.py (max_length), models/utils.py
    (prepare_fsdp); LLaMA-Factory ff6d4d12, train/dpo/trainer.py (concatenated_forward).
    """
    found, objective = dict(method.fields), method.fields.get("objective", "")
    if training.get("lora_rank") and found.get("reference") == "resident" and "ref_model" not in method.read:
        found["reference"] = "policy"
    if found.get("forward_passes") == 0 and found.get("reference", "none") != "none":
        found["forward_passes"] = 1
    if METHOD in values and objective not in ("", "grpo"):
        found["sequence_length"] = training.get("sequence_length", 1024)
    if objective == "grpo":
        length = _length(values, int(training.get("sequence_length", 0)), answer)
        if not length and "training.sequence_length" not in given:
            hint = "--seq-len N says it: the tokens of a prompt and its answer"
            raise InputError("the file does not say the length of a sequence", hint=hint)
        found |= {"sequence_length": length} if length else {}
    is_trl = objective and METHOD in values and not any(key.startswith("deepspeed.") for key in values)
    in_32_bits = str(values.get("dtype", values.get("torch_dtype", "float32"))) == "float32"
    as_one = str(values.get("accelerate.fsdp_config.fsdp_version")) == "2"
    memory = {"memory.reference_bytes": 4} if is_trl and in_32_bits else {}
    memory |= {"memory.gathers_whole_reference": True} if is_trl and as_one else {}
    memory |= {"memory.log_probability_bytes": 4} if "stage" in method.read and objective != "grpo" else {}
    return {**training, **found}, memory


def _rollout(values: Values) -> dict[str, Any] | None:
    """Fields of what generates answers; None if the memory that it keeps during a training step is not known.

    The trained model itself keeps nothing, a server runs on other devices, and an engine that sleeps frees its memory.
    Without an engine, TRL takes the log-probabilities before a step's only update from the update itself.

    Source: TRL f2cd5771, trainer/grpo_trainer.py (_generate_and_score_completions), and of 0.14 to 0.16 (vllm_device:
    `auto` is the device behind those of the ranks); ms-swift 3602360a, rlhf_trainers/args_mixin.py (sleep_level).
    """
    said = {key.rpartition(".")[2]: str(value).lower() for key, value in values.items()}
    if said.get("use_vllm", "false") == "false" and not any("vllm_" in key for key in said):
        again = {"steps_per_generation", "generation_batch_size"} & said.keys()
        return {} if again or said.get("num_iterations", "1") != "1" else {"forward_passes": 0}
    sleeps = said.get("vllm_enable_sleep_mode") == "true" or said.get("sleep_level", "0") != "0"
    alone = str(values.get(RANKS)) != "1" and re.fullmatch(r"auto|cuda:[1-9]\d*", said.get("vllm_device", ""))
    if said.get("vllm_mode") == "server" or sleeps or alone:
        return {}
    share = said.get("vllm_gpu_memory_utilization", "")
    is_said = said.get("vllm_mode") == "colocate" and share[:9].replace(".", "", 1).isdecimal()
    return {"rollout_memory": float(share[:9])} if is_said else None


def _name(value: Value, key: str = "") -> str:
    """The value in lower case, of several values the first, and of a model's path the last two parts that name it."""
    first = str(value).lower().partition(",")[0].strip("('\"[ ")
    parts = [each for each in first.split("/") if not re.fullmatch(_NAMES["unnamed"], each)]
    return "/".join(parts[-2:]) if key == MODEL else first


def _length(values: Values, length: int, answer: int) -> int:
    """Tokens of a prompt and its answer, 0 if either is unknown.

    length: the file's length of a sequence, which such programs apply to the prompt.
    answer: the program's default length of an answer, 0 for none.
    """
    prompt, answer = _first(values, _NAMES["prompts"]) or length, _first(values, _NAMES["answers"]) or answer
    return _first(values, _NAMES["wholes"]) or (prompt + answer if prompt and answer else 0)


def _first(values: Mapping[str, Value], keys: Sequence[str]) -> int:
    return int(next((text[:9] for key in keys if (text := str(values.get(key, ""))).isdecimal()), "0"))
