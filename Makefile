# Two commands do everything on a fresh machine with python3 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# No test or tool here may look for a metadata server or another machine.
export TPU_SKIP_MDS_QUERY := 1
export NO_GCE_CHECK := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test test-slow slow-times conformance test-toolchains test-wheel browser prometheus lint format docs bench mutants clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(READY) ## virtual environment in .venv, pinned by constraints.txt
$(READY): pyproject.toml emulators/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[tpu,dev,docs]' --editable emulators
	touch $@

demo: $(READY) ## a job from plan to a quantized model, preempted twice on the way, with no TPU
	@$(BIN)/tpukit rehearse examples/rehearsal.yaml --output runs/demo

test: $(READY) browser prometheus ## the suite (15 minutes on 2 cores)
	$(BIN)/pytest -n 3 --dist loadgroup $(OPTIONS)

# SHARE=3/8 runs the third of eight shares of equal work, by tests/slow_times.txt.
SLOW = $(BIN)/pytest -m slow -n 2 --dist loadgroup --timeout 1800
test-slow: $(READY) browser prometheus ## the cases that take minutes; SHARE=3/8 for one of eight shares
	$(SLOW) $(if $(SHARE),--share $(SHARE)) $(OPTIONS)

# SHARE renews the times of one share; without it the file is written again from nothing.
slow-times: $(READY) browser prometheus ## processor seconds of the slow cases, which shares are dealt out by
	$(if $(SHARE),,rm -f tests/slow_times.txt)
	$(SLOW) $(if $(SHARE),--share $(SHARE)) --times tests/slow_times.txt $(OPTIONS)

conformance: $(READY) ## every code block of the documents, and docs/conformance.md from the run
	$(BIN)/python tools/conformance.py

# Python 3.12 and 3.13 have to be here (pyenv, or on the PATH); environments are made in the cache folder.
test-toolchains: $(READY) ## what depends on jax most, with each other jax and libtpu that was tried (minutes each)
	$(BIN)/python tools/test_toolchains.py

# Python 3.12 and 3.13 are looked for beside this one (pyenv, or on the PATH).
test-wheel: $(READY) ## wheel and sdist in empty environments of Python 3.11, 3.12 and 3.13 (minutes)
	$(BIN)/python tools/test_wheel.py

# Without it the browser tests are skipped; any other system brings its own Chromium.
browser: ## Chromium for the browser tests, on Debian as root
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	|| command -v google-chrome >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	|| echo "no Chromium: the browser tests are skipped (apt-get install chromium)"

# Without it the test that has one scrape the exporter is skipped.
prometheus: ## Prometheus for the exporter's test, on Debian as root
	@command -v prometheus >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus >/dev/null; } \
	|| echo "no Prometheus: the test that scrapes with it is skipped (apt-get install prometheus)"

lint: $(READY) ## ruff and pyright, strict on src
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY) ## rewrite in the house style
	$(BIN)/python -c 'from tpukit.lazy import write_stubs; write_stubs()'
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(READY) ## the pages as a site in build/site; broken links fail
	$(BIN)/python tools/cli_reference.py
	$(BIN)/python tools/python_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# RUN="commands plan" runs these scripts instead, RUN=all every one, for hours.
bench: $(READY) ## a five-minute set of benchmarks, then every bar; results go into benchmarks/results and the pages
	@$(BIN)/python benchmarks/run_all.py $(RUN)

mutants: $(READY) ## small changes to the arithmetic, and how many of them the tests notice
	@$(BIN)/python tools/mutants

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
