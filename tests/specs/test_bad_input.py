"""A table of broken documents: each mistake is named in plain words at the line and column of its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cost.estimate import estimate
from planner.errors import InputError
from planner.layout_text import parse_layout
from planner.specs.cluster import DeviceSpec
from planner.specs.engine import EngineSpec
from planner.specs.load import load_job

MODEL = """\
# a model
name: small
architecture: llama
num_layers: 32
hidden_size: 4096
num_heads: 32
num_kv_heads: 8
ffn_hidden_size: 14336
vocab_size: 128256
max_sequence_length: 8192
tied_embeddings: false
"""
CLUSTER = """\
name: mine
device: own
devices_per_host: 8
hosts: 2
links:
  - {name: nvlink, spans: 8 devices, bandwidth: 300 GB/s, latency: 3 us, kind: switch}
  - {name: infiniband, spans: cluster, bandwidth: 25 GB/s, latency: 8 us, kind: fat-tree}
price: 2.00 USD/h per device
"""
DEVICE = """\
name: own
kind: cuda
memory: 79 GiB
peak:
  fp32: 19.5 TFLOP/s
  bf16: 312 TFLOP/s
memory_bandwidth: 2039 GB/s
num_processors: 108
efficiency:
  matmul: 0.8
  matmul_half_depth: 256
  attention: 0.5
  memory: 0.8
  launch: 4 us
  layer_floor: 300 us
reserved_memory: 1.5 GiB
"""
TRAINING = """\
sequence_length: 8192
global_batch_size: 1024
precision: bf16
optimizer: adamw
memory_recipe: engine
tokens: 300e9
"""
DOCUMENTS = {"model": MODEL, "cluster": CLUSTER, "devices/own": DEVICE, "training": TRAINING}


def load(folder: Path, documents: dict[str, str] = DOCUMENTS, **options: Any) -> Any:
    (folder / "devices").mkdir(exist_ok=True)
    for name, text in documents.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    paths = {name: str(folder / f"{name}.yaml") for name in ("model", "cluster", "training")}
    return load_job(**{**paths, **options})


def mistakes_of(folder: Path, documents: dict[str, str] = DOCUMENTS, **options: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(InputError) as caught:
        load(folder, documents, **options)
    found = caught.value.mistakes
    return [(each.where.removeprefix(f"{folder}/"), each.message, each.hint) for each in found]


def test_the_documents_of_the_contract_load(tmp_path: Path) -> None:
    job = load(tmp_path)
    assert (job.cluster.num_devices, job.cluster.device.memory, job.training.tokens) == (16, 79 * 2**30, 300e9)
    assert job.cluster.price == 2.0


# kind of document, what is replaced, by what, "line:column", part of the message, part of the hint
TABLE = [
    # unknown and missing keys
    ("model", "hidden_size: 4096", "hiden_size: 4096", "5:1", "unknown key `hiden_size`", "did you mean `hidden_size`"),
    ("model", "hidden_size: 4096\n", "", "2:1", "`hidden_size` is missing", ""),
    ("model", "name: small\n", "", "2:1", "`name` is missing", ""),
    ("model", "vocab_size", "zzz", "9:1", "unknown key `zzz`", "keys here are name, architecture"),
    ("model", "vocab_size", "VOCAB_SIZE", "9:1", "unknown key `VOCAB_SIZE`", "did you mean `vocab_size`"),
    ("cluster", "spans: 8 devices, ", "", "6:5", "`links.1.spans` is missing", "`8 devices`, or `cluster`"),
    ("cluster", "latency: 8 us", "latncy: 8 us", "7:60", "unknown key `links.2.latncy`", "did you mean `latency`"),
    ("cluster", "hosts: 2", "nodes: 2", "4:1", "unknown key `nodes`", ""),
    ("devices/own", "  launch", "  lauch", "14:3", "unknown key `device.efficiency.lauch`", "did you mean `launch`"),
    ("devices/own", "memory: 79 GiB\n", "", "1:1", "`device.memory` is missing", "what the driver lets"),
    ("devices/own", "fp32:", "fp64:", "5:3", "unknown key `device.peak.fp64`", "or `fp16`"),
    ("training", "tokens: 300e9", "deadline: 3 d", "6:1", "`deadline` needs the token budget", "`tokens: 300B`"),
    ("training", "optimizer", "optimiser", "4:1", "unknown key `optimiser`", "did you mean `optimizer`"),
    # wrong types, nothing is coerced
    ("model", "num_layers: 32", "num_layers: '32'", "4:1", "must be a whole number, not `32`", "at least 1"),
    ("model", "num_layers: 32", "num_layers: 32.0", "4:1", "must be a whole number, not `32.0`", "write 32"),
    ("model", "num_layers: 32", "num_layers: 3.2", "4:1", "must be a whole number, not `3.2`", "at least 1"),
    ("model", "num_layers: 32", "num_layers: true", "4:1", "must be a whole number, not `true`", ""),
    ("model", "num_layers: 32", "num_layers:", "4:1", "must be a whole number, not `null`", ""),
    ("model", "num_layers: 32", "num_layers: [32]", "4:1", "must be a whole number, not a list", ""),
    ("model", "num_layers: 32", "num_layers: {a: 1}", "4:1", "must be a whole number, not a mapping", ""),
    ("model", "tied_embeddings: false", "tied_embeddings: no", "11:1", "must be true or false, not `no`", ""),
    ("model", "tied_embeddings: false", "tied_embeddings: 0", "11:1", "must be true or false, not `0`", ""),
    ("model", "name: small", "name: 7", "2:1", "must be text, not `7`", ""),
    ("cluster", "device: own", "device: 80", "2:1", "`device` must be a mapping", ""),
    ("devices/own", "matmul: 0.8", "matmul: high", "10:3", "must be a number, not `high`", "more than 0 and at most 1"),
    ("devices/own", "peak:\n  fp32: 19.5 TFLOP/s\n  bf16: 312 TFLOP/s", "peak: 3", "4:1", "must be a mapping", ""),
    # out of range
    ("model", "num_layers: 32", "num_layers: 0", "4:1", "must be at least 1, not `0`", "at least 1 and at most 10000"),
    ("model", "hidden_size: 4096", "hidden_size: -4096", "5:1", "must be at least 1, not `-4096`", "at most 1000000"),
    ("model", "vocab_size: 128256", "vocab_size: 1e5", "9:1", "must be a whole number", "write 100000"),
    ("model", "vocab_size: 128256", f"vocab_size: {10**30}", "9:1", "must be at most 100000000", "at least 1"),
    ("cluster", "devices_per_host: 8", "devices_per_host: 0", "3:1", "must be at least 1", "at most 10000"),
    (
        "devices/own",
        "matmul: 0.8",
        "matmul: 82",
        "10:3",
        "must be at most 1.25, not `82`",
        "more than 0 and at most 1.25",
    ),
    ("devices/own", "memory: 79 GiB", "memory: 0 GiB", "3:1", "must be more than zero", ""),
    ("devices/own", "memory: 79 GiB", "memory: -1 GiB", "3:1", "must be more than zero", ""),
    ("training", "global_batch_size: 1024", "global_batch_size: 0", "2:1", "must be at least 1", "at most 100000000"),
    # units
    ("devices/own", "memory: 79 GiB", "memory: 79", "3:1", "79 has no unit", ""),
    ("devices/own", "memory: 79 GiB", "memory: 79 Gib", "3:1", "'Gib' is not a known unit", ""),
    ("devices/own", "memory: 79 GiB", "memory: 79 GB/s", "3:1", "is a unit of bytes per second", ""),
    ("devices/own", "memory: 79 GiB", "memory: lots", "3:1", "'lots' is not a quantity", ""),
    ("devices/own", "bf16: 312 TFLOP/s", "bf16: 312 TFLOP", "6:3", "'TFLOP' is not a known unit", ""),
    ("cluster", "25 GB/s", "25 GB", "7:40", "is a unit of bytes; bytes per second are written", ""),
    ("cluster", "8 us", "8", "7:60", "8 has no unit", ""),
    ("cluster", "2.00 USD/h per device", "2.00", "8:1", "2.0 has no unit", ""),
    # choices
    ("model", "architecture: llama", "architecture: lama", "3:1", "cannot be `lama`", "did you mean `llama`"),
    ("training", "precision: bf16", "precision: bfloat16", "3:1", "cannot be `bfloat16`", "did you mean `bf16`"),
    ("training", "precision: bf16", "precision: int4", "3:1", "cannot be `int4`", "one of fp32, fp16, bf16"),
    ("training", "precision: bf16", "precision: fp16", "3:1", "own does not compute in fp16", "it has fp32, bf16"),
    ("cluster", "kind: fat-tree", "kind: fattree", "7:75", "cannot be `fattree`", "did you mean `fat-tree`"),
    # rules about several keys
    ("model", "num_heads: 32", "num_heads: 33", "6:1", "33 does not divide hidden_size 4096", ""),
    ("model", "num_kv_heads: 8", "num_kv_heads: 5", "7:1", "5 does not divide num_heads 32", ""),
    ("cluster", "spans: cluster", "spans: 8 devices", "5:1", "innermost first", ""),
    ("cluster", "spans: cluster", "spans: 12 devices", "5:1", "spans 12 devices of 16", ""),
    (
        "cluster",
        "25 GB/s,",
        "25 GB/s, measured_bandwidth: 9 GB/s,",
        "7:5",
        "belong together; write both or neither",
        "",
    ),
    (
        "cluster",
        "25 GB/s,",
        "25 GB/s, measured_bandwidth: 9 TB/s, measured_hosts: 8,",
        "7:5",
        "measured_bandwidth is more than bandwidth, the line rate; correct one of them",
        "",
    ),
    ("cluster", "spans: cluster", "spans: 8 GPUs", "7:24", "'8 GPUs' is no span", ""),
    # names that go into file names and scripts
    ("model", "name: small", "name: a b", "2:1", "cannot be `a b`", "letters, digits"),
    ("model", "name: small", "name: $(reboot)", "2:1", "cannot be `$(reboot)`", "letters, digits"),
    ("model", "name: small", f"name: {'x' * 10_000}", "2:1", "...`", "1 to 64"),
    ("model", "name: small", 'name: "\\e[31m\\u202e"', "2:1", "`\\x1b[31m\\u202e`", "letters, digits"),
    # a name that no file has
    ("cluster", "device: own", "device: h100-80g", "2:1", "unknown device `h100-80g`", "did you mean `h100-80gb`"),
    ("cluster", "device: own", "device: ../own", "2:1", "unknown device `../own`", "`own`"),
    # the reader's own
    ("model", "num_heads: 32", "num_layers: 32", "6:1", "`num_layers` is given twice, first in line 4", ""),
    ("cluster", "hosts: 2", "hosts: 02", "4:8", "`02` has a leading zero", "write 2"),
]


@pytest.mark.parametrize(("document", "old", "new", "place", "message", "hint"), TABLE)
def test_broken(tmp_path: Path, document: str, old: str, new: str, place: str, message: str, hint: str) -> None:
    assert DOCUMENTS[document].count(old) == 1
    broken = {**DOCUMENTS, document: DOCUMENTS[document].replace(old, new)}
    found = mistakes_of(tmp_path, broken)
    where, text, help_ = found[-1]
    num_mistakes = 2 if "zzz" in new else 1  # a key that is nothing like the missing one leaves it missing
    assert where == f"{document}.yaml:{place}", found
    assert message in text
    assert hint in help_
    assert len(found) == num_mistakes, found
    for each in (where, text, help_):
        assert each.isprintable()
        assert "pydantic" not in each
        assert len(each) < 450


def test_the_mistakes_of_all_documents_and_options_come_at_once(tmp_path: Path) -> None:
    broken = {
        "model": MODEL.replace("32", "0"),
        "cluster": CLUSTER.replace("300 GB/s", "300").replace("own", "nobody"),
        "devices/own": DEVICE,
        "training": TRAINING.replace("adamw", "adam"),
    }
    found = mistakes_of(tmp_path, broken, engine="megatrom", settings=["nvlnk.latency=1 us"], headroom=1.5)
    assert [where for where, _, _ in found] == [
        "--headroom",
        "--engine megatrom",
        "cluster.yaml:2:1",
        "--set nvlnk.latency=1 us",
        "model.yaml:4:1",
        "model.yaml:6:1",
        "cluster.yaml:6:38",
        "training.yaml:4:1",
    ]


def test_at_most_twenty_mistakes_are_shown(tmp_path: Path) -> None:
    many = "".join(f"unknown_{n}: 1\n" for n in range(30))
    assert len(mistakes_of(tmp_path, {**DOCUMENTS, "model": MODEL + many, "training": TRAINING + many})) == 20


def test_a_message_shows_the_line_and_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, {**DOCUMENTS, "model": MODEL.replace("num_layers", "num_layer")})
    assert str(caught.value) == (
        f"{tmp_path}/model.yaml:4:1: unknown key `num_layer`\n    num_layer: 32\n    help: did you mean `num_layers`?"
    )


def numeric_keys(schema: dict[str, Any], definitions: dict[str, Any], path: str) -> set[str]:
    """Every key of a document whose value is a number or a pair of numbers; `mixed` stands for each key of a table."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    keys = {path} if schema.get("type") in ("number", "integer") and "enum" not in schema else set()
    if [each.get("type") for each in schema.get("prefixItems", [])] == ["integer", "integer"]:
        keys.add(f"{path}[]")
    inner = {**schema.get("properties", {})}
    if isinstance(schema.get("additionalProperties"), dict):
        inner["mixed"] = schema["additionalProperties"]
    return keys.union(*(numeric_keys(each, definitions, f"{path}.{key}") for key, each in inner.items()))


SCHEMAS = {"engine": EngineSpec.model_json_schema(), "device": DeviceSpec.model_json_schema()}
KEYS = sorted(set().union(*(numeric_keys(each, each["$defs"], name) for name, each in SCHEMAS.items())))


@pytest.mark.parametrize("value", ["1" + 24 * "0", "1e24", "1" + 30 * "0", "1e300", "1e-39", "1e-300"])
@pytest.mark.parametrize("key", KEYS)
def test_no_number_of_an_engine_or_a_device_makes_a_forecast_infinite(key: str, value: str) -> None:
    """Each is refused, or priced with finite seconds and bytes."""
    name, pair, _ = key.partition("[")
    setting = f"{name}=[{value},{value}]" if pair else f"{name}={value}"
    size: dict[str, Any] = {"sequence_length": 2048, "global_batch_size": 64, "nodes": 2}
    for engine, layout in (("megatron", "tp=2,pp=2,dp=4,interleave=2,zero=1,sp=1"), ("deepspeed", "dp=16,zero=3")):
        try:
            job = load_job(model="llama2-7b", cluster="dgx-h100", engine=engine, settings=(setting,), **size)
        except InputError:
            continue
        found = estimate(job, parse_layout(layout, num_layers=32, num_devices=16))
        assert np.isfinite(found.step_seconds)
        assert all(np.isfinite(stage.total_bytes) for stage in found.memory)
