r"""Activations that know their Lipschitz constant.

`make("relu")` builds one by name; `facts(module)` says what is proved about a module, for ours and for `torch.nn`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.bounds import Box, as_float64
from bilip.errors import InputError

__all__ = ["Facts", "ScaledSwish", "facts", "make"]

# sup of d/dx [x sigmoid(x)] is 1.09983932..., attained at x = 2.3993572...; its minimum value is -0.27846454...,
# at x = -1.27846454...: both rounded outward in the last digit.
SWISH_LIPSCHITZ = 1.0998394
SWISH_ARGMIN, SWISH_MIN = -1.2784645427610738, -0.27846454276107385
# sup of d/dx [x Phi(x)] is Phi(sqrt 2) + sqrt 2 phi(sqrt 2) = 1.12890415...; minimum -0.16997120... at -0.75179152....
GELU_LIPSCHITZ = 1.1289042
GELU_ARGMIN, GELU_MIN = -0.7517915246935645, -0.16997120747990370


class ScaledSwish(nn.Module):
    r"""The activation of residual flows, $x \, \sigma(\beta x) / 1.1$ with a learned $\beta = \mathrm{softplus}(b) > 0$.

    Its derivative does not depend on the scale of $\beta$, so $\mathrm{Lip} \le 1.09984 / 1.1 < 1$ for every $\beta$.

    Reference: Chen et al., *Residual Flows for Invertible Generative Modeling*, 2019.

    Example:
        >>> act = ScaledSwish()
        >>> facts(act).lipschitz <= 1
        True
    """

    def __init__(self, beta: float = 0.5) -> None:
        super().__init__()
        self.raw_beta = nn.Parameter(torch.tensor(float(beta)))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x * F.softplus(self.raw_beta)) / 1.1


@dataclass(frozen=True)
class Facts:
    """What is proved about an activation: its Lipschitz constant and how it maps an interval."""

    lipschitz: float
    interval: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def enclose(self, box: Box) -> Box:
        """The image of a box."""
        low, high = self.interval(box.low, box.high)
        # Relative to the value, and to the input: GELU and swish cancel far on the left.
        sizes = (
            torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0, 0.0) for a, b in ((low, high), (box.low, box.high))
        )
        return Box.outward(low, high, 1e-14 * next(sizes) + 1e-15 * next(sizes))


def _monotone(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda low, high: (function(low), function(high))


def _valley(function: Callable[[Tensor], Tensor], argmin: float, minimum: float):
    """A function that falls to one minimum, then rises, and tends to zero on the far left."""

    def interval(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        at_low, at_high = function(low).nan_to_num(0.0), function(high).nan_to_num(0.0, INF)
        inside = (low <= argmin) & (high >= argmin)
        return torch.where(inside, minimum, torch.minimum(at_low, at_high)), torch.maximum(at_low, at_high)

    return interval


INF = math.inf


def _softplus(module: nn.Softplus) -> Facts | None:
    if not (module.threshold >= 15 and module.beta > 0):
        return None  # torch switches to the identity at the threshold: a low one makes a jump that is no rounding
    jump = math.exp(-module.threshold) / module.beta  # torch drops this much above the threshold

    def interval(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        exact = [torch.logaddexp(v * module.beta, v.new_zeros(())) / module.beta for v in (low, high)]
        return (exact[0] - jump).clamp_min(0.0), exact[1]

    return Facts(1.0, interval)


def _scaled_swish(module: ScaledSwish) -> Facts:
    beta = float(F.softplus(as_float64(module.raw_beta)))
    return Facts(
        SWISH_LIPSCHITZ / 1.1,
        _valley(lambda v: v * torch.sigmoid(beta * v) / 1.1, SWISH_ARGMIN / beta, SWISH_MIN / beta / 1.1),
    )


def _gelu(module: nn.GELU) -> Facts | None:
    return Facts(GELU_LIPSCHITZ, _valley(F.gelu, GELU_ARGMIN, GELU_MIN)) if module.approximate == "none" else None


def _leaky(module: nn.LeakyReLU) -> Facts | None:
    slope = module.negative_slope
    return Facts(max(1.0, slope), _monotone(lambda v: F.leaky_relu(v, slope))) if slope >= 0 else None


def _elu(module: nn.ELU) -> Facts | None:
    alpha = module.alpha
    return Facts(max(1.0, alpha), _monotone(lambda v: F.elu(v, alpha))) if alpha >= 0 else None


_FACTS: dict[type[nn.Module], Callable[..., Facts | None]] = {
    nn.Identity: lambda _: Facts(1.0, _monotone(lambda v: v)),
    nn.ReLU: lambda _: Facts(1.0, _monotone(F.relu)),
    nn.LeakyReLU: _leaky,
    nn.ELU: _elu,
    nn.Tanh: lambda _: Facts(1.0, _monotone(torch.tanh)),
    nn.Sigmoid: lambda _: Facts(0.25, _monotone(torch.sigmoid)),
    nn.Softplus: _softplus,
    nn.SiLU: lambda _: Facts(SWISH_LIPSCHITZ, _valley(F.silu, SWISH_ARGMIN, SWISH_MIN)),
    nn.GELU: _gelu,
    ScaledSwish: _scaled_swish,
}

_NAMES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "swish": nn.SiLU,
    "scaled_swish": ScaledSwish,
    "gelu": nn.GELU,
}


def facts(module: nn.Module) -> Facts | None:
    """What is proved about an activation module, or `None` for one that is not known here."""
    known = _FACTS.get(type(module))
    return known(module) if known else None


def make(name: str) -> nn.Module:
    """Build an activation by name.

    Example:
        >>> make("elu")
        ELU(alpha=1.0)
    """
    if name not in _NAMES:
        raise InputError(f"activation={name!r} is not known. Choose one of: {', '.join(_NAMES)}.")
    return _NAMES[name]()
