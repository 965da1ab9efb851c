"""Small synthetic data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bilip.errors import InputError

__all__ = ["checkerboard", "gaussians", "two_moons"]


def checkerboard(count: int, seed: int = 0) -> Tensor:
    """Uniform samples on the eight dark squares, of side 2, of the 4 x 4 checkerboard on [-4, 4]^2.

    The density is 1/32 on the squares, so no model has a negative log-likelihood below log 32 = 3.466.

    Example:
        >>> x = checkerboard(1000)
        >>> x.shape, bool(((x >= -4) & (x <= 4)).all())
        (torch.Size([1000, 2]), True)
        >>> bool((((x + 4) / 2).floor().sum(1) % 2 == 0).all())
        True
    """
    generator = _generator("checkerboard", count, seed)
    square = torch.randint(8, (count,), generator=generator, device="cpu")
    column = square // 2
    row = 2 * (square % 2) + column % 2
    corner = torch.stack([column, row], dim=1)
    return 2 * (corner + torch.rand(count, 2, generator=generator, device="cpu")) - 4


def two_moons(count: int, seed: int = 0, *, noise: float = 0.1) -> Tensor:
    """Two half circles of radius 1 that reach into each other, with Gaussian noise.

    Example:
        >>> two_moons(1000).shape
        torch.Size([1000, 2])
    """
    generator = _generator("two_moons", count, seed)
    if not 0 <= noise < math.inf:
        raise InputError(f"two_moons(noise={noise}): expected a standard deviation, 0 or more.")
    angle = math.pi * torch.rand(count, generator=generator, device="cpu")
    upper = torch.rand(count, generator=generator, device="cpu") < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], dim=1) + noise * torch.randn(count, 2, generator=generator, device="cpu")


def gaussians(count: int, seed: int = 0, *, modes: int = 8, radius: float = 4.0, std: float = 0.5) -> Tensor:
    """Normal clouds, evenly placed on a circle.

    Example:
        >>> gaussians(1000, modes=5).norm(dim=1).mean().round()
        tensor(4.)
    """
    generator = _generator("gaussians", count, seed)
    if modes < 1 or not 0 <= std < math.inf or not 0 <= radius < math.inf:
        raise InputError(f"gaussians(modes={modes}, radius={radius}, std={std}): expected modes >= 1, the others >= 0.")
    angle = 2 * math.pi / modes * torch.randint(modes, (count,), generator=generator, device="cpu")
    center = radius * torch.stack([angle.cos(), angle.sin()], dim=1)
    return center + std * torch.randn(count, 2, generator=generator, device="cpu")


def _generator(name: str, count: int, seed: int) -> torch.Generator:
    if not isinstance(count, int) or count < 1:
        raise InputError(f"{name}(count={count!r}): expected a whole number, 1 or more.")
    return torch.Generator().manual_seed(seed)
