# Everything that a developer or a CI machine runs. Needs Python >= 3.11, make, git and a package index; all else is
# installed into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Tests start hundreds of interpreters. If this variable is set, each of them compiles this project's modules anew, which
# takes 0.3 s for a daemon and 0.5 s for a rank.
unexport PYTHONDONTWRITEBYTECODE

# The interpreter with which .venv is made. To choose another one: `make venv PYTHON=python3.12`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CODE := paramserver storage trainer_client benchmarks
# `make lock` pins this version of torch. Change it only after an examination of the numerics tests, which compare bit
# for bit with torch's own fused kernels, with the new version.
TORCH := 2.13.0

# Every target with a line of help is phony.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(lastword $(MAKEFILE_LIST)))

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Set up .venv with the pinned dependencies and this package (editable)

# pip shows its progress where a person sees it, because the packages take minutes. In a log it would fill pages.
QUIET = $$(test -t 2 || echo --quiet)
# torch from PyPI includes CUDA (some GB). Without a GPU, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu:
# pip then prefers the CPU build of the same version.
$(INSTALLED): requirements.lock pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON) is not on the PATH: install Python >= 3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$("$(PYTHON)" --version 2>&1); Python >= 3.11 is needed: make venv PYTHON=python3.12" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(QUIET) --requirement requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	@touch $@

# The number of tests that run at the same time. Many tests wait for a part of their time, so two leave two cores idle.
TESTS_AT_A_TIME ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(TESTS_AT_A_TIME) --dist loadfile --no-loadscope-reorder
test: lint ## Check style and types, then run the tests (TESTS_AT_A_TIME=3)
	$(PYTEST) --ignore tests/unit/test_prose.py

suite: venv ## Run the tests alone
	$(PYTEST)

# These are the tests whose results have differed between Python versions or builds of torch so far: memory,
# descriptors, warnings, the compiler, the standard library. They are few, so they can be run with each Python.
chosen-tests: venv ## Run the tests that depend most on the Python version and the build of torch
	$(PYTEST) tests/unit/storage tests/unit/paramserver tests/faults/test_fuzz.py tests/faults/test_shim.py \
	  tests/integration/test_data_plane.py tests/integration/test_model_use.py

PYTHONS ?=
test-pythons: ## Run the tests with each supported Python of this machine (PYTHONS='python3.12 ...': with these)
	"$(PYTHON)" -m tests.pythons suite --with $(PYTHONS)

newest-venv: ## Set up an environment with the newest supported Python of this machine
	"$(PYTHON)" -m tests.pythons venv --newest

test-newest: ## Run the demo and chosen tests with the newest supported Python of this machine
	"$(PYTHON)" -m tests.pythons demo chosen-tests --newest

lint: venv ## ruff (rules and format), mypy --strict, and the words of docstrings, comments and pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/stubs && $(BIN)/python -P trainer_client/deepspeed/names.py build/stubs
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet --durations 0 --durations-min 60 tests/unit/test_prose.py

format: venv ## Bring the code into the checked format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: venv ## Train a small GPT-2 through the store, with a kill and a resume on the way
	$(BIN)/python examples/demo.py

# The campaign keeps the files of a failed round below build/faults, with the command that repeats the round.
SEED ?=
faults: N ?= 1000
faults: venv ## Kill the engine N times and check it (N=1000 SEED=...)
	$(BIN)/python -m tests.faults.campaign --rounds $(N) $(if $(SEED),--seed $(SEED))

campaigns: venv ## Play the campaigns of the suite further, and look whether they find planted faults (some 5 minutes)
	$(PYTEST) --with campaigns tests/faults

fuzz: N ?= 100000
fuzz: venv ## Send a daemon N requests that no honest client sends (N=100000 SEED=...)
	$(BIN)/python -m tests.faults.fuzz --calls $(N) $(if $(SEED),--seed $(SEED))

hostile-files: N ?= 20000
hostile-files: venv ## Open N checkpoints, states and backups that are damaged or made to do harm (N=20000 SEED=...)
	$(BIN)/python -m tests.faults.hostile_files --files $(N) $(if $(SEED),--seed $(SEED))

readers: N ?= 10000
readers: venv ## Open N readers of a daemon while it commits, and check that nothing is left (N=10000 SEED=...)
	$(BIN)/python -m tests.faults.readers --readers $(N) $(if $(SEED),--seed $(SEED))

restarts: N ?= 10
restarts: venv ## Kill the daemon of a run of two ranks N times and compare the bits (N=10 SEED=...)
	$(BIN)/python -m tests.faults.restarts --kills $(N) $(if $(SEED),--seed $(SEED))

pause: N ?= 9
pause: venv ## Stop daemons and trainers of a run N times, wake them and compare the bits (N=9 SEED=...)
	$(BIN)/python -m tests.faults.pauses --pauses $(N) $(if $(SEED),--seed $(SEED))

silence: N ?= 100
silence: venv ## Silence nodes, links, daemons and trainers of a job N times and look for what the table forbids (root; N=100 SEED=...)
	$(BIN)/python -m tests.faults.silence --kills $(N) $(if $(SEED),--seed $(SEED))

upgrades: COMMIT ?= de0c2648
upgrades: venv ## Train with trainers and daemons of this commit and of an earlier one, mixed, and compare the bits (COMMIT=de0c2648)
	$(BIN)/python -m tests.faults.upgrades $(COMMIT)

ranks: N ?= 128
ranks: venv ## Count the sockets of N ranks on this machine (N=128, some 8 GB)
	$(BIN)/python -m pytest tests/integration/test_many_ranks.py --many-ranks $(N)

busy: N ?= 3600
busy: venv ## Have ranks watch each other on busy cores and a slow link for N seconds, and look for a false verdict (root; N=3600)
	$(BIN)/python -m pytest tests/integration/test_silent_nodes.py -k busy --busy-seconds $(N) --timeout 0 -o faulthandler_timeout=0

lenders: N ?= 200
lenders: venv ## Kill, stop, empty and cut off the lenders of a training run N times and compare the bits (root; N=200 SEED=...)
	$(BIN)/python -m tests.faults.lenders --strikes $(N) $(if $(SEED),--seed $(SEED))

resumes: N ?= 90
resumes: venv ## Kill runs of models larger than memory N times, resume them and compare the bits (N=90 SEED=...)
	$(BIN)/python -m tests.faults.resumes --kills $(N) $(if $(SEED),--seed $(SEED))

partial: N ?= 100
partial: venv ## Kill ranks and daemons of a job on two nodes N times and look for lost steps that were called safe (N=100 SEED=...)
	$(BIN)/python -m tests.faults.partial --kills $(N) $(if $(SEED),--seed $(SEED))

mutants: venv ## Leave out each wait of the copies beside computation, and look whether tests find it (ONLY=part of a name)
	PARAMSERVER_ALL_SCHEDULES=1 PARAMSERVER_REQUIRE_DEVICE=1 $(BIN)/python -m pytest tests/device/test_lanes.py \
	  tests/device/test_lanes_training.py tests/device/test_gpu_tier.py
	$(BIN)/python -m tests.device.mutants $(if $(ONLY),--only '$(ONLY)')

SEEDS ?= 5
device-matrix: venv ## Train all of the matrix on the simulated device under each lag, with kills and resumes (SEEDS=5)
	$(BIN)/python -m tests.device.matrix --seeds $(SEEDS) $(if $(SEED),--seed $(SEED))

device-kills: N ?= 100
device-kills: venv ## Kill N ranks on the simulated device, or their daemons, and look for what is left (N=100 SEED=...)
	$(BIN)/python -m tests.device.kills --kills $(N) $(if $(SEED),--seed $(SEED))

matrix: venv ## Train at every stage, placement, precision, schedule and world size, and compare the bits (half an hour, 20 GB of disk)
	$(BIN)/python -m pytest tests/integration/test_matrix.py tests/integration/test_large_matrix.py --whole-matrix

device-tests: venv ## Run the tests on the simulated accelerator alone, and fail if there is no g++ (some 2 minutes)
	PARAMSERVER_REQUIRE_DEVICE=1 $(PYTEST) tests/device

gpu-proof: venv ## Prove everything on a GPU, in parts of at most nine minutes (PART=N, STAND_IN=1: without a GPU)
	$(BIN)/python -m tests.gpu.proof $(if $(PART),--part $(PART)) $(if $(STAND_IN),--stand-in)

# The tests need a checkout of DeepSpeed, whose files are not part of this project, and the package hjson.
SUITE ?= build/DeepSpeed
SAMPLE ?= 0
deepspeed-tests: venv ## Run DeepSpeed's own tests over this library (SUITE=DIR, SAMPLE=N parameter sets of each test)
	$(BIN)/python -m pip install --quiet --target build/deepspeed-tests hjson==3.1.0
	PYTHONPATH=$(CURDIR)/build/deepspeed-tests $(BIN)/python -m tests.deepspeed_suite $(SUITE) --sample $(SAMPLE) \
	  --json build/deepspeed-tests.json

# What is installed besides the lock is for these tests alone; the constraint keeps the versions of the lock. The examples
# are those of checkouts, whose files are not part of this project.
ACCELERATE ?= build/accelerate
DEEPSPEED_EXAMPLES ?= build/DeepSpeedExamples
PEERS := 'lightning>=2.6,<2.7' 'trl>=1.16' datasets evaluate scikit-learn tensorboard fire loguru pytz sh
peers: venv ## Compare with DeepSpeed (DEEPSPEED=: without), Accelerate, Lightning, transformers, TRL (ACCELERATE=DIR DEEPSPEED_EXAMPLES=DIR)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint requirements.lock $(PEERS)
	$(if $(DEEPSPEED),$(BIN)/python -m benchmarks.training.deepspeed_environment $(DEEPSPEED))
	$(PYTEST) --with peers -m peers --deepspeed "$(DEEPSPEED)" --accelerate "$(ACCELERATE)" \
	  --deepspeedexamples "$(DEEPSPEED_EXAMPLES)" tests/peers tests/integration/test_accelerate.py \
	  tests/integration/test_as_deepspeed.py tests/integration/test_deepspeed_examples.py \
	  tests/integration/test_lightning.py

runbooks: venv ## Run the commands of docs/runbooks.md under jobs that train, on up to three nodes (namespaces need root)
	$(PYTEST) --with runbooks tests/integration/test_runbooks.py

prometheus-check: venv ## Have Debian's prometheus watch daemons with planted faults, and check its alerts (some 2 minutes)
	$(PYTEST) --with prometheus tests/integration/test_prometheus.py

bench-check: venv ## Run all benchmarks at a small size, and check their figures
	$(PYTEST) --with bench -m bench tests/integration/test_bench_step.py tests/integration/test_benchmarks.py

bench-storage: venv ## Measure the NVMe tier against fio, and commits; updates benchmarks/RESULTS.md (needs fio)
	$(BIN)/python -m benchmarks.storage.tiers --results

bench-dataplane: venv ## Measure leases and streams against echo, memcpy and TCP; updates benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.dataplane.transfers --json --results

# DeepSpeed has its own environment, build/deepspeed. The first run sets it up, which takes a download of some 100 MB
# and minutes of compiling C++. To run without DeepSpeed: make bench-step DEEPSPEED=, or make peers DEEPSPEED=
DEEPSPEED ?= build/deepspeed
bench-step: venv ## Measure a training step beside plain PyTorch and DeepSpeed (DEEPSPEED=: without); updates RESULTS.md
	$(BIN)/python -m benchmarks.training.step --results $(if $(DEEPSPEED),--deepspeed $(DEEPSPEED))

bench-scale: venv ## Measure steps of 50 M to 1.3 B parameters on NVMe (60 GB of disk); updates benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.training.scale --results

bench-depth: venv ## Measure memory and steps of 0.15 to 2.4 B parameters at one host budget (75 GB of disk); updates RESULTS.md (OPTIONS='--memory-limit 3GiB')
	$(BIN)/python -m benchmarks.training.depth --results $(OPTIONS)

bench-activations: venv ## Measure memory and steps with boundaries of checkpoints in memory, in the store and on NVMe; updates RESULTS.md
	$(BIN)/python -m benchmarks.training.activations --results

bench-costs: venv ## Count the bytes that a step moves for each parameter, by the way a large model is trained; updates RESULTS.md
	$(BIN)/python -m benchmarks.training.costs --results

bench-gpu: venv ## Measure a step on a GPU beside plain PyTorch, FSDP2 (DEEPSPEED=DIR: and DeepSpeed); updates RESULTS.md
	$(BIN)/python -m benchmarks.training.gpu --results $(if $(DEEPSPEED),--deepspeed $(DEEPSPEED))

bench-overlap: venv ## Count which part of the copies to a device runs under its kernels (simulated); updates RESULTS.md
	$(BIN)/python -m benchmarks.training.overlap --results

bench-remote: venv ## Measure steps with states in the memory of other nodes, by the link's speed (root); updates RESULTS.md
	$(BIN)/python -m benchmarks.training.lenders --results

bench-beside: venv ## Compare steps with those of an earlier commit; updates RESULTS.md (COMMIT=361ccf7 OPTIONS='--heat host --layers 4')
	$(BIN)/python -m benchmarks.training.beside $(COMMIT) --results $(OPTIONS)

plots: venv ## Draw the pictures of benchmarks/results anew
	$(BIN)/python -m benchmarks.plots

# Sphinx has an environment of its own, which finds this project and what it imports in .venv, after its own packages. It
# reads the .pth files of .venv, too, because torch imports this project's entry point of the group `torch.backends`, which
# only the .pth file of the editable install finds.
DOCS := build/docs
SITE := build/site
$(DOCS)/.installed: docs/site/requirements.txt $(INSTALLED)
	$(BIN)/python -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --disable-pip-version-check --quiet --requirement $<
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(DOCS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	@touch $@

docs: $(DOCS)/.installed ## Make the site of the documentation, build/site/index.html, and check its links
	$(BIN)/python -m docs.site.reference
	rm -rf $(SITE)
	PYTHONPATH=. $(DOCS)/bin/python -m sphinx --quiet --fail-on-warning --keep-going -d build/doctrees -c docs/site . $(SITE)
	$(BIN)/python -m docs.site.check $(SITE)

# The tools that build and check have an environment of their own, because nothing else needs them.
dist: venv ## Build the wheel and the source distribution, check them, and train from the wheel in a clean environment
	rm -rf dist build/dist
	$(BIN)/python -m venv build/dist
	build/dist/bin/python -m pip install --disable-pip-version-check --quiet 'build>=1.3' 'twine>=6' 'check-wheel-contents>=0.6'
	build/dist/bin/python -m build --outdir dist
	build/dist/bin/twine check --strict dist/*
	build/dist/bin/check-wheel-contents --toplevel paramserver,paramserver_stand_in,storage,trainer_client dist/*.whl
	$(BIN)/python -m tests.distributions dist

proto: venv ## Generate paramserver/v1 from proto/ anew
	$(BIN)/python -m grpc_tools.protoc --proto_path=proto --python_out=. --pyi_out=. --grpc_python_out=. \
	  proto/paramserver/v1/*.proto
	$(BIN)/python -m proto.stored_kind

# The lock is made with the oldest supported Python, so that every pinned version installs on all supported ones. The
# platform packages of torch (CUDA) are left out, because they depend on the platform's torch wheel, which pins them.
lock: ## Resolve pyproject.toml anew into requirements.lock (with Python 3.11)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "the lock is made with Python 3.11: make lock PYTHON=python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear build/lock
	build/lock/bin/python -m pip install --upgrade pip
	build/lock/bin/python -m pip install --upgrade setuptools 'torch==$(TORCH)' '.[bench,demo,dev]'
	{ echo '# Made by `make lock` from pyproject.toml (all extras). Do not edit.'; \
	  build/lock/bin/python -m pip freeze --all --exclude pip --exclude paramserver \
	    | grep --invert-match --extended-regexp '^(cuda-|nvidia-|triton==)' \
	    | sed --regexp-extended 's/^(torch==[0-9.]+)\+.*/\1/'; } > requirements.lock
	rm -rf build

clean: ## Remove caches and build outputs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find $(CODE) tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## Remove .venv too
	rm -rf $(VENV)
