"""Additive coupling: the stable block."""

from __future__ import annotations

from torch import Tensor, nn

from bilip.blocks._nets import call, require_module, require_shape, takes_context
from bilip.blocks.bijection import Bijection
from bilip.blocks.partition import Partition, Split
from bilip.bounds import Box, log_of, log_sum, log_triangular_norm
from bilip.nets import certify

__all__ = ["AdditiveCoupling"]


class AdditiveCoupling(Bijection):
    r"""$F(x)_{I_1} = x_{I_1}, \quad F(x)_{I_2} = x_{I_2} + t(x_{I_1})$.

    Globally bi-Lipschitz: both constants are at most $1 + \mathrm{Lip}(t)$ (the paper's lemma), and at most
    $(L + \sqrt{L^2 + 4})/2$ with $L = \mathrm{Lip}(t)$ (the norm of $\begin{pmatrix}1&0\\L&1\end{pmatrix}$,
    `formula="sharp"`).

    Reference: Dinh et al., *NICE: Non-linear Independent Components Estimation*, 2014.

    Args:
        t: Any module from the conditioning part to the transformed part.
        partition: How the input is divided; halves along dimension 1 by default.

    Example:
        >>> import torch
        >>> from bilip.nets import MLP
        >>> block = AdditiveCoupling(MLP(2, 2, lipschitz=1.5))
        >>> x = torch.randn(8, 4)
        >>> bool(torch.allclose(block.inverse(block(x)), x, atol=1e-6))
        True
        >>> block.bounds().inverse <= 2.0, block.bounds(formula="paper").inverse <= 2.5
        (True, True)
    """

    volume_preserving = True

    def __init__(self, t: nn.Module, partition: Partition | None = None) -> None:
        super().__init__()
        self.t = require_module("AdditiveCoupling", "t", t)
        self.partition = Split() if partition is None else partition
        self._context = takes_context(t)

    def shift(self, x1: Tensor, x2: Tensor, context: Tensor | None) -> Tensor:
        """t(x1), in the shape of the transformed part."""
        shift = self.partition.outputs(call(self.t, x1, context, self._context))
        require_shape("AdditiveCoupling", "t(x1)", shift, x2)
        return shift

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the net sees, and what is transformed."""
        return self.partition.split(self.check_net(x, self.t))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x1, x2 = self.split(x)
        return self.partition.merge(x1, x2 + self.shift(x1, x2, context))

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        z1, z2 = self.split(z)
        return self.partition.merge(z1, z2 - self.shift(z1, z2, context))

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        part, _ = self.partition.split_box(box)
        log_t = certify.log_lipschitz(self.t, part.shape or None)
        return log_sum(0.0, log_t) if formula == "paper" else log_triangular_norm(log_t, log_of(1.0))

    log_lip_inverse = log_lip

    def interval(self, box: Box, context: Box | None = None) -> Box:
        part, moved = self.partition.split_box(box)
        shift = self._shift_box(part, context)
        return self.partition.merge_box(part, Box.outward(moved.low + shift.low, moved.high + shift.high))

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        part, moved = self.partition.split_box(box)
        shift = self._shift_box(part, context)
        return self.partition.merge_box(part, Box.outward(moved.low - shift.high, moved.high - shift.low))

    def _shift_box(self, part: Box, context: Box | None) -> Box:
        return self.partition.outputs_box(certify.ball_and_interval(self.t, part, context if self._context else None))
