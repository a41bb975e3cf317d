"""Run by an interpreter that has LLaMA-Factory, under torchrun: train as `llamafactory.launcher` does, on a CPU.

Stand-ins as in own_files.py; memory is not pinned, and torchaudio, which only data of sounds need, is an empty module.
`make` in place of a file writes a small Llama with a tokenizer of bytes, and data, into the present folder.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 260, "max_position_embeddings": 128}  # fmt: skip


def make() -> None:
    import torch  # noqa: TID251 - of the other interpreter
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {each: place for place, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(letters, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained("model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained("model")
    rows = [{"instruction": f"count {n} " * 4, "input": "", "output": "one two three four " * 6} for n in range(64)]
    Path("ours.json").write_text(json.dumps(rows), encoding="utf-8")
    Path("dataset_info.json").write_text(json.dumps({"ours": {"file_name": "ours.json"}}), encoding="utf-8")


def train() -> None:
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    sounds = sys.modules["torchaudio"] = ModuleType("torchaudio")
    sounds.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    import deepspeed
    import llamafactory.hparams.parser
    import torch  # noqa: TID251 - of the other interpreter
    import transformers.training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from llamafactory.train.tuner import run_exp
    from transformers import Trainer

    assert deepspeed
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    llamafactory.hparams.parser.is_torch_bf16_gpu_available = lambda: True
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    step, seen = Trainer.training_step, []

    def noted(self: Any, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        loss = step(self, model, inputs, *arguments, **options)
        seen.append([list(inputs["input_ids"].shape), loss.item()])
        return loss

    Trainer.training_step = noted
    run_exp()
    Path(f"seen{os.environ['RANK']}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    make() if sys.argv[1] == "make" else train()
