# make test | speed | lint       set up once (in .venv, or in the environment VENV names), then do it
# make test-oldest | test-newest   imports, compilation, operators and integrations with the oldest
#                              and the newest torch, in .venv-oldest and .venv-newest
# make docs                    the documentation as a site, in build/site
# make compile-matrix            all kernels with every supported Triton, without a GPU
# make pages                     write the tables of README.md and docs/results from the rows
# make page                      measure the figures of the first page on this GPU, and fill it
# make tour                      run the notebook of the guide and store its outputs
# make wheel                     the wheel and the source distribution in dist, always the same bytes
#   PYTHON=python3.12            the interpreter that .venv is made with
#   VENV=/path/to/venv           use (or make) this environment
#   TORCH=torch==2.11.0          another version of torch
#   WORKERS=8                    processes that run the tests
#   SPARSEFLASH_FUZZ=10          ten times as many random tests
#   ARGS="providers=[cpu,sdpa]"  passed on to experiments.speed, or to pytest

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=
WORKERS ?= 2

RUN   := $(VENV)/bin/python
READY := $(VENV)/.sparseflash-ready
DOCS  := $(VENV)/.sparseflash-docs-ready
PIP   := $(RUN) -m pip --disable-pip-version-check --quiet

# Bytecode is written for the modules that are used, when they are: packages have five times as many.
INSTALL := $(PIP) install --no-compile
export PYTHONDONTWRITEBYTECODE =

.PHONY: speed page pages test test-oldest test-newest lint docs tour compile-matrix wheel \
	install install-docs clean
.DEFAULT_GOAL := test

speed: $(READY)
	$(RUN) -m experiments.speed $(ARGS)
	$(RUN) -m experiments.plot

# what is measured already is not measured again; the rows name the commit, so commit first
PAGE := docs/results/h100/page.jsonl
page: $(READY)
	$(RUN) -c "import torch; torch.cuda.is_available() or exit('make page measures a GPU; torch finds none here')"
	test -e $(PAGE) || gunzip --keep $(PAGE).gz
	$(RUN) -m experiments.speed grid=page rounds=3 seconds=0.2 rows=$(PAGE) $(ARGS)
	$(RUN) -m experiments.plot rows=$(PAGE) out=docs/figures/page unstable=false
	gzip --force --no-name $(PAGE)
	$(MAKE) pages

pages: $(READY)
	$(RUN) -m experiments.tools.pages

# one thread each: those of several processes would take turns on the same cores
test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

OF_TORCH := $(addprefix tests/sparseflash/,test_imports.py test_compile.py \
	test_shards.py operators integrations)
test-oldest: TORCH_TESTED := VENV=.venv-oldest TORCH=torch==2.11.0
test-newest: TORCH_TESTED := VENV=.venv-newest TORCH=torch
test-oldest test-newest:
	$(MAKE) test $(TORCH_TESTED) ARGS="$(OF_TORCH) $(ARGS)"

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --config-file docs/site/mkdocs.yml
	@echo "python3 -m http.server -d build/site   shows the site at http://localhost:8000"

compile-matrix: $(READY)
	$(RUN) -m experiments.tools.compile_matrix $(ARGS)

tour: $(DOCS)
	mkdir -p build/tour && cp docs/guide/tour.ipynb build/tour
	cd build/tour && PYTHONPATH=$(CURDIR) $(abspath $(RUN)) -m nbconvert --to notebook --execute --inplace tour.ipynb
	cp build/tour/tour.ipynb docs/guide

wheel: $(READY)
	$(RUN) -m hatchling build

install: $(READY)
install-docs: $(DOCS)

# The interpreter of Triton 3.6, which torch 2.11 brings, fails with NumPy 2.4.
define CONSTRAINTS
from importlib.metadata import distributions, version
print("torch==" + version("torch"))
if any(d.name == "triton" and d.version.startswith("3.6.") for d in distributions()):
    print("numpy<2.4")
endef
export CONSTRAINTS

# before torch is fetched: an interpreter that is too old, or another one than $(VENV) has
VERSION := -c 'import sys; print(*sys.version_info[:2], sep=".")'
.PHONY: python
python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) $(VERSION)): make PYTHON=python3.12"; exit 1; }
	@test "$(origin PYTHON)" = file || ! test -x $(RUN) || \
	  test "$$($(RUN) $(VERSION))" = "$$($(PYTHON) $(VERSION))" || \
	  { echo "$(VENV) has Python $$($(RUN) $(VERSION)), not that of $(PYTHON): make clean, or name another VENV"; exit 1; }

# torch comes first and is then held still, so that nothing below can exchange it (or its build) for another.
$(READY): pyproject.toml | python
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) "$(TORCH)"
	$(RUN) -c "$$CONSTRAINTS" > $(VENV)/constraints.txt
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[experiments,models,dev]'
	touch $@

$(DOCS): $(READY)
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
