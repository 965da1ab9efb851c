r"""Scale functions $g > 0$ of affine coupling, as values that know their own suprema.

A bound of a block is read off its scale: `scale.suprema(low, high)` gives the logs of the suprema of $g$, $|g'|$,
$1/g$ and $|(1/g)'|$ on an interval of the raw scale $s$, which are the paper's $c_g$, $c_{g'}$, $c_{1/g}$ and
$c_{(1/g)'}$.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bilip.bounds import EPS, TINY, Box
from bilip.errors import InputError
from bilip.nets.readable import as_born

__all__ = [
    "EXP",
    "HALF_SIGMOID",
    "SIGMOID",
    "ExpScale",
    "Scale",
    "SigmoidScale",
    "Suprema",
    "TanhExpScale",
    "scale_from",
]

UP = 1 + 1e-13


def _check_eps(eps: float) -> float:
    if not 0 <= eps < math.inf:
        raise InputError(f"a scale floored at {eps} is not positive: expected a number >= 0.")
    return float(eps)


class Suprema(NamedTuple):
    """Entry by entry: logs of the suprema of g, |g'|, 1/g and |(1/g)'| on an interval, rounded up."""

    value: Tensor
    slope: Tensor
    reciprocal: Tensor
    reciprocal_slope: Tensor

    @classmethod
    def up(cls, *logs: Tensor) -> Suprema:
        """The logs, each rounded up."""
        return cls(*(log + 1e-13 * (1 + log.abs()).nan_to_num(0.0, 0.0, 0.0) for log in logs))


class Scale(ABC):
    """A positive, increasing function g of the raw scale.

    A subclass that overrides it states `suprema` and `enclose` anew.
    """

    proof_methods: ClassVar[tuple[str, ...]] = ("suprema", "enclose")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        as_born(cls)

    @abstractmethod
    def __call__(self, s: Tensor) -> Tensor:
        """g(s)."""

    @abstractmethod
    def log(self, s: Tensor) -> Tensor:
        """log g(s), accurate where g(s) underflows."""

    def with_log(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """g(s) and log g(s)."""
        return self(s), self.log(s)

    @abstractmethod
    def suprema(self, low: Tensor, high: Tensor) -> Suprema:
        """What the bounds need, on [low, high] in float64."""

    @abstractmethod
    def floored(self, eps: float) -> Scale:
        """The function g + eps."""

    def enclose(self, box: Box) -> Box:
        """The interval of g over a box of raw scales."""
        ends = (self(box.low).nan_to_num(0.0), self(box.high).nan_to_num(math.inf, math.inf))
        # An exponent is rounded relative to itself, and so is the value relative to the exponent.
        low, high = (UP + 4 * EPS * end.log().abs().nan_to_num(0.0, 0.0) for end in ends)
        # What underflows is positive all the same.
        return Box((ends[0] / low - self._lost()).clamp_min(0.0), ends[1] * high + self._lost())

    def _lost(self) -> float:
        """What g may lose to underflow."""
        return TINY

    def spec(self) -> dict[str, float | str]:
        """Class and numbers, for a JSON config; `scale_from` reads it back."""
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class SigmoidScale(Scale):
    r"""$g(s) = \text{low} + (\text{high} - \text{low})\,\sigma(s + \text{shift})$, onto the open interval (low, high).

    Example:
        >>> SIGMOID(torch.tensor(-2.0)), HALF_SIGMOID(torch.tensor(-2.0))
        (tensor(0.5000), tensor(0.7500))
    """

    low: float = 0.0
    high: float = 1.0
    shift: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high < math.inf:
            raise InputError(f"SigmoidScale(low={self.low}, high={self.high}): expected 0 <= low < high, both finite.")

    def __call__(self, s: Tensor) -> Tensor:
        return self._value(self._shifted(s))

    def log(self, s: Tensor) -> Tensor:
        return self(s).log() if self.low else self._log(self._shifted(s))

    def with_log(self, s: Tensor) -> tuple[Tensor, Tensor]:
        v = self._shifted(s)
        value = self._value(v)
        return value, value.log() if self.low else self._log(v)

    def _shifted(self, s: Tensor) -> Tensor:
        return s + self.shift if self.shift else s

    def _value(self, v: Tensor) -> Tensor:
        gate = torch.sigmoid(v)
        width = self.high - self.low
        if width != 1:
            gate = gate * width
        return gate + self.low if self.low else gate

    def _log(self, v: Tensor) -> Tensor:
        log = F.logsigmoid(v)
        return log + math.log(self.high) if self.high != 1 else log

    def suprema(self, low: Tensor, high: Tensor) -> Suprema:
        width = self.high - self.low
        a, b = low + self.shift, high + self.shift

        def log_slope(v: Tensor) -> Tensor:
            return math.log(width) + F.logsigmoid(v) + F.logsigmoid(-v)

        if self.low:
            # With u = sigmoid: |(1/g)'| = w u (1 - u) / (low + w u)^2 peaks at u = low / (w + 2 low).
            u = self.low / (width + 2 * self.low)
            v = torch.full_like(a, math.log(u / (1 - u))).clamp(a, b)
            reciprocal = -(self.low + width * torch.sigmoid(a)).log()
            reciprocal_slope = log_slope(v) - 2 * (self.low + width * torch.sigmoid(v)).log()
        else:  # 1/g = (1 + e^-a) / w, convex and falling
            reciprocal, reciprocal_slope = -F.logsigmoid(a) - math.log(width), -a - math.log(width)
        # The sigmoid itself may underflow where its product with a large width does not.
        value = F.logsigmoid(b) + math.log(width)
        if self.low:
            value = torch.logaddexp(value, torch.full_like(value, math.log(self.low)))
        return Suprema.up(value, log_slope(torch.zeros_like(a).clamp(a, b)), reciprocal, reciprocal_slope)

    def _lost(self) -> float:
        return TINY * max(1.0, self.high - self.low)

    def floored(self, eps: float) -> SigmoidScale:
        """The function g + eps: the same onto (low + eps, high + eps)."""
        return replace(self, low=self.low + _check_eps(eps), high=self.high + eps)


@dataclass(frozen=True)
class ExpScale(Scale):
    r"""$g(s) = e^s + \text{floor}$."""

    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_eps(self.floor)

    def __call__(self, s: Tensor) -> Tensor:
        return s.exp() + self.floor if self.floor else s.exp()

    def log(self, s: Tensor) -> Tensor:
        return self(s).log() if self.floor else s

    def suprema(self, low: Tensor, high: Tensor) -> Suprema:
        if not self.floor:
            return Suprema.up(high, high, -low, -low)
        floor = torch.full_like(low, math.log(self.floor))
        # |(1/g)'| = e^s / (e^s + floor)^2 rises until e^s = floor, then falls.
        peak = floor.clamp(low, high)
        return Suprema.up(
            torch.logaddexp(high, floor), high, -torch.logaddexp(low, floor), peak - 2 * torch.logaddexp(peak, floor)
        )

    def floored(self, eps: float) -> ExpScale:
        """The function g + eps."""
        return ExpScale(self.floor + _check_eps(eps))


@dataclass(frozen=True)
class TanhExpScale(Scale):
    r"""$g(s) = \exp(\text{clamp} \cdot \tanh s) + \text{floor}$, onto $(e^{-c}, e^{c})$ + floor, as in RealNVP.

    Example:
        >>> g = TanhExpScale(clamp=2.0)
        >>> [round(float(v), 3) for v in (g(torch.tensor(-9.0)), g(torch.tensor(9.0)))]
        [0.135, 7.389]
    """

    clamp: float = 2.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clamp < 700:
            raise InputError(f"TanhExpScale(clamp={self.clamp}): expected a number between 0 and 700.")
        _check_eps(self.floor)

    def __call__(self, s: Tensor) -> Tensor:
        value = (self.clamp * torch.tanh(s)).exp()
        return value + self.floor if self.floor else value

    def log(self, s: Tensor) -> Tensor:
        return self(s).log() if self.floor else self.clamp * torch.tanh(s)

    def suprema(self, low: Tensor, high: Tensor) -> Suprema:
        c = self.clamp
        # With u = tanh s: c (1 - u^2) e^{cu} peaks at u = (sqrt(1 + c^2) - 1) / c, c (1 - u^2) e^{-cu} at minus that.
        peak = math.atanh((math.sqrt(1 + c * c) - 1) / c)

        def log_slope(sign: int) -> Tensor:
            v = torch.full_like(low, sign * peak).clamp(low, high)
            log_cosh = v.abs() + F.softplus(-2 * v.abs()) - math.log(2)
            return math.log(c) - 2 * log_cosh + sign * c * torch.tanh(v)

        value, reciprocal = c * torch.tanh(high), -c * torch.tanh(low)
        slope, reciprocal_slope = log_slope(1), log_slope(-1)
        if self.floor:
            floor = torch.full_like(low, math.log(self.floor))
            value, reciprocal = torch.logaddexp(value, floor), -torch.logaddexp(-reciprocal, floor)
            # A floor only shrinks |(1/g)'|; the smaller of two upper bounds is one.
            reciprocal_slope = torch.minimum(reciprocal_slope, slope + 2 * reciprocal)
        return Suprema.up(value, slope, reciprocal, reciprocal_slope)

    def floored(self, eps: float) -> TanhExpScale:
        """The function g + eps."""
        return replace(self, floor=self.floor + _check_eps(eps))


SIGMOID = SigmoidScale()
HALF_SIGMOID = SigmoidScale(low=0.5)
EXP = ExpScale()

_NAMED: dict[str, Scale] = {"sigmoid": SIGMOID, "half_sigmoid": HALF_SIGMOID, "exp": EXP, "tanh_exp": TanhExpScale()}
_KINDS = {kind.__name__: kind for kind in (SigmoidScale, ExpScale, TanhExpScale)}


def scale_from(value: Scale | str | dict) -> Scale:
    """A scale from itself, from a name (`sigmoid`, `half_sigmoid`, `exp`, `tanh_exp`), or from a `spec`.

    Example:
        >>> scale_from("half_sigmoid") == HALF_SIGMOID == scale_from(HALF_SIGMOID.spec())
        True
    """
    if isinstance(value, Scale):
        return value
    if isinstance(value, str) and value in _NAMED:
        return _NAMED[value]
    if isinstance(value, dict) and value.get("kind") in _KINDS:
        numbers = {name: number for name, number in value.items() if name != "kind"}
        try:
            return _KINDS[value["kind"]](**numbers)
        except TypeError as error:
            raise InputError(f"scale={value!r} does not fit {value['kind']} ({error}).") from error
    raise InputError(f"scale={value!r} is not known. Pass a Scale or one of: {', '.join(_NAMED)}.")
