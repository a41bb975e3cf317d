"""Many layouts in one call cost what `estimate` says of each."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.estimate import estimate, even_step_seconds_and_peak_bytes
from planner.cost.stage import POLICIES
from planner.layout import Layout, parse_layout


def columns(layouts):
    """Layouts as arrays of shape (n, 1)."""
    names = [f.name for f in fields(Layout) if f.name not in ("schedule", "recompute", "layers_per_stage", "offload")]
    arrays = {name: np.array([[getattr(layout, name)] for layout in layouts]) for name in names}
    return SimpleNamespace(**arrays, schedule=layouts[0].schedule, offload=layouts[0].offload)


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["llama3-8b", "mixtral-8x7b", "gemma2-2b"]), st.sampled_from(["1f1b", "gpipe"]))
def test_many_even_layouts_in_one_call_are_estimates(make_job, data, model, schedule):
    job = make_job(model, gpus=64, batch=64, engine=data.draw(st.sampled_from(["megatron", "torch"])))
    layers = job.model.num_layers
    pipelines = [p for p in (1, 2, 4, 8, 16) if layers % p == 0]
    experts = (1, 2) if job.model.moe else (1,)
    texts = [
        f"tp={data.draw(st.sampled_from([1, 2]))},pp={data.draw(st.sampled_from(pipelines))},dp=4,"
        f"zero={data.draw(st.integers(0, 3))},ep={data.draw(st.sampled_from(experts))},"
        f"mbs={data.draw(st.sampled_from([1, 2]))},schedule={schedule}"
        for _ in range(4)
    ]
    policies = [data.draw(st.sampled_from(["none", "full"])) for _ in texts]
    layouts = [
        parse_layout(f"{text},recompute={policy}", num_layers=layers, num_devices=64)
        for text, policy in zip(texts, policies, strict=True)
    ]
    policy = np.array([[POLICIES.index(each)] for each in policies])
    seconds, num_bytes = even_step_seconds_and_peak_bytes(job, columns(layouts), policy)
    alone = [estimate(job, layout) for layout in layouts]
    assert seconds == pytest.approx([each.step_seconds for each in alone], rel=1e-12)
    assert num_bytes == pytest.approx([each.peak_bytes for each in alone], rel=1e-12)
