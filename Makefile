# make demo | test | lint: each makes .venv first if it is not there.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

TE := .venv-te/.installed
# the other megatron-core, beside the installed one
MEGATRON_018 := .megatron-core-018
HUGGING_FACE := .hugging-face
TESTS_018 := tests/attention tests/layers tests/composition tests/integration tests/checkpoints tests/end_to_end

.PHONY: demo test test-018 test-examples test-slow test-slurm test-te fuzz lint format install clean help

GRIDS ?= 200
SEED ?= 0

help:
	@echo "make demo       train a small Llama on real text with Megatron-LM's own training loop, on this machine's CPUs"
	@echo "make test       the test suite (13 minutes on 2 cores)"
	@echo "make test-018   the tests that touch Megatron-LM, on megatron-core 0.18 beside 0.19 (12 minutes)"
	@echo "make test-examples  examples/ and docs/ in their tiny forms, Hugging Face weights included (4 minutes)"
	@echo "make test-slurm launch, requeue and lost ranks on a real Slurm, which it installs (Debian, root; 5 minutes)"
	@echo "make test-slow  further training runs, simulations, and a rank that hangs (half an hour)"
	@echo "make test-te    calls of TransformerEngine against its real functions, no GPU needed (compiles it once, 10 minutes)"
	@echo "make fuzz       GRIDS=200 random compositions against the unsharded stock run, from SEED=0"
	@echo "make lint       ruff"
	@echo "make clean      remove what these made"

demo: $(INSTALLED)
	$(BIN)/python examples/demo/run.py

test: $(INSTALLED)
	$(BIN)/python -m pytest

test-018: $(MEGATRON_018)
	PYTHONPATH=$(CURDIR)/$(MEGATRON_018) $(BIN)/python -m pytest $(TESTS_018)

$(MEGATRON_018): | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ 'megatron-core==0.18.2'

test-slurm: $(INSTALLED)
	bash tools/slurm_packages.sh
	$(BIN)/python -m pytest -m slurm tests/slurm

test-examples: $(HUGGING_FACE)
	PYTHONPATH=$(CURDIR)/$(HUGGING_FACE) $(BIN)/python -m pytest -m "slow or not slow" tests/examples

# beside .venv: with transformers in it Megatron takes seconds longer to import, in every process of every test
$(HUGGING_FACE): | $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt --target $@ transformers safetensors

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

test-te: $(TE)
	.venv-te/bin/python -W ignore -m pytest -m "te or not te" tests/te

$(TE): tools/te_env.sh | $(INSTALLED)
	bash tools/te_env.sh
	@touch $@

fuzz: $(INSTALLED)
	$(BIN)/python -W ignore tests/composition/fuzz.py --grids $(GRIDS) --seed $(SEED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(INSTALLED)

$(INSTALLED): setup.py pyproject.toml constraints.txt
	@python=$$(bash tools/find_python.sh) || exit 1; echo "using $$python"; "$$python" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-te $(MEGATRON_018) $(HUGGING_FACE) .demo
