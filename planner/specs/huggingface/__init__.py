"""Hugging Face `config.json`: read as JSON, translated by a table for each `model_type`, never executed.

A key has the meaning and the default that the model type's class in the transformers library gives it. A key that
concerns attention or experts and that no table reads is an error, never a guess.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from planner.errors import InputError
from planner.specs.huggingface.config import Config
from planner.specs.huggingface.images import join_of
from planner.specs.huggingface.table import defaults, row, table
from planner.specs.text import did_you_mean, printable, quoted
from planner.specs.yaml import MAX_DEPTH, MAX_NODES, document_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from planner.specs.huggingface.images import Join
    from planner.specs.yaml import Node

CONFIG_NAME: Final = "config.json"
_CONCERNS: Final = re.compile(r"attn|attention|head|expert|moe|router|window|lora|kv|qk|layer|norm|mlp|ffn|bias|sink")
"""Parts of key names; a key with one of them may change the number of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """A model document made from a config.json; each value has the position of its key in the file.

    notes: sentences for the user about parts of the file that were not read.
    """

    tree: Node
    notes: tuple[str, ...]


def read_config(path: Path, name: str = "") -> HuggingFaceModel:
    """Read a config.json; messages call the file `name`.

    Raises:
        InputError: the file is missing, is not strict JSON, has an unknown model_type, or has keys that no table reads.
        EnvironmentProblem: the file cannot be read.
    """
    shown = printable(name or str(path))
    return config_from_text(document_text(path, shown), shown, model_name(path))


def config_from_text(text: str, shown: str, model_name: str = "model") -> HuggingFaceModel:
    """The model document from the text of a config.json; messages call the file `shown`.

    Raises:
        InputError: the text is not strict JSON, or has an unknown model_type or keys that no table reads.
    """
    outer = _parse(text, shown)
    whole = Config(name=shown, text=text, values=outer)
    for key in ("text_config", "vision_config", "audio_config"):
        whole.part(key)
    join = _join(whole)
    config, notes = join.text if join else whole, []
    if join is None and isinstance(outer.get("text_config"), dict):
        inner = {**outer["text_config"]}
        inner.setdefault("model_type", f"{outer.get('model_type')}_text")
        if "tie_word_embeddings" in outer and not _is_text_model(outer):
            inner["tie_word_embeddings"] = outer["tie_word_embeddings"]
        config = Config(name=shown, text=text, values=inner, inside=("text_config",))
        notes.append("only text_config is read: what surrounds the text model is neither counted nor priced")
    if isinstance(outer.get("audio_config"), dict):
        notes.append("audio_config is not read: a tower for sound is neither counted nor priced")
    if outer.get("auto_map"):
        notes.append("auto_map names code that comes with the checkpoint: it is not run, the model_type decides")
    _check_type(config)
    _fill_in(config)
    config.put("name", model_name, "model_type")
    row(str(config.values["model_type"])).translate(config)
    _refuse_unread(config)
    if join is not None:
        join.add_vision()
        _refuse_unread(join.tower)
    notes += config.notes
    if outer.get("quantization_config"):
        notes.append("quantization_config is not read: the plan trains in the precision that it is asked for")
    return HuggingFaceModel(tree=config.tree(), notes=tuple(notes))


def _join(whole: Config) -> Join | None:
    """The three parts of the file of a model that reads images; None for other models.

    Raises:
        NotInTable: no row reads the tower.
    """
    outer = whole.values
    if not isinstance(outer.get("vision_config"), dict) or _is_text_model(outer):
        return None
    join = join_of(outer, whole.name, whole.text)
    if join is None:
        kind = outer["vision_config"].get("model_type", outer.get("model_type"))
        hint = 'if `architectures` names a class that ends in "ForCausalLM", the text alone is read'
        whole.unsupported("vision_config", f"no table reads images with model_type {quoted(kind)}", hint)
    return join


def _is_text_model(outer: dict[str, Any]) -> bool:
    """Whether `architectures` names only the text model; then only the text model's own keys are read."""
    names = outer.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)


def _parse(text: str, name: str) -> dict[str, Any]:
    """Parse strict JSON: no comments, no NaN, no repeated keys, and the nesting and length limits of our documents.

    Infinity is read, in Python's spelling, because Mamba's files limit time steps to infinity.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{quoted(twice)} is given twice", where=name, hint="keep one of them")
        return found

    def constant(written: str) -> float:
        if written == "NaN":
            raise InputError("NaN is not a finite number", where=name)
        return float(written)

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise InputError(f"this is not valid JSON: {error.msg}", where=where) from None
    except RecursionError:
        raise InputError(f"nested more than {MAX_DEPTH} levels deep", where=name) from None
    except ValueError:  # more digits than Python converts
        raise InputError("a number is too long", where=name) from None
    if not isinstance(data, dict):
        raise InputError("expected an object with keys and values", where=name)
    if sum(1 for _ in _walk(data, name)) > MAX_NODES:
        raise InputError(f"more than {MAX_NODES} values", where=name)
    return data


def _walk(value: Any, name: str, depth: int = 1) -> Iterator[Any]:
    if depth > MAX_DEPTH:
        raise InputError(f"nested more than {MAX_DEPTH} levels deep", where=name)
    yield value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from _walk(child, name, depth + 1)


def _spell_anew(values: dict[str, Any]) -> None:
    """Rename older keys to the library's present spelling, and turn lists of layer numbers into lists of names."""
    for older, key in table()["older_keys"].items():
        if older in values:
            values[key] = values.pop(older)
    layers, attending = values.get("num_hidden_layers"), values.get("full_attn_idxs")
    mixing = values.pop("linear_attn_config", None) if isinstance(values.get("linear_attn_config"), dict) else {}
    if mixing:  # of Kimi Linear, which counts layers from 1
        attending = mixing.get("full_attn_layers")
        renamed = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        renamed["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        values.update({key: mixing[older] for older, key in renamed.items() if older in mixing})
    if values.get("layer_types") is None and type(layers) is int and isinstance(attending, list):
        first, other = (1, "linear_attention") if mixing else (0, "conv")
        numbers = range(first, min(layers, MAX_NODES) + first)
        values["layer_types"] = ["full_attention" if number in attending else other for number in numbers]


def _has_no_windows(config: Config) -> bool:
    """Whether all layers attend to all tokens, for a file without a list of layers."""
    unused = config.values.get("use_sliding_window") is False
    return unused or ("sliding_window" in config.values and config.values["sliding_window"] is None)


def _fill_in(config: Config) -> None:
    """Fill in the class's defaults of missing keys.

    Values that the class derives from other keys must be in the file.
    """
    _spell_anew(config.values)
    for older, (key, names) in table()["older_lists"].items():
        listed = config.values.get(older)
        if isinstance(listed, list) and config.values.get(key) is None:
            config.values[key] = [names.get(str(each), str(each)) for each in listed]
            del config.values[older]
    known = defaults().get(str(config.values["model_type"]), {"keys": {}, "follows": []})
    for key in known["follows"]:
        said = any(each in config.values for each in table()["another_way"].get(key, ()))
        if config.values.get(key) is None and not said and not (key == "layer_types" and _has_no_windows(config)):
            config.missing.append(key)
    config.values.update({**known["keys"], **config.values})


def _check_type(config: Config) -> None:
    """Refuse a file without a model_type, or with one that no row reads."""
    name, types = config.values.get("model_type"), table()["types"]
    if name is None:
        raise InputError("`model_type` is missing", where=config.name, hint="such as llama, qwen3_moe or nemotron_h")
    if not isinstance(name, str) or name not in types:
        config.unsupported("model_type", f"no table reads model_type {quoted(name)}", did_you_mean(str(name), types))


def _refuse_unread(config: Config) -> None:
    """Refuse unread keys, unless they are known to change neither parameters nor prices."""
    unread = [
        key
        for key, value in config.values.items()
        if key not in config.read and not _harmless().fullmatch(key) and value not in (None, False, 0, "", [], {})
    ]
    unknown = [key for key in unread if _CONCERNS.search(key)]
    if unknown:
        hint = f"keys of this model_type: {', '.join(sorted(config.read))}"
        words = "`{}` concerns the layers and is not read"
        raise InputError(*(config.mistake(key, words.format(printable(key, 60)), hint) for key in unknown))
    if unread:
        config.notes.append(f"not read: {printable(', '.join(sorted(unread)), 200)}")


@cache
def _harmless() -> re.Pattern[str]:
    """Keys that change neither parameters nor prices, unless a row reads them."""
    return re.compile("|".join(table()["harmless"].split()))


def model_name(path: Path) -> str:
    """The name of a model document that is made from a file: that of its folder, or of the file."""
    stem = path.resolve().parent.name if path.name == CONFIG_NAME else path.stem
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem)[:64] or "model"
