# packhouse: `make` alone prints this list.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.run
TEST_STAMP := $(VENV)/.test
DEMO := deployments/demo/recipe.yaml
# Minutes each, for their servers, clusters and a browser: `make e2e`.
SERVICES := tests/served tests/load tests/e2e tests/browser tests/security tests/prefect/test_engines.py
BENCH_RUN := .packhouse/bench-run
BENCH_PEERS := .packhouse/bench-env
DOCS := .packhouse/docs-env
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## print this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(TEST_STAMP) ## make .venv with everything that work on packhouse needs

demo: $(RUN_STAMP) ## run the whole chain on the sample in the repo; LOCAL=1: without a server
	@env -u PREFECT_API_URL PREFECT_HOME="$(CURDIR)/.packhouse/prefect" \
		PACKHOUSE_CACHE="$(CURDIR)/.packhouse" $(BIN)/python -m $(if $(LOCAL),packhouse prepare,flows.prepare) $(DEMO)

serve: $(RUN_STAMP) ## server, worker and deployments on this machine, until Ctrl-C; PORT=4200
	@$(BIN)/python deployments/serve.py --port $(or $(PORT),4200)

deploy: $(RUN_STAMP) ## pools, deployments and automations to the server at PREFECT_API_URL
	@$(BIN)/python deployments/deploy.py

figures: $(TEST_STAMP) ## size of each package, and the functions that a row passes through
	$(BIN)/python -m bench.size
	$(BIN)/python -m bench.row_walk

check: lint types imports figures test ## all checks but the tests with servers; CI runs this and e2e

lint: $(TEST_STAMP) ## format check, lint, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell packhouse schemas tasks flows tests docs README.md CHANGELOG.md

types: $(TEST_STAMP) ## mypy --strict
	$(BIN)/mypy

imports: $(TEST_STAMP) ## the import walls: flows -> tasks -> schemas -> packhouse
	$(BIN)/lint-imports

# One thread a process: torch waits busily for its others, and files at a time are enough for the
# cores (tests of preferences, two files at a time on two cores: 40 s for 63).
test: $(TEST_STAMP) ## run the tests but those of e2e, two files at a time (PYTEST_ARGS adds to it)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfEs --durations=10 -n 2 --dist loadfile $(addprefix --ignore=,$(SERVICES)) \
		$(PYTEST_ARGS)

# What may differ between versions of Python and needs no torch: reading, rendering, recipes, records,
# plans of packs (393 tests, 25 s each); and the wheel, installed from the index.
OTHER_PYTHONS := 3.12 3.13
UNIT := tests/records tests/splitting tests/schemas $(addprefix packhouse/,pack read recipe records render)
pythons: $(TEST_STAMP) ## tests of the core and of the wheel on other versions of Python that are installed
	@for version in $(OTHER_PYTHONS); do \
		python=$$(ls $$HOME/.pyenv/versions/$$version.*/bin/python 2>/dev/null | tail -1); \
		python=$${python:-python$$version}; own=.packhouse/python-$$version; \
		$$python --version >/dev/null 2>&1 || { echo "SKIPPED Python $$version: not installed"; continue; }; \
		$(BIN)/uv venv --quiet --clear --python $$python $$own \
		&& $(BIN)/uv pip install --quiet --python $$own/bin/python --no-deps --require-hashes -r requirements/run.txt \
		&& $(BIN)/uv pip install --quiet --python $$own/bin/python -c requirements/test.txt \
			pytest pytest-timeout hypothesis psutil boto3 \
		&& PYTHONPATH=$(CURDIR) $$own/bin/python -m pytest -rfEs $(UNIT) \
			tests/e2e/test_wheel.py::test_three_lines_in_a_fresh_environment || exit 1; \
	done

gpu: $(TEST_STAMP) ## the tests that need an accelerator, with what they measure (10 minutes)
	$(BIN)/python -m pytest -m gpu -rs -v --log-cli-level=INFO tests/loaders/test_gpu.py

# By file: servers are fixtures of a file. Three at a time, for much of it waits for servers.
e2e: $(TEST_STAMP) ## the tests with PostgreSQL, S3, Prefect's server, worker, browser (PYTEST_ARGS adds to it)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfEs --durations=30 -n 3 --dist loadfile -m "not soak" $(SERVICES) \
		$(PYTEST_ARGS)

load: $(TEST_STAMP) ## RUNS (200) flow runs, AT_ONCE (20) at a time, on PostgreSQL: about 10 min
	$(BIN)/python -m tests.load.load --runs $(or $(RUNS),200) --at-once $(or $(AT_ONCE),20) \
		$(if $(PROCESSES),--processes) $(if $(NOTHING),--nothing) $(if $(PLAIN),--plain)
	$(BIN)/python -m pytest -rs -m soak tests/load

audit: $(TEST_STAMP) ## known vulnerabilities of the pinned versions, from PyPI; needs network
	$(BIN)/python requirements/audit.py

soak: $(TEST_STAMP) ## try to lose a version for MINUTES (default 10): faults, kills, races
	$(BIN)/python -m tests.store.soak all --minutes $(or $(MINUTES),10)

fuzz: $(TEST_STAMP) ## feed INPUTS (default 100000) made-up files to the readers, by coverage
	$(BIN)/python -m tests.fuzz.files --inputs $(or $(INPUTS),100000)

oracle: $(TEST_STAMP) ## what all recipes make, held against tests/golden/oracle.json (ARGS="--only qwen3"; 10 minutes)
	$(BIN)/python -m tests.oracle compare tests/golden/oracle.json $(ARGS)

simulate: $(TEST_STAMP) ## makespan, skew and retries of 10 TB over N workers (ARGS="--tb 1 --workers 16")
	$(BIN)/python -m bench.simulate $(ARGS)

docs: $(DOCS)/.done ## build the site of docs/ into .packhouse/site; SERVE=1: show it, and follow changes
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs $(if $(SERVE),serve,build --quiet) --strict

reference: $(TEST_STAMP) ## write docs/reference/ anew: recipe keys, commands, reason codes, Python API
	$(BIN)/python docs/reference.py

bench: $(TEST_STAMP) $(if $(SMALL),,$(BENCH_RUN)/.done $(BENCH_PEERS)/.done) ## packhouse beside its peers (ROWS, RUNS; 5 minutes); SMALL=1: on the sample
	$(BIN)/python -m bench.peers $(if $(SMALL),--small) $(if $(ROWS),--rows $(ROWS)) $(if $(RUNS),--runs $(RUNS))

peers: $(TEST_STAMP) ## the tests of TRL, Megatron-Bridge, dart-math on packhouse (ARGS="--trl CHECKOUT")
	$(BIN)/python -m bench.peers_tests $(ARGS)

fix: $(TEST_STAMP) ## format, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(TEST_STAMP) ## compile the pinned requirements anew
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

clean: ## remove .venv, caches and the demo's output
	rm -rf $(VENV) .packhouse .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# A lock names everything, so pip resolves nothing: with extras it would take what came out today.
$(RUN_STAMP): $(VENV)/bin/python requirements/run.txt pyproject.toml
	$(BIN)/pip install --no-deps --require-hashes -r requirements/run.txt
	$(BIN)/pip install --no-deps --no-build-isolation -e .
	@touch $@

# A build for CPUs where pip finds one; else the registry's, on Linux with CUDA's libraries.
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

$(DOCS)/.done: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --no-deps --require-hashes -r requirements/docs.txt
	@touch $@

.PHONY: docs reference bench peers simulate help setup demo serve deploy check lint types imports figures test gpu pythons e2e load audit soak fuzz oracle fix lock build clean
