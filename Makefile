# packhouse: `make` prints the list of targets.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.run
TEST_STAMP := $(VENV)/.test
DEMO := deployments/demo/recipe.yaml
# These start servers, clusters and a browser, and take minutes each: `make e2e`.
SERVICES := tests/served tests/load tests/e2e tests/browser tests/security tests/prefect/test_engines.py
BENCH_RUN := .packhouse/bench-run
BENCH_PEERS := .packhouse/bench-env
BENCH_BEFORE := .packhouse/bench-e24885d
DOCS := .packhouse/docs-env
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## print this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(TEST_STAMP) ## create .venv with everything for working on packhouse

demo: $(RUN_STAMP) ## run the whole pipeline on the sample data; LOCAL=1: without a server
	@env -u PREFECT_API_URL PREFECT_HOME="$(CURDIR)/.packhouse/prefect" \
		PACKHOUSE_CACHE="$(CURDIR)/.packhouse" $(BIN)/python -m $(if $(LOCAL),packhouse prepare,flows.prepare) $(DEMO)

serve: $(RUN_STAMP) ## run a server, a worker and all deployments until Ctrl-C; PORT=4200
	@$(BIN)/python deployments/serve.py --port $(or $(PORT),4200)

deploy: $(RUN_STAMP) ## deploy pools, deployments and automations to PREFECT_API_URL
	@$(BIN)/python deployments/deploy.py

figures: $(TEST_STAMP) ## print the size of each package and the functions that a row passes through
	$(BIN)/python -m bench.size
	$(BIN)/python -m bench.row_walk

check: lint types imports figures test ## run all checks except e2e (CI also runs e2e)

lint: $(TEST_STAMP) ## check formatting, lint rules, spelling and wording
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell packhouse schemas tasks flows tests docs README.md CHANGELOG.md
	$(BIN)/python -m bench.prose --max 44

types: $(TEST_STAMP) ## run mypy --strict
	$(BIN)/mypy

imports: $(TEST_STAMP) ## check import rules: flows -> tasks -> schemas -> packhouse
	$(BIN)/lint-imports

# One thread per process, because idle torch threads spin (tests of preferences: 40 s instead of 63).
# Three files at once for two cores, because tests wait for a quarter of their time.
test: $(TEST_STAMP) ## run the tests except e2e, three files at a time; PYTEST_ARGS adds options
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfEs --durations=10 -n 3 --dist loadfile $(addprefix --ignore=,$(SERVICES)) \
		$(PYTEST_ARGS)

# Tests of what may differ between Python versions and does not need torch (reading, rendering,
# recipes, records, packing: about 1,100 tests), and of the wheel from the index.
OTHER_PYTHONS := 3.12 3.13
UNIT := $(addprefix tests/,records schemas sources splitting) $(addprefix packhouse/,pack read recipe records render)
pythons: $(TEST_STAMP) ## test the core and the wheel on other installed Python versions
	@for version in $(OTHER_PYTHONS); do \
		python=$$(ls $$HOME/.pyenv/versions/$$version.*/bin/python 2>/dev/null | tail -1); \
		python=$${python:-python$$version}; own=.packhouse/python-$$version; \
		$$python --version >/dev/null 2>&1 || { echo "SKIPPED Python $$version: not installed"; continue; }; \
		$(BIN)/uv venv --quiet --clear --python $$python $$own \
		&& $(BIN)/uv pip install --quiet --python $$own/bin/python --no-deps --require-hashes -r requirements/run.txt \
		&& $(BIN)/uv pip install --quiet --python $$own/bin/python -c requirements/test.txt \
			pytest pytest-timeout pytest-xdist hypothesis psutil boto3 \
		&& PYTHONPATH=$(CURDIR) $$own/bin/python -m pytest -rfEs -n 2 --dist loadfile $(UNIT) \
			tests/e2e/test_wheel.py::test_three_lines_in_a_fresh_environment || exit 1; \
	done

gpu: $(TEST_STAMP) ## run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu -rs -v --log-cli-level=INFO tests/loaders/test_gpu.py

# Distributed by file, because servers are fixtures of a file, and tests of the stack together (tests/
# conftest.py). Three at a time: tests often wait.
e2e: $(TEST_STAMP) ## run the tests with PostgreSQL, S3, Prefect servers, workers and a browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfEs --durations=30 -n 3 --dist loadfile -m "not soak" $(SERVICES) \
		$(PYTEST_ARGS)

load: $(TEST_STAMP) ## start RUNS (200) flow runs, AT_ONCE (20) at a time, on PostgreSQL: 10 min
	$(BIN)/python -m tests.load.load --runs $(or $(RUNS),200) --at-once $(or $(AT_ONCE),20) \
		$(if $(PROCESSES),--processes) $(if $(NOTHING),--nothing)
	$(BIN)/python -m pytest -rs -m soak tests/load

audit: $(TEST_STAMP) ## list known vulnerabilities of the pinned packages (asks PyPI)
	$(BIN)/python requirements/audit.py

soak: $(TEST_STAMP) ## stress-test the store for MINUTES (10) with faults, kills and races
	$(BIN)/python -m tests.store.soak --minutes $(or $(MINUTES),10)

fuzz: $(TEST_STAMP) ## feed INPUTS (100000) generated files to the readers, guided by coverage
	$(BIN)/python -m tests.fuzz.files --inputs $(or $(INPUTS),100000)

oracle: $(TEST_STAMP) ## compare the results of all recipes with the recorded ones (10 minutes)
	$(BIN)/python -m tests.oracle compare tests/golden/oracle.json $(ARGS)

simulate: $(TEST_STAMP) ## simulate preparing 10 TB on N workers (ARGS="--tb 1 --workers 16")
	$(BIN)/python -m bench.simulate $(ARGS)

docs: $(DOCS)/.done ## build the site into .packhouse/site; SERVE=1: serve it with live reload
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs $(if $(SERVE),serve,build --quiet) --strict

reference: $(TEST_STAMP) ## regenerate docs/reference: recipe keys, commands, reasons, Python API
	$(BIN)/python docs/reference.py

BENCH_ARGS = $(if $(SMALL),--small) $(if $(ROWS),--rows $(ROWS)) $(if $(RUNS),--runs $(RUNS))

bench: $(TEST_STAMP) $(if $(SMALL),,$(BENCH_RUN)/.done $(BENCH_PEERS)/.done $(BENCH_BEFORE)/.done) ## compare with similar tools (ROWS, RUNS; 15 minutes); CHECK=1: fail if a ratio fell; SMALL=1: use the sample
	$(if $(CHECK),,$(BIN)/python -m bench.peers $(BENCH_ARGS))
	$(BIN)/python -m bench.goals $(BENCH_ARGS) $(if $(CHECK),--check)

peers: $(TEST_STAMP) ## run the tests of similar tools on packhouse (ARGS="--trl CHECKOUT")
	$(BIN)/python -m bench.peers_tests $(ARGS)

fix: $(TEST_STAMP) ## format the code and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(TEST_STAMP) ## recompile the lock files in requirements/
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --no-emit-index-url --extra flows pyproject.toml requirements/build.in \
		-o requirements/run.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --no-emit-index-url --extra flows pyproject.toml requirements/build.in \
		requirements/test.in -o requirements/test.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --no-emit-index-url --extra flows --extra dask --extra quality --extra ray \
		--extra wandb pyproject.toml requirements/build.in requirements/workers.in \
		-o requirements/image.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --no-emit-index-url --no-deps requirements/trainers.in \
		-o requirements/trainers.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --no-emit-index-url --universal -c requirements/test.txt \
		requirements/torch.in -o requirements/torch.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --no-emit-index-url bench/requirements.in -o bench/requirements.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --no-emit-index-url requirements/docs.in -o requirements/docs.txt

build: $(TEST_STAMP) ## build the wheel into dist/
	$(BIN)/python -m hatchling build -t wheel

clean: ## remove .venv, caches and the output of the demo
	rm -rf $(VENV) .packhouse .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# A lock lists every package, so pip resolves nothing: with extras it would install today's releases.
$(RUN_STAMP): $(VENV)/bin/python requirements/run.txt pyproject.toml
	$(BIN)/pip install --no-deps --require-hashes -r requirements/run.txt
	$(BIN)/pip install --no-deps --no-build-isolation -e .
	@touch $@

# A CPU build if pip finds one, else the registry's, which on Linux includes CUDA's libraries.
TORCH := requirements/torch-cpu.txt requirements/torch.txt
define install_torch
	$(1)/pip install --no-deps --require-hashes -r requirements/torch-cpu.txt 2>/dev/null \
		|| $(1)/pip install --no-deps --require-hashes -r requirements/torch.txt
endef

$(TEST_STAMP): $(RUN_STAMP) requirements/test.txt $(TORCH) requirements/trainers.txt
	$(BIN)/pip install --no-deps --require-hashes -r requirements/test.txt
	$(call install_torch,$(BIN))
	$(BIN)/pip install --no-deps --require-hashes -r requirements/trainers.txt
	@touch $@

$(BENCH_RUN)/.done: requirements/run.txt
	$(PYTHON) -m venv $(BENCH_RUN)
	$(BENCH_RUN)/bin/pip install --quiet --no-deps --require-hashes -r requirements/run.txt
	@touch $@

$(BENCH_PEERS)/.done: bench/requirements.txt $(TORCH) requirements/trainers.txt
	$(PYTHON) -m venv $(BENCH_PEERS)
	$(BENCH_PEERS)/bin/pip install --quiet --no-deps --require-hashes -r bench/requirements.txt
	$(call install_torch,$(BENCH_PEERS)/bin)
	$(BENCH_PEERS)/bin/pip install --quiet --no-deps --require-hashes -r requirements/trainers.txt
	@touch $@

$(BENCH_BEFORE)/.done: # a clone without this commit is compared without it
	mkdir -p $(@D)
	git archive e24885d | tar -x -C $(@D) || true
	@touch $@

$(DOCS)/.done: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --no-deps --require-hashes -r requirements/docs.txt
	@touch $@

.PHONY: docs reference bench peers simulate help setup demo serve deploy check lint types imports figures test gpu pythons e2e load audit soak fuzz oracle fix lock build clean
