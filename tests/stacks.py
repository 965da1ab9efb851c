"""Stacks of blocks from other libraries: at their default initialisation, and with scales planted so that their inverse explodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bilip import as_bijection
from bilip.cures.reranging import _which, scalings

D = 8


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))


def tanh_net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def freia(block: str, depth: int, size: int = D, *, net=net, mixed: bool = False):
    import FrEIA.framework as framework
    import FrEIA.modules as modules

    inn = framework.SequenceINN(size)
    for k in range(depth):
        inn.append(getattr(modules, block), subnet_constructor=net)
        if mixed:
            inn.append(modules.PermuteRandom, seed=k)
    return inn


def normflows_coupling(scale_map: str, depth: int, size: int = D, width: int = 64, **base):
    import normflows

    flows = []
    for _ in range(depth):
        params = normflows.nets.MLP([size // 2, width, size])
        flows += [
            normflows.flows.AffineCouplingBlock(params, scale_map=scale_map),
            normflows.flows.Permute(size, mode="swap"),
        ]
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(size, **base), flows)


def pyro_coupling(depth: int):
    import pyro.distributions.transforms as transforms

    parts = []
    for _ in range(depth):
        parts += [
            transforms.affine_coupling(D, hidden_dims=[64]),
            transforms.permute(D, permutation=torch.arange(D).flip(0)),
        ]
    return torch.distributions.ComposeTransform(parts)


def nflows_spline(depth: int):
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow
    from nflows.nn.nets import ResidualNet
    from nflows.transforms import CompositeTransform, PiecewiseRationalQuadraticCouplingTransform, ReversePermutation

    parts = []
    for _ in range(depth):
        parts += [
            PiecewiseRationalQuadraticCouplingTransform(
                mask=torch.arange(D) % 2,
                transform_net_create_fn=lambda i, o: ResidualNet(i, o, hidden_features=64),
                num_bins=8,
                tails="linear",
                tail_bound=3.0,
            ),
            ReversePermutation(D),
        ]
    return Flow(CompositeTransform(parts), StandardNormal([D]))


def zuko_real_nvp(depth: int, size: int = D, hidden: tuple[int, ...] = (64, 64)):
    import zuko

    return zuko.flows.RealNVP(size, transforms=depth, hidden_features=hidden)


# ---- scales that are planted


def steep(model: Any, log_scale: float) -> Any:
    """All scales about e^log_scale, towards the latent, so that the inverse magnifies by as much a block, whatever a CPU rounds.

    The shifts stay as they are, and so does what little the scales depend on the input.
    """
    with torch.no_grad():
        for scaling in list(scalings(as_bijection(model))):
            last = [layer for layer in scaling.net.modules() if type(layer).__name__.endswith("Linear")][-1]
            rows = _which(len(last.weight), "second" if scaling.layout == "pair" else scaling.layout)
            wanted = -log_scale if scaling.layout == "pair" else log_scale  # Pyro goes from latents to data
            raws = torch.linspace(-40, 40, 8001)
            raw = raws[(scaling.log_scale(raws) - wanted).abs().argmin()]
            last.weight[rows] *= 0.1
            last.bias[rows] = raw
    return model.eval() if isinstance(model, nn.Module) else model


def bilip_flow(log_scale: float = -5.0, blocks: int = 8) -> Any:
    from bilip.models import flow, real_nvp

    return steep(flow(real_nvp(4, blocks=blocks, hidden=(16,), scale="sigmoid")), log_scale)


def nflows_flow(log_scale: float = -4.0, blocks: int = 8, context: int | None = None) -> Any:
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ResidualNet

    def shift_and_scale(inputs: int, outputs: int) -> nn.Module:
        return ResidualNet(inputs, outputs, 16, num_blocks=1, context_features=context)

    masks = [[(k + j) % 2 for j in range(4)] for k in range(blocks)]
    parts = [transforms.AffineCouplingTransform(mask, shift_and_scale) for mask in masks]
    base = distributions.StandardNormal([4])
    if context:
        base = distributions.ConditionalDiagonalNormal([4], context_encoder=nn.Linear(context, 8))
    return steep(flows.Flow(transforms.CompositeTransform(parts), base), log_scale)


def normflows_flow(log_scale: float = -5.0, blocks: int = 8) -> Any:
    return steep(normflows_coupling("sigmoid", blocks, 4, 16, trainable=False), log_scale)


def zuko_flow(log_scale: float = -5.0, blocks: int = 8) -> Any:
    return steep(zuko_real_nvp(blocks, 4, (16,)), log_scale)


def zuko_maf(log_scale: float = -5.0, blocks: int = 6) -> Any:
    import zuko

    return steep(zuko.flows.MAF(4, transforms=blocks, hidden_features=(16,)), log_scale)


def freia_flow(log_scale: float = -5.0, blocks: int = 6) -> Any:
    return steep(freia("GLOWCouplingBlock", blocks, 4, net=tanh_net, mixed=True), log_scale)


def pyro_flow(log_scale: float = -5.0, blocks: int = 12) -> Any:
    import pyro.distributions as dist
    from pyro.distributions import transforms as T

    parts: list[Any] = []
    for _ in range(blocks):
        parts += [T.affine_coupling(4, [16]), T.permute(4, torch.tensor([2, 3, 0, 1]))]
    base = dist.Normal(torch.zeros(4), torch.ones(4)).to_event(1)
    return steep(dist.TransformedDistribution(base, parts), log_scale)


FLOWS: dict[str, Callable[..., Any]] = {
    "bilip": bilip_flow,
    "nflows": nflows_flow,
    "normflows": normflows_flow,
    "zuko": zuko_flow,
    "FrEIA": freia_flow,
    "pyro": pyro_flow,
}
