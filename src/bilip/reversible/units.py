r"""The steps of a memory-saving walk: each recovers its input from its output, and finds the gradients of its input and its
parameters from that of its output.

A unit knows two directions. In the one it is called, `run` gives the output; `back` takes output and gradient and gives input and
gradient.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bilip.blocks import Bijection
from bilip.errors import DriftError
from bilip.nets.replay import hooks_wait, leaves_behind, saves_by_hooks
from bilip.reversible.fingerprint import Fingerprint, Print

__all__ = ["Generic", "Grads", "Kept", "Recovered", "Ran", "Rearranging", "Unit", "leaf", "vjp"]

Grads = dict[Tensor, Tensor]


@dataclass
class Recovered:
    """What `back` returns: the input of a unit and gradients, from its output and the gradient of that."""

    x: Tensor  # the input of the unit, recovered, or the known one
    grad: Tensor  # gradient with respect to it
    # Gradients with respect to the parameters of the unit, and to tensors from outside that it uses.
    parameters: Grads = field(default_factory=dict)
    context: Tensor | None = None  # gradient with respect to the context, if it is wanted
    print: Tensor | None = None  # the sums of the fingerprint of x, where they came along for nothing
    output: Tensor | None = None  # what the unit makes of a known input now, if that is asked for


class Ran(NamedTuple):
    """What `run` returns: the output of a unit, and what came along."""

    y: Tensor  # the output
    log_det: Tensor | None = None  # if wanted, the log-determinant, of shape `(batch,)` or a number for all
    print: Print | None = None  # if wanted, the fingerprint of the input


class Unit(ABC):
    """One step, in one direction.

    `stores`: its input has to be kept. `twice`: `back` inverts first, then evaluates again. `fresh`: what it gives is new memory,
    which nobody else holds, so that the next step may write into it (`own`).
    """

    stores = False
    twice = False
    rearranges = False
    fresh = False
    graph: Callable[[], object] = staticmethod(lambda: None)  # of a traced call, while anybody holds a part of it

    def __init__(self, name: str, block: Bijection, *, inverse: bool) -> None:
        self.name, self.block, self.inverse = name, block, inverse

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What may draw numbers or keep statistics."""
        return (self.block,)

    @property
    def innermost(self) -> Unit:
        """The unit itself, or the one that acts on a part of the state."""
        return self

    def run(
        self,
        x: Tensor,
        context: Tensor | None,
        *,
        log_det: bool,
        own: bool = False,
        mark: Fingerprint | None = None,
        matrices: Any = None,
    ) -> Ran:
        """The output, from one end of the chain to the other. `matrices` are those of `Mixing`."""
        seen = None if mark is None else mark.of(x)
        if not log_det:
            return Ran((self.block.inverse if self.inverse else self.block)(x, context), None, seen)
        y, log = (self.block.inverse_and_log_det if self.inverse else self.block.forward_and_log_det)(x, context)
        return Ran(y, log, seen)

    def traced(
        self, x: Tensor, context: Tensor | None, *, log_det: bool, matrices: Any = None
    ) -> tuple[Ran, Sequence[Tensor]]:
        """The same by the block's own map, and the leaves that ask for gradients which it has used besides its input.

        `graph` tells whether something that was computed outlives the call.
        """
        point, given = x.detach().requires_grad_(), leaf(context)
        with torch.enable_grad(), _unhooked():
            marked = _Marked.apply(point)
            self.graph = weakref.ref(marked.grad_fn)
            y, log, _ = Unit.run(self, marked, given, log_det=log_det)
        found = leaves_behind([y] if log is None else [y, log], (point,) if given is None else (point, given))
        return Ran(y.detach(), None if log is None else log.detach()), found

    def undo(self, y: Tensor, context: Tensor | None, matrices: Any = None) -> Tensor:
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
        *,
        own: bool = False,
        mark: Print | None = None,
        matrices: Any = None,
        outside: Sequence[Tensor] = (),
        output: bool = False,
    ) -> Recovered:
        """Input and gradient from output and gradient; `known` is the input where it was kept, `outside` are tensors that the block uses
        without owning them. With `output`, also what the known input becomes now.
        """


class _Marked(torch.autograd.Function):
    """A copy, whose node lives as long as anything that was computed from it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _unhooked() -> AbstractContextManager[Any]:
    """A context in which no hook of the caller sees the tensors that are stored: those wait for the tensors of the call itself.

    Where there is no such hook, nothing is done: blocks that differentiate inside in batches cannot do so under hooks on a GPU.
    """
    if not saves_by_hooks():
        return nullcontext()
    # Detached: an output that is saved with its node would keep itself.
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t)


class Generic(Unit):
    """Invert, then evaluate again with gradients: for any block; of one that stores, only evaluate again."""

    twice = True

    def __init__(self, name: str, block: Bijection, *, inverse: bool) -> None:
        super().__init__(name, block, inverse=inverse)
        self.stores = not block.closed_form

    def back(self, y, context, grad, grad_log, known, *, own=False, mark=None, matrices=None, outside=(), output=False):
        x = self.undo(y, context).detach() if known is None else known
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            given = leaf(context)
            z, log_det, _ = self.run(point, given, log_det=grad_log is not None)
            outputs, grads = [z], [grad]
            if log_det is not None and grad_log is not None and log_det.requires_grad:
                outputs.append(log_det)
                grads.append(grad_log)
            recovered = vjp(x, outputs, grads, point, self, given, outside)
        recovered.output = z.detach() if output else None
        return recovered


class Rearranging(Unit):
    """A map that only moves entries around: the gradient moves back the same way."""

    rearranges = True

    def back(self, y, context, grad, grad_log, known, *, own=False, mark=None, matrices=None, outside=(), output=False):
        return Recovered(self.undo(y, context) if known is None else known, self.undo(grad, context))


class Kept(Unit):
    """A unit on the first entries of a flat state; the rest passes."""

    def __init__(self, inner: Unit, shape: tuple[int, ...], latent: tuple[int, ...]) -> None:
        super().__init__(inner.name, inner.block, inverse=inner.inverse)
        self.inner, self.stores, self.rearranges, self.twice = inner, inner.stores, inner.rearranges, inner.twice
        self.entered, self.left = (latent, shape) if inner.inverse else (shape, latent)

    @property
    def modules(self):
        return self.inner.modules

    @property
    def innermost(self):
        return self.inner.innermost

    def _split(self, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        size = math.prod(shape)
        return x[:, :size].unflatten(1, shape), x[:, size:]

    def run(self, x, context, *, log_det, own=False, mark=None, matrices=None):
        seen = None if mark is None else mark.of(x)
        kept, rest = self._split(x, self.entered)
        y, log, _ = self.inner.run(kept, context, log_det=log_det, matrices=matrices)
        return Ran(torch.cat((y.flatten(1), rest), 1), log, seen)

    def traced(self, x, context, *, log_det, matrices=None):
        kept, rest = self._split(x, self.entered)
        (y, log, _), leaves = self.inner.traced(kept, context, log_det=log_det, matrices=matrices)
        return Ran(torch.cat((y.flatten(1), rest), 1), log), leaves

    def undo(self, y, context, matrices=None):
        kept, rest = self._split(y, self.left)
        return torch.cat((self.inner.undo(kept, context, matrices).flatten(1), rest), 1)

    def back(self, y, context, grad, grad_log, known, *, own=False, mark=None, matrices=None, outside=(), output=False):
        (y, rest), (grad, g_rest) = self._split(y, self.left), self._split(grad, self.left)
        kept, rest = (None, rest) if known is None else self._split(known, self.entered)
        inner = self.inner.back(y, context, grad, grad_log, kept, matrices=matrices, outside=outside, output=output)
        x = torch.cat((inner.x.flatten(1), rest), 1) if known is None else known
        again = None if inner.output is None else torch.cat((inner.output.flatten(1), rest), 1)
        grad = torch.cat((inner.grad.flatten(1), g_rest), 1)
        return Recovered(x, grad, inner.parameters, inner.context, output=again)


def vjp(
    x: Tensor,
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    point: Tensor,
    unit: Unit,
    context: Tensor | None,
    outside: Sequence[Tensor],
) -> Recovered:
    """Gradients of outputs with respect to a point, the parameters of a block, tensors from outside and the context.

    Raises:
        DriftError: The outputs depend on another tensor, whose gradient would be lost.
    """
    parameters = [p for p in unit.block.parameters() if p.requires_grad]
    inputs = [point, *parameters, *outside]
    if context is not None and context.requires_grad:
        inputs.append(context)
    live = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    if not live:
        return Recovered(x, torch.zeros_like(point))
    unknown = leaves_behind([o for o, _ in live], inputs)
    if unknown:
        raise DriftError(
            f"block {unit.name} uses a tensor of shape {tuple(unknown[0].shape)} that asks for a gradient and is not a parameter of "
            "the bijection, and has not done so when this Reversible was first called: its gradient would be lost. Register "
            "it as a parameter of the block, hand it in as context, or use Reversible(..., memory='stored')."
        )
    with hooks_wait(inputs[1:]):  # those of the point were put there by the nets, and see the whole
        found = torch.autograd.grad(
            [o for o, _ in live], inputs, [g for _, g in live], allow_unused=True, retain_graph=bool(outside) or None
        )
    grad = torch.zeros_like(point) if found[0] is None else found[0]
    own = [*parameters, *outside]
    named = {p: g for p, g in zip(own, found[1:], strict=False) if g is not None}
    given = found[-1] if len(inputs) > 1 + len(own) else None
    return Recovered(x, grad, named, given)


def leaf(context: Tensor | None) -> Tensor | None:
    """The context, cut off from its own graph, asking for a gradient if it did."""
    if context is None or not context.is_floating_point():
        return context
    return context.detach().requires_grad_(context.requires_grad)
