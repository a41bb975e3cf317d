"""Write planner/specs/huggingface/defaults.json: values for keys that a config.json leaves out, from recorded defaults.

    python tools/hf_defaults.py

The command reads tests/published/huggingface_types.json, which tools/hf_counts.py writes. For each type it keeps the
optional keys that the type's row reads, except sizes that a file must state. `follows` lists keys that the library
computes from other keys; a file must state such a key or express it in another way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.specs.huggingface.config import Config
from planner.specs.huggingface.images import Join
from planner.specs.huggingface.table import row, table

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "published" / "huggingface_types.json"
TARGET = ROOT / "planner" / "specs" / "huggingface" / "defaults.json"
NEVER = {"model_type", "architectures", "rope_theta", "rope_parameters", "rope_scaling", "num_nextn_predict_layers"}
NEVER |= {"layer_types"}
WORKED_OUT = {"head_dim", "num_key_value_heads", "qk_head_dim", "full_attn_idxs", "moe_layer_end_index", "mamba_d_head"}
WORKED_OUT |= {"kv_channels", "num_query_groups", "num_kv_heads", "num_ln_in_parallel_attn", "word_embed_proj_dim"}
SAME = {"kimi_k2": "deepseek_v3"}
"""Types of checkpoints that the library reads with another type's class."""


def main() -> None:
    """Write the file: a line for each type, for each image tower, and for the outer keys of each type with a tower."""
    recorded = json.loads(RECORDED.read_text())
    lines: list[str] = []
    inside: dict[str, Any] = {}
    texts = _texts(recorded["image_text"]) | recorded["causal"]
    texts |= {name: texts[other] for name, other in SAME.items()}
    for name, each in sorted(texts.items()):
        if name not in table()["types"] or "config" not in each:
            continue
        config = _translated(each["config"], name)
        stated = {
            word for key, target in row(name).keys.items() if target in table()["needed"] for word in key.split("|")
        }
        read = config.read - NEVER - stated - set(each["follows"])
        kept = {key: value for key, value in sorted(each["config"].items()) if key in read and value is not None}
        follows = set(each["follows"]) & config.read & set(each["config"]) - stated - WORKED_OUT
        follows -= set(row(name).optional)
        lines.append(f'"{name}": {json.dumps({"keys": kept, "follows": sorted(follows)})}')
    towers: dict[str, set[str]] = {}
    for name, each in sorted(recorded["image_text"].items()):
        outer = each.get("config") or {}
        kinds = {part: (outer.get(f"{part}_config") or {}).get("model_type", "") for part in ("vision", "text")}
        if name not in table()["projectors"] or kinds["vision"] not in table()["towers"]:
            continue
        text = _translated(outer.get("text_config") or outer, kinds["text"] or name)
        join = Join(
            outer=Config(name=name, text="", values=outer),
            tower=Config(name=name, text="", values=outer["vision_config"]),
            text=text,
        )
        join.add_vision()
        towers.setdefault(kinds["vision"], set()).update(join.tower.read)
        kept = {key: outer[key] for key in sorted(join.outer.read | {"tie_word_embeddings"}) if _is_kept(outer, key)}
        kept = {key: value for key, value in kept.items() if not key.endswith("_config") or key == "perceiver_config"}
        found = {"keys": kept, "tower": kinds["vision"], "text": kinds["text"]}
        inside |= {kinds["text"]: outer["text_config"]} if kinds["text"] in table()["types"] else {}
        lines.append(f'"outer:{name}": {json.dumps(found)}')
    for name, keys in sorted(towers.items()):
        values = recorded["towers"][name]["config"]
        kept = {key: values[key] for key in sorted(keys | {"projection_dim"}) if _is_kept(values, key)}
        lines.append(f'"tower:{name}": {json.dumps({"keys": kept})}')
    for name, first in sorted(inside.items()):
        text_values = recorded["causal"].get(name, {}).get("config", first)  # the type's own class, if there is one
        words = {word for key in row(name).keys for word in key.split("|")}
        sizes = {key: text_values[key] for key in sorted(words) if _is_kept(text_values, key)}
        sizes = {key: value for key, value in sizes.items() if type(value) is int}
        lines.append(f'"nested:{name}": {json.dumps(sizes)}')
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _translated(values: dict[str, Any], name: str) -> Config:
    config = Config(name=name, text="", values=dict(values))
    row(name).translate(config)
    return config


def _is_kept(config: dict[str, Any], key: str) -> bool:
    return key not in NEVER and config.get(key) is not None


def _texts(recorded: dict[str, Any]) -> dict[str, Any]:
    """Text models that exist only inside other models, by type; a key is left out if two models disagree on it."""
    found: dict[str, Any] = {}
    for each in recorded.values():
        outer = each.get("config", {})
        text = outer.get("text_config") or outer
        if name := text.get("model_type"):
            before = found.get(name, {"config": text})["config"]
            found[name] = {"config": text, "follows": sorted(key for key in text if before.get(key) != text[key])}
            found[name]["follows"] += each["follows"] if text is outer else []
    return found


if __name__ == "__main__":
    main()
