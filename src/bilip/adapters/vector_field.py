"""Vector fields of torchdiffeq, torchdyn and torchcfm as neural ODE blocks."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from bilip.adapters._proofs import Joint
from bilip.blocks import Bijection, Invert, NeuralODE
from bilip.errors import InputError

__all__ = ["from_vector_field"]

_ORDERS = ("t,x", "x,t", "x", "cat")


def from_vector_field(
    field: nn.Module, *, order: str | None = None, data_at: str = "start", **options: Any
) -> Bijection:
    r"""The flow of $\dot x = f(t, x)$ from time 0 to `time` as a bijection.

    Args:
        field: The vector field, a module.
        order: How it is called: `"t,x"` as in torchdiffeq, `"x,t"`, `"x"` without time, or `"cat"` on x and t in one
            tensor as in torchcfm's MLP. By default what the names of its arguments say.
        data_at: `"start"` if data lies at time 0, as in FFJORD; `"end"` if it lies at the end, as in flow matching.
        options: `time`, `method`, `rtol`, `atol`, `trace`, `options` and `adjoint` of `bilip.blocks.NeuralODE`.

    Example:
        >>> import torch
        >>> class Field(nn.Module):
        ...     def forward(self, t, x):
        ...         return -x * t
        >>> flow = from_vector_field(Field(), rtol=1e-6, atol=1e-6)
        >>> x = torch.ones(1, 2)
        >>> bool(torch.allclose(flow(x), torch.exp(torch.tensor(-0.5)) * x, atol=1e-4))
        True
    """
    if not isinstance(field, nn.Module):
        raise InputError(
            f"from_vector_field: expected an nn.Module, got {type(field).__name__}. Wrap a function in one."
        )
    order = _guess(field) if order is None else order
    if order not in _ORDERS or data_at not in ("start", "end"):
        raise InputError(
            f"from_vector_field(order={order!r}, data_at={data_at!r}): expected an order of {', '.join(_ORDERS)} and "
            "data_at 'start' or 'end'."
        )
    net = field if order == "x" else Joint(field, 1) if order == "cat" else _Timed(field, order)
    block = NeuralODE(net, **options)
    return Invert(block) if data_at == "end" else block


class _Timed(nn.Module):
    """A field with the time as one number, called by bilip with a time for each sample."""

    def __init__(self, field: nn.Module, order: str) -> None:
        super().__init__()
        self.field, self.order = field, order

    def forward(self, x: Tensor, clock: Tensor) -> Tensor:
        t = clock.flatten()[0]
        return self.field(t, x) if self.order == "t,x" else self.field(x, t)


def _guess(field: nn.Module) -> str:
    names = [p.name for p in inspect.signature(field.forward).parameters.values() if p.default is p.empty]
    if len(names) == 1:
        return "x"
    if len(names) >= 2 and names[0].startswith("t"):
        return "t,x"
    if len(names) >= 2 and names[1].startswith("t"):
        return "x,t"
    raise InputError(
        f"from_vector_field: the arguments ({', '.join(names)}) of {type(field).__name__} do not say which one is the time. "
        "Pass order='t,x', 'x,t', 'x' or 'cat'."
    )
