"""The place of a layout in racks: groups that straddle racks, counted over real ranks, and the layout's segment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.estimate import estimate
from planner.cost.groups import slowest_link
from planner.cost.ledger import LineName
from planner.cost.segments import has_choice, is_possible, num_domains, segments_of, with_segment
from planner.errors import InputError
from planner.layout import format_layout
from planner.layout_text import parse_layout
from planner.search.given import plan_for_layout
from planner.specs.cluster_documents import load_cluster
from planner.specs.load import load_job

RACK = load_cluster("gb200-nvl72")


def racks(gpus, **changes):
    return RACK.model_copy(update={"hosts": -(-gpus // 4), **changes})


def layout_of(text, gpus=256):
    return parse_layout(text, num_layers=61, num_devices=gpus)


def groups_of(layout):
    """All groups of a layout by name, as sets of ranks, from the coordinates of every rank alone."""
    order = [layout.coordinates(rank) for rank in range(layout.world_size)]
    found = {}
    for name, apart in (("tp", ("pp", "dp", "cp")), ("cp", ("pp", "dp", "tp")), ("dp", ("pp", "tp"))):
        groups = {}
        for rank, here in enumerate(order):
            groups.setdefault(tuple(here[axis] for axis in apart), []).append(rank)
        found[name] = list(groups.values())
    experts = {}
    for rank in range(layout.world_size):  # within a stage experts are dealt out over runs of ep * etp ranks
        inside, stage = rank % layout.stride("pp"), rank // layout.stride("pp")
        width = layout.ep * layout.etp
        experts.setdefault((stage, inside // width, inside % layout.etp), []).append(rank)
    return found | {"ep": list(experts.values())}


def straddling(layout, hosts_per_rack):
    """For each name, the share of groups with ranks in more than one rack, with four ranks to a host."""
    return {
        name: sum(len({rank // 4 // hosts_per_rack for rank in ranks}) > 1 for ranks in groups) / len(groups)
        for name, groups in groups_of(layout).items()
    }


def crossing(layout, gpus=256):
    """For each name, whether the price assumes that a group leaves its rack."""
    where = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "dp": (layout.dp * layout.cp, layout.tp),
        "ep": (layout.ep, layout.etp),
    }
    cluster, segment = racks(gpus), layout.segment
    return {name: slowest_link(cluster, *group, segment=segment) == "infiniband" for name, group in where.items()}


LAYOUTS = [
    "pp=4,dp=64,ep=64",
    "pp=8,dp=32,ep=32",
    "pp=2,dp=128,ep=16",
    "tp=2,pp=4,dp=32,ep=8",
    "tp=8,pp=8,dp=4",
    "tp=4,cp=4,pp=4,dp=4,ep=32",
    "tp=2,cp=8,pp=1,dp=16,ep=64",
]


@pytest.mark.parametrize("segment", [16, 8, 4, 1])
@pytest.mark.parametrize("text", LAYOUTS)
def test_groups_leave_a_rack_exactly_where_their_ranks_do(text, segment):
    layout = layout_of(f"{text},segment={segment}")
    assert crossing(layout) == {name: share > 0 for name, share in straddling(layout, segment).items()}


def test_equal_parts_of_racks_keep_experts_together_that_packed_racks_cut():
    """Four racks with 16 hosts each, compared with the same 64 hosts packed into racks of 18."""
    equal, packed = layout_of("pp=4,dp=64,ep=64,segment=16"), layout_of("pp=4,dp=64,ep=64,segment=18")
    assert straddling(equal, 16)["ep"] == 0
    assert straddling(packed, 18)["ep"] == 3 / 4
    job = load_job(
        model="deepseek-v3", cluster="gb200-nvl72", engine="megatron-bridge", gpus=256, precision="fp8",
        sequence_length=4096, global_batch_size=4096,
    )  # fmt: skip
    times = [{line.name: float(line.busy_seconds) for line in estimate(job, each).time} for each in (equal, packed)]
    slower = {name for name, seconds in times[0].items() if times[1][name] > seconds}
    assert slower == {LineName.EP_COMM, LineName.DP_COMM, LineName.BUBBLE}
    assert times[1][LineName.EP_COMM] > 5 * times[0][LineName.EP_COMM], "900 GB/s inside a rack, 50 between racks"
    assert estimate(job, equal).step_seconds < estimate(job, packed).step_seconds


@pytest.mark.parametrize("gpus", [128, 192, 240, 256, 320, 512, 1152])
@pytest.mark.parametrize("ep", [1, 8, 16, 32, 64])
def test_a_layout_gets_the_segment_with_which_fewest_groups_straddle(gpus, ep):
    """No other segment that a scheduler offers keeps more groups of experts whole."""
    layout = layout_of(f"pp=1,dp={gpus},ep={ep}", gpus)
    if gpus % ep:
        return
    chosen, share = with_segment(racks(gpus), layout).segment, {}
    for segment in range(1, 19):
        if segment == 18 or gpus // 4 % segment == 0:
            share[segment] = straddling(layout, segment)["ep"]
    assert share[chosen] == min(share.values())


def test_where_there_is_nothing_to_choose_no_segment_is_taken():
    for cluster in (load_cluster("dgx-h100").model_copy(update={"hosts": 32}), RACK, load_cluster("mixed-a100-h100")):
        assert not has_choice(cluster)
        assert with_segment(cluster, layout_of("pp=4,dp=4")).segment == 0
    given = layout_of("pp=4,dp=64,segment=8")
    assert with_segment(racks(256), given) == given
    assert "segment" not in format_layout(layout_of("pp=4"))
    assert "segment=8" in format_layout(given)


def test_a_document_fixes_the_segment_and_counts_the_racks():
    layout = layout_of("pp=4,dp=64,ep=32")
    assert with_segment(racks(256, segment=8), layout).segment == 8
    assert with_segment(racks(256, domains=4), layout).segment == 16
    assert with_segment(racks(288, domains=4), layout_of("pp=4,dp=72", 288)).segment == 18
    assert segments_of(racks(256), 256) == [18, 16, 8, 4, 2, 1]
    assert segments_of(racks(256, domains=4), 256) == [18, 16]
    assert segments_of(racks(240), 240)[:3] == [18, 15, 12]
    assert not is_possible(racks(256, segment=8), 256, 16)
    assert [int(num_domains(RACK, 256, segment)) for segment in (0, 18, 16, 8)] == [4, 4, 4, 8]


@pytest.mark.parametrize(
    ("cluster", "settings", "segment", "words"),
    [
        ("dgx-h100", (), 2, "segment 2: a scale-up domain of dgx-h100 has one host; leave it out"),
        ("gb200-nvl72", (), 20, "segment 20 is more than the 18 hosts of a scale-up domain; it can be 4, 8, 16 or 18"),
        ("gb200-nvl72", (), 15, "segment 15 does not divide the 64 hosts of the layout; it can be 4, 8, 16 or 18"),
        ("gb200-nvl72", ("cluster.segment=16",), 8, "segment 8: gb200-nvl72 has segment 16 in its document"),
        ("gb200-nvl72", ("cluster.domains=4",), 8, "takes hosts of 8 domains, and there are 4; it can be 16 or 18"),
    ],
)
def test_a_segment_that_no_scheduler_gives_is_refused(cluster, settings, segment, words):
    job = load_job(
        model="llama3-8b", cluster=cluster, engine="megatron", gpus=256, sequence_length=8192, global_batch_size=256,
        settings=settings,
    )  # fmt: skip
    layout = parse_layout("tp=2,dp=128", num_layers=32, num_devices=256)
    with pytest.raises(InputError, match=words):
        plan_for_layout(job, replace(layout, segment=segment))


def test_tensor_parallelism_stays_inside_the_hosts_that_are_taken():
    """16 divides the 64 devices of 16 hosts, but not the 72 devices of 18 hosts."""
    job = load_job(
        model="gpt3-175b", cluster="gb200-nvl72", engine="megatron", gpus=256, sequence_length=2048,
        global_batch_size=256,
    )  # fmt: skip
    layout = parse_layout("tp=16,dp=16,zero=1", num_layers=96, num_devices=256)
    assert plan_for_layout(job, replace(layout, segment=16)).step_seconds > 0
    with pytest.raises(InputError, match="tp 16 does not divide the scale-up domain of 72 devices"):
        plan_for_layout(job, replace(layout, segment=18))


@pytest.mark.parametrize(
    ("cluster", "settings", "words"),
    [
        ("gb200-nvl72", "cluster.segment=20", "`segment`: a scale-up domain has 18 hosts, not 20"),
        ("dgx-h100", "cluster.segment=2", "`segment`: no scale-up domain of this cluster has several hosts"),
        ("gb200-nvl72", "cluster.domains=3", "`domains`: 3 with 18 hosts each are fewer than the cluster's 64 hosts"),
    ],
)
def test_a_cluster_document_says_what_racks_have(cluster, settings, words):
    with pytest.raises(InputError, match=words):
        load_job(
            model="llama3-8b", cluster=cluster, engine="megatron", gpus=256, sequence_length=8192,
            global_batch_size=256, settings=(settings,),
        )  # fmt: skip
