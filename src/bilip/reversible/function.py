"""The autograd function: ordinary autograd outside, one call inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from bilip.errors import InputError
from bilip.nets.replay import hooks_wait
from bilip.reversible.backward import Backward
from bilip.reversible.call import Call

__all__ = ["MemorySaving", "hold"]


def hold(output: Tensor, share: float | Tensor) -> int:
    """Hold every memory-saving walk behind a tensor to a share of its guard's tolerance, in the backward pass of its call alone.

    For a loss that subtracts nearly equal outputs: their gradients nearly cancel as well, what remains is small beside either, and drift
    that does no harm to one of them may be all of the difference. With outputs whose inputs are a step s apart, relative to how far
    samples are apart, a share of s keeps the gradient of the difference as good as that of one. `FiniteDifference` does it by itself.
    A walk that would have to be better than its dtype is not made: the states are evaluated again from what is stored, as in a repair.

    Args:
        output: Computed from outputs of a `Reversible`, before its backward pass.
        share: From 0 to 1; a scalar tensor in a captured step. A walk that is held already keeps the smaller share.

    Returns:
        How many walks were found.

    Example:
        >>> from bilip.models import real_nvp
        >>> from bilip.reversible import Reversible
        >>> f, x = Reversible(real_nvp(4, blocks=8)), torch.randn(16, 4)
        >>> difference = f(x + 0.01) - f(x)
        >>> hold(difference, 0.01)
        2
        >>> difference.square().sum().backward()
    """
    if not isinstance(output, Tensor):
        raise InputError(
            f"hold: expected a tensor, got {type(output).__name__}. Hand in the difference itself, before its backward pass."
        )
    if share.numel() != 1 if isinstance(share, Tensor) else not (isinstance(share, Real) and 0 <= share <= 1):
        raise InputError(f"hold(share={share!r}): expected a number from 0 to 1.")
    waiting, seen, count = [output.grad_fn], set(), 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        call = getattr(node, "call", None)
        if isinstance(call, Call):
            call.hold_to(share)
            count += 1
        waiting += [before for before, _ in node.next_functions]
    return count


class MemorySaving(torch.autograd.Function):
    """Ordinary autograd outside; inside, nothing between the two ends is kept.

    The tensors after the context are the parameters of the call, then those from outside.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, context: Tensor | None, *parameters: Tensor):
        begin = x.detach()  # as the states behind it: no net shall take it for one with a graph
        z, log_det, stored = call.run(begin, context)
        z = z.clone() if z is begin or z._base is not None else z  # an output of its own: no view of the input
        ctx.call, ctx.count = call, len(stored)
        ctx.save_for_backward(x, z, context, *stored, *parameters)
        ctx.set_materialize_grads(False)
        return (z, log_det) if call.log_det else z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        call: Call = ctx.call
        x, z, context, *rest = ctx.saved_tensors
        stored, parameters = tuple(rest[: ctx.count]), rest[ctx.count :]
        wanted = _asked_for(ctx, (x, context, *parameters))
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            given = [g for g in grads if g is not None]
            function = partial(_vjp, call.stored, [k for k, g in enumerate(grads) if g is not None], wanted)
            found = Again.apply(function, len(parameters), 2, x, context, *parameters, *given)
            return None, *found[: len(wanted)]
        given = [(k, g) for k, g in enumerate(grads) if g is not None]
        # Many gradients at once (`is_grads_batched`) have numbers that no guard can look at.
        if any(torch._C._functorch.is_legacy_batchedtensor(g) for _, g in given):  # type: ignore[attr-defined]
            return None, *_stored(call, given, wanted, x, context, *parameters)
        grad = torch.zeros_like(z) if grads[0] is None else grads[0]
        grad_log = grads[1] if call.log_det else None
        # Where this gradient goes on to a parameter, or is one of a context that serves all samples, those of the samples are added up.
        of_input, of_context = (
            w and t is not None and (t.grad_fn is not None or t.shape[:1] != x.shape[:1])
            for w, t in zip(wanted, (x, context), strict=False)
        )
        upstream = bool(of_input), bool(of_context)
        inside = (*call.parameters, *call.outside)
        asked = frozenset(p for p, w in zip(inside, wanted[2:], strict=True) if w)
        outward = wanted[0] or wanted[1]
        back = Backward(x, z, context, stored, grad, grad_log, outward, upstream, asked)
        g_x, result = call.backward(back)
        # Zero times infinity: autograd leaves out what no loss has looked at, block by block does not.
        if result.overflowed:
            found = _stored(call, given, wanted, x, context, *parameters)
            return None, *(None if g is None else g.detach() for g in found)
        return (
            None,
            g_x.to(x.dtype) if wanted[0] else None,
            result.context if wanted[1] else None,
            *(result.parameters.get(p) for p in inside),
        )


def _asked_for(ctx: Any, inputs: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Which inputs this backward pass wants the gradient of: `torch.autograd.grad` may be asked for those of a few."""
    nodes = iter([node for node, _ in ctx.next_functions])  # of those inputs that are tensors
    ways = [None if t is None else next(nodes) for t in inputs]
    return tuple(node is not None and _is_met(node) for node in ways)


def _is_met(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # a leaf that was named, or no pass of the engine
        return True


def _stored(
    call: Call,
    given: Sequence[tuple[int, Tensor]],
    wanted: Sequence[bool],
    x: Tensor,
    context: Any,
    *parameters: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients without a walk: all is evaluated again with a graph, and differentiated."""
    places, grads = [k for k, _ in given], [g for _, g in given]
    return _vjp(call.stored, places, wanted, _cut(x), _cut(context), *parameters, *grads)[: len(wanted)]


class Again(torch.autograd.Function):
    """A function of tensors that is evaluated from leaves of its own, so that no history is differentiated along with it. It can be
    differentiated any number of times, by evaluating it again.

    Args:
        function: From tensors to as many tensors or `None`.
        fixed: How many of the tensors stand in modules, and are leaves by themselves.
        place: The place of the first of them.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Sequence[Tensor | None]], fixed: int, place: int, *tensors: Any):
        ctx.function, ctx.fixed, ctx.place = function, fixed, place
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        found = function(*_leaves(tensors, fixed, place))
        return tuple(None if t is None else t.detach() for t in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        tensors, places = ctx.saved_tensors, [k for k, g in enumerate(grads) if g is not None]
        function = partial(_vjp, ctx.function, places, ctx.needs_input_grad[3:])
        given = (*tensors, *(grads[k] for k in places))
        if torch.is_grad_enabled():
            found = Again.apply(function, ctx.fixed, ctx.place, *given)
        else:
            found = function(*_leaves(given, ctx.fixed, ctx.place))
        return None, None, None, *(found[k] for k in range(len(tensors)))


def _vjp(
    function: Callable[..., Sequence[Tensor | None]], places: Sequence[int], wanted: Sequence[bool], *tensors: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of the outputs at some places with respect to the inputs of a function, as far as wanted; the last tensors are the
    gradients of these outputs. As many come back as tensors are given.
    """
    count = len(tensors) - len(places)
    inputs, grads = tensors[:count], tensors[count:]
    with torch.enable_grad():
        outputs = function(*inputs)
        pairs = [(outputs[k], g) for k, g in zip(places, grads, strict=True)]
        pairs = [(o, g) for o, g in pairs if o is not None and o.requires_grad]
        asked = [k for k in range(count) if wanted[k] and inputs[k] is not None and inputs[k].requires_grad]
        found: list[Tensor | None] = [None] * len(tensors)
        if pairs and asked:
            wanted_tensors = [inputs[k] for k in asked]
            with hooks_wait(wanted_tensors):
                values = torch.autograd.grad(
                    [o for o, _ in pairs], wanted_tensors, [g for _, g in pairs], create_graph=True, allow_unused=True
                )
            for k, value in zip(asked, values, strict=True):
                found[k] = value
    return tuple(found)


def _leaves(tensors: Sequence[Any], fixed: int, place: int) -> list[Any]:
    return [t if place <= k < place + fixed else _cut(t) for k, t in enumerate(tensors)]


def _cut(tensor: Any) -> Any:
    """Without its history."""
    if not isinstance(tensor, Tensor) or not tensor.requires_grad:
        return tensor
    return tensor.detach().requires_grad_()
