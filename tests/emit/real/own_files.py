"""Run by an interpreter that has LLaMA-Factory or Axolotl: read each folder's own file as the program does.

Stand-ins for LLaMA-Factory: the CPU passes for a device with bf16, gloo for a backend of GPUs, and DeepSpeed does not
compile its kernel for processes of one host. Axolotl's schema is told of eight H100.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

H100 = {"bf16": True, "fp8": True, "n_gpu": 8, "n_node": 1, "compute_capability": "sm_90"}


def of_llama_factory(path: Path) -> dict[str, Any]:
    """All that the program's parser leaves of its file, one dictionary: first what it keeps under the same name."""
    from llamafactory.hparams import get_train_args

    os.chdir(path.parent)
    sys.argv = ["launcher.py", path.name]
    parts = get_train_args()
    found = {key: value for part in reversed(parts) for key, value in vars(part).items()}
    return found | {"compute_dtype": str(parts[0].compute_dtype)}


def stand_in() -> None:
    """Make a CPU pass for the devices of the plan."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    import deepspeed
    import llamafactory.hparams.parser
    import transformers.training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    assert deepspeed
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    llamafactory.hparams.parser.is_torch_bf16_gpu_available = lambda: True
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def of_axolotl(path: Path) -> dict[str, Any]:
    """All values of the program's schema, with its checks; and keys of the file that the schema has not."""
    import torch  # noqa: TID251 - of the other interpreter
    import yaml
    from axolotl.utils.schemas.config import AxolotlConfigWCapabilities as Schema

    os.chdir(path.parent)
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    beside = {"capabilities": H100, "env_capabilities": {"torch_version": torch.__version__.partition("+")[0]}}
    return Schema(**given, **beside).model_dump() | {"unknown": sorted({*given} - {*Schema.model_fields})}


def main() -> None:
    """Answers for `[path, ...]` on standard input, as JSON; the first argument is the program."""
    logging.disable(logging.CRITICAL)
    program, paths, answers = sys.argv[1], json.loads(sys.stdin.read()), []
    if program == "llama-factory":
        stand_in()
    read = {"llama-factory": of_llama_factory, "axolotl": of_axolotl}[program]
    for path in paths:
        try:
            answers.append(read(Path(path)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the answer of one file
            answers.append({"refused": f"{type(error).__name__}: {error}"})
    print(json.dumps(answers, default=str))  # noqa: T201


if __name__ == "__main__":
    main()
