# The only list of commands: people and CI call these and nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# the first interpreter of the machine that is new enough
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# another package index for torch, for example https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
SEED ?= 1
COUNT ?=
ROWS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables    PYTHON=$(PYTHON) VENV=$(VENV) TORCH_INDEX=$(TORCH_INDEX)"

.PHONY: setup
setup: $(STAMP) ## create .venv and install the planner with pinned dependencies; quick when current

$(STAMP): pyproject.toml constraints.txt tools/setup.py
	@test -n "$(PYTHON)" || { echo "no Python of at least 3.11 found; name one: make setup PYTHON=..." >&2; exit 2; }
	$(PYTHON) tools/setup.py $(VENV) --torch-index "$(TORCH_INDEX)"
	@touch $@

.PHONY: run
run: $(STAMP) ## plan GPT-3 175B on 1024 GPUs, then plan and train a small model on this machine
	PATH="$(abspath $(BIN)):$$PATH" tools/run.sh

.PHONY: check
check: beside test ## everything a change must pass

.PHONY: beside
beside: lint types docs-check ## the checks that are no tests

.PHONY: test
test: $(STAMP) ## the tests, without the long ones
	$(BIN)/pytest -n auto --dist worksteal -m "not slow and not gpu"

.PHONY: coverage
coverage: $(STAMP) ## the lines that the tests execute (a report)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n auto -m "not slow and not gpu"
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered --sort=cover

.PHONY: prove
prove: $(STAMP) ## the long tests: more examples, more layouts, more ranks
	$(BIN)/pytest -n auto -m "slow or gpu"
	$(BIN)/python tools/real_parsers.py

.PHONY: lint
lint: $(STAMP) ## style, common mistakes and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

.PHONY: types
types: $(STAMP) ## mypy --strict
	$(BIN)/mypy

.PHONY: format
format: $(STAMP) ## rewrite the sources in the house style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(DOCS_STAMP) ## rewrite the generated parts of the documents, and build the site in build/site
	$(BIN)/python tools/docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

# what builds the site is installed when somebody builds it
$(DOCS_STAMP): $(STAMP)
	$(PYTHON) tools/setup.py $(VENV) --group docs --torch-index "$(TORCH_INDEX)"
	@touch $@

.PHONY: docs-check
docs-check: $(STAMP) ## fail if `make docs` would change any document
	$(BIN)/python tools/docs.py --check

.PHONY: golden
golden: $(STAMP) ## rewrite tests/golden; read the difference before you commit it
	$(BIN)/pytest -q -n auto -m "not slow and not gpu" --ignore tests/trainer --update-golden
	@git diff --stat -- tests/golden

.PHONY: pictures
pictures: $(STAMP) ## take the pictures of docs/images again, with Chromium
	$(BIN)/python tools/pictures.py

.PHONY: accuracy
accuracy: $(STAMP) ## closed forms against papers, forecasts against measured runs; writes docs/accuracy.md
	$(BIN)/python tools/closed_forms.py
	$(BIN)/planner accuracy tests/published/measurements.csv
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tools/accuracy.py tests/published/measurements.csv
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tools/vtrain.py

.PHONY: plans
plans: $(STAMP) ## what the recommendation costs over the minimum, on the jobs of published runs (a report)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tools/plans.py

.PHONY: calibrate
calibrate: $(STAMP) ## fit planner/calibration.json to the published runs again
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tools/calibrate.py tests/published/measurements.csv planner/calibration.json

.PHONY: bench
bench: $(STAMP) ## CPU seconds and memory of the commands against their targets (a report)
	$(BIN)/python tools/bench.py

.PHONY: shape
shape: $(STAMP) ## lengths of functions and files against the codebases we look up to (a report)
	$(BIN)/python tools/shape.py

.PHONY: mutate
mutate: $(STAMP) ## change the code at random, SEED=1 COUNT=60, and see whether a test notices (a report)
	$(BIN)/python tools/mutate.py --seed $(SEED) --count $(or $(COUNT),60)

.PHONY: battery
battery: $(STAMP) ## attack plans and runs, row by row; goes on where it stopped; ROWS=B1,A1 and COUNT=... run a part
	nice $(BIN)/python tools/battery.py --rows "$(ROWS)" $(if $(COUNT),--count $(COUNT))

.PHONY: wheel
wheel: $(STAMP) ## build sdist and wheel, install them alone into a fresh environment, and plan with them
	tools/wheel.sh "$(BIN)/python"

.PHONY: clean
clean: ## remove what the commands above wrote, but not .venv and not runs/
	rm -rf build dist .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find planner tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
