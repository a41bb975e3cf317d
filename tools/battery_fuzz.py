"""Random inputs for every reader, in this process: a reader must return the document or raise a `PlannerError`.

The number of a case is its seed. The seed selects a reader, one of its documents, and one to four edits of the
document's characters, lines or values. A case can fail in four ways: an exception other than `PlannerError` escapes, a
message has characters that no terminal should receive, the case takes more than 2 s of processor time, or it needs more
than 1 GiB.
"""

from __future__ import annotations

import csv
import io
import json
import random
import resource
import signal
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from planner import api
from planner.commands import options
from planner.emit.read.front import layout_text, read_foreign
from planner.errors import PlannerError
from planner.evidence.rows.runs import read_runs
from planner.layout_text import parse_layout
from planner.plan import checksum, plan_to_json
from planner.reading import read_plan
from planner.search.space.constraints import Constraints
from planner.specs.batch import read_batch
from planner.specs.calibration import Calibration
from planner.specs.change import change_job
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.engine import EngineSpec
from planner.specs.huggingface import config_from_text
from planner.specs.load import load_job
from planner.specs.model import ModelSpec
from planner.specs.recompute import policy_fault
from planner.specs.training import TrainingSpec
from planner.specs.validate import validate
from planner.specs.yaml import parse_yaml
from planner.units import parse_count, parse_length, parse_quantity, parse_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from planner.plan import Plan
    from planner.specs.job import Job

ROOT = Path(__file__).resolve().parent.parent
CPU_SECONDS = 2.0
BYTES = 2**30
TRAINING = "sequence_length: 8192\nglobal_batch_size: 1024\nprecision: bf16\ntokens: 300e9\ndropout: 0.1\n"
NASTY = (
    *("0", "-1", "1", "2", "3", "7", "1e999", "-0.0", "1e308", "1e-308", ".nan", ".inf", "NaN", "Infinity", "true"),
    *(
        "null",
        "''",
        '""',
        "[]",
        "{}",
        "[[]]",
        "&a",
        "*a",
        "!!int",
        "\t",
        "\x00",
        "\x1b[31m",
        "\u202e",
        "\ud7ff",
        "\xe9",
    ),
    *(
        "?",
        "- ",
        ": ",
        "#",
        "'",
        '"',
        "9" * 50,
        "9" * 5000,
        "0x",
        "1e9",
        "e",
        "GiB",
        "\x85",
        "<<",
        "---",
        "\\",
        "$(id)",
    ),
    *("10000000", "1000000000000", "4294967296", "18446744073709551616", "auto", "none", "full", "1/2/3", "x2", "+10%"),
    *("../..", "/dev/zero", "[" * 60, "{" * 60, "a" * 300, "\n", ",", "=", "/", "..", "%s", "{0}", "`id`", "\ufeff"),
)
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 64, 10**6, 10**9, 10**12, 10**30, -(10**18), 0.5, -0.5, 1e-300, 1e300, True, False, None),
    *("", "a", "\x1b[31m", "[/bold]", "x" * 200, "NaN", "none", "full", "tp", "1/2"),
    *([], {}, [0], [None], [[]], {"": 0}, {"a": {"b": []}}, [1] * 200, "\u202e", "1e9", "80 GiB"),
)


class _TooLong(BaseException):
    """The exception of the watchdog, which no reader may catch."""


def _alarm(signum: int, frame: object) -> NoReturn:  # noqa: ARG001 - the signature of a signal handler
    raise _TooLong


def _limit_memory() -> None:
    """Limit the address space to 1 GiB above its present size; a reader that needs more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, resource.RLIM_INFINITY))


# --- edits ----------------------------------------------------------------------------------------------------------


def edited_text(rng: random.Random, text: str) -> str:
    """The text after one to four edits of characters or lines."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        text = _edited_once(rng, text) or rng.choice(NASTY)
    return text


def _edited_once(rng: random.Random, text: str) -> str:
    at, nasty = rng.randrange(len(text) + 1), rng.choice(NASTY)
    to = min(len(text), at + rng.choice((1, 1, 3, 10, 100)))
    lines = text.splitlines(keepends=True) or [""]
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            return text[:at] + nasty + text[at:]
        case 1:
            return text[:at] + text[to:]
        case 2:
            return text[:at] + nasty + text[to:]
        case 3:
            lines[one], lines[two] = lines[two], lines[one]
            return "".join(lines)
        case 4:
            return text + lines[one]
        case 5:
            head, colon, _ = lines[one].partition(rng.choice((": ", "=", " ", ",")))
            lines[one] = f"{head}{colon}{nasty}\n"
            return "".join(lines)
        case 6:
            return text[:at]
        case _:
            return "".join(lines[:one] + lines[one + 1 :])


def edited_value(rng: random.Random, data: Any) -> Any:
    """A JSON document with one to three values replaced, removed, doubled or moved."""
    data = json.loads(json.dumps(data))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(data))
        if not places:
            return data
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0 | 1 | 2:
                holder[key] = json.loads(json.dumps(rng.choice(VALUES)))
            case 3:
                del holder[key]
            case 4:
                if isinstance(holder, list):
                    holder.append(holder[key])
                else:
                    holder[rng.choice(NASTY)] = holder[key]
            case _:
                other, place = rng.choice(places)
                if place in _keys(other):
                    holder[key] = json.loads(json.dumps(other[place]))
    return data


def _keys(holder: Any) -> Any:
    return range(len(holder)) if isinstance(holder, list) else holder


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(data, dict | list):
        for key in list(_keys(data)):
            yield data, key
            yield from _places(data[key])


# --- documents ------------------------------------------------------------------------------------------------------


@cache
def documents() -> list[tuple[type[Any], str]]:
    """Every shipped document with its kind."""
    found: list[tuple[type[Any], str]] = [(TrainingSpec, TRAINING)] * 10
    for kind, folder in (
        (ModelSpec, "models"), (DeviceSpec, "clusters/devices"), (ClusterSpec, "clusters"),
        (EngineSpec, "planner/engines"),
    ):  # fmt: skip
        found += [(kind, path.read_text(encoding="utf-8")) for path in sorted((ROOT / folder).glob("*.yaml"))]
    return found


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "head_dim": 128, "rope_scaling": None,
    "torch_dtype": "bfloat16", "sliding_window": 4096, "layer_types": ["full_attention"] * 32, "use_cache": True,
    "hidden_act": "silu",
}  # fmt: skip
CONFIG_TYPES = (
    *(
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
    ),
    *("deepseek_v2", "deepseek_v3", "falcon", "phi3", "olmo2", "t5", "bert", "bloom", "opt", "gpt_oss", "glm4_moe"),
    *("llava", "qwen2_vl", "gemma3", "mllama"),
)
EXPERTS = {
    "num_experts": 64, "num_local_experts": 8, "n_routed_experts": 64, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": True, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "text_config": dict(CONFIG),
    "num_nextn_predict_layers": 1,
}  # fmt: skip
PRINTED = {
    "layout": ("tp=8,pp=4,mbs=1", "tp=2,pp=2,dp=2,zero=1,mbs=1,interleave=2,recompute=full",
               "pp=2,layers_per_stage=1/3",
               "cp=2,ep=4,etp=1,sp=1", "pp=4,schedule=zbv,recompute=full/none*7", "offload=optimizer,zero=2,hsdp=2"),
    "pin": ("tp=8,pp=4", "mbs<=4", "tp>=2,schedule=zbv", "layers_per_stage=1/2/3", "recompute=full", "zero=1|3"),
    "quantity": ("80 GiB", "312 TFLOP/s", "25 GB/s", "3 us", "2.00 USD/h per device", "400 Gb/s"),
    "batch": ("1024", "32..48", "4M tokens", "1..100000", "4M..8M tokens"),
    "nodes": ("16", "4..64", "old=2,new=4", "old=1..4,new=2"),
    "change": ("device.memory=x2", "nvlink.bandwidth=+10%", "nodes=4", "gpus=8,precision=fp8", "seq_len=32k",
               "global_batch=64", "engine=megatron", "training.tokens=1e12", "model.num_layers=4", "risk=10%"),
    "setting": ("device.memory=141GiB", "nvlink.latency=1 us", "cluster.price=2USD/h", "training.tokens=3e11",
                "cluster.failures.device_mtbf=40000 h", "cluster.failures.spare_hosts=2", "failures.restart=5 min",
                "cluster.failures.evicting=0.5", "failures.storage_bandwidth=2 GB/s", "model.moe.num_experts=8"),
}  # fmt: skip
SCRIPTS = (
    (
        "GPUS=8\n"
        "ARGS=(--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 50257\n"
        "  --micro-batch-size 1 --global-batch-size 1536 --fp16 --tensor-model-parallel-size 8\n"
        "  --pipeline-model-parallel-size 16 --recompute-granularity full --recompute-method uniform)\n"
        "torchrun --nproc_per_node $GPUS --nnodes $((4 * 4)) pretrain_gpt.py ${ARGS[@]} --lr 1e-4 # words\n"
    ),
    (
        "if [ -z $A ]; then B=${A:-2}; else B=3; fi\n"
        "for x in 1 2; do echo $x; done\n"
        "torchrun --nproc-per-node=${B} \\\n"
        "  pretrain_gpt.py --tensor-model-parallel-size ${B} --num-layers 4 --hidden-size 64 "
        "--num-attention-heads 4 --vocab-size 256 --seq-length 32 --micro-batch-size 1 --global-batch-size 8 "
        "--bf16 --sequence-parallel\n"
    ),
    (
        "NNODES=1 NPROC_PER_NODE=8 \\\n"
        "megatron sft --model Qwen/Qwen2.5-7B-Instruct --tensor_model_parallel_size 4 --micro_batch_size 1 "
        "--global_batch_size 16 --max_length 8192 --packing true\n"
    ),
)
FOREIGN_JSON = (
    {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 3,
     "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}, "bf16": {"enabled": True},
     "gradient_clipping": 1.0},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "bf16": True, "fsdp": "full_shard auto_wrap",
     "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": ["X"]}, "gradient_checkpointing": True, "max_steps": 100},
)  # fmt: skip
FOREIGN_YAML = (
    (
        "compute_environment: LOCAL_MACHINE\n"
        "distributed_type: FSDP\n"
        "fsdp_config:\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n"
        "  fsdp_version: 2\n"
        "mixed_precision: bf16\n"
        "num_machines: 2\n"
        "num_processes: 16\n"
    ),
    (
        "model:\n"
        "  num_layers: 32\n"
        "  tensor_model_parallel_size: 4\n"
        "trainer:\n"
        "  nnodes: 2\n"
        "  n_gpus_per_node: 8\n"
        "actor_rollout_ref:\n"
        "  actor:\n"
        "    megatron:\n"
        "      tensor_model_parallel_size: 4\n"
    ),
    (
        "model_name_or_path: meta-llama/Llama-3.1-8B\n"
        "per_device_train_batch_size: 1\n"
        "gradient_accumulation_steps: 8\n"
        "deepspeed: ds.json\n"
        "bf16: true\n"
        "cutoff_len: 4096\n"
    ),
)
RUNS = ROOT / "tests" / "published" / "measurements.csv"


@cache
def job() -> Job:
    """A small job, to which changes and settings are applied."""
    return load_job(model="tiny-gpt", cluster="dgx-a100", nodes=1, global_batch_size=64, sequence_length=64)


@cache
def plans() -> list[dict[str, Any]]:
    """Plans of several kinds as documents."""
    found: list[Plan] = [
        api.plan_job("tiny-gpt", "dgx-a100", gpus=2, global_batch=8, seq_len=64),
        api.estimate_layout("tiny-gpt", "dgx-a100", layout="tp=2,pp=2,mbs=1", nodes=1, global_batch=64, seq_len=64),
        api.estimate_layout("mixtral-8x7b", "dgx-h100", layout="tp=2,pp=4,ep=4,mbs=1,zero=1", nodes=4, global_batch=64,
                            seq_len=4096, engine="megatron"),
    ]  # fmt: skip
    return [json.loads(plan_to_json(each)) for each in found]


# --- readers --------------------------------------------------------------------------------------------------------


def _document(rng: random.Random, _: Path) -> Any:
    kind, text = rng.choice(documents())
    return validate(kind, parse_yaml(edited_text(rng, text), "x.yaml"))


def _config(rng: random.Random, _: Path) -> Any:
    config = CONFIG | {"model_type": rng.choice(CONFIG_TYPES)}
    config |= dict(rng.sample(sorted(EXPERTS.items(), key=lambda each: each[0]), rng.randrange(len(EXPERTS))))
    if rng.random() < 0.7:
        text = json.dumps(edited_value(rng, config))
    else:
        text = edited_text(rng, json.dumps(config, indent=1))
    return config_from_text(text, "config.json")


def _printed(rng: random.Random, _: Path) -> Any:
    kind = rng.choice(sorted(PRINTED))
    text = edited_text(rng, rng.choice(PRINTED[kind]))
    try:
        return _read_printed(rng, kind, text)
    except ValueError as error:  # the documented error of these readers; the command line shows its message
        if kind in ("layout", "pin", "change", "setting"):
            raise
        return error


def _read_printed(rng: random.Random, kind: str, text: str) -> Any:
    match kind:
        case "layout":
            return parse_layout(text, num_layers=rng.choice((1, 4, 96)), num_devices=rng.choice((1, 8, 1024)))
        case "pin":
            return Constraints.parse((text,), ())
        case "quantity":
            number = rng.choice((parse_count, parse_length, parse_share))
            parts = ("bytes", "bytes_per_second", "flops_per_second", "seconds", "usd_per_hour")
            return number(text) if rng.random() < 0.4 else parse_quantity(text, rng.choice(parts))
        case "batch":
            return read_batch(text, 4096).sizes()
        case "nodes":
            return options._read_nodes(text, ranges=rng.random() < 0.5), policy_fault(text)  # noqa: SLF001
        case "change":
            return change_job(job(), text)
        case _:
            return load_job(model="tiny-gpt", cluster="dgx-a100", global_batch_size=8, settings=[text])


def _plan(rng: random.Random, folder: Path) -> Any:
    document = rng.choice(plans())
    if rng.random() < 0.9:
        document = edited_value(rng, document)
        if rng.random() < 0.9 and "checksum" in document:
            document["checksum"] = checksum(document)
        text = json.dumps(document)
    else:
        text = edited_text(rng, json.dumps(document, indent=1))
    path = folder / "plan.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return read_plan(path)


def _foreign(rng: random.Random, folder: Path) -> Any:
    match rng.randrange(3):
        case 0:
            path, text = folder / "run.sh", edited_text(rng, rng.choice(SCRIPTS))
        case 1:
            path, text = folder / "ds.json", json.dumps(edited_value(rng, rng.choice(FOREIGN_JSON)))
        case _:
            path, text = folder / "x.yaml", edited_text(rng, rng.choice(FOREIGN_YAML))
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    model = rng.choice((None, None, "tiny-gpt", "llama3-8b"))
    define = [edited_text(rng, "A=8")] if rng.random() < 0.1 else ["A=8"]
    return layout_text(read_foreign(path, model=model, define=define))


@cache
def _rows() -> list[str]:
    return RUNS.read_text(encoding="utf-8").splitlines()[:30]


def _table(rng: random.Random, folder: Path) -> Any:
    head, *rest = _rows()
    lines = [head, *rng.sample(rest, 2)]
    if rng.random() < 0.5:
        cells = next(csv.reader([lines[1]]))
        cells[rng.randrange(len(cells))] = rng.choice(NASTY)
        out = io.StringIO()
        csv.writer(out).writerow(cells)
        lines[1] = out.getvalue().rstrip("\r\n")
        text = "\n".join(lines)
    else:
        text = edited_text(rng, "\n".join(lines))
    path = folder / "runs.csv"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return read_runs(path)


@cache
def _calibration_text() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "planner" / "calibration.json").read_text(encoding="utf-8"))
    return {key: value[:1] if isinstance(value, list) else value for key, value in found.items()}


def _calibration(rng: random.Random, _: Path) -> Any:
    text = json.dumps(edited_value(rng, _calibration_text()))
    return validate(Calibration, parse_yaml(text, "calibration.json"))


READERS: tuple[tuple[Callable[[random.Random, Path], Any], int], ...] = (
    (_printed, 40), (_config, 24), (_document, 10), (_foreign, 14), (_plan, 6), (_table, 4), (_calibration, 2),
)  # fmt: skip
"""Readers, and the share of the cases that each gets, in percent: quick readers get more."""


def check(number: int, folder: Path) -> str:
    """The fault of case `number` in words; empty if the reader behaves correctly."""
    rng = random.Random(number)  # noqa: S311 - no secret
    (reader,) = rng.choices([each for each, _ in READERS], [share for _, share in READERS])
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        reader(rng, folder)
    except PlannerError as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        shown = str(error).replace("\n", "")
        return "" if shown.isprintable() and "pydantic" not in shown else f"{reader.__name__}: said {shown[:200]!r}"
    except _TooLong:
        return f"{reader.__name__}: more than {CPU_SECONDS:.0f} s of processor time"
    except BaseException as error:  # noqa: BLE001 - whatever escapes is what this looks for
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return f"{reader.__name__}: {type(error).__name__} {str(error)[:120]!r} at {place}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


def inputs(numbers: range) -> Iterator[str]:
    """The fault of each case in words."""
    signal.signal(signal.SIGPROF, _alarm)
    for warm in (documents, job, plans, _rows, _calibration_text):
        warm()
    _limit_memory()
    memory = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for number in numbers:
            try:
                yield check(number, Path(folder))
            except _TooLong:  # the alarm came when the case had ended but its clock still ran
                yield "more than 2 s of processor time"


if __name__ == "__main__":  # one case with its traceback
    READER = random.Random(int(sys.argv[1]))  # noqa: S311 - no secret
    FUNCTION = READER.choices([each for each, _ in READERS], [share for _, share in READERS])[0]
    print(FUNCTION(READER, Path(tempfile.mkdtemp())))
