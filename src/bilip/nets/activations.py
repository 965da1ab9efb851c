r"""Activations that know their Lipschitz constant.

`make("relu")` builds one by name; `facts(module)` says what is proved about a module, for ours and for `torch.nn`'s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.bounds import EPS, Box, as_float64, finite_size, log_of, norms
from bilip.errors import InputError
from bilip.nets.point import Point

__all__ = ["Facts", "ScaledSwish", "facts", "make"]

INF = math.inf
TINY = 1e-300  # more than rounding can lose below the normal range of float64
Shape = tuple[int, ...]

# sup of d/dx [x sigmoid(x)] is 1.09983932..., attained at x = 2.3993572...; its minimum value is -0.27846454...,
# at x = -1.27846454...: both rounded outward in the last digit.
SWISH_LIPSCHITZ = 1.0998394
SWISH_ARGMIN, SWISH_MIN = -1.2784645427610738, -0.27846454276107385
# sup of d/dx [x Phi(x)] is Phi(sqrt 2) + sqrt 2 phi(sqrt 2) = 1.12890415...; minimum -0.16997120... at -0.75179152....
GELU_LIPSCHITZ = 1.1289042
GELU_ARGMIN, GELU_MIN = -0.7517915246935645, -0.16997120747990370
# The same with tanh in place of erf: slope 1.12899306... at x = 1.41850400..., minimum -0.17004075... at -0.75246142....
GELU_TANH_LIPSCHITZ = 1.1289931
GELU_TANH_ARGMIN, GELU_TANH_MIN = -0.7524614220710163, -0.17004075057125407
# x tanh(softplus(x)): slope 1.08849816... at x = 1.49057117..., minimum -0.30884341... at -1.19243121....
MISH_LIPSCHITZ = 1.0884982
MISH_ARGMIN, MISH_MIN = -1.1924312145154952, -0.30884341301725042
# The slope of SELU just left of zero, 1.0507009873554805 * 1.6732632423543772.
SELU_LIPSCHITZ = 1.7580993408473771


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

    def beta(self) -> Tensor:
        r"""The $\beta$ that acts. Torch's softplus is the identity from its threshold on, which at 20, the default, is a jump of 2e-9."""
        return _beta(self.raw_beta)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x * self.beta()) / 1.1


def _beta(raw: Tensor) -> Tensor:
    return F.softplus(raw, threshold=40.0)


@dataclass(frozen=True)
class Facts:
    """What is proved about an activation, which acts entry by entry.

    The interval encloses the image of an interval; the value is one number for each entry, as accurate as float64 allows. They
    are different functions: the end of an enclosure is no value.

    Attributes:
        lipschitz: Its Lipschitz constant, rounded up.
        interval: The ends of the image of `[low, high]`, up to a few units in the last place.
        value: The function in float64, up to a few units in the last place of its value and of its input.
        excess: How far what torch computes may lie from the function beyond rounding, entry by entry; `None` for not at all.
        fresh: Whether the result is a tensor of its own.
        held: Whether the constant holds for all parameters, not only for the present ones.
    """

    lipschitz: float
    interval: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    value: Callable[[Tensor], Tensor]
    excess: Callable[[Tensor], Tensor] | None = None
    fresh: bool = True
    held: bool = True

    def log_lipschitz(
        self, shape: Shape | None = None, outputs: slice | None = None, inputs: slice | None = None
    ) -> float:
        """Log of the Lipschitz constant."""
        return log_of(self.lipschitz)

    def log_cap(self) -> float | None:
        """Log of a constant that no parameters exceed."""
        return log_of(self.lipschitz) if self.held else None

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        """The image of a box."""
        low, high = self.interval(box.low, box.high)
        # Relative to the value, and to the input: GELU and swish cancel far on the left.
        sizes = (finite_size(a, b) for a, b in ((low, high), (box.low, box.high)))
        return Box.outward(low, high, 1e-14 * next(sizes) + 1e-15 * next(sizes))

    def point(self, known: Point, context: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Point:
        """The image of a batch of values known up to an error."""
        found = Point(self.value(known.value), known.error)
        # The small factors go inside: a length may be beyond float64 where what rounding makes of it is not.
        own = found.share(16 * EPS) + known.share(4 * EPS) + TINY * math.sqrt(math.prod(known.value.shape[1:]))
        if self.excess is not None:
            own = own + norms(self.excess(known.value))
        return found.with_error((self.lipschitz * known.error + own) * (1 + 4 * EPS))

    def out_shape(self, shape: Shape | None) -> Shape | None:
        """The shape stays."""
        return shape


def _monotone(lipschitz: float, function: Callable[[Tensor], Tensor], **options: Any) -> Facts:
    return Facts(lipschitz, lambda low, high: (function(low), function(high)), function, **options)


def _valley(lipschitz: float, function: Callable[[Tensor], Tensor], argmin: float, minimum: float) -> Facts:
    """A function that falls to one minimum, then rises, and tends to zero on the far left."""

    def interval(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        at_low, at_high = function(low).nan_to_num(0.0), function(high).nan_to_num(0.0, INF)
        inside = (low <= argmin) & (high >= argmin)
        return torch.where(inside, minimum, torch.minimum(at_low, at_high)), torch.maximum(at_low, at_high)

    return Facts(lipschitz, interval, function)


def _softplus(module: nn.Softplus) -> Facts | None:
    beta, threshold = float(module.beta), float(module.threshold)
    if not (threshold >= 15 and 1e-300 <= beta < INF):
        return None  # torch switches to the identity at the threshold: a low one makes a jump that is no rounding
    jump = math.exp(-threshold) / beta * (1 + 4 * EPS)  # torch drops this much above the threshold

    def value(v: Tensor) -> Tensor:
        # v itself and not (v beta) / beta, which may overflow where the value does not.
        return v.clamp_min(0.0) + torch.log1p((-(v * beta).abs()).exp()) / beta

    def interval(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return (value(low) - jump).clamp_min(0.0), value(high)

    def excess(v: Tensor) -> Tensor:
        return jump * (v * beta > 0.99 * threshold).double()  # a lower dtype may switch a little earlier

    return Facts(1.0, interval, value, excess)


def _scaled_swish(module: ScaledSwish) -> Facts | None:
    beta = float(_beta(as_float64(module.raw_beta)))
    if not 1e-290 < beta < INF:
        return None
    return _valley(
        SWISH_LIPSCHITZ / 1.1, lambda v: v * torch.sigmoid(beta * v) / 1.1, SWISH_ARGMIN / beta, SWISH_MIN / beta / 1.1
    )


def _gelu(module: nn.GELU) -> Facts | None:
    if module.approximate == "none":
        return _valley(GELU_LIPSCHITZ, F.gelu, GELU_ARGMIN, GELU_MIN)
    if module.approximate == "tanh":
        function = functools.partial(F.gelu, approximate="tanh")
        return _valley(GELU_TANH_LIPSCHITZ, function, GELU_TANH_ARGMIN, GELU_TANH_MIN)
    return None


def _leaky(module: nn.LeakyReLU) -> Facts | None:
    slope = float(module.negative_slope)
    return _monotone(max(1.0, slope), lambda v: F.leaky_relu(v, slope)) if 0 <= slope < INF else None


def _elu(module: nn.ELU) -> Facts | None:
    alpha = float(module.alpha)
    return _monotone(max(1.0, alpha), lambda v: F.elu(v, alpha)) if 0 <= alpha < INF else None


def _celu(module: nn.CELU) -> Facts | None:
    alpha = float(module.alpha)

    def function(v: Tensor) -> Tensor:
        scaled = v / alpha  # expm1(u) is u (1 + u / 2 + ...), and u may underflow where the value does not
        return torch.where(scaled > -1e-30, v, alpha * scaled.clamp_max(0.0).expm1())

    return _monotone(1.0, function) if 1e-290 < alpha < INF else None


def _hardtanh(module: nn.Hardtanh) -> Facts | None:
    low, high = float(module.min_val), float(module.max_val)
    return _monotone(1.0, lambda v: v.clamp(low, high)) if -INF < low < high < INF else None


def _prelu(module: nn.PReLU) -> Facts | None:
    slopes = as_float64(module.weight)
    if not torch.isfinite(slopes).all():
        return None

    def spread(dims: int) -> Tensor:  # one slope for each channel, the first dimension of a sample
        return slopes if len(slopes) == 1 else slopes.view(-1, *[1] * (dims - 1))

    def act(v: Tensor, slope: Tensor) -> Tensor:
        return torch.where(v > 0, v, slope.to(v) * v)

    def interval(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        if not low.ndim and len(slopes) > 1:  # any shape, so any channel
            return torch.full_like(low, -INF), torch.full_like(high, INF)
        ends = torch.stack([act(end, spread(low.ndim)).nan_to_num(0.0, INF, -INF) for end in (low, high)])
        turn = (low < 0) & (high > 0)  # with a slope below zero the least value is at 0
        return torch.where(turn, ends.amin(0).clamp_max(0.0), ends.amin(0)), ends.amax(0)

    def value(v: Tensor) -> Tensor:
        return act(v, spread(v.ndim - 1))

    return Facts(max(1.0, float(slopes.abs().max())), interval, value, held=False)


def _hardswish() -> Facts:
    # The slope is (2 x + 3) / 6 between -3 and 3. Torch's kernels for GPUs multiply by 1/6 rounded to float32, in float64 too.
    exact, off = _valley(1.5 * (1 + 4e-8), lambda v: v * ((v + 3).clamp(0.0, 6.0) / 6), -1.5, -0.375), 4e-8

    def interval(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        ends = exact.interval(low, high)
        return tuple(end + side * off * end.abs().nan_to_num(0.0, 0.0) for end, side in zip(ends, (-1, 1), strict=True))  # type: ignore[return-value]

    return Facts(exact.lipschitz, interval, exact.value, lambda v: off * exact.value(v))


def _dropout(module: nn.Module) -> Facts | None:
    if module.training and module.p:
        return None  # another map at every call
    return _monotone(1.0, lambda v: v, fresh=False)


def _softsign(v: Tensor) -> Tensor:
    return torch.where(v.isinf(), v.sign(), v / (1 + v.abs()))


_FACTS: dict[type[nn.Module], Callable[..., Facts | None]] = {
    nn.Identity: lambda _: _monotone(1.0, lambda v: v, fresh=False),
    nn.ReLU: lambda _: _monotone(1.0, F.relu),
    nn.ReLU6: _hardtanh,  # torch reads the limits at each call
    nn.LeakyReLU: _leaky,
    nn.PReLU: _prelu,
    nn.ELU: _elu,
    nn.SELU: lambda _: _monotone(SELU_LIPSCHITZ, F.selu),
    nn.CELU: _celu,
    nn.Tanh: lambda _: _monotone(1.0, torch.tanh),
    nn.Hardtanh: _hardtanh,
    nn.Sigmoid: lambda _: _monotone(0.25, torch.sigmoid),
    nn.LogSigmoid: lambda _: _monotone(1.0, F.logsigmoid),
    nn.Softsign: lambda _: _monotone(1.0, _softsign),
    nn.Softplus: _softplus,
    nn.SiLU: lambda _: _valley(SWISH_LIPSCHITZ, F.silu, SWISH_ARGMIN, SWISH_MIN),
    nn.Hardswish: lambda _: _hardswish(),
    nn.Mish: lambda _: _valley(MISH_LIPSCHITZ, F.mish, MISH_ARGMIN, MISH_MIN),
    nn.GELU: _gelu,
    ScaledSwish: _scaled_swish,
    **dict.fromkeys(
        (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout), _dropout
    ),
}

KNOWN = tuple(_FACTS)

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
    """What is proved about the class and the parameters of an activation module, or `None` for one that is not known here.

    Whether the module is what its class says is decided by `bilip.nets.read.read`.
    """
    known = next((_FACTS[kind] for kind in type(module).__mro__ if kind in _FACTS), None)
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
