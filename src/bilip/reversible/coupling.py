"""Coupling blocks in a memory-saving walk: inversion and gradient share one evaluation of the nets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bilip.blocks import AdditiveCoupling, AffineCoupling, Split, Streams
from bilip.blocks._nets import call
from bilip.blocks.scale import SigmoidScale
from bilip.reversible.fingerprint import kernels
from bilip.reversible.units import Generic, Ran, Recovered, Unit, leaf, vjp

__all__ = ["Coupling"]


class Coupling(Unit):
    r"""Additive or affine coupling with one evaluation of its nets.

    Forward, $y_2 = x_2\, g(s) + t$ with $s, t$ functions of $x_1 = y_1$: from one evaluation come $x_2 = (y_2 - t) / g$ and
    the gradients $\bar t = \bar y_2$, $\bar g = \bar y_2 x_2$, $\bar x_2 = \bar y_2 g$; backward likewise. A state that is its own is
    overwritten where it changes, so that the other half is not copied. On a GPU the usual blocks do all but the nets in one kernel.
    """

    block: AdditiveCoupling | AffineCoupling

    def run(self, x, context, *, log_det, own=False, mark=None, matrices=None):
        block, fused = self.block, self._kernels(x)
        if fused is None and not (own and self._views):
            return super().run(x, context, log_det=log_det, mark=mark)
        x = x if own else x.clone(memory_format=torch.contiguous_format)
        x1, x2 = block.split(x)
        h, shift, raw = self._nets(x1, x2, context)
        if fused is not None and h is not None and h.dtype == x.dtype:
            seen, log = fused.couple(x, h.contiguous(), *self._layout(x), mark, inverse=self.inverse)
            return Ran(x, self._log(x, log) if log_det else None, seen)
        seen = None if mark is None else mark.of(x)
        gain, log_gain = self._gain(raw, log_det=log_det)
        if gain is None:
            torch.add(x2, shift, alpha=-1 if self.inverse else 1, out=x2)
        elif self.inverse:
            torch.div(x2 - shift, gain, out=x2)
        else:
            torch.addcmul(shift, x2, gain, out=x2)
        if not log_det:
            return Ran(x, None, seen)
        log = None if log_gain is None else log_gain.flatten(1).sum(1) * (-1 if self.inverse else 1)
        return Ran(x, self._log(x, log), seen)

    def _log(self, x: Tensor, log: Tensor | None) -> Tensor:
        return x.new_zeros(len(x)) if log is None else log

    def back(self, y, context, grad, grad_log, known, *, own=False, mark=None, matrices=None, outside=(), output=False):
        block, fused = self.block, self._kernels(y) if known is None else None
        y = y if own or fused is None else y.clone(memory_format=torch.contiguous_format)
        (y1, y2), (g1, g2) = block.partition.split(y), block.partition.split(grad)
        y1 = y1 if known is None else block.partition.split(known)[0]  # the same, without what the walk has lost
        with torch.enable_grad():
            point = y1.data.requires_grad_()  # not detach: what is written into y2 does not concern the graph of y1
            given = leaf(context)
            h, shift, raw = self._nets(point, y2, given)
        # Put there by a net: they see the gradient of the whole part, not only what comes through the nets.
        if point._backward_hooks:
            own_map = Generic(self.name, block, inverse=self.inverse)
            return own_map.back(y, context, grad, grad_log, known, outside=outside, output=output)
        if fused is not None and h is not None and h.dtype == y.dtype:
            whole = h.detach().contiguous()
            g_h, g_x, seen = fused.uncouple(
                y, whole, grad.contiguous(), grad_log, *self._layout(y), mark, inverse=self.inverse
            )
            recovered = vjp(y1, [h], [g_h], point, self, given, outside)
            torch.add(g1, recovered.grad, out=block.partition.split(g_x)[0])
            return Recovered(y, g_x, recovered.parameters, recovered.context, seen)
        with torch.enable_grad():
            gain, log_gain = self._gain(raw, log_det=grad_log is not None)
        in_place = known is None and self._views and (own or fused is not None)
        with torch.no_grad():
            kept = None if known is None else block.partition.split(known)[1]
            fixed = None if gain is None else gain.detach()
            x2, g_shift, g_gain = self._solve(y2, g2, shift.detach(), fixed, kept, y2 if in_place else None)
        outputs, grads = [shift], [g_shift.to(shift.dtype)]
        if gain is not None and g_gain is not None:
            outputs.append(gain)
            grads.append(g_gain.to(gain.dtype))
        if log_gain is not None and grad_log is not None:
            sign = -1 if self.inverse else 1
            outputs.append(log_gain)
            grads.append((sign * grad_log).view(-1, *[1] * (log_gain.ndim - 1)).expand_as(log_gain).to(log_gain.dtype))
        recovered = vjp(y1, outputs, grads, point, self, given, outside)
        x = y if in_place else block.partition.merge(y1, x2) if known is None else known
        with torch.no_grad():
            g_x = self._merged(grad, g1, recovered.grad, g2, gain, own=own)
            again = block.partition.merge(y1, self._moved(x2, shift, fixed)) if output else None
        return Recovered(x, g_x, recovered.parameters, recovered.context, output=again)

    @property
    def _views(self) -> bool:
        """Whether the two parts of a state are views of it."""
        return type(self.block.partition) in (Split, Streams)

    def _kernels(self, x: Tensor) -> Any:
        """Those for GPUs, if there are some for this block and state."""
        block = self.block
        if not (x.dtype == torch.float32 and type(block.partition) is Split and block.partition.dim == 1):
            return None
        if isinstance(block, AffineCoupling) and not (block.s is None and type(block.scale) is SigmoidScale):
            return None
        return kernels(x)

    def _layout(self, x: Tensor) -> tuple[tuple[float, float, float] | None, int]:
        """What a kernel is told: the numbers of the scale, and where the transformed part begins."""
        block, numbers = self.block, None
        if isinstance(block, AffineCoupling) and isinstance(block.scale, SigmoidScale):
            numbers = block.scale.low, block.scale.high, block.scale.shift
        first = block.partition.split(x)[0]
        place = 0 if block.partition.swap else math.prod(first.shape[1:])  # type: ignore[union-attr]
        return numbers, place

    def _nets(self, x1: Tensor, x2: Tensor, context: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The output of the one net, if there is one; shift and raw scale, of an additive block only the shift."""
        block = self.block
        if isinstance(block, AdditiveCoupling):
            shift = block.shift(x1, x2, context)
            return shift, shift, None
        if block.s is not None:
            return None, *block.shift_and_raw_scale(x1, x2, context)
        h = call(block.t, x1, context, block._context)
        return h, *block.halves(h, x2)

    def _gain(self, raw: Tensor | None, *, log_det: bool) -> tuple[Tensor | None, Tensor | None]:
        """The gain, and its log if wanted."""
        if raw is None or isinstance(self.block, AdditiveCoupling):
            return None, None
        return self.block.scale.with_log(raw) if log_det else (self.block.scale(raw), None)

    def _moved(self, x2: Tensor, shift: Tensor, gain: Tensor | None) -> Tensor:
        """y2 from x2, as the block does it."""
        if self.inverse:
            return x2 - shift if gain is None else (x2 - shift) / gain
        return x2 + shift if gain is None else torch.addcmul(shift, x2, gain)

    def _solve(
        self, y2: Tensor, g2: Tensor, shift: Tensor, gain: Tensor | None, kept: Tensor | None, into: Tensor | None
    ):
        """x2, and the gradients with respect to the shift and the gain. `into` may be y2 itself."""
        if gain is None:
            x2 = torch.add(y2, shift, alpha=1 if self.inverse else -1, out=into) if kept is None else kept
            return x2, (-g2 if self.inverse else g2), None
        if not self.inverse:
            x2 = torch.div(y2 - shift, gain, out=into) if kept is None else kept
            return x2, g2, g2 * x2
        g_shift = -g2 / gain  # y2 = (x2 - shift) / gain
        g_gain = g_shift * y2
        return torch.addcmul(shift, y2, gain, out=into) if kept is None else kept, g_shift, g_gain

    def _merged(self, grad: Tensor, g1: Tensor, more: Tensor, g2: Tensor, gain: Tensor | None, *, own: bool) -> Tensor:
        """The gradient with respect to x: to that of x1 comes what went through the nets."""
        if not self._views:
            moved = g2 if gain is None else g2 / gain if self.inverse else g2 * gain
            return self.block.partition.merge(g1 + more, moved)
        if gain is None and own:
            g1 += more
            return grad
        merged = torch.empty_like(grad)
        first, second = self.block.partition.split(merged)
        torch.add(g1, more, out=first)
        if gain is None:
            second.copy_(g2)
        else:
            (torch.div if self.inverse else torch.mul)(g2, gain, out=second)
        return merged
