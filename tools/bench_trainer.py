"""Compare, on this machine, the trainer with a plain loop, and the planner's layout with all others (`make bench`).

Compared programs run alternately, and ratios are medians over these repetitions, so that other work on the machine
affects all programs equally. On a busy machine the CPU seconds of the slowest rank are more reliable than the wall
seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from planner.errors import InputError
from planner.layout_text import parse_layout
from planner.plan import Plan
from planner.search.given import plan_for_layout
from planner.search.search import search
from planner.search.space.constraints import Constraints
from planner.specs.load import load_job
from planner.specs.uniform import uniform_job
from planner.trainer.data import open_corpus
from planner.trainer.model import Transformer
from planner.trainer.obstacles import check_plan
from planner.trainer.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from planner.specs.job import PoolJob
    from planner.trainer.data import Corpus

MODELS = ("tiny-gpt", "tiny-llama")
SEQUENCE_LENGTH, BATCH = 128, 32
TURNS = 15
MOST_OVERHEAD, MOST_ABOVE_FASTEST = 1.10, 1.05
NUM_CORES = 2
FORK = multiprocessing.get_context("fork")  # torch is imported once
WARMUP_STEPS, STEPS = 1, 3
NEAR = (1.5, 1.25)  # layouts above these multiples of the least CPU seconds are dropped after turns 1 and 2
LAYOUT_TURNS, SHOWN = 7, 8


def local_job(model: str, num_cores: int) -> PoolJob:
    """The job to train: fp32, on `num_cores` cores of this machine."""
    job = load_job(
        model=model,
        cluster="local-cpu",
        engine="torch",
        gpus=num_cores,
        sequence_length=SEQUENCE_LENGTH,
        global_batch_size=BATCH,
    )
    return uniform_job(job)


def corpus_of(plan: Plan) -> Corpus:
    """The trainer's own small corpus."""
    training = plan.training
    return open_corpus(
        (), sequence_length=training.sequence_length, vocab_size=plan.model.vocab_size, seed=training.seed
    )


def on_ranks(work: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """The result of `work` on each of `num_ranks` forked ranks with a gloo process group.

    Raises RuntimeError if a rank fails.
    """
    answers = FORK.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:

        def rank_main(rank: int) -> None:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=f"file://{folder}/store")
            try:
                answer = work(*arguments)
            except Exception as error:  # noqa: BLE001 # told by the parent
                answer = repr(error)
            answers.put(answer)
            os._exit(0)  # peers may be gone

        ranks = [FORK.Process(target=rank_main, args=(rank,)) for rank in range(num_ranks)]
        for each in ranks:
            each.start()
        found = [answers.get() for _ in ranks]
        for each in ranks:
            each.join()
    failed = [answer for answer in found if isinstance(answer, str)]
    if failed:
        raise RuntimeError(failed[0])
    return found


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def plain_loop(plan: Plan, corpus: Corpus) -> Callable[[], None]:
    """One step of a plain loop: the same model, batches and optimizer, replicated if there are several ranks."""
    training, num_rows = plan.training, BATCH // dist.get_world_size()
    model = replicated(Transformer(plan.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, fused=True)
    steps = itertools.count()

    def step() -> None:
        batch = corpus.batch(next(steps) * BATCH + dist.get_rank() * num_rows, num_rows)
        microbatches = list(zip(*(torch.split(each, plan.layout.mbs) for each in batch), strict=True))
        for left, (inputs, wanted) in zip(reversed(range(len(microbatches))), microbatches, strict=True):
            with unsent(model) if left else contextlib.nullcontext():
                loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten())
                torch.autograd.backward(loss * len(inputs) / num_rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def replicated(model: torch.nn.Module) -> torch.nn.Module:
    """The model, under DistributedDataParallel if there are several ranks."""
    return DistributedDataParallel(model) if dist.get_world_size() > 1 else model


def unsent(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """A block whose gradients stay on their rank."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


Pair = tuple[tuple[float, float], tuple[float, float]]
"""Wall and CPU seconds of a step of one program, and of a step of its yardstick, which ran next to it."""


def overhead(plan: Plan) -> list[Pair]:
    """The trainer's steps beside those of a plain loop; called on every rank."""
    corpus = corpus_of(plan)
    trainer, plain = Trainer(plan, corpus, torch.device("cpu"), num_steps=TURNS), plain_loop(plan, corpus)
    return [(timed(trainer.step), timed(plain)) for _ in range(TURNS)][WARMUP_STEPS:]


def ratios(ranks: list[list[Pair]]) -> tuple[float, float]:
    """Median ratio of the slowest rank's wall seconds, and of all ranks' CPU seconds."""
    turns = list(zip(*ranks, strict=True))
    walls = (max(own[0] for own, _ in turn) / max(other[0] for _, other in turn) for turn in turns)
    cpus = (sum(own[1] for own, _ in turn) / sum(other[1] for _, other in turn) for turn in turns)
    return statistics.median(walls), statistics.median(cpus)


def shapes() -> Iterator[tuple[int, str, int]]:
    """Number of ranks, model and microbatch size of the compared steps."""
    for num_ranks, model in itertools.product((1, NUM_CORES), MODELS):
        for mbs in (BATCH // num_ranks, 8, 4):
            yield num_ranks, model, mbs


def overhead_table() -> Table:
    """The time of the trainer's step divided by a plain loop's, on one core and on two."""
    table = Table(
        "ranks", "model", "mbs", "wall", "CPU", "target", title=f"trainer / plain loop, median of {TURNS - 1} pairs"
    )
    for num_ranks, model, mbs in shapes():
        job = local_job(model, num_ranks)
        layout = parse_layout(f"dp={num_ranks},mbs={mbs}", num_layers=job.model.num_layers, num_devices=num_ranks)
        wall, cpu = ratios(on_ranks(overhead, num_ranks, plan_for_layout(job, layout)))
        table.add_row(str(num_ranks), model, str(mbs), f"{wall:.2f}", f"{cpu:.2f}", f"{MOST_OVERHEAD:.2f}")
    return table


def with_layout(job: PoolJob, text: str) -> tuple[PoolJob, Any]:
    """The job and the layout of a text, for `plan_for_layout`."""
    return job, parse_layout(text, num_layers=job.model.num_layers, num_devices=1)


def all_layouts(job: PoolJob, num_cores: int) -> Iterator[Plan]:
    """A plan of every layout that the trainer can run here. Recompute is left out: it only makes the step longer."""
    sharded = [f"dp={num_cores},zero={zero}" for zero in range(4)] + [f"cp={num_cores},zero={zero}" for zero in (0, 1)]
    staged = [f"pp={num_cores},schedule={name}" for name in ("1f1b", "gpipe", "zbv", "dualpipev")]
    ways = ["dp=1", f"tp={num_cores}", *sharded, *staged, f"pp={num_cores},interleave=2"]
    sizes = [2**power for power in range(BATCH.bit_length())]
    for way, mbs in itertools.product(ways, sizes):
        try:
            plan = plan_for_layout(*with_layout(job, f"{way},mbs={mbs}"))
            check_plan(plan)
        except InputError:
            continue
        yield plan


def step_seconds(plan: Plan) -> tuple[float, float]:
    """Least wall and CPU seconds of some steps; called on every rank."""
    trainer = Trainer(plan, corpus_of(plan), torch.device("cpu"), num_steps=STEPS)
    for _ in range(WARMUP_STEPS):
        trainer.step()
    runs = [timed(trainer.step) for _ in range(STEPS)]
    return min(wall for wall, _ in runs), min(cpu for _, cpu in runs)


def measured(plan: Plan) -> tuple[float, float]:
    """Wall and CPU seconds of a step on the slowest rank."""
    walls, cpus = zip(*on_ranks(step_seconds, plan.layout.world_size, plan), strict=True)
    return max(walls), max(cpus)


def layouts_table(model: str, num_cores: int = NUM_CORES) -> Table:
    """The planner's layout compared with the fastest of all layouts that run here."""
    chosen = search(local_job(model, num_cores), Constraints())
    assert isinstance(chosen, Plan)
    own = short(chosen)
    plans = {short(plan): plan for plan in all_layouts(local_job(model, num_cores), num_cores)} | {own: chosen}
    title = f"{model}: {len(plans)} layouts on {num_cores} cores"
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for turn in range(LAYOUT_TURNS):
        for name, plan in plans.items():
            turns[name].append(measured(plan))
        if turn < len(NEAR):
            least = min(median(turns[name], 1) for name in plans)
            plans = {
                name: p for name, p in plans.items() if name == own or median(turns[name], 1) <= NEAR[turn] * least
            }
    table = Table("layout", "wall ms", "CPU ms", "wall / planner's", "CPU / planner's", title=title)
    for name in sorted(plans, key=lambda name: median(turns[name], 0))[:SHOWN]:
        pairs = list(zip(turns[name], turns[own], strict=True))
        figures = [f"{1000 * median(turns[name], column):.0f}" for column in (0, 1)]
        figures += [
            f"{statistics.median(one[column] / other[column] for one, other in pairs):.2f}" for column in (0, 1)
        ]
        table.add_row(f"{name}{'  <- planned' if name == own else ''}", *figures)
    table.caption = f"ratios: medians over {LAYOUT_TURNS} turns; target: none below {1 / MOST_ABOVE_FASTEST:.2f}"
    return table


def short(plan: Plan) -> str:
    """The layout's degrees as text, without degrees of 1 and keys that follow from the degrees."""
    layout = plan.layout
    degrees = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "interleave")}
    parts = [f"{name}={value}" for name, value in degrees.items() if value > 1] or ["one process"]
    parts += [f"zero={layout.zero}"] * (layout.dp * layout.cp > 1) + [layout.schedule] * (layout.pp > 1)
    return ", ".join([*parts, f"mbs={layout.mbs}"])


def median(runs: list[tuple[float, float]], column: int) -> float:
    """Median of one of two columns."""
    return statistics.median(run[column] for run in runs)


def trainer_tables() -> Iterator[Table]:
    """All tables of this module, one at a time."""
    yield overhead_table()
    for model in MODELS:
        yield layouts_table(model)


if __name__ == "__main__":
    from rich.console import Console

    for each in trainer_tables():
        Console(width=110).print(each)
