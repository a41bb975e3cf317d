"""Dependencies between the stages of a pipeline: step time, bubble, and microbatches in flight.

Closed forms give the results. If a closed form is only a bound, `simulate.py` executes the schedule operation by
operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from planner.cost.compute import PassSeconds
    from planner.numbers import Flag, Number
    from planner.specs.recipe import Schedule

EXECUTED: Final = ("naive", "zb-h1", "zbv", "dualpipev")
"""Schedules that are priced by execution: `step_seconds` describes them only for equal stages, or not at all."""


def steady_seconds(num_microbatches: Number, slowest_stage_seconds: Number) -> Number:
    """Seconds that the slowest stage works: m t_max.

    Source: Narayanan et al. (SC 2021), section 2.2: the ideal time m (t_f + t_b).
    """
    return num_microbatches * slowest_stage_seconds


def steady_count(num_microbatches: Number, interleave: Number) -> Number:
    """The factor of the slowest stage's seconds in the time of a step: m - 1/v.

    The remaining 1/v belongs to filling and draining.

    Source: Narayanan et al. (SC 2021), section 2.2: m t_max + (sum_r t_r - t_max) / v, sorted by t_max.
    """
    return num_microbatches - 1 / interleave


def step_seconds(
    num_microbatches: Number,
    interleave: Number,
    slowest_seconds: Number,
    work_seconds: Number,
    tail_seconds: Number = 0.0,
) -> Number:
    """Seconds of a step: (m - 1/v) slowest + work / v + tail; `work_seconds`: one microbatch in all stages together.

    If the arguments are lower bounds, the result is a lower bound of the step, because it grows with each argument.

    Source: `steady_count`; the tail is the reduction of gradients and the optimizer after the last microbatch.
    """
    return steady_count(num_microbatches, interleave) * slowest_seconds + work_seconds / interleave + tail_seconds


def bubble_seconds(sum_of_stage_seconds: Number, slowest_stage_seconds: Number, interleave: Number) -> Number:
    """Seconds that the slowest stage waits for the pipeline to fill and drain: (sum_r t_r - t_max) / v.

    With equal stages this is (p - 1) t / v, so the bubble is (p - 1) / (v m) of the steady time. GPipe and 1F1B have
    the same bubble. `t_r` is the time of one microbatch through all chunks of stage r, forward and backward.

    The form is exact for equal stages (if interleaved, with microbatches in multiples of p), for GPipe with stages that
    differ by a factor, and for 1F1B if the slowest stage is the last. In 1F1B a slow early stage fills part of its wait
    with forward passes, so the form is too long, by less than one pass through the other stages. For GPipe the form is
    too short if forward and backward passes are slowest on different stages. `planner.cost.simulate` executes
    such cases. For unequal chunks within an interleaved stage, see `interleaved_bubble_seconds`.

    Source: Narayanan et al. (SC 2021), sections 2.2.1 and 2.2.2.
    """
    return (sum_of_stage_seconds - slowest_stage_seconds) / interleave


def chunk_terms(
    *,
    stage_seconds: Number,
    layer_seconds: Number,
    num_layers: Number,
    largest_chunk: Number,
    last_chunk: Number,
    end_seconds: Number,
    is_last: Flag,
    pp: Number,
    num_microbatches: Number,
    interleave: Number,
) -> tuple[Number, Number]:
    """Fill and slack of interleaved stages whose chunks differ, larger chunks first; for one microbatch.

    The chunks of a stage differ by a layer. Only the last chunk, if it holds an end of the model, may have fewer.

    stage_seconds: t_r.
    layer_seconds: w_r, for one layer of the stage.
    largest_chunk: q_r, the layers of the stage's largest chunk; every other chunk has as many layers or one less.
    last_chunk: e_r, the layers of the stage's last chunk.
    end_seconds: seconds of the stage's last chunk outside its layers: head and loss, and multi-token prediction.
    num_layers: k_r.
    interleave: v.
    pp: p.

    fill   v times the stage's part in the filling and draining of the pipeline: t_r + (v q_r - k_r) w_r, which is
           the stage's time if all its chunks were as large as the largest. When a round changes from larger to smaller
           chunks, the lag between first and last stage shrinks by the sum of the differences. If this sum exceeds a
           chunk, stages wait for the excess in each round but the first; each stage with unequal chunks has a share of
           this wait, max(0, w_r - q_r w_r / p). A last chunk with fewer layers than the others differ is counted by its
           whole time, e_r w_r and its end: the stage's time if this chunk took no less than the largest, and the
           difference between the largest and the shorter of it and the other chunks.
    slack  longest time that the model's last chunk may take before this stage waits in every microbatch: the time of
           the stage's own last chunk plus 1/p of its largest chunk, because between two rounds one chunk is already
           waiting. For the last stage, the time of the model's last chunk.

    Source: derived here; tested against executed schedules, as `interleaved_bubble_seconds` says.
    """
    smallest = num_layers // interleave
    largest, last = largest_chunk * layer_seconds, last_chunk * layer_seconds + end_seconds
    others, is_short = num_layers - last_chunk, np.less(last_chunk, smallest)
    of_others = np.where(others < largest_chunk * (interleave - 1), largest - layer_seconds, largest)
    even = np.greater(num_layers, smallest * interleave) * layer_seconds
    differ = np.where(is_short, np.maximum(0.0, largest - np.minimum(last, of_others)), even)
    missing = (interleave * largest_chunk - num_layers) * layer_seconds
    short = ((interleave - 1) * largest_chunk - others) * layer_seconds + np.maximum(0.0, largest - last)
    share = largest_chunk * layer_seconds / pp
    rounds = num_microbatches / round_size(pp, num_microbatches)
    stall = (rounds - 1) * np.maximum(0.0, differ - share)
    fill = stage_seconds + np.where(is_short, short, missing) + interleave * stall
    return fill, last + np.where(is_last, 0.0, share * (1 - 1 / rounds))


def cycle_seconds(stage_seconds: Number, slack_seconds: Number, last_chunk_seconds: Number) -> Number:
    """Seconds from one microbatch to the next on a stage: its own work plus its wait for the model's last chunk.

    Source: derived here, as `chunk_terms`.
    """
    return stage_seconds + np.maximum(0.0, last_chunk_seconds - slack_seconds)


def interleaved_bubble_seconds(
    stage_seconds: Number, fill_seconds: Number, slack_seconds: Number, num_microbatches: Number, interleave: Number
) -> Number:
    """Seconds that the slowest stage waits if stages are interleaved; all prices have shape (..., stages).

    m (b - t_max) + (sum_r fill_r - b) / v, where b is the bottleneck, the longest of `cycle_seconds`. If chunks are
    equal and no stage waits for the head, this is (sum_r t_r - t_max) / v. The form was compared with executed
    schedules in 6,000 random shapes with chunks that differ by a layer. Compared with the executed step, the step by
    this form was between 1 % shorter and 7 % longer in nine of ten shapes, and always between 9 % shorter and 20 %
    longer. The largest errors are for chunks of one or two layers beside a large head.

    Source: derived here; tested against executed schedules.
    """
    bottleneck = np.max(cycle_seconds(stage_seconds, slack_seconds, slack_seconds[..., -1:]), axis=-1)
    waits = num_microbatches * (bottleneck - np.max(stage_seconds, axis=-1))
    return waits + bubble_seconds(np.sum(fill_seconds, axis=-1), bottleneck, interleave)


def bubble_of(schedule: Schedule, passes: PassSeconds, *, num_microbatches: Number, interleave: Number = 1) -> Number:
    """Seconds that the slowest stage waits, under any schedule: the time of a step beyond m t_max.

    passes: F, I and W, the seconds of one microbatch through all chunks of a stage, forward and for the gradients of
    inputs and weights, with recomputed forward passes in I; shape (..., stages). A step ends with its last operation,
    because the norm of the gradients synchronizes all stages. The ZB-V paper reports a bubble of zero, because it
    measures each stage from the stage's own first operation.

    Forms for equal stages, for which they are exact:
    naive      m (p - 1) (F + I + W): a share of (p - 1) / p is idle; exact for unequal stages too
    gpipe, 1f1b  (p - 1) (F + I + W)
    interleaved  (p - 1) (F + I + W) / v, microbatches in equal rounds (`round_size`) of at least p
    zb-h1      (p - 1) (F + I - min(F, I, W)), m >= p; (p - 1) (F + I - W) where W is the shortest
    zbv        (p - 1) max(I / 2, I - W), if W <= F <= I and m >= 2 p - 1
    dualpipev  (p - 1) (F + 2 I - W) / 2 - min((p - 1) (I - F), F) / 2, if W <= F <= I: the published
               (PP / 2 - 1) (F&B + B - 3 W) of PP = 2 p chunks, minus its excess where I > F; here F&B = F + B
    pipedream  0: the pipeline is filled once and never drained

    With unequal stages the factor p - 1 becomes a sum over the other stages. The result is then an estimate; `simulate`
    gives the exact value.

    Source: Huang et al., GPipe (2019); Narayanan et al. (SC 2021), section 2.2; Qi et al., Zero Bubble (2023), table 2,
    and DeepSeek, DualPipe (README), both generalised by execution; Narayanan et al., PipeDream (SOSP 2019).
    """
    three = (passes.forward, passes.backward_input, passes.backward_weight)
    f, i, w = np.broadcast_arrays(*(np.asarray(each, dtype=float) for each in three))
    t = f + i + w
    m, slowest = np.asarray(num_microbatches), np.max(t, axis=-1)
    if schedule == "naive":
        return m * _of_others(t, t)
    if schedule in ("gpipe", "1f1b", "interleaved"):
        return bubble_seconds(np.sum(t, axis=-1), slowest, interleave)
    if schedule == "zb-h1":
        return _of_others(f + i - np.minimum(np.minimum(f, i), w), t)
    if schedule == "zbv":
        return _of_others(np.maximum(i / 2.0, i - w), t)
    if schedule == "dualpipev":
        overstated = np.minimum(_of_others(i - f, t), np.take_along_axis(f, _slowest(t), axis=-1)[..., 0])
        return (_of_others(f + 2.0 * i - w, t) - overstated) / 2.0
    if schedule == "pipedream":
        return 0.0 * m * slowest
    raise ValueError(f"schedule {schedule!r} is not priced")


def _slowest(stage_seconds: Number) -> Number:
    return np.argmax(stage_seconds, axis=-1)[..., np.newaxis]


def _of_others(wait: Number, stage_seconds: Number) -> Number:
    """Sum of `wait` over all stages but the slowest; both arguments have shape (..., stages)."""
    return np.sum(wait, axis=-1) - np.take_along_axis(wait, _slowest(stage_seconds), axis=-1)[..., 0]


def round_size(pp: Number, num_microbatches: Number) -> Number:
    """Microbatches that pass one chunk of an interleaved stage before the stage changes to its next chunk.

    The microbatches are divided into max(1, m // p) equal rounds. A round has p microbatches if m is a multiple of p,
    which Megatron-LM requires. If the microbatches do not divide into equal rounds, no engine runs the schedule (a
    short last round can deadlock), and the result is p.

    Source: torch.distributed.pipelining, ScheduleInterleaved1F1B; Narayanan et al. (SC 2021), section 2.2.2.
    """
    rounds = np.maximum(1, num_microbatches // pp)
    return np.where(num_microbatches % rounds == 0, num_microbatches // rounds, pp)


def is_one_round(pp: Number, num_microbatches: Number) -> Flag:
    """Whether an interleaved stage runs all microbatches of a step through one chunk before it changes chunks.

    Source: as `round_size`.
    """
    return np.less(num_microbatches, 2 * pp)


def exists(schedule: Schedule, pp: Number, num_microbatches: Number, interleave: Number) -> Flag:
    """Whether a schedule is defined for this number of stages, microbatches and chunks of a stage.

    An interleaved schedule needs several chunks per stage and equal rounds of microbatches. A V-shaped schedule needs
    two chunks; DualPipeV also needs at least as many microbatches as chunks. The other schedules need one chunk.

    Source: Narayanan et al. (SC 2021), section 2.2.2; Qi et al. (2023); DeepSeek, DualPipe (README).
    """
    if schedule == "interleaved":
        return np.greater(interleave, 1) & (num_microbatches % round_size(pp, num_microbatches) == 0)
    if schedule == "zbv":
        return np.equal(interleave, 2)
    if schedule == "dualpipev":
        return np.equal(interleave, 2) & np.greater_equal(num_microbatches, 2 * pp)
    return np.equal(interleave, 1)


def in_flight_microbatches(
    schedule: Schedule, pp: Number, stage: Number, num_microbatches: Number, interleave: Number
) -> Number:
    """Microbatches whose activations a stage holds at its peak; 1 means one microbatch through the whole stage.

    naive 1; GPipe m; 1F1B and PipeDream min(m, p - r); interleaved min(m v, 2 (p - r - 1) + (v - 1) g + 1) / v
    with rounds of g, which for g = p is p (1 + (p - 1) / (p v)) on the first stage; ZB-H1 min(m, p); ZB-V
    min(2 m, m + r + 1, 2 p) / 2, which is p from m = 2 p - 1 on; DualPipeV p + 1/2, which is PP + 1 of PP = 2 p
    chunks. If the backward pass is split, a microbatch is in flight until its weight gradients are done.

    Source: Huang et al., GPipe (2019); Narayanan et al. (SC 2021), section 2.2; Megatron-LM,
    core/pipeline_parallel/schedules.py (warm-up of the interleaved schedule); Korthikanti et al. (2022), 4.2.3;
    Qi et al., Zero Bubble (2023), table 2; DeepSeek, DualPipe (README).
    """
    m = num_microbatches
    if schedule == "naive":
        return np.ones(np.broadcast_shapes(np.shape(pp), np.shape(stage), np.shape(m)))
    if schedule == "gpipe":
        return m + 0 * np.asarray(stage)
    if schedule in ("1f1b", "pipedream"):
        return np.minimum(m, pp - stage)
    if schedule == "interleaved":
        chunks = 2 * (pp - stage - 1) + (interleave - 1) * round_size(pp, m) + 1
        return np.minimum(m * interleave, chunks) / interleave
    if schedule == "zb-h1":
        return np.minimum(m, pp) + 0 * np.asarray(stage)
    if schedule == "zbv":
        return np.minimum(np.minimum(2 * m, m + stage + 1), 2 * pp) / 2
    if schedule == "dualpipev":
        return pp + 0.5 + 0 * np.asarray(stage) * m
    raise ValueError(f"schedule {schedule!r} is not priced")


def held_microbatches(
    schedule: Schedule, pp: Number, stage: Number, num_microbatches: Number, interleave: Number
) -> tuple[tuple[Number, Number], ...]:
    """Microbatches that a stage holds at each moment that can be its peak, as (waiting for I, waiting for W).

    While a microbatch waits for its backward pass (I), the stage holds only the tensors that the recompute policy
    keeps. While it waits for its weight gradients (W), the stage holds more (`activations.kept_activation_bytes`). The
    unit is one microbatch through the whole stage, with n in flight:
    zb-h1      (n - k, k), k = min(r + 1, n): W comes r microbatches late
    zbv        steady (n - 1/2, 1/2), and in the drain ((p - r - 1) / 2, min(2 r + 1, 2 n) / 2)
    dualpipev  steady (n, 0), and (n - 1, 1/2) except on the last stage, and in the drain (p - r - 1, r + 1) / 2
    others     (n, 0)
    The two numbers never sum to more than n. With fewer than 2 p - 1 microbatches ZB-V's drain is an upper bound.

    Source: counted from the schedules' orders (`operations`).
    """
    n = in_flight_microbatches(schedule, pp, stage, num_microbatches, interleave)
    if schedule == "zb-h1":
        late = np.minimum(stage + 1, n)
        return ((n - late, late),)
    if schedule == "zbv":
        return (n - 0.5, 0.5 + 0 * n), ((pp - stage - 1) / 2, np.minimum(stage + 0.5, n))
    if schedule == "dualpipev":
        split = np.where(np.less(stage, pp - 1), 0.5, 0.0)
        return (n, 0 * n), (n - 1.0, split), ((pp - stage - 1) / 2, (stage + 1) / 2 + 0 * n)
    return ((n, 0 * n),)


def weight_versions(schedule: Schedule, pp: Number, stage: Number, num_microbatches: Number) -> Number:
    """Number of weight copies that a stage keeps: 1; under PipeDream one for each microbatch in flight, min(m, p - r).

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.3, weight stashing.
    """
    versions = np.minimum(num_microbatches, pp - stage)
    return versions if schedule == "pipedream" else np.ones_like(versions)


def staleness_steps(schedule: Schedule, pp: Number, stage: Number, num_microbatches: Number) -> Number:
    """Number of updates between the weights that computed a gradient and the weights that receive it: versions - 1.

    0 for every schedule that drains the pipeline before the update; p - r - 1 for PipeDream.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.3.
    """
    return weight_versions(schedule, pp, stage, num_microbatches) - 1
