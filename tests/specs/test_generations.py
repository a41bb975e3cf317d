"""A device described by four numbers: its generation supplies the rest, marked as assumed."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from planner.errors import InputError
from planner.search.given import plan_for_text
from planner.show.rows import BAND
from planner.specs import library
from planner.specs.by_name import load_device
from planner.specs.cluster import DeviceSpec, Generation
from planner.specs.load import load_job

BOX = """\
name: box
device: {name: own, generation: ada, memory: 44.4 GiB, peak: {bf16: 362 TFLOP/s}, memory_bandwidth: 864 GB/s}
devices_per_host: 8
links:
- {name: pcie, spans: 8 devices, bandwidth: 31.5 GB/s, latency: 5.7 us, kind: pcie}
"""
# Data sheets: processors of chips that are not half switched off for 32-bit sums (GeForce, A10G).
HALVED = {"rtx3090-24gb", "rtx4090-24gb", "rtx5090-32gb", "rtx5060ti-16gb", "a10g-24gb"}
GENERATIONS = {name: load_device(name).generation for name in library.names("clusters/devices") if name != "cpu-core"}


def job_of(path: Path, *settings: str):
    path.write_text(BOX, encoding="utf-8")
    return load_job(model="llama3-8b", cluster=str(path), global_batch_size=32, sequence_length=4096, settings=settings)


def test_every_generation_that_can_be_named_is_described() -> None:
    assert set(get_args(Generation)) == set(library.names("clusters/generations"))


def test_four_numbers_make_a_device(tmp_path: Path) -> None:
    device = job_of(tmp_path / "box.yaml").cluster.device
    assert (device.kind, device.reserved_memory, device.efficiency.launch) == ("cuda", 1.5 * 2**30, 4e-6)
    assert device.num_processors == 142  # of an L40S
    defaults = {key: field.default for key, field in type(device.efficiency).model_fields.items()}
    every = {f"efficiency.{key}" for key, value in device.efficiency if value != defaults[key]}
    assert set(device.assumed) == every | {"num_processors", "reserved_memory"}


@pytest.mark.parametrize(("peak", "words"), [("bf16: 362", "`bf16`: 362 has no unit"), ("BF16: 362 TFLOP/s", "BF16")])
def test_a_peak_that_cannot_be_read_is_the_only_mistake(peak: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(BOX.replace("bf16: 362 TFLOP/s", peak), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_job(model="llama3-8b", cluster=str(path), global_batch_size=32, sequence_length=4096)
    (mistake,) = caught.value.mistakes
    assert words in mistake.message


def test_what_is_given_is_not_assumed_whoever_gives_it(tmp_path: Path) -> None:
    settings = ("device.efficiency.matmul=0.6", "device.num_processors=10")
    device = job_of(tmp_path / "box.yaml", *settings).cluster.device
    assert (device.efficiency.matmul, device.num_processors) == (0.6, 10)
    assert not {"efficiency.matmul", "num_processors"} & set(device.assumed)
    assert "efficiency.attention" in device.assumed


def test_a_device_written_out_and_edited_keeps_what_is_still_assumed() -> None:
    whole = load_device("l40s-48gb").model_dump(mode="json")
    whole["efficiency"]["attention"] = 0.6
    again = DeviceSpec.model_validate(whole)
    assert again.efficiency.attention == 0.6
    assert set(load_device("l40s-48gb").assumed) - set(again.assumed) == {"efficiency.attention"}


def test_without_a_generation_the_keys_are_missed_and_the_hint_names_it(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(BOX.replace("generation: ada, ", ""), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_job(model="llama3-8b", cluster=str(path), global_batch_size=32)
    found = {each.message: each.hint for each in caught.value.mistakes}
    assert {"`device.efficiency` is missing", "`device.num_processors` is missing"} <= set(found)
    assert all("`generation`" in hint for hint in found.values())


def test_a_misspelt_generation_and_a_wrong_link_are_a_mistake_each(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(BOX.replace("generation: ada, ", "generation: adaa, ").replace("latency:", "latensy:"), "utf-8")
    with pytest.raises(InputError) as caught:
        load_job(model="llama3-8b", cluster=str(path), global_batch_size=32)
    generation, *links = caught.value.mistakes
    assert generation.message == "`device.generation` cannot be `adaa`"
    assert generation.hint.startswith("did you mean `ada`?")
    assert links
    assert all(each.message.endswith("latensy`") and "latency" in each.hint for each in links)


@pytest.mark.parametrize("name", sorted(set(GENERATIONS) - HALVED))
def test_processors_follow_from_the_peak(name: str) -> None:
    device = load_device(name)
    document = device.model_dump(mode="json", exclude={"num_processors", "assumed"})
    guessed = DeviceSpec.model_validate(document).num_processors
    slow = 0.75 if name == "h20-96gb" else 0.0  # sold with a third of the tensor peak of its chip
    assert guessed == pytest.approx(device.num_processors, rel=max(0.45, slow))


def test_a_plan_says_that_nothing_was_measured_on_the_device() -> None:
    words = {}
    for cluster in ("g5", "p5"):
        job = load_job(model="llama3-8b", cluster=cluster, global_batch_size=8, sequence_length=2048)
        plan = plan_for_text(job, "tp=1,zero=3,dp=8,mbs=1")
        words[cluster] = {name: str(of(plan)) for name, of in BAND.items()}
    assert "a10g-24gb those of ampere" in words["g5"]["device"]
    assert "no run behind it has a10g-24gb" in words["g5"]["band"]
    assert "planner measure" in words["g5"]["narrower"]
    assert words["p5"]["device"] == ""
    assert "planner measure" not in words["p5"]["narrower"]


@pytest.mark.parametrize(
    ("setting", "meant"), [("price=2 USD/h", "`cluster.price`"), ("peak.bf16=1 TFLOP/s", "`device.peak.bf16`")]
)
def test_a_setting_without_its_document_is_told_the_whole_path(setting: str, meant: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job(model="llama3-8b", cluster="p5", global_batch_size=8, settings=(setting,))
    assert meant in caught.value.mistakes[0].hint


def test_list_prices_say_where_and_when_they_were_read() -> None:
    folder = library.folder("clusters")
    priced = [
        line for path in folder.glob("*.yaml") for line in path.read_text().splitlines() if line.startswith("price")
    ]
    assert len(priced) >= 10
    assert all(" a host, list of 2026-" in line for line in priced)


def test_a_wrong_generation_is_one_mistake_that_names_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(BOX.replace("generation: ada", "generation: hoper"), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_job(model="llama3-8b", cluster=str(path), global_batch_size=32)
    (mistake,) = caught.value.mistakes
    assert mistake.where.startswith(f"{path}:")
    assert "did you mean `hopper`?" in mistake.hint
    assert all(each in mistake.hint for each in get_args(Generation))


@pytest.mark.parametrize(
    ("right", "wrong", "hint"),
    [
        (", latency: 5.7 us", "", "write it as in `latency: 8 us`"),
        ("spans: 8 devices", "spans: node", ""),
        ("price: 2 USD/h per device", "price: 2 USD", ""),
    ],
)
def test_mistakes_of_a_link_and_a_price_say_what_to_write(tmp_path: Path, right: str, wrong: str, hint: str) -> None:
    path = tmp_path / "box.yaml"
    text = f"{BOX}price: 2 USD/h per device\n"
    assert right in text
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_job(model="llama3-8b", cluster=str(path), global_batch_size=32)
    (mistake,) = caught.value.mistakes
    assert hint in mistake.hint
    assert mistake.where.startswith(f"{path}:")
    assert any(each in mistake.text() for each in ("as in `8 devices`", "USD/h", "latency"))
