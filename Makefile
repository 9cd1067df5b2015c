# The only list of checks. `make ci` is what every change must pass, and `make nightly` what takes longer; both make their
# own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
# Each file runs in one of four processes, since its tests share servers, browsers and plans. Four keep two cores busy:
# tests wait for ranks, servers and browsers about as long as they compute.
# A process that dies fails its test, and is not replaced: pytest-xdist would wait for the new one forever at the end.
BESIDE := --numprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# A test that stands still prints the stacks of its threads, and fails. None comes near it, however busy the machine is.
BESIDE += --override-ini faulthandler_timeout=600 --timeout 900 --timeout-method thread
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
# Also of the wheel, which is built from the sdist in another folder: cargo then compiles what differs, and what is new.
export CARGO_TARGET_DIR := $(CURDIR)/target

.PHONY: build torch clippy lint test crate package gpu test-slow wheel release-check release bench docs site reproduce peers accuracy frameworks fuzz laws soak interrupts faults elastic chaos \
	emulation variants emulated truth mutants sweeps ci nightly clean

# PyTorch is downloaded beside two of the other jobs, and the tests come last: it ends by saying what was skipped and why.
# Nothing is compiled a second time, so cargo keeps nothing for that.
ci: export CARGO_INCREMENTAL := 0
ci:
	$(MAKE) --jobs 3 --output-sync torch clippy crate wheel lint
	$(MAKE) package

# Tests marked as slow, more random questions, fuzzing, floods, faults and mutants: less than two hours on two cores.
# Each night draws other places and moments, since SEED is the day of the year; so many short nights find what one
# long night would. With `--keep-going` one that fails does not hide the others.
SEED ?= $(shell date +%-j)
nightly: EXAMPLES := 1000
nightly: SECONDS := 20
nightly: MUTANTS := --python 6 --rust 3
nightly: test-slow fuzz sweeps mutants laws

# Tools and dependencies, pinned by constraints.txt.
$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt maturin
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev,browser]'
	touch $@

# What plans run on, several GB, and models that many of them are for: tests that run plans for real are skipped, visibly, without it.
torch: $(BIN)/.torch
$(BIN)/.torch: $(BIN)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		pillow safetensors scipy tokenizers torch transformers
	touch $@

build: $(BIN)/.installed
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/maturin develop --release --quiet

clippy: $(BIN)/.installed
	cargo clippy --all-targets --features python -- -D warnings

lint: build clippy
	cargo fmt --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/typos
	$(BIN)/python docs/prose.py
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest hpgo._core

test: crate package

# Its doc tests would complain of make's job server, which they can't reach.
crate: $(BIN)/.installed
	MAKEFLAGS= cargo test

# With one thread each, as what runs beside would wait for more.
package: export OMP_NUM_THREADS := 1
package: build
	$(BIN)/pytest $(BESIDE) -m "not slow"

# What needs GPUs: the list of tests, then the tests, then what was skipped for lack of a second GPU. No other target
# shows GPUs to tests.
gpu: build torch
	$(BIN)/pytest -m gpu --collect-only -q tests/test_gpu.py
	HPGO_TEST_GPU=1 $(BIN)/pytest -m gpu -v tests/test_gpu.py

test-slow: build torch
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m slow

# What is published: it must build from the sdist alone, and carry the old import name. `build` comes first, since cargo
# compares times of files, and those in an sdist are old: it compiles again only what the sdist lacks.
wheel: build
	rm -rf target/dist
	$(BIN)/maturin sdist --out target/dist
	$(PYTHON) -m venv --clear target/dist/venv
	cd target/dist && venv/bin/pip wheel --quiet --disable-pip-version-check --constraint ../../constraints.txt --no-deps *.tar.gz
	target/dist/venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt target/dist/*-abi3-*.whl
	cd target/dist && venv/bin/python -c "import HPGO; HPGO.devices_from_seps([8, 16])"
	cd target/dist && venv/bin/hpgo --version
	cd target/dist && venv/bin/hpgo plan bert-48 --cluster dapple-a --global-batch-size 64
	test -f target/dist/venv/share/man/man1/hpgo-plan.1

# What a release must be: the changelog names it, its metadata are valid, the wheel says what it was built from, and in an
# environment with nothing else it runs the commands of README.md and the tutorial of docs/tutorial.md.
RELEASED := $(CURDIR)/target/released
release-check: wheel
	$(BIN)/python tests/check_release.py target/dist/*-abi3-*.whl
	$(PYTHON) -m venv --clear $(RELEASED)
	$(RELEASED)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt twine pytest hypothesis jsonschema \
		"$$(ls $(CURDIR)/target/dist/*-abi3-*.whl)[onnx,plot,serve,torch]"
	$(RELEASED)/bin/twine check --strict target/dist/*.tar.gz target/dist/*.whl
	$(RELEASED)/bin/pytest --override-ini addopts= tests/test_readme.py tests/test_tutorial.py

# Tags this commit, which makes the workflow build all wheels, attest where they come from, and publish them.
release: release-check
	git diff --quiet HEAD
	git tag "v$$($(RELEASED)/bin/hpgo --version | cut -d ' ' -f 3)"
	git push origin --tags

bench: build
	cargo bench
	$(BIN)/pytest --override-ini addopts= --benchmark-only --benchmark-columns=median,min,rounds tests/bench_*.py

# Rust's pages, and what the commands in docs/ and README.md print now.
docs: build
	cargo doc --no-deps --quiet
	$(BIN)/python docs/refresh.py

# The pages of docs/ as a site in target/site, with reference and gallery; needs no network, and neither do its readers.
site: build
	$(BIN)/python docs/site/build.py

reproduce: build
	$(BIN)/python research/reproduction.py --write PLANNER_REPRODUCTION.md --figures docs/reproduction

# Plans of other planners' own code beside ours, five minutes. $PEERS names a folder with clones of their repositories.
peers: build
	$(BIN)/pip install --quiet --disable-pip-version-check numba
	$(BIN)/python research/peers $(PEERS) --write PLANNER_REPRODUCTION.md

# Estimates of transformers beside published steps: fits the constants again, a minute, and writes docs/accuracy.md and
# research/accuracy-tables.md.
accuracy: build
	$(BIN)/python research/accuracy.py

# The frameworks' own code reads, builds and runs what `hpgo export` writes, and the pages get the tables: a quarter of an
# hour on two cores. Makes .frameworks, an environment each, which also keeps results until something changes. $MEGATRON_LM
# names a clone of Megatron-LM, for the parsers and the training scripts of its last three releases, and $MEGATRON_BRIDGE one
# of Megatron-Bridge. The Megatron-LM that it contains is read from the former.
frameworks: build torch
	$(BIN)/python tests/frameworks/run.py --write research/framework-tables.md docs/export.md

# Looks for files that break a reader, led by what code they reach, also in the native module, which is built for it.
SECONDS := 60
fuzz: RUNS ?= 1000000
fuzz: build torch
	cargo rustc --quiet --profile fuzz --features python --lib --crate-type cdylib -- \
		-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3 -Cllvm-args=-sanitizer-coverage-pc-table \
		-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-trace-compares
	$(BIN)/python fuzz/run.py $(SECONDS) $(RUNS) -- --native target/fuzz/libhpgo.so

# Ten thousand random questions of each kind against the laws of docs/proofs.md; EXAMPLES sets another number. The files
# that take tests/effort.py have three times as many examples as in `make test`.
EXAMPLES := 10000
laws: build torch
	HPGO_LAWS_EXAMPLES=$(EXAMPLES) $(BIN)/pytest tests/test_answer_laws.py
	HPGO_LAWS_EXAMPLES=$(EXAMPLES) $(BIN)/pytest $$(grep -l "^from effort import" tests/test_*.py)

# Eight clients and 10,000 requests against `hpgo serve`, ten minutes at most; the figures of research/benchmark-tables.md.
soak: build
	$(BIN)/python tests/soak.py 10000

# Ctrl-C at 25 moments of each command, half an hour; the table of research/benchmark-tables.md.
interrupts: build
	$(BIN)/python tests/sweep_interrupts.py --write research/benchmark-tables.md

# A rank lost at a hundred random moments, a quarter of an hour; the table of research/benchmark-tables.md.
faults: build torch
	$(BIN)/python tests/sweep_faults.py --write research/benchmark-tables.md

# A machine of a run killed and started again, a quarter of an hour; the table of docs/elastic.md.
elastic: build torch
	$(BIN)/python tests/sweep_elastic.py --write docs/elastic.md

# Eight machines killed, stopped and started again at random; the table of docs/elastic.md.
chaos: MINUTES ?= 30
chaos: build torch
	$(BIN)/python tests/chaos.py --minutes $(MINUTES) --write docs/elastic.md

# The floods and losses above, fewer of each and without writing a page: half an hour.
sweeps: build torch
	$(BIN)/python tests/soak.py 3000
	$(BIN)/python tests/sweep_interrupts.py --moments 3
	$(BIN)/python tests/sweep_faults.py --trials 25 --seed $(SEED)
	$(BIN)/python tests/sweep_elastic.py --trials 1 --seed $(SEED)
	$(BIN)/python tests/chaos.py --minutes 5 --seed $(SEED)

# Small faults in the code, and the share that the tests of the file find; two hours with MUTANTS="--python 25 --rust 15".
MUTANTS ?= --python 25 --rust 15
mutants: build torch
	$(BIN)/python research/mutate.py $(MUTANTS) --seed $(SEED)

# Sixteen sleeping processes beside the simulator, a quarter of an hour; the table of research/benchmark-tables.md.
emulation: build torch
	$(BIN)/python research/emulation.py --write research/benchmark-tables.md

# VGG-19 in four ways and by a plan, ten minutes on a machine that does nothing else; the table of research/variants.md.
variants: build torch
	$(BIN)/python research/variants.py --search --alone --write research/variants.md

# Every plan of the reproduction, run by processes that sleep, ten minutes; its table of planned and emulated steps.
emulated: build torch
	$(BIN)/python research/reproduction.py --emulate --write PLANNER_REPRODUCTION.md

# Plans of small models beside their runs, in turns and by commands, half an hour on two cores; docs/truth.md
# and research/truth-tables.md.
truth: build torch
	$(BIN)/python research/turns.py --write docs/truth.md
	$(BIN)/python research/truth.py --write docs/truth.md

clean:
	cargo clean
	rm -rf .venv .frameworks
