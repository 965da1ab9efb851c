"""A fixed scale and shift for each entry, for proofs about elementwise affine transforms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bilip.blocks import Bijection
from bilip.bounds import Box, as_float64, log_of
from bilip.errors import UnknownLipschitz

__all__ = ["ShiftedDiagonal"]


class ShiftedDiagonal(Bijection):
    r"""$F(x) = a \odot x + b$ with constants: $\mathrm{Lip}(F) = \max |a|$, $\mathrm{Lip}(F^{-1}) = 1 / \min |a|$.

    Args:
        shift: b, a number or a tensor without a batch.
        scale: a, likewise, without zeros.

    Example:
        >>> ShiftedDiagonal(1.0, torch.tensor([2.0, 0.5])).bounds()
        BiLipschitz(forward=2, inverse=2, domain=Box(-inf, inf))
    """

    a: Tensor
    b: Tensor

    def __init__(self, shift: float | Tensor, scale: float | Tensor) -> None:
        super().__init__()
        self.register_buffer("a", as_float64(scale).detach())
        self.register_buffer("b", as_float64(shift).detach())

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        self._fitting(tuple(x.shape[1:]))
        return self.b.to(x) + self.a.to(x) * x

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return (z - self.b.to(z)) / self.a.to(z)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self(x), self.a.abs().log().to(x).expand(x.shape).flatten(1).sum(1)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return log_of(float(self._fitting(box.shape).abs().max()))

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return math.inf if bool((self._fitting(box.shape) == 0).any()) else log_of(float((1 / self.a).abs().max()))

    def _fitting(self, shape: tuple[int, ...]) -> Tensor:
        for value in (self.a, self.b):
            if shape and (value.ndim > len(shape) or torch.broadcast_shapes(value.shape, shape) != torch.Size(shape)):
                raise UnknownLipschitz(
                    f"an affine transform with tensors of shape {tuple(value.shape)} is not one map for all samples of "
                    f"shape {shape}, so it has no bound here."
                )
        return self.a

    def interval(self, box: Box, context: Box | None = None) -> Box:
        a = self._fitting(box.shape)
        ends = torch.stack(torch.broadcast_tensors(box.low * a, box.high * a)).nan_to_num(0.0, math.inf, -math.inf)
        low, high = ends.amin(0), ends.amax(0)
        return Box.outward(low + self.b, high + self.b, _rounding(low, high, self.b))

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        a = self._fitting(box.shape)
        low, high = box.low - self.b, box.high - self.b
        ends = torch.stack(torch.broadcast_tensors(low / a, high / a))
        return Box.outward(ends.amin(0), ends.amax(0), _rounding(low, high, self.b) / a.abs())


def _rounding(*values: Tensor) -> Tensor:
    return sum((1e-15 * value.abs().nan_to_num(0.0, 0.0, 0.0) for value in values), torch.zeros(()))  # type: ignore[return-value]
