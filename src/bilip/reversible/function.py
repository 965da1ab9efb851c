"""The autograd function: ordinary autograd outside, one call inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilip.reversible.call import Backward, Call
from bilip.reversible.replay import frozen_statistics, modes_again

__all__ = ["MemorySaving"]


class MemorySaving(torch.autograd.Function):
    """Ordinary autograd outside; inside, nothing between the two ends is kept."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, context: Tensor | None, *parameters: Tensor):
        z, log_det, stored = call.run(x, context)
        z = z.clone() if z is x or z._base is not None else z  # an output of its own: no view of the input
        ctx.call, ctx.has_context, ctx.count = call, context is not None, len(stored)
        ctx.save_for_backward(x, z, *([] if context is None else [context]), *stored, *parameters)
        ctx.set_materialize_grads(False)
        return (z, log_det) if call.log_det else z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        call: Call = ctx.call
        x, z, *rest = ctx.saved_tensors
        context = rest.pop(0) if ctx.has_context else None
        stored, parameters = tuple(rest[: ctx.count]), rest[ctx.count :]
        grad = torch.zeros_like(z) if grads[0] is None else grads[0]
        back = Backward(x, z, context, stored, grad, grads[1] if call.log_det else None)
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return _stored(call, back, parameters, grads, create_graph=True)
        g_x, found = call.pull(back)
        if (
            call.overflowed
        ):  # zero times infinity: autograd leaves out what no loss has looked at, block by block does not
            return _stored(call, back, parameters, grads, create_graph=False)
        return (
            None,
            g_x.to(x.dtype) if ctx.needs_input_grad[1] else None,
            found.context if ctx.needs_input_grad[2] else None,
            *(found.parameters.get(p) for p in call.parameters),
        )


def _stored(
    call: Call, back: Backward, parameters: Sequence[Tensor], grads: Sequence[Tensor | None], *, create_graph: bool
):
    """The stored path: everything again, with a graph."""
    b, context = call.bijection, back.context
    x = back.x if back.x.requires_grad else back.x.detach().requires_grad_()
    norms = [norm for unit in call.norms for norm in unit]
    call._require_unchanged()
    with (
        torch.enable_grad(),
        modes_again(call.modes),
        call.seeds.again(-1),
        call.conditions.again(),
        frozen_statistics(norms),
    ):
        if call.log_det:
            outputs = list((b.inverse_and_log_det if call.inverse else b.forward_and_log_det)(x, context))
        else:
            outputs = [(b.inverse if call.inverse else b)(x, context)]
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=False) if g is not None and o.requires_grad]
    given = [] if context is None or not context.requires_grad else [context]
    inputs = [x, *given, *parameters]
    found = torch.autograd.grad(
        [o for o, _ in pairs], inputs, [g for _, g in pairs], create_graph=create_graph, allow_unused=True
    )
    return None, found[0], found[1] if given else None, *found[1 + len(given) :]
