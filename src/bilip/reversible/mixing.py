"""1x1 convolutions in a memory-saving walk, with the ActNorm before them, and their matrices by the stack."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bilip.blocks import ActNorm, InvertibleConv1x1
from bilip.blocks.conv1x1 import invert, log_abs_det
from bilip.reversible.unit import Grads, Kept, Pulled, Unit

__all__ = ["Mixing", "forget", "prepare", "windows"]

WINDOW = 16  # so many 1x1 convolutions have their matrices at hand at a time


class Mixing(Unit):
    r"""ActNorm, if there is one, and a free 1x1 convolution as one matrix: $y = M (x + b)$ with $M = W \mathrm{diag}(e^s)$.

    `prepare` solves for all inverse matrices of one size at once and fills `matrix` and `other`.
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

    def run(self, x, context, *, log_det, own=False):
        value = self._undo(x) if self.inverse else self._do(x)
        return value, self._log(x) if log_det else None

    def undo(self, y, context):
        return self._do(y) if self.inverse else self._undo(y)

    def _do(self, x: Tensor) -> Tensor:
        return self._mix(self.matrix, self._shifted(x, 1))

    def _undo(self, y: Tensor) -> Tensor:
        return self._shifted(self._mix(self.other, y), -1)

    def _shifted(self, x: Tensor, sign: int) -> Tensor:
        return x if self.norm is None else self.norm.shift(x, sign)

    def _mix(self, matrix: Tensor | None, x: Tensor) -> Tensor:
        if matrix is None:
            raise RuntimeError("Mixing was not prepared")
        return self.block.mix(matrix, x)

    def _log(self, x: Tensor) -> Tensor:
        if self.log_abs_det is None:
            raise RuntimeError("Mixing was not prepared")
        total = self.log_abs_det if self.norm is None else self.log_abs_det + self.norm.log_scale.sum()
        return total * (math.prod(x.shape[2:]) * (-1 if self.inverse else 1))

    def back(self, y, context, grad, grad_log, known, own=False):
        with torch.no_grad():
            if self.inverse:  # y = M^-1 x - b, so x = M u with u = y + b
                u = self._shifted(y, 1)
                x = self._mix(self.matrix, u) if known is None else known
                g_x = self._mix(_t(self.other), grad)
                g_matrix, g_bias = -_outer(g_x, u), -grad
            else:  # y = M u with u = x + b
                u = self._mix(self.other, y) if known is None else self._shifted(known, 1)
                x = self._shifted(u, -1) if known is None else known
                g_x = self._mix(_t(self.matrix), grad)
                g_matrix, g_bias = _outer(grad, u), g_x
            return Pulled(x, g_x, self._parameters(g_matrix, g_bias, grad_log, math.prod(x.shape[2:])))

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


def windows(units: Sequence[Unit]) -> list[range]:
    """The chain cut into spans of neighbours with at most `WINDOW` 1x1 convolutions each, all of one size."""
    spans: list[range] = []
    begin = count = 0
    size: int | None = None
    for k, unit in enumerate(units):
        mixing = _mixing(unit)
        if mixing is None:
            continue
        if count == WINDOW or size not in (None, mixing.block.channels):
            spans.append(range(begin, k))
            begin, count = k, 0
        size, count = mixing.block.channels, count + 1
    return [*spans, range(begin, len(units))]


def _mixing(unit: Unit) -> Mixing | None:
    unit = unit.inner if isinstance(unit, Kept) else unit
    return unit if isinstance(unit, Mixing) else None


@torch.no_grad()
def prepare(units: Sequence[Unit], *, inverses: bool, log_det: bool) -> None:
    """The matrices of all 1x1 convolutions, by size: one product with the scales, one solve, one determinant for each size."""
    groups: dict[tuple[object, ...], list[Mixing]] = {}
    for unit in filter(None, map(_mixing, units)):
        key = (unit.block.channels, unit.norm is None, unit.block.weight.dtype, unit.block.weight.device)
        groups.setdefault(key, []).append(unit)
    for group in groups.values():
        weights = torch.stack([unit.block.weight for unit in group])
        norms = [unit.norm for unit in group if unit.norm is not None]
        scales = torch.stack([norm.log_scale for norm in norms]).exp() if norms else None
        matrices = weights if scales is None else weights * scales[:, None, :]
        solved = invert(weights) if inverses else None
        others = solved if solved is None or scales is None else solved / scales[:, :, None]
        logs = log_abs_det(weights) if log_det else None
        for k, unit in enumerate(group):
            unit.matrix = matrices[k]
            unit.inverse_weight = None if solved is None else solved[k]
            unit.other = None if others is None else others[k]
            unit.log_abs_det = None if logs is None else logs[k]


def forget(units: Sequence[Unit]) -> None:
    """Let go of what `prepare` made."""
    for unit in filter(None, map(_mixing, units)):
        unit.matrix = unit.inverse_weight = unit.other = unit.log_abs_det = None


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
