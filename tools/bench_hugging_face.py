"""Compare Hugging Face's Trainer with a plain loop over its own model, in the shapes of `tools/bench_trainer.py`.

It needs transformers and accelerate, which the environment `executed` of `tools/real_parsers.py` has:
`.real-parsers/executed/bin/python tools/bench_hugging_face.py`. The ratios are what those of our trainer are judged by.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from bench_trainer import BATCH, SEQUENCE_LENGTH, TURNS, on_ranks, ratios, replicated, shapes, timed, unsent
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from bench_trainer import Pair

VOCABULARY = 256
SAMPLES = BATCH * (TURNS + 2)


def model_of(name: str) -> Any:
    """Transformers' model with the sizes of our tiny model, without dropout."""
    if name == "tiny-gpt":
        sizes = {"n_positions": 256, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_inner": 512}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout))
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes))


def samples() -> list[dict[str, torch.Tensor]]:
    """Random tokens, which are their own labels."""
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Turns(transformers.TrainerCallback):  # type: ignore[misc] # its library has no types here
    """After each step of the Trainer, run and time a step of the plain loop."""

    def __init__(self, plain: Any) -> None:
        self.plain, self.pairs = plain, list[Any]()
        self.began: tuple[float, float] | None = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the Trainer's step that has just ended, then the plain loop's."""
        wall, cpu = time.perf_counter(), time.process_time()
        other = timed(self.plain)
        if self.began:
            self.pairs.append(((wall - self.began[0], cpu - self.began[1]), other))
        self.began = time.perf_counter(), time.process_time()


def overhead(name: str, mbs: int) -> list[Pair]:
    """The Trainer's steps beside those of a plain loop; called on every rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if num_ranks > 1:  # as torchrun sets them
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ.update({key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    data, accumulation = samples(), BATCH // num_ranks // mbs
    model = replicated(model_of(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    own: Any = data[rank::num_ranks]
    collate = transformers.default_data_collator
    loader = iter(torch.utils.data.DataLoader(own, batch_size=mbs, shuffle=True, collate_fn=collate))

    def plain() -> None:
        for left in reversed(range(accumulation)):
            with unsent(model) if left else contextlib.nullcontext():
                (model(**next(loader)).loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    turns = Turns(plain)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=mbs,
            gradient_accumulation_steps=accumulation,
            max_steps=TURNS,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            use_cpu=True,
            disable_tqdm=True,
        )
        assert arguments.world_size == num_ranks
        trainer = transformers.Trainer(
            model=model_of(name),
            args=arguments,
            train_dataset=data,
            data_collator=collate,
            callbacks=[turns],
        )
        trainer.train()
    return turns.pairs


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    table = Table("ranks", "model", "mbs", "wall", "CPU", title="Hugging Face Trainer / its plain loop")
    for each in shapes():
        seconds = ratios(on_ranks(overhead, each[0], *each[1:]))
        table.add_row(*map(str, each), *(f"{ratio:.2f}" for ratio in seconds))
    Console(width=110).print(table)
