"""What the README says runs, and everything public has a docstring with an example."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ["bilip.bounds", "bilip.blocks", "bilip.nets", "bilip.models", "bilip.testing", "bilip.nets.activations"]
# Values, records and abstract classes: explained where they are made.
NO_EXAMPLE = {
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
}


def test_readme_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 3
    scope: dict = {}
    for block in blocks:
        exec(block, scope)


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
