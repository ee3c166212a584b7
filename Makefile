# Every target makes .venv and installs into it on first use, and reuses it afterwards.
#
#   make PYTHON=python3.12 …       another interpreter for the environment (needs Python 3.11 or newer)
#   make train OUT=runs/first      another folder than the next free one of runs/1, runs/2, …
#   make TORCH_INDEX=https://… …   another index for torch alone, such as that of its CPU builds (see README.md)

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2
OUT := $(or $(OUT),$(shell n=1; while [ -e runs/$$n ]; do n=$$((n + 1)); done; echo runs/$$n))

SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

INSTALLED := .venv/.installed
LAUNCH := accelerate launch --config_file configs/accelerate/cpu.yaml -m deepseek_lab.train
LAUNCH_8 := accelerate launch --config_file configs/accelerate/cpu.yaml --num_processes 8 -m deepseek_lab.train
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=120

.DEFAULT_GOAL := help
.PHONY: help install train train-long test parity check lab bench

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED)  ## make .venv and install the package into it

train: $(INSTALLED)  ## pretrain a small model on 8 ranks: data, tensor, pipeline and expert parallel, with ZeRO
	@echo "Pretraining on 8 ranks; the run is written to $(OUT)."
	$(LAUNCH_8) --config configs/tiny_mesh.yaml --out $(OUT)

train-long: $(INSTALLED)  ## the same for at most 40 minutes
	@echo "Pretraining on 4 ranks, at most 40 minutes; the run is written to $(OUT)."
	$(LAUNCH) --config configs/tiny_long.yaml --out $(OUT)

test: check  ## everything: lint, types, drift, tests, all notebooks
	@echo "Testing on $(WORKERS) workers: the package, then every notebook of solutions/ and notebooks/."
	OMP_NUM_THREADS=1 python -m pytest -q -n $(WORKERS) --dist loadfile $(NBVAL) tests solutions notebooks

parity: $(INSTALLED)  ## every three settings of a layout together, against the serial run (half an hour)
	OMP_NUM_THREADS=1 python -m pytest -q -s -m parity_full tests/parity

check: $(INSTALLED)  ## lint, types, and whether notebooks and sources agree
	@echo "Checking style, types, and that the notebooks are those of their sources."
	ruff check .
	ruff format --check .
	mypy
	python tools/notebooks.py check
	python tools/readme.py check

lab: $(INSTALLED)  ## open chapter 00 in JupyterLab
	jupyter lab notebooks/00_start_here.ipynb

bench: $(INSTALLED)  ## side-by-side measurements of this machine
	@for file in benchmarks/*.py; do echo "== $$file"; python $$file || exit 1; done

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, and $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12")'
	@echo "Installing into .venv (a few minutes, once)."
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv || { echo "venv failed. On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	@if [ "$$(uname)" = Linux ] && [ -z "$(TORCH_INDEX)" ] && ! command -v nvidia-smi >/dev/null; then \
		echo "No GPU here: torch may still come with gigabytes of CUDA. README.md says how to get the smaller CPU build."; fi
	.venv/bin/python -m pip install -q "torch==2.13.*" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	.venv/bin/python -m pip install -q -e ".[test,hf]"
	@touch $@
