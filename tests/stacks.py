"""Stacks of stock blocks from other libraries, at their default initialisation: whose inverses hold, and whose do not."""

import torch
from torch import nn

D = 8


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))


def freia(block: str, depth: int):
    import FrEIA.framework as framework
    import FrEIA.modules as modules

    inn = framework.SequenceINN(D)
    for _ in range(depth):
        inn.append(getattr(modules, block), subnet_constructor=net)
    return inn


def normflows_coupling(scale_map: str, depth: int):
    import normflows

    flows = []
    for _ in range(depth):
        params = normflows.nets.MLP([D // 2, 64, D])
        flows += [
            normflows.flows.AffineCouplingBlock(params, scale_map=scale_map),
            normflows.flows.Permute(D, mode="swap"),
        ]
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(D), flows)


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


def zuko_real_nvp(depth: int):
    import zuko

    return zuko.flows.RealNVP(D, transforms=depth, hidden_features=(64, 64))
