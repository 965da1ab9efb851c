"""Flows of six libraries, trained in seconds to minutes: which there are, and how. Sizes and rates are what users of each library write.

Around this file: `data` draws what they are trained on, `views` calls each library by its own interface, `defects` breaks some of them, and
`truth` says what each may be used for, without the audit's code.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flow_zoo.data import SETS, Data
from flow_zoo.views import Bilip, FrEIA, FrEIAGraph, Multiscale, NFlows, Normflows, Pyro, View, Zuko

__all__ = ["EXPLODING", "FLOWS", "Spec", "flow", "train"]


@dataclass(frozen=True)
class Spec:
    """One flow of the zoo.

    Attributes:
        name: Library, kind, dimension, and what is special.
        families: Kinds that it counts for.
        data: The set that it is trained on.
        build: Makes it, untrained.
        steps: Steps of Adam.
        rate: Learning rate.
        batch: Samples a step.
        defect: What is planted after training, in words; empty for an honest flow.
        plant: Changes the trained flow.
        cost: Seconds that one core takes for everything, roughly; the longest begin first.
    """

    name: str
    families: tuple[str, ...]
    data: str
    build: Callable[[], View]
    steps: int = 1500
    rate: float = 1e-3
    batch: int = 256
    defect: str = ""
    plant: Callable[[View], View] = field(default=lambda view: view)
    cost: float = 60.0

    @property
    def set(self) -> Data:
        return SETS[self.data]

    @property
    def library(self) -> str:
        return {"freia": "FrEIA"}.get(self.name.split("-")[0], self.name.split("-")[0])

    @property
    def held_out(self) -> bool:
        """Whether it is in the third that no limit was chosen on: by a hash of its name, fixed before the first run."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 3 == 0


FLOWS: dict[str, Spec] = {}


def flow(name: str, families: str, data: str, **options: Any) -> Callable[[Callable[[], View]], None]:
    """Enter a function that builds a flow in the zoo."""

    def enter(build: Callable[[], View]) -> None:
        FLOWS[name] = Spec(name, tuple(families.split(", ")), data, build, **options)

    return enter


def train(spec: Spec, *, steps: int | None = None, seconds: float = 120.0) -> tuple[View, dict[str, Any]]:
    """Maximum likelihood with Adam. Where a loss or a gradient is not finite, the step is left out, as users do; ten in a row end it.

    `seconds` is a brake for slow machines: how many steps were made is stated.
    """
    torch.manual_seed(int(hashlib.sha256(spec.name.encode()).hexdigest()[:8], 16))
    view, data = spec.build(), spec.set
    planned = spec.steps if steps is None else min(steps, spec.steps)
    x, context = data.draw(max(4096, min(50_000, planned * spec.batch)), seed=1)
    view.train()
    if planned:  # some libraries start from the first batch
        view.log_prob(x[: spec.batch], None if context is None else context[: spec.batch])
    weights = [p for p in view.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=spec.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, spec.rate, total_steps=max(planned, 30), pct_start=0.1)
    started, lost, row, done, loss = time.monotonic(), 0, 0, 0, torch.tensor(torch.nan)
    for done in range(1, planned + 1):  # noqa: B007 - stated below
        rows = torch.randint(0, len(x), (spec.batch,))
        loss = -view.log_prob(x[rows], None if context is None else context[rows]).mean() / x[0].numel()
        optimizer.zero_grad()
        if bool(torch.isfinite(loss)):
            loss.backward()
        norm = nn.utils.clip_grad_norm_(weights, 10.0)
        if bool(torch.isfinite(loss)) and bool(torch.isfinite(norm)):
            optimizer.step()
            row = 0
        else:
            lost, row = lost + 1, row + 1
        schedule.step()
        if row == 10 or time.monotonic() - started > seconds:
            break
    view.eval()
    about = {
        "steps": done,
        "planned": planned,
        "lost_steps": lost,
        "loss": float(loss.detach()),
        "seconds": round(time.monotonic() - started, 1),
    }
    return view, about


# ---- parts


def mlp(width: int = 64, activation: type[nn.Module] = nn.Tanh, layers: int = 2) -> Callable[..., nn.Module]:
    def make(inputs: int, outputs: int) -> nn.Module:
        parts: list[nn.Module] = [nn.Linear(inputs, width), activation()]
        for _ in range(layers - 1):
            parts += [nn.Linear(width, width), activation()]
        parts.append(nn.Linear(width, outputs))
        return nn.Sequential(*parts)

    return make


def _flip(size: int, k: int) -> Tensor:
    return (torch.arange(size) + k) % 2


# ---- nflows


def nflows_coupling(
    kind: str, size: int, blocks: int, width: int, *, context: int | None = None, linear: bool = False, **options: Any
) -> View:
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ResidualNet

    make = {
        "affine": transforms.AffineCouplingTransform,
        "additive": transforms.AdditiveCouplingTransform,
        "rqs": transforms.PiecewiseRationalQuadraticCouplingTransform,
    }[kind]
    net = partial(ResidualNet, hidden_features=width, context_features=context, num_blocks=1)
    parts: list[Any] = []
    for k in range(blocks):
        if linear:
            parts.append(transforms.LULinear(size, identity_init=True))
        parts.append(make(_flip(size, k), net, **options))
    return NFlows(flows.Flow(transforms.CompositeTransform(parts), distributions.StandardNormal([size])), (size,))


def nflows_maf(size: int, blocks: int, width: int, *, context: int | None = None, spline: bool = False) -> View:
    from nflows import distributions, flows, transforms

    make, tails, parts = transforms.MaskedAffineAutoregressiveTransform, {}, []
    if spline:
        make = transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform
        tails = {"tails": "linear", "tail_bound": 3.0, "num_bins": 8}
    for _ in range(blocks):
        parts.append(transforms.ReversePermutation(size))
        parts.append(make(size, width, context_features=context, num_blocks=1, **tails))
    return NFlows(flows.Flow(transforms.CompositeTransform(parts), distributions.StandardNormal([size])), (size,))


def nflows_multiscale(side: int, blocks: int, width: int) -> View:
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ConvResidualNet

    top, net = transforms.MultiscaleCompositeTransform(2), partial(ConvResidualNet, hidden_channels=width, num_blocks=1)
    shape = (1, side, side)
    for level in range(2):
        channels = shape[0] * 4
        parts: list[Any] = [transforms.SqueezeTransform()]
        for k in range(blocks):
            parts.append(transforms.ActNorm(channels))
            parts.append(transforms.OneByOneConvolution(channels))
            parts.append(transforms.AffineCouplingTransform(_flip(channels, k), net))
        out = (channels, shape[1] // 2, shape[2] // 2)
        shape = top.add_transform(transforms.CompositeTransform(parts), out) if level == 0 else out
        if level == 1:
            top.add_transform(transforms.CompositeTransform(parts), out)
    return NFlows(flows.Flow(top, distributions.StandardNormal([side * side])), (side * side,))


flow("nflows-affine-2", "affine coupling", "moons")(lambda: nflows_coupling("affine", 2, 8, 64))
flow("nflows-rqs-2", "spline", "checkerboard", steps=1200)(
    lambda: nflows_coupling("rqs", 2, 5, 64, tails="linear", tail_bound=5.0, num_bins=8)
)
flow("nflows-maf-2", "autoregressive", "rings")(lambda: nflows_maf(2, 8, 64))
flow("nflows-additive-8", "additive", "table")(lambda: nflows_coupling("additive", 8, 8, 64, linear=True))
flow("nflows-maf-8-heavy", "autoregressive", "heavy table")(lambda: nflows_maf(8, 5, 64))
flow("nflows-rqs-maf-8", "spline, autoregressive", "table", steps=800)(lambda: nflows_maf(8, 3, 64, spline=True))
flow("nflows-conditional-8", "conditional, affine coupling", "regression")(
    lambda: nflows_coupling("affine", 8, 6, 64, context=3)
)
flow("nflows-maf-64", "autoregressive", "wide table", steps=1200, cost=250)(lambda: nflows_maf(64, 3, 128))
flow("nflows-multiscale-64", "multi-scale, affine coupling", "small images", steps=500, batch=128, cost=180)(
    lambda: nflows_multiscale(8, 3, 16)
)
flow("nflows-rqs-784", "spline", "flat images", steps=150, batch=64, cost=300)(
    lambda: nflows_coupling("rqs", 784, 2, 128, tails="linear", tail_bound=3.0, num_bins=4)
)
flow("nflows-affine-784", "affine coupling", "flat images", steps=400, batch=128, cost=200)(
    lambda: nflows_coupling("affine", 784, 6, 256)
)


# ---- FrEIA


def freia(
    block: str,
    size: int,
    blocks: int,
    net: Callable[..., nn.Module],
    *,
    context: int = 0,
    mix: bool = True,
    **options: Any,
) -> View:
    import FrEIA.framework as framework
    import FrEIA.modules as modules

    given = {"cond": 0, "cond_shape": (context,)} if context else {}
    inn = framework.SequenceINN(size)
    for k in range(blocks):
        inn.append(getattr(modules, block), subnet_constructor=net, **given, **options)
        if mix:
            inn.append(modules.PermuteRandom, seed=k)
    return FrEIA(inn, (size,))


def freia_residual(size: int, blocks: int) -> View:
    import FrEIA.framework as framework
    import FrEIA.modules as modules

    class Corrected(FrEIA):
        """Users call `lipschitz_correction` in training; here before each log-density of training mode."""

        def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            if self.training:
                for module in self.model.module_list:
                    if isinstance(module, modules.IResNetLayer):
                        module.lipschitz_correction()
            return super().log_prob(x, context)

    inn = framework.SequenceINN(size)
    for _ in range(blocks):
        inn.append(modules.ActNorm)
        inn.append(modules.IResNetLayer, internal_size=32, spectral_norm_max=0.6, fixed_point_iterations=60)
    return Corrected(inn, (size,), random=True)


def freia_graph(size: int, blocks: int, net: Callable[..., nn.Module]) -> View:
    """Half of the features leave after the first blocks and come back at the end: a multi-scale graph."""
    import FrEIA.framework as framework
    import FrEIA.modules as modules

    nodes: list[Any] = [framework.InputNode(size, name="input")]

    def add(inputs: Any, block: Any, **given: Any) -> Any:
        nodes.append(framework.Node(inputs, block, given))
        return nodes[-1]

    last = nodes[-1]
    for k in range(blocks):
        last = add(add(last, modules.GLOWCouplingBlock, subnet_constructor=net), modules.PermuteRandom, seed=k)
    split = add(last, modules.Split)
    last = split.out0
    for k in range(blocks):
        coupled = add(last, modules.GLOWCouplingBlock, subnet_constructor=net)
        last = add(coupled.out0, modules.PermuteRandom, seed=k).out0
    last = add([last, split.out1], modules.Concat)
    return FrEIAGraph(framework.GraphINN([*nodes, framework.OutputNode(last)]), (size,))


flow("freia-glow-2-deep-hasty", "affine coupling", "checkerboard", rate=1e-2, steps=1000)(
    lambda: freia("GLOWCouplingBlock", 2, 24, mlp(64, nn.ReLU), mix=False)
)
flow("freia-nice-8", "additive", "table")(lambda: freia("NICECouplingBlock", 8, 8, mlp()))
flow("freia-allinone-8", "affine coupling", "table")(lambda: freia("AllInOneBlock", 8, 8, mlp(64, nn.ReLU)))
flow("freia-rnvp-8-deep-hasty", "affine coupling", "heavy table", rate=1e-2, steps=800)(
    lambda: freia("RNVPCouplingBlock", 8, 24, mlp(64, nn.ReLU), clamp=4.0)
)
flow("freia-conditional-8", "conditional, affine coupling", "regression")(
    lambda: freia("GLOWCouplingBlock", 8, 6, mlp(), context=3)
)
flow("freia-residual-8", "residual", "table", steps=300, cost=240)(lambda: freia_residual(8, 3))
flow("freia-graph-64", "multi-scale, affine coupling", "wide table", steps=700)(lambda: freia_graph(64, 3, mlp(128)))
flow("freia-allinone-784", "affine coupling", "flat images", steps=300, batch=128, cost=200)(
    lambda: freia("AllInOneBlock", 784, 6, mlp(256, nn.ReLU, 1), mix=False)
)
flow("freia-nice-784", "additive", "flat images", steps=300, batch=128, cost=180)(
    lambda: freia("NICECouplingBlock", 784, 6, mlp(256, nn.Tanh, 1))
)


# ---- normflows


def normflows_coupling(
    size: int,
    blocks: int,
    width: int,
    *,
    scale: bool = True,
    scale_map: str = "sigmoid",
    modes: int = 0,
    swap: bool = True,
) -> View:
    import normflows

    parts: list[Any] = []
    for _ in range(blocks):
        net = normflows.nets.MLP([size // 2, width, width, size if scale else size // 2], init_zeros=True)
        parts.append(normflows.flows.AffineCouplingBlock(net, scale=scale, scale_map=scale_map))
        parts.append(normflows.flows.Permute(size, mode="swap" if swap else "shuffle"))
    base: Any = normflows.distributions.DiagGaussian(size)
    if modes:
        base = normflows.distributions.GaussianMixture(modes, size).float()  # it comes in float64
    return Normflows(normflows.NormalizingFlow(base, parts), (size,))


def normflows_spline(size: int, blocks: int, width: int) -> View:
    import normflows

    parts: list[Any] = []
    for _ in range(blocks):
        parts.append(normflows.flows.AutoregressiveRationalQuadraticSpline(size, 1, width))
        parts.append(normflows.flows.LULinearPermute(size))
    return Normflows(normflows.NormalizingFlow(normflows.distributions.DiagGaussian(size), parts), (size,))


def normflows_residual(size: int, blocks: int, width: int, constant: float) -> View:
    import normflows

    parts: list[Any] = []
    for _ in range(blocks):
        net = normflows.nets.LipschitzMLP([size, width, width, size], init_zeros=True, lipschitz_const=constant)
        parts.append(normflows.flows.Residual(net, reduce_memory=False))
        parts.append(normflows.flows.ActNorm(size))

    class Iterated(Normflows):
        """Users update the norms after each step; here before each log-density of training mode."""

        def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            if self.training:
                normflows.utils.update_lipschitz(self.model, 5)
            return super().log_prob(x, context)

    model = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(size), parts)
    return Iterated(model, (size,), random=size != 2)


def normflows_conditional(size: int, context: int, blocks: int, width: int) -> View:
    import normflows

    parts: list[Any] = []
    for _ in range(blocks):
        parts.append(normflows.flows.MaskedAffineAutoregressive(size, width, context_features=context, num_blocks=1))
    base = normflows.distributions.base.ConditionalDiagGaussian(size, nn.Linear(context, 2 * size))
    return Normflows(normflows.ConditionalNormalizingFlow(base, parts), (size,), given=True)


def normflows_multiscale(side: int, blocks: int, width: int) -> View:
    import normflows

    levels = 2
    bases, parts, merges = [], [], []
    for level in range(levels):
        channels = 4 if level == levels - 1 else 8
        inner: list[Any] = [normflows.flows.GlowBlock(channels, width) for _ in range(blocks)]
        parts.append([*inner, normflows.flows.Squeeze()])
        if level:
            merges.append(normflows.flows.Merge())
            bases.append(normflows.distributions.DiagGaussian((2, side // 2, side // 2)))
        else:
            bases.append(normflows.distributions.DiagGaussian((8, side // 4, side // 4)))
    return Multiscale(normflows.MultiscaleFlow(bases, parts, merges, class_cond=False), (side * side,))


flow("normflows-mixture-2", "mixture base, affine coupling", "rings")(lambda: normflows_coupling(2, 8, 64, modes=6))
flow("normflows-residual-2", "residual", "checkerboard", steps=300, cost=150)(lambda: normflows_residual(2, 6, 64, 0.9))
flow("normflows-residual-8", "residual", "table", steps=400, cost=300)(lambda: normflows_residual(8, 3, 32, 0.8))
flow("normflows-exp-8-deep-hasty", "affine coupling", "heavy table", rate=1e-2, steps=1000)(
    lambda: normflows_coupling(8, 24, 64, scale_map="exp")
)
flow("normflows-mixture-8", "mixture base, affine coupling", "table")(
    lambda: normflows_coupling(8, 6, 64, modes=4, swap=False)
)
flow("normflows-spline-8", "spline, autoregressive", "table", steps=500, cost=120)(lambda: normflows_spline(8, 3, 32))
flow("normflows-conditional-8", "conditional, autoregressive", "regression", steps=1000)(
    lambda: normflows_conditional(8, 3, 4, 64)
)
flow("normflows-additive-64", "additive", "wide table", steps=1000)(
    lambda: normflows_coupling(64, 6, 128, scale=False, swap=False)
)
flow("normflows-multiscale-64", "multi-scale, affine coupling", "small images", steps=500, batch=128, cost=180)(
    lambda: normflows_multiscale(8, 3, 16)
)
flow("normflows-multiscale-784", "multi-scale, affine coupling", "images", steps=500, batch=32, cost=340)(
    lambda: normflows_multiscale(28, 2, 12)
)
flow("normflows-exp-784", "affine coupling", "flat images", steps=300, batch=128, cost=200)(
    lambda: normflows_coupling(784, 6, 256, scale_map="exp", swap=False)
)


# ---- zuko


def zuko(kind: str, *args: Any, base: int = 0, hidden: tuple[int, ...] = (64, 64), **options: Any) -> View:
    import zuko as library

    model = getattr(library.flows, kind)(*args, hidden_features=hidden, **options)
    if base:
        mixture = library.flows.GMM(args[0], components=base)
        model = library.flows.Flow(model.transform.transforms, mixture)
    return Zuko(model, (args[0],))


def zuko_additive(size: int, blocks: int, width: int) -> View:
    import zuko as library

    shift = library.transforms.AdditiveTransform
    options: dict[str, Any] = {"univariate": shift, "shapes": [()], "hidden_features": (width, width)}
    return Zuko(library.flows.NICE(size, transforms=blocks, randmask=True, **options), (size,))


flow("zuko-nsf-2", "spline, autoregressive", "checkerboard", steps=1000)(lambda: zuko("NSF", 2, transforms=4))
flow("zuko-cnf-2", "CNF", "moons", steps=120, cost=300)(lambda: zuko("CNF", 2, hidden=(32, 32)))
flow("zuko-mixture-2", "mixture base, affine coupling", "rings")(lambda: zuko("RealNVP", 2, transforms=6, base=6))
flow("zuko-conditional-2", "conditional, spline, autoregressive", "labelled moons", steps=800)(
    lambda: zuko("NSF", 2, 2, transforms=3)
)
flow("zuko-maf-8-heavy", "autoregressive", "heavy table")(lambda: zuko("MAF", 8, transforms=5))
flow("zuko-additive-8", "additive", "table")(lambda: zuko_additive(8, 8, 64))
flow("zuko-realnvp-8-deep-hasty", "affine coupling", "heavy table", rate=1e-2, steps=800)(
    lambda: zuko("RealNVP", 8, transforms=24)
)
flow("zuko-naf-8", "autoregressive", "table", steps=800, cost=340)(
    lambda: zuko("NAF", 8, transforms=1, hidden=(32,), network={"hidden_features": (16, 16)})
)
flow("zuko-cnf-8", "CNF", "table", steps=80, cost=340)(lambda: zuko("CNF", 8, hidden=(32, 32), exact=True))
flow("zuko-nsf-64", "spline", "wide table", steps=300, cost=250)(
    lambda: zuko("NSF", 64, transforms=3, passes=2, hidden=(128,))
)
flow("zuko-realnvp-784", "affine coupling", "flat images", steps=400, batch=128, cost=200)(
    lambda: zuko("RealNVP", 784, transforms=6, hidden=(256,))
)


# ---- pyro


def pyro_parts(size: int, blocks: int, width: int, kind: str, context: int = 0) -> list[Any]:
    from pyro.distributions import transforms

    parts: list[Any] = []
    for k in range(blocks):
        if kind == "affine" and context:
            parts.append(transforms.conditional_affine_coupling(size, context, [width, width]))
        elif kind == "affine":
            parts.append(transforms.affine_coupling(size, [width, width]))
        elif kind == "spline":
            parts.append(transforms.spline_coupling(size, hidden_dims=[width, width], bound=5.0))
        elif kind == "autoregressive":
            parts.append(transforms.affine_autoregressive(size, [width]))
        order = torch.arange(size).flip(0)
        parts.append(transforms.Permute(order if k % 2 else order.roll(size // 2)))
    return parts


flow("pyro-spline-2", "spline", "checkerboard", steps=800)(lambda: Pyro(pyro_parts(2, 4, 32, "spline"), 2))
flow("pyro-mixture-2", "mixture base, affine coupling", "rings", steps=1000)(
    lambda: Pyro(pyro_parts(2, 6, 64, "affine"), 2, modes=2 * torch.randn(5, 2))
)
flow("pyro-autoregressive-8", "autoregressive", "table", steps=400, cost=150)(
    lambda: Pyro(pyro_parts(8, 3, 48, "autoregressive"), 8)
)
flow("pyro-conditional-8", "conditional, affine coupling", "regression", steps=1000)(
    lambda: Pyro(pyro_parts(8, 6, 64, "affine", 3), 8, given=True)
)
flow("pyro-affine-64-deep-hasty", "affine coupling", "wide heavy table", rate=1e-2, steps=500, cost=120)(
    lambda: Pyro(pyro_parts(64, 16, 128, "affine"), 64)
)


# ---- bilip


def bilip_flow(trunk: Callable[[Any], Any], size: tuple[int, ...], base: Any = "normal") -> View:
    import bilip

    return Bilip(bilip.Flow(trunk(bilip), base=base, shape=size), size)


def real_nvp(size: int, **options: Any) -> View:
    return bilip_flow(lambda b: b.models.real_nvp(size, **options), (size,))


def multiscale(side: int, blocks: int, width: int) -> View:
    options = {"levels": 2, "blocks": blocks, "hidden": width, "factor_out": True, "learned_prior": False}
    return bilip_flow(lambda b: b.models.glow((1, side, side), **options), (side * side,))


flow("bilip-affine-2-deep", "affine coupling", "checkerboard", steps=1000)(
    lambda: real_nvp(2, blocks=32, hidden=(32, 32))
)
flow("bilip-residual-2", "residual", "moons", steps=400, cost=300)(
    lambda: bilip_flow(lambda b: b.models.residual_flow(2, blocks=4, hidden=(32, 32)), (2,))
)
flow("bilip-additive-8", "additive", "heavy table")(lambda: real_nvp(8, blocks=8, coupling="additive"))
flow("bilip-exp-64-hasty", "affine coupling", "wide heavy table", rate=5e-3, steps=800)(
    lambda: real_nvp(64, blocks=12, hidden=(128,), scale="exp")
)
flow("bilip-multiscale-64", "multi-scale, affine coupling", "small images", steps=300, batch=128, cost=150)(
    lambda: multiscale(8, 3, 16)
)
flow("bilip-multiscale-784", "multi-scale, affine coupling", "images", steps=500, batch=32, cost=340)(
    lambda: multiscale(28, 2, 12)
)
flow("bilip-additive-784", "additive", "flat images", steps=600, batch=128, cost=150)(
    lambda: real_nvp(784, blocks=6, hidden=(256,), coupling="additive")
)


# ---- small ones that lose what lies outside their data: deep, and trained in haste

EXPLODING: dict[str, Spec] = {}


def hasty(
    name: str, build: Callable[[], View], data: str = "heavy table", rate: float = 1e-2, steps: int = 150
) -> None:
    EXPLODING[name] = Spec(name, ("exploding",), data, build, steps=steps, rate=rate, batch=128)


hasty("nflows-affine-24", lambda: nflows_coupling("affine", 8, 24, 32))
hasty("nflows-affine-16-table", lambda: nflows_coupling("affine", 8, 16, 32), "table")
hasty("nflows-maf-8", lambda: nflows_maf(8, 8, 32))
hasty("nflows-maf-12-table", lambda: nflows_maf(8, 12, 32), "table")
hasty("nflows-rqs-6", lambda: nflows_coupling("rqs", 8, 6, 32, tails="linear", tail_bound=5.0, num_bins=8), rate=2e-2)
hasty("freia-glow-16", lambda: freia("GLOWCouplingBlock", 8, 16, mlp(32, nn.ReLU)))
hasty("freia-glow-24-table", lambda: freia("GLOWCouplingBlock", 8, 24, mlp(32, nn.ReLU)), "table", steps=100)
hasty("freia-rnvp-12", lambda: freia("RNVPCouplingBlock", 8, 12, mlp(32, nn.ReLU), clamp=4.0))
hasty("freia-rnvp-12-table", lambda: freia("RNVPCouplingBlock", 8, 12, mlp(32, nn.ReLU), clamp=4.0), "table")
hasty("normflows-exp-16", lambda: normflows_coupling(8, 16, 32, scale_map="exp"))
hasty("normflows-exp-24-table", lambda: normflows_coupling(8, 24, 32, scale_map="exp"), "table")
hasty("normflows-sigmoid-24", lambda: normflows_coupling(8, 24, 32), rate=2e-2)
hasty("normflows-spline-3", lambda: normflows_spline(8, 3, 32), rate=2e-2, steps=100)
hasty("zuko-realnvp-16", lambda: zuko("RealNVP", 8, transforms=16, hidden=(32,)))
hasty("zuko-realnvp-24-table", lambda: zuko("RealNVP", 8, transforms=24, hidden=(32,)), "table")
hasty("zuko-maf-8", lambda: zuko("MAF", 8, transforms=8, hidden=(32,)))
hasty("zuko-maf-12-table", lambda: zuko("MAF", 8, transforms=12, hidden=(32,)), "table")
hasty("zuko-nsf-4", lambda: zuko("NSF", 8, transforms=4, hidden=(32,)), rate=2e-2)
hasty("pyro-affine-12", lambda: Pyro(pyro_parts(8, 12, 32, "affine"), 8))
hasty("pyro-affine-16-table", lambda: Pyro(pyro_parts(8, 16, 32, "affine"), 8), "table")
hasty("pyro-spline-4", lambda: Pyro(pyro_parts(8, 4, 32, "spline"), 8), rate=2e-2)
hasty("bilip-sigmoid-32", lambda: real_nvp(8, blocks=32, hidden=(32,)))
hasty("bilip-sigmoid-24-table", lambda: real_nvp(8, blocks=24, hidden=(32,)), "table")
hasty(
    "bilip-tanh-16",
    lambda: real_nvp(8, blocks=16, hidden=(32,), scale="tanh_exp"),
)
hasty(
    "bilip-tanh-24-table",
    lambda: real_nvp(8, blocks=24, hidden=(32,), scale="tanh_exp"),
    "table",
)
hasty("nflows-maf-16", lambda: nflows_maf(8, 16, 32))
hasty("normflows-exp-32", lambda: normflows_coupling(8, 32, 32, scale_map="exp"))
hasty("zuko-realnvp-32", lambda: zuko("RealNVP", 8, transforms=32, hidden=(32,)))
hasty("pyro-affine-24", lambda: Pyro(pyro_parts(8, 24, 32, "affine"), 8))
