# Set-up is the work of scripts/bootstrap.py, which runs without make as well.

# The first Python that is new enough; failing that python3, for bootstrap.py to name what it found.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		&& echo "$$python" && exit; done; \
	python3 -c '' 2>/dev/null && echo python3)
EXTRAS ?=
OPTIONS ?=

venv := .venv/bin
# About as many processes as cores, so one torch thread in each, unless chosen otherwise.
pytest = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(venv)/pytest
# One process more than cores, since tests wait for sound as well. A file is one process's, in the
# order that tests/conftest.py gives.
parallel = -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist loadfile --no-loadscope-reorder
# What needs nothing but the set-up.
fast = not (slow or system or alone or bare or faults)
# pesq is built from source.
pesq := $(shell command -v cc >/dev/null && echo ,pesq)

bootstrap = @python="$(PYTHON)"; test -n "$$python" || { \
	echo "make: no Python found; install Python 3.11 or newer (for example \`apt install\
	python3 python3-venv\`), or name one: make PYTHON=/path/to/python3" >&2; exit 2; }; \
	"$$python" scripts/bootstrap.py --extras

# The tests start many processes, each of which would compile all its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-talk demo talk test test-all test-bare test-faults lint format docs dist clean
.PHONY: setup-judges setup-demo setup-docs
# Two set-ups at once would write to the same .venv.
.NOTPARALLEL:

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

setup: ## create .venv and install mosstalk; EXTRAS=voices,quality adds those extras
	$(bootstrap) "$(EXTRAS)"

setup-dev: ## create .venv with all that lint and test need
	$(bootstrap) "$(EXTRAS),dev,voices"

setup-demo:
	$(bootstrap) "$(EXTRAS),server,vad"

setup-talk:
	$(bootstrap) "$(EXTRAS),server,vad,transcribe,webrtc"

setup-docs:
	$(bootstrap) "$(EXTRAS),docs"

demo: setup-demo ## set up, then ask the small model three questions
	$(venv)/python scripts/demo.py demo-output

talk: setup-talk ## start the server and open its page; OPTIONS="--port 9000" chooses as `mosstalk serve` does
	@$(venv)/python scripts/talk.py $(OPTIONS)

define style
	$(venv)/ruff check
	$(venv)/ruff format --check
	$(venv)/lint-imports --no-logo
endef

lint: setup-dev ## check style, formatting, types, and which module imports which
	$(style)
	$(venv)/mypy

# mypy runs beside the tests, so that neither core waits; what it says comes after them.
test: setup-dev ## lint, and run the tests that need nothing but the set-up
	$(style)
	@echo '$(pytest) $(parallel) -m "$(fast)" & $(venv)/mypy'; \
	$(venv)/mypy >.venv/mypy.txt 2>&1 & types=$$!; \
	trap "kill $$types; exit 130" INT TERM; \
	$(pytest) $(parallel) -m "$(fast)"; tests=$$?; \
	wait $$types; types=$$?; \
	echo mypy:; cat .venv/mypy.txt; \
	test $$tests = 0 && test $$types = 0

setup-judges: setup-dev
	$(bootstrap) "$(EXTRAS),dev,voices,quality,recipe,browser,fleet,docs$(pesq)"

test-all: test setup-judges ## test, and also what takes long or needs the Debian packages in scripts/system-packages.txt
	$(pytest) $(parallel) -m "(slow or system) and not (alone or bare or faults)"
	$(pytest) -m "alone and not faults"

test-bare: setup-dev ## as root: what deploy/ says, done on a bare Debian, which takes some six minutes
	$(pytest) -m bare

test-faults: setup-judges ## for an hour: kill and stop every process of a server in every state, attack it, and print what clients saw; then try more cases and properties
	$(pytest) -s -m faults
	$(pytest) $(parallel) --hypothesis-profile patient -m hypothesis

format: setup-dev ## rewrite the code in the project's style
	$(venv)/ruff check --fix
	$(venv)/ruff format

docs: setup-docs ## make the documentation's site in build/site, and name each link of it that is broken
	$(venv)/python -m tools.docs_site build

dist: setup-dev ## pack a release into dist/: the wheel with the small model, the source archive without
	$(venv)/python -m hatchling build --clean --target sdist --target wheel --directory dist

clean: ## remove caches and generated files; .venv stays
	rm -rf .import_linter_cache .mypy_cache .mypy_worker.*.json .pytest_cache .ruff_cache .hypothesis .cache build dist demo-output
	find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
