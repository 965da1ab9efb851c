# The one door: every target makes .venv and installs what it needs when missing.
PYTHON ?= python3
JOBS ?= auto
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test soak lint types docs bench table format clean

demo: $(READY)
	@$(BIN)/bilip demo

# One thread a process: the tests are many small operators, which threads only slow down.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) src docs tests $(ARGS)

soak: $(READY)
	HYPOTHESIS_PROFILE=search OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/report/test_report_odd.py tests/data tests/auditing/probes/test_guarded.py tests/test_theorem.py
	$(BIN)/python benchmarks/tightness.py --seeds 6 --points 24 --steps 20 --out results/soundness/soak.json
	$(BIN)/python benchmarks/guard_soak.py --out results/guard/soak.json

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
	$(BIN)/python benchmarks/reversible.py --out results/reversible/cpu.json
	$(BIN)/python benchmarks/fd_overhead.py --hidden 32 --batch 8 --blocks 4 --out results/reversible/fd_cpu.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cure.py --out results/regularizers/cure.json

table: $(READY)
	$(BIN)/python -c "from bilip.recipes.table import write_readme; write_readme('README.md', 'results')"

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
