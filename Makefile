# `make demo` and `make test` do their own set-up. Everything lands in .venv.
PYTHON ?= python3
ENGINE ?= transformers
ART_CLOUD_HOME ?= $(CURDIR)/.demo
BIN := .venv/bin
# uv does not read pip's own settings: a folder of wheels that pip looks in, it has to be told.
INSTALL = UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links 2>/dev/null)" \
	$(BIN)/uv pip install --quiet --python $(BIN)/python torch==2.13.0

.PHONY: help demo test check format bench clean

help:  ## list what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "art-cloud needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv

.venv/demo .venv/dev .venv/bench: .venv/%: $(BIN)/uv pyproject.toml
	@echo "Installing art-cloud[$*] into .venv ..."
	@$(INSTALL) --editable '.[$*]'
	@touch $@

demo: .venv/demo  ## train an agent on this machine (ENGINE=, ARGS="--control --json")
	@ART_CLOUD_HOME="$(ART_CLOUD_HOME)" $(BIN)/art-cloud demo --engine $(ENGINE) $(ARGS)

test: .venv/dev  ## run the tests (ARGS="-k trie")
	$(BIN)/pytest -n auto --dist worksteal $(ARGS)

check: .venv/dev  ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/bench  ## run a benchmark (NAME=train_vs_trl)
	@test -n "$(NAME)" || { echo "Name one: make bench NAME=..., of:"; ls benchmarks/*.py | sed 's|benchmarks/||; s|\.py||; /harness/d; s|^|  |'; exit 2; }
	@$(BIN)/python benchmarks/$(NAME).py $(ARGS)

clean:  ## remove what make made
	rm -rf .venv .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
