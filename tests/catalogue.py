"""Every block once: a new block is one line here and gets the whole contract."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bilip import blocks, models
from bilip.blocks import Bijection, Checkerboard, Indices, Split, Streams
from bilip.nets import MLP, ConvNet, Declared


@dataclass(frozen=True)
class Entry:
    """A block, one batch shape, and what holds for it.

    `stable`: round trips in float32 stay near its epsilon. `unit`: inputs lie in (0, 1). `context`: shape of one
    context.
    """

    name: str
    make: Callable[[], Bijection]
    shape: tuple[int, ...]
    stable: bool = True
    unit: bool = False
    context: tuple[int, ...] | None = None

    def batch(self, count: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
        x = torch.rand(count, *self.shape) if self.unit else torch.randn(count, *self.shape)
        return x.to(dtype)

    def contexts(self, count: int = 3, dtype: torch.dtype = torch.float64) -> Tensor | None:
        return None if self.context is None else torch.randn(count, *self.context).to(dtype)


def wake(module: Bijection, size: float = 0.3) -> Bijection:
    """Move parameters away from zero starts, so that no map is trivial."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith(("log_gain", "log_scale", "log_diagonal")) or not p.any():
                p.add_(size * torch.randn(p.shape, generator=generator))
    for part in module.modules():
        if isinstance(part, blocks.ActNorm):
            part._mark(True)
    return module


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Halved(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.net(x)


def ode(net: nn.Module) -> Bijection:
    return blocks.NeuralODE(net, method="rk4", options={"step_size": 0.1})


def residual_images() -> Bijection:
    flow = models.residual_flow(
        (1, 4, 4),
        blocks=(1, 1),
        hidden=3,
        coefficient=0.6,
        squeeze_first=True,
        dense_blocks=1,
        dense_hidden=4,
        logit=0.1,
    )
    return wake(flow, 0.1)


def convs(kind: str, partition=None, channels=2, hidden=4, **options) -> Bijection:
    if kind == "additive":
        return wake(blocks.AdditiveCoupling(ConvNet(channels, channels, hidden=hidden, **options), partition))
    return wake(blocks.AffineCoupling(ConvNet(channels, 2 * channels, hidden=hidden, **options), partition=partition))


def affine(scale) -> Bijection:
    return blocks.AffineCoupling(MLP(2, 4, hidden=(8,), activation="tanh"), scale=scale)


def small_glow(**options) -> Bijection:
    return wake(models.glow((1, 4, 4), levels=2, blocks=1, hidden=3, activation="elu", **options), 0.1)


CATALOGUE = [
    Entry("additive", lambda: blocks.AdditiveCoupling(MLP(2, 3, activation="elu")), (5,)),
    Entry("additive held", lambda: blocks.AdditiveCoupling(MLP(2, 2, lipschitz=0.7, activation="softplus")), (4,)),
    Entry("additive declared", lambda: blocks.AdditiveCoupling(Declared(Sine(), lipschitz=1.0)), (4,)),
    Entry(
        "additive plain net",
        lambda: blocks.AdditiveCoupling(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))),
        (4,),
    ),
    Entry("additive indices", lambda: blocks.AdditiveCoupling(MLP(2, 3), Indices([3, 0], total=5)), (5,)),
    Entry("additive last dim", lambda: blocks.AdditiveCoupling(MLP(2, 2), Split(dim=-1)), (3, 4)),
    Entry("additive context", lambda: blocks.AdditiveCoupling(MLP(2, 2, context=3)), (4,), context=(3,)),
    Entry("additive conv", lambda: convs("additive"), (4, 4, 4)),
    Entry("additive rows", lambda: convs("additive", Split(dim=2)), (2, 4, 3)),
    Entry("additive checkerboard", lambda: convs("additive", Checkerboard(), 1), (1, 3, 4)),
    Entry("additive streams", lambda: blocks.AdditiveCoupling(MLP(3, 3), Streams(swap=True)), (2, 3)),
    Entry("affine sigmoid", lambda: affine("sigmoid"), (4,), stable=False),
    Entry("affine half", lambda: affine("half_sigmoid"), (4,)),
    Entry("affine exp", lambda: affine("exp"), (4,), stable=False),
    Entry("affine range", lambda: affine(blocks.SigmoidScale(0.2, 3.0, 0.0)), (4,)),
    Entry("affine tanh", lambda: affine("tanh_exp"), (4,)),
    Entry("affine floor", lambda: affine(blocks.TanhExpScale(1.0).floored(0.1)), (4,)),
    Entry("affine exp floor", lambda: affine(blocks.EXP.floored(0.05)), (4,)),
    Entry(
        "affine two nets",
        lambda: blocks.AffineCoupling(MLP(2, 2), MLP(2, 2, activation="swish"), scale="half_sigmoid"),
        (4,),
    ),
    Entry("affine swap", lambda: blocks.AffineCoupling(MLP(3, 4), scale="tanh_exp", partition=Split(swap=True)), (5,)),
    Entry(
        "affine context", lambda: blocks.AffineCoupling(MLP(2, 4, context=2), scale="half_sigmoid"), (4,), context=(2,)
    ),
    Entry("affine conv", lambda: convs("affine"), (4, 4, 4), stable=False),
    Entry("affine checkerboard", lambda: convs("affine", Checkerboard(swap=True), 1), (1, 4, 4), stable=False),
    Entry(
        "affine last dim",
        lambda: blocks.AffineCoupling(MLP(2, 4), scale="half_sigmoid", partition=Split(dim=-1)),
        (3, 4),
    ),
    Entry(
        "affine streams", lambda: blocks.AffineCoupling(MLP(3, 6), scale="half_sigmoid", partition=Streams()), (2, 3)
    ),
    Entry("diagonal", lambda: blocks.DiagonalScaling(torch.tensor([2.0, -0.3, 1.0])), (3,)),
    Entry("diagonal image", lambda: blocks.DiagonalScaling(torch.tensor([2.0, -0.3])), (2, 3, 3)),
    Entry("diagonal full", lambda: blocks.DiagonalScaling(torch.rand(2, 3) + 0.5), (2, 3)),
    Entry("actnorm", lambda: wake(blocks.ActNorm(3)), (3,)),
    Entry("actnorm image", lambda: wake(blocks.ActNorm(3)), (3, 2, 2)),
    Entry("conv1x1 full", lambda: blocks.InvertibleConv1x1(4), (4, 2, 3)),
    Entry("conv1x1 plu", lambda: wake(blocks.InvertibleConv1x1(4, kind="plu")), (4, 3)),
    Entry("conv1x1 orthogonal", lambda: blocks.InvertibleConv1x1(4, kind="orthogonal"), (4,)),
    Entry("reverse", lambda: blocks.Permutation.reverse(4), (4, 2)),
    Entry("shuffle", lambda: blocks.Permutation.shuffle(5), (5,)),
    Entry("squeeze", lambda: blocks.Squeeze(), (2, 4, 4)),
    Entry("logit", lambda: blocks.Logit(0.05), (4,), unit=True),
    Entry("factor out", lambda: blocks.FactorOut(wake(blocks.ActNorm(2)), (4, 2, 2)), (4, 2, 2)),
    Entry("invert", lambda: blocks.Invert(affine("half_sigmoid")), (4,)),
    Entry("invert logit", lambda: blocks.Invert(blocks.Logit(0.05)), (4,)),
    Entry(
        "chain",
        lambda: blocks.Chain(affine("half_sigmoid"), blocks.Permutation.reverse(4), affine("tanh_exp"), shape=(4,)),
        (4,),
    ),
    Entry(
        "nested chain",
        lambda: blocks.Chain(blocks.Chain(affine("half_sigmoid")), blocks.Invert(affine("half_sigmoid"))),
        (4,),
    ),
    Entry(
        "logit then affine",
        lambda: blocks.Chain(blocks.Logit(0.1), affine("half_sigmoid"), shape=(4,)),
        (4,),
        unit=True,
    ),
    Entry("flatten", lambda: blocks.Flatten((2, 3)), (2, 3)),
    Entry("residual", lambda: blocks.Residual(MLP(3, 3, hidden=(8,), activation="scaled_swish", lipschitz=0.9)), (3,)),
    Entry(
        "residual context",
        lambda: blocks.Residual(MLP(2, 2, hidden=(8,), activation="elu", context=2, lipschitz=0.8)),
        (2,),
        context=(2,),
    ),
    Entry("residual declared", lambda: blocks.Residual(Declared(Halved(Sine()), lipschitz=0.5)), (3,)),
    Entry(
        "residual conv",
        lambda: blocks.Residual(ConvNet(1, 1, hidden=3, activation="elu", gain=False, lipschitz=0.8)),
        (1, 3, 3),
    ),
    Entry("neural ode", lambda: ode(MLP(2, 2, hidden=(8,), activation="tanh", context=1)), (2,)),
    Entry("neural ode held", lambda: ode(MLP(3, 3, hidden=(8,), activation="softplus", lipschitz=0.8)), (3,)),
    Entry("residual flow", lambda: models.residual_flow(2, blocks=2, hidden=(8, 8), coefficient=0.7), (2,)),
    Entry("residual image flow", lambda: residual_images(), (1, 4, 4), unit=True),
    Entry("real_nvp additive", lambda: models.real_nvp(4, blocks=4, hidden=(8,), coupling="additive"), (4,)),
    Entry("real_nvp affine", lambda: models.real_nvp(4, blocks=3, hidden=(8,), scale="half_sigmoid"), (4,)),
    Entry(
        "real_nvp actnorm",
        lambda: wake(models.real_nvp(3, blocks=2, hidden=(8,), actnorm=True, scale="tanh_exp")),
        (3,),
    ),
    Entry("glow additive", lambda: small_glow(coupling="additive"), (1, 4, 4)),
    Entry("glow affine", lambda: small_glow(scale="half_sigmoid"), (1, 4, 4)),
    Entry("glow held", lambda: small_glow(coupling="additive", mixing="shuffle", lipschitz=0.5), (1, 4, 4)),
    Entry("glow multi-scale", lambda: small_glow(factor_out=True, mixing="reverse"), (1, 4, 4)),
    Entry(
        "glow three levels",
        lambda: wake(models.glow((1, 8, 8), levels=3, blocks=1, hidden=2, activation="elu", factor_out=True), 0.1),
        (1, 8, 8),
    ),
    Entry(
        "glow plu",
        lambda: small_glow(matrix="plu", coupling="additive", factor_out=True, learned_prior=False),
        (1, 4, 4),
    ),
]

IDS = [entry.name for entry in CATALOGUE]
assert len(set(IDS)) == len(IDS)


class Map(Bijection):
    """A bijection of functions, the identity where none is given, to plant something in.

    Without `log_det` it states no log-determinant; that of the inverse follows from it, unless `log_det_back` says otherwise.
    """

    def __init__(self, forward=torch.clone, inverse=torch.clone, log_det=None, log_det_back=None):
        super().__init__()
        self.there, self.back, self.log_det_there, self.log_det_back = forward, inverse, log_det, log_det_back

    def forward(self, x, context=None):
        return self.there(x)

    def inverse(self, z, context=None):
        return self.back(z)

    def forward_and_log_det(self, x, context=None):
        return super().forward_and_log_det(x) if self.log_det_there is None else (self(x), self.log_det_there(x))

    def inverse_and_log_det(self, z, context=None):
        return super().inverse_and_log_det(z) if self.log_det_back is None else (self.inverse(z), self.log_det_back(z))


def louder(kind, name):
    """A subclass whose method `name` gives 100 times what it gave."""
    method = getattr(kind, name)
    return type("Louder", (kind,), {name: lambda self, *given: 100 * method(self, *given), "__module__": __name__})


def patched(module, name):
    """The module with a method of its own, which gives 100 times what that of its class gives."""
    original = getattr(module, name)
    object.__setattr__(module, name, lambda *given: 100 * original(*given))
    return module


def hooked(module):
    module.register_forward_hook(lambda module, given, output: 100 * output)
    return module


def pre_hooked(module):
    module.register_forward_pre_hook(lambda module, given: (100 * given[0], *given[1:]))
    return module


def saved_bytes(call):
    """What autograd keeps for the backward pass of what a call gives, each tensor once, parameters left out."""
    kept = {}

    def pack(t):
        if not isinstance(t, nn.Parameter):
            kept[(t.data_ptr(), t.shape)] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = call()
    assert result.requires_grad
    return sum(kept.values())


def zeros(x):
    """The log-determinant of a map that keeps volumes."""
    return x.new_zeros(len(x))


def scaled(model, factor):
    """Weights grown as in training gone wrong; biases stay."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(factor)
    return model


def overflowing():
    """A flow with finite log-determinants and outputs that are not: autograd leaves out what the loss has not looked at."""
    torch.manual_seed(0)
    model = models.real_nvp(4, blocks=6, hidden=(8,), scale="exp")
    with torch.no_grad():
        model[2].t.layers[-1].bias[2:] -= 25.0  # what this block contracts, the walk cannot recover
        model[5].t.layers[-1].bias[2:] += 100.0  # and the last one overflows
    return model, torch.randn(8, 4)


def squash(block, sigma):
    """Move the raw scales of an affine coupling so far down that its scale is about sigma: its inverse is lost."""
    last = [layer for layer in block.t.modules() if getattr(layer, "bias", None) is not None][-1]
    with torch.no_grad():
        last.bias[len(last.bias) // 2 :] += math.log(sigma) - block.scale.shift
