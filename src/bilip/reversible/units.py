r"""The steps of a memory-saving walk: each recovers its input from its output and pulls a gradient back through itself.

A unit knows two directions. In the one it is called, `run` gives the output; `back` takes output and gradient and gives input and
gradient. A coupling block evaluates its net once in `back`: inversion and gradient share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bilip.blocks import ActNorm, AdditiveCoupling, AffineCoupling, Bijection, InvertibleConv1x1
from bilip.blocks.conv1x1 import invert, log_abs_det
from bilip.blocks.on_kept import OnKept

__all__ = ["Generic", "Pulled", "Unit", "forget", "make_units", "prepare", "windows"]

WINDOW = 16  # so many 1x1 convolutions have their matrices at hand at a time

Grads = dict[nn.Parameter, Tensor]


@dataclass
class Pulled:
    """What `back` gives.

    Attributes:
        x: The input of the unit, recovered, or the known one.
        grad: Gradient with respect to it.
        parameters: Gradients with respect to the parameters of the unit.
        context: Gradient with respect to the context, if it is wanted.
    """

    x: Tensor
    grad: Tensor
    parameters: Grads = field(default_factory=dict)
    context: Tensor | None = None


class Unit:
    """One step, in one direction. `stores`: its input has to be kept; `twice`: `back` inverts first, then evaluates again."""

    stores = False
    twice = False
    rearranges = False

    def __init__(self, name: str, block: Bijection, *, inverse: bool) -> None:
        self.name, self.block, self.inverse = name, block, inverse

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What may draw numbers or keep statistics."""
        return (self.block,)

    def run(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Tensor | None]:
        """Output and, if wanted, log-determinant, of shape `(batch,)` or a number for all."""
        if log_det:
            return (self.block.inverse_and_log_det if self.inverse else self.block.forward_and_log_det)(x, context)
        return (self.block.inverse if self.inverse else self.block)(x, context), None

    def undo(self, y: Tensor, context: Tensor | None) -> Tensor:
        """The input that belongs to an output."""
        return (self.block if self.inverse else self.block.inverse)(y, context)

    def back(
        self, y: Tensor, context: Tensor | None, grad: Tensor, grad_log: Tensor | None, known: Tensor | None
    ) -> Pulled:
        """Input and gradient from output and gradient; `known` is the input where it was kept."""
        raise NotImplementedError


class Generic(Unit):
    """Invert, then evaluate again with gradients: for any block; of one that stores, only evaluate again."""

    twice = True

    def __init__(self, name: str, block: Bijection, *, inverse: bool) -> None:
        super().__init__(name, block, inverse=inverse)
        self.stores = not block.closed_form

    def back(self, y, context, grad, grad_log, known):
        x = self.undo(y, context).detach() if known is None else known
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            given = _leaf(context)
            z, log_det = self.run(point, given, log_det=grad_log is not None)
            outputs, grads = [z], [grad]
            if log_det is not None and grad_log is not None and log_det.requires_grad:
                outputs.append(log_det)
                grads.append(grad_log)
            return _pull(x, outputs, grads, point, self.block, given)


class Rearranging(Unit):
    """A map that only moves entries around: the gradient moves back the same way."""

    rearranges = True

    def back(self, y, context, grad, grad_log, known):
        return Pulled(self.undo(y, context) if known is None else known, self.undo(grad, context))


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
            point, given = y1.detach().requires_grad_(), _leaf(context)
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
        pulled = _pull(y1, outputs, grads, point, block, given)
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


class Mixing(Unit):
    r"""ActNorm, if there is one, and a free 1x1 convolution as one matrix: $y = M (x + b)$ with $M = W \mathrm{diag}(e^s)$.

    `prepare` solves for all inverse matrices of one size at once and fills `matrix` and `other`.
    """

    block: InvertibleConv1x1

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

    def run(self, x, context, *, log_det):
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

    def back(self, y, context, grad, grad_log, known):
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


class Kept(Unit):
    """A unit on the first entries of a flat state; the rest passes."""

    def __init__(self, inner: Unit, shape: tuple[int, ...], latent: tuple[int, ...]) -> None:
        super().__init__(inner.name, inner.block, inverse=inner.inverse)
        self.inner, self.stores, self.rearranges, self.twice = inner, inner.stores, inner.rearranges, inner.twice
        self.entered, self.left = (latent, shape) if inner.inverse else (shape, latent)

    def _split(self, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        size = math.prod(shape)
        return x[:, :size].unflatten(1, shape), x[:, size:]

    def run(self, x, context, *, log_det):
        kept, rest = self._split(x, self.entered)
        y, log = self.inner.run(kept, context, log_det=log_det)
        return torch.cat((y.flatten(1), rest), 1), log

    def undo(self, y, context):
        kept, rest = self._split(y, self.left)
        return torch.cat((self.inner.undo(kept, context).flatten(1), rest), 1)

    def back(self, y, context, grad, grad_log, known):
        (y, rest), (grad, g_rest) = self._split(y, self.left), self._split(grad, self.left)
        inner = self.inner.back(
            y, context, grad, grad_log, None if known is None else self._split(known, self.entered)[0]
        )
        x = torch.cat((inner.x.flatten(1), rest), 1) if known is None else known
        return Pulled(x, torch.cat((inner.grad.flatten(1), g_rest), 1), inner.parameters, inner.context)


def make_units(parts: Sequence[tuple[str, Bijection]], *, inverse: bool) -> list[Unit]:
    """The units of a map in the order in which they run."""
    units: list[Unit] = []
    k = 0
    while k < len(parts):
        name, part = parts[k]
        after = parts[k + 1][1] if k + 1 < len(parts) else None
        if type(part) is ActNorm and part._ready and part.dim == 1 and _plain(part) and _is_free(after, part.features):
            units.append(Mixing(parts[k + 1][0], part, after, inverse=inverse))  # type: ignore[arg-type]
            k += 1
        else:
            units.append(_unit(name, part, inverse=inverse))
        k += 1
    return units[::-1] if inverse else units


def _unit(name: str, part: Bijection, *, inverse: bool) -> Unit:
    if isinstance(part, OnKept):
        return Kept(_unit(name, part.block, inverse=inverse), part.kept_shape, part.kept_latent)
    if type(part) in (AdditiveCoupling, AffineCoupling) and _plain(part):
        return Coupling(name, part, inverse=inverse)
    if _is_free(part):
        return Mixing(name, None, part, inverse=inverse)  # type: ignore[arg-type]
    if part.rearranges and _plain(part):
        return Rearranging(name, part, inverse=inverse)
    return Generic(name, part, inverse=inverse)


def _is_free(part: Bijection | None, features: int | None = None) -> bool:
    if (
        type(part) is not InvertibleConv1x1
        or part.kind != "full"
        or not _plain(part)
        or "weight" not in part._parameters
    ):
        return False
    return features is None or part.channels == features


def _plain(part: Bijection) -> bool:
    """Whether nobody watches or changes the calls of a block, so that it may be evaluated in another way."""
    return not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


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


def _pull(
    x: Tensor, outputs: list[Tensor], grads: list[Tensor], point: Tensor, block: nn.Module, context: Tensor | None
) -> Pulled:
    parameters = [p for p in block.parameters() if p.requires_grad]
    inputs = [point, *parameters]
    if context is not None and context.requires_grad:
        inputs.append(context)
    live = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    if not live:
        return Pulled(x, torch.zeros_like(point))
    found = torch.autograd.grad([o for o, _ in live], inputs, [g for _, g in live], allow_unused=True)
    grad = torch.zeros_like(point) if found[0] is None else found[0]
    named = {p: g for p, g in zip(parameters, found[1:], strict=False) if g is not None}
    given = found[-1] if len(inputs) > 1 + len(parameters) else None
    return Pulled(x, grad, named, given)


def _leaf(context: Tensor | None) -> Tensor | None:
    if context is None or not context.is_floating_point():
        return context
    return context.detach().requires_grad_(context.requires_grad)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Sum over samples and pixels of a b^T."""
    if a.ndim == 2:
        return a.T @ b
    return torch.bmm(a.flatten(2), b.flatten(2).mT).sum(0)


def _t(matrix: Tensor | None) -> Tensor:
    if matrix is None:
        raise RuntimeError("Mixing was not prepared")
    return matrix.mT
