"""Run by an interpreter that has ms-swift: read words as `megatron sft` does, with all of its checks.

Stand-ins: `swift.megatron` begins without its patches of Megatron-Core's kernels, `initialize_megatron` notes the
number of ranks in place of starting them, and mcore-bridge, which needs Transformer Engine, is asked for no model.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

WORLD: list[int] = [1]


def begin(arguments: Any) -> None:
    arguments.rank, arguments.local_rank, arguments.world_size = 0, 0, WORLD[0]


def stand_in() -> None:
    """Modules in place of those that need a GPU."""
    spec = find_spec("swift")
    assert spec
    assert spec.origin
    meta = SimpleNamespace(is_multimodal=False)
    parts: dict[str, dict[str, Any]] = {
        "swift.megatron": {"__path__": [str(Path(spec.origin).with_name("megatron"))]},
        "swift.megatron.init": {"_patch_mcore_bridge": lambda: None},
        "swift.megatron.utils": {"initialize_megatron": begin},
        "mcore_bridge": {"__path__": []},
        "mcore_bridge.model": {"get_mcore_model_type": lambda *_: "gpt", "get_model_meta": lambda *_: meta},
    }
    for name, values in parts.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(values)


def main() -> None:
    """Answers for `[[ranks, [word, ...]], ...]` on standard input, as JSON: all values, by name."""
    os.environ.update(RANK="0", LOCAL_RANK="0", ACCELERATE_TORCH_DEVICE="cpu")
    import swift

    stand_in()
    from swift.megatron.arguments.sft_args import MegatronSftArguments
    from swift.utils import parse_args

    assert swift
    MegatronSftArguments._init_output_dir = lambda _: None
    answers = []
    for WORLD[0], words in json.loads(sys.stdin.read()):
        os.environ["WORLD_SIZE"] = str(WORLD[0])
        try:
            arguments, rest = parse_args(MegatronSftArguments, words)
            answers.append({**vars(arguments), "rest": rest})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the answer of one plan
            answers.append({"refused": f"{type(error).__name__}: {error}"})
    print(json.dumps(answers, default=str))  # noqa: T201


if __name__ == "__main__":
    main()
