"""Primus' own parser and builder of arguments on a machine without GPUs, and Megatron-LM's checks of what they build.

A process of its own: `python primus_arguments.py PRIMUS < jobs.json > understood.json`, with a checkout of Primus and
of its submodule third_party/Megatron-LM. jobs: [world size, environment, experiment's file] of each plan; answers as
those of megatron_lm.py, `unknown`: overrides that are no argument of Megatron-LM, which Primus drops in silence, and
`files`: what Primus' own files say of arguments that the experiment does not name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from megatron_lm import arguments_module, plain, understood

WITHOUT_A_GPU = {"gradient_accumulation_fusion": False, "apply_rope_fusion": False}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, sys.argv[1])
    arguments = arguments_module(f"{sys.argv[1]}/third_party/Megatron-LM")
    from primus.backends.megatron.argument_builder import MegatronArgBuilder  # type: ignore[import-not-found]
    from primus.backends.megatron.patches.args.rocm_arg_validation import (  # type: ignore[import-not-found]
        validate_args_on_rocm,
    )
    from primus.core.launcher.parser import PrimusParser  # type: ignore[import-not-found]
    from primus.core.patches import run_patches  # type: ignore[import-not-found]

    def built(path: str) -> tuple[Any, dict[str, Any]]:
        """Arguments as Primus' trainer hands them to Megatron-LM, and what is to be told beside them."""
        experiment = PrimusParser().parse(SimpleNamespace(config=Path(path)))
        module = experiment.get_module_config("pre_trainer")
        overrides = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["modules"]["pre_trainer"]["overrides"]
        files = {key: plain(value) for key, value in vars(module).items() if key not in overrides}
        found = MegatronArgBuilder().update({**vars(module), **WITHOUT_A_GPU}).finalize()
        module.params = module
        seen = {"backend_args": found, "primus_config": experiment, "module_config": module, "runtime_state": None}
        run_patches(backend="megatron", phase="build_args", backend_version=None, model_name=None, extra=seen)
        unknown = sorted(key for key in overrides if not hasattr(found, key))
        vars(found).update({key: value for key, value in vars(module).items() if not hasattr(found, key)})
        return found, {"unknown": unknown, "files": files}

    validate = arguments.validate_args
    arguments.validate_args = lambda found, defaults: (validate(found, defaults), validate_args_on_rocm(found))
    answers = []
    for world, environment, path in json.loads(sys.stdin.read()):
        os.environ.update({"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"})
        found, beside = built(path)
        arguments.parse_args = lambda found=found: found
        answers.append(understood(arguments, world, environment, []) | beside)
    out.write(json.dumps(answers))
    out.flush()


if __name__ == "__main__":
    main()
