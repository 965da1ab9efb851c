# The one door: every target makes .venv and installs what it needs when missing.
PYTHON ?= python3
JOBS ?= auto
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test numeric numeric-plain numeric-threads soak soak-cpu soak-guard soak-bounds fuzz lint types docs bench table format clean

# One thread: its operators are small, and several threads wait for each other on a busy machine.
demo: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/bilip demo

# One thread a process: the tests are many small operators, which threads only slow down.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal src docs tests $(ARGS)

# What rounding could turn, once with torch's plainest kernels and once with two threads, whose sums have another order.
NUMERIC = docs $$(grep -rl --include='*.py' mark.numeric tests)
numeric: numeric-plain numeric-threads

numeric-plain: $(READY)
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m numeric $(NUMERIC) $(ARGS)

numeric-threads: $(READY)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m numeric --threads 2 $(NUMERIC) $(ARGS)

# The whole suite as other CPUs round, with two threads, and with other seeds: eight times `make test`. Those that are red are named.
CPUS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE
CASES := --threads=2 --seed=1 --seed=2 --seed=3 --seed=4
SOAK = env OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $$cpu $(BIN)/python -m pytest -n $(JOBS) --soak src docs tests $(ARGS)
soak-cpu: $(READY)
	@for cpu in $(CPUS); do echo "soak-cpu: $$cpu"; $(SOAK) || red="$$red $$cpu"; done; cpu=; \
	for case in $(CASES); do echo "soak-cpu: $$case"; $(SOAK) $$case || red="$$red $$case"; done; \
	test -z "$$red" || { echo "soak-cpu: red under$$red"; exit 1; }

fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py --jobs 2 --out results/robustness/fuzz.json $(ARGS)

soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --soak -m soak docs tests
	HYPOTHESIS_PROFILE=search OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/report/test_odd_records.py tests/data tests/auditing/test_subject.py tests/test_bounds.py
	$(BIN)/python benchmarks/tightness.py --seeds 6 --points 24 --steps 20 --out results/soundness/soak.json

# At most an hour on two cores; exit code 1 if a gradient was wrong without a word.
soak-guard: $(READY)
	$(BIN)/python benchmarks/guard_soak.py --models 10000 --jobs 2 --out results/guard/soak.json
	$(BIN)/python benchmarks/guard_soak.py --models 3000 --ways subtracting "squared difference" --jobs 2 --out results/guard/within.json

# Gains above bounds and errors of inverses above what is stated, at all magnitudes: 30 minutes on two idle cores.
soak-bounds: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soundness.py --comparisons 100000 --jobs 2 --out results/soundness/search.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/error_bound.py --inverses 100000 --jobs 2 --out results/soundness/error_bound.json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY)
	$(BIN)/python benchmarks/throughput.py --threads 1 --batch 16 --repeats 9 --out results/throughput/cpu.json
	$(BIN)/python benchmarks/inverse.py --out results/inverse/cpu.json
	$(BIN)/python benchmarks/depth.py
	$(BIN)/python benchmarks/spectrum.py --out results/spectrum/cpu.json
	$(BIN)/python benchmarks/audit_time.py --processes 2 --out results/audit_scale/cpu.json
	$(BIN)/python benchmarks/reversible.py --out results/reversible/cpu.json
	$(BIN)/python benchmarks/residual_memory.py --batch 8 --repeats 3 --out results/residual_memory/cpu.json
	$(BIN)/python benchmarks/reversible.py --depths 4 --couplings affine --contenders stored reversible penalised --out results/reversible/penalty_cpu.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/penalties.py --out results/regularizers/cure.json

table: $(READY)
	$(BIN)/python -c "from bilip.recipes.page import write_table; write_table('docs/recipes.md', 'results')"

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist site .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps memcnn  # it asks for torchvision
	@touch $(READY)
