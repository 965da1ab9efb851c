"""Each library by its own interface: encode, decode, base. Nothing here goes through bilip's adapters.

A view is a module, so that `copy.deepcopy(view).double()` is a float64 copy of all that it computes with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Bilip", "FrEIA", "FrEIAGraph", "Multiscale", "NFlows", "Normflows", "Pyro", "Step", "View", "Zuko"]

Context = Tensor | None


@dataclass(frozen=True)
class Step:
    """One block: `forward(x, context)` gives the image and its log-determinant, `inverse(y, context)` what came in."""

    forward: Callable[[Tensor, Context], tuple[Tensor, Tensor]]
    inverse: Callable[[Tensor, Context], Tensor]


class View(nn.Module):
    """A model of some library, from data to latents.

    Attributes:
        library: Its name.
        random: Whether the log-determinant is an estimate that draws random numbers.
    """

    library = ""

    def __init__(self, model: nn.Module, size: tuple[int, ...], *, random: bool = False) -> None:
        super().__init__()
        self.model, self.size, self.random = model, size, random

    def steps(self) -> list[Step]:
        """The blocks, from data to latents; one if the library shows no more."""
        raise NotImplementedError

    def encode(self, x: Tensor, context: Context = None) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(x), dtype=x.dtype)
        for step in self.steps():
            x, log_det = step.forward(x, context)
            total = total + log_det
        return x, total

    def decode(self, z: Tensor, context: Context = None) -> Tensor:
        for step in reversed(self.steps()):
            z = step.inverse(z, context)
        return z

    def base_log_prob(self, z: Tensor, context: Context = None) -> Tensor:
        return -0.5 * (z.flatten(1).square().sum(1) + z[0].numel() * math.log(2 * math.pi))

    def base_sample(self, count: int, context: Context = None) -> Tensor:
        return torch.randn(count, math.prod(self.size)).reshape(count, *self.size)

    def log_prob(self, x: Tensor, context: Context = None) -> Tensor:
        z, log_det = self.encode(x, context)
        return self.base_log_prob(z, context) + log_det

    def settle(self) -> None:
        """Called before the model is copied."""

    def audited(self) -> Any:
        """What a user hands to `bilip.audit`."""
        return self.model


class NFlows(View):
    library = "nflows"

    def steps(self) -> list[Step]:
        top = self.model._transform
        parts = getattr(top, "_transforms", [top]) if type(top).__name__ == "CompositeTransform" else [top]
        return [Step(lambda x, c, t=t: t(x, context=c), lambda z, c, t=t: t.inverse(z, context=c)[0]) for t in parts]

    def base_log_prob(self, z: Tensor, context: Context = None) -> Tensor:
        return self.model._distribution.log_prob(z, context=context)

    def base_sample(self, count: int, context: Context = None) -> Tensor:
        return self.model._distribution.sample(count)


class FrEIA(View):
    """A `SequenceINN`; FrEIA has no base, so that users put a standard normal beside it."""

    library = "FrEIA"

    def steps(self) -> list[Step]:
        def call(module: Any, given: Any, x: Tensor, c: Context, rev: bool) -> tuple[Tensor, Tensor]:
            more = {} if given is None else {"c": [c]}
            if type(module).__name__ == "IResNetLayer" and not rev and not torch.is_grad_enabled():
                with torch.enable_grad():  # its log-determinant needs gradients of its own
                    (y,), log_det = module((x.detach().requires_grad_(True),), rev=rev, jac=True, **more)
                return y.detach(), log_det.detach()
            if type(module).__name__ == "IResNetLayer" and not rev and not x.requires_grad:
                x = x.detach().requires_grad_(True)
            (y,), log_det = module((x,), rev=rev, jac=not rev, **more)
            return y, torch.as_tensor(0.0 if log_det is None else log_det, dtype=x.dtype).expand(len(x))

        model: Any = self.model
        return [
            Step(
                lambda x, c, m=m, g=given: call(m, g, x, c, False), lambda z, c, m=m, g=given: call(m, g, z, c, True)[0]
            )
            for m, given in zip(model.module_list, model.conditions, strict=True)
        ]

    def audited(self) -> Any:
        import bilip

        return bilip.Flow(bilip.as_bijection(self.model), shape=self.size)


class FrEIAGraph(FrEIA):
    def steps(self) -> list[Step]:
        def call(x: Tensor, c: Context, rev: bool) -> tuple[Tensor, Tensor]:
            given = {} if c is None else {"c": [c]}
            y, log_det = self.model(x, rev=rev, jac=True, **given)
            return y, log_det

        return [Step(lambda x, c: call(x, c, False), lambda z, c: call(z, c, True)[0])]


class Normflows(View):
    library = "normflows"

    def __init__(self, model: nn.Module, size: tuple[int, ...], *, random: bool = False, given: bool = False) -> None:
        super().__init__(model, size, random=random)
        self.given = given

    def steps(self) -> list[Step]:
        def call(function: Any, x: Tensor, c: Context) -> tuple[Tensor, Tensor]:
            y, log_det = function(x, context=c) if self.given else function(x)
            return y, torch.as_tensor(log_det, dtype=x.dtype).expand(len(x))

        return [
            Step(lambda x, c, f=f: call(f.inverse, x, c), lambda z, c, f=f: call(f.forward, z, c)[0])
            for f in reversed(self.model.flows)
        ]

    def base_log_prob(self, z: Tensor, context: Context = None) -> Tensor:
        return self.model.q0.log_prob(z, context=context) if self.given else self.model.q0.log_prob(z)

    def base_sample(self, count: int, context: Context = None) -> Tensor:
        q0 = self.model.q0
        return (q0(count, context=context) if self.given else q0(count))[0]


class Multiscale(View):
    """A normflows `MultiscaleFlow`: its list of latents as one flat one."""

    library = "normflows"

    def _shapes(self) -> list[tuple[int, ...]]:
        return [tuple(q.shape) for q in self.model.q0]

    def _split(self, z: Tensor) -> list[Tensor]:
        shapes = self._shapes()
        parts = z.flatten(1).split([math.prod(s) for s in shapes], 1)
        return [p.reshape(len(z), *s) for p, s in zip(parts, shapes, strict=True)]

    def encode(self, x: Tensor, context: Context = None) -> tuple[Tensor, Tensor]:
        parts, log_det = self.model.inverse_and_log_det(x)
        return torch.cat([p.flatten(1) for p in parts], 1), log_det

    def decode(self, z: Tensor, context: Context = None) -> Tensor:
        return self.model.forward_and_log_det(self._split(z))[0]

    def steps(self) -> list[Step]:
        return [Step(self.encode, self.decode)]

    def base_log_prob(self, z: Tensor, context: Context = None) -> Tensor:
        return sum(q.log_prob(p) for q, p in zip(self.model.q0, self._split(z), strict=True))  # type: ignore[return-value]

    def base_sample(self, count: int, context: Context = None) -> Tensor:
        return torch.cat([q(count)[0].flatten(1) for q in self.model.q0], 1)


class Zuko(View):
    library = "zuko"

    def steps(self) -> list[Step]:
        top: Any = self.model.transform
        parts = top.transforms if hasattr(top, "transforms") else [top]

        def forward(t: Any, x: Tensor, c: Context) -> tuple[Tensor, Tensor]:
            y, log_det = t(c).call_and_ladj(x)
            return y, log_det.flatten(1).sum(1) if log_det.ndim > 1 else log_det

        return [Step(lambda x, c, t=t: forward(t, x, c), lambda z, c, t=t: t(c).inv(z)) for t in parts]

    def base_log_prob(self, z: Tensor, context: Context = None) -> Tensor:
        return self.model.base(None).log_prob(z)

    def base_sample(self, count: int, context: Context = None) -> Tensor:
        return self.model.base(None).sample((count,))


class Pyro(View):
    """Transforms of Pyro, from base to data, over a normal or a mixture; `parts` are kept in a list of modules, the rest beside it."""

    library = "pyro"

    def __init__(self, parts: list[Any], size: int, *, modes: Tensor | None = None, given: bool = False) -> None:
        super().__init__(nn.ModuleList([p for p in parts if isinstance(p, nn.Module)]), (size,))
        self.order: list[Any] = [next((k for k, m in enumerate(self.model) if m is p), p) for p in parts]
        self.given = given
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("modes", modes)

    def settle(self) -> None:
        for part in [*self._parts(), *self.modules()]:  # caches hold the last batch with its graph: not to be copied
            if hasattr(part, "_cached_x_y"):
                part._cached_x_y = (None, None)
            for name in [n for n in vars(part) if n.startswith("_cache") and isinstance(getattr(part, n), Tensor)]:
                setattr(part, name, None)

    def _parts(self) -> list[Any]:
        return [self.model[p] if isinstance(p, int) else p for p in self.order]

    def steps(self) -> list[Step]:
        def forward(t: Any, x: Tensor, c: Context) -> tuple[Tensor, Tensor]:
            t = t.condition(c) if hasattr(t, "condition") else t
            x = x.clone()  # Pyro's caches recognise tensors: here, as in its own log_prob, those of this inverse alone
            y = t.inv(x)
            log_det = t.log_abs_det_jacobian(y, x)
            return y.clone(), -(log_det.flatten(1).sum(1) if log_det.ndim > 1 else log_det)

        def inverse(t: Any, z: Tensor, c: Context) -> Tensor:
            t = t.condition(c) if hasattr(t, "condition") else t
            return t(z.clone())

        return [
            Step(lambda x, c, t=t: forward(t, x, c), lambda z, c, t=t: inverse(t, z, c))
            for t in reversed(self._parts())
        ]

    def base(self) -> Any:
        import pyro.distributions as dist
        from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

        if self.modes is None:
            return dist.Normal(self.mean, torch.ones_like(self.mean)).to_event(1)
        return MixtureSameFamily(
            Categorical(torch.ones_like(self.modes[:, 0])),
            Independent(Normal(self.modes, torch.ones_like(self.modes)), 1),
        )

    def base_log_prob(self, z: Tensor, context: Context = None) -> Tensor:
        return self.base().log_prob(z)

    def base_sample(self, count: int, context: Context = None) -> Tensor:
        return self.base().sample((count,))

    def audited(self) -> Any:
        import pyro.distributions as dist

        if self.given:
            return dist.conditional.ConditionalTransformedDistribution(self.base(), self._parts())
        return torch.distributions.TransformedDistribution(self.base(), self._parts())


class Bilip(View):
    """A `bilip.Flow`."""

    library = "bilip"

    def steps(self) -> list[Step]:
        top: Any = self.model.bijection
        parts = list(top) if hasattr(top, "__iter__") else [top]
        return [Step(lambda x, c, b=b: b.forward_and_log_det(x, c), lambda z, c, b=b: b.inverse(z, c)) for b in parts]

    def base_log_prob(self, z: Tensor, context: Context = None) -> Tensor:
        return self.model.base_log_prob(z)

    def base_sample(self, count: int, context: Context = None) -> Tensor:
        return self.model.sample_base(count)
