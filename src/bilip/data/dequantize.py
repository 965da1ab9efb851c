"""Noise that turns grey levels into a density, and the cell that it fills."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilip.errors import InputError

__all__ = ["Cell", "cell", "dequantize", "grey_level"]


@dataclass(frozen=True)
class Cell:
    """The cell $[c - h, c + h)$ of one grey level, entry by entry.

    Attributes:
        center: c, of the shape of x.
        half: h, one number.

    Example:
        >>> found = cell(torch.tensor([[0.3]]), bits=2)
        >>> found.center - found.half, found.center + found.half
        (tensor([[0.2500]]), tensor([[0.5000]]))
    """

    center: Tensor
    half: float


def dequantize(levels: Tensor, bits: int = 8, generator: torch.Generator | None = None) -> Tensor:
    r"""$(k + u) / 2^b$ with $u$ uniform on [0, 1): float32 in [0, 1), uniform on the cell of each grey level k.

    A flow fitted to these has a likelihood that bounds the one of the levels from below, at
    `Flow.bits_per_dim(x, bits=b)`. The sum is rounded down where float32 would round it up into the next cell.

    Args:
        levels: Whole numbers 0 to 2**bits - 1, of any dtype.
        bits: b, from 1 to 16; images kept at 5 bits have levels `pixels // 8`.
        generator: Source of the noise; by default torch's global one.

    Raises:
        InputError: A level is out of range or not whole.

    Example:
        >>> levels = torch.tensor([[0, 128, 255]], dtype=torch.uint8)
        >>> x = dequantize(levels, 8, torch.Generator().manual_seed(0))
        >>> (x * 256).floor()
        tensor([[  0., 128., 255.]])
    """
    count = _levels(bits)
    if levels.is_floating_point() and not bool((levels == levels.floor()).all()):
        raise InputError(f"dequantize: levels must be whole numbers 0 to {count - 1}; got fractions or NaN.")
    if levels.is_complex() or levels.dtype == torch.bool:
        raise InputError(f"dequantize: levels are {levels.dtype}; expected whole numbers, such as uint8.")
    if levels.numel() and not 0 <= int(levels.min()) <= int(levels.max()) < count:
        raise InputError(
            f"dequantize(bits={bits}): levels run from {int(levels.min())} to {int(levels.max())}; expected 0 to "
            f"{count - 1}. Reduce 8-bit pixels with `pixels // {2 ** max(8 - bits, 0)}`."
        )
    whole = levels.to(torch.float32)
    noise = torch.rand(levels.shape, generator=generator, device=levels.device, dtype=torch.float32)
    largest = torch.nextafter(whole + 1, torch.zeros_like(whole))
    return torch.minimum(whole + noise, largest) / count


def cell(x: Tensor, bits: int = 8) -> Cell:
    r"""The dequantization cell around x: centre $(\lfloor 2^b x \rfloor + 1/2)/2^b$, half-width $2^{-b}/2$.

    Every point of the cell stands for the same image, so an attack that stays inside it is in distribution by design.

    Args:
        x: Dequantized data in [0, 1).
        bits: b, from 1 to 16.

    Example:
        >>> found = cell(torch.tensor([[0.0, 0.49, 0.5]]), bits=1)
        >>> found.center, found.half
        (tensor([[0.2500, 0.2500, 0.7500]]), 0.25)
    """
    _levels(bits)
    if not x.is_floating_point():
        raise InputError(f"cell: x is {x.dtype}; expected dequantized floats in [0, 1).")
    if x.numel() and not bool(((x >= 0) & (x < 1)).all()):
        raise InputError(
            f"cell: x runs from {float(x.min()):.6g} to {float(x.max()):.6g}; expected dequantized data in [0, 1)."
        )
    return Cell(((grey_level(x, bits) + 0.5) / 2**bits).to(x.dtype), 0.5 / 2**bits)


def grey_level(x: Tensor, bits: int, origin: float = 0.0) -> Tensor:
    """The level of each entry, in float64, from 0 at the origin to 2**bits - 1 at the origin plus 1 and just below it."""
    return ((x.double() - origin) * 2**bits).floor().clamp(0, 2**bits - 1)


def _levels(bits: int) -> int:
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise InputError(f"bits={bits!r}: expected a whole number from 1 to 16.")
    return 2**bits
