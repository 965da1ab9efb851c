r"""Two-dimensional convolutions in float64 as matrix products.

On a GPU, products of float64 matrices are fast and the float64 convolutions of cuDNN are not; on a CPU, torch's float64 convolution lays
out all pixels under the kernel, which is slow for many inputs and few outputs. A product also adds up $\sum w x$ term by
term, in some order, which is all that the rounding error of a proof is charged for; an algorithm that transforms its inputs first would
need another argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["matrix_conv2d", "prefers_matrices"]

_MOST = 2**26  # entries that are laid out beside the image and its convolution: 512 MiB of float64


def prefers_matrices(x: Tensor, weight: Tensor) -> bool:
    """Whether `matrix_conv2d` is the faster way for these images and this kernel.

    Example:
        >>> prefers_matrices(torch.zeros(1, 64, 8, 8), torch.zeros(4, 64, 3, 3))
        True
    """
    return x.is_cuda or (16 * len(weight) <= weight.shape[1] and weight[0, 0].numel() > 1)


def matrix_conv2d(
    x: Tensor,
    weight: Tensor,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """`F.conv2d(x, weight)` with zero padding and one group, but for the order in which the terms of an entry are added.

    Either the pixels under the kernel are laid out as columns and multiplied by the kernel, or each tap is multiplied by the image and
    the products are shifted and added, whichever takes less memory; a batch is taken in parts where that would take too much.

    Args:
        x: Images, shape `(batch, in, height, width)`.
        weight: The kernel, shape `(out, in, rows, columns)`.
        stride: Stride of the rows and of the columns; one number for both, as below.
        padding: Zeros beside the rows and the columns, on both sides.
        dilation: Distance between neighbouring taps.

    Example:
        >>> x, weight = torch.randn(2, 3, 8, 8).double(), torch.randn(4, 3, 3, 3).double()
        >>> found = matrix_conv2d(x, weight, padding=(1, 1))
        >>> torch.allclose(found, F.conv2d(x, weight, padding=1), rtol=0, atol=1e-13)
        True
    """
    stride, padding, dilation = (_pair(option) for option in (stride, padding, dilation))
    taps = weight.shape[2:]
    padded = [side + 2 * p for side, p in zip(x.shape[2:], padding, strict=True)]
    size = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(padded, dilation, taps, stride, strict=True)]
    columns = x.shape[1] * size[0] * size[1]
    products = weight.shape[0] * padded[0] * padded[1]
    way = _columns if columns <= products or taps.numel() == 1 else _shifts
    least = min(columns, products) * taps.numel()
    parts = x.split(max(1, _MOST // max(1, least))) if taps.numel() > 1 else (x,)
    at = _Options(stride, padding, dilation, size)
    found = [way(part, weight, at) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True)
class _Options:
    """Of a convolution, each for rows and columns; `size` is that of its output."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    size: Sequence[int]


def _columns(x: Tensor, weight: Tensor, at: _Options) -> Tensor:
    """The kernel times the pixels under it."""
    x, stride, dilation, size = _padded(x, at.padding), at.stride, at.dilation, at.size
    one, channel, row, column = x.stride()
    steps = (one, channel, dilation[0] * row, dilation[1] * column, stride[0] * row, stride[1] * column)
    pixels = x.as_strided((*x.shape[:2], *weight.shape[2:], *size), steps, x.storage_offset()).reshape(
        len(x), weight[0].numel(), size[0] * size[1]
    )
    return _times(weight.flatten(1), pixels).unflatten(2, tuple(size))


def _shifts(x: Tensor, weight: Tensor, at: _Options) -> Tensor:
    """The sum of the products of each tap with the image, shifted to where they belong."""
    out, taps = len(weight), weight.shape[2:]
    products = _times(weight.permute(2, 3, 0, 1).flatten(0, 2), x.flatten(2)).unflatten(2, x.shape[2:])
    products = _padded(products, at.padding).unflatten(1, (*taps, out))
    stride, dilation, size = at.stride, at.dilation, at.size
    one, down, right, channel, row, column = products.stride()
    steps = (one, channel, stride[0] * row, stride[1] * column, down + dilation[0] * row, right + dilation[1] * column)
    return products.as_strided((len(x), out, *size, *taps), steps, products.storage_offset()).sum((-2, -1))


def _pair(option: int | Sequence[int]) -> Sequence[int]:
    return (option, option) if isinstance(option, int) else option


def _padded(x: Tensor, padding: Sequence[int]) -> Tensor:
    return F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x


def _times(matrix: Tensor, batch: Tensor) -> Tensor:
    """One matrix times each of a batch, without a copy of it for each."""
    return torch.bmm(matrix.expand(len(batch), *matrix.shape), batch)
