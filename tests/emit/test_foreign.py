"""Files of other programs: real command lines with layouts written by hand, shell scripts, and hostile text."""

from __future__ import annotations

import io
import json
import os
import resource
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from foreign_corpus import CORPUS
from megatron_plans import plan_of

import planner
from planner.api import estimate_file, plan_file
from planner.cli import main
from planner.emit.bundle import write_bundle
from planner.emit.read.conditions import whole_number
from planner.emit.read.front import read_foreign, shipped_model
from planner.emit.read.options import option_words
from planner.emit.read.shell import commands_of
from planner.errors import ExitCode, InputError


@pytest.fixture
def written(tmp_path):
    """A file with this text; if there are further files of the run, the list of all."""

    def write(text, files=()):
        paths = [tmp_path / name for name in ("train.sh", *dict(files))]
        for path, each in zip(paths, (text, *dict(files).values()), strict=True):
            path.write_text(each)
        return paths if files else paths[0]

    return write


def priced(entry, path):
    size = {"gpus": entry.gpus} if entry.gpus else {}
    asked = {"settings": entry.settings, "ignore": entry.ignore, "global_batch": entry.batch, **size}
    return estimate_file(path, entry.cluster, model=entry.model, **asked)


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.source)
def test_a_public_command_line_has_the_layout_written_by_hand(entry, written):
    files, options = written(entry.text, entry.files), {"settings": entry.settings, "ignore": entry.ignore}
    found = read_foreign(files, model=entry.model, **options)
    wanted = dict(part.split("=") for part in entry.layout.split(","))
    assert {key: found.layout.get(key) for key in wanted} == wanted
    assert tuple(each.key for each in found.assumed) == entry.open_keys
    said = [f"training.{each.replace(';', ',')}" for each in entry.training.split(",") if each]
    assert [each for each in said if each not in found.settings] == []


@pytest.mark.slow
def test_the_verdict_on_memory_is_right_where_the_outcome_is_known(written):
    known = [(e, priced(e, written(e.text, e.files)).chance_of_fitting) for e in CORPUS if e.outcome != "not said"]
    judged = [(entry, chance) for entry, chance in known if chance is not None]
    wrong = [entry.source for entry, chance in judged if (chance > 0.5) != (entry.outcome == "ran")]
    assert len(judged) > len(known) / 2
    assert len(wrong) <= len(judged) / 5, wrong


def test_a_file_is_priced_as_its_plan(plan_file_of_megatron):
    plan, script = plan_file_of_megatron
    again = estimate_file(script, "dgx-h100", nodes=2)
    assert again.layout == plan.layout
    assert again.training == plan.training
    assert again.step_seconds == plan.step_seconds


@pytest.fixture
def plan_file_of_megatron(tmp_path):
    plan = plan_of(("llama3-8b", 2, "tp=2,pp=4,cp=2,zero=1,layers_per_stage=7/2*9/7,recompute=full:2", ()))
    paths, _ = write_bundle(plan, tmp_path / "out")
    return plan, paths[-1]


SCRIPT = """
SIZE=13B
if [ ${SIZE} == "7B" ]; then
  TP=1; NLS=32
elif [ ${SIZE} == "13B" ]; then
  TP=2
  NLS=40
else
  TP=8
fi
case $SIZE in
  7B) HS=4096 ;;
  13B|14B)
     HS=5120
     ;;
  *) HS=1 ;;
esac
if [ -z "$X" ]; then X=3; fi
[ -z "$Y" ] && Y=5
[[ $Y -gt 7 ]] && Y=9
A=(--num-layers $NLS # a comment --nope
   --hidden-size "$HS")
if [[ $TP -gt 1 ]]; then A+=(--sequence-parallel); else A+=(--nope); fi
GPUS=$((TP*4))
torchrun --nproc_per_node ${GPUS} pretrain_gpt.py "${A[@]}" --micro-batch-size ${MBS:-$X} --y=$Y $@ | tee log
"""


def test_a_script_is_followed_as_bash_would(tmp_path, tools):
    """Compared with bash itself, which runs a torchrun that prints its words."""
    environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    done = subprocess.run(["bash", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert option_words(SCRIPT)[1:] == done.stdout.splitlines()


CALLED = r"""
ENV=$1; SIZE=${2:-7B}; NUM=$#
TWICE=$(($# * 2 + 1))
say() { echo "$1 of $#"; local MBS=$3; }
function quiet { OUT="x$2"; }
say hello there
[ $# -lt 3 ] && TP=1
case $1 in
  dsw) GPUS=8 ;;
  *) GPUS=4 ;;
esac
PP_LAYOUT="Et\\|\\(tt\\|\\)*30L"
run="torchrun --n ${NUM} --twice $TWICE --gpus $GPUS --size $SIZE --tp ${TP:-2} --layout ${PP_LAYOUT}"
run="$run --ten $10 --tenth ${10:-none}"
run="$run --all $@ --braced ${@} --star $* --third ${3:-x} --fourth=${4}"
echo ${run} --more --than --the --command --has
eval ${run}
"""


@pytest.mark.parametrize("args", ["dsw", "dsw 8B 1", "dlc '' 3 4 5 6 7 8 9 ten", "'a b' 2 3"])
@pytest.mark.parametrize(
    "last", ["eval ${run}", 'torchrun --one "$1" --all "$@" --each "$*" --more "${@}" --fourth "${4}" --three ${3}']
)
def test_arguments_of_a_script_are_those_that_bash_gives_it(args, last, tmp_path, tools):
    text = CALLED.replace("eval ${run}", last)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    script = tmp_path / "train.sh"
    script.write_text(text)
    command = ["bash", script, *shlex.split(args)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = done.stdout.splitlines()
    assert option_words(f"set -- {args}; {text}")[1:] == printed[printed.index("--one" if "one" in last else "--n") :]


PAI = """
ENV=$1
MBS=${3}
TP=${24}
PP=${25:-1}
NOT_25=$25
cmd="torchrun --nproc_per_node 8 pretrain.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16
  --vocab-size 99 --seq-length 64 --max-position-embeddings 64 --micro-batch-size ${MBS} --global-batch-size 48
  --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} --save ${NOT_25}"
echo ${cmd}
eval ${cmd}
"""


def test_a_script_with_many_arguments_gets_them(written, capsys):
    script = written(PAI)
    args = " ".join(["dsw", "8B", "2", *("x" * 20), "2", "2"])
    found = read_foreign(script, args=args)
    wanted = {"mbs": "2", "tp": "2", "pp": "2"}
    assert {key: found.layout[key] for key in wanted} == wanted
    one_by_one = read_foreign(script, define=("3=2", "24=2", "25=2"))
    assert one_by_one.layout == found.layout
    assert read_foreign(script, define=("3=2", "24=2")).layout["pp"] == "1"
    assert read_foreign(script, args=args, define=("24=1",)).layout["tp"] == "1"
    with pytest.raises(InputError, match="micro_batch_size is \\$3, which the file does not set") as error:
        read_foreign(script)
    assert "--args" in error.value.mistakes[0].hint
    assert main(["explain", "--from", str(script), "--args", args, "dgx-h100", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["layout"]["tp"] == 2
    for wrong, option in (({"args": "'a"}, "--args"), ({"define": ("0=bash",)}, "--define")):
        with pytest.raises(InputError) as error:
            read_foreign(script, **wrong)
        assert error.value.mistakes[0].where == option


@pytest.mark.parametrize("head", ["launch() {", "function launch {", "function launch () \n{"])
def test_a_function_has_arguments_of_its_own(head, written):
    script = written(f"TP=$1\n{head}\n  torchrun {RUN} --tensor-model-parallel-size ${{1}}\n}}\nlaunch 2\n")
    for given in ({"args": "8"}, {"define": ("1=8",)}, {"define": ("2=8",)}):
        with pytest.raises(InputError, match=r"tensor_model_parallel_size is \$1, which the file does not set"):
            read_foreign(script, **given)
    script.write_text(script.read_text().replace("${1}", "$TP"))
    assert read_foreign(script, args="8").layout["tp"] == "8"


def test_shift_drops_the_first_arguments():
    # the words that bash 5.2 prints for `printf '[%s]' x ...` with these arguments
    usage = 'if [ "$#" -lt 2 ]; then echo usage; exit 1; fi\n'
    for script, words in (
        (f'{usage}N=$1\nshift 2\nx $N "$@"', ["x", "8", "a=b"]),
        ("shift\nx $1 $# $@", ["x", "out", "2", "out", "a=b"]),
        ("shift 4\nx $1 $#", ["x", "8", "3"]),
        ("shift 3\nx ${1:-1} $#", ["x", "1", "0"]),
        ("shift -1\nx $1 $#", ["x", "8", "3"]),
        ("while read each; do echo $each; done\nshift\nx $1", ["x", "out"]),
    ):
        assert commands_of(f"set -- 8 out a=b\n{script}")[-1] == words
    for unknown in ("if hostname; then shift; fi", "for each in 1 2; do shift; done"):
        with pytest.raises(InputError, match="which is not followed"):
            commands_of(f"set -- 8 out a=b\n{unknown}\nx $1")


@pytest.mark.parametrize("loop", ["while [ $# -gt 0 ]; do shift; done", "while getopts a:b opt; do A=$OPTARG; done"])
def test_a_script_that_goes_through_its_arguments_is_not_followed_in_part(loop, written):
    script = written(f"{loop}\ntorchrun {RUN} --tensor-model-parallel-size ${{TP:-1}}")
    assert read_foreign(script, define=("TP=2",)).layout["tp"] == "2"
    with pytest.raises(InputError, match="which is not followed"):
        read_foreign(script, args="--tp 2")


@pytest.mark.parametrize(("before", "after"), [("${A:-", "}"), ('"${A:-', '}"'), ("$((2-(", "))) ")])
def test_nested_brackets_are_read_up_to_a_limit(before, after):
    assert commands_of(f"a {before * 12}1{after * 12}")[0][0] == "a"
    for num in (60, 20_000):
        with pytest.raises(InputError, match="line 2: brackets are nested more than 50 deep"):
            commands_of(f"\na {before * num}1{after * num}")


def test_nested_branches_and_evals_are_read_up_to_a_limit():
    assert commands_of("if true; then\n" * 20 + "a --b\n" + "fi\n" * 20) == [["a", "--b"]]
    with pytest.raises(InputError, match="branches are nested more than 50 deep"):
        commands_of("if true; then\n" * 20_000)
    assert commands_of("eval eval a") == [["a"]]
    with pytest.raises(InputError, match="evals are nested more than 3 deep"):
        commands_of("eval " * 9 + "a")


@pytest.mark.parametrize(
    "text",
    ["touch owned; $(touch owned) `touch owned` --num-layers $(touch owned)", "X=$(touch owned)\n--num-layers ${X}"],
)
def test_nothing_of_a_file_is_run(text, written, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "--from", str(written(text)), "dgx-h100"]) == ExitCode.BAD_INPUT
    assert "which the file does not set" in capsys.readouterr().err
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--num-layers 4\x1b[31m", "control character"),
        ('A="x' + "\n--num-layers 4", "has no end"),
        ("A=x\n" + "A=$A$A$A$A$A$A$A$A\n" * 40 + "--num-layers $A", "more text"),
        ("--num-layers 4 --hidden-size 9999999999999999999 --vocab-size 5", "no whole number"),
        ("--num-layers 4 " + "--x ( " * 9, "vocabulary"),
        ("nothing of interest", "of no kind"),
        ("--num-layers 4 --hidden-size $B\ud7ff", r"hidden_size is \$B\\ud7ff, which"),
        ("$((" * 20 + "--num-layers", "has no end"),
        ("$((" * 3000 + "--num-layers", "nested more than 50 deep"),
    ],
    ids=str,
)
def test_hostile_files_are_refused(text, words, written):
    with pytest.raises(InputError, match=words):
        read_foreign(written(text))


def test_huge_and_special_files_are_refused(tmp_path):
    huge = tmp_path / "huge.sh"
    with huge.open("wb") as file:
        file.truncate(2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="at most"):
        read_foreign(huge)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    with pytest.raises(InputError, match="not a regular file"):
        read_foreign(Path("/dev/zero"))


def test_variables_that_a_file_leaves_open_are_asked_for(written):
    text = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --seq-length 64 --bf16 "
    text += "--tensor-model-parallel-size $TP"
    with pytest.raises(InputError, match=r"tensor_model_parallel_size is \$TP") as error:
        read_foreign(written(text))
    assert "--define" in error.value.mistakes[0].hint
    assert read_foreign(written(text), define=("TP=2",)).layout["tp"] == "2"


WHOLE = "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --seq-length 64 --bf16"
RUN = f"{WHOLE} --micro-batch-size 1 --global-batch-size 48 --max-position-embeddings 64"


def test_a_granularity_that_megatron_does_not_have_is_refused(written):
    with pytest.raises(InputError, match="'half' has no price here"):
        read_foreign(written(f"torchrun {RUN} --recompute-granularity half"))


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (f"#SBATCH --nodes=3 --ntasks-per-node=1\ntorchrun --nproc_per_node 8 --nnodes $SLURM_NNODES {RUN}", 24),
        (f"#SBATCH -N 3\nN=${{SLURM_JOB_NUM_NODES}}\ntorchrun --nproc_per_node 8 --nnodes $N {RUN}", 24),
        (f"#SBATCH -N3 # hosts\ntorchrun --nproc_per_node gpu --nnodes ${{SLURM_NNODES:-2}} {RUN}", 24),
        (f"torchrun --nproc_per_node 8 --nnodes ${{SLURM_NNODES:-2}} {RUN}", 16),
        (f"#SBATCH --nodes 3\n#SBATCH --ntasks-per-node 8\nsrun python {RUN}", 24),
        (f"#SBATCH --nodes=3\n#SBATCH --gres=gpu:h100:8\nsrun python {RUN}", 24),
        (f"#SBATCH --nodes=3\ntorchrun --nproc_per_node 8 {RUN}", 8),
        (f"torchrun --nproc_per_node 4 {RUN}", 4),
        (f"NNODES=$SLURM_NNODES NPROC_PER_NODE=8 megatron pt {RUN} --max_length 64", 16),
    ],
)
def test_the_machines_are_those_that_the_script_gets(text, devices, written):
    """By hand from the manuals: sbatch sets SLURM_NNODES to --nodes; torchrun without --nnodes starts one host."""
    define = ("SLURM_NNODES=2",) if "megatron pt" in text else ()
    plan = estimate_file(written(text), "dgx-h100", define=define)
    assert plan.cluster.num_devices == devices


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("--nproc_per_node 8 --nnodes $SLURM_NNODES", r"hosts is \$SLURM_NNODES, which the file does not set",
         "--define SLURM_NNODES=N or --nodes N says it"),
        ("--nproc_per_node ${GPUS} --nnodes 2", "ranks of a host is", "--define GPUS=N or --gpus N"),
        ("--nproc_per_node $(nvidia-smi -L | wc -l) --nnodes 2", "ranks of a host is", "--gpus N"),
        ("--nproc_per_node 8 --nnodes 1:4", "is 1:4, which is no number", "--nodes N says it"),
    ],
)  # fmt: skip
def test_a_size_that_is_not_said_is_asked_for_and_not_guessed(text, words, hint, written):
    script = written(f"torchrun {text} {RUN}")
    with pytest.raises(InputError, match=words) as error:
        estimate_file(script, "dgx-h100")
    assert hint in error.value.mistakes[0].hint
    assert estimate_file(script, "dgx-h100", nodes=3).cluster.num_devices == 24  # the command line's own size wins


def test_a_batch_that_a_script_counts_by_hosts_is_that_of_the_hosts_asked_for(written):
    batch = "--global-batch-size $((16*SLURM_NNODES))"
    script = written(f"#SBATCH -N 3\ntorchrun --nproc_per_node 8 --nnodes $SLURM_NNODES {RUN} {batch}")
    for sized, hosts in (({}, 3), ({"nodes": 4}, 4), ({"gpus": 40}, 5)):
        assert estimate_file(script, "dgx-h100", **sized).training.global_batch_size == 16 * hosts


@pytest.mark.parametrize(("ranks", "hosts", "said"), [(4, 4, True), (8, 4, False), (4, 1, False)])
def test_hosts_that_a_file_uses_in_part_are_said(ranks, hosts, said, written):
    script = written(f"torchrun --nproc_per_node {ranks} --nnodes {hosts} {RUN.replace('48', '64')}")
    found = {each.key: each for each in estimate_file(script, "dgx-h100").assumed}
    assert ("hosts" in found) == said
    if said:
        assert (found["hosts"].value, "4 ranks on each of 4" in found["hosts"].rule) == ("2", True)
    assert not any(each.key == "hosts" for each in estimate_file(script, "dgx-h100", nodes=hosts).assumed)


def test_a_layout_of_a_file_that_cannot_run_is_refused_at_the_file(written):
    script = written(f"torchrun --nproc_per_node 8 --nnodes 2 {RUN} --pipeline-model-parallel-size 4 "
                     "--tensor-model-parallel-size $TP")  # fmt: skip
    with pytest.raises(InputError, match=r"= 32 devices, and there are 16; lower a degree, or --nodes 4") as error:
        estimate_file(script, "dgx-h100", define=("TP=8",))
    assert {each.where for each in error.value.mistakes} == {str(script)}
    with pytest.raises(InputError, match=r"tp 3 \* pp 4 = 12 does not divide 16 devices") as error:
        estimate_file(script, "dgx-h100", define=("TP=3",))
    assert {each.where for each in error.value.mistakes} == {str(script)}
    with pytest.raises(InputError) as error:
        estimate_file(script, "dgx-h100", define=("TP=2",), layout="tp=8")
    assert {each.where for each in error.value.mistakes} == {"--layout"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("2*(3+4)", 14), ("7/2", 3), ("7%4", 3), ("-3+5", 2), ("1/0", None), ("2**3", None), ("a", None)],
)
def test_arithmetic_is_that_of_whole_numbers(text, value):
    assert whole_number(text) == value


def test_names_of_the_hub_find_shipped_models():
    assert shipped_model("Qwen/Qwen2.5-72B-Instruct") == "qwen2.5-72b"
    assert shipped_model("meta-llama/Llama-3.1-8B-Instruct") == "llama3-8b"
    assert shipped_model("qwen3_5_35B_A3B") == "qwen3.5-35b-a3b"
    assert shipped_model("someone/unknown-9b") is None


def test_the_batch_of_a_trainer_s_file_is_that_of_the_devices_asked_for(written):
    text = "base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nsequence_len: 4096\n"
    path = written(text)
    for sized, devices in (({"nodes": 2}, 16), ({"gpus": 4}, 4), ({}, 8)):
        assert estimate_file(path, "dgx-h100", **sized).training.global_batch_size == 2 * 4 * devices
    with pytest.raises(InputError, match="global batch"):
        estimate_file(path, "mixed-a100-h100")


def test_comments_and_quotes_are_those_of_a_shell():
    assert commands_of("a 'b c' # d\n\"e f\"g;h\\ i") == [["a", "b c"], ["e fg"], ["h i"]]


AXOLOTL = """\
base_model: meta-llama/Meta-Llama-3-8B
micro_batch_size: 2
gradient_accumulation_steps: 4
sequence_len: 4096
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
num_epochs: 3
load_in_8bit: false
noisy: 5
"""


def test_what_is_off_is_not_mentioned_and_what_is_on_has_a_line_of_its_own(tmp_path, capsys):
    (tmp_path / "my run.yaml").write_text(AXOLOTL)
    command = ["--from", str(tmp_path / "my run.yaml"), "dgx-h100", "--gpus", "8"]
    assert main(["explain", *command]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "1 not priced (noisy=5)" in " ".join(shown.split())
    assert "load_in_8bit" not in shown
    assert main(["plan", *command]) == ExitCode.OK
    told = capsys.readouterr().err
    assert "not carried over" in told
    assert "lora_alpha=32" in told
    assert "epochs" not in told  # a field of the plan


def test_a_file_may_come_from_standard_input_and_mistakes_name_the_user_s_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"{AXOLOTL}sequence_len: [\n")
    assert main(["explain", "--from", "mine.yaml", "dgx-h100"]) == ExitCode.BAD_INPUT
    assert "--> mine.yaml:1" in capsys.readouterr().err
    text = "num_layers: 2\nsequence_len: [\nbase_model: x\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["explain", "--from", "-", "dgx-h100"]) == ExitCode.BAD_INPUT
    assert "standard input:" in capsys.readouterr().err
    options = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128"
    options += " --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1024"
    path = tmp_path / ("far/" * 20) / "run of mine.sh"  # a long path is not cut: its end says what the file is
    path.parent.mkdir(parents=True)
    path.write_text(options)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(options.encode())))
    for name, model in ((path, "run-of-mine.sh"), (Path("-"), "standard-input")):
        assert read_foreign(name).model.name == model


SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --seq-length 64 --bf16 "


TP_2 = f"torchrun --nproc_per_node 8 {RUN.replace('64', '2048')} --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("more", "key", "meant"),
    [
        ("--swigluu", "swigluu", "swiglu"),
        ("--micro-batch-sizes 1", "micro_batch_sizes", "micro_batch_size"),
    ],
)
def test_an_option_that_no_program_has_is_no_option_without_a_price(more, key, meant, written, capsys):
    script = written(f"torchrun --nproc_per_node 8 {RUN} {more} --transformer-impl local")
    assert main(["explain", "--from", str(script), "dgx-h100"]) == ExitCode.OK
    shown = " ".join(capsys.readouterr().out.split())
    assert f"misspelt {key}=" in shown
    assert f"(did you mean {meant}?)" in shown
    assert "1 not priced (transformer_impl=local)" in shown


@pytest.mark.parametrize("more", ["--tp-comm-overlap-cfg x", "--fp4-recipe nvfp4", "--gradient-accumulation-fusion"])
def test_options_of_megatron_are_no_misspellings_of_others(more, written):
    """Options of Megatron-LM, arguments.py and transformer_config.py, whose names resemble other options."""
    (only,) = read_foreign(written(f"{WHOLE} {more}")).assumed
    assert only.kind == "not priced"


@pytest.mark.parametrize(("of_chunk", "chunks"), [(1, 4), (2, 2), (4, 1), (3, 0)])
def test_layers_of_a_chunk_divide_a_stage(of_chunk, chunks, written):
    """Megatron-LM, arguments.py: a virtual stage's layers must divide a stage's layers; here 4 layers on 2 stages."""
    key = "--num-layers-per-virtual-pipeline-stage"
    stages = f"{WHOLE.replace('layers 4', 'layers 8')} --pipeline-model-parallel-size 2"
    script = written(f"# {key}\n\n{stages} \\\n {key} {of_chunk}")
    if chunks:
        assert read_foreign(script).layout["interleave"] == str(chunks)
        return
    with pytest.raises(InputError, match="8 layers on 2 stages do not divide into chunks of 3 layers") as error:
        read_foreign(script)
    assert [each.where for each in error.value.mistakes] == [f"{script}:4"]


def test_a_value_that_cannot_be_read_has_its_line(written):
    script = written(
        "torchrun pretrain_gpt.py \\\n  --hidden-size 64 \\\n  --num-layers eighty --seq-length 8 # num-layers\n"
    )
    with pytest.raises(InputError, match="num_layers: 'eighty' is no whole number") as error:
        read_foreign(script)
    assert [each.where for each in error.value.mistakes] == [f"{script}:3"]


def test_a_model_that_replaces_the_file_s_own_is_said(written):
    found = {each.key: each for each in read_foreign(written(WHOLE), model="llama3-8b").assumed}
    assert found["model"].value == "llama3-8b"
    assert "not the file's num_layers 4, hidden_size 64" in found["model"].rule
    same = WHOLE.replace("layers 4", "layers 32").replace("size 64", "size 4096").replace("heads 4", "heads 32")
    found = read_foreign(
        written(f"{same} --ffn-hidden-size 14336".replace("size 99", "size 128256")), model="llama3-8b"
    )
    assert not [each for each in found.assumed if each.key == "model"]


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("--train-samples 61035156 --lr-warmup-samples 1024000", {"steps": 119209, "warmup_steps": 2000}),
        ("--train-iters 5000 --lr-warmup-fraction 0.01", {"steps": 5000, "warmup_steps": 0, "warmup_ratio": 0.01}),
        ("--train-iters 5000 --lr-warmup-iters 7", {"steps": 5000, "warmup_steps": 7}),
    ],
)
def test_samples_are_steps_of_the_global_batch(more, wanted, written):
    """Megatron-LM, training/training.py, update_train_iters: train_samples // global_batch_size."""
    read = read_foreign(written(f"{SMALL} --global-batch-size 512 {more}"))
    found = dict(each.removeprefix("training.").split("=") for each in read.settings)
    assert {key: float(found[key]) for key in wanted} == wanted


def test_options_that_a_plan_cannot_hold_are_named(written, capsys, tmp_path):
    own = "--data-path $DATA --tokenizer-model t --save /ckpt --load /ckpt --init-method-std 0.008 --lr-decay-iters 9"
    script = written(f"torchrun --nproc_per_node 8 {RUN} {own} --lr 1e-4 --train-iters 100 --no-save-optim")
    plan = tmp_path / "plan.json"
    assert main(["plan", "--from", str(script), "dgx-h100", "-o", str(plan)]) == ExitCode.OK
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "still yours" in line]
    named = note.rpartition(": ")[2].split(", ")
    assert named == [
        *("data_path", "tokenizer_model", "save", "load", "init_method_std", "lr_decay_iters=9", "no_save_optim")
    ]
    assert main(["emit", str(plan), "-o", str(tmp_path / "out")]) == ExitCode.OK
    told = capsys.readouterr().err
    assert "Megatron-LM of August 2026 or later" in told
    assert "steps 100: equal to the defaults; where nobody chose them, --set training.steps=..." in told
    assert "warm-up" not in told  # Megatron-LM's own default, 0
    assert "learning rate" not in told  # the file has one
    assert "# For Megatron-LM of August 2026 or later" in (tmp_path / "out" / "run.sh").read_text()


@pytest.mark.filterwarnings("ignore:the file's own layout")
def test_collectives_beside_products_are_priced_planned_and_emitted_again(written, tmp_path):
    """Megatron-LM, arguments.py: --tp-comm-overlap is off by default, and requires sequence parallelism."""
    beside, plain = (estimate_file(written(f"{TP_2} --sequence-parallel {more}"), "dgx-h100") for more in (
        "--tp-comm-overlap", ""))  # fmt: skip
    assert beside.engine.overlap.tensor_parallel
    assert not any(each.key == "tp_comm_overlap" for each in beside.assumed)
    assert beside.step_seconds < plain.step_seconds
    script = written(f"{TP_2} --sequence-parallel --tp-comm-overlap")
    planned = plan_file(script, "dgx-h100", pin="tp=2")
    paths, _ = write_bundle(planned, tmp_path / "out")
    assert "--tp-comm-overlap" in option_words(paths[-1].read_text())
    with pytest.raises(InputError, match="needs sequence parallelism"):
        read_foreign(written(f"{TP_2} --tp-comm-overlap"))


def test_without_sequence_parallelism_no_collective_is_cut(written):
    """Transformer Engine does not cut the all-reduces of `sp=0`, whatever the engine profile says of overlap."""
    settings = ("engine.overlap.tensor_parallel=true", "engine.overlap.weight_gradients=false")
    steps = [
        estimate_file(written(TP_2), "dgx-h100", settings=(each, settings[1])).step_seconds
        for each in (settings[0], "engine.overlap.tensor_parallel=false")
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(("name", "open_keys"), [("native", ()), ("te", ("cross_entropy_fusion_impl",))])
def test_the_loss_that_megatron_fuses_itself_costs_what_the_plain_one_costs(name, open_keys, written):
    """Megatron-LM, core/fusions/fused_cross_entropy.py saves the softmax in fp32, as core/tensor_parallel does."""
    found = read_foreign(written(f"{TP_2} --cross-entropy-loss-fusion --cross-entropy-fusion-impl {name}"))
    assert tuple(each.key for each in found.assumed) == open_keys
    assert not any(each.startswith("training.loss=") for each in found.settings)


def test_experts_that_name_no_width_have_megatrons_four_times_the_hidden_size(written):
    """Megatron-LM, arguments.py: ffn_hidden_size is 4 hidden_size, and moe_ffn_hidden_size is ffn_hidden_size."""
    read = [read_foreign(written(SMALL + f"--num-experts 4 {more}")) for more in ("", "--moe-ffn-hidden-size 96")]
    assert [each.model.moe.ffn_hidden_size for each in read] == [4 * 64, 96]


def test_a_window_without_a_number_is_refused(written):
    assert read_foreign(written(SMALL + "--window-size 32,0")).model.sliding_window == 32
    with pytest.raises(InputError, match="no size of a window"):
        read_foreign(written(SMALL + "--window-size left,right"))


@pytest.mark.parametrize("rates", [(0.2, 0.0), (0.0, 0.2), (0.2, 0.2)])
def test_dropout_of_either_place_has_its_masks(written, rates):
    hidden, attention = rates
    read = read_foreign(written(SMALL + f"--hidden-dropout {hidden} --attention-dropout {attention}"))
    assert "training.dropout=0.2" in read.settings


def test_a_definition_that_nothing_reads_is_refused(written):
    text = "TP=2\ntorchrun pretrain_gpt.py --tensor-model-parallel-size $TP"
    for wrong in ("NOPE=3", "T=4"):
        with pytest.raises(InputError, match="no file of the run reads the variable"):
            read_foreign(written(text), model="llama3-8b", define=(wrong,))


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [("TP=2", True), ("export TP=2", True), ("TP=${TP:-2}", False), ("TP=${1:-$TP}", False), ("[ 1 ] && TP=2", False)],
)
def test_a_definition_that_the_script_replaces_is_refused(line, is_refused, written):
    path = written(f"{line}\ntorchrun pretrain_gpt.py {SMALL} --tensor-model-parallel-size $TP")
    value = subprocess.run(  # the shell itself says whether the definition survives
        ["bash", "-c", f"TP=4; {line}; echo $TP"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert not is_refused or value == "2"
    if is_refused:
        with pytest.raises(InputError, match="the file itself sets TP"):
            read_foreign(path, define=("TP=4",), num_devices=8)
    else:
        read_foreign(path, define=("TP=4",), num_devices=8)


def test_megatron_deepspeed_is_priced_as_its_published_runs_are(written):
    """Its models cut embeddings and logits, and its norms and losses are its own, as in tables of runs."""
    script = next(each.text for each in CORPUS if each.source.endswith("pretrain_llama2_distributed.sh"))
    found = read_foreign(written(script), settings=("model.vocab_size=32000",))
    tables = Path(planner.__file__).parent / "evidence" / "rows" / "aliases.yaml"
    rows = yaml.safe_load(tables.read_text(encoding="utf-8"))["frameworks"]
    wanted = next(row["settings"] for row in rows if row["match"] == "*megatron-deepspeed*")
    assert {*found.settings} >= {f"{key}={value}" for key, value in wanted.items()}
    assert found.engine == "deepspeed"
