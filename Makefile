# Everything that people and CI do with this project. `make demo` and `make test` do all the set-up by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTKUBE := packages/basilica-testkube
DOCS := build/docs-venv
# Tests wait for much of their time, so that four workers keep two cores busy.
WORKERS := -n 4 --dist loadgroup --no-loadscope-reorder
OFFICIAL := .venvs/official-0.36.8/.installed .venvs/official-0.29.0/.installed

.PHONY: setup demo system test test-fast durations lint types fmt verify docs bench chaos hunt test-cluster clean

setup: $(STAMP)

# Both on one line: the test cluster that the development extra names is this one, and none is fetched.
$(STAMP): pyproject.toml $(TESTKUBE)/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e $(TESTKUBE) -e '.[torch,dev]' -c constraints.txt
	touch $@

# The published client, each version in an environment of its own: it is called `basilica` too.
.venvs/official-%/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check basilica-sdk==$*
	touch $@

demo: setup
	$(BIN)/python examples/diloco_demo.py --curve build/loss.svg

# The real etcd that ours is compared with, what makes network namespaces, the browser of the console, what shows system
# calls, and a compiler for a clock that steps: Debian's.
system:
	(command -v etcd && command -v tc && command -v chromium && command -v strace && command -v cc) >/dev/null || \
		(apt-get update -q && apt-get install -y -q etcd-server iproute2 chromium strace gcc libc6-dev)

# The tests of a file, and the stories of the published client, stay on one worker, the longest first: tests/support/groups.py.
# What failed beside the others is tried once more, alone, and counted: tests/support/second_try.py.
test: setup lint types system $(OFFICIAL)
	$(BIN)/python -m pytest -m "not chaos and not cluster" $(WORKERS) --durations=10 --times build/times.txt --second-try

# What was not measured as slow: less than a minute.
test-fast: setup
	$(BIN)/python -m pytest -q -m "not slow and not chaos and not cluster" $(WORKERS)

# tests/slow.txt made anew from what the last `make test` measured.
durations: setup
	$(BIN)/python -m tools.durations build/times.txt

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What is generated from the code and checked in: made anew, and compared as whole files.
verify: setup
	$(BIN)/python -m tools.reference
	git diff --exit-code -- docs deploy

# The site, in build/site: a broken link, or a page that the navigation lacks, fails. In an environment of its own: it
# needs nothing of ours, and we need nothing of it. To read it: python3 -m http.server -d build/site
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict

$(DOCS)/.installed: constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check mkdocs-material -c constraints.txt
	touch $@

bench: setup $(OFFICIAL)
	$(BIN)/python -m benchmarks

chaos: setup
	$(BIN)/python -m pytest -m chaos -s

# Cases that no build has tried yet, twenty times as many: hours. `make test` explores the same ones every time.
hunt: setup system
	HYPOTHESIS_PROFILE=hunt $(BIN)/python -m pytest -m "hypothesis or hunt" --timeout 7200 -n 2

# Installs Basilica on the cluster that kubectl speaks to, and tells its stories there. IMAGE: ours, where nodes find it;
# PLAIN_IMAGE: any other with Python.
PLAIN_IMAGE ?= python:3.12-slim
test-cluster: setup
	test -n "$(IMAGE)" || (echo "say which image: make test-cluster IMAGE=basilica:1" >&2; exit 2)
	BASILICA_TEST_IMAGE=$(IMAGE) BASILICA_TEST_PLAIN_IMAGE=$(PLAIN_IMAGE) $(BIN)/python -m pytest -m cluster tests/cluster

clean:
	rm -rf $(VENV) .venvs build .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
