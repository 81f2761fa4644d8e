# Every target works on a bare machine with Python 3.11 or newer, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

OLDEST := .venv-oldest
NEWEST := .venv-newest

.PHONY: install quickstart test test-slurm test-others test-fast test-oldest test-newest check docs wheel bench counts soak sweep-kills corrupt layouts house cards faults gpu clean

install: $(VENV)/installed-dev

# Without a GPU, the small build of PyTorch for CPUs, where pip finds one.
$(VENV)/constraints.txt: pyproject.toml tools/cpu_build.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/cpu_build.py >$@

$(VENV)/installed-run: $(VENV)/constraints.txt
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(VENV)/constraints.txt -e '.[plot]'
	touch $@

$(VENV)/installed-dev: $(VENV)/constraints.txt
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(VENV)/constraints.txt -c tests/floors.txt -e '.[dev]'
	touch $@ $(VENV)/installed-run

quickstart: $(VENV)/installed-run
	$(BIN)/megalite quickstart

# A wheel of a clean copy, in dist/; docs/releasing.md tells what it is for.
wheel: install
	rm -rf build dist
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

# Slurm's tests wait more than they compute, so they are run beside all others.
test: install
	$(MAKE) -j2 test-slurm test-others

test-slurm: install
	$(BIN)/python -m pytest -m slurm tests/launch

test-others: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not slurm"

# Under three minutes on two cores: without what starts ranks, whole commands or Slurm (tests/conftest.py has the rule).
test-fast: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow and not slurm and not soak"

# With the lowest and the highest versions that pyproject.toml allows. Left out is what starts whole jobs over and over: kills, Slurm, the README.
test-oldest: $(OLDEST)/installed
test-newest: $(NEWEST)/installed
test-oldest test-newest:
	$(<D)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
	    --ignore tests/soak --ignore tests/launch --ignore tests/test_readme.py

$(OLDEST)/installed: pyproject.toml tests/oldest.py
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python tests/oldest.py >$(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install -c $(OLDEST)/constraints.txt -e '.[dev]'
	touch $@

$(NEWEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --upgrade -c tests/floors.txt -e '.[dev]'
	touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation as a site in build/site; a warning ends it.
docs: $(VENV)/docs/installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict

# mkdocs reads the sources without importing them, so this needs no PyTorch.
$(VENV)/docs/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/python -m pip install --upgrade 'pip>=25.1'
	$(VENV)/docs/bin/python -m pip install --group docs
	touch $@

bench: install
	$(BIN)/megalite-bench-step
	$(BIN)/megalite-bench-memory
	$(BIN)/megalite-bench-pipeline
	$(BIN)/megalite-bench-schedules
	$(BIN)/megalite-bench-context
	$(BIN)/megalite-bench-exchanges
	$(BIN)/megalite-bench-checkpoint
	$(BIN)/megalite-bench-convert
	$(BIN)/megalite-bench-states

# Counts of docs/speed.md, which are exact on any machine.
counts: install
	$(BIN)/megalite-bench-counts --write docs/speed.md

soak: install
	$(BIN)/python tests/soak/soak.py --kills 100 --out docs/soak.md

sweep-kills: install
	PYTHONPATH=tests $(BIN)/python tests/soak/sweep_kills.py --kills 100

corrupt: install
	PYTHONPATH=tests $(BIN)/python tests/soak/corrupt.py --out docs/corruption.md

# Rooms, arrows, floors and names of the code: how it is laid out.
house: install
	$(BIN)/python tests/house.py

# A page for every family of presets in build/cards, and the table docs/cards.md.
cards: install
	$(BIN)/python -m megalite_tools.cards.cards --table docs/cards.md

layouts: install
	$(BIN)/python tests/layout_search/layout_tables.py docs/layouts.md

# Needs Slurm's daemons (apt-get install slurm-wlm munge) and root, which slurmd must be.
faults: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/soak/faults.py --faults 66 --training 26 --seed 3 --out docs/faults.md

# All tests and benchmarks of a GPU, one case after the other; goes on where it was ended. See docs/gpu.md.
gpu: $(VENV)/installed-gpu
	PYTHON=$(CURDIR)/$(BIN)/python tools/bench/slot/run.sh all

$(VENV)/installed-gpu: $(VENV)/constraints.txt
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt -c tests/floors.txt -e '.[dev,gpu]'
	touch $@ $(VENV)/installed-dev $(VENV)/installed-run

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) .slot build *.egg-info
