# Both commands do all of their own set-up, on a machine with Python 3.11 or newer, pip and make.

PYTHON ?= python3
VENV ?= .venv
# The one version that the tests run with. pyproject.toml allows a range, so that the package installs beside
# another build of torch, one for CUDA say; to train with such a build, install it into $(VENV) first.
TORCH ?= torch==2.13.0

export OMP_NUM_THREADS ?= 1

RACERS := ps-sync "D-Sync, ring" ddp "ddp fp16" "width 2, int8" "width 2, int4"

.PHONY: train test benchmarks clean

train: $(VENV)/train.stamp
	$(VENV)/bin/torchrun --nproc-per-node 4 -m pipesgd.train --config experiments/digits.toml --overwrite

test: $(VENV)/test.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest

# Every experiment of experiments/results, again: about seven hours. Those on emulated links need root or namespaces.
benchmarks: $(VENV)/test.stamp
	PYTHONPATH=. $(VENV)/bin/python -m experiments.bench_ring --all
	PYTHONPATH=. $(VENV)/bin/torchrun --nproc-per-node 4 -m experiments.bench_pipelined
	PYTHONPATH=. $(VENV)/bin/python -m experiments.kill_and_resume
	PYTHONPATH=. $(VENV)/bin/python -m experiments.kill_testbed
	for rate in 200mbit 1gbit; do PYTHONPATH=. $(VENV)/bin/python -m experiments.bench_ring --all --rate $$rate || exit; done
	for rate in 100mbit 200mbit; do PYTHONPATH=. $(VENV)/bin/python -m experiments.bench_all_reduce --rate $$rate || exit; done
	PYTHONPATH=. $(VENV)/bin/python -m experiments.bench_all_reduce --rate 200mbit --name bench_all_reduce_matrix \
	  --world-sizes 3 4 5 --sizes 4000 64000 1000000 16000000 100000000 --codecs fp32 int8 int4 --seconds 25
	PYTHONPATH=. $(VENV)/bin/python -m experiments.bench_codecs
	PYTHONPATH=. $(VENV)/bin/python -m experiments.bench_prediction
	PYTHONPATH=. $(VENV)/bin/python -m experiments.bench_timing_model
	PYTHONPATH=. $(VENV)/bin/python -m experiments.paper_question
	PYTHONPATH=. $(VENV)/bin/python -m experiments.codec_accuracy
	PYTHONPATH=. $(VENV)/bin/python -m experiments.compare --nodes 4 --rate 200mbit --iterations 16 \
	  --name compare_mlp_4x200mbit_codecs --contenders local ddp "ddp fp16" "width 2, ring" "width 2, int8" "width 2, int4" \
	  "width 2, ternary"
	PYTHONPATH=. $(VENV)/bin/python -m experiments.compare --nodes 4 --rate 200mbit --iterations 30 --rounds 5 \
	  --name compare_prediction_4x200mbit --contenders "width 2, ring" "width 2, int8" \
	  --contender "no prediction=--width 2 --prediction none" \
	  --contender "no prediction, int8=--width 2 --prediction none --codec int8"
	PYTHONPATH=. $(VENV)/bin/python -m experiments.compare --nodes 4 --rate 200mbit --name accuracy_mlp_4x200mbit \
	  --train "--dataset fashion-mnist --model mlp --hidden-sizes 1000 1000 --batch-size 32 --lr 0.1 --schedule one-cycle" \
	  --time-to-accuracy 0.84 --iterations 234 --seeds 1 --contenders $(RACERS)
	PYTHONPATH=. $(VENV)/bin/python -m experiments.compare --nodes 4 --rate 200mbit --workload small-convnet \
	  --time-to-accuracy 0.885 --iterations 468 --seeds 1 --contenders $(RACERS)
	PYTHONPATH=. $(VENV)/bin/python -m experiments.compare --nodes 4 --rate 200mbit --workload small-mlp \
	  --time-to-accuracy 0.86 --iterations 468 --seeds 2 --contenders $(RACERS)
	for workload in mlp convnet; do for rate in 100mbit 200mbit 1gbit; do \
	  PYTHONPATH=. $(VENV)/bin/python -m experiments.compare --nodes 4 --rate $$rate --workload $$workload || exit; \
	done; done

clean:
	rm -rf $(VENV) dist runs

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
