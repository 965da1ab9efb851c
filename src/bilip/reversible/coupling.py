"""Coupling blocks in a memory-saving walk: inversion and gradient share one evaluation of the nets."""

from __future__ import annotations

import torch
from torch import Tensor

from bilip.blocks import AdditiveCoupling, AffineCoupling
from bilip.reversible.unit import Pulled, Unit, leaf, pull

__all__ = ["Coupling"]


class Coupling(Unit):
    r"""Additive or affine coupling with one evaluation of its nets.

    Forward, $y_2 = x_2\, g(s) + t$ with $s, t$ functions of $x_1 = y_1$: from one evaluation come $x_2 = (y_2 - t) / g$ and
    the gradients $\bar t = \bar y_2$, $\bar g = \bar y_2 x_2$, $\bar x_2 = \bar y_2 g$; backward likewise.
    """

    block: AdditiveCoupling | AffineCoupling

    def back(self, y, context, grad, grad_log, known):
        block = self.block
        (y1, y2), (g1, g2) = block.partition.split(y), block.partition.split(grad)
        kept = None if known is None else block.partition.split(known)[1]
        with torch.enable_grad():
            point, given = y1.detach().requires_grad_(), leaf(context)
            if isinstance(block, AdditiveCoupling):
                shift, gain, log_gain = block._shift(point, y2, given), None, None
            else:
                shift, raw = block.shift_and_raw_scale(point, y2, given)
                gain, log_gain = block.scale.with_log(raw) if grad_log is not None else (block.scale(raw), None)
        with torch.no_grad():
            x2, g_x2, g_shift, g_gain = self._solve(
                y2, g2, shift.detach(), None if gain is None else gain.detach(), kept
            )
        outputs, grads = [shift], [g_shift.to(shift.dtype)]
        if gain is not None and g_gain is not None:
            outputs.append(gain)
            grads.append(g_gain.to(gain.dtype))
        if log_gain is not None and grad_log is not None:
            sign = -1 if self.inverse else 1
            outputs.append(log_gain)
            grads.append((sign * grad_log).view(-1, *[1] * (log_gain.ndim - 1)).expand_as(log_gain).to(log_gain.dtype))
        pulled = pull(y1, outputs, grads, point, block, given)
        x = block.partition.merge(y1, x2) if known is None else known
        return Pulled(x, block.partition.merge(g1 + pulled.grad, g_x2), pulled.parameters, pulled.context)

    def _solve(self, y2: Tensor, g2: Tensor, shift: Tensor, gain: Tensor | None, kept: Tensor | None):
        """x2 and the gradients with respect to x2, the shift and the gain."""
        if gain is None:
            return (y2 + shift if self.inverse else y2 - shift), g2, (-g2 if self.inverse else g2), None
        if not self.inverse:
            x2 = (y2 - shift) / gain if kept is None else kept
            return x2, g2 * gain, g2, g2 * x2
        moved = g2 / gain  # y2 = (x2 - shift) / gain
        return torch.addcmul(shift, y2, gain), moved, -moved, -moved * y2
