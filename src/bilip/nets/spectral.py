r"""Linear and convolution layers whose operator norm is held at or below a coefficient, as certified.

The weight that acts is $W \cdot \min(1, c / \bar\sigma(W))$ with $\bar\sigma(W) \ge \|W\|_2$ a certified upper bound that is
recomputed, in float64, from the present weight; no state of a power iteration can lag behind it. The bound is differentiable,
so the coefficient also holds during training.

`torch.nn.utils.parametrizations.spectral_norm` promises neither: it flattens a kernel to a matrix, whose norm can be several times
smaller than the convolution's, and it approaches that norm from below.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.errors import InputError
from bilip.nets.cache import EvalCache, is_transformed
from bilip.nets.norms import conv_symbol, gram_norm, gram_norms

__all__ = ["HeldConv2d", "HeldLinear", "held_together"]

_MOST = 2**22  # entries of weights that are taken together
_TOGETHER: ContextVar[Mapping[nn.Module, tuple[Tensor, Tensor]]] = ContextVar("together", default={})  # noqa: B039


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
        weight, held = _TOGETHER.get().get(self, (None, self.weight))
        if weight is self.weight:
            return held
        if self._held_to != self.coefficient:
            self._cache, self._held_to = EvalCache(), self.coefficient
        return self._cache.get(self, self.weight, self._hold)

    def _hold(self, weight: Tensor) -> Tensor:
        if self.coefficient == math.inf:  # a copy whose weight is held already
            return weight
        return _shrink(weight[None], gram_norms(weight.double()[None]), self.coefficient)[0]

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
        if self.kernel_size == (1, 1) and stride == (1, 1):
            return _shrink(weight[None], gram_norms(weight.double().flatten(1)[None]), self.coefficient)[0]
        symbol, slack = conv_symbol(weight.double(), stride=stride)
        return _shrink(weight[None], gram_norm(symbol)[None] * slack, self.coefficient)[0]

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.held_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, coefficient={self.coefficient:g}"


@contextlib.contextmanager
def held_together(layers: Sequence[HeldLinear]) -> Iterator[None]:
    """Inside, the norms of layers of one size are computed in one go: on a device, each launch counts.

    Only where they would be computed anew anyway: with gradients, and outside of transforms.
    """
    groups: dict[tuple[object, ...], list[HeldLinear]] = {}
    before = _TOGETHER.get()
    if torch.is_grad_enabled() and not is_transformed():
        for layer in layers:
            if layer not in before and layer.coefficient < math.inf:
                weight = layer.weight
                key = (weight.shape, weight.dtype, weight.device, layer.coefficient)
                groups.setdefault(key, []).append(layer)
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for group in groups.values():
        size = max(1, _MOST // group[0].weight.numel())
        for part in (group[k : k + size] for k in range(0, len(group), size)):
            if len(part) > 1:
                weights = [layer.weight for layer in part]
                stack = torch.stack(weights)
                held = _shrink(stack, gram_norms(stack.double()), part[0].coefficient).unbind()
                found.update(zip(part, zip(weights, held, strict=True), strict=True))
    if not found:
        yield
        return
    token = _TOGETHER.set({**before, **found})
    try:
        yield
    finally:
        _TOGETHER.reset(token)


def _shrink(weights: Tensor, bounds: Tensor, coefficient: float) -> Tensor:
    """Each of a stack of weights, divided by its bound where that is above the coefficient."""
    # Rounding factor and product moves each entry by at most eps of itself, hence the norm by at most eps * ||W||_F, times sqrt(taps)
    # for a kernel: eps * sqrt(entries) of the norm. Certifying again may add the slack of the bound itself.
    entries = math.sqrt(weights[0].numel())
    target = coefficient * (1 - 1e-8) / (1 + 1.1 * entries * torch.finfo(weights.dtype).eps)
    limit = torch.full_like(bounds, target)
    factors = limit / torch.maximum(bounds, limit)  # exactly 1 where nothing is to be shrunk
    return (weights * factors.view(-1, *(1 for _ in weights.shape[1:]))).to(weights.dtype)


def _check_coefficient(coefficient: float) -> float:
    if not (isinstance(coefficient, (int, float)) and 0 < coefficient < math.inf):
        raise InputError(f"coefficient={coefficient!r}: the largest allowed operator norm must be a positive number.")
    return float(coefficient)
