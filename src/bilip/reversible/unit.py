r"""The steps of a memory-saving walk: each recovers its input from its output and pulls a gradient back through itself.

A unit knows two directions. In the one it is called, `run` gives the output; `back` takes output and gradient and gives input and
gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bilip.blocks import Bijection
from bilip.reversible.fingerprint import Fingerprint

__all__ = ["Generic", "Grads", "Kept", "Pulled", "Ran", "Rearranging", "Unit", "leaf", "pull"]

Grads = dict[nn.Parameter, Tensor]


@dataclass
class Pulled:
    """What `back` gives.

    Attributes:
        x: The input of the unit, recovered, or the known one.
        grad: Gradient with respect to it.
        parameters: Gradients with respect to the parameters of the unit.
        context: Gradient with respect to the context, if it is wanted.
        print: Fingerprint of x, where it came along for nothing.
    """

    x: Tensor
    grad: Tensor
    parameters: Grads = field(default_factory=dict)
    context: Tensor | None = None
    print: Tensor | None = None


class Ran(NamedTuple):
    """What `run` gives.

    Attributes:
        y: The output.
        log_det: If wanted, the log-determinant, of shape `(batch,)` or a number for all.
        print: If wanted, the fingerprint of the input.
    """

    y: Tensor
    log_det: Tensor | None = None
    print: Tensor | None = None


class Unit(ABC):
    """One step, in one direction.

    `stores`: its input has to be kept. `twice`: `back` inverts first, then evaluates again. `fresh`: what it gives is new memory,
    which nobody else holds, so that the next step may write into it (`own`).
    """

    stores = False
    twice = False
    rearranges = False
    fresh = False

    def __init__(self, name: str, block: Bijection, *, inverse: bool) -> None:
        self.name, self.block, self.inverse = name, block, inverse

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What may draw numbers or keep statistics."""
        return (self.block,)

    def run(
        self,
        x: Tensor,
        context: Tensor | None,
        *,
        log_det: bool,
        own: bool = False,
        mark: Fingerprint | None = None,
    ) -> Ran:
        """The output, from one end of the chain to the other."""
        seen = None if mark is None else mark.of(x)
        if not log_det:
            return Ran((self.block.inverse if self.inverse else self.block)(x, context), None, seen)
        y, log = (self.block.inverse_and_log_det if self.inverse else self.block.forward_and_log_det)(x, context)
        return Ran(y, log, seen)

    def undo(self, y: Tensor, context: Tensor | None) -> Tensor:
        """The input that belongs to an output."""
        return (self.block if self.inverse else self.block.inverse)(y, context)

    @abstractmethod
    def back(
        self,
        y: Tensor,
        context: Tensor | None,
        grad: Tensor,
        grad_log: Tensor | None,
        known: Tensor | None,
        own: bool = False,
        mark: Fingerprint | None = None,
    ) -> Pulled:
        """Input and gradient from output and gradient; `known` is the input where it was kept."""


class Generic(Unit):
    """Invert, then evaluate again with gradients: for any block; of one that stores, only evaluate again."""

    twice = True

    def __init__(self, name: str, block: Bijection, *, inverse: bool) -> None:
        super().__init__(name, block, inverse=inverse)
        self.stores = not block.closed_form

    def back(self, y, context, grad, grad_log, known, own=False, mark=None):
        x = self.undo(y, context).detach() if known is None else known
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            given = leaf(context)
            z, log_det, _ = self.run(point, given, log_det=grad_log is not None)
            outputs, grads = [z], [grad]
            if log_det is not None and grad_log is not None and log_det.requires_grad:
                outputs.append(log_det)
                grads.append(grad_log)
            return pull(x, outputs, grads, point, self.block, given)


class Rearranging(Unit):
    """A map that only moves entries around: the gradient moves back the same way."""

    rearranges = True

    def back(self, y, context, grad, grad_log, known, own=False, mark=None):
        return Pulled(self.undo(y, context) if known is None else known, self.undo(grad, context))


class Kept(Unit):
    """A unit on the first entries of a flat state; the rest passes."""

    def __init__(self, inner: Unit, shape: tuple[int, ...], latent: tuple[int, ...]) -> None:
        super().__init__(inner.name, inner.block, inverse=inner.inverse)
        self.inner, self.stores, self.rearranges, self.twice = inner, inner.stores, inner.rearranges, inner.twice
        self.entered, self.left = (latent, shape) if inner.inverse else (shape, latent)

    def _split(self, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        size = math.prod(shape)
        return x[:, :size].unflatten(1, shape), x[:, size:]

    def run(self, x, context, *, log_det, own=False, mark=None):
        seen = None if mark is None else mark.of(x)
        kept, rest = self._split(x, self.entered)
        y, log, _ = self.inner.run(kept, context, log_det=log_det)
        return Ran(torch.cat((y.flatten(1), rest), 1), log, seen)

    def undo(self, y, context):
        kept, rest = self._split(y, self.left)
        return torch.cat((self.inner.undo(kept, context).flatten(1), rest), 1)

    def back(self, y, context, grad, grad_log, known, own=False, mark=None):
        (y, rest), (grad, g_rest) = self._split(y, self.left), self._split(grad, self.left)
        inner = self.inner.back(
            y, context, grad, grad_log, None if known is None else self._split(known, self.entered)[0]
        )
        x = torch.cat((inner.x.flatten(1), rest), 1) if known is None else known
        return Pulled(x, torch.cat((inner.grad.flatten(1), g_rest), 1), inner.parameters, inner.context)


def pull(
    x: Tensor, outputs: list[Tensor], grads: list[Tensor], point: Tensor, block: nn.Module, context: Tensor | None
) -> Pulled:
    """Gradients of outputs, pulled back to a point, to the parameters of a block and to the context."""
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


def leaf(context: Tensor | None) -> Tensor | None:
    """The context, cut off from its own graph, asking for a gradient if it did."""
    if context is None or not context.is_floating_point():
        return context
    return context.detach().requires_grad_(context.requires_grad)
