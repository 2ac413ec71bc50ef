# make demo   shows what the project does, on a GPU or without one
# make test   lints, type-checks and runs the tests
# make lint   only the first two
# make summaries  after a kernel changed: writes what the compiler says of it to tests/summaries.jsonl
# make mutants  plants small mistakes and says which ones no test notices; MUTANTS="--area=op" says where
# make docs   builds the documentation into docs/_build/html; a warning is an error
# make links  asks for every page of others that it links to
# make dist   builds what is published, checks it, and installs it in an environment of its own
# make bench  times us and every installed peer on the GPU; BENCH="--suite=odd" says what else
# make lock   writes the newest releases of all that these install to constraints.txt
# make clean  removes what these made
#
# Each makes its own virtual environment, of the releases in constraints.txt. JAX=0.12.0.1 tests another
# release of JAX, and LATEST=1 the newest release of everything, each in an environment of its own;
# PYTHON=... names another interpreter.

# The release that the project is developed on: the oldest that pyproject.toml accepts.
DEFAULT_JAX := 0.11.2
JAX ?= $(DEFAULT_JAX)
PYTHON ?= python3
# Workers of pytest: 2 fit in the memory of a small machine, and more only help with more cores.
WORKERS ?= 2

# Without bytecode, of which pip writes none here, each process that imports JAX takes 7 seconds
# instead of 2: some 25 of them in a run of the tests.
unexport PYTHONDONTWRITEBYTECODE

# What is installed: the releases that are written down, or the newest of everything.
LATEST ?=
ifeq ($(LATEST),)
VENV := $(if $(filter $(DEFAULT_JAX),$(JAX)),.venv,.venv-jax-$(JAX))
CONSTRAINTS := constraints.txt
RELEASES := 'jax==$(JAX)'
else
override JAX :=
VENV := .venv-latest
CONSTRAINTS :=
RELEASES := --upgrade --upgrade-strategy=eager
endif
BIN := $(VENV)/bin
# What the environment was made for; it is brought up to date when the project's requirements change.
STAMP := $(VENV)/.pallas-gemm-jax-$(JAX)
# Without the warnings of setuptools about editable installations, which the newest pip shows. The
# variable constrains the setuptools that builds the project; an older pip ignores it.
INSTALL = PYTHONWARNINGS=ignore PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
  $(BIN)/python -m pip install --disable-pip-version-check --quiet $(CONSTRAINTS:%=--constraint %)
# With a GPU, the CUDA libraries too.
COMMA := ,
GPU := $(shell nvidia-smi -L 2>/dev/null)
CUDA := $(if $(GPU),$(COMMA)cuda13)
# The newest release may be newer than pyproject.toml accepts: pip says so, and installs it.
NEWEST_JAX := 'jax[$(if $(GPU),cuda13,cuda13-local)]'
# The demo needs less; where the whole environment is, it is enough.
DEMO_STAMP := $(if $(wildcard $(STAMP)),$(STAMP),$(STAMP)-demo)

.PHONY: demo test lint newest summaries mutants docs links dist bench lock clean
.DELETE_ON_ERROR:

demo: $(DEMO_STAMP)
	$(BIN)/python bench/demo.py

# The tests run whatever the linter says, so that one run reports everything; either can fail it.
# Each worker takes a stretch of them, so that what a module prepares is seldom prepared twice. Of
# NumPy's threads, those that wait for each other take a fifth of a simulated kernel's time.
test: export OPENBLAS_NUM_THREADS := 1
test: $(STAMP)
	@status=0; $(MAKE) --no-print-directory --assume-old=$(STAMP) lint || status=1; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal || status=1; exit $$status

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

summaries: export OPENBLAS_NUM_THREADS := 1
summaries: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal --write-summaries \
	  $$(grep -l summaries.KEPT -r tests --include='test_*.py')

# Which lines tests reach is found out once, by a run of them all.
mutants: export OPENBLAS_NUM_THREADS := 1
mutants: $(STAMP)
	test -d .pytest_cache/mutation/reach || $(BIN)/python -m tests.mutation map
	$(BIN)/python -m tests.mutation run --workers $(WORKERS) $(MUTANTS)
	$(BIN)/python -m tests.mutation table

# The pip that a Python brings may be years old: the newest takes two thirds of the time.
$(STAMP): EXTRAS := test$(CUDA)
$(STAMP)-demo: EXTRAS := aot,bench$(CUDA)
# Nothing is compiled for a GPU there.
$(STAMP)-docs: EXTRAS := docs
$(STAMP) $(STAMP)-demo $(STAMP)-docs: pyproject.toml Makefile $(if $(LATEST),newest,constraints.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "pallas-gemm needs Python 3.12 or newer; name one with: make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the environment into $(VENV): half a gigabyte at most, half of it the GPU compiler."
	-$(INSTALL) --upgrade pip
	$(INSTALL) --no-compile --editable '.[$(EXTRAS)]' $(RELEASES)
	$(if $(LATEST),$(INSTALL) $(RELEASES) $(NEWEST_JAX))
	touch $@

# What is the newest is asked every time.
newest:

docs: $(STAMP)-docs
	mkdir -p docs/_build/extra
	$(BIN)/python -m schedules explore --out docs/_build/extra/order.html
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "The site is docs/_build/html/index.html."

# Links within the site are checked where it is built; these need the network.
links: $(STAMP)-docs
	mkdir -p docs/_build/extra
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -W --keep-going -q -b linkcheck docs docs/_build/links

lock:
	$(PYTHON) .ci/lock $(DEFAULT_JAX)

dist:
	PYTHON=$(PYTHON) JAX=$(JAX) bash .ci/package

bench: $(STAMP)
	$(BIN)/python bench/gemm_bench.py $(BENCH)

clean:
	rm -rf .venv .venv-jax-* .venv-latest build dist docs/_build *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
