"""Write planner/specs/huggingface_defaults.json: values for keys that a config.json leaves out, from recorded defaults.

    python tools/hf_defaults.py

The command reads tests/published/huggingface_types.json, which tools/hf_counts.py writes. For each type it keeps the
optional keys that the type's row reads, except sizes that a file must state. `follows` lists keys that the library
computes from other keys; a file must state such a key or express it in another way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.specs.huggingface_config import Config
from planner.specs.huggingface_types import NEEDED, TYPES
from planner.specs.huggingface_vision import OUTER_KEYS, PROJECTORS, TOWER_KEYS, TOWERS

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "published" / "huggingface_types.json"
TARGET = ROOT / "planner" / "specs" / "huggingface_defaults.json"
NEVER = {"model_type", "architectures", "rope_theta", "rope_parameters", "rope_scaling"}
WORKED_OUT = {"head_dim", "num_key_value_heads", "qk_head_dim", "full_attn_idxs", "moe_layer_end_index", "mamba_d_head"}
WORKED_OUT |= {"kv_channels", "num_query_groups"}
STATED = {"moe.num_experts", "moe.experts_per_token", *NEEDED}


def main() -> None:
    """Write the file: a line for each type, for each image tower, and for the outer keys of each type with a tower."""
    recorded = json.loads(RECORDED.read_text())
    lines: list[str] = []
    inside: dict[str, Any] = {}
    for name, each in sorted((_texts(recorded["image_text"]) | recorded["causal"]).items()):
        row = TYPES.get(name)
        if row is None or not row.recorded or "config" not in each:
            continue
        config = Config(name=name, text="", values=each["config"])
        row.translate(config)
        stated = {word for key, target in row.keys.items() if target in STATED for word in key.split("|")}
        read = config.read - NEVER - stated - set(each["follows"])
        kept = {key: value for key, value in sorted(each["config"].items()) if key in read and value is not None}
        follows = sorted(set(each["follows"]) & config.read & set(each["config"]) - stated - WORKED_OUT)
        lines.append(f'"{name}": {json.dumps({"keys": kept, "follows": follows})}')
    for name, each in sorted(recorded["towers"].items()):
        if name in TOWERS:
            config = Config(name=name, text="", values=dict(each["config"]))
            TOWERS[name].translate(config)
            kept = {
                key: each["config"][key] for key in sorted(TOWER_KEYS | config.read) if _is_kept(each["config"], key)
            }
            lines.append(f'"tower:{name}": {json.dumps({"keys": kept})}')
    for name, each in sorted(recorded["image_text"].items()):
        if name in PROJECTORS and (outer := each.get("config")):
            kept = {key: value for key, value in sorted(outer.items()) if key in OUTER_KEYS and value is not None}
            kinds = {part: (outer.get(f"{part}_config") or {}).get("model_type", "") for part in ("vision", "text")}
            found = {"keys": kept, "tower": kinds["vision"], "text": kinds["text"]}
            inside |= {kinds["text"]: outer["text_config"]} if kinds["text"] in TYPES else {}
            lines.append(f'"outer:{name}": {json.dumps(found)}')
    for name, first in sorted(inside.items()):
        text = recorded["causal"].get(name, {}).get("config", first)  # the type's own class, if there is one
        words = {word for key in TYPES[name].keys for word in key.split("|")}
        sizes = {key: text[key] for key in sorted(words) if _is_kept(text, key) and type(text[key]) is int}
        lines.append(f'"nested:{name}": {json.dumps(sizes)}')
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


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
