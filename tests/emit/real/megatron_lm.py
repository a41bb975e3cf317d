"""Megatron-LM's own parser on a machine without GPUs: stand-ins for what only a GPU could answer.

A process of its own: `python megatron_lm.py CHECKOUT < commands.json > understood.json`, or with --record the table of
defaults. commands: [world size, environment, words] of each command.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import typing
import warnings
from typing import Any

WITHOUT_A_GPU = ["--no-gradient-accumulation-fusion", "--no-rope-fusion"]


def plain(value: Any) -> Any:
    """A value in its JSON form."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else getattr(value, "name", str(value))


def arguments_module(checkout: str) -> Any:
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    import torch  # noqa: TID251 - the program's own

    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)  # type: ignore[assignment]
    sys.path.insert(0, checkout)
    warnings.simplefilter("ignore")
    from megatron.core.transformer import transformer_config  # type: ignore[import-not-found]
    from megatron.training import arguments  # type: ignore[import-not-found]

    arguments.get_device_arch_version = lambda: 9
    for module in (arguments, transformer_config):
        module.is_te_min_version = lambda *_, **__: True
    return arguments


def understood(arguments: Any, world: int, environment: dict[str, str], words: list[str]) -> dict[str, Any]:
    """Every argument after parsing and validation; also check that they can build the model's configuration."""
    from megatron.training import argument_utils  # type: ignore[import-not-found]

    of_release = argument_utils if hasattr(argument_utils, "core_transformer_config_from_args") else arguments
    os.environ.update({"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", **environment})
    sys.argv = ["pretrain_gpt.py", *words, *WITHOUT_A_GPU]
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            parsed = arguments.parse_args()
            before = {name: plain(value) for name, value in vars(parsed).items()}
            letters = parsed.pipeline_model_parallel_layout
            arguments.validate_args(parsed, {})
            config = of_release.core_transformer_config_from_args(parsed)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it has to say is the answer
        return {"refused": f"{type(error).__name__}: {error} {told.getvalue()[-500:]}"}
    after = {name: plain(value) for name, value in vars(parsed).items()}
    built = {name: plain(value) for name, value in vars(config).items()}
    return {"before": before, "after": {**after, "pipeline_model_parallel_layout": letters}, "config": built}


def defaults(arguments: Any) -> dict[str, Any]:
    """Name of each option -> its argument, the action and type, the number of values, and the argument's default."""
    import argparse

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = {}
    for action in parser._actions:
        kind = getattr(action.type, "__name__", "str")
        for option in action.option_strings:
            found[option] = [action.dest, type(action).__name__.strip("_"), kind, action.nargs, plain(action.default)]
    return found


def main() -> None:
    arguments = arguments_module(sys.argv[1])
    if "--record" in sys.argv:
        options = json.loads(sys.stdin.read())
        every = defaults(arguments)
        kept = {name: each for name, each in every.items() if name in options or each[0] in options}
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
        print(f"{{\n{lines}\n}}")  # noqa: T201
        return
    commands = json.loads(sys.stdin.read())
    answers = [understood(arguments, *command) for command in commands]
    print(json.dumps(answers))  # noqa: T201


if __name__ == "__main__":
    main()
