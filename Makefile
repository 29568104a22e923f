# Two commands do everything on a fresh machine: make train, make test.
PYTHON ?= python3
# Another interpreter, as in make test PYTHON=python3.12, has its own folder.
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_JOBS ?= 2

.PHONY: train test test-all lint clean

$(STAMP): setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

train: $(STAMP)
	$(BIN)/python -m experiments.train_grpo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal -m "not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache
