"""1x1 convolutions in a memory-saving walk, with the ActNorm before them, and their matrices by the stack."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bilip.blocks import ActNorm, InvertibleConv1x1
from bilip.reversible.fingerprint import Fingerprint, kernels
from bilip.reversible.unit import Grads, Pulled, Ran, Unit

__all__ = ["Mixing"]


class Mixing(Unit):
    r"""ActNorm, if there is one, and a free 1x1 convolution as one matrix: $y = M (x + b)$ with $M = W \mathrm{diag}(e^s)$.

    `Prepared` finds the matrices of many of them at once and fills them in here.
    """

    block: InvertibleConv1x1
    fresh = True

    def __init__(self, name: str, norm: ActNorm | None, block: InvertibleConv1x1, *, inverse: bool) -> None:
        super().__init__(name, block, inverse=inverse)
        self.norm = norm
        self.matrix: Tensor | None = None  # M
        self.other: Tensor | None = None  # its inverse
        self.inverse_weight: Tensor | None = None
        self.log_abs_det: Tensor | None = None

    @property
    def modules(self):
        return ()

    def run(self, x, context, *, log_det, own=False, mark=None):
        log = self._log(x) if log_det else None
        if self.inverse:
            return Ran(self._undo(x), log, None if mark is None else mark.of(x))
        shifted, seen = self._shifted(x, 1, mark, before=True)
        return Ran(self._mix(self.matrix, shifted), log, seen)

    def undo(self, y, context):
        return self._do(y) if self.inverse else self._undo(y)

    def _do(self, x: Tensor) -> Tensor:
        return self._mix(self.matrix, self._shifted(x, 1)[0])

    def _undo(self, y: Tensor) -> Tensor:
        return self._shifted(self._mix(self.other, y), -1)[0]

    def _shifted(
        self, x: Tensor, sign: int, mark: Fingerprint | None = None, *, before: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """With ActNorm's bias or without, and the fingerprint of what was before or of what is after."""
        fused = kernels(x)
        if fused and mark and self.norm is not None and x.is_contiguous() and x.dtype == self.norm.bias.dtype:
            return fused.shift(x, self.norm.bias.detach(), sign, mark.signs_of(x), before=before)
        y = x if self.norm is None else self.norm.shift(x, sign)
        return y, None if mark is None else mark.of(x if before else y, norm=before)

    def _mix(self, matrix: Tensor | None, x: Tensor) -> Tensor:
        if matrix is None:
            raise RuntimeError("Mixing was not prepared")
        return self.block.mix(matrix, x)

    def _log(self, x: Tensor) -> Tensor:
        if self.log_abs_det is None:
            raise RuntimeError("Mixing was not prepared")
        total = self.log_abs_det if self.norm is None else self.log_abs_det + self.norm.log_scale.sum()
        return total * (math.prod(x.shape[2:]) * (-1 if self.inverse else 1))

    def back(self, y, context, grad, grad_log, known, own=False, mark=None):
        seen = None
        with torch.no_grad(), torch.autocast(y.device.type, enabled=False):  # autocast is for nets
            if self.inverse:  # y = M^-1 x - b, so x = M u with u = y + b
                u = self._shifted(y, 1)[0]
                x = self._mix(self.matrix, u) if known is None else known
                g_x = self._mix(_t(self.other), grad)
                g_matrix, g_bias = -_outer(g_x, u), -grad
            else:  # y = M u with u = x + b
                u = self._mix(self.other, y) if known is None else self._shifted(known, 1)[0]
                x, seen = self._shifted(u, -1, mark) if known is None else (known, None)
                g_x = self._mix(_t(self.matrix), grad)
                g_matrix, g_bias = _outer(grad, u), g_x
            grads = self._parameters(g_matrix, g_bias, grad_log, math.prod(x.shape[2:]))
            return Pulled(x, g_x, grads, print=seen)

    def _parameters(self, g_matrix: Tensor, g_bias: Tensor, grad_log: Tensor | None, pixels: int) -> Grads:
        """From the gradients of M and b to those of W, b and s; the log-determinant adds W^-T and 1 for each pixel."""
        weight, grads = self.block.weight, {}
        total = None if grad_log is None else grad_log.sum() * (-pixels if self.inverse else pixels)
        scale = None if self.norm is None else self.norm.log_scale.exp()
        if weight.requires_grad:
            g_weight = g_matrix if scale is None else g_matrix * scale
            grads[weight] = g_weight if total is None else torch.addcmul(g_weight, total, _t(self.inverse_weight))
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


def _t(matrix: Tensor | None) -> Tensor:
    if matrix is None:
        raise RuntimeError("Mixing was not prepared")
    return matrix.mT
