"""A program, not a test: runs jobs from stdin, one JSON object a line, on freshly forked ranks.

Importing torch takes seconds and a fork takes milliseconds, so all compositions share one import.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import traceback
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
from torch.distributed.fsdp import FSDPModule

from planner.cost.ledger import LineName
from planner.plan import Plan
from planner.plan_file import plan_from_json
from planner.trainer import checkpoint, parallelize
from planner.trainer import train as train_loop
from planner.trainer.attention import Attention
from planner.trainer.context_parallel import held_positions
from planner.trainer.data import open_corpus
from planner.trainer.expert_parallel import mixtures_of
from planner.trainer.feed_forward import BALANCE
from planner.trainer.measure import MemoryMeter, measurements
from planner.trainer.model import Transformer, initial_value
from planner.trainer.options import RunOptions
from planner.trainer.parallelize import compile_layers, initialize
from planner.trainer.train import run
from planner.trainer.trainer import Trainer
from planner.trainer.waiting import WaitSampler

FORK = multiprocessing.get_context("fork")


def corpus_of(plan: Plan, job: dict[str, Any]) -> Any:
    training = plan.training
    return open_corpus(
        tuple(job.get("data", ())),
        sequence_length=training.sequence_length,
        vocab_size=plan.model.vocab_size,
        seed=training.seed,
        validation=job.get("validation", 0.0),
        document_mask=job.get("document_mask", False),
    )


def make_trainer(plan: Plan, job: dict[str, Any]) -> Trainer:
    parallelize.SMALL_BYTES = job.get("small_bytes", parallelize.SMALL_BYTES)
    return Trainer(plan, corpus_of(plan, job), torch.device("cpu"), num_steps=job["steps"])


def wrong_loss_scale(trainer: Trainer) -> None:
    trainer.executor.loss.num_tokens *= 2


def wrong_pipeline_scale(trainer: Trainer) -> None:
    trainer.executor.schedule.scale_grads = True


def wrong_data_position(trainer: Trainer) -> None:
    """One rank reads its data one sample further on."""
    if dist.get_rank() == 1:
        batch = trainer.corpus.batch
        trainer.corpus.batch = lambda first, count: batch(first + 1, count)


def wrong_seed(trainer: Trainer) -> None:
    """One stage starts from other random numbers."""
    if dist.get_rank() == 1:
        other = replace(trainer.plan, training=trainer.plan.training.model_copy(update={"seed": 7}))
        for chunk in trainer.chunks:
            initialize(chunk, other, trainer.device)


def wrong_sequence_position(trainer: Trainer) -> None:
    """Every rank uses the positions of rank 0 for its rows."""
    for module in trainer.chunks[0].modules():
        if isinstance(module, Attention):
            module.held = held_positions(trainer.plan.training.sequence_length, trainer.plan.layout.cp, 0)


def swapped_experts(trainer: Trainer) -> None:
    """The tokens of one rank go to the other rank's experts."""
    if dist.get_rank() == 1:
        for mixture in mixtures_of(trainer.chunks[0]):
            mixture.router.register_forward_hook(lambda _, __, scores: scores.roll(4, -1))


FAULTS = {
    each.__name__: each
    for each in (
        wrong_loss_scale,
        wrong_pipeline_scale,
        wrong_data_position,
        wrong_seed,
        wrong_sequence_position,
        swapped_experts,
    )
}


def steps(plan: Plan, job: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    trainer = make_trainer(plan, job)
    trainer.scale.factor = job.get("loss_scale", trainer.scale.factor)
    if "fault" in job:
        FAULTS[job["fault"]](trainer)
    results = [trainer.step()]
    if "compile" in job:
        trainer.compile_layers(job["compile"])
    results += [trainer.step() for _ in range(job["steps"] - 1)]
    if "compile" in job:
        frames = torch._dynamo.utils.counters["frames"]
        assert frames["ok"], "nothing was compiled"
    return [(result.loss, result.grad_norm) for result in results]


def reference(plan: Plan, job: dict[str, Any]) -> list[tuple[float, float]]:
    """The same job without any parallelism: one module, the whole batch at once, torch's plain AdamW."""
    training, spec = plan.training, plan.model
    model = Transformer(spec)
    for name, parameter in model.named_parameters():
        parameter.data = initial_value(name, parameter.shape, spec, seed=training.seed)
    model.tie()
    for mixture in mixtures_of(model):
        mixture.balance_weight = BALANCE / training.global_batch_size
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if p.ndim >= 2 and not name.endswith("bias")]
    others = [p for name, p in named.items() if p.ndim < 2 or name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        foreach=False,
        fused=False,
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / training.warmup_steps, 1.0, training.warmup_steps - 1),
            torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer,
                job["steps"] - training.warmup_steps,
                eta_min=training.learning_rate * training.min_learning_rate_ratio,
            ),
        ],
        milestones=[training.warmup_steps - 1],
    )
    corpus, history = corpus_of(plan, job), []
    for step in range(job["steps"]):
        tokens, targets = corpus.batch(step * training.global_batch_size, training.global_batch_size)
        logits = model(tokens) if corpus.document_end is None else documents_apart(model, tokens, corpus.document_end)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip, foreach=False)
        history.append((float(loss.detach()), float(norm)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return history


def documents_apart(model: Transformer, tokens: torch.Tensor, end: int) -> torch.Tensor:
    """The logits of rows of packed documents, each document computed as if it were alone."""
    rows = []
    for row in tokens:
        behind = [int(at) + 1 for at in (row == end).nonzero()]
        cuts = [0, *(at for at in behind if at < len(row)), len(row)]
        rows.append(torch.cat([model(row[None, a:b])[0] for a, b in itertools.pairwise(cuts)]))
    return torch.stack(rows)


def die_in_save(moment: str) -> None:
    """Have this rank killed at a given moment of its next save."""
    functions = {
        "before its shard": "save_tensors",
        "before the hashes": "_hash_own_files",
        "before the state": "_commit",
        "before the manifest": "write_json",
        "before the new name": "sync",
    }
    real = getattr(checkpoint, functions[moment])

    def deadly(*arguments: Any, **options: Any) -> Any:
        first = arguments[0]
        if moment == "before the manifest" and first.name != checkpoint.MANIFEST:
            return real(*arguments, **options)
        if moment == "before the new name" and not first.is_dir():
            return real(*arguments, **options)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(checkpoint, functions[moment], deadly)


def train(plan: Plan, job: dict[str, Any]) -> int:
    """A whole run with checkpoints, as `planner launch` starts it; returns its exit code."""
    if "stderr" in job:
        sys.stderr = Path(job["stderr"]).open("a", buffering=1)  # noqa: SIM115 # until the rank ends
    trainer = make_trainer(plan, job)
    if job.get("dying_rank") == dist.get_rank():
        die_in_save(job["die"])
    if job.get("poison_rank") == dist.get_rank():
        with torch.no_grad():
            next(iter(trainer.parameters().values())).to_local().fill_(float("nan"))
    if "file_limit" in job:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], job["file_limit"]))
    if "compile" in job:  # as if the device were a GPU
        train_loop.compiles = lambda *_: True
        trainer.compile_layers = lambda **_: compile_layers(trainer.chunks, job["compile"], async_tp=None)
    given = {name: Path(job[name]) for name in ("weights", "export") if name in job}
    given |= {
        field.name: job[field.name] for field in fields(RunOptions) if field.name in job and field.name not in given
    }
    given.pop("output", None)
    options = RunOptions(output=Path(job["output"]), **given)
    code = int(run(trainer, options))
    assert bool(torch._dynamo.utils.counters["frames"]["ok"]) == ("compile" in job)
    return code


def memory(plan: Plan, job: dict[str, Any]) -> dict[str, Any]:
    """Measured memory lines of one step."""
    trainer = make_trainer(plan, job)
    meter = MemoryMeter(trainer.chunks, trainer.optimizer)
    with meter.watch():
        result = trainer.step()
    lines = measurements(trainer, meter, [result])["memory"]
    return {str(name): lines[name]["num_bytes"] for name in MEASURED}


def waits(plan: Plan, job: dict[str, Any]) -> dict[str, list[str]]:
    """Ledger lines of the collectives that one step waits for, and the places of waits without a line."""
    trainer = make_trainer(plan, job)
    trainer.step()
    sampler, found = WaitSampler(plan.layout), {"lines": set(), "unknown": set()}

    def look(frame: Any, event: str, called: Any) -> None:
        if event != "c_call" or called.__name__ not in ("wait", "wait_tensor"):
            return
        line = sampler.line_of(frame)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        found["lines" if line else "unknown"].add(str(line) if line else place)

    sys.setprofile(look)
    trainer.step()
    sys.setprofile(None)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {kind: sorted(set().union(*(each[kind] for each in everyone))) for kind in found}


def prefetched(plan: Plan, job: dict[str, Any]) -> dict[str, list[list[str]]]:
    """For each FSDP2 unit of a chunk, the units that it gathers ahead, in the forward and in the backward pass."""
    (chunk,) = make_trainer(plan, job).chunks
    name_of = {module._get_fsdp_state(): name or "all" for name, module in chunk.named_modules() if is_unit(module)}
    return {
        name: [
            [name_of[each] for each in states]
            for states in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
        ]
        for state, name in name_of.items()
    }


def is_unit(module: torch.nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def async_tp(plan: Plan, job: dict[str, Any]) -> list[bool]:
    """Whether torch's compiler may cut the collectives of tp into pieces: its switch, and the group's memory."""
    trainer = make_trainer(plan, job)
    group = trainer.mesh.get_group("tp").group_name
    before = [torch._inductor.config._micro_pipeline_tp, is_symm_mem_enabled_for_group(group)]
    trainer.compile_layers("eager", async_tp=True)
    return [*before, torch._inductor.config._micro_pipeline_tp, is_symm_mem_enabled_for_group(group)]


MEASURED = (LineName.PARAMS, LineName.GRADS, LineName.OPTIMIZER_STATE, LineName.ACTIVATIONS)
JOBS = {
    "steps": steps,
    "reference": reference,
    "train": train,
    "memory": memory,
    "waits": waits,
    "prefetched": prefetched,
    "async_tp": async_tp,
}


def rank_main(rank: int, job: dict[str, Any], store: str, answers: Any) -> None:
    plan = plan_from_json(json.dumps(job["plan"]))
    world = plan.layout.world_size
    torch.set_num_threads(1)
    faulthandler.enable()
    try:
        shared = dist.FileStore(store, world)
        dist.init_process_group("gloo", rank=rank, world_size=world, store=shared, timeout=timedelta(seconds=120))
        answer = {"result": JOBS[job["kind"]](plan, job)}
        dist.barrier()  # who leaves with bytes unread resets the connection, also for what the peer has yet to read
    except BaseException as error:  # noqa: BLE001 # the test that asked wants to see any of them
        answer = {"error": f"rank {rank}: {type(error).__name__}: {error}", "trace": traceback.format_exc()}
    answers.put((rank, json.dumps(answer)))
    os._exit(0)  # peers may be gone: no clean shutdown is wanted


def run_job(job: dict[str, Any]) -> str:
    """Result of rank 0, or the first error."""
    plan = plan_from_json(json.dumps(job["plan"]))
    world = plan.layout.world_size
    if plan.training.precision == "fp8":
        importlib.import_module("torchao.float8")  # takes seconds, and the ranks are forks
    answers = FORK.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [FORK.Process(target=rank_main, args=(r, job, f"{folder}/store", answers)) for r in range(world)]
        for each in ranks:
            each.start()
        found = {}
        for _ in ranks:
            rank, answer = answers.get()
            found[rank] = answer
            if "error" in json.loads(answer):
                break
        for each in ranks:
            if len(found) < world:
                each.kill()
            each.join()
    failed = [answer for answer in found.values() if "error" in json.loads(answer)]
    return failed[0] if failed else found[0]


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(run_job(json.loads(line)) + "\n")
        sys.stdout.flush()
