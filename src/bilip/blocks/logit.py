"""From the unit interval to the real line."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bilip.blocks.bijection import Bijection, Reach, Step
from bilip.bounds import EPS, Box, log_of
from bilip.errors import InputError, UnknownLipschitz

__all__ = ["Logit"]


class Logit(Bijection):
    r"""$F(x) = \mathrm{logit}(\alpha + (1 - 2\alpha) x)$ for $x \in [0, 1]$; NaN outside the interval where the logit exists.

    With $\alpha > 0$ it is bi-Lipschitz on $[0, 1]$; its inverse is on the whole line.

    Args:
        alpha: How far the ends of the unit interval are moved inward, in [0, 1/2).

    Example:
        >>> block = Logit(alpha=0.05)
        >>> block.bounds().domain
        Box(0, 1)
    """

    def __init__(self, alpha: float = 0.05) -> None:
        super().__init__()
        if not 0 <= alpha < 0.5:
            raise InputError(f"Logit(alpha={alpha}): expected a number in [0, 0.5).")
        self.alpha = float(alpha)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        self.check(x)
        return torch.logit(self.alpha + (1 - 2 * self.alpha) * x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        self.check(z)
        return (torch.sigmoid(z) - self.alpha) / (1 - 2 * self.alpha)

    def _log_det(self, z: Tensor) -> Tensor:
        return (math.log1p(-2 * self.alpha) - F.logsigmoid(z) - F.logsigmoid(-z)).flatten(1).sum(1)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = self(x)
        return z, self._log_det(z)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.inverse(z), -self._log_det(z)

    def natural_domain(self) -> Box:
        return Box(0.0, 1.0)

    def advance(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        edge = self.alpha / self._width()
        if bool((reach.box.low < -edge).any() or (reach.box.high > 1 + edge).any()):
            raise InputError(
                f"Logit(alpha={self.alpha:g}) is defined on [0, 1]; the box {reach.box} reaches outside. Pass "
                "bilip.Box(0, 1)."
            )
        return super().advance(reach, context, formula, name)

    def _width(self) -> float:
        if not 0 <= self.alpha < 0.5:  # it can be set later
            raise UnknownLipschitz(
                f"Logit has alpha={self.alpha}, not a number in [0, 0.5), so no bound can be proved for it."
            )
        return 1 - 2 * self.alpha

    def _probabilities(self, box: Box) -> Box:
        return Box(*((self.alpha + self._width() * end).clamp(0.0, 1.0) for end in (box.low, box.high)))

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        # (1 - 2a) / (p (1 - p)) is convex, so largest at an end.
        p = self._probabilities(box)
        narrowest = min(float((end * (1 - end)).min()) for end in (p.low, p.high)) - 8 * EPS  # p itself is rounded
        return log_of(self._width() / narrowest * (1 + 1e-13)) if narrowest > 0 else math.inf

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        # sigmoid' peaks at 0.
        nearest = torch.zeros_like(box.low).clamp(box.low, box.high)
        # In logs, because far out the slope is positive but below every number of float64.
        log = float((F.logsigmoid(nearest) + F.logsigmoid(-nearest)).max()) - math.log(self._width())
        return log + 1e-13 * (1 + abs(log))

    def interval(self, box: Box, context: Box | None = None) -> Box:
        p = self._probabilities(box)
        # A relative error of p moves the logit by that error over 1 - p.
        error = 1e-15 * (1 + 1 / (1 - p.high).clamp_min(1e-300) + 1 / p.low.clamp_min(1e-300))
        return Box.outward(torch.logit(p.low), torch.logit(p.high), error)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        width = self._width()
        low, high = ((torch.sigmoid(end) - self.alpha) / width for end in (box.low, box.high))
        return Box.outward(low, high, 2e-15 / width)  # what rounding leaves of the difference is divided too

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}"
