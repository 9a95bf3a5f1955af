# Every target does its own set-up: a virtual environment in .venv, exact CPU versions from constraints/cpu.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.hangrig-ready
SCENARIOS := dp-retract dp-pinned-hang dp-pinned-latency dp-pinned-corruption dp-pinned-gate dp-idle-burst
SEED ?= 1
ARGS ?=

# Nights on hardware. BUDGET is for all runs together, TRIALS per arm as far as the budget allows, KEEP in runs.
BUDGET ?= 8h
TRIALS ?= 100
OUT ?= runs
KEEP_DAYS ?= 30
KEEP ?= 60
ALLOW_SKIP ?=
NIGHT = -m harness.night --budget $(BUDGET) --trials $(TRIALS) --seed $(SEED) --out $(OUT) --keep-days $(KEEP_DAYS) \
	--keep $(KEEP) $(if $(filter-out 0,$(ALLOW_SKIP)),--allow-skip) --run-options="$(ARGS)"
PYTHON_311 = $(PYTHON) -c 'import sys; sys.exit("hangrig needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'

.PHONY: check-npu-api setup stress-sim stress-npu stress-cuda test test-engines hang litmus corpus lint bench bench-engines compare clean

setup: $(READY)

$(READY): pyproject.toml constraints/cpu.txt
	@$(PYTHON_311)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt torch -e '.[test,lint]'
	@touch $@

stress-sim: setup  ## the main job: the scenario set on the simulated device, about five minutes
	$(BIN)/hangrig run $(SCENARIOS) --device sim --seed $(SEED) $(ARGS)

stress-npu stress-cuda:  ## a night in an accelerator image's own Python, whose torch stays as it is (docs/nights.md)
	@$(PYTHON_311)
	@$(PYTHON) $(NIGHT) $(subst stress-,,$@)

test: setup  ## all tests, lint included
	$(BIN)/python -m pytest $(ARGS)

test-engines: setup  ## real SGLang and vLLM servers on this CPU, broken on purpose; builds their environments once
	HANGRIG_ENGINE_RUNS=runs/engines $(BIN)/python -m pytest -m engines tests/engines $(ARGS)

hang: setup  ## the hang tests only
	$(BIN)/python -m pytest -m hang $(ARGS)

litmus: setup  ## small stream programs on the simulated device, under both memory models: two minutes at most
	$(BIN)/hangrig litmus --device sim --model cann --seed $(SEED) $(ARGS)
	$(BIN)/hangrig litmus --device sim --model cuda --seed $(SEED) $(ARGS)

corpus: setup  ## all rows of the hang corpus, their twins and controls: an hour and a half
	$(BIN)/hangrig corpus --seeds 5 --twins 20 --wide 3 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check-npu-api: setup  ## what our code uses of torch_npu, against its wheels, which are fetched and never installed
	$(BIN)/python -m checks.npu_api $(ARGS)

bench: setup  ## performance, as ratios within one run, stored as JSON
	$(BIN)/python -m bench $(ARGS)

bench-engines: setup  ## what the probe costs a real SGLang, as a ratio within one server
	$(BIN)/python -m bench.engines --python "$$($(BIN)/python -m tests.engines.environments sglang \
		| $(BIN)/python -c 'import json, sys; print(json.load(sys.stdin)["sglang"])')" $(ARGS)

compare: setup  ## pinned against pageable in the newest run
	$(BIN)/hangrig compare runs/latest --by pinned

clean:
	rm -rf $(VENV) .venv-npu .venv-cuda runs build *.egg-info
