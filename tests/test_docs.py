"""What the README says runs, and everything public has a docstring with an example."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [
    "bilip.bounds",
    "bilip.blocks",
    "bilip.nets",
    "bilip.models",
    "bilip.testing",
    "bilip.nets.activations",
    "bilip.adapters",
    "bilip.auditing.probes",
    "bilip.data",
    "bilip.record",
    "bilip.report",
    "bilip.auditing.audit",
    "bilip.auditing.verdicts",
    "bilip.demo",
    "bilip.reversible",
    "bilip.regularizers",
    "bilip.objectives",
    "bilip.training",
    "bilip.recipes",
    "bilip.figures",
    "bilip.cures",
]
# Values, records and abstract classes: explained where they are made.
NO_EXAMPLE = {
    "RUNGS",
    "Advice",
    "Demo",
    "remedy",
    "run_demo",
    "Attempt",
    "Design",
    "NonFinite",
    "Rung",
    "Watch",
    "restore",
    "Partition",
    "Scale",
    "ExpScale",
    "Facts",
    "Gains",
    "BlockBound",
    "Classifier",
    "as_float64",
    "log_of",
    "log_sum",
    "log_product",
    "activations",
    "load",
    "Solution",
    "facts",
    "AttackResult",
    "AttackRun",
    "Extremes",
    "Finding",
    "Task",
    "Outcome",
    "SingularValues",
    "TrustFlags",
    "Picture",
    "Status",
    "Verdict",
    "environment",
    "write_aside",
    "Change",
    "Comparison",
    "VerdictChange",
    "Budget",
    "StabilityRow",
    "GuardReport",
    "DriftWarning",
    "Latent",
    "SkippedSamples",
    "Trained",
    "Line",
    "Measured",
    "Recipe",
    "Work",
    "SIZES",
    "write_json",
    "read_state",
    "load_weights",
    "read_log",
}


@pytest.mark.slow
def test_readme_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 3
    scope: dict = {}
    for block in blocks:
        exec(block, scope)


def test_the_readme_is_one_page_that_begins_with_an_audit():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    first = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    assert "bilip.audit(" in first
    assert "zuko" in first


@pytest.mark.parametrize("room", ROOMS)
def test_everything_public_is_explained(room):
    module = importlib.import_module(room)
    for name in module.__all__:
        thing = getattr(module, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        text = inspect.getdoc(thing) or ""
        assert len(text) > 20, f"{room}.{name} has no docstring"
        if name not in NO_EXAMPLE:
            assert ">>>" in text, f"{room}.{name} has no example"


def test_root_names():
    import bilip

    for name in bilip.__all__:
        assert getattr(bilip, name) is not None
    assert "Box" in dir(bilip)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        bilip.nonsense  # noqa: B018


SUFFIX = re.compile(r"^(.*?)_?(median|p99|p999|max|error|status)$")


def test_the_page_on_records_lists_every_name_that_an_audit_writes():
    import bilip

    text = re.sub(r"```.*?```", "", (ROOT / "docs" / "record.md").read_text(), flags=re.S)
    listed = {
        word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"[a-z][a-z0-9_]*|_[a-z0-9]+", span)
    }

    def known(name: str) -> bool:
        stem = SUFFIX.match(name)
        return name in listed or (stem is not None and {stem[1], f"{stem[1]}_"} & listed and f"_{stem[2]}" in listed)

    torch.manual_seed(0)
    flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, hidden=(8,)))
    record = bilip.audit(flow, {"test": torch.randn(40, 2)}, ood=["uniform"], budget="quick")
    sections = {part.partition("`")[0]: part for part in text.split("### `")[1:]}
    names = {*record.model, *record.settings, *record.sources[0], *vars(record), *vars(record.verdicts["sampling"])}
    for m in record.measurements:
        assert m.measured, f"{m.probe}: {m.reason}"
        assert m.probe in sections, f"{m.probe} has no section"
        names |= {*m.values, *m.series, *m.histograms, *(key for row in m.rows for key in row)}
    assert not {name for name in names if not known(name)}


def test_the_guide_states_the_budgets_and_thresholds():
    from bilip.auditing.audit import BUDGETS
    from bilip.auditing.verdicts import Thresholds

    text = (ROOT / "docs" / "audit.md").read_text()
    table = [[cell.strip().replace(" ", "") for cell in line.split("|")[2:5]] for line in text.splitlines()]
    for field in (
        "samples",
        "noise",
        "draws",
        "walk",
        "spectra",
        "exact",
        "steps",
        "precision",
        "repeats",
        "gradients",
    ):
        numbers = [str(getattr(BUDGETS[name], field)).replace("None", "all") for name in BUDGETS]
        assert numbers in table, f"{field}: {numbers}"
    assert [f"{b.attack},{b.attack_steps}" for b in BUDGETS.values()] in table
    for name, default in vars(Thresholds()).items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        stated = [float(n) for n in re.findall(r"\d[\d.]*(?:e-?\d+)?", row)]
        assert default in (None, float("inf")) or default in stated, row


def test_pictures_are_small():
    for path in (ROOT / "docs" / "assets").glob("*.png"):
        assert path.stat().st_size < 300_000, f"{path.name} is too large for a page"
