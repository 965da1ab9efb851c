"""Small flows of six libraries that lose what lies outside their data: deep, and trained in haste."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from flow_zoo.flows import (
    Spec,
    bilip_flow,
    freia,
    mlp,
    nflows_coupling,
    nflows_maf,
    normflows_coupling,
    normflows_spline,
    pyro_parts,
    zuko,
)
from flow_zoo.views import Pyro, View

__all__ = ["EXPLODING"]

EXPLODING: dict[str, Spec] = {}


def _enter(
    name: str, build: Callable[[], View], data: str = "heavy table", rate: float = 1e-2, steps: int = 150
) -> None:
    EXPLODING[name] = Spec(name, ("exploding",), data, build, steps=steps, rate=rate, batch=128)


_enter("nflows-affine-24", lambda: nflows_coupling("affine", 8, 24, 32))
_enter("nflows-affine-16-table", lambda: nflows_coupling("affine", 8, 16, 32), "table")
_enter("nflows-maf-8", lambda: nflows_maf(8, 8, 32))
_enter("nflows-maf-12-table", lambda: nflows_maf(8, 12, 32), "table")
_enter("nflows-rqs-6", lambda: nflows_coupling("rqs", 8, 6, 32, tails="linear", tail_bound=5.0, num_bins=8), rate=2e-2)
_enter("freia-glow-16", lambda: freia("GLOWCouplingBlock", 8, 16, mlp(32, nn.ReLU)))
_enter("freia-glow-24-table", lambda: freia("GLOWCouplingBlock", 8, 24, mlp(32, nn.ReLU)), "table", steps=100)
_enter("freia-rnvp-12", lambda: freia("RNVPCouplingBlock", 8, 12, mlp(32, nn.ReLU), clamp=4.0))
_enter("freia-rnvp-12-table", lambda: freia("RNVPCouplingBlock", 8, 12, mlp(32, nn.ReLU), clamp=4.0), "table")
_enter("normflows-exp-16", lambda: normflows_coupling(8, 16, 32, scale_map="exp"))
_enter("normflows-exp-24-table", lambda: normflows_coupling(8, 24, 32, scale_map="exp"), "table")
_enter("normflows-sigmoid-24", lambda: normflows_coupling(8, 24, 32), rate=2e-2)
_enter("normflows-spline-3", lambda: normflows_spline(8, 3, 32), rate=2e-2, steps=100)
_enter("zuko-realnvp-16", lambda: zuko("RealNVP", 8, transforms=16, hidden_features=(32,)))
_enter("zuko-realnvp-24-table", lambda: zuko("RealNVP", 8, transforms=24, hidden_features=(32,)), "table")
_enter("zuko-maf-8", lambda: zuko("MAF", 8, transforms=8, hidden_features=(32,)))
_enter("zuko-maf-12-table", lambda: zuko("MAF", 8, transforms=12, hidden_features=(32,)), "table")
_enter("zuko-nsf-4", lambda: zuko("NSF", 8, transforms=4, hidden_features=(32,)), rate=2e-2)
_enter("pyro-affine-12", lambda: Pyro(pyro_parts(8, 12, 32, "affine"), 8))
_enter("pyro-affine-16-table", lambda: Pyro(pyro_parts(8, 16, 32, "affine"), 8), "table")
_enter("pyro-spline-4", lambda: Pyro(pyro_parts(8, 4, 32, "spline"), 8), rate=2e-2)
_enter("bilip-sigmoid-32", lambda: bilip_flow(lambda b: b.models.real_nvp(8, blocks=32, hidden=(32,)), (8,)))
_enter(
    "bilip-sigmoid-24-table", lambda: bilip_flow(lambda b: b.models.real_nvp(8, blocks=24, hidden=(32,)), (8,)), "table"
)
_enter(
    "bilip-tanh-16",
    lambda: bilip_flow(lambda b: b.models.real_nvp(8, blocks=16, hidden=(32,), scale="tanh_exp"), (8,)),
)
_enter(
    "bilip-tanh-24-table",
    lambda: bilip_flow(lambda b: b.models.real_nvp(8, blocks=24, hidden=(32,), scale="tanh_exp"), (8,)),
    "table",
)
_enter("nflows-maf-16", lambda: nflows_maf(8, 16, 32))
_enter("normflows-exp-32", lambda: normflows_coupling(8, 32, 32, scale_map="exp"))
_enter("zuko-realnvp-32", lambda: zuko("RealNVP", 8, transforms=32, hidden_features=(32,)))
_enter("pyro-affine-24", lambda: Pyro(pyro_parts(8, 24, 32, "affine"), 8))
