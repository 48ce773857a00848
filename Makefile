# Both commands do all of their own set-up, on a machine with Python 3.11 or newer, pip and make.

PYTHON ?= python3
VENV ?= .venv
# The one version that the tests run with. pyproject.toml allows a range, so that the package installs beside
# another build of torch, one for CUDA say; to train with such a build, install it into $(VENV) first.
TORCH ?= torch==2.13.0

export OMP_NUM_THREADS ?= 1

.PHONY: train test figures quotes docs experiments clean

train: $(VENV)/train.stamp
	$(VENV)/bin/torchrun --nproc-per-node 4 -m pipesgd.train --config experiments/digits.toml --overwrite

test: $(VENV)/test.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest

# Every figure, from the results that are there: nothing is measured.
figures: $(VENV)/test.stamp
	PYTHONPATH=. $(VENV)/bin/python -m experiments.gallery

# What README and documentation quote of results and code, written into them anew.
quotes: $(VENV)/test.stamp
	PYTHONPATH=. $(VENV)/bin/python -m experiments.quotes

# The documentation as a site, in site/.
docs: $(VENV)/test.stamp
	$(VENV)/bin/mkdocs build --strict

# Every experiment, again: many hours; the same command goes on where it was stopped. Those on emulated links need root or
# namespaces. ARGUMENTS="--list" says what there is.
experiments: $(VENV)/test.stamp
	PYTHONPATH=. $(VENV)/bin/python -m experiments $(ARGUMENTS)

clean:
	rm -rf $(VENV) dist runs site

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/train.stamp: $(VENV)/torch.stamp pyproject.toml
	$(VENV)/bin/pip install --quiet --editable .
	touch $@

# Tests run against the wheel that is built here: a file missing from it must show.
$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml $(shell find pipesgd timing_model -name '*.py')
	rm -rf dist
	$(VENV)/bin/pip wheel --quiet --no-deps --wheel-dir dist .
	$(VENV)/bin/pip install --quiet --force-reinstall --no-deps dist/pipesgd-*.whl
	$(VENV)/bin/pip install --quiet "pipesgd[dev] @ file://$(CURDIR)/$$(ls dist/pipesgd-*.whl)"
	rm -f $(VENV)/train.stamp
	touch $@
