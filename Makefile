# Two commands: `make up` serves the embedded model, `make test` runs every test. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv installs quickly from its cache; a machine without it gets it inside the virtual environment.
UV := $(shell command -v uv 2>/dev/null || echo $(abspath $(BIN)/uv))
export UV_PYTHON_DOWNLOADS := never
export PYTHONSAFEPATH := 1
INSTALLED := $(VENV)/.installed
STUBS := clients/python
REQUIRE ?=
PYTEST_ARGS ?=
STAGE = @tests/stage "$(1)" $(2)

.DEFAULT_GOAL := help
.PHONY: help up golden test aot faults soak suites lint format protos lock bench setup model clean compose-test

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

up: setup model ## install, fetch the embedded model, and serve it on http://127.0.0.1:8000
	@exec $(BIN)/dragoman up $(ARGS)

test: setup model ## install what the tests need and run all of them; REQUIRE='promtool ...' makes a missing need fail
	$(call STAGE,toolchains,$(BIN)/python tests/toolchains.py --require "$(REQUIRE)")
	$(call STAGE,tests,env DRAGOMAN_REQUIRE="$(REQUIRE)" $(BIN)/python -m pytest $(PYTEST_ARGS))

aot: setup ## compile every GPU kernel for sm_80 to sm_120, gfx942 and gfx1100 without a GPU and check it against its contract
	$(call STAGE,aot,env -u TRITON_INTERPRET $(BIN)/python -m dragoman_kernels.triton.aot --jobs 2 gpu_agent/dragoman_agent/model/configs/*.json)
	$(call STAGE,aot-hip,env -u TRITON_INTERPRET $(BIN)/python -m dragoman_kernels.triton.aot --jobs 2 --hip gfx942 --hip gfx1100 gpu_agent/dragoman_agent/model/configs/*.json)

golden: setup ## write the plans of every shipped profile for every shipped model anew; read the difference before you commit it
	@PYTHONPATH=. $(BIN)/python -m tests.agent.pal.golden_plans

faults: setup ## kill, freeze, flood and restart a real cell under load; RECORD=1 keeps the figures
	$(call STAGE,faults,env DRAGOMAN_FAULTS=full $(BIN)/python -m pytest tests/faults -s $(if $(RECORD),--record) $(PYTEST_ARGS))

soak: setup model ## mixed load for MINUTES (default 5) on each device there is: memory, descriptors, fragmentation, latency
	$(call STAGE,soak,$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),5) $(if $(RECORD),--record))

conformance: setup ## every client against every case of clients/conformance, as one table; ARGS='--language go --case "resume/*"'
	$(call STAGE,conformance,env PYTHONPATH=. $(BIN)/python -m clients.conformance $(ARGS))

suites: setup ## public test suites against a live gateway
	$(call STAGE,suites,$(BIN)/python tests/suites/run.py --uv "$(UV)")

lint: setup ## ruff, mypy, buf
	$(call STAGE,ruff,$(BIN)/ruff check .)
	$(call STAGE,format,$(BIN)/ruff format --check .)
	$(call STAGE,mypy,$(BIN)/mypy)
	$(call STAGE,buf,sh -c 'cd protos && $(abspath $(BIN))/buf lint && $(abspath $(BIN))/buf format -d --exit-code')

format: setup ## rewrite the sources in the project's form
	$(BIN)/ruff check --fix . && $(BIN)/ruff format . && cd protos && $(abspath $(BIN))/buf format -w

protos: setup ## regenerate the Python and Go stubs and the error tables from protos/
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(STUBS) --pyi_out=$(STUBS) --grpc_python_out=$(STUBS) \
	  protos/dragoman/v1/*.proto protos/dragoman/compat/*.proto
	$(if $(shell command -v go),$(BIN)/python tests/client/go_stubs.py clients/go,@echo "protos: go is not on the PATH; the Go stubs are as they were")
	PYTHONPATH=. $(BIN)/python -m clients.conformance.gen_errors

lock: ## resolve requirements.lock anew
	$(UV) pip compile -q --universal --generate-hashes --no-emit-index-url --python-version 3.11 \
	  --custom-compile-command "make lock" --extra agent --extra controller --extra gateway --extra dev \
	  pyproject.toml -o requirements.lock
	$(UV) pip compile -q --universal --generate-hashes --no-emit-index-url --python-version 3.11 \
	  --custom-compile-command "make lock" -c requirements.lock --extra bench pyproject.toml -o requirements-bench.lock

bench: setup model ## rerun the benchmarks that need no GPU; figures go to benchmarks/results
	$(UV) pip install -q --python $(BIN)/python --require-hashes -r requirements-bench.lock
	$(BIN)/dragoman bench cpu-peer --record
	for name in admission attach gateway_chunk start clients; do PYTHONPATH=. $(BIN)/python -m benchmarks.$$name --record || exit 1; done

compose-test: setup ## check compose.yaml and the Dockerfiles as far as a machine without a Docker engine allows
	$(BIN)/python -m pytest -q tests/test_compose.py

setup: $(INSTALLED) ## create .venv and install the locked packages into it

$(INSTALLED): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(if $(shell command -v uv 2>/dev/null),$(UV) venv -q --python $(PYTHON) $(VENV),$(PYTHON) -m venv $(VENV))
	@test -x "$(UV)" || $(BIN)/python -m pip install -q uv
	@$(BIN)/python -c 'import torch' 2>/dev/null || echo "Installing: PyTorch's default build and its CUDA libraries are a" \
	  "download of 2.7 GB the first time (README, \"A smaller install\")."
	$(call STAGE,install,$(UV) pip install -q --python $(BIN)/python --require-hashes -r requirements.lock)
	@$(UV) pip install -q --python $(BIN)/python --no-deps -e .
	@touch $@

model: setup ## fetch the embedded model into the model cache
	@$(BIN)/dragoman models fetch embedded >/dev/null

clean: ## remove the virtual environment and caches of the tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
