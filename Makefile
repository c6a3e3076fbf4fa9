# make demo | test | soak | loadtest | bench | kernels | train | generate | lint | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# of the load test
USERS ?= 8
SECONDS ?= 30
# of the soak test, such as --only listed kills --scale 0.1
SOAK ?=
STAMP := $(VENV)/.irminsul-setup

.PHONY: setup demo test soak loadtest bench kernels train generate lint clean

setup: $(STAMP)

# The stamp goes in last: an installation that was cut short is taken up again.
$(STAMP): requirements.txt requirements-server.txt pyproject.toml client/pyproject.toml kernels/pyproject.toml loadtest/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || { \
	  echo "irminsul needs Python 3.10, 3.11 or 3.12; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." \
	       "Name another one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "could not make $(VENV); on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps -r requirements-server.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation \
	  -e kernels -e client -e loadtest -e .
	@touch $@

demo: setup
	@$(BIN)/irminsul demo

test: lint
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

# real servers under load, faults and hostile requests: one table, in under 30 minutes on two cores
soak: setup
	@OMP_WAIT_POLICY=passive $(BIN)/python -m irminsul_backend.benchmarks.soak $(SOAK)

loadtest: setup
	@$(BIN)/python -m irminsul_backend.triton_io.server.with_server \
	  $(BIN)/locust -f loadtest/locustfile.py --headless --only-summary --users $(USERS) --run-time $(SECONDS)s

bench: setup
	@OMP_WAIT_POLICY=passive $(BIN)/python -m irminsul_backend.benchmarks

# registers, spills, shared memory and instructions of every GPU kernel, compiled without a GPU
kernels: setup
	@$(BIN)/python -m irminsul_kernels.tools.aot

# the shipped model, from nothing: on a GPU if there is one
train: setup
	@$(BIN)/python -m irminsul_backend.training.train

# after a change of irminsul_backend/request_spec.py: the files that are made from the table of inputs
generate: setup
	@$(BIN)/python -m irminsul_backend.commands.generated_files

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --exclude '*.md' .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info */*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
