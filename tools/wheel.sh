#!/usr/bin/env bash
# Build the sdist, from it the wheel, install the wheel alone into a fresh environment, and plan with it in an empty
# folder (`make wheel`). EXTRAS='[train]' installs extras too.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1

rm -rf dist
"$python" -m hatchling build --target sdist --directory dist > /dev/null
"$python" -m pip wheel dist/*.tar.gz --quiet --no-deps --no-build-isolation --wheel-dir dist
wheel=$(realpath dist/*.whl)
constraints=$(realpath constraints.txt)
expected=$("$python" -c 'import planner; print(planner.__version__)')

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --disable-pip-version-check -c "$constraints" "$wheel${EXTRAS:-}"

mkdir "$folder/empty" && cd "$folder/empty"
planner=$folder/venv/bin/planner
version=$("$planner" --version)
[[ "$("$folder/venv/bin/parallel-planner" --version)" == "$version" ]] || { echo "the two commands differ" >&2; exit 1; }
[[ "$version" == *" $expected" ]] || { echo "wheel says '$version', the tree says '$expected'" >&2; exit 1; }
"$planner" plan llama3-8b dgx-a100 --nodes 2 --seq-len 8192 --global-batch 64
"$planner" glossary bubble | grep -q 'pipeline fills' || { echo "the wheel lacks the glossary" >&2; exit 1; }
[[ -n "${EXTRAS:-}" ]] || ! "$folder/venv/bin/python" -c 'import torch' 2>/dev/null || { echo "the wheel pulled torch" >&2; exit 1; }
echo "$(basename "$wheel"): $version, plans without the source tree${EXTRAS:- and without torch}"
