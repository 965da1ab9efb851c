"""Nets and scales of other libraries in the form that bilip's coupling blocks can prove things about."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bilip.blocks.scale import Scale, Suprema
from bilip.errors import BilipError, UnknownLipschitz
from bilip.nets.certify import flatten, is_plain_linear, linear_size
from bilip.nets.layers import LayeredNet

__all__ = ["AtanExpScale", "Joint", "SoftclipExpScale", "rearranged"]


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
    order = torch.arange(rows, device="cpu")
    if interleaved:
        order = torch.cat((order[0::2], order[1::2]))
    elif scale_first:
        order = torch.cat((order[rows // 2 :], order[: rows // 2]))
    start = 0 if all_raw else rows // 2
    ordered = copy.deepcopy(last).double().requires_grad_(False)
    weight, bias = ordered.weight[order], ordered.bias  # type: ignore[index]
    bias = weight.new_zeros(rows) if bias is None else bias[order]  # type: ignore[index]
    weight[start:] *= raw_factor
    bias[start:] = bias[start:] * raw_factor + raw_offset
    ordered.weight, ordered.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    return nn.Sequential(*layers[:-1], ordered)


class _OddExpScale(Scale):
    r"""$g = e^{h}$ with an odd, increasing $h$.

    $|g'| = h' e^{h}$ rises up to one peak and falls after it; $|(1/g)'| = h' e^{-h}$ is its mirror image.
    """

    @abstractmethod
    def log(self, s: Tensor) -> Tensor:
        """The function h."""

    @abstractmethod
    def log_derivative(self, s: Tensor) -> Tensor:
        """log h'(s)."""

    @property
    @abstractmethod
    def peak(self) -> float:
        """Where |g'| is largest."""

    def __call__(self, s: Tensor) -> Tensor:
        return self.log(s).exp()

    def suprema(self, low: Tensor, high: Tensor) -> Suprema:
        up = torch.full_like(low, self.peak).clamp(low, high)
        down = torch.full_like(low, -self.peak).clamp(low, high)
        slope = self.log_derivative(up) + self.log(up)
        reciprocal_slope = self.log_derivative(down) - self.log(down)
        return Suprema.up(self.log(high), slope, -self.log(low), reciprocal_slope)

    def floored(self, eps: float) -> Scale:
        """No library floors such a scale, so this raises."""
        raise BilipError(f"{type(self).__name__} has no floor.")


@dataclass(frozen=True)
class AtanExpScale(_OddExpScale):
    r"""$g(s) = \exp(a \arctan s)$: FrEIA's soft clamp, with $a = 0.636 \cdot \text{clamp}$.

    Example:
        >>> g = AtanExpScale(0.636 * 2)
        >>> [round(float(g(torch.tensor(v))), 3) for v in (-1e9, 0.0, 1e9)]
        [0.136, 1.0, 7.375]
    """

    factor: float

    def log(self, s: Tensor) -> Tensor:
        return self.factor * torch.atan(s)

    def log_derivative(self, s: Tensor) -> Tensor:
        # Beyond 1e100, where the square overflows sooner or later, s^2 and 1 + s^2 are one number.
        log = torch.where(s.abs() > 1e100, 2 * s.abs().log(), torch.log1p(s.square()))
        return math.log(self.factor) - log

    @property
    def peak(self) -> float:
        return self.factor / 2


@dataclass(frozen=True)
class SoftclipExpScale(_OddExpScale):
    r"""$g(s) = \exp(s / (1 + |s| / c))$, onto $(e^{-c}, e^{c})$: zuko's, with $c = -\log \text{slope}$.

    Example:
        >>> g = SoftclipExpScale(-math.log(1e-3))
        >>> [round(float(g(torch.tensor(v))), 3) for v in (-float("inf"), 0.0, float("inf"))]
        [0.001, 1.0, 1000.0]
    """

    bound: float

    def log(self, s: Tensor) -> Tensor:
        return torch.where(s.isinf(), self.bound * s.sign(), s / (1 + s.abs() / self.bound))

    def log_derivative(self, s: Tensor) -> Tensor:
        return -2 * torch.log1p(s.abs() / self.bound)

    @property
    def peak(self) -> float:
        return max(0.0, self.bound * self.bound / 2 - self.bound)
