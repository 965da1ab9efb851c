"""Defects that people plant by accident, each in a flow that was trained honestly. Importing this enters them in the zoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flow_zoo.flows import (
    FLOWS,
    Spec,
    bilip_flow,
    freia,
    freia_residual,
    mlp,
    nflows_coupling,
    nflows_maf,
    normflows_coupling,
    pyro_parts,
    zuko,
)
from flow_zoo.views import FrEIA, Pyro, View

__all__ = ["HalfNet"]


def planted(
    name: str, defect: str, families: str, data: str, build: Any, plant: Any = lambda view: view, **options: Any
) -> None:
    FLOWS[name] = Spec(name, tuple(families.split(", ")), data, build, defect=defect, plant=plant, **options)


# ---- nflows: transforms that lie


def _wrapped(view: View, place: int, kind: Any) -> View:
    parts = view.model._transform._transforms
    parts[place] = kind(parts[place])
    return view


def _transform(base: Any = None) -> Any:
    from nflows.transforms import Transform

    class Wrapped(Transform):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return self.inner(inputs, context=context)

        def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return self.inner.inverse(inputs, context=context)

    return Wrapped


def wrong_sign(view: View) -> View:
    class WrongSign(_transform()):
        def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, log_det = self.inner(inputs, context=context)
            return y, -log_det

        def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            x, log_det = self.inner.inverse(inputs, context=context)
            return x, -log_det

    for place in range(len(view.model._transform._transforms)):
        _wrapped(view, place, WrongSign)
    return view


def forgotten_scale(view: View) -> View:
    """A layer y = 1.02 x whose log-determinant nobody counts."""

    class Forgotten(_transform()):
        def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, log_det = self.inner(inputs, context=context)
            return 1.02 * y, log_det

        def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return self.inner.inverse(inputs / 1.02, context=context)

    return _wrapped(view, 1, Forgotten)


def inverse_off(view: View) -> View:
    class Off(_transform()):
        def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            x, log_det = self.inner.inverse(inputs, context=context)
            return 1.01 * x, log_det

    return _wrapped(view, 3, Off)


def batch_statistics(view: View) -> View:
    """A normalisation that looks at the batch in evaluation mode too."""

    class BatchStatistics(_transform()):
        def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, log_det = self.inner(inputs, context=context)
            mean, scale = y.mean(0), y.std(0) + 1e-3
            self.mean, self.scale = mean.detach(), scale.detach()
            return (y - mean) / scale, log_det - scale.log().sum()

        def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            x, log_det = self.inner.inverse(inputs * self.scale + self.mean, context=context)
            return x, log_det + self.scale.log().sum()

    return _wrapped(view, 2, BatchStatistics)


planted(
    "nflows-planted-sign-8", "the log-determinant has the wrong sign", "affine coupling", "table",
    lambda: nflows_coupling("affine", 8, 6, 64), wrong_sign, steps=700,
)  # fmt: skip
planted(
    "nflows-planted-forgotten-784", "a layer of scale 1.02 is not in the log-determinant", "affine coupling", "flat images",
    lambda: nflows_coupling("affine", 784, 4, 128), forgotten_scale, steps=300, batch=128, cost=150,
)  # fmt: skip
planted(
    "nflows-planted-inverse-2", "the inverse of one block is off by 1 %", "affine coupling", "moons",
    lambda: nflows_coupling("affine", 2, 6, 64), inverse_off, steps=700,
)  # fmt: skip
planted(
    "nflows-planted-batch-8", "batch statistics in evaluation mode", "additive", "table",
    lambda: nflows_coupling("additive", 8, 6, 64), batch_statistics, steps=700,
)  # fmt: skip


def spline_domain() -> View:
    """A spline without tails: what lies outside [0, 1] is refused, and a normal base draws there."""
    return nflows_coupling("rqs", 64, 3, 64, tails=None, num_bins=6)


planted(
    "nflows-planted-domain-64", "a spline without tails over a normal base", "spline", "small flat images", spline_domain,
    steps=300,
)  # fmt: skip


# ---- weights and nets


def nan_weight(view: View) -> View:
    weights = [p for p in view.parameters() if p.ndim == 2]
    weights[-1].data[-1, 0] = torch.nan
    return view


planted(
    "zuko-planted-nan-8", "one weight is NaN", "autoregressive", "table",
    lambda: zuko("MAF", 8, transforms=3, hidden_features=(64, 64)), nan_weight, steps=700,
)  # fmt: skip


def shrunk(view: View) -> View:
    """Scales of 1e-9 in the middle, as a weight decay on log-scales leaves them."""
    import normflows

    class Shrunk(normflows.flows.Flow):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((size,), 1e-9), requires_grad=False)

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return z / self.scale, -self.scale.log().sum().expand(len(z))

        def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return z * self.scale, self.scale.log().sum().expand(len(z))

    flows = list(view.model.flows)
    flows.insert(len(flows) // 2, Shrunk(view.size[0]))
    view.model.flows = nn.ModuleList(flows)
    return view


planted(
    "normflows-planted-shrunk-8", "scales of 1e-9 in the middle", "affine coupling", "table",
    lambda: normflows_coupling(8, 6, 64, swap=False), shrunk, steps=700,
)  # fmt: skip


class HalfNet(nn.Module):
    """A net that computes in float16 whatever it is given. `exact` switches that off: then it is what was meant."""

    exact = False

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        if self.exact:
            return self.net(x)
        half = x.half()
        for layer in self.net:  # type: ignore[attr-defined]
            linear = isinstance(layer, nn.Linear)
            half = nn.functional.linear(half, layer.weight.half(), layer.bias.half()) if linear else layer(half)
        return half.to(x.dtype)


def half_nets(view: View) -> View:
    for module in list(view.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Sequential) and not isinstance(module, HalfNet) and name.startswith("subnet"):
                setattr(module, name, HalfNet(child))
    return view


planted(
    "freia-planted-half-8", "nets that compute in float16", "affine coupling", "table",
    lambda: freia("GLOWCouplingBlock", 8, 8, mlp()), half_nets, steps=700,
)  # fmt: skip


# ---- inverses


def few_iterations(view: View) -> View:
    for module in view.modules():
        if type(module).__name__ == "IResNetLayer":
            module.fixed_point_iterations = 3
    return view


planted(
    "freia-planted-solver-8", "the fixed point of the inverse is left after three iterations", "residual", "table",
    lambda: freia_residual(8, 2), few_iterations, steps=200, cost=200,
)  # fmt: skip


class DropsLatents(FrEIA):
    """A user who keeps half of the latents and fills the rest with zeros."""

    @staticmethod
    def kept(z: Tensor) -> Tensor:
        half = z.shape[1] // 2
        return torch.cat((z[:, :half], torch.zeros_like(z[:, half:])), 1)

    def decode(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return super().decode(self.kept(z), context)

    def audited(self) -> Any:
        import bilip

        inner, kept = bilip.as_bijection(self.model), self.kept

        class Drops(bilip.Bijection):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
                return self.inner(x, context)

            def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
                return self.inner.inverse(kept(z), context)

            def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
                return self.inner.forward_and_log_det(x, context)

            def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
                return self.inner.inverse_and_log_det(kept(z), context)

        return bilip.Flow(Drops(), shape=self.size)


def drops(view: View) -> View:
    return DropsLatents(view.model, view.size)


planted(
    "freia-planted-dropped-64", "half of the latents are dropped", "multi-scale, affine coupling", "wide table",
    lambda: freia("GLOWCouplingBlock", 64, 4, mlp(128)), drops, steps=400,
)  # fmt: skip


# ---- randomness, order


def dropout(view: View) -> View:
    """Dropout that evaluation mode does not switch off."""

    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.05, training=True)

    for block in view.model.bijection:
        nets = [m for m in block.modules() if isinstance(m, nn.Sequential)]
        nets[0].append(Always())
        break
    return view


planted(
    "bilip-planted-dropout-8", "dropout that is never switched off", "affine coupling", "table",
    lambda: bilip_flow(lambda b: b.models.real_nvp(8, blocks=6), (8,)), dropout, steps=700,
)  # fmt: skip


def swapped(view: View) -> View:
    """A permutation whose inverse is another one."""
    from pyro.distributions import transforms

    class Wrong(transforms.Permute):
        def _inverse(self, y: Tensor) -> Tensor:
            return y.roll(1, -1)

    assert isinstance(view, Pyro)
    for k, part in enumerate(view.order):
        if isinstance(part, transforms.Permute):
            view.order[k] = Wrong(part.permutation)
            break
    return view


planted(
    "pyro-planted-order-8", "a permutation whose inverse is another one", "affine coupling", "table",
    lambda: Pyro(pyro_parts(8, 4, 64, "affine"), 8), swapped, steps=700,
)  # fmt: skip


def huge_scale(view: View) -> View:
    """The last block's log-scales times 30: what a wrong unit or a lost clamp does."""
    block = [m for m in view.modules() if type(m).__name__ == "MADE"][-1]
    block.final_layer.weight.data *= 30
    block.final_layer.bias.data *= 30
    return view


planted(
    "nflows-planted-scale-8", "weights of one block times 30", "autoregressive", "table",
    lambda: nflows_maf(8, 3, 64), huge_scale, steps=700,
)  # fmt: skip
