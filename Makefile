# Every target prepares what it needs: `.venv/` in this checkout, from hash-locked requirement files.
# Only make and python3 (3.11 or newer, with pip or venv) have to be there. `make help` lists the targets.

PYTHON ?= python3
# Twice the cores of a small machine: half of the time a test waits, for servers, processes and leases that end.
TEST_WORKERS ?= 4
# As many as a small machine has cores: the checks mostly compute.
CHECK_JOBS ?= 2
CHECKS := check-types check-console check-locks check-layers check-lint check-format
ARGS ?=
BIN := .venv/bin
APT_LINE := sudo apt-get install -y python3 python3-pip python3-venv

bootstrap = @command -v $(PYTHON) >/dev/null || { echo "python3 is missing. Install it, then try again:" >&2; echo "  $(APT_LINE)" >&2; exit 2; }; \
	$(PYTHON) tools/bootstrap.py
pytest = $(BIN)/python -m pytest
console = @$(BIN)/python tools/console.py
browser = @$(BIN)/python tools/browser.py

# A machine may be set up to keep nothing that Python compiles; the suite would then compile its libraries in every process.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo up console test check fmt pictures prove conformance bench bench-large lock clean $(CHECKS)

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make or repair .venv with everything for tests and checks, build the console, find or install Chromium
	$(bootstrap) dev
	$(console) build
	$(browser)

demo: ## An agent from trigger to proposals (ARGS=--crash: a worker killed in the middle, and what happened then)
	$(bootstrap) run
	$(console) build
	@$(BIN)/trellis demo $(ARGS)

up: ## Serve an instance on an embedded ledger, with its HTTP gateway, until stopped
	$(bootstrap) run
	$(console) build
	@$(BIN)/trellis up $(ARGS)

console: ## Build the console into the package (what setup, demo, up and test do, too)
	$(bootstrap) run
	$(console) build --strict --again

test: ## Run the default suite (ARGS='-k lease' narrows it)
	$(bootstrap) dev
	$(console) build
	$(browser)
	@$(pytest) --processes $(TEST_WORKERS) $(ARGS) || $(BIN)/python -m tests.second_run

check: ## Format, lint, types, layers, locks for every platform; types and unit tests of the console
	$(bootstrap) dev
	@$(MAKE) --no-print-directory --keep-going --jobs $(CHECK_JOBS) --output-sync=target $(CHECKS)

# The longest check is the first. Each prints what it has to say when it ends.
check-types:
	@$(BIN)/pyright

check-console:
	$(console) check
	$(console) test

check-locks:
	@$(BIN)/python tools/check_locks.py

check-layers:
	@$(BIN)/lint-imports

check-lint:
	@$(BIN)/ruff check --quiet .

check-format:
	@$(BIN)/ruff format --check --quiet . && $(BIN)/python -m tools.markdown_lines --check || \
		{ echo "Formatting differs: run make fmt" >&2; exit 1; }

fmt: ## Format code and documentation, and apply safe lint fixes
	$(bootstrap) dev
	@$(BIN)/ruff check --quiet --fix --exit-zero .
	@$(BIN)/ruff format .
	@$(BIN)/python -m tools.markdown_lines

pictures: ## Take the README's pictures of the console again
	$(bootstrap) dev
	$(console) build --strict
	$(browser)
	@TRELLIS_TAKE_PICTURES=1 $(pytest) -q tests/console/test_console.py -k "watched_to_its_end or rejected_by_keyboard"

prove: ## Run the long proofs
	$(bootstrap) dev
	$(browser)
	@$(pytest) -m prove --timeout 3600 --requirement-results=build/requirements-prove.json $(ARGS)

conformance: ## Run the default suite and print requirement -> tests -> result
	$(bootstrap) dev
	$(console) build
	$(browser)
	@$(pytest) --processes $(TEST_WORKERS) -q $(ARGS); result=$$?; $(BIN)/python -m tests.requirement_report; exit $$result

bench: ## Print the performance table
	$(bootstrap) bench
	@$(BIN)/python -m bench $(ARGS)

bench-large: ## The performance table on big tables
	$(bootstrap) bench
	@$(BIN)/python -m bench --large $(ARGS)

lock: ## Resolve the requirement files again (ARGS=--upgrade for newer versions)
	$(bootstrap) lock $(ARGS)

clean: ## Remove everything that was made
	rm -rf .venv .dev build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	rm -rf console/node_modules console/client/dist src/trellis/gateway/console_files
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
