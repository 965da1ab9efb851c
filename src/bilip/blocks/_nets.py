"""How a coupling block calls its nets and what it asks of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bilip._torch import can_be_read
from bilip.errors import InputError
from bilip.nets.certify import overwriting
from bilip.nets.layers import ConvNet, takes_context

__all__ = ["call", "first_parameter", "require_module", "require_shape", "takes_context"]

FEW_PIXELS = 2048  # of a whole batch: below, putting the channels innermost takes longer than it saves


def require_module(owner: str, name: str, net: object) -> nn.Module:
    """Return the net, or say what was passed instead."""
    if not isinstance(net, nn.Module):
        raise InputError(
            f"{owner}: {name} must be an nn.Module, got {type(net).__name__}. Wrap a function in a module."
        )
    first = overwriting(net)
    if first is not None:
        raise InputError(
            f"{owner}: {first} in {name} works in place and would overwrite the input of the block. "
            "Build it with inplace=False."
        )
    return net


def call(net: nn.Module, x: Tensor, context: Tensor | None, with_context: bool) -> Tensor:
    """Call a net with its context, where it takes one and there is one."""
    turn = isinstance(net, ConvNet) and _faster_channels_last(x)
    if turn:
        x = x.contiguous(memory_format=torch.channels_last)
    before = None if torch.compiler.is_compiling() or x.is_inference() else x._version
    value = net(x, context) if with_context and context is not None else net(x)
    if before is not None and x._version != before:
        raise InputError(
            f"{type(net).__name__} overwrites its input in place, so the block around it is another map than it states, and its "
            "input is lost. Compute out of place, as in x.relu() instead of x.relu_()."
        )
    return value.contiguous() if turn else value


def _faster_channels_last(x: Tensor) -> bool:
    """Whether to convolve with the channels innermost: faster on the CPU, but for small batches of small images."""
    if x.ndim != 4 or x.device.type != "cpu" or x.dtype != torch.float32 or not can_be_read(x):
        return False
    return x.shape[0] * x.shape[2] * x.shape[3] >= FEW_PIXELS and not x.is_contiguous(memory_format=torch.channels_last)


def first_parameter(net: nn.Module) -> Tensor | None:
    """What `next(net.parameters(), None)` gives, in a fraction of the time: it is asked for on every pass.

    A net with a `state_dtype` converts by itself what it is given, so nothing is asked of its input.
    """
    if "state_dtype" in net.__dict__:
        return None
    for parameter in net._parameters.values():
        if parameter is not None:
            return parameter
    for child in net._modules.values():
        if child is not None and (parameter := first_parameter(child)) is not None:
            return parameter
    return None


def require_shape(owner: str, what: str, value: Tensor, like: Tensor) -> None:
    """The output of a net must have the shape of what it is added to: broadcasting would hide a mistake."""
    if value.shape != like.shape:
        raise InputError(
            f"{owner}: {what} has shape {tuple(value.shape)}, but the part it acts on has {tuple(like.shape)}. "
            "Give the net as many outputs as that part has entries."
        )
