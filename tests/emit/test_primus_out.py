"""Plans as experiments of Primus: what its own files leave of Megatron-LM's arguments, and the way back to the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from megatron_expected import differences
from megatron_plans import SHARDED, plan_of
from test_megatron import RECORDED, SOME, read

from planner import estimate_layout
from planner.emit.bundle import bundle_of, write_bundle
from planner.emit.programs import PROGRAMS
from planner.emit.programs.primus import FILE, overrides_for
from planner.emit.read.front import read_foreign
from planner.emit.target import How, refusals, values_of
from planner.errors import InputError

OWN: dict[str, Any] = json.loads((Path(__file__).parent / "primus_defaults.json").read_text())
"""Argument of Megatron-LM -> its value in language_model.yaml and pre_trainer.yaml, composed by Primus' own parser."""
KINDS = {argument: kind for argument, _, kind, *_ in RECORDED.values()}


def namespace_of(overrides: dict[str, Any]) -> dict[str, Any]:
    """Megatron-LM's arguments under Primus: its defaults, Primus' values on top, and the overrides."""
    older = {"use_flash_attn", "add_position_embedding"}  # of the Megatron-LM that Primus names
    assert overrides.keys() <= {*KINDS, *older}  # names of arguments, and not of options
    found = {argument: default for argument, *_, default in RECORDED.values()} | OWN
    shaped = {
        key: read(value, KINDS[key]) if isinstance(value, str) and KINDS[key] == "moe_freq_type" else value
        for key, value in overrides.items()
        if key in KINDS
    }
    return found | shaped


@pytest.mark.parametrize("case", SOME, ids=str)
def test_primus_understands_what_was_priced(case: Any) -> None:
    plan = plan_of(case)
    if words := [message for message, _ in refusals(PROGRAMS["primus"], plan)]:
        assert any(each in " ".join(words) for each in ("window", "training.cuda_graphs", "training.optimizer is muon"))
        return
    assert differences(namespace_of(overrides_for(values_of(PROGRAMS["primus"], plan))), plan) == []


def test_a_run_of_primus_has_the_hosts_of_its_script(tmp_path: Path) -> None:
    job = {"layout": "tp=2,pp=2,dp=4,zero=1,mbs=1", "nodes": 2, "global_batch": 64, "seq_len": 4096}
    plan = estimate_layout("llama3-8b", "dgx-h100", engine="megatron", **job)
    write_bundle(plan, tmp_path / "run", "primus", how=How(), force_unfit=True)
    for named in (tmp_path / "run", tmp_path / "run" / "run.sh"):
        found = read_foreign(named, per_host=8, num_devices=8)
        assert (found.num_hosts, found.num_devices) == (2, 16)
        assert found.layout.items() >= {"tp": "2", "pp": "2"}.items()
    script = tmp_path / "own.sh"
    script.write_text(f"export NNODES=4\nprimus-cli direct -- train pretrain --config {tmp_path}/run/{FILE}\n")
    assert read_foreign(script, per_host=8, num_devices=8).num_hosts == 4
    for slurm in ("srun -N 4 -p gpu", "sbatch --nodes=4", "-N4 --time 9:00"):  # runner/primus-cli-slurm.sh
        script.write_text(f"primus-cli slurm {slurm} -- train pretrain --config {tmp_path}/run/{FILE}\n")
        found = read_foreign(script, per_host=8, num_devices=8)
        assert (found.num_hosts, [each.key for each in found.assumed]) == (4, ["zero"])
    script.write_text(f"primus-cli slurm srun -N $NODES -- train pretrain --config {tmp_path}/run/{FILE}\n")
    with pytest.raises(InputError, match=r"the number of hosts is \$NODES, which the file does not set"):
        read_foreign(script, per_host=8, num_devices=8)
    assert read_foreign(script, per_host=8, num_devices=8, define=["NODES=4"]).num_hosts == 4
    script.write_text("primus-cli direct -- train pretrain --config $EXP\n")
    with pytest.raises(InputError, match=r"config is \$EXP, which the file does not set") as error:
        read_foreign(script, per_host=8, num_devices=8)
    assert "--define" in error.value.mistakes[0].hint


def test_an_experiment_reads_back_as_the_same_plan(tmp_path: Path) -> None:
    num_read = 0
    for case, engine in [*((each, "megatron") for each in SOME), (SHARDED[0], "megatron-fsdp")]:
        try:
            plan = plan_of(case, engine)
            made = bundle_of(plan, "primus", how=How(), force_unfit=True)
        except InputError:
            continue
        path = tmp_path / FILE
        path.write_text(made.texts[FILE])
        found = read_foreign(path, num_devices=plan.layout.world_size, per_host=8)
        told = dict(found.layout)
        assert found.engine == engine
        assert not [each for each in found.assumed if each.kind == "open"]
        for key in ("tp", "pp", "cp", "ep", "etp", "zero", "mbs", "sp", "interleave", "hsdp", "offload"):
            assert told.get(key, str(getattr(plan.layout, key))) == str(getattr(plan.layout, key)), (case, key)
        assert told["recompute"] == plan.layout.recompute[0]
        for key in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "activation", "moe", "mla"):
            assert getattr(found.model, key) == getattr(plan.model, key), (case, key)
        num_read += 1
    assert num_read >= 12
