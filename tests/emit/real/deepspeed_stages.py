"""DeepSpeed's pipelines on a machine without GPUs.

`python deepspeed_stages.py PROGRAM ...` runs an emitted program as it is, without the kernel that DeepSpeed would
compile for processes of one host. `python deepspeed_stages.py --losses < cases.json`, in a folder with the emitted
programs, tells for each config.json what the stages and what the whole model say, with the same weights.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]  # noqa: F401 - its modules are changed below
import torch  # noqa: TID251 - the program's own

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
sys.path.insert(0, ".")


def whole_model(config: dict[str, Any], attention: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = dict(config)
    built = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(built, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)  # norms and biases too
    return model


def of_stage(program: Any, model: Any, first: int, count: int) -> dict[str, Any]:
    """Weights of a stage's layers under their names in the stage, and all weights outside the layers."""
    path, layers, *_ = program.NAMES.get(model.config.model_type, ("model", "layers"))
    found = {}
    for name, value in model.get_submodule(path).state_dict().items():
        part, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        if part != layers:
            found[name] = value
        elif first <= int(number) < first + count:
            found[f"{layers}.{int(number) - first}.{rest}"] = value
    return found


@torch.no_grad()
def losses(program: Any, config: dict[str, Any], attention: str, counts: list[int]) -> dict[str, Any]:
    Path("config.json").write_text(json.dumps(config))
    settings = {"dtype": "float32", "attn_implementation": attention, "gradient_checkpointing": False}
    settings["pipeline"] = {"layers_per_stage": counts}
    model = whole_model(config, attention)
    tokens = torch.randint(config["vocab_size"], (2, 24))
    table = program.Table(settings)
    table.vectors.load_state_dict(model.get_input_embeddings().state_dict())
    pieces, hidden = [table], table(tokens)
    for stage, count in enumerate(counts):
        body = program.Body(settings, stage).eval()
        weights = of_stage(program, model, sum(counts[:stage]), count)
        body.decoder.load_state_dict({name: weights[name] for name in body.decoder.state_dict()})
        hidden = body(hidden)
        pieces.append(body)
    if model.config.tie_word_embeddings:
        logits = program.tied_head(table, hidden)
    else:
        head = program.Head(settings)
        head.product.load_state_dict(model.get_output_embeddings().state_dict())
        logits = head(hidden)
        pieces.append(head)
    _, labels = program.pair([{"input_ids": row} for row in tokens.tolist()])
    return {
        "staged": program.loss_of(model.config)(logits, labels).item(),
        "whole": model(tokens, labels=tokens).loss.item(),
        "staged_params": sum(each.numel() for piece in pieces for each in piece.parameters()),
        "whole_params": sum(each.numel() for each in model.parameters()),
    }


def main() -> None:
    if sys.argv[1] != "--losses":
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    import pipeline  # type: ignore[import-not-found]

    print(json.dumps([losses(pipeline, *case) for case in json.loads(sys.stdin.read())]))  # noqa: T201


if __name__ == "__main__":
    main()
