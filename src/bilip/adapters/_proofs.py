"""Nets of other libraries in the form that bilip's coupling blocks can prove things about."""

from __future__ import annotations

import copy

import torch
from torch import nn

from bilip.errors import UnknownLipschitz
from bilip.nets.certify import flatten, is_plain_linear, linear_size
from bilip.nets.layers import LayeredNet

__all__ = ["Joint", "rearranged"]


class Joint(LayeredNet):
    """A net that is given its input and its context in one tensor, input first.

    Args:
        net: The net.
        context: Features or channels of the context.
    """

    def __init__(self, net: nn.Module, context: int) -> None:
        taken = linear_size(flatten(net)[0])[1]
        if taken is None:
            raise UnknownLipschitz(f"{type(net).__name__}: its first layer is not linear, so its inputs are not known.")
        super().__init__(taken - context, context, 1)
        self.layers = nn.Sequential(*flatten(net))


def rearranged(
    net: nn.Module,
    *,
    interleaved: bool = False,
    scale_first: bool = False,
    all_raw: bool = False,
    raw_factor: float = 1.0,
    raw_offset: float = 0.0,
) -> nn.Module:
    """A net that gives shift and raw scale together, with its outputs put into bilip's order: all shifts, then all raw scales.

    Args:
        net: The net; its last layer must be linear or a convolution.
        interleaved: Its outputs are shift, raw, shift, raw, ...
        scale_first: Its outputs are all raw scales, then all shifts.
        all_raw: All its outputs are raw scales.
        raw_factor: Number by which the raw scales are multiplied.
        raw_offset: Number that is then added to them.
    """
    layers = flatten(net)
    last = layers[-1]
    if not is_plain_linear(last) or getattr(last, "groups", 1) != 1:
        raise UnknownLipschitz(
            f"the last layer of the net, {type(last).__name__}, is not a plain Linear or Conv, so its shifts and raw "
            "scales cannot be told apart. End the net with one."
        )
    rows = int(last.weight.shape[0])  # type: ignore[union-attr, arg-type]
    order = torch.arange(rows)
    if interleaved:
        order = torch.cat((order[0::2], order[1::2]))
    elif scale_first:
        order = torch.cat((order[rows // 2 :], order[: rows // 2]))
    start = 0 if all_raw else rows // 2
    twin = copy.deepcopy(last).double().requires_grad_(False)
    weight, bias = twin.weight[order], twin.bias  # type: ignore[index]
    bias = weight.new_zeros(rows) if bias is None else bias[order]  # type: ignore[index]
    weight[start:] *= raw_factor
    bias[start:] = bias[start:] * raw_factor + raw_offset
    twin.weight, twin.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    return nn.Sequential(*layers[:-1], twin)
