"""Proven beside measured."""

import math

import pytest
import torch
from torch import nn

from bilip import Chain, blocks
from bilip.auditing.probes import Bounds
from catalogue import CATALOGUE

NAMES = (
    "additive held",
    "affine half",
    "affine exp",
    "affine context",
    "diagonal",
    "chain",
    "logit then affine",
    "residual",
    "residual flow",
    "real_nvp additive",
    "real_nvp affine",
    "glow held",
)
CHOSEN = [e for e in CATALOGUE if e.name in NAMES]


@pytest.mark.parametrize("entry", CHOSEN, ids=[e.name for e in CHOSEN])
def test_proven_is_never_below_measured(entry):
    assert len(CHOSEN) == len(NAMES)
    x, context = entry.batch(20, torch.float32), entry.contexts(20, torch.float32)
    m = Bounds(samples=6).measure(entry.make(), x if context is None else (x, context))
    assert m.measured, m.reason
    for way in ("forward", "inverse"):
        proven, measured = m[f"log10_{way}"], m[f"measured_log10_{way}"]
        assert math.isfinite(measured)
        assert proven >= measured - 1e-6
    assert m.rows
    assert m.rows[-1]["total_forward"] == pytest.approx(sum(r["log10_forward"] for r in m.rows))


def test_a_diagonal_is_known_exactly():
    m = Bounds().measure(Chain(blocks.DiagonalScaling(torch.tensor([10.0, 0.01])), shape=(2,)), torch.randn(5, 2))
    assert (m["log10_forward"], m["log10_inverse"]) == pytest.approx((1.0, 2.0), abs=1e-6)
    assert (m["measured_log10_forward"], m["measured_log10_inverse"]) == pytest.approx((1.0, 2.0), abs=1e-6)


def test_the_domain_is_the_hull_of_the_data():
    m = Bounds(limit=2).measure(
        Chain(blocks.DiagonalScaling(torch.ones(2)), shape=(2,)), torch.tensor([[-1.0, 0.0], [2.0, 3.0], [9.0, 9.0]])
    )
    assert m["domain"] == "[-1, 3]: the hull of 2 samples"


def test_a_net_that_cannot_be_read_is_not_measured():
    class Opaque(nn.Module):
        def forward(self, x):
            return x * x.sum()

    m = Bounds().measure(Chain(blocks.AdditiveCoupling(Opaque()), shape=(4,)), torch.randn(5, 4))
    assert not m.measured
    assert "Opaque" in m.reason
