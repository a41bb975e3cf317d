"""Mixed clusters as documents: accepted keys, refused keys, and plans that contain mixed clusters."""

from __future__ import annotations

import json
import re

import pytest

from planner.answers.plan_inputs import job_of
from planner.cli import main
from planner.errors import InputError
from planner.layout import format_layout
from planner.layout_text import parse_layout
from planner.plan import plan_to_dict, plan_to_json
from planner.plan_file import plan_from_json
from planner.search.given import plan_for_layout
from planner.specs.change import change_job
from planner.specs.cluster_documents import load_cluster
from planner.specs.load import load_job

MIXED = """\
name: two-kinds
pools:
  - {name: old, cluster: dgx-a100, hosts: 2}
  - {name: new, cluster: dgx-h100, devices_per_host: 6}
between: {name: ethernet, spans: cluster, bandwidth: 10 GB/s, latency: 20 us, kind: ethernet}
"""
BETWEEN = "between: {name: ethernet, spans: cluster, bandwidth: 10 GB/s, latency: 20 us, kind: ethernet}\n"


@pytest.fixture
def cluster_file(tmp_path):
    path = tmp_path / "two-kinds.yaml"
    path.write_text(MIXED)
    return path


def job_on(path, **options):
    return load_job(model="llama3-8b", cluster=str(path), global_batch_size=16, sequence_length=2048, **options)


def shallow(path):
    """A plan of few layers, for questions that need many searches."""
    layout = parse_layout("tp=2,pp=3,dp=2,pools=old/old/new", num_layers=6, num_devices=1)
    return plan_for_layout(job_on(path, settings=("model.num_layers=6",)), layout)


def test_the_largest_domain_of_a_mixed_cluster_is_that_of_some_pool() -> None:
    mixed = load_cluster("mixed-a100-h100")
    small, large = mixed.pools
    small = small.model_copy(
        update={"links": (small.links[0].model_copy(update={"spans": "4 devices"}), small.links[1])}
    )
    assert mixed.model_copy(update={"pools": (small, large)}).scale_up_devices == 8


def test_a_pool_takes_the_keys_of_a_cluster_and_its_own_go_before_them(cluster_file):
    found = load_cluster(str(cluster_file))
    old, new = found.pools
    assert (found.num_devices, old.num_devices, new.num_devices) == (22, 16, 6)
    assert (old.name, old.device, old.links) == ("old", load_cluster("dgx-a100").device, load_cluster("dgx-a100").links)
    assert (new.device, new.scale_up_devices) == (load_cluster("dgx-h100").device, 6)


def test_settings_reach_a_pool_and_the_link_between_pools(cluster_file):
    found = job_on(cluster_file, settings=["old.hosts=3", "new.device.memory=40GiB", "between.bandwidth=5 GB/s"])
    assert len(found.pools) > 1
    assert found.pools[0].num_devices == 24
    assert found.pools[1].whole_memory_bytes == 40 * 2**30
    assert {pool.between.bandwidth for pool in found.pools} == {5e9}


def test_each_pool_has_the_calibration_of_its_own_device(cluster_file):
    assert [pool.calibration.device for pool in job_on(cluster_file).pools] == ["a100-80gb", "h100-80gb"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("name: x\npools:\n- {name: a, cluster: dgx-a100}\n" + BETWEEN, "at least 2 entries"),
        (
            "name: x\npools:\n- {name: a, cluster: dgx-a100}\n- {name: a, cluster: dgx-h100}\n" + BETWEEN,
            "name of its own",
        ),
        (
            "name: x\npools:\n- {name: a, cluster: dgx-a100}\n- {name: b, cluster: local-cpu}\n" + BETWEEN,
            "of kind cuda",
        ),
        ("name: x\npools:\n- {name: a, cluster: dgx-a100}\n- {name: b, cluster: dgx-b1000}\n" + BETWEEN, "dgx-b1000"),
        (MIXED.replace("spans: cluster", "spans: 8 devices"), "spans the cluster"),
        (MIXED + "hosts: 4\n", "no one size"),
    ],
)
def test_what_is_no_mixed_cluster_is_refused_in_words(text, why, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=why):
        load_cluster(str(path))


@pytest.mark.parametrize(("options", "why"), [({"nodes": 4}, "--nodes"), ({"gpus": 8}, "--gpus")])
def test_a_mixed_cluster_has_no_one_size(options, why, cluster_file):
    with pytest.raises(InputError, match="no one size") as caught:
        job_on(cluster_file, **options)
    assert caught.value.mistakes[0].where.startswith(why)


def test_the_hosts_of_pools_are_given_by_name(cluster_file):
    found = job_on(cluster_file, nodes={"new": 3, "old": 1})
    assert [pool.cluster.hosts for pool in found.pools] == [1, 3]
    for model_cluster, nodes, why in (
        (str(cluster_file), {"odl": 2}, "unknown pool `odl`"),
        (str(cluster_file), {"old": 0}, "must be at least 1"),
        ("dgx-h100", {"old": 2}, "no pools"),
    ):
        with pytest.raises(InputError, match=why):
            load_job(model="llama3-8b", cluster=model_cluster, global_batch_size=16, nodes=nodes)


WORKLOAD = ("--seq-len", "2048", "--global-batch", "16")


def test_sizes_of_pools_are_compared_on_the_command_line(cluster_file, capsys):
    command = ["plan", "llama3-8b", str(cluster_file), *WORKLOAD, "--nodes", "old=1,new=1..2"]
    assert main(command) == 0
    assert "old + new" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["nodes"] for each in found["sizes"]] == [{"old": 1, "new": 1}, {"old": 1, "new": 2}]


@pytest.mark.parametrize("nodes", ["old=", "old=1,old=2", "=2", "old=a", "old=1..999", "old=1=2", "old=2..1"])
def test_hosts_of_pools_that_cannot_be_read_are_refused(nodes, cluster_file, capsys):
    assert main(["plan", "llama3-8b", str(cluster_file), *WORKLOAD, "--nodes", nodes]) == 2
    assert "--nodes" in capsys.readouterr().err


def test_a_precision_has_to_be_one_of_every_pool(cluster_file):
    assert job_on(cluster_file).training.precision == "bf16"
    with pytest.raises(InputError, match="a100-80gb does not compute in fp8"):
        job_on(cluster_file, precision="fp8", engine="megatron")


def test_a_layout_with_pools_is_read_back_as_it_was_written():
    text = "tp=2,pp=3,layers_per_stage=12/12/8,pools=old/old/new"
    layout = parse_layout(text, num_layers=32, num_devices={"old": 16, "new": 6})
    assert (layout.pools, layout.dp) == (("old", "old", "new"), 3)  # 16 / 2 stages and 6 devices leave 6 a stage
    assert parse_layout(format_layout(layout), num_layers=32, num_devices=1) == layout


@pytest.mark.parametrize(
    ("text", "why"), [("pp=2", "not said"), ("pp=2,pools=old", "1 entries"), ("pp=2,pools=old/x", "unknown pool")]
)
def test_a_layout_has_to_say_where_its_stages_run(text, why):
    with pytest.raises(InputError, match=why):
        parse_layout(text, num_layers=32, num_devices={"old": 16, "new": 6})


@pytest.fixture
def mixed_plan(cluster_file):
    layout = parse_layout("tp=2,pp=3,dp=2,pools=old/old/new", num_layers=32, num_devices=1)
    return plan_for_layout(job_on(cluster_file), layout)


def test_a_plan_keeps_its_pools(mixed_plan):
    assert plan_from_json(plan_to_json(mixed_plan)) == mixed_plan
    found = plan_to_dict(mixed_plan)
    assert found["layout"]["pools"] == ["old", "old", "new"]
    assert found["idle_devices"] == 22 - 12
    assert [entry["device"] for entry in found["calibration"]] == ["a100-80gb", "h100-80gb"]


@pytest.mark.parametrize("pools", [[], ["old", "old"], ["old", "old", "other"]])
def test_a_plan_whose_pools_are_not_those_of_its_cluster_is_refused(pools, mixed_plan):
    data = plan_to_dict(mixed_plan)
    data["layout"]["pools"] = pools
    with pytest.raises(InputError, match="not a valid plan"):
        plan_from_json(json.dumps(data))


def test_explain_says_where_each_stage_runs(mixed_plan, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(mixed_plan))
    assert main(["explain", str(path), "layout"]) == 0
    shown = capsys.readouterr().out
    assert "stages 0..1 on old, stage 2 on new" in shown
    assert "pools=2*old/new" in shown.replace("\n", "").replace(" ", "")
    assert main(["explain", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(part["seconds"] for part in found["waterfall"]["parts"]) == pytest.approx(found["step_seconds"])


def test_changes_reach_pools_their_links_and_the_link_between(cluster_file):
    job = job_on(cluster_file)
    found = change_job(job, "old.hosts=+50%,pools.new.device.memory=x0.5,new.within_node.bandwidth=x2,headroom=0")
    assert [pool.cluster.hosts for pool in found.pools] == [3, 1]
    assert found.pools[1].whole_memory_bytes == job.pools[1].cluster.device.memory / 2
    assert [pool.headroom for pool in found.pools] == [0, 0]
    assert found.pools[1].cluster.links[0].bandwidth == 2 * job.pools[1].cluster.links[0].bandwidth
    assert found.pools[0].cluster.links == job.pools[0].cluster.links
    assert found.cluster.pools == tuple(pool.cluster for pool in found.pools)
    assert [pool.calibration for pool in found.pools] == [pool.calibration for pool in job.pools]
    faster = change_job(job, "between.bandwidth=x2")
    assert {pool.between.bandwidth for pool in faster.pools} == {2 * job.cluster.between.bandwidth}
    assert change_job(job, "precision=fp16,seq_len=4k").training.sequence_length == 4096


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("nodes=4", "no one size\n    help: old.hosts=3 changes one pool"),
        ("gpus=x2", "no one size"),
        ("device.memory=x2", "each pool has its own, as in old.device.memory"),
        ("within_node.bandwidth=x2", "as in old.within_node.bandwidth"),
        ("neww.hosts=2", "did you mean `new`"),
        ("new.device.memry=x2", "did you mean `memory`"),
    ],
)
def test_changes_that_name_no_pool_are_refused_in_words(change, why, cluster_file):
    with pytest.raises(InputError) as caught:
        change_job(job_on(cluster_file), change)
    assert why in str(caught.value)


QUESTIONS = {
    "--why-not tp=1": "why_not",
    "--what-if old.hosts=3": "what_if",
    "--what-if": "sensitivity",
    "--schedules": "schedules",
    "--collectives": "collectives",
    "--batch": "batch",
    "--scaling 11..44": "scaling",
}


@pytest.mark.parametrize(
    "asked", [pytest.param(each, marks=pytest.mark.slow) if each == "--what-if" else each for each in QUESTIONS]
)
def test_every_question_about_a_mixed_plan_has_an_answer(asked, cluster_file, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(shallow(cluster_file)))
    assert main(["explain", str(path), *asked.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[QUESTIONS[asked]]
    assert main(["explain", str(path), *asked.split()]) == 0


def test_the_sensitivity_table_has_the_resources_of_each_pool(cluster_file, tmp_path, capsys):
    """More of a resource never makes a step longer, and each row is the price of the layout in the changed job."""
    path, plan = tmp_path / "plan.json", shallow(cluster_file)
    path.write_text(plan_to_json(plan))
    assert main(["explain", str(path), "--what-if", "--json"]) == 0
    gains = json.loads(capsys.readouterr().out)["sensitivity"]["gains"]
    names = {each["resource"] for each in gains}
    for pool in ("old", "new"):
        assert {f"{pool} peak FLOP/s", f"{pool} memory", f"{pool} memory bandwidth", f"{pool} hosts"} <= names
    assert "between pools bandwidth" in names
    assert all(each["gain"] >= -1e-9 for each in gains)
    changed = plan_for_layout(change_job(job_of(plan), gains[0]["change"]), plan.layout)
    assert changed.step_seconds == pytest.approx(gains[0]["step_seconds"], rel=1e-9)


def test_a_name_that_paths_cannot_begin_with_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    for name in ("device", "h100.sxm"):
        path.write_text(MIXED.replace("name: new", f"name: {name}"))
        with pytest.raises(InputError, match="is no name of a pool"):
            load_cluster(str(path))


def test_each_host_gets_the_ranks_of_its_pool(mixed_plan, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(mixed_plan))
    assert main(["emit", str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("torchrun")]
    # 8 ranks of stages 0 and 1 on one old host, 4 of stage 2 on a new one
    assert [f"--nproc-per-node={count}" in line for line, count in zip(lines, (8, 4), strict=True)] == [True, True]


DEAD_GPU = """\
name: dead-gpu
pools:
  - {name: whole, cluster: dgx-a100, hosts: 2}
  - {name: broken, cluster: dgx-a100, devices_per_host: 7}
between: {name: infiniband, spans: cluster, bandwidth: 25 GB/s, latency: 8 us, kind: fat-tree}
"""


@pytest.mark.parametrize(
    ("cluster", "options", "num_devices"),
    [
        ("dgx-a100", ["--nodes", "7"], 56),
        ("dgx-a100", ["--nodes", "2", "--set", "cluster.devices_per_host=6"], 12),
        ("dead-gpu.yaml", [], 23),
        ("dead-gpu.yaml", ["--pin", "pools=whole/broken"], 23),
    ],
)
def test_odd_clusters_from_the_document_to_the_command_of_each_host(
    cluster, options, num_devices, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dead-gpu.yaml").write_text(DEAD_GPU)
    batch = ["--seq-len", "1024", "--global-batch", "84"]
    assert main(["plan", "llama3.2-1b", cluster, *batch, *options, "--json", "-o", "plan.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    used = plan_from_json((tmp_path / "plan.json").read_text()).layout.world_size
    assert found["idle_devices"] == num_devices - used
    assert bool(found["idle_reason"]) == (used < num_devices)
    assert main(["emit", "plan.json"]) == 0
    ranks, hosts = 0, range(0)
    for line in capsys.readouterr().out.splitlines():  # the hosts of one command stand above it
        if found_hosts := re.match(r"# hosts? (\d+)(?: to (\d+))?:", line):
            hosts = range(int(found_hosts[1]), int(found_hosts[2] or found_hosts[1]) + 1)
        if line.startswith("torchrun"):
            ranks += max(len(hosts), 1) * int(line.partition("--nproc-per-node=")[2].split()[0])
    assert ranks == used
    assert main(["explain", "plan.json", "--collectives"]) == 0


def test_a_count_of_thousands_of_digits_is_refused_in_words():
    job = load_job(model="tiny-gpt", cluster="dgx-a100", sequence_length=64, global_batch_size=8)
    with pytest.raises(InputError, match="is no number of devices"):
        change_job(job, "gpus=" + 5000 * "1")
