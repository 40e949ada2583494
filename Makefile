# Each target works as the first command after `git clone`: it makes .venv itself, and is quick when nothing changed.
# With PYTHON=python3.13, it makes and uses .venv-3.13 instead: one environment per version, side by side.

PYTHON ?= python3
VENV := .venv$(if $(filter command,$(firstword $(origin PYTHON))),-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
BIN := $(VENV)/bin
SOURCES := $(shell git ls-files --cached --others --exclude-standard -- 'millstream/*.py' 'dataset/*.py' 'loader/*.py' 'samplers/*.py' 'sources/*.py' 'tools/*.py' 'transforms/*.py')

.PHONY: demo test test-lowest explore soak kills clients check docs site links dist bench format clean

demo: $(VENV)/.demo ## Train on real images, be killed, resume, and see the same batches.
	$(BIN)/python examples/train_digits.py

# A quarter of the time, tests wait for processes and for limits of time: one more than the cores, up to four.
PARALLEL = -n $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))') --dist=worksteal
test: $(VENV)/.installed ## Run all tests, in one process more than there are cores, up to four.
	$(BIN)/pytest $(PARALLEL)

LOWEST := .venv-lowest
# The oldest Lance allocates what a damaged file asks for, until the system ends the process: one test is left out.
test-lowest: $(LOWEST)/.installed ## Run the tests of sources and states with the lowest versions that are supported.
	$(LOWEST)/bin/pytest $(PARALLEL) tests/sources tests/loader/checkpoints tests/golden \
		--deselect tests/sources/formats/test_lance_rows.py::test_damage_is_an_error_or_what_stands_in_the_file

ROUNDS ?= 10
explore: $(VENV)/.installed ## Run the tests that Hypothesis draws examples for, with new examples in each of ROUNDS=10 rounds.
	for round in $$(seq $(ROUNDS)); do \
		HYPOTHESIS_PROFILE=explore $(BIN)/pytest $(PARALLEL) -m hypothesis || exit; \
	done

MINUTES ?= 60
soak: $(VENV)/.installed ## Random pipelines, faults and resumes for an hour: MINUTES=5 for less, SEED=… to repeat one.
	PYTHONPATH=tests $(BIN)/python -P -m soak $(if $(SEED),--seed=$(SEED),--minutes=$(MINUTES))

kills: $(VENV)/.installed ## Kill a thousand workers while they work.
	PYTHONPATH=tests $(BIN)/python -P -m soak --kills=1000

clients: $(VENV)/.installed ## Run Grain's own tests, and those of Keras that use Grain, with millstream in its place.
	test -x build/clients/bin/python || $(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet --disable-pip-version-check '.[keras]' tensorflow-cpu torch pytest \
		--extra-index-url https://download.pytorch.org/whl/cpu
	build/clients/bin/python -m pip install --quiet --no-deps --upgrade --target build/grain grain==0.2.18
	build/clients/bin/python -m pip install --quiet absl-py pandas parameterized pyarrow pytest-timeout
	cd build/clients && bin/python -P -m millstream.as_grain ../../tests/clients/grain_tests.py ../grain
	cd build/clients && KERAS_BACKEND=jax bin/python -P -m millstream.as_grain -m pytest -q -k grain \
		$$(grep -rl --include='*_test.py' grain lib/python3.*/site-packages/keras/src)

# From inside .venv, mypy sees the installed package, and not the root folder that happens to have its name. pyright runs
# where it is: pip install 'millstream[pyright]'.
check: $(VENV)/.installed ## Check format, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd $(VENV) && bin/mypy --config-file ../pyproject.toml -p millstream
	cd $(VENV) && bin/mypy --config-file ../pyproject.toml ../tests ../examples ../benchmarks ../docs
	if test -x $(BIN)/basedpyright; then $(BIN)/basedpyright --pythonpath $(BIN)/python; fi

docs: $(VENV)/.installed ## Build the documentation as a site, in build/site: index.html is its first page.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

VERSION ?= dev
# mike looks for mkdocs in the PATH.
site: $(VENV)/.installed ## Push the site to the branch gh-pages, as VERSION=v0.2.0, which becomes `latest`, or as `dev`.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'mike>=2.1'
	git config user.name "$$(git log -1 --format=%an)" && git config user.email "$$(git log -1 --format=%ae)"
	export PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1; \
		if test $(VERSION) = dev; then mike deploy --push dev; \
		else mike deploy --push --update-aliases $(VERSION) latest && mike set-default --push latest; fi

links: $(VENV)/.installed ## Ask for every address of another site that a document links to.
	$(BIN)/python docs/programs/check_links.py

dist: $(VENV)/.installed ## Build what is uploaded, in dist, and try the wheel in an environment of its own.
	rm -rf dist build/tried
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[dist]'
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m venv build/tried
	build/tried/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build/tried && bin/python -c 'import millstream; print(next(iter(millstream.load(range(8), batch_size=8, worker_count=1))))'
	build/tried/bin/millstream --help > /dev/null

bench: $(VENV)/.bench ## Measure millstream beside its peers for twenty minutes, on a machine that does nothing else.
	$(BIN)/python benchmarks

format: $(VENV)/.installed ## Put the code into its format.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove everything that the other targets made.
	rm -rf .venv .venv-* build dist output examples/output

# The package and what the demonstration imports: half the size of what the tests need.
$(VENV)/.demo: pyproject.toml setup.cfg $(SOURCES)
	rm -rf build
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[demo]'
	touch $@

# A normal install, not an editable one: what is checked and tested is what users get.
$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES) setup.cfg
	rm -rf build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
	touch $@

$(VENV)/.dependencies: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[dev]'
	touch $@

$(LOWEST)/.installed: $(LOWEST)/.dependencies $(SOURCES) setup.cfg
	rm -rf build
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
	touch $@

$(LOWEST)/.dependencies: pyproject.toml tests/support/lowest_versions.py
	test -x $(LOWEST)/bin/python || python3.11 -m venv $(LOWEST)
	$(LOWEST)/bin/python tests/support/lowest_versions.py > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(LOWEST)/lowest.txt
	touch $@

# PyTorch comes from its own index, which has a build without gigabytes of libraries for GPUs.
$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[bench]' \
		--extra-index-url https://download.pytorch.org/whl/cpu
	touch $@
