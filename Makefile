# Both commands do all of their own set-up, on a machine with Python 3.11 or newer, pip and make.

PYTHON ?= python3
VENV ?= .venv
# The one version that the tests run with. pyproject.toml allows a range, so that the package installs next to
# another build of torch, one for CUDA say; to train with such a build, install it into $(VENV) first.
TORCH ?= torch==2.13.0

export OMP_NUM_THREADS ?= 1
# Compiled sources and tests are kept, for the many processes of the tests, whatever the caller's shell says.
unexport PYTHONDONTWRITEBYTECODE

# Three tests at a time, on two cores: most of them wait, but their deadlines are for no more than that.
WORKERS := --numprocesses 3 --dist worksteal

# Tests of ranks that exchange gradients, but for those that name their transports.
OWN := --ignore tests/comm/test_transports.py --ignore tests/comm/test_tcp.py
EXCHANGES := -m slow tests/comm tests/reducers tests/pipeline tests/test_ddp.py $(OWN)
FEW_EXCHANGES := -m slow tests/comm tests/test_ddp.py $(OWN)

# make cuts names at blanks; a backslash keeps those of a folder together. In a shell's line, quotes do.
empty :=
STAMPS := $(subst $(empty) $(empty),\ ,$(VENV))
BIN := "$(VENV)/bin"
SOURCES := $(shell find pipesgd timing_model -type f -not -name '*.pyc')

.PHONY: train test check test-systems test-processes test-exhaustive test-all lint test-integrations test-torch \
	figures notebooks open-notebooks quotes docs experiments clean
.NOTPARALLEL:

train: $(STAMPS)/train.stamp $(STAMPS)/wheel.stamp
	PYTHONSAFEPATH=1 $(BIN)/torchrun --nproc-per-node 4 -m pipesgd.train --config experiments/digits.toml --overwrite

# For every change: lint, types, and the tests of the centre. tests/tiers.toml says which file is in which tier.
test: lint
	$(BIN)/pytest $(WORKERS) --tier centre

# For every save: the same without tests that take seconds or start processes.
check: lint
	$(BIN)/pytest $(WORKERS) --tier centre -m "not slow"

# Published systems, and the tables that compare them; and what exchanges gradients, over gloo, and half of it over TLS.
test-systems: $(STAMPS)/test.stamp $(STAMPS)/wheel.stamp
	$(BIN)/pytest $(WORKERS) --tier systems
	PIPESGD_TESTED_TRANSPORT=gloo $(BIN)/pytest $(WORKERS) --tier centre $(EXCHANGES)
	PIPESGD_TESTED_TRANSPORT=tls $(BIN)/pytest $(WORKERS) --tier centre $(FEW_EXCHANGES)

# Jobs as torchrun starts them, measurements, long simulations, emulated clusters, pages and packages.
test-processes: $(STAMPS)/test.stamp $(STAMPS)/wheel.stamp
	$(BIN)/pytest $(WORKERS) --tier processes

# Cases of long tests of all tiers, of which every change tries a few (tests/tiers.toml); exchanges, over TLS, too.
test-exhaustive: $(STAMPS)/test.stamp $(STAMPS)/wheel.stamp
	$(BIN)/pytest $(WORKERS) --tier exhaustive
	PIPESGD_TESTED_TRANSPORT=tls $(BIN)/pytest $(WORKERS) --tier centre $(EXCHANGES)

# Before a release: all of these, the doors with the real packages, every case of wrong input, and a hundred killed runs.
# Enter the date in experiments/LOG.md.
test-all: test test-systems test-processes test-exhaustive test-integrations
	PIPESGD_FUZZ=all $(BIN)/pytest $(WORKERS) --timeout 3600 tests/fuzzing
	PYTHONPATH=. $(BIN)/python -m experiments.kill_anywhere

lint: $(STAMPS)/test.stamp $(STAMPS)/wheel.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The doors into other frameworks, and the peers of comparisons, with the real packages.
test-integrations: $(STAMPS)/test.stamp $(STAMPS)/wheel.stamp
	$(BIN)/pip install --quiet "$$(ls dist/pipesgd-*.whl)[lightning,transformers]" lightning peft torchft==0.2.0
	$(BIN)/pytest $(WORKERS) tests/integrations

# What leans most on torch, with another version of it (make test-torch TORCH=torch==2.14.1), in an environment of its own:
# $(VENV) stays as it is.
OTHER := .venv-$(subst ==,-,$(TORCH))
test-torch:
	$(if $(filter torch==%,$(TORCH)),,$(error TORCH must name one version: make test-torch TORCH=torch==2.14.1; got $(TORCH)))
	$(MAKE) --no-print-directory "VENV=$(OTHER)" "$(OTHER)/test.stamp" "$(OTHER)/wheel.stamp"
	@"$(OTHER)/bin/python" -c 'import sys, torch; print("torch", torch.__version__, flush=True); \
		asked = sys.argv[1].removeprefix("torch=="); found = torch.__version__; \
		sys.exit(None if asked in (found, found.split("+")[0]) else f"torch must be {asked} in $(OTHER); got {found}")' "$(TORCH)"
	"$(OTHER)/bin/pytest" $(WORKERS) tests/test_backend*.py tests/test_ddp.py tests/test_process_groups.py \
		tests/pipeline tests/comm

# Every figure, from the results that are there: nothing is measured.
figures: $(STAMPS)/test.stamp
	PYTHONPATH=. $(BIN)/python -m experiments.gallery

# The notebooks, run and stored with what they show.
notebooks: $(STAMPS)/test.stamp
	PYTHONPATH=. $(BIN)/python -m experiments.notebooks

# The notebooks in a browser.
open-notebooks: $(STAMPS)/train.stamp $(STAMPS)/wheel.stamp
	$(BIN)/pip install --quiet "$$(ls dist/pipesgd-*.whl)[notebooks]"
	$(BIN)/jupyter lab notebooks

# What README and documentation quote of results and code, written into them again.
quotes: $(STAMPS)/test.stamp
	PYTHONPATH=. $(BIN)/python -m experiments.quotes

# The documentation as a site, in site/.
docs: $(STAMPS)/test.stamp
	$(BIN)/mkdocs build --strict

# Every experiment, again: many hours; the same command resumes where it was stopped. Those on emulated links need root or
# namespaces. ARGUMENTS="--list" says what there is.
experiments: $(STAMPS)/test.stamp
	PYTHONPATH=. $(BIN)/python -m experiments $(ARGUMENTS)

clean:
	rm -rf "$(VENV)" .venv-torch-* dist runs site

# ---- set-up ----

$(STAMPS)/torch.stamp:
	@$(PYTHON) -c 'import sys; sys.exit("Python must be 3.11 or newer: make train PYTHON=python3.12; got " \
		+ sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "Set-up, only this first time: installs $(TORCH) and what pipesgd needs into $(VENV)."
	@echo "About 400 MB to download with a CPU build of torch, 3 GB with a CUDA build, which pip takes from PyPI on Linux;"
	@echo "it takes some minutes."
	$(PYTHON) -m venv "$(VENV)"
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install "$(TORCH)"
	touch "$@"

# What runs is the wheel that is built here: a file missing from it must show.
$(STAMPS)/wheel.stamp: $(STAMPS)/torch.stamp pyproject.toml $(SOURCES)
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/pip install --quiet --force-reinstall --no-deps dist/pipesgd-*.whl
	touch "$@"

# What it needs, and what its tests need: again where that has changed, not where the sources have.
$(STAMPS)/train.stamp: pyproject.toml | $(STAMPS)/wheel.stamp
	$(BIN)/pip install "$$(ls dist/pipesgd-*.whl)"
	touch "$@"

$(STAMPS)/test.stamp: pyproject.toml | $(STAMPS)/wheel.stamp
	@echo "Installs what the tests need: about 400 MB more to download."
	$(BIN)/pip install "$$(ls dist/pipesgd-*.whl)[dev]"
	touch "$@"
