"""Scripts that users of Megatron-LM and its forks write: spellings met in public repositories, retyped as facts."""

from __future__ import annotations

import subprocess

import pytest

from planner.api import estimate_file
from planner.emit.read.front import read_foreign
from planner.emit.read.shell import commands_of
from planner.errors import InputError

RUN = "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --seq-length 64 --micro-batch-size 1"
START = "torchrun --nproc_per_node 8 pretrain_gpt.py"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # the granularity is selective whenever --recompute-activations is there: arguments.py, validate_args
        ("--recompute-granularity full --recompute-activations", {"recompute": "selective"}),
        ("--recompute-activations --recompute-granularity selective", {"recompute": "selective"}),
        ("--overlapped-distributed-optimizer", {"zero": "1"}),
        ("--no-scatter-gather-tensors-in-pipeline --tensor-model-parallel-size 2", {"tp": "2"}),
        ("--rank $RANK --world-size $WORLD_SIZE --tensor-model-parallel-size 2", {"tp": "2"}),
    ],
)
def test_options_of_forks_and_of_yesterday(options, wanted, written) -> None:
    found = read_foreign(written(f"{START} {RUN} --bf16 {options}"))
    assert {key: found.layout[key] for key in wanted} == wanted


def test_norms_and_optimizers_by_their_names_in_forks(written) -> None:
    for norm in ("--normalization rmsnorm", "--RMSNorm"):
        found = read_foreign(written(f"{START} {RUN} --bf16 {norm} --optimizer fusedadamw"))
        assert (found.model.norm, "training.optimizer=adamw" in found.settings) == ("rmsnorm", True)


def test_a_stage_1_of_a_fork_is_not_the_only_one(written) -> None:
    """Megatron-LM-MoELPR trains routers and new experts alone in its stage 1; a degree of 1 is none."""
    with pytest.raises(InputError, match="moe_lpr_stage: the layout may depend on this key"):
        read_foreign(written(f"{START} {RUN} --bf16 --moe-lpr-stage 1"))
    assert read_foreign(written(f"{START} {RUN} --bf16 --own-parallel-size 1")).layout["tp"] == "1"


def test_a_command_without_a_global_batch_has_one_microbatch_for_each_replica(written) -> None:
    """By hand from Megatron-LM, arguments.py, validate_args: 3 sequences for each of 8 / 2 replicas."""
    text = f"{START} {RUN.replace('--micro-batch-size 1', '--batch-size 3')} --bf16 --tensor-model-parallel-size 2"
    plan = estimate_file(written(text), "dgx-h100")
    assert (plan.layout.mbs, plan.layout.dp, plan.training.global_batch_size) == (3, 4, 12)


@pytest.mark.parametrize("start", ["mpirun -np 16 -npernode 8", "mpiexec -n 16 --hostfile hosts", "time mpirun -np 16"])
def test_mpi_starts_a_number_of_ranks_on_all_hosts(start, written) -> None:
    found = read_foreign(written(f"{start} python pretrain_gpt.py {RUN} --bf16"))
    assert found.num_devices == 16


@pytest.mark.parametrize(
    ("script", "options", "key"),
    [
        ("pretrain_gpt.py", "--deepspeed --deepspeed_config $1", "zero_stage"),
        ("pretrain_gpt.py", "--attention-output-gate", "attention_output_gate"),
        ("pretrain_gpt.py", "--hybrid-override-pattern M-M-", "hybrid_override_pattern"),
        ("pretrain_gpt.py", "--grpo-group-size 16", "grpo_group_size"),
        ("pretrain_mae.py", "", "launch.script"),
        ("own/pretrain_bert.py", "", "launch.script"),
        ("examples/multimodal/train.py", "", "launch.script"),
        ("run_text_generation.py", "", "launch.script"),
    ],
)
def test_what_has_no_price_leaves_the_verdict_open(script, options, key, written) -> None:
    text = f"torchrun --nproc_per_node 8 {script} {RUN} --bf16 --global-batch-size 8 {options}"
    found = read_foreign(written(text))
    assert [each.key for each in found.assumed if each.kind == "open"] == [key]
    assert estimate_file(written(text), "dgx-h100").verdict == "unknown"


def test_the_stage_of_zero_that_is_in_another_file_is_settled_by_the_layout(written) -> None:
    path = written(f"{START} {RUN} --bf16 --global-batch-size 8 --deepspeed --deepspeed_config ds.json")
    plan = estimate_file(path, "dgx-h100", layout="zero=1")
    assert (plan.layout.zero, plan.verdict) == (1, "fits")


def test_blocks_of_a_model_that_the_user_names_are_those_of_its_document(written) -> None:
    path = written(f"{START} {RUN} --bf16 --hybrid-override-pattern M-M- --global-batch-size 8")
    assert estimate_file(path, "dgx-h100", model="llama3-8b").verdict != "unknown"


def test_a_command_with_neither_sizes_nor_degrees_has_those_of_its_script(written) -> None:
    path = written("torchrun --nproc_per_node 8 own.py --micro-batch-size 4 --global-batch-size 128")
    with pytest.raises(InputError, match="which only the program knows"):
        estimate_file(path, "dgx-h100", model="llama3-8b", seq_len=64)
    plan = estimate_file(path, "dgx-h100", model="llama3-8b", seq_len=64, layout="tp=2,pp=1,cp=1")
    assert plan.layout.tp == 2


def test_a_program_in_python_is_no_script(written) -> None:
    text = f'"""Usage: {START} {RUN} --bf16\n"""\nimport subprocess\n'
    with pytest.raises(InputError, match="of no kind that is known here"):
        read_foreign(written(text, "launch.py"))
    assert read_foreign(written(f"{START} {RUN} --bf16")).num_devices == 8


def test_adapters_keep_their_few_states_on_the_device(written) -> None:
    text = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B-Thinking-2507 --expert_model_parallel_size 8 "
    text += "--max_length 2048 --train_type lora --lora_rank 8 --optimizer_cpu_offload true"
    plan = estimate_file(written(text), "dgx-h100")
    assert (plan.layout.offload, plan.training.lora_rank, plan.model.name) == ("none", 8, "qwen3-30b-a3b")


@pytest.mark.parametrize(
    "text",
    [
        "declare -r TP=4",
        "typeset TP=2; readonly PP=2",
        "local() { :; }; declare -i TP=8",
        "F=true; if $F; then TP=8; else TP=1; fi",
        "F=false; if $F; then TP=8; fi; TP=${TP:-2}",
        "F=false; if ! $F; then TP=8; else TP=1; fi",
        "F=x; if [ $F ]; then TP=8; else TP=1; fi",
        "N=3; if (( N > 2 )); then TP=8; else TP=1; fi",
        "N=3; if (( N % 2 == 0 )); then TP=8; elif (( N == 3 )); then TP=4; fi",
        "A=1; B=0; if [ $A = 1 ] && [ $B = 1 ]; then TP=8; else TP=1; fi",
        "A=1; B=0; if [ $A = 2 ] || [ $B = 0 ]; then TP=8; else TP=1; fi",
        "A=1; B=0; if [[ $A == 1 || $B == 1 ]]; then TP=8; else TP=1; fi",
        "A=1; B=0; if [[ $A == 1 && $B == 1 ]]; then TP=8; else TP=1; fi",
        "A=1; if [ $A -eq 1 -a 2 -eq 3 ]; then TP=8; elif [ $A -eq 1 -o 2 -eq 3 ]; then TP=4; fi",
        "A=1; if [ $A = 2 ]; then TP=8; elif [ $A = 1 ] && [ ! $A = 3 ]; then TP=2; else TP=1; fi",
        "A=; if [[ -z $A || $A == x ]]; then TP=2; fi",
        "A=1; B=0; if [[ ( $A == 1 || $B == 1 ) && $A == 2 ]]; then TP=8; else TP=1; fi",
        "A=1; B=0; if [[ $B == 0 && ( $A == 2 || ( $A == 1 && $B == 0 ) ) ]]; then TP=8; else TP=1; fi",
        "A=1; if [[ ( $A == 1 ) ]]; then TP=8; else TP=1; fi",
        "A=2; let TP=A*4; let PP=TP/A",
        'TP=2; for each in "$@"; do TP=8; done; for each in $*; do TP=1; done',
        "TP=2; while [ $TP = 8 ]; do TP=1; done",
        "TP=2; while [ $TP = 8 ]; do if true; then TP=1; fi; done; if [ $TP = 2 ]; then PP=4; fi",
        "if true; then TP=4; else TP=1; fi",
        "TP=1; if [ $TP = 1 ] && [ $TP -gt 1 ]; then PP='--x'; elif [ $TP = 2 ]; then PP=' '; fi",
    ],
)
def test_conditions_and_loops_are_those_of_bash(text) -> None:
    """Oracle: bash itself, which prints the same words."""
    script = f"{text}\necho run --tp $TP --pp $PP\n"
    done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True, check=True, env={})
    words = commands_of(script)[-1]
    assert [each for each in words if each != "$PP"][1:] == done.stdout.split()


def test_both_branches_of_a_test_that_only_a_shell_can_evaluate_are_read() -> None:
    for test in ("[ -f here ] || [ 1 = 2 ]", "[[ $(hostname) == a && 1 == 1 ]]", "grep x y"):
        assert commands_of(f"if {test}; then A=1; else B=2; fi\nrun $A $B")[-1] == ["run", "1", "2"]
    assert commands_of("if [ -f here ] && [ 1 = 2 ]; then A=1; else B=2; fi\nrun $A $B")[-1] == ["run", "$A", "2"]


def test_a_backslash_at_the_end_of_a_file_is_no_word() -> None:
    assert commands_of("run --fp16 \\") == [["run", "--fp16"]]
    assert commands_of("run a\\ b \\") == [["run", "a b"]]


@pytest.mark.parametrize(
    ("lines", "sizes"),
    [
        ("#SBATCH -N 4\n#SBATCH --ntasks-per-node=8", (4, 32)),
        ("#SBATCH -N4 --ntasks-per-node 8  # of them", (4, 32)),
        ("#SBATCH --nodes=2 --gres=gpu:h100:4 --job-name 'a b'", (2, 8)),
        ('#SBATCH --nodes="2"\n#SBATCH --gpus-per-node=mi250:8', (2, 16)),
    ],
)
def test_sizes_that_a_script_asks_of_slurm(lines, sizes, written) -> None:
    found = read_foreign(written(f"#!/bin/bash\n{lines}\nsrun python pretrain_gpt.py {RUN} --bf16\n"))
    assert (found.num_hosts, found.num_devices) == sizes


@pytest.mark.parametrize("text", ["a=(4 8)\nTP=${a[1]}", 'a=(4 8); i=0; TP="${a[$i]}"', "a=(4 8); i=0; TP=${a[i+1]}"])
def test_an_entry_of_an_array_is_that_of_bash(text) -> None:
    done = subprocess.run(["/bin/bash", "-c", f"{text}\necho $TP"], capture_output=True, text=True, check=True)
    assert commands_of(f"{text}\nrun $TP")[-1] == ["run", done.stdout.strip()]


@pytest.mark.parametrize("text", ["a=(4 8); a[0]=2", "declare -A a=([0]=2)", "a=([0]=2)", "a=(4); a[0]+=2"])
def test_an_entry_that_is_set_by_itself_stays_unread(text) -> None:
    assert commands_of(f"{text}\nrun ${{a[0]}} ${{a[-1]}}")[-1] == ["run", "${a[0]}", "${a[-1]}"]


@pytest.mark.parametrize("start", ["if", "if !", "if A=1"])
def test_a_command_that_a_condition_runs_is_read_with_its_environment(start) -> None:
    text = f"{start} N=2 \\\n \\\n train --a 1 | tee log\nthen\necho ok\nelse\nexit 1\nfi\nrun $N"
    assert [each for each in commands_of(text) if each[0] in ("train", "run")] == [["train", "--a", "1"], ["run", "2"]]
    assert commands_of(f"if false; then\n{text}\nfi\nrun $N") == [["run", "$N"]]
    assert ["train"] not in commands_of("if [ 1 = 2 ]; then train; fi")


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("for a in 1; do if true; then run; done; fi", True),
        ("for a in 1; do if true; then run; fi", False),  # bash refuses it, too: is the script whole?
        ("for a in 1; do if true; then run; fi; done", False),
        ('A=""; if true; then case $A in\nb) run;;\nesac; fi', False),
        ("python - <<EOF\nif a:\n  b\nEOF\nfor a in 1; do run; done", False),
    ],
)
def test_what_closes_another_block_is_refused_as_bash_refuses_it(text, is_refused) -> None:
    if not is_refused:
        commands_of(text)
        return
    assert subprocess.run(["/bin/bash", "-n", "-c", text], capture_output=True, check=False).returncode
    with pytest.raises(InputError, match="`done` closes what needs `fi`"):
        commands_of(text)


def test_getopts_without_an_option_among_the_arguments_is_that_of_bash() -> None:
    text = "A=0\nwhile getopts dz opt; do case $opt in d) A=1;; esac; done\nshift $((OPTIND -1))\n"
    done = subprocess.run(
        ["/bin/bash", "-c", f"{text}echo $A $1", "bash", "x", "y"], capture_output=True, text=True, check=True
    )
    assert commands_of(f"set -- x y; {text}run $A $1") == [["run", *done.stdout.split()]]
    with pytest.raises(InputError, match="goes through its arguments"):
        commands_of(f"set -- -d y; {text}run $A $1")


def test_trainings_of_several_sizes_in_one_script_are_refused(written) -> None:
    one = f"{START} {RUN} --bf16 --train-iters 9"
    other = one.replace("--seq-length 64", "--seq-length 128")
    with pytest.raises(InputError, match="starts 2 trainings of other sizes"):
        read_foreign(written(f"{one}\n{other}\n"))
    for alike in (
        one,
        f"echo {other}",
        other.replace("pretrain_gpt.py", "generate.py"),
        other.replace("-iters", "-it"),
    ):
        assert read_foreign(written(f"{one}\n{alike}\n")).layout["mbs"] == "1"


def test_what_let_cannot_compute_stays_unread() -> None:
    assert commands_of("let N=A*2\na --n $N") == [["a", "--n", "$((A*2))"]]


def test_a_command_that_trains_is_read_beside_longer_ones_that_do_not(written) -> None:
    """Generation, rewards and evaluation are other runs; a training may evaluate, too."""
    start, more = f"{START} {RUN} --bf16", " ".join(f"--option-{number} 1" for number in range(20))
    for other in (
        "python eval/infer_qwen.py",
        "python -m openrlhf.cli.batch_inference",
        "swift export",
        "own/serve.py",
    ):
        assert read_foreign(written(f"{other} --tp_size 4 {more}\n{start}\n{other} {more}\n")).num_devices == 8
    for own in ("own-cli rm", "own-cli sed"):  # a reward model
        assert read_foreign(written(f"echo {own} {more}\n{start.replace('torchrun', own)}")).num_devices == 8
    assert read_foreign(written(f"a.py --b\n{start.replace('pretrain_gpt', 'train_and_eval')}")).num_devices == 8


@pytest.mark.parametrize("change", ["(( N += 4 ))", "((N++))", "((N = N * 2))"])
def test_what_arithmetic_sets_is_not_the_value_before(change) -> None:
    """bash, ARITHMETIC EVALUATION: the variable has another value, which is not read; it had been taken for 4."""
    assert commands_of(f"N=4\n{change}\na --n $N") == [["a", "--n", "$N"]]
    assert commands_of(f"N=4\nif false; then {change}; fi\n((N == 4)) && a --n $N") == [["a", "--n", "4"]]
