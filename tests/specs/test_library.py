"""Shipped files: each one loads, has its file's name, and has the published number of parameters."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from planner.cost.parameters import num_params
from planner.evidence.rows.knowledge import knowledge
from planner.specs.by_name import (
    engine_names,
    load_engine,
    load_model,
    model_names,
    model_source,
    priced_engine_names,
)
from planner.specs.cluster_documents import cluster_names, cluster_source, load_cluster
from planner.specs.document import Document
from planner.specs.library import path_of
from planner.specs.schema import schemas, write_schemas
from planner.specs.yaml import read_yaml

ROOT = Path(__file__).parents[2]

# Exact: parameters of the modules that the transformers library builds from the published configurations
# (llama2-13b, llama2-70b, llama3-405b: the sizes of the published checkpoints).
EXACT = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
}
# Narayanan et al., SC 2021 (arXiv 2104.04473), table 1: layers, hidden size, heads, billions of parameters.
SC21 = {
    "megatron-1.7b": (24, 2304, 24, 1.7),
    "megatron-3.6b": (30, 3072, 32, 3.6),
    "megatron-7.5b": (36, 4096, 32, 7.5),
    "megatron-18.4b": (40, 6144, 48, 18.4),
    "megatron-39.1b": (48, 8192, 64, 39.1),
    "megatron-76.1b": (60, 10240, 80, 76.1),
    "megatron-145.6b": (80, 12288, 96, 145.6),
    "megatron-310.1b": (96, 16384, 128, 310.1),
    "megatron-529.6b": (105, 20480, 128, 529.6),
    "megatron-1t": (128, 25600, 160, 1008.0),
}
ROUNDED = {"gpt3-175b": 175e9, "megatron-22b": 22e9}


@pytest.mark.parametrize("name", model_names())
def test_models_load_under_their_own_names(name: str) -> None:
    assert load_model(name).name == name
    assert ", read 20" in model_source(name) or name.startswith("tiny-")


@pytest.mark.parametrize("name", cluster_names())
def test_clusters_load_under_their_own_names(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert ", read 20" in cluster_source(name) or name == "local-cpu"
    for pool in cluster.pools:
        assert pool.scale_up_devices <= pool.num_devices
        bandwidths = [link.bandwidth for link in pool.links]
        assert bandwidths == sorted(bandwidths, reverse=True), "the scale-up link is the fastest"
        assert pool.device.reserved_memory < pool.device.memory


@pytest.mark.parametrize("name", [*engine_names(), *priced_engine_names()])
def test_engines_load_under_their_own_names(name: str) -> None:
    assert load_engine(name).name == name


def test_device_files_are_named_after_their_devices_and_all_are_used() -> None:
    files = {path.stem for path in (ROOT / "clusters" / "devices").glob("*.yaml")}
    in_tables = {entry["device"] for entry in knowledge("gpus")["gpus"]}  # of published runs
    assert files == {pool.device.name for name in cluster_names() for pool in load_cluster(name).pools} | in_tables
    for name in files:
        assert read_yaml(path_of("clusters/devices", name)).plain["name"] == name


def test_the_names_of_the_contract_are_shipped() -> None:
    assert {*EXACT, *SC21, *ROUNDED, "tiny-gpt", "tiny-llama"} <= set(model_names())
    contract = {"dgx1-v100", "dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "local-cpu"}
    assert contract <= set(cluster_names())
    assert "torch" in engine_names()


@pytest.mark.parametrize(("name", "expected"), EXACT.items())
def test_parameter_counts_are_exact(name: str, expected: int) -> None:
    assert num_params(load_model(name)) == expected


@pytest.mark.parametrize(("name", "row"), SC21.items())
def test_parameter_counts_of_the_sc21_table(name: str, row: tuple[int, int, int, float]) -> None:
    layers, hidden, heads, billions = row
    model = load_model(name)
    assert (model.num_layers, model.hidden_size, model.num_heads) == (layers, hidden, heads)
    # equation 2 of the paper; it leaves out the last norm (2h)
    closed_form = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
    assert num_params(model) == pytest.approx(closed_form + 2 * hidden, rel=1e-12)
    assert round(num_params(model) / 1e9, 1) == billions


@pytest.mark.parametrize(("name", "expected"), ROUNDED.items())
def test_parameter_counts_that_are_only_published_rounded(name: str, expected: float) -> None:
    assert num_params(load_model(name)) == pytest.approx(expected, rel=0.02)


def test_measured_figures_of_the_hardware_notes() -> None:
    """Achieved share of the peak: below the best measured product (A100 0.87, H100 0.80, B200 0.78, GB200 0.73)."""
    best = {"dgx-a100": 271.2 / 312, "dgx-h100": 794.5 / 989, "dgx-b200": 1745 / 2250, "gb200-nvl72": 1822 / 2500}
    for name, share in best.items():
        assert load_cluster(name).device.efficiency.matmul == pytest.approx(0.94 * share, abs=0.006)
    link = load_cluster("dgx-a100").links[0]
    reached = link.efficiency * 7 / (7 + link.half_peers)  # by 8 devices, which have 7 peers each
    assert link.bandwidth * reached == pytest.approx(227e9, rel=0.01)  # NCCL all-reduce on 8 A100


@pytest.mark.parametrize(
    "document",
    [
        *(load_model(name) for name in model_names()),
        *(load_cluster(name) for name in cluster_names()),
        *(load_engine(name) for name in (*engine_names(), *priced_engine_names())),
    ],
    ids=lambda document: document.name,
)
def test_a_document_written_out_reads_back_equal(document: Document) -> None:
    again = type(document).model_validate_json(document.model_dump_json())
    assert again == document
    assert type(document).model_validate_json(json.dumps(document.model_dump(mode="json"))) == document


def plain(path: Path) -> Any:
    with path.open(encoding="utf-8") as file:
        return json.loads(json.dumps(yaml.safe_load(file)))


def files_of(kind: str) -> list[Path]:
    folder = {"device": "clusters/devices", "engine": "planner/engines", "profile": "planner/evidence/profiles"}.get(
        kind, f"{kind}s"
    )
    return sorted((ROOT / folder).glob("*.yaml"))


@pytest.mark.parametrize("kind", ["model", "cluster", "device", "engine", "profile"])
def test_shipped_files_follow_the_published_schemas(kind: str) -> None:
    schema = schemas()[kind.replace("profile", "engine")]
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    assert files_of(kind)
    for path in files_of(kind):
        document = {key: float(value) if value == "1e-5" else value for key, value in plain(path).items()}  # YAML 1.1
        validator.validate(document)
        assert list(validator.iter_errors({**document, "unknown": 1}))
        assert list(validator.iter_errors({key: value for key, value in document.items() if key != "name"}))


def test_published_schemas_are_those_of_the_documents() -> None:
    """Editors use docs/schemas for completion: keys, their defaults and their ranges."""
    for name, schema in schemas().items():
        published = json.loads((ROOT / "docs" / "schemas" / f"{name}.json").read_text(encoding="utf-8"))
        assert published == schema, f"docs/schemas/{name}.json: make docs"


def test_schemas_of_a_training_file() -> None:
    validator = jsonschema.Draft202012Validator(schemas()["training"])
    validator.validate({"sequence_length": 8192, "global_batch_size": 1024, "precision": "bf16", "tokens": 300e9})
    validator.validate({"steps": 5})
    validator.validate({"steps": "5k", "sequence_length": "32k"})
    for wrong in ({"steps": 0}, {"precision": "fp7"}, {"dropout": 1}, {"sequence_length": "8192"}):
        assert list(validator.iter_errors(wrong))


def test_schemas_are_written_with_equal_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "folder" / "one", tmp_path / "two"
    write_schemas(one)
    subprocess.run([sys.executable, "-m", "planner.specs.schema", str(two)], check=True, cwd=ROOT)
    write_schemas(one)  # into a folder that exists
    for name in schemas():
        assert (tmp_path / "folder" / "one" / f"{name}.json").read_bytes() == (
            tmp_path / "two" / f"{name}.json"
        ).read_bytes()


def test_an_installed_package_finds_its_documents(tmp_path: Path) -> None:
    """The layout of a wheel: planner/library, and nothing beside the package."""
    package = tmp_path / "site" / "planner"
    shutil.copytree(ROOT / "planner", package, ignore=shutil.ignore_patterns("__pycache__", "trainer"))
    for kind in ("models", "clusters"):
        shutil.copytree(ROOT / kind, package / "library" / kind)
    code = (
        "import planner\n"
        "from planner.specs.by_name import model_names\n"
        "from planner.specs.load import load_job\n"
        "job = load_job(model='tiny-gpt', cluster='dgx-a100', global_batch_size=8)\n"
        "print(planner.__file__, job.cluster.device.name, len(model_names()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path / "site"
    )
    assert done.stdout.split() == [str(package / "__init__.py"), "a100-80gb", str(len(model_names()))]
