r"""Linear and convolution layers whose operator norm is held at or below a coefficient, as certified.

The weight that acts is $W \cdot \min(1, c / \bar\sigma(W))$ with $\bar\sigma(W) \ge \|W\|_2$ a certified upper bound that is
recomputed, in float64, from the present weight; no state of a power iteration can lag behind it. The bound is differentiable,
so the coefficient also holds during training. The product is taken in float64 and rounded once, so that it also holds for weights
near the largest number of their dtype; in float64, entries beyond $2^{500}$ count as that.

`torch.nn.utils.parametrizations.spectral_norm` promises neither: it flattens a kernel to a matrix, whose norm can be several times
smaller than the convolution's, and it approaches that norm from below.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.errors import InputError
from bilip.nets.cache import EvalCache
from bilip.nets.norms import conv_symbol, gram_bounds, gram_norm

__all__ = ["HeldConv2d", "HeldLinear", "held_together"]

_MOST = 2**22  # entries of weights that are taken together
_TOGETHER: ContextVar[Mapping[nn.Module, _Known]] = ContextVar("together", default={})  # noqa: B039


class HeldLinear(nn.Linear):
    r"""A linear layer with $\|W\|_2 \le$ `coefficient`.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        coefficient: The largest allowed norm.
        bias: Whether to add a bias.

    Example:
        >>> from bilip.nets import matrix_norm
        >>> layer = HeldLinear(8, 8, coefficient=0.9)
        >>> _ = layer.weight.data.mul_(100)
        >>> matrix_norm(layer.held_weight()) <= 0.9
        True
    """

    def __init__(self, in_features: int, out_features: int, *, coefficient: float, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.coefficient = _check_coefficient(coefficient)
        self._cache, self._held_to = EvalCache(), self.coefficient

    def held_weight(self) -> Tensor:
        """The weight that acts."""
        known = _TOGETHER.get().get(self)
        if known is not None and known.fits(self):
            return _held(self.weight, known.factor, known.slope)
        if self._held_to != self.coefficient:
            self._cache, self._held_to = EvalCache(), self.coefficient
        return self._cache.get(self, self.weight, self._hold)

    def _hold(self, weight: Tensor) -> Tensor:
        if self.coefficient == math.inf:  # a copy whose weight is held already
            return weight
        factors, slopes = _factors(weight[None], self.coefficient)
        return _held(weight, factors[0], slopes[0])

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.held_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, coefficient={self.coefficient:g}"


class HeldConv2d(nn.Conv2d):
    r"""A convolution whose operator norm is at most `coefficient`, for every image size.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Side of the kernel.
        coefficient: The largest allowed norm.
        stride: Stride.
        padding: Zero padding; by default what keeps the image size at stride 1.
        bias: Whether to add a bias.

    Example:
        >>> from bilip.nets import conv_norm
        >>> layer = HeldConv2d(4, 4, 3, coefficient=0.9)
        >>> _ = layer.weight.data.fill_(1.0)
        >>> conv_norm(layer.held_weight()) <= 0.9
        True
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        coefficient: float,
        stride: int = 1,
        padding: int | None = None,
        bias: bool = True,
    ) -> None:
        padding = kernel_size // 2 if padding is None else padding
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self.coefficient = _check_coefficient(coefficient)
        self._cache, self._held_to = EvalCache(), self.coefficient

    def held_weight(self) -> Tensor:
        """The kernel that acts."""
        if self._held_to != self.coefficient:
            self._cache, self._held_to = EvalCache(), self.coefficient
        return self._cache.get(self, self.weight, self._hold)

    def _hold(self, weight: Tensor) -> Tensor:
        if self.coefficient == math.inf:
            return weight
        stride = (int(self.stride[0]), int(self.stride[1]))
        weight = _in_range(weight)
        if self.kernel_size == (1, 1) and stride == (1, 1):
            return _shrink(weight, gram_norm(weight.double().flatten(1)[None]), self.coefficient)
        symbol, slack = conv_symbol(weight.double(), stride=stride)
        return _shrink(weight, gram_norm(symbol) * slack, self.coefficient)

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.held_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, coefficient={self.coefficient:g}"


@contextlib.contextmanager
def held_together(layers: Iterable[HeldLinear]) -> Iterator[None]:
    """Inside, the norms of layers of one size are computed in one go: on a device, each launch counts.

    Only where they would be computed anew anyway: with gradients to them, and outside of transforms. Every layer keeps a graph of its
    own.
    """
    groups: dict[tuple[object, ...], list[HeldLinear]] = {}
    before = _TOGETHER.get()
    for layer in layers:
        weight = layer.weight
        if layer not in before and layer.coefficient < math.inf and weight.requires_grad and not weight.is_inference():
            groups.setdefault((weight.shape, weight.dtype, weight.device, layer.coefficient), []).append(layer)
    found: dict[HeldLinear, _Known] = {}
    for group in groups.values():
        size = max(1, _MOST // group[0].weight.numel())
        for part in (group[k : k + size] for k in range(0, len(group), size)):
            if len(part) > 1:
                stack = torch.stack([layer.weight.detach() for layer in part])
                made = zip(*(values.unbind() for values in _factors(stack, part[0].coefficient)), strict=True)
                for layer, (factor, slope) in zip(part, made, strict=True):
                    found[layer] = _Known(layer.weight, layer.weight._version, layer.coefficient, factor, slope)
    token = _TOGETHER.set({**before, **found}) if found else None
    try:
        yield
    finally:
        if token is not None:
            _TOGETHER.reset(token)


@dataclass(frozen=True)
class _Known:
    """What was computed for a layer, and from what."""

    weight: Tensor
    version: int
    coefficient: float
    factor: Tensor
    slope: Tensor

    def fits(self, layer: HeldLinear) -> bool:
        """Whether the layer is still as it was; writing through `weight.data` in the middle of a pass is not noticed."""
        same = self.weight is layer.weight and self.coefficient == layer.coefficient
        return same and self.version == self.weight._version


@torch.no_grad()
def _factors(weights: Tensor, coefficient: float) -> tuple[Tensor, Tensor]:
    """For each of a stack of weights what it is multiplied with, in float64, and the slope of the log of its bound; 0 where that
    does not act.
    """
    bounds, slopes = gram_bounds(_in_range(weights).double(), slopes=True)
    limit = torch.full_like(bounds, _target(weights[0], coefficient))
    factors = limit / torch.maximum(bounds, limit)  # exactly 1 where nothing is to be shrunk
    slopes = torch.where((bounds > limit)[:, None, None], slopes, 0.0)  # type: ignore[arg-type]
    return factors, slopes.to(torch.promote_types(weights.dtype, torch.float32))


def _held(weight: Tensor, factor: Tensor, slope: Tensor) -> Tensor:
    """The weight times its factor, with the gradient of the factor."""
    weight = _in_range(weight)
    inner = (slope * weight).sum().double()
    return (weight.double() * (factor - factor * (inner - inner.detach()))).to(weight.dtype)


def _shrink(weight: Tensor, bound: Tensor, coefficient: float) -> Tensor:
    limit = torch.full_like(bound, _target(weight, coefficient))
    return (weight.double() * (limit / torch.maximum(bound, limit))).to(weight.dtype)


def _in_range(weight: Tensor) -> Tensor:
    """The weight, its entries cut off where sums of them would leave float64; other dtypes never come near."""
    return weight.clamp(-(2.0**500), 2.0**500) if weight.dtype == torch.float64 else weight


def _target(weight: Tensor, coefficient: float) -> float:
    # Rounding moves each entry by at most eps of itself, hence the norm by at most eps * ||W||_F, times sqrt(taps) for a kernel:
    # eps * sqrt(entries) of the norm. Where it is subnormal it moves by the spacing there, or all of it is flushed to zero.
    # Certifying again may add the slack of the bound itself.
    kind = torch.finfo(weight.dtype)
    spacing = kind.tiny * (kind.eps if weight.dtype == torch.float16 else 1.0)
    absolute = spacing * math.sqrt(weight.numel() * weight[0, 0].numel())
    target = (coefficient * (1 - 1e-8) - absolute) / (1 + 1.1 * math.sqrt(weight.numel()) * kind.eps)
    if not target > 0:
        raise InputError(
            f"coefficient={coefficient:g} is too small for a weight of shape {tuple(weight.shape)} in {weight.dtype}, whose "
            f"entries are rounded to about {spacing:.1g}. Use a larger coefficient, or a dtype with a wider range."
        )
    return target


def _check_coefficient(coefficient: float) -> float:
    if not (isinstance(coefficient, (int, float)) and 0 < coefficient < math.inf):
        raise InputError(f"coefficient={coefficient!r}: the largest allowed operator norm must be a positive number.")
    return float(coefficient)
