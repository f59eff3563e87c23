# The whole interface of the project. Every recipe makes what it needs in .venv and says what it does.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?=
ARGS ?=

# Compute threads that spin for long starve each other where tests run several servers on few cores.
test test-slow: export GOMP_SPINCOUNT ?= 1000
# Two processes of one compute thread each: half the time on two cores. ARGS="-n 0" runs them in one, as a debugger needs.
test: export OMP_NUM_THREADS ?= 1

.PHONY: help venv dev serve test test-slow check docs format bench-scheduler bench-step bench-kernels bench-perplexity clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

venv: ## make the environment alone
	@$(PYTHON) scripts/make_venv.py

dev: ## make the environment with what tests and checks need
	@$(PYTHON) scripts/make_venv.py --dev

serve: venv ## serve a model: make serve [MODEL=...] [ARGS="--port 8001"]
	@$(BIN)/octavo serve $(MODEL) $(ARGS)

test: dev ## run the tests (under 20 minutes on two cores)
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-slow: dev ## run the slow suite: full-size truth and 100,000-step state machines
	@$(BIN)/python -m pytest -m slow --timeout 3600 $(ARGS)

check: dev ## format, lint, strict types, layer contract, torch-free control plane, size report
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/architecture
	@$(BIN)/python scripts/options_page.py --check
	@$(BIN)/python scripts/requirements_page.py --check
	@$(BIN)/python scripts/size_report.py

docs: dev ## write docs/options.md from the schema, docs/requirements.md from the tests
	@$(BIN)/python scripts/options_page.py
	@$(BIN)/python scripts/requirements_page.py

format: dev ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench-scheduler: venv ## microseconds a step of the scheduler alone
	@$(BIN)/python benchmarks/scheduler.py $(ARGS)

bench-step: venv ## microseconds a decode step by part, everything but the model's arithmetic
	@$(BIN)/python benchmarks/step.py $(ARGS)

bench-kernels: venv ## time of each native operator, beside its twin and the machine's limit
	@for name in linear qlinear attention sampling small; do \
		echo "== $$name"; $(BIN)/python benchmarks/kernels_$$name.py || exit 1; \
	done

bench-perplexity: dev ## quality by quantization: make bench-perplexity MODEL=folder [ARGS="--gguf file"]
	@$(BIN)/python benchmarks/perplexity.py $(MODEL) $(ARGS)

clean: ## remove the environment and caches
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
