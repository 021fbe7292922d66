# Each target sets up .venv as far as it needs it; once that is done a call goes straight to its work.
#   make demo     where does the time of a real training script go?
#   make test     all tests; ARGS="-k layers" narrows them
#   make lint     ruff and mypy, as in CI
#   make bench    the tables behind docs/: attribution, overhead, accuracy and tuning; hours
# PYTHON=python3.12 chooses the interpreter for a new .venv.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
# What is imported is compiled then: to compile all there is takes longer than the rest of installing it.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
OLD_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 10))'

.DEFAULT_GOAL := help
.PHONY: help demo test browser lint bench

help:
	@sed -n 's/^#   //p' Makefile

demo: .venv/.installed
	$(BIN)/diagnose run examples/image_classifier.py

# Much is measured here, and somebody else may take the CPU in that very second: what fails is asked once more
# with nothing beside it, and must pass then. Both answers are printed; after three that fail again it is over.
asked = { $(BIN)/python -m pytest -m '$(1)' --durations=15 $(2) || { [ $$? = 1 ] && \
	echo 'make: what failed is asked once more, alone' >&2 && \
	$(BIN)/python -m pytest -m '$(1)' --last-failed --last-failed-no-failures=none --maxfail=3; }; }

# Two processes share the CPUs in its first part: one thread each is the fastest there. What instructions the
# CPU has, torch's compiler would otherwise try out in every process, for seconds.
test: .venv/.installed browser
ifeq ($(strip $(ARGS)),)
	@status=0; \
	(export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 TORCHINDUCTOR_VEC_ISA_OK=1; \
		$(call asked,not extended and not alone,-n 2 --dist worksteal)) || status=1; \
	$(call asked,alone and not extended,$$(grep -lF mark.alone tests/test_*.py)) || status=1; \
	exit $$status
else
	$(BIN)/python -m pytest $(ARGS)
endif

# The dashboard is tested in a real browser. Without one those tests are skipped, and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "make: installing chromium, in which the dashboard is tested"; \
		timeout 300 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends chromium >/dev/null || \
			echo "make: chromium could not be installed: the dashboard's pages will NOT be tested" >&2; \
	else \
		echo "make: no chromium, and no root and apt-get to install it: the dashboard's pages will NOT be tested" >&2; \
	fi

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.installed-bench
	$(BIN)/python benchmarks/attribution.py
	$(BIN)/python benchmarks/overhead_parts.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/accuracy.py --peers
	$(BIN)/python benchmarks/tuning.py

# The stamp comes last, so that an interrupted installation is taken up again. An environment that
# cannot run, because its Python is gone or too old, is made anew.
.venv/.installed: pyproject.toml constraints.txt
	@if ! $(BIN)/python $(OLD_ENOUGH) 2>/dev/null; then \
		command -v $(PYTHON) >/dev/null || { \
			echo "make: there is no '$(PYTHON)' here; name a Python 3.10 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }; \
		$(PYTHON) $(OLD_ENOUGH) || { \
			echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1), but 3.10 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }; \
		echo "make: setting up .venv; the first time this downloads PyTorch, which takes minutes"; \
		$(PYTHON) -m venv --clear .venv; \
	fi
	$(PIP) --editable ".[dev]"
	@touch $@

.venv/.installed-bench: .venv/.installed
	$(PIP) --editable ".[dev,bench]"
	@touch $@
