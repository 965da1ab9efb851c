"""1x1 convolutions in a memory-saving walk, with the ActNorm before them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bilip.blocks import ActNorm, InvertibleConv1x1
from bilip.reversible.unit import Grads, Pulled, Ran, Unit

__all__ = ["Matrices", "Mixing"]


class Matrices(NamedTuple):
    r"""The matrices of one `Mixing`; `Prepared` finds those of many at once.

    Attributes:
        matrix: $M = W \mathrm{diag}(e^s)$.
        inverse: $M^{-1}$, where it is wanted.
        inverse_weight: $W^{-1}$, likewise.
        log_abs_det: Log of the size of the determinant of W, if wanted.
    """

    matrix: Tensor
    inverse: Tensor | None = None
    inverse_weight: Tensor | None = None
    log_abs_det: Tensor | None = None


class Mixing(Unit):
    r"""ActNorm, if there is one, and a free 1x1 convolution as one matrix: $y = M (x + b)$ with $M = W \mathrm{diag}(e^s)$."""

    block: InvertibleConv1x1
    fresh = True

    def __init__(self, name: str, norm: ActNorm | None, block: InvertibleConv1x1, *, inverse: bool) -> None:
        super().__init__(name, block, inverse=inverse)
        self.norm = norm

    @property
    def modules(self):
        return ()

    def run(self, x, context, *, log_det, own=False, mark=None, matrices=None):
        log = self._log(x, matrices) if log_det else None
        seen = None if mark is None else mark.of(x)
        return Ran((self._undo if self.inverse else self._do)(x, matrices), log, seen)

    def traced(self, x, context, *, log_det, matrices=None):
        return self.run(x, context, log_det=log_det, matrices=matrices), ()

    def undo(self, y, context, matrices=None):
        return (self._do if self.inverse else self._undo)(y, matrices)

    def _do(self, x: Tensor, matrices: Matrices) -> Tensor:
        return self.block.mix(matrices.matrix, self._shifted(x, 1))

    def _undo(self, y: Tensor, matrices: Matrices) -> Tensor:
        return self._shifted(self.block.mix(_known(matrices.inverse), y), -1)

    def _shifted(self, x: Tensor, sign: int) -> Tensor:
        """With ActNorm's bias, or without it."""
        return x if self.norm is None else self.norm.shift(x, sign)

    def _log(self, x: Tensor, matrices: Matrices) -> Tensor:
        total = _known(matrices.log_abs_det)
        total = total if self.norm is None else total + self.norm.log_scale.sum()
        return total * (math.prod(x.shape[2:]) * (-1 if self.inverse else 1))

    def back(self, y, context, grad, grad_log, known, *, own=False, mark=None, matrices=None, outside=()):
        mix = self.block.mix
        with torch.no_grad(), torch.autocast(y.device.type, enabled=False):  # autocast is for nets
            if self.inverse:  # y = M^-1 x - b, so x = M u with u = y + b
                u = self._shifted(y, 1)
                x = mix(matrices.matrix, u) if known is None else known
                g_x = mix(_known(matrices.inverse).mT, grad)
                g_matrix, g_bias = -_outer(g_x, u), -grad
            else:  # y = M u with u = x + b
                u = mix(_known(matrices.inverse), y) if known is None else self._shifted(known, 1)
                x = self._shifted(u, -1) if known is None else known
                g_x = mix(matrices.matrix.mT, grad)
                g_matrix, g_bias = _outer(grad, u), g_x
            grads = self._parameters(g_matrix, g_bias, grad_log, math.prod(x.shape[2:]), matrices.inverse_weight)
            return Pulled(x, g_x, grads)

    def _parameters(
        self, g_matrix: Tensor, g_bias: Tensor, grad_log: Tensor | None, pixels: int, inverse_weight: Tensor | None
    ) -> Grads:
        """From the gradients of M and b to those of W, b and s; the log-determinant adds W^-T and 1 for each pixel."""
        weight, grads = self.block.weight, {}
        total = None if grad_log is None else grad_log.sum() * (-pixels if self.inverse else pixels)
        scale = None if self.norm is None else self.norm.log_scale.exp()
        if weight.requires_grad:
            g_weight = g_matrix if scale is None else g_matrix * scale
            grads[weight] = g_weight if total is None else torch.addcmul(g_weight, total, _known(inverse_weight).mT)
        if self.norm is not None and scale is not None:
            if self.norm.log_scale.requires_grad:
                g_scale = (g_matrix * weight).sum(0) * scale
                grads[self.norm.log_scale] = g_scale if total is None else g_scale + total
            if self.norm.bias.requires_grad:
                grads[self.norm.bias] = g_bias.sum([k for k in range(g_bias.ndim) if k != 1])
        return grads


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Sum over samples and pixels of a b^T."""
    if a.ndim == 2:
        return a.T @ b
    if math.prod(a.shape[2:]) < a.shape[1]:  # a product for each sample would be larger than what goes into it
        return a.transpose(0, 1).flatten(1) @ b.transpose(0, 1).flatten(1).T
    return torch.bmm(a.flatten(2), b.flatten(2).mT).sum(0)


def _known(matrix: Tensor | None) -> Tensor:
    if matrix is None:
        raise RuntimeError("a matrix was not asked for that is needed")
    return matrix
