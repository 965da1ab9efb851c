"""Small models of every supported library, with what the library itself says about them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bilip.nets import MLP


@dataclass(frozen=True)
class Case:
    """A model, one sample's shape, and the library's own log-density where it has one.

    The name begins with the library. `needs`: another package that must be there. `blocks`: kinds that must be visible.
    `trip`: round trips in float64 reach this.
    """

    name: str
    make: Callable[[], Any]
    shape: tuple[int, ...]
    log_prob: Callable[[Any, Tensor, Tensor | None], Tensor] | None = None
    needs: str = ""
    context: tuple[int, ...] | None = None
    blocks: tuple[str, ...] | None = None
    trip: float = 1e-9
    log_det: bool = True
    stochastic: bool = False
    samples: bool = True

    def model(self) -> Any:
        torch.manual_seed(0)
        return self.make()

    def batch(self, count: int = 4) -> Tensor:
        return torch.randn(count, *self.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def contexts(self, count: int = 4) -> Tensor | None:
        if self.context is None:
            return None
        return torch.randn(count, *self.context, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    @property
    def library(self) -> str:
        return self.name.split()[0]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.needs or self.library) is not None


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, outputs))


def conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, outputs, 3, padding=1))


# ---- nflows and relatives


def nflows_flow(*, context: int | None = None, embedding: bool = False, base: str = "standard"):
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ResidualNet

    features = None if context is None else (3 if embedding else context)
    parts = [
        transforms.AffineCouplingTransform([1, 0, 1, 0], lambda i, o: ResidualNet(i, o, 8, context_features=features)),
        transforms.ReversePermutation(4),
        transforms.LULinear(4),
        transforms.MaskedAffineAutoregressiveTransform(4, 8, context_features=features),
        transforms.InverseTransform(transforms.AdditiveCouplingTransform([0, 1, 0, 1], lambda i, o: MLP(i, o))),
    ]
    normal = distributions.StandardNormal([4])
    if base == "conditional":
        normal = distributions.ConditionalDiagonalNormal([4], nn.Linear(features, 8))
    elif base == "diagonal":
        normal = distributions.DiagonalNormal([4])
    return flows.Flow(transforms.CompositeTransform(parts), normal, nn.Linear(context, 3) if embedding else None)


def nflows_images():
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ConvResidualNet

    multi = transforms.MultiscaleCompositeTransform(2)
    coupling = transforms.AffineCouplingTransform([1, 1, 0, 0], lambda i, o: ConvResidualNet(i, o, 4))
    hidden = multi.add_transform(transforms.CompositeTransform([transforms.SqueezeTransform(), coupling]), (4, 2, 2))
    multi.add_transform(transforms.OneByOneConvolution(2), hidden)
    return flows.Flow(multi, distributions.StandardNormal([16]))


def glasflow_flow(context: int | None = None):
    from glasflow.flows import RealNVP

    return RealNVP(4, 3, n_neurons=8, n_conditional_inputs=context, linear_transform="permutation")


def sbi_like(flow, embedding: nn.Module | None = None):
    """A stand-in with the attributes of sbi's estimators; sbi itself is too heavy to install for this."""

    class Estimator(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = flow
            self._embedding_net = embedding

        @property
        def embedding_net(self):
            return self.net._embedding_net if self._embedding_net is None else self._embedding_net

        def log_prob(self, x, condition):
            if self._embedding_net is None:
                return self.net.log_prob(x, context=condition)
            return self.net(self._embedding_net(condition)).log_prob(x)

    Estimator.__module__ = "sbi.neural_nets.estimators.flow"
    return Estimator()


# ---- FrEIA


def freia(*shape, blocks):
    """A sequence of modules by name, each with its options."""
    import FrEIA.framework as framework
    import FrEIA.modules as modules

    inn = framework.SequenceINN(*shape)
    for name, options in blocks:
        inn.append(getattr(modules, name), **options)
    return inn


def freia_sequence(*, condition: bool = False):
    given = {"cond": 0, "cond_shape": (2,)} if condition else {}
    blocks = [
        ("GLOWCouplingBlock", {"subnet_constructor": net, **given}),
        ("PermuteRandom", {"seed": 0}),
        ("RNVPCouplingBlock", {"subnet_constructor": net, "clamp_activation": "TANH", **given}),
        ("NICECouplingBlock", {"subnet_constructor": net, "split_len": 1}),
        ("AllInOneBlock", {"subnet_constructor": net}),
    ]
    return freia(4, blocks=blocks)


def freia_two_conditions():
    first = ("NICECouplingBlock", {"cond": 1, "cond_shape": (3,), "subnet_constructor": net})
    return freia(4, blocks=[first, ("GLOWCouplingBlock", {"cond": 0, "cond_shape": (2,), "subnet_constructor": net})])


def freia_images():
    coupling = ("GLOWCouplingBlock", {"subnet_constructor": conv})
    return freia(1, 4, 4, blocks=[("HaarDownsampling", {}), coupling, ("Flatten", {})])


def freia_graph(*, condition: bool = False, split: bool = False, outputs: int = 1):
    import FrEIA.framework as framework
    import FrEIA.modules as modules

    nodes: list[Any] = [framework.InputNode(4, name="input")]
    given = [framework.ConditionNode(2, name="condition")] if condition else []
    nodes.append(
        framework.Node(nodes[-1], modules.GLOWCouplingBlock, {"subnet_constructor": net}, conditions=given or None)
    )
    nodes.append(framework.Node(nodes[-1], modules.PermuteRandom, {"seed": 1}))
    if split:
        nodes.append(framework.Node(nodes[-1], modules.Split, {}))
        first, second = nodes[-1].out0, nodes[-1].out1
        nodes.append(framework.Node(first, modules.NICECouplingBlock, {"subnet_constructor": net}))
        if outputs == 2:
            ends = [framework.OutputNode(nodes[-1]), framework.OutputNode(second)]
            return framework.GraphINN([*nodes, *given, *ends])
        nodes.append(framework.Node([nodes[-1].out0, second], modules.Concat, {}))
    return framework.GraphINN([*nodes, *given, framework.OutputNode(nodes[-1])])


def freia_residual():
    residual = ("IResNetLayer", {"spectral_norm_max": 0.5, "fixed_point_iterations": 80})
    inn = freia(3, blocks=[residual, ("PermuteRandom", {"seed": 0})])
    inn.module_list[0].lipschitz_correction()
    return inn


# ---- normflows


def normflows_flow(scale_map: str = "exp"):
    import normflows

    flows: list[Any] = []
    for _ in range(2):
        flows.append(normflows.flows.AffineCouplingBlock(normflows.nets.MLP([2, 8, 4]), scale_map=scale_map))
        flows.append(normflows.flows.Permute(4, mode="shuffle"))
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    flows.append(normflows.flows.MaskedAffineFlow(mask, normflows.nets.MLP([4, 8, 4]), normflows.nets.MLP([4, 8, 4])))
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(4), flows)


def normflows_spline():
    import normflows

    flows = [normflows.flows.AutoregressiveRationalQuadraticSpline(3, 1, 8), normflows.flows.LULinearPermute(3)]
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(3), flows)


def normflows_residual():
    import normflows

    net = normflows.nets.LipschitzMLP([3, 8, 8, 3], init_zeros=False, lipschitz_const=0.7)
    flow = normflows.flows.Residual(net, reduce_memory=False)
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(3), [flow])


def normflows_conditional():
    import normflows

    flow = normflows.flows.MaskedAffineAutoregressive(3, 8, context_features=2, num_blocks=1)
    base = normflows.distributions.base.ConditionalDiagGaussian(3, nn.Linear(2, 6))
    return normflows.ConditionalNormalizingFlow(base, [flow])


def normflows_multiscale(*, classes: bool = False):
    import normflows

    blocks = [[normflows.flows.GlowBlock(4, 4), normflows.flows.Squeeze()] for _ in range(2)]
    blocks[0][0] = normflows.flows.GlowBlock(8, 4)
    shapes = [(8, 1, 1), (2, 2, 2)]
    if classes:
        bases = [normflows.distributions.ClassCondDiagGaussian(shape, 3) for shape in shapes]
    else:
        bases = [normflows.distributions.DiagGaussian(shape) for shape in shapes]
    model = normflows.MultiscaleFlow(bases, blocks, [normflows.flows.Merge()], class_cond=classes)
    generator = torch.Generator().manual_seed(3)
    model.log_prob(torch.randn(16, 1, 4, 4, generator=generator), torch.arange(16) % 3)  # ActNorm starts from data
    return model.eval()


# ---- zuko


def zuko_flow(kind: str, *args, **options):
    import zuko

    return getattr(zuko.flows, kind)(*args, **({"hidden_features": (8,)} | options))


# ---- torch and Pyro


def torch_vector():
    from torch.distributions import MultivariateNormal, TransformedDistribution
    from torch.distributions import transforms as t

    base = MultivariateNormal(torch.zeros(3), torch.eye(3) + 0.5)
    parts = [
        t.AffineTransform(1.0, 2.0),
        t.IndependentTransform(t.AffineTransform(torch.ones(3), torch.ones(3) * 3), 1),
    ]
    return TransformedDistribution(base, [t.ComposeTransform(parts)])


def pyro_distribution():
    import pyro.distributions as dist
    from pyro.distributions import transforms as t

    base = dist.Normal(torch.zeros(4), torch.ones(4)).to_event(1)
    parts = [
        t.affine_coupling(4, [8]),
        t.Permute(torch.tensor([3, 0, 1, 2])),
        t.spline_coupling(4, hidden_dims=[8]),
        t.affine_autoregressive(4, [8]),
    ]
    return dist.TransformedDistribution(base, parts)


def pyro_conditional():
    import pyro.distributions as dist
    from pyro.distributions import transforms as t

    base = dist.Normal(torch.zeros(4), torch.ones(4)).to_event(1)
    parts = [t.conditional_affine_coupling(4, 2, [8]), t.Permute(torch.tensor([1, 2, 3, 0]))]
    parts.append(t.conditional_affine_autoregressive(4, 2, [8]))
    return dist.conditional.ConditionalTransformedDistribution(base, parts)


# ---- MemCNN


def memcnn_stack(kind: str = "additive"):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import memcnn
    coupling = memcnn.AdditiveCoupling if kind == "additive" else memcnn.AffineCoupling
    adapter = {} if kind == "additive" else {"adapter": memcnn.AffineAdapterSigmoid}
    size = 2 if kind == "additive" else 4
    layers = [
        memcnn.InvertibleModuleWrapper(coupling(Fm=net(2, size), Gm=net(2, size), **adapter), keep_input=False)
        for _ in range(2)
    ]
    return nn.Sequential(*layers)


def in_double(function):
    """Autoregressive inverses of Pyro take the default dtype."""

    def call(model, x, context):
        torch.set_default_dtype(torch.float64)
        try:
            return function(model, x, context)
        finally:
            torch.set_default_dtype(torch.float32)

    return call


def plain(model, x, context):
    return model.log_prob(x)


def with_context(model, x, context):
    return model.log_prob(x, context=context)


def second(model, x, context):
    return model.log_prob(x, context)


def called(model, x, context):
    return model(context).log_prob(x)


CASES = [
    Case(
        "nflows",
        nflows_flow,
        (4,),
        plain,
        blocks=(
            "AffineCouplingTransform",
            "ReversePermutation",
            "LULinear",
            "MaskedAffineAutoregressiveTransform",
            "InverseTransform",
        ),
    ),
    # the library has not written its samples
    Case("nflows diagonal", lambda: nflows_flow(base="diagonal"), (4,), plain, samples=False),
    Case("nflows context", lambda: nflows_flow(context=2), (4,), with_context, context=(2,)),
    Case(
        "nflows embedding",
        lambda: nflows_flow(context=2, embedding=True, base="conditional"),
        (4,),
        with_context,
        context=(2,),
    ),
    Case("nflows images", nflows_images, (1, 4, 4), plain),
    Case("nflows transform", lambda: nflows_flow()._transform, (4,)),
    Case("glasflow", glasflow_flow, (4,), plain),
    Case(
        "glasflow context",
        lambda: glasflow_flow(2),
        (4,),
        lambda m, x, c: m.log_prob(x, conditional=c),
        context=(2,),
    ),
    Case(
        "sbi nflows",
        lambda: sbi_like(nflows_flow(context=2, embedding=True)),
        (4,),
        second,
        needs="nflows",
        context=(2,),
    ),
    Case(
        "sbi zuko",
        lambda: sbi_like(zuko_flow("NSF", 3, 2, transforms=2), nn.Linear(5, 2)),
        (3,),
        second,
        needs="zuko",
        context=(5,),
    ),
    Case(
        "FrEIA sequence",
        freia_sequence,
        (4,),
        blocks=("GLOWCouplingBlock", "PermuteRandom", "RNVPCouplingBlock", "NICECouplingBlock", "AllInOneBlock"),
    ),
    Case("FrEIA condition", lambda: freia_sequence(condition=True), (4,), context=(2,)),
    Case("FrEIA two conditions", freia_two_conditions, (4,), context=(5,)),
    Case("FrEIA images", freia_images, (1, 4, 4)),
    Case("FrEIA graph", freia_graph, (4,), blocks=("GLOWCouplingBlock", "PermuteRandom")),
    Case("FrEIA graph condition", lambda: freia_graph(condition=True), (4,), context=(2,)),
    Case("FrEIA graph split", lambda: freia_graph(split=True), (4,), blocks=("GraphINN",)),
    Case("FrEIA graph outputs", lambda: freia_graph(split=True, outputs=2), (4,), blocks=("GraphINN",)),
    Case("FrEIA residual", freia_residual, (3,), stochastic=True),
    Case("FrEIA module", lambda: freia_sequence().module_list[0], (4,), blocks=("GLOWCouplingBlock",)),
    Case(
        "normflows",
        normflows_flow,
        (4,),
        plain,
        blocks=("MaskedAffineFlow", "Permute", "AffineCouplingBlock", "Permute", "AffineCouplingBlock"),
    ),
    Case("normflows sigmoid", lambda: normflows_flow("sigmoid"), (4,), plain),
    Case("normflows spline", normflows_spline, (3,), plain),
    Case("normflows conditional", normflows_conditional, (3,), with_context, context=(2,)),
    Case("normflows multi-scale", normflows_multiscale, (1, 4, 4), second),
    Case("normflows residual", normflows_residual, (3,), stochastic=True, trip=1e-2),
    Case("normflows layer", lambda: normflows_flow().flows[0], (4,)),
    Case(
        "zuko NSF",
        lambda: zuko_flow("NSF", 3, 2, transforms=2),
        (3,),
        called,
        context=(2,),
        blocks=("MaskedAutoregressiveTransform",) * 2,
    ),
    Case(
        "zuko RealNVP",
        lambda: zuko_flow("RealNVP", 4, transforms=3),
        (4,),
        called,
        blocks=("GeneralCouplingTransform",) * 3,
    ),
    Case(
        "zuko NAF",
        lambda: zuko_flow("NAF", 2, transforms=1, network={"hidden_features": (8,)}),
        (2,),
        called,
        trip=1e-4,
    ),
    Case("zuko CNF", lambda: zuko_flow("CNF", 2, exact=True), (2,), called, trip=1e-3),  # the ODE solver's tolerances
    Case("zuko transform", lambda: zuko_flow("MAF", 3, 1, transforms=2).transform, (3,), context=(1,)),
    Case("zuko inverse", lambda: zuko_flow("MAF", 3, transforms=2).transform.inv, (3,)),
    Case("torch vector", torch_vector, (3,), plain, blocks=("AffineTransform", "AffineTransform")),
    Case("pyro", pyro_distribution, (4,), in_double(plain)),
    Case(
        "pyro conditional",
        pyro_conditional,
        (4,),
        in_double(lambda m, x, c: m.condition(c).log_prob(x)),
        context=(2,),
        blocks=("ConditionalAffineAutoregressive", "Permute", "ConditionalAffineCoupling"),
    ),
    Case("memcnn", memcnn_stack, (4,), log_det=False, blocks=("AdditiveCoupling", "AdditiveCoupling")),
    Case("memcnn affine", lambda: memcnn_stack("affine"), (4,), log_det=False),
]
IDS = [case.name for case in CASES]
assert len(set(IDS)) == len(IDS)
