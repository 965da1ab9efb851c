"""Scale functions of other libraries: exponentials of a bounded, odd, increasing function of the raw scale."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip.blocks.scale import Scale, Suprema
from bilip.errors import BilipError

__all__ = ["AtanExpScale", "SoftclipExpScale"]


class _OddExpScale(Scale):
    r"""$g = e^{h}$ with an odd, increasing $h$.

    $|g'| = h' e^{h}$ rises up to one peak and falls after it; $|(1/g)'| = h' e^{-h}$ is its mirror image.
    """

    @abstractmethod
    def log(self, s: Tensor) -> Tensor:
        """The function h."""

    @abstractmethod
    def log_derivative(self, s: Tensor) -> Tensor:
        """Log h'(s)."""

    @property
    @abstractmethod
    def peak(self) -> float:
        """Where |g'| is largest."""

    def __call__(self, s: Tensor) -> Tensor:
        return self.log(s).exp()

    def suprema(self, low: Tensor, high: Tensor) -> Suprema:
        up = torch.full_like(low, self.peak).clamp(low, high)
        down = torch.full_like(low, -self.peak).clamp(low, high)
        slope = self.log_derivative(up) + self.log(up)
        reciprocal_slope = self.log_derivative(down) - self.log(down)
        return Suprema.up(self.log(high), slope, -self.log(low), reciprocal_slope)

    def floored(self, eps: float) -> Scale:
        """Not needed by any library."""
        raise BilipError(f"{type(self).__name__} has no floor.")


@dataclass(frozen=True)
class AtanExpScale(_OddExpScale):
    r"""$g(s) = \exp(a \arctan s)$: FrEIA's soft clamp, with $a = 0.636 \cdot \text{clamp}$.

    Example:
        >>> g = AtanExpScale(0.636 * 2)
        >>> [round(float(g(torch.tensor(v))), 3) for v in (-1e9, 0.0, 1e9)]
        [0.136, 1.0, 7.375]
    """

    factor: float

    def log(self, s: Tensor) -> Tensor:
        return self.factor * torch.atan(s)

    def log_derivative(self, s: Tensor) -> Tensor:
        # Beyond 1e100, where the square overflows sooner or later, s^2 and 1 + s^2 are one number.
        log = torch.where(s.abs() > 1e100, 2 * s.abs().log(), torch.log1p(s.square()))
        return math.log(self.factor) - log

    @property
    def peak(self) -> float:
        return self.factor / 2


@dataclass(frozen=True)
class SoftclipExpScale(_OddExpScale):
    r"""$g(s) = \exp(s / (1 + |s| / c))$, onto $(e^{-c}, e^{c})$: zuko's, with $c = -\log \text{slope}$.

    Example:
        >>> g = SoftclipExpScale(-math.log(1e-3))
        >>> [round(float(g(torch.tensor(v))), 3) for v in (-float("inf"), 0.0, float("inf"))]
        [0.001, 1.0, 1000.0]
    """

    bound: float

    def log(self, s: Tensor) -> Tensor:
        return torch.where(s.isinf(), self.bound * s.sign(), s / (1 + s.abs() / self.bound))

    def log_derivative(self, s: Tensor) -> Tensor:
        return -2 * torch.log1p(s.abs() / self.bound)

    @property
    def peak(self) -> float:
        return max(0.0, self.bound * self.bound / 2 - self.bound)
