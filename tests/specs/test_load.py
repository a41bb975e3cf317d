"""A job built from names, files and options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError
from planner.specs.by_name import load_model, other_engines
from planner.specs.cluster_documents import load_cluster
from planner.specs.engine import EngineSpec
from planner.specs.files import kind_of
from planner.specs.job import PoolJob
from planner.specs.load import load_job
from planner.specs.uniform import uniform_cluster


def job(model: str = "llama2-7b", cluster: str = "dgx-a100", **options: Any) -> PoolJob:
    return load_job(model=model, cluster=cluster, **{"global_batch_size": 64, **options})


def mistake(**options: Any) -> str:
    with pytest.raises(InputError) as caught:
        job(**options)
    return str(caught.value)


@pytest.mark.parametrize(("text", "tokens"), [("1T", 1e12), ("300B", 3e11), ("1.5e12 tokens", 1.5e12), ("7", 7.0)])
def test_a_token_budget_is_written_as_people_say_it(text: str, tokens: float) -> None:
    job = load_job(model="tiny-gpt", cluster="dgx-a100", global_batch_size=8, settings=(f"training.tokens={text}",))
    assert job.training.tokens == tokens


@pytest.mark.parametrize(
    ("cluster", "options", "size"),
    [
        ("dgx-a100", {}, (8, 1)),
        ("dgx-a100", {"nodes": 48}, (8, 48)),
        ("dgx-a100", {"gpus": 384}, (8, 48)),
        ("dgx-a100", {"gpus": 8}, (8, 1)),
        ("dgx-a100", {"gpus": 6}, (6, 1)),
        ("dgx-a100", {"gpus": 1}, (1, 1)),
        ("gb200-nvl72", {}, (4, 18)),
        ("gb200-nvl72", {"gpus": 144}, (4, 36)),
        ("gb200-nvl72", {"nodes": 1}, (4, 1)),
    ],
)
def test_the_size_of_the_cluster(cluster: str, options: dict[str, Any], size: tuple[int, int]) -> None:
    found = job(cluster=cluster, **options).cluster
    assert (found.devices_per_host, found.hosts) == size


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 12}, ["--gpus 12: 12 devices are no whole number of dgx-a100 hosts of 8", "--gpus 8 or --gpus 16"]),
        ({"gpus": 0}, ["--gpus 0: 0 is no number", "valid: 1 to 10000000"]),
        ({"gpus": -8}, ["--gpus -8: -8 is no number"]),
        ({"gpus": 10**12}, ["--gpus 1000000000000"]),
        ({"nodes": 0}, ["--nodes 0: 0 is no number"]),
        ({"nodes": 10**9}, ["--nodes 1000000000"]),
        ({"nodes": 2, "gpus": 16}, ["--nodes and --gpus both"]),
        ({"sequence_length": 0}, ["--seq-len 0: `sequence_length` must be at least 1"]),
        ({"sequence_length": 10**9}, ["--seq-len 1000000000: `sequence_length` must be at most 100000000"]),
        ({"global_batch_size": -1}, ["--global-batch -1: `global_batch_size` must be at least 1"]),
        ({"global_batch_size": None}, ["the global batch size is not given", "--global-batch 1024"]),
        ({"precision": "fp8"}, ["--precision fp8: a100-80gb does not compute in fp8"]),
        ({"precision": "bf16", "cluster": "dgx1-v100"}, ["v100-32gb does not compute in bf16", "it has fp32, fp16"]),
        ({"headroom": 1.0}, ["--headroom"]),
        ({"risk": 0.0}, ["--risk"]),
        ({"risk": 0.96}, ["--risk"]),
        ({"risk": float("nan")}, ["--risk"]),
        ({"headroom": float("nan")}, ["--headroom"]),
        ({"headroom": -0.1}, ["--headroom"]),
        ({"engine": "deepsped"}, ["--engine deepsped: unknown engine `deepsped`"]),
        ({"engine": "../models/tiny-gpt"}, ["unknown engine"]),
        ({"engine": "PyTorch"}, ["write --engine torch"]),
        ({"engine": "axolotl"}, ["write --engine fsdp"]),
        ({"model": "llama-8b"}, ["unknown model `llama-8b`", "`llama3-8b`"]),
        ({"model": "zzz"}, ["unknown model `zzz`", "`planner models` lists what is shipped"]),
        ({"cluster": "h200"}, ["unknown cluster `h200`", "`dgx-h200`"]),
        ({"cluster": "zzz"}, ["unknown cluster `zzz`", "`planner clusters` lists what is shipped"]),
        ({"model": ""}, ["the model is empty", "`planner models` lists"]),
        ({"cluster": ""}, ["the cluster is empty", "`planner clusters` lists"]),
        ({"model": "llama-8b", "global_batch_size": None}, ["unknown model `llama-8b`", "`llama3-8b`"]),
        ({"engine": "deepsped", "global_batch_size": None}, ["unknown engine `deepsped`"]),
        ({"cluster": "h200", "global_batch_size": None}, ["unknown cluster `h200`"]),
        ({"model": "config.json"}, ["config.json does not exist"]),
        ({"model": "nowhere.yaml"}, ["nowhere.yaml does not exist"]),
        ({"model": "x" * 10_000}, ["unknown model"]),
        ({"model": "\x1b]0;evil\x07"}, ["unknown model `\\x1b]0;evil\\x07`"]),
        ({"model": "gpt3-175b", "sequence_length": 2049}, ["--seq-len 2049: gpt3-175b has learned positions for 2048"]),
        ({"cluster": "local-cpu", "nodes": 2}, ["local-cpu is this one machine"]),
        ({"cluster": "local-cpu", "gpus": 20_000}, ["--gpus 20000: `devices_per_host` must be at most 10000"]),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: list[str]) -> None:
    text = mistake(**options)
    assert len(text) < 1000
    for word in words:
        assert word in text
    assert text.count("\n    help:") <= text.count("\n") + 1
    assert len(text.split("\n")) <= 3, "one mistake, said once"


def test_hints_name_every_engine_whose_file_lists_what_is_asked() -> None:
    folder = Path(__file__).parents[2] / "planner/engines"
    files = sorted(folder.glob("*.yaml"), key=lambda file: file.stem)
    having = [file.stem for file in files if "fp4" in re.findall(r"precisions: \[(.*)\]", file.read_text())[0]]
    assert 1 < len(having) < len(files)
    found = mistake(cluster="dgx-b200", precision="fp4", engine="torch")
    assert found.endswith(f"; another is --engine {', '.join(having[:-1])} or {having[-1]}")
    assert other_engines("; ", lambda engine: "warp" in engine.can.precisions) == ""


def test_what_is_not_given_follows_from_the_model_and_the_device() -> None:
    assert job().training.sequence_length == 4096
    assert job("llama2-7b", sequence_length=32768).training.sequence_length == 32768, "rotary positions extend"
    assert job("gpt3-175b", sequence_length=2048).training.sequence_length == 2048
    machines = ("dgx-a100", "dgx1-v100", "local-cpu")
    found = [job(cluster=name, engine="megatron").training.precision for name in machines]
    assert found == ["bf16", "fp16", "fp32"]
    assert job(cluster="dgx1-v100", engine="torch").training.precision == "fp16", "the trainer scales the loss"
    assert job(precision="fp32").training.precision == "fp32"


def test_a_training_file_gives_the_workload_and_options_override_it(tmp_path: Path) -> None:
    path = tmp_path / "training.yaml"
    path.write_text("sequence_length: 128\nglobal_batch_size: 32\nprecision: fp16\nsteps: 7\n")
    given = job(training=str(path), engine="megatron", global_batch_size=None).training
    assert (given.sequence_length, given.global_batch_size, given.precision, given.steps) == (128, 32, "fp16", 7)
    over = job(
        training=str(path), engine="megatron", global_batch_size=16, sequence_length=64, precision="bf16"
    ).training
    assert (over.sequence_length, over.global_batch_size, over.precision, over.steps) == (64, 16, "bf16", 7)
    path.write_text("steps: 7\n")
    assert f"{path}:1:1: the global batch size is not given" in mistake(training=str(path), global_batch_size=None)


def test_set_changes_any_document() -> None:
    found = job(
        settings=[
            "model.num_layers=16",
            "training.dropout=0.1",
            "device.memory=141GiB",
            "device.peak.bf16=900 TFLOP/s",
            "device.efficiency.matmul=0.5",
            "nvlink.bandwidth=600GB/s",
            "cluster.price=2.5 USD/h",
            "cluster.hosts=3",
            "engine.memory.fragmentation=0.1",
            "engine.can.zero_stages=[0, 1]",
            "training.steps = 5",
        ]
    )
    assert found.model.num_layers == 16
    assert (found.training.dropout, found.training.steps) == (0.1, 5)
    assert (found.cluster.device.memory, found.cluster.device.peak["bf16"]) == (141 * 2**30, 900e12)
    assert (found.cluster.device.efficiency.matmul, found.cluster.links[0].bandwidth) == (0.5, 600e9)
    assert (found.cluster.price, found.cluster.hosts) == (2.5, 3)
    assert (found.engine.memory.fragmentation, found.engine.can.zero_stages) == (0.1, (0, 1))
    assert found.cluster.links[1] == load_cluster("dgx-a100").links[1]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("nvlnk.bandwidth=3 GB/s", "unknown path `nvlnk`\n    help: did you mean `nvlink`?"),
        ("zzz.a=1", "paths begin with one of model, cluster, device, training, engine, nvlink, infiniband"),
        ("training.dropuot=0.1", "unknown key `dropuot`\n    help: did you mean `dropout` or `lora_dropout`?"),
        ("engine.fragmentation=0.1", "unknown key `fragmentation`\n    help: it is `memory.fragmentation`"),
        (
            "nvlink.bandwith=1 GB/s",
            "unknown key `links.1.bandwith`\n    help: did you mean `bandwidth` or `measured_bandwidth`?",
        ),
        ("device.pek.bf16=1 TFLOP/s", "unknown path: there is no `pek`\n    help: did you mean `peak`?"),
        ("device.memory.x=1", "unknown path: there is no `x`"),
        ("cluster.links.first.latency=1 us", "unknown path: there is no `first`"),
        ("device.memory=141", "141 has no unit"),
        ("device.memory=", "the value is empty"),
        ("training.dropout", "not a setting\n    help: write PATH=VALUE"),
        ("dropout=0.1", "not a setting"),
        ("training.=1", "not a setting"),
        ("=", "not a setting"),
        ("training.dropout=[", "this is not valid YAML"),
        ("training.dropout=.nan", "`.nan` is not a finite number"),
        ("training.dropout=0.1\x1b[31m", "\\x1b[31m"),
        ("model.num_heads=7", "7 does not divide hidden_size 4096"),
        ("cluster.links=3", "`links` must be a list, not `3`"),
    ],
)
def test_a_wrong_setting_is_named(setting: str, words: str) -> None:
    text = mistake(settings=[setting])
    assert text.startswith("--set ")
    assert words in text
    assert text.replace("\n", "").isprintable()


def test_a_users_cluster_finds_its_devices_beside_it_first(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "clusters"
    (tmp_path / "devices").mkdir()
    text = (shipped / "dgx-a100.yaml").read_text()
    cluster = tmp_path / "mine.yaml"
    cluster.write_text(text)
    assert load_cluster(str(cluster)).device == load_cluster("dgx-a100").device
    device = (shipped / "devices" / "a100-80gb.yaml").read_text()
    (tmp_path / "devices" / "a100-80gb.yaml").write_text(device.replace("79.15 GiB", "70 GiB"))
    assert load_cluster(str(cluster)).device.memory == 70 * 2**30
    inline = "device:\n" + "".join(f"  {line}\n" for line in device.splitlines())
    cluster.write_text(text.replace("device: a100-80gb\n", inline))
    assert load_cluster(str(cluster)).device == load_cluster("dgx-a100").device


def test_a_shipped_name_wins_over_a_file_and_a_path_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny-gpt").write_text("nonsense")
    assert load_model("tiny-gpt").num_layers == 4
    text = (Path(__file__).parents[2] / "models" / "tiny-gpt.yaml").read_text()
    Path("mine").write_text(text)
    assert load_model("mine") == load_model("./mine") == load_model("tiny-gpt")
    Path("hf").mkdir()
    Path("hf", "config.json").write_text("{}")
    assert "`model_type` is missing" in mistake(model="hf")


def test_odd_sizes_are_legal() -> None:
    found = job("megatron-529.6b", "dgx-a100", nodes=7, settings=["cluster.devices_per_host=6", "model.num_layers=61"])
    assert (found.cluster.num_devices, found.model.num_layers) == (42, 61)


def test_equal_inputs_give_equal_jobs() -> None:
    assert job(cluster="local-cpu") == job(cluster="local-cpu")
    assert str(Path.cwd()) not in repr(job())


def test_the_rule_and_the_headroom_are_handed_on() -> None:
    found = job(headroom=0.2, risk=0.3, allow_tp_across_nodes=True, allow_offload=True)
    assert (found.headroom, found.risk) == (0.2, 0.3)
    assert (found.headroom, found.allow_tp_across_nodes, found.allow_offload) == (0.2, True, True)
    assert found.whole_memory_bytes == pytest.approx(79.15 * 2**30)


def test_a_contradiction_hides_no_other_mistake(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "name: own\narchitecture: llama\nnum_layers: two\nhidden_size: 4097\nnum_heads: 32\n"
        "ffn_hidden_size: 14336\nvocab_sise: 1000\nmax_sequence_length: 0\n"
    )
    text = mistake(model=str(path))
    for line, words in ((3, "`num_layers`"), (5, "32 does not divide"), (7, "did you mean"), (8, "at least 1")):
        assert f"own.yaml:{line}:1" in text
        assert words in text


def test_counts_of_documents_and_options_may_have_a_suffix(tmp_path: Path) -> None:
    """k and M are thousand and million, and 1,024 and its square in the two lengths of sequences."""
    link = "{name: ib, spans: cluster, bandwidth: 50 GB/s, latency: 8 us, kind: fat-tree}"
    model = "num_layers: 2, num_heads: 10, hidden_size: 1k, ffn_hidden_size: 4k, vocab_size: 128k"
    (tmp_path / "m.yaml").write_text(f"{{name: m, architecture: llama, {model}, max_sequence_length: 8k}}")
    (tmp_path / "c.yaml").write_text(f"{{name: c, device: h100-80gb, devices_per_host: 8, hosts: 1k, links: [{link}]}}")
    (tmp_path / "t.yaml").write_text("{sequence_length: 4k, global_batch_size: 8k, steps: 2k, tokens: 1B}")
    job = load_job(model=f"{tmp_path}/m.yaml", cluster=f"{tmp_path}/c.yaml", training=f"{tmp_path}/t.yaml")
    spec, training = job.model, job.training
    assert (spec.hidden_size, spec.head_size, spec.ffn_hidden_size, spec.vocab_size) == (1_000, 100, 4_000, 128_000)
    assert (spec.max_sequence_length, job.cluster.num_devices) == (8_192, 8_000)
    assert (training.sequence_length, training.global_batch_size, training.steps) == (4_096, 8_000, 2_000)
    plain = load_job(model="tiny-gpt", cluster="dgx-a100", global_batch_size="1k", settings=["training.steps=3k"])
    assert (plain.training.global_batch_size, plain.training.steps, plain.batch) == (1_000, 3_000, None)
    with pytest.raises(InputError, match="learned positions for 256 tokens, not 1024"):
        load_job(model="tiny-gpt", cluster="dgx-a100", global_batch_size=8, settings=["training.sequence_length=1k"])
    with pytest.raises(InputError, match="must be a whole number, not `12kk`"):
        load_job(model="tiny-gpt", cluster="dgx-a100", global_batch_size=8, settings=["training.steps=12kk"])


def test_a_job_can_use_the_hosts_of_a_segment_in_every_domain():
    """gb200-nvl72: 18 hosts a rack; with 3 racks 54 hosts, and with segments of 16 hosts 48."""
    racks = uniform_cluster(load_cluster("gb200-nvl72")).model_copy(update={"domains": 3})
    assert racks.hosts_per_domain == 18
    assert [racks.model_copy(update={"segment": each}).most_hosts for each in (None, 16)] == [54, 48]
    assert racks.model_copy(update={"domains": None}).most_hosts == float("inf")


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.json", ' {"format": 2, "layout": {}}', "a plan"),
        ("a.json", '{"format": 2, "model": {}}', ""),  # a calibration or another document
        ("a.json", '{"layout": {}, "format": 2}', ""),
        ("run", "#!/bin/sh\n", "a script"),
        ("run.sbatch", "", "a script"),
        ("run.yaml", "", ""),
    ],
)
def test_a_file_of_another_kind_is_named(name, text, kind):
    assert kind_of(name, text) == kind


@pytest.mark.parametrize("key", ["memory.live_params", "communication.lone_gather"])
def test_the_schema_of_a_profile_explains_its_keys_with_sentences_of_docstrings(key: str) -> None:
    part, _, name = key.partition(".")
    schema = EngineSpec.model_json_schema()
    reference = schema["properties"][part].get("$ref") or schema["properties"][part]["allOf"][0]["$ref"]
    fields = schema["$defs"][reference.rpartition("/")[2]]
    assert fields["properties"][name]["description"] in " ".join(fields["description"].split())
