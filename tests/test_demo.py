"""The flows that ship with the package are the ones that their records describe."""

import importlib
import math
import sys

import pytest
import torch

import train_demo
from bilip.data import checkerboard
from bilip.demo import NAMES, how_trained, load_demo_flow
from bilip.errors import InputError

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("name", NAMES)
def test_flows_load_and_are_as_recorded(name):
    flow, record = load_demo_flow(name), how_trained(name)
    assert not flow.training
    assert record["seed"] == record["seeds_tried"][0]["seed"]
    assert math.isclose(train_demo.held_out_nll(flow), record["test_nll"], rel_tol=1e-4)
    assert record["test_nll"] > math.log(32)  # the entropy of the data
    assert {p.dtype for p in flow.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small(name):
    folder = train_demo.OUT / name
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "trained.json"]
    assert sum(p.stat().st_size for p in folder.iterdir()) < 420_000


def test_where_the_inverses_break():
    sigmoid, residual = (
        train_demo.error_map(load_demo_flow(name), step=0.4) for name in ("affine_sigmoid", "residual")
    )
    assert sigmoid["inside"]["share_above_1"] == 0
    assert sigmoid["outside"]["share_above_1"] > 0
    for place in ("inside", "outside"):
        assert residual[place]["worst_finite"] < 1e-3
        assert residual[place]["share_not_converged"] == residual[place]["share_non_finite"] == 0


def test_the_lean_likelihood_is_the_likelihood():
    flow, x = load_demo_flow("residual"), checkerboard(50)
    assert torch.allclose(train_demo.log_prob(flow, x.clone()), flow.log_prob(x), atol=1e-4)


def test_unknown_names():
    with pytest.raises(InputError, match="there is no demo flow 'glow'; there are affine_sigmoid"):
        load_demo_flow("glow")


def test_the_old_name_of_the_module_works_and_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "bilip.demo_flows", raising=False)
    with pytest.warns(DeprecationWarning, match=r"bilip\.demo_flows is now bilip\.demo"):
        old = importlib.import_module("bilip.demo_flows")
    assert old.load_demo_flow is load_demo_flow
    assert old.NAMES == NAMES
