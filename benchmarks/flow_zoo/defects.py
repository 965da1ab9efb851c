"""Defects that people plant by accident, each in a flow that was trained honestly. Importing this enters them in the zoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flow_zoo.flows import (
    flow,
    freia,
    freia_residual,
    mlp,
    nflows_coupling,
    nflows_maf,
    normflows_coupling,
    pyro_parts,
    real_nvp,
    zuko,
)
from flow_zoo.views import FrEIA, Pyro, View

__all__ = ["HalfNet"]

Pair = tuple[Tensor, Tensor]


# ---- nflows: transforms that lie


def _lying() -> Any:
    """A transform around another, with its image, what enters its inverse, and what that gives to be changed."""
    from nflows.transforms import Transform

    class Lying(Transform):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def there(self, y: Tensor, log_det: Tensor) -> Pair:
            return y, log_det

        def before(self, y: Tensor) -> Tensor:
            return y

        def back(self, x: Tensor, log_det: Tensor) -> Pair:
            return x, log_det

        def forward(self, inputs: Tensor, context: Tensor | None = None) -> Pair:
            return self.there(*self.inner(inputs, context=context))

        def inverse(self, inputs: Tensor, context: Tensor | None = None) -> Pair:
            return self.back(*self.inner.inverse(self.before(inputs), context=context))

    return Lying


def _wrapped(view: View, kind: Any, *places: int) -> View:
    parts = view.model._transform._transforms
    for place in places or range(len(parts)):
        parts[place] = kind(parts[place])
    return view


def wrong_sign(view: View) -> View:
    class WrongSign(_lying()):
        def there(self, y: Tensor, log_det: Tensor) -> Pair:
            return y, -log_det

        back = there

    return _wrapped(view, WrongSign)


def forgotten_scale(view: View) -> View:
    """A layer y = 1.02 x whose log-determinant nobody counts."""

    class Forgotten(_lying()):
        def there(self, y: Tensor, log_det: Tensor) -> Pair:
            return 1.02 * y, log_det

        def before(self, y: Tensor) -> Tensor:
            return y / 1.02

    return _wrapped(view, Forgotten, 1)


def inverse_off(view: View) -> View:
    class Off(_lying()):
        def back(self, x: Tensor, log_det: Tensor) -> Pair:
            return 1.01 * x, log_det

    return _wrapped(view, Off, 3)


def batch_statistics(view: View) -> View:
    """A normalisation that looks at the batch in evaluation mode too."""

    class BatchStatistics(_lying()):
        def there(self, y: Tensor, log_det: Tensor) -> Pair:
            mean, scale = y.mean(0), y.std(0) + 1e-3
            self.mean, self.scale = mean.detach(), scale.detach()
            return (y - mean) / scale, log_det - scale.log().sum()

        def before(self, y: Tensor) -> Tensor:
            return y * self.scale + self.mean

        def back(self, x: Tensor, log_det: Tensor) -> Pair:
            return x, log_det + self.scale.log().sum()

    return _wrapped(view, BatchStatistics, 2)


flow(
    "nflows-planted-sign-8", "affine coupling", "table",
    defect="the log-determinant has the wrong sign", plant=wrong_sign, steps=700,
)(lambda: nflows_coupling("affine", 8, 6, 64))  # fmt: skip
flow(
    "nflows-planted-forgotten-784", "affine coupling", "flat images",
    defect="a layer of scale 1.02 is not in the log-determinant", plant=forgotten_scale, steps=300, batch=128, cost=150,
)(lambda: nflows_coupling("affine", 784, 4, 128))  # fmt: skip
flow(
    "nflows-planted-inverse-2", "affine coupling", "moons",
    defect="the inverse of one block is off by 1 %", plant=inverse_off, steps=700,
)(lambda: nflows_coupling("affine", 2, 6, 64))  # fmt: skip
flow(
    "nflows-planted-batch-8", "additive", "table",
    defect="batch statistics in evaluation mode", plant=batch_statistics, steps=700,
)(lambda: nflows_coupling("additive", 8, 6, 64))  # fmt: skip


# what lies outside [0, 1] is refused, and a normal base draws there
flow(
    "nflows-planted-domain-64", "spline", "small flat images",
    defect="a spline without tails over a normal base", steps=300,
)(lambda: nflows_coupling("rqs", 64, 3, 64, tails=None, num_bins=6))  # fmt: skip


# ---- weights and nets


def nan_weight(view: View) -> View:
    weights = [p for p in view.parameters() if p.ndim == 2]
    weights[-1].data[-1, 0] = torch.nan
    return view


flow(
    "zuko-planted-nan-8", "autoregressive", "table",
    defect="one weight is NaN", plant=nan_weight, steps=700,
)(lambda: zuko("MAF", 8, transforms=3))  # fmt: skip


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


flow(
    "normflows-planted-shrunk-8", "affine coupling", "table",
    defect="scales of 1e-9 in the middle", plant=shrunk, steps=700,
)(lambda: normflows_coupling(8, 6, 64, swap=False))  # fmt: skip


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


flow(
    "freia-planted-half-8", "affine coupling", "table",
    defect="nets that compute in float16", plant=half_nets, steps=700,
)(lambda: freia("GLOWCouplingBlock", 8, 8, mlp()))  # fmt: skip


# ---- inverses


def few_iterations(view: View) -> View:
    for module in view.modules():
        if type(module).__name__ == "IResNetLayer":
            module.fixed_point_iterations = 3
    return view


flow(
    "freia-planted-solver-8", "residual", "table",
    defect="the fixed point of the inverse is left after three iterations", plant=few_iterations, steps=200, cost=200,
)(lambda: freia_residual(8, 2))  # fmt: skip


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


flow(
    "freia-planted-dropped-64", "multi-scale, affine coupling", "wide table",
    defect="half of the latents are dropped", plant=lambda view: DropsLatents(view.model, view.size), steps=400,
)(lambda: freia("GLOWCouplingBlock", 64, 4, mlp(128)))  # fmt: skip


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


flow(
    "bilip-planted-dropout-8", "affine coupling", "table",
    defect="dropout that is never switched off", plant=dropout, steps=700,
)(lambda: real_nvp(8, blocks=6))  # fmt: skip


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


flow(
    "pyro-planted-order-8", "affine coupling", "table",
    defect="a permutation whose inverse is another one", plant=swapped, steps=700,
)(lambda: Pyro(pyro_parts(8, 4, 64, "affine"), 8))  # fmt: skip


def huge_scale(view: View) -> View:
    """The last block's log-scales times 30: what a wrong unit or a lost clamp does."""
    block = [m for m in view.modules() if type(m).__name__ == "MADE"][-1]
    block.final_layer.weight.data *= 30
    block.final_layer.bias.data *= 30
    return view


flow(
    "nflows-planted-scale-8", "autoregressive", "table",
    defect="weights of one block times 30", plant=huge_scale, steps=700,
)(lambda: nflows_maf(8, 3, 64))  # fmt: skip
