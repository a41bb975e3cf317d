"""Bytes and memory traffic of the loss, and the number of tokens that it processes at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from planner.cost.microbatch import tokens_per_microbatch
from planner.cost.parameters import num_outputs, outputs_on_device

if TYPE_CHECKING:
    from planner.layout import LayerDegrees
    from planner.numbers import Number
    from planner.specs.job import PoolJob


def tokens_at_once(job: PoolJob, layout: LayerDegrees) -> Number:
    """Number of tokens of a microbatch that go through the output head and the loss at a time.

    These are usually all tokens; a chunked loss processes 1 / loss_chunks of the tokens at a time, or a fixed number. A
    fused linear loss uses T h / V tokens, rounded up to a power of two, so that the logits are about as large as the
    hidden states.

    Source: torchtitan, components/loss.py (ChunkedLossWrapper); Liger-Kernel, ops/fused_linear_cross_entropy.py; engine
    profile, loss_chunk_tokens.
    """
    tokens = tokens_per_microbatch(job, layout)
    if job.loss == "chunked":
        return np.minimum(tokens, job.engine.memory.loss_chunk_tokens or np.ceil(tokens / job.training.loss_chunks))
    if job.loss == "fused-linear":
        wider = np.ceil(num_outputs(job.model) / job.model.hidden_size)
        return np.minimum(tokens, 2.0 ** np.ceil(np.log2(np.ceil(tokens / wider))))
    return tokens


def num_logits(job: PoolJob, layout: LayerDegrees) -> Number:
    """Logits of one microbatch that a device holds at a time.

    In some engines each tp rank holds the logits of all ranks.

    Source: engine profile, whole logits.
    """
    copies = layout.tp if job.engine.memory.whole_logits else 1
    return copies * tokens_at_once(job, layout) * outputs_on_device(job.model, job.engine, layout)


def logits_bytes(job: PoolJob, layout: LayerDegrees) -> Number:
    """Peak bytes of the logits and the other tensors of the loss, for one microbatch.

    A single kernel writes the gradient over the logits. A chunked or fused linear loss holds the gradient of the hidden
    states before the backward pass begins. torchtitan keeps this gradient in fp32, together with copies of the parts,
    and Liger-Kernel keeps it in the compute precision. Log-probabilities take as many tensors as their objective says.
    Separate operators that cap logits keep the tanh. Logits that no loss reads have no gradient; of 16 bits, a copy.

    Source: engine profile, bytes per logit; specs/objectives.yaml, value-head; transformers, Gemma2ForCausalLM
    (`planner verify` counts it); torchtitan, components/loss.py (GradAccumulator); Liger-Kernel,
    ops/fused_linear_cross_entropy.py; Transformer Engine, pytorch/cross_entropy.py.
    """
    copies = layout.tp if job.engine.memory.whole_logits else 1
    per_logit = job.engine.memory.logits_bytes + (job.compute_bytes - 2) / copies
    if (each := job.engine.memory.log_probability_bytes) and (tensors := job.training.method.logit_copies):
        wide, narrow = max(each, job.compute_bytes), job.training.method.narrow_copies
        per_logit = wide * (narrow if narrow and wide == 2 else tensors)
    if not job.training.method.reads_logits:
        per_logit = 6.0 if job.compute_bytes == 2 else 4.0  # 16 bits and their copy
    elif job.loss in ("fused", "fused-linear"):
        per_logit = job.compute_bytes * (job.engine.memory.fused_logits_bytes / 2 if job.loss == "fused" else 1.0)
    elif job.model.caps_logits and not job.engine.memory.norm_kernel:
        per_logit = per_logit + job.compute_bytes
    found = per_logit * num_logits(job, layout)
    ahead = {"chunked": 4.0 + job.compute_bytes, "fused-linear": job.compute_bytes}.get(job.loss, 0.0)
    return found + ahead * tokens_per_microbatch(job, layout) * job.model.hidden_size if ahead else found


def bytes_moved_per_logit(job: PoolJob) -> tuple[float, float]:
    """Bytes that the loss moves for each logit in the forward and in the backward pass.

    Separate operators pass over fp32 logits 4 times forward and 3 times backward. A single kernel reads the logits
    twice and writes their gradient; the backward pass multiplies this gradient by the gradient of the loss. A fused
    linear loss skips this multiplication, because its gradients are complete.

    Source: derived here: cross entropy takes a maximum, a sum of exponentials and a difference; Liger-Kernel,
    ops/cross_entropy.py; Transformer Engine, pytorch/cross_entropy.py.
    """
    if not job.training.method.reads_logits:
        return (6.0 if job.compute_bytes == 2 else 0.0), 0.0  # reads 16 bits and writes the copy; of fp32 there is none
    if job.loss == "fused":
        return 3.0 * job.compute_bytes, 2.0 * job.compute_bytes
    return (3.0 * job.compute_bytes, 0.0) if job.loss == "fused-linear" else (16.0, 12.0)
