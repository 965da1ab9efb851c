"""What a backward pass is given, and what it finds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bilip.reversible.units import Grads, Recovered
from bilip.reversible.within import cancelled, sizes, usual, weights

__all__ = ["Backward", "Size", "Sum"]


@dataclass(frozen=True)
class Backward:
    """What a backward pass is given: the two ends, what was stored, the gradients of the outputs, and whether anybody wants that of the
    input or the context.
    """

    x: Tensor
    z: Tensor
    context: Tensor | None
    stored: tuple[Tensor, ...]
    grad: Tensor
    grad_log: Tensor | None
    outward: bool = False
    # Whether what the gradient of the input goes on to, and that of the context, may add up the samples.
    upstream: tuple[bool, bool] = (False, False)
    # Parameters, and tensors from outside, whose gradients this backward pass was asked for: the others are as if frozen.
    asked: frozenset[Tensor] = frozenset()

    def gives_finite(self, grad: Tensor) -> Tensor:
        """Whether the gradient of the input is finite, and the output too, or else the loss is to blame."""
        given = [g for g in (self.grad, self.grad_log) if g is not None]
        # The largest entry is NaN or Inf where any is, and costs fewer launches than to look at each.
        largest = [torch.linalg.vector_norm(t, torch.inf, dtype=torch.float64) for t in (grad, self.z, *given)]
        finite = torch.isfinite(torch.stack(largest))
        return finite[:2].all() | ~finite[2:].all()

    def weighed(self, seed: int, scale: float = 1.0) -> Backward:
        """The gradients times random numbers, so that they add up as independent ones do; all of them times a scale."""
        samples, each = (scale * w for w in weights(self.grad, seed, entries=self.z.ndim == 2))
        grad_log = None if self.grad_log is None else self.grad_log * samples.to(self.grad_log)
        return replace(self, grad=self.grad * each.to(self.grad), grad_log=grad_log)

    def few(self) -> Backward:
        """Two neighbours from the beginning of each quarter of the batch: a loss that subtracts its halves, or neighbours, is seen to."""
        count = len(self.x)
        if count <= 8:
            return self
        rows = torch.tensor([k * count // 4 + j for k in range(4) for j in range(2)], device=self.x.device)
        x, z, grad, *stored = (t[rows] for t in (self.x, self.z, self.grad, *self.stored))
        # One context may serve all samples.
        context, grad_log = (
            None if t is None else t[rows] if t.shape[:1] == (count,) else t for t in (self.context, self.grad_log)
        )
        return Backward(x, z, context, tuple(stored), grad, grad_log, asked=self.asked)

    def lost_before(self, grad: Tensor, of_context: Tensor | None) -> Tensor:
        """How many times larger errors are, relative to the gradient, of what is trained before a frozen bijection or makes its context:
        there the gradients of the samples are added up.

        Args:
            grad: Of the input, as found.
            of_context: Of the context, if it has one.
        """
        each = of_context is not None and of_context.shape[:1] == grad.shape[:1]
        ends = [of_context] if self.upstream[1] and each else []
        # What a context has added up already, the samples where it is one for all and the positions, is seen at the input.
        if self.upstream[0] or (of_context is not None and (not each or grad.ndim > 2)):
            ends.append(grad)
        return usual(cancelled(*ends)) if ends else torch.ones((), dtype=torch.float64, device=grad.device)

    def going_out(self, grad: Tensor, of_context: Tensor | None, *, inverse: bool) -> dict[Hashable, Tensor]:
        """The gradients of a frozen bijection that are added to those of its other calls: of the input and the context, where wanted; their
        sum over the samples, in place of what that input or context is computed from, if it is.
        """
        found: dict[Hashable, Tensor] = {}
        ends = ("input", self.x, grad), ("context", self.context, of_context)
        for (name, tensor, g), upstream in zip(ends, self.upstream, strict=True):
            if upstream and g is not None:
                found[name, inverse, g.shape[1:]] = g.sum(0, dtype=torch.float64)  # 16 bits might not hold it
            elif tensor is not None and tensor.requires_grad and g is not None:
                found[tensor] = g
        return found


class Sum:
    """Gradients, added up where a parameter occurs in several units; `overflowed` where a repair met what is not finite."""

    def __init__(self) -> None:
        self.parameters: Grads = {}
        self.context: Tensor | None = None
        self.overflowed = False

    def add(self, recovered: Recovered) -> None:
        for parameter, grad in recovered.parameters.items():
            self.parameters[parameter] = self.parameters[parameter] + grad if parameter in self.parameters else grad
        if recovered.context is not None:
            self.context = recovered.context if self.context is None else self.context + recovered.context


class Size(Sum):
    """How large gradients are, unit by unit: they are not kept, so that no more memory is needed for a deeper chain."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def add(self, recovered: Recovered) -> None:
        if recovered.parameters:
            self.found.append(sizes([*recovered.parameters.values()]))

    def total(self) -> Tensor:
        """Their norm."""
        return torch.linalg.vector_norm(torch.cat(self.found))
