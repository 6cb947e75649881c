# make demo   installs, explains photos with the model of the package, then trains on digits, evaluates, explains
# make test   installs, runs the test suite; `make chaos` runs the tests in which things fail
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= runs/digits

.PHONY: demo test chaos extended oldest oldest-constraints lint docs notebooks results soak wheels clean

demo: $(VENV)/.installed
	@echo "1. The model of the package answers for four photos. It knows no crocodiles:"
	$(BIN)/vit predict imagenette docs/photos
	$(BIN)/vit explain imagenette docs/photos --output $(RUN)-photos --overwrite
	@echo "2. A model of your own, of 1,797 scanned digits:"
	$(BIN)/vit train digits --output $(RUN) --overwrite
	$(BIN)/vit evaluate $(RUN) --output $(RUN)-evaluation --overwrite
	$(BIN)/vit explain $(RUN) --output $(RUN)-maps --overwrite
	@echo
	@echo "Look at: $(RUN)-photos/index.png      maps of the photos"
	@echo "         $(RUN)-evaluation/report.html  how good the model of digits is"
	@echo "         $(RUN)-maps/index.png        maps of the digits"

# Tests of one file share their fixtures, so that one worker runs the whole file
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not (slow or chaos or extended or docs)"

# Processes killed, power cut, disks full, jobs of several processes, a thousand cases of bad input
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "chaos and not slow"

# What takes long for what it adds: every recipe compiled, the largest presets, exports with 200 photos
extended: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "extended and not slow"

# Tests with the oldest version of each package that pyproject.toml takes, as constraints-oldest.txt names them, in an
# environment of their own. Left out: deprecations that newer packages tell these, and models of newer transformers and timm
oldest: $(VENV)/.installed-dev
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-oldest
	$(BIN)/uv pip install --quiet --no-cache --python $(VENV)-oldest --constraint constraints-oldest.txt --editable '.[dev]'
	$(VENV)-oldest/bin/python -m pytest -n 2 --dist loadfile -W ignore::DeprecationWarning -W ignore::FutureWarning \
		-m "not (slow or chaos or extended or docs or browser)" \
		-k "not (hugging-face or card_names_the_versions or plain_models_open)" $(OLDEST_TESTS)
	rm -rf $(VENV)-oldest
OLDEST_TESTS ?= $(addprefix tests/,model optim prediction cli/test_build.py \
	deploy/export training/test_run.py training/test_train_step.py)

# constraints-oldest.txt anew, after a bound in pyproject.toml has changed
oldest-constraints: $(VENV)/.installed-dev
	$(BIN)/uv pip compile --quiet --extra dev --resolution lowest-direct --python-version 3.11 --no-annotate --no-header \
		--output-file constraints-oldest.txt pyproject.toml

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The examples and notebooks executed, and the documentation as a site in site/; any warning is an error
docs: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m docs
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --strict --clean

# Execute the notebooks and store their outputs
notebooks: $(VENV)/.installed-dev
	$(BIN)/python docs/execute_notebooks.py

# The tables and pictures of the pages, from the result files
results: $(VENV)/.installed
	$(BIN)/python benchmarks/tables.py --write

# Minutes to an hour: the long kill test, full-size presets, memory limits
soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

# What a GPU machine without a network needs for benchmarks/gpu_day.sh, in wheels/: packages for its Python, the project, and
# the name of the commit
WHEELS := albucore albumentations annotated-types beartype braceexpand pydantic pydantic-core simsimd stringzilla \
	typing-extensions typing-inspection
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
wheels: $(VENV)/.installed-dev
	rm -rf wheels
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --constraint constraints.txt --dest wheels \
		--python-version 3.12 --implementation cp $(PLATFORMS:%=--platform %) $(WHEELS)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir wheels .
	git describe --always --dirty > wheels/COMMIT

clean:
	rm -rf $(VENV) runs

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and "vit needs Python 3.11 to 3.14")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
