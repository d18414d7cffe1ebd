# Two commands do everything on a fresh machine: `make report` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2-135m-instruct
NBVAL  := --nbval --nbval-current-env --nbval-sanitize-with=nbs/sanitize.cfg --nbval-cell-timeout=400 -p no:cacheprovider --color=no

.PHONY: help setup fetch report test lint unit notebooks lab bench format clean

help:
	@echo "make report     set up, run the lab on $(MODEL), leave reports/<time>/index.html"
	@echo "make test       set up, lint, unit tests, notebooks under nbval"
	@echo "make lab        set up, open JupyterLab in nbs/"
	@echo "make lint | unit | notebooks | bench | format | clean"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("llmlab needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]'
	@touch $@

fetch: setup
	$(BIN)/llmlab fetch $(MODEL)

report: fetch
	$(BIN)/llmlab report --model $(MODEL)

test: lint unit notebooks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

unit: fetch
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 --dist loadfile --durations=15

# One worker a core, one thread a worker; MPLBACKEND would take the inline figures away.
notebooks: fetch
	env -u MPLBACKEND OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(NBVAL) -n 2 --dist loadfile --durations=15 nbs

lab: fetch
	cd nbs && ../$(BIN)/jupyter lab

bench: fetch
	$(BIN)/llmlab bench --model $(MODEL) --against hf

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) reports build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
