"""Diagonal scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bilip.blocks.bijection import Bijection
from bilip.bounds import TINY, Box, as_float64, log_of
from bilip.errors import InputError

__all__ = ["DiagonalScaling", "scale_box"]


class DiagonalScaling(Bijection):
    r"""$F(x) = D x$ with a diagonal $D$ whose entries stay non-zero.

    Its constants are $\mathrm{Lip}(F) = \max |D_{ii}|$ and $\mathrm{Lip}(F^{-1}) = 1/\min |D_{ii}|$. Of the buffer `sign` only the sign
    counts, whatever numbers are loaded into it.

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
        diagonal = torch.copysign(self.log_scale.exp(), self.sign)
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

    def _along(self, box: Box, values: Tensor) -> Tensor:
        """One number for each feature, in a shape that broadcasts over the box."""
        if self.dim is None:
            return values
        shape = [1] * len(box.shape)
        axis = self.dim - 1 if self.dim > 0 else self.dim
        if box.shape[axis] != len(values):
            raise InputError(f"DiagonalScaling: a box of shape {box.shape} does not have {len(values)} features.")
        shape[axis] = -1
        return values.view(shape)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return scale_box(box, *(self._along(box, as_float64(value)) for value in (self.log_scale, self.sign)))

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return scale_box(box, *(self._along(box, as_float64(value)) for value in (-self.log_scale, self.sign)))


def scale_box(box: Box, log_scale: Tensor, sign: Tensor) -> Box:
    """A box that holds every point of a box times exactly `exp(log_scale)`, with the sign of `sign`."""
    scale = torch.copysign(log_scale.exp(), sign)
    a, b = box.low * scale, box.high * scale
    # Two roundings of the exponential, one of the product; an exponential that underflows is known to TINY only.
    size = torch.maximum(box.low.abs(), box.high.abs()).nan_to_num(0.0, 0.0, 0.0)
    error = 1e-15 * torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0, 0.0) + TINY * size
    return Box.outward(torch.minimum(a, b), torch.maximum(a, b), error)


def _up(log: float) -> float:
    return log + log_of(1.0)
