# Everyday commands. VENV and JOBS may be overridden: make check VENV=/tmp/venv JOBS=4
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := dataflow transport adam_async
SOURCES := $(PACKAGES) $(wildcard tests benchmarks examples)
FAST := -m "not slow and not processes and not convergence and not thorough"
THOROUGH := -m "thorough and not slow and not processes and not convergence"
# One more than the usual cores: a third of a test's time is spent waiting.
JOBS ?= 3
export OPENBLAS_NUM_THREADS = 1
# Empty is unset: where bytecode is not kept, every test process rewrites and compiles every test again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: check format-check lint types test test-thorough fmt test-loops test-slow test-launchers test-torch bench demo cov sizes

check: format-check lint  ## everything a change must pass; types are checked beside the tests
	$(MAKE) --no-print-directory --output-sync=target -j 2 types test

format-check:
	$(BIN)/ruff format --check $(SOURCES)

lint:
	$(BIN)/ruff check $(SOURCES)

types:
	$(BIN)/mypy $(PACKAGES) $(wildcard benchmarks tests/drill tests/simulation)

test:  ## the fast tests; those of dataflow and transport on both event loops
	$(BIN)/python -m pytest $(FAST) -n $(JOBS) --dist worksteal

fmt:  ## format and repair what can be repaired
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

test-thorough:  ## proofs over many settings, and roles near the event loop on stock asyncio
	$(BIN)/python -m pytest $(THOROUGH) -n $(JOBS) --dist worksteal

test-loops:  ## the fast tests three times: asyncio in debug mode, asyncio, uvloop
	ADAM_TEST_LOOPS=asyncio $(BIN)/python -X dev -m pytest $(FAST) -o asyncio_debug=true
	ADAM_TEST_LOOPS=asyncio $(BIN)/python -m pytest $(FAST)
	ADAM_TEST_LOOPS=uvloop $(BIN)/python -m pytest $(FAST)

test-slow:  ## what the fast tier leaves out: long properties, real processes, convergence
	$(BIN)/python -m pytest -m "slow or processes or convergence" --timeout=600

test-launchers:  ## roles over SSH, Ray and other engines, if their parts are installed; a skipped test says the reason
	$(BIN)/python -m pytest tests/processes/test_launch_*.py --timeout=600

test-torch:  ## modules of PyTorch on parameter servers, if the extra torch is installed
	$(BIN)/python -m pytest tests/adam_async/torch tests/adam_async/cli/test_export.py tests/test_examples.py tests/processes/test_torch_*.py --timeout=600

bench:  ## every benchmark; rows go to benchmarks/results/latest-NAME.json
	set -e; for file in $$(grep -l -e '"--json"' -e '^    run($$' -e '^    run(__doc__' benchmarks/[a-z]*.py); do name=$$(basename $$file .py); \
	  $(BIN)/python -m benchmarks.$$name --json benchmarks/results/latest-$$name.json; done

demo:  ## train on one machine with every role in a process of its own
	$(BIN)/adam-async train --data auto --processes --servers 2 --replicas 2 --epochs 2

cov:  ## branch coverage of the fast tests
	$(BIN)/python -m pytest $(FAST) --cov --cov-branch --cov-report=term-missing:skip-covered

sizes:  ## lines per file, largest last; a number to look at, not a gate
	@find $(PACKAGES) tests -name "*.py" -exec wc -l {} + | sort -n
