# Every target installs what it needs into .venv the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/quickstart

# CPU unless the caller says otherwise (JAX_PLATFORMS=tpu make ...).
export JAX_PLATFORMS ?= cpu

.PHONY: quickstart test lint bench clean

quickstart: $(VENV)/core.stamp
	$(BIN)/python launch/train.py --config=configs/quickstart.py --workdir=$(RUN) $(ARGS)
	$(BIN)/python launch/report.py $(RUN)

test: $(VENV)/dev.stamp $(VENV)/alfworld.stamp
	$(BIN)/python -m pytest tests $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/dev.stamp $(VENV)/alfworld.stamp
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/advantages.py
	$(BIN)/python benchmarks/theorem1.py
	$(BIN)/python benchmarks/env_service.py
	[ ! -e $(VENV)/alfworld.stamp ] || $(BIN)/python benchmarks/alfworld_steps.py
	$(BIN)/python benchmarks/webshop.py --sizes 1000 100000
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/model.py $(ARGS)

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python {v.major}.{v.minor} is too old: 3.11 or newer is needed; call make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: requirements.txt | $(BIN)/python
	@echo "installing requirements.txt into $(VENV) (about 1.3 GB, a few minutes, once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

# Without a compiler this does nothing but tell; ALFWorld's tests are skipped
# then, and say so. The build calls `python`, which is not everywhere.
$(VENV)/alfworld.stamp: envs_server/requirements-alfworld.txt | $(BIN)/python
	@if command -v g++ >/dev/null && command -v make >/dev/null; then \
	  echo "installing ALFWorld's engine into $(VENV) (compiles for a minute, once)" && \
	  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r envs_server/requirements-alfworld.txt && \
	  touch $@; \
	else echo "no g++ on this machine, so ALFWorld is left out (apt-get install g++)"; fi

$(VENV)/dev.stamp: requirements-dev.txt requirements-material.txt requirements-tpu-compiler.txt requirements.txt | $(BIN)/python
	@echo "installing requirements-dev.txt into $(VENV) (torch and libtpu among it, once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-material.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/tpu-compiler -r requirements-tpu-compiler.txt
	@touch $@
