"""Diagonal scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bilip.blocks.bijection import Bijection
from bilip.bounds import Box, as_float64, log_of
from bilip.errors import InputError

__all__ = ["DiagonalScaling"]


class DiagonalScaling(Bijection):
    r"""$F(x) = D x$ with a diagonal $D$ whose entries stay non-zero.

    Its constants are $\mathrm{Lip}(F) = \max |D_{ii}|$ and $\mathrm{Lip}(F^{-1}) = 1/\min |D_{ii}|$.

    Args:
        scale: The starting diagonal: a tensor of non-zero numbers in the shape of one sample, or one entry for each
            feature.
        dim: With one entry for each feature: the dimension of the batched input that holds the features.

    Example:
        >>> block = DiagonalScaling(torch.tensor([2.0, -0.1]))
        >>> block.bounds()
        BiLipschitz(forward=2, inverse=10, domain=Box(-inf, inf))
    """

    sign: Tensor

    def __init__(self, scale: Tensor, dim: int | None = 1) -> None:
        super().__init__()
        scale = torch.as_tensor(scale)
        scale = scale if scale.is_floating_point() else scale.to(torch.get_default_dtype())
        if scale.ndim == 0 or not torch.isfinite(scale).all() or bool((scale == 0).any()):
            raise InputError("DiagonalScaling: expected a tensor of finite, non-zero numbers, one for each feature.")
        self.dim = dim if scale.ndim == 1 else None
        self.log_scale = nn.Parameter(scale.detach().abs().log())
        self.register_buffer("sign", scale.detach().sign())

    def _diagonal(self, x: Tensor) -> Tensor:
        self.check(x)
        self.check_like(x, self.log_scale)
        diagonal = self.sign * self.log_scale.exp()
        if self.dim is None:
            if x.shape[1:] != diagonal.shape:
                raise InputError(
                    f"DiagonalScaling: expected samples of shape {tuple(diagonal.shape)}, got an input of "
                    f"shape {tuple(x.shape)}."
                )
            return diagonal
        self.check(x, len(diagonal), self.dim)
        shape = [1] * x.ndim
        shape[self.dim] = -1
        return diagonal.view(shape)

    def _log_det(self, x: Tensor) -> Tensor:
        count = math.prod(x.shape[1:]) // self.log_scale.numel()
        return (self.log_scale.sum() * count).expand(x.shape[0])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return x * self._diagonal(x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return z / self._diagonal(z)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self(x), self._log_det(x)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.inverse(z), -self._log_det(z)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return _up(float(as_float64(self.log_scale).max()))

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return _up(-float(as_float64(self.log_scale).min()))

    def _exact(self, box: Box) -> Tensor:
        diagonal = as_float64(self.sign) * as_float64(self.log_scale).exp()
        if self.dim is None:
            return diagonal
        shape = [1] * len(box.shape)
        axis = self.dim - 1 if self.dim > 0 else self.dim
        if box.shape[axis] != len(diagonal):
            raise InputError(f"DiagonalScaling: a box of shape {box.shape} does not have {len(diagonal)} features.")
        shape[axis] = -1
        return diagonal.view(shape)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        diagonal = self._exact(box)
        return _hull(box.low * diagonal, box.high * diagonal)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        diagonal = self._exact(box)
        return _hull(box.low / diagonal, box.high / diagonal)


def _hull(a: Tensor, b: Tensor) -> Box:
    return Box.outward(
        torch.minimum(a, b), torch.maximum(a, b), 1e-15 * torch.maximum(a.abs(), b.abs()).nan_to_num(0, 0, 0)
    )


def _up(log: float) -> float:
    return log + log_of(1.0)
