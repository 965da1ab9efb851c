"""What the README and the steps of CONTRIBUTING say runs, and everything public has a docstring with an example."""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ROOMS = """
bounds blocks nets models testing nets.activations adapters auditing.probes data record report auditing.audit
auditing.verdicts demo reversible regularizers objectives training recipes figures cures
"""
# Values, records and abstract classes: explained where they are made.
NO_EXAMPLE = """
Advice AttackResult AttackRun Attempt BlockBound Budget Change Classifier Comparison Demo Design DriftWarning
ExpScale Extremes Facts Finding Gains GuardReport Latent Line Measured NonFinite Outcome Partition Picture RUNGS
Recipe Rung SIZES Scale SingularValues SkippedSamples Solution StabilityRow Status Task Trained TrustFlags Verdict
VerdictChange Watch Work activations as_float64 environment facts load load_weights log_of log_product log_sum
read_log read_state remedy restore run_demo write_aside write_json
"""


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


@pytest.mark.parametrize("room", ROOMS.split())
def test_everything_public_is_explained(room):
    module = importlib.import_module(f"bilip.{room}")
    for name in module.__all__:
        thing = getattr(module, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        text = inspect.getdoc(thing) or ""
        assert len(text) > 20, f"{room}.{name} has no docstring"
        if name not in NO_EXAMPLE.split():
            assert ">>>" in text, f"{room}.{name} has no example"


def test_root_names():
    import bilip

    for name in bilip.__all__:
        assert getattr(bilip, name) is not None
    assert "Box" in dir(bilip)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        bilip.nonsense  # noqa: B018


IMPORTS = re.compile(r"^(?:>>> )?from (bilip[.\w]*) import ([\w, ]+)$", re.M)


@pytest.mark.parametrize("page", sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"]), ids=lambda page: page.name)
def test_guides_import_public_names(page):
    for module, names in IMPORTS.findall(page.read_text()):
        public = importlib.import_module(module).__all__
        assert set(names.replace(" ", "").split(",")) <= set(public), f"{module}: {names}"


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
    fields = ("samples", "noise", "draws", "walk", "spectra", "exact", "steps", "precision", "repeats", "gradients")
    for field in fields:
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


# ---- the three steps of CONTRIBUTING for a block, an adapter and a recipe, in a copy of the project: nothing else has to change

BLOCK = '''
"""Twice its input."""

import math

from bilip.blocks.bijection import Bijection
from bilip.bounds import Box

__all__ = ["Doubled"]


class Doubled(Bijection):
    def forward(self, x, context=None):
        return 2 * x

    def inverse(self, z, context=None):
        return z / 2

    def forward_and_log_det(self, x, context=None):
        return self(x), x.new_full((len(x),), x[0].numel() * math.log(2))

    def log_lip(self, box, context=None, formula="sharp"):
        return math.log(2) + 1e-15

    def log_lip_inverse(self, box, context=None, formula="sharp"):
        return -math.log(2) + 1e-15

    def interval(self, box, context=None):
        return Box.outward(2 * box.low, 2 * box.high)

    def interval_inverse(self, box, context=None):
        return Box.outward(box.low / 2, box.high / 2)
'''
EXPORT = """
from bilip.blocks.doubled import Doubled

__all__ = [
    "Doubled","""
LIBRARY = '''
"""A library of its own, with names of its own."""

import torch
from torch import nn


class Trebled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def to_latent(self, x):
        return self.weight * x, x.shape[1] * self.weight.log()

    def to_data(self, z):
        return z / self.weight, -z.shape[1] * self.weight.log()
'''
ADAPTER = '''
"""mylib, whose maps are called to_latent and to_data."""

from bilip.adapters._inspect import comes_from
from bilip.adapters.foreign import Foreign, compose

__all__ = ["recognise"]


def recognise(model, shape):
    if not comes_from(model, "mylib"):
        return None
    return compose([MyBlock(model)], shape), None, "mylib"


class MyBlock(Foreign):
    library = "mylib"

    def encode(self, x, context, *, log_det):
        return self.module.to_latent(x)

    def decode(self, z, context, *, log_det):
        return self.module.to_data(z)
'''
CASE = """
    Case("mylib", lambda: __import__("mylib").Trebled(), (4,), blocks=("Trebled",)),"""
RECIPE = '''
"""One and one is two."""

from dataclasses import dataclass

from bilip.recipes.recipe import Line, Measured, Recipe

__all__ = ["RECIPE"]


@dataclass(frozen=True)
class Config:
    first: int = 1


class MyClaim(Recipe):
    name, claim, where = "my_claim", "One and one is two.", "table 0"
    sizes = {size: Config() for size in ("quick", "gpu", "paper")}
    cost = {size: "nothing" for size in ("quick", "gpu", "paper")}

    def parts(self, config):
        return ("sum",)

    def run(self, part, config, work):
        return Measured({"sum": config.first + 1})

    def lines(self, config, found):
        ours, paper = found[0]["sum"].numbers["sum"], self.paper()["sum"]
        return [Line("the sum", str(paper), str(ours), ours == paper)]

    def figures(self, config, found):
        return {}


RECIPE = MyClaim()
'''
TEST = """
def test_my_claim(tmp_path):
    import bilip.recipes

    outcome = bilip.recipes.reproduce("my_claim", out=tmp_path, device="cpu")
    assert [line.holds for line in outcome.lines] == [True]
    assert (tmp_path / "ours.json").exists()
"""


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.lstrip())


def enter(path: Path, opening: str, line: str) -> None:
    """One more line where a list or table opens."""
    text = path.read_text()
    assert text.count(opening) == 1, f"{path.name}: {opening}"
    path.write_text(text.replace(opening, opening + line))


@pytest.mark.process
@pytest.mark.slow
def test_a_block_an_adapter_and_a_recipe_take_three_steps_each(tmp_path):
    wanted = ("pyproject.toml", "conftest.py", "tests/catalogue.py", "tests/test_contract.py", "tests/adapters")
    for name in wanted:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    source, tests = tmp_path / "src" / "bilip", tmp_path / "tests"

    put(source / "blocks" / "doubled.py", BLOCK)
    export = source / "blocks" / "__init__.py"
    export.write_text(export.read_text().replace("\n__all__ = [", EXPORT))
    enter(tests / "catalogue.py", "\nCATALOGUE = [", '\n    Entry("doubled", lambda: blocks.Doubled(), (3,)),')

    put(tests / "mylib.py", LIBRARY)
    put(source / "adapters" / "my_library.py", ADAPTER)
    enter(source / "adapters" / "adapted.py", "\n    _own,", "\n    my_library.recognise,")
    enter(source / "adapters" / "adapted.py", "\nfrom bilip.adapters import ", "my_library, ")
    enter(tests / "adapters" / "zoo.py", "\nCASES = [", CASE)

    put(source / "recipes" / "my_claim.py", RECIPE)
    enter(source / "recipes" / "runner.py", "\nMODULES = {", '\n    "my_claim": "bilip.recipes.my_claim",')
    put(tmp_path / "results" / "my_claim" / "paper.json", '{"sum": 2}')
    put(tests / "test_my_claim.py", TEST)

    wanted = ["tests/test_contract.py", "tests/adapters/test_every_library.py", "tests/test_my_claim.py"]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-k", "doubled or mylib or my_claim", "-rA", *wanted]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for name in ("test_contract[doubled]", "test_log_det_is_that_of_the_jacobian[mylib]", "test_my_claim"):
        assert any(line.startswith("PASSED") and name in line for line in done.stdout.splitlines()), name
