"""What a missing key of a config.json means: planner/specs/huggingface_defaults.json, from recorded defaults.

    python tools/hf_defaults.py

reads tests/published/huggingface_types.json (tools/hf_counts.py) and keeps, of each type, the keys that its row reads
and that may be missing: no sizes that a file must state. follows: keys that the library works out from others, which
a file must state or say in another way.
"""

from __future__ import annotations

import json
from pathlib import Path

from planner.specs.huggingface_config import Config
from planner.specs.huggingface_types import NEEDED, TYPES

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "published" / "huggingface_types.json"
TARGET = ROOT / "planner" / "specs" / "huggingface_defaults.json"
NEVER = {"model_type", "architectures", "rope_theta", "rope_parameters", "rope_scaling"}
WORKED_OUT = {"head_dim", "num_key_value_heads", "qk_head_dim", "full_attn_idxs", "moe_layer_end_index", "mamba_d_head"}
STATED = {"moe.num_experts", "moe.experts_per_token", *NEEDED}


def main() -> None:
    """Write the file: a line for each type."""
    lines = []
    for name, each in sorted(json.loads(RECORDED.read_text())["causal"].items()):
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
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
