"""Let the programs' own parsers read the files of `planner emit`, in one pinned environment for each program.

`python tools/real_parsers.py [NAME ...]` builds `.real-parsers/NAME` if it is missing, and runs the tests of that
program in `tests/emit/real`; `executed` runs the emitted files themselves, in `tests/executed`. An environment sees the
packages of the present interpreter, so that torch and the planner are not installed again. Some sources are in no
package, and environment variables name their paths: MEGATRON_LM, MEGATRON_BRIDGE, PRIMUS and TORCHTITAN name checkouts
of Megatron-LM, Megatron-Bridge, Primus (with its submodule Megatron-LM) and torchtitan's newest source, and
TRAINJOB_CRD names the file trainer.kubeflow.org_trainjobs.yaml of kubeflow/trainer. If a variable is not set, its tests
are skipped with a message.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".real-parsers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """Packages to install in addition to the planner's own, and pytest's words that select the tests to run.

    folder: folder of these tests, in tests/.
    options: options of pip; by default packages are installed without dependencies.
    """

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    only: str = ""
    folder: str = "emit/real"
    options: tuple[str, ...] = ("--no-deps",)


_HUGGING_FACE = "test_hugging_face_parsers.py"
_OWN_FILES = "test_own_files_parsers.py"
_TRANSFORMERS = (
    *("transformers==5.23.0", "tokenizers==0.23.3", "huggingface_hub==2.4.0", "hf-xet==1.8.0", "safetensors==0.8.0"),
    *("regex==2026.11.15", "psutil==7.2.2", "tqdm==4.70.1", "packaging==26.3", "httpx==0.28.1", "httpcore==1.0.9"),
    *("h11==0.16.0", "anyio==4.16.0", "typer==0.29.2", "shellingham==1.5.4"),
)
_DATASETS = (
    *("datasets==4.7.0", "pyarrow==26.0.1", "pandas==3.1.1", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0"),
    *("python-dateutil==4.0.0", "requests==2.34.2", "urllib3==2.8.0", "certifi==2026.10.18"),
    *("charset-normalizer==3.5.2", "idna==3.20", "fsspec==2026.9.0", *_TRANSFORMERS),
)
_DEEPSPEED = (
    *("deepspeed==0.19.8", "hjson==3.1.0", "py-cpuinfo==9.0.0", "msgpack==1.2.4", "ninja==1.13.2"),
    *("einops==0.8.2", *_DATASETS),
)


def _beside(own: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    """Packages of a program, and those of `others` that it does not pin to a release of its own."""
    names = {each.partition("==")[0] for each in own}
    return (*own, *(each for each in others if each.partition("==")[0] not in names))


_LLAMA_FACTORY = _beside(
    (
        *("llamafactory==0.9.5", "transformers==5.6.0", "tokenizers==0.22.2", "huggingface_hub==1.11.0"),
        *("accelerate==1.11.0", "peft==0.18.1", "trl==0.24.0", "datasets==4.0.0", "dill==0.3.8"),
        *("multiprocess==0.70.16", "fsspec==2025.3.0", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3"),
        *("fire==0.7.1", "termcolor==3.3.0", "modelscope==1.40.2", "hf-transfer==0.1.9"),
        *("sentencepiece==0.2.3", "tiktoken==0.14.0", "protobuf==7.36.2", "six==1.17.0"),
    ),
    _DEEPSPEED,
)


PARSERS: dict[str, Parser] = {
    "megatron-lm": Parser(packages=("triton==3.9.0", "einops==0.8.2"), tests=("test_megatron_lm.py",)),
    "megatron-core": Parser(packages=("megatron-core==0.16.1",), tests=("test_megatron_core.py",)),
    "torchtitan": Parser(
        packages=(
            *("torchtitan==0.3.0", "tyro==1.0.17", "typeguard==4.6.0", "docstring_parser==0.18.0", "shtab==1.13.0"),
            *_DATASETS,
            *("torchdata==0.11.0", "spmd_types==0.2.3", "torch_checkpointing==0.1.1", "einops==0.8.2"),
            *("triton==3.9.0", "grain==0.2.18", "portpicker==1.6.0", "array_record==0.8.6", "etils==1.15.0"),
            *("absl-py==2.5.1", "cloudpickle==3.1.2", "more-itertools==11.2.1", "protobuf==7.36.2", "rich==15.0.0"),
            "tensorboard==2.21.0",
        ),
        tests=("test_torchtitan_parser.py",),
    ),
    "accelerate": Parser(
        packages=("accelerate==1.15.0", *_TRANSFORMERS),
        tests=(_HUGGING_FACE,),
        only="accelerate or transformers or trainer",
    ),
    "deepspeed": Parser(
        packages=_DEEPSPEED,
        tests=(_HUGGING_FACE, "test_deepspeed_pipeline.py"),
        only="deepspeed_reads or stages or tiles",
        options=("--no-deps", "--no-build-isolation"),
    ),
    "executed": Parser(
        packages=(*_DEEPSPEED, "accelerate==1.15.0", "peft==0.19.1"),
        tests=("test_executed.py",),
        folder="executed",
        only="accelerate or deepspeed",
        options=("--no-deps", "--no-build-isolation"),
    ),
    "llama-factory": Parser(
        packages=_LLAMA_FACTORY,
        tests=(_OWN_FILES,),
        only="llama_factory",
        options=("--no-deps", "--no-build-isolation"),
    ),
    "ms-swift": Parser(
        packages=_beside(
            (
                *("ms-swift==4.6.0", "megatron-core==0.16.1", "triton==3.9.0", "modelscope-hub==0.5.1"),
                *("addict==2.4.0", "attrdict==2.0.1", "binpacking==2.0.1", "dacite==1.9.2", "mcore-bridge==1.6.5"),
                *("json-repair==0.64.6", "zipp==4.1.2", "aiohttp==3.14.5", "aiohappyeyeballs==2.7.1"),
                *("aiosignal==1.4.0", "frozenlist==1.8.0", "multidict==7.2.1", "propcache==0.5.4", "yarl==1.25.1"),
                *("importlib-metadata==10.2.0", "matplotlib==3.11.2", "nltk==3.10.4", "joblib==1.6.0"),
                *("oss2==2.19.1", "rouge==1.0.1", "simplejson==4.3.0", "zstandard==0.25.0", "pillow==13.0.0"),
                *("openai==3.57.0", "jiter==0.19.0", "distro==1.9.0", "sniffio==1.3.1", "fastapi==0.165.0"),
                *("tensorboard==2.21.0", "transformers-stream-generator==0.0.5"),
            ),
            _LLAMA_FACTORY,
        ),
        tests=("test_ms_swift.py",),
        options=("--no-deps", "--no-build-isolation"),
    ),
    "axolotl": Parser(
        packages=_beside(
            (
                *("axolotl==0.19.0", "transformers==5.16.1", "tokenizers==0.23.1", "huggingface_hub==1.17.0"),
                *("hf-xet==1.4.3", "accelerate==1.13.0", "peft==0.20.0", "datasets==4.8.4", "trl==1.9.0"),
                *("addict==2.4.0", "pillow==13.0.0", "colorama==0.4.6", "python-dotenv==1.2.4", "art==6.5"),
            ),
            _DATASETS,
        ),
        tests=(_OWN_FILES,),
        only="axolotl",
    ),
    "megatron-bridge": Parser(
        packages=(
            *("triton==3.9.0", "einops==0.8.2", "omegaconf==2.3.1", "hydra-core==1.3.8", *_DATASETS),
            "antlr4-python3-runtime==4.9.3",
        ),
        tests=("test_megatron_bridge.py",),
        options=("--no-deps", "--no-build-isolation"),
    ),
    "executed-megatron": Parser(
        packages=("triton==3.9.0", "einops==0.8.2"), tests=("test_executed.py",), folder="executed", only="megatron"
    ),
    "primus": Parser(packages=("triton==3.9.0", "einops==0.8.2"), tests=("test_primus.py",)),
    "kubeflow": Parser(packages=("kubeflow_trainer_api==2.3.0",), tests=(_HUGGING_FACE,), only="kubeflow or schema"),
    "skypilot": Parser(packages=("skypilot==0.14.1",), tests=(_HUGGING_FACE,), only="skypilot", options=()),
}


def environment(name: str) -> Path:
    """The interpreter of an environment, which is built if it is missing."""
    folder, parser = FOLDER / name, PARSERS[name]
    python = folder / "bin" / "python"
    done = folder / "packages.txt"
    wanted = "\n".join(parser.packages)
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    own = next((folder / "lib").glob("python*")) / "site-packages" / "planner-environment.pth"
    own.write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "-q"]
    # Python 3.11 brings a setuptools that makes no wheels on its own; a build without isolation uses it
    subprocess.run([*pip, "--upgrade", "setuptools", "wheel"], check=True)
    install = [*pip, *parser.options, *parser.packages]
    subprocess.run(install, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})  # do not build DeepSpeed's kernels
    done.write_text(wanted, encoding="utf-8")
    return python


def main(names: list[str]) -> int:
    """Run the tests of the named programs, or of all programs."""
    if unknown := sorted(set(names) - set(PARSERS)):
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(PARSERS)}")
    codes = []
    for name in names or PARSERS:
        python, parser = environment(name), PARSERS[name]
        variables = {**os.environ, "REAL_PYTHON": str(python), "PYTHONPATH": str(ROOT)}
        command: list[str | Path] = [str(python), "-m", "pytest", "-q", "-rs", "-n", "0"]
        command += [
            *(ROOT / "tests" / parser.folder / each for each in parser.tests),
            *(["-k", parser.only] if parser.only else []),
        ]
        codes.append(subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
