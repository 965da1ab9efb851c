"""Space to depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from bilip.blocks.bijection import Bijection
from bilip.bounds import Box
from bilip.errors import InputError

__all__ = ["Squeeze"]


class Squeeze(Bijection):
    """Trade image size for channels, `(C, H, W)` to `(f² C, H / f, W / f)`: an isometry.

    Args:
        factor: The factor f.

    Example:
        >>> import torch
        >>> Squeeze()(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 12, 16, 16])
    """

    volume_preserving = True
    rearranges = True

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        if factor < 1:
            raise InputError(f"Squeeze(factor={factor}): expected 1 or more.")
        self.factor = factor

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        self.out_shape(self._image(x))
        return F.pixel_unshuffle(x, self.factor)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        self.in_shape(self._image(z))
        return F.pixel_shuffle(z, self.factor)

    def _image(self, x: Tensor) -> tuple[int, ...]:
        self.check(x)
        return tuple(x.shape[1:])

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        f = self.factor
        if len(shape) != 3 or shape[1] % f or shape[2] % f:
            raise InputError(
                f"Squeeze(factor={f}): expected images (C, H, W) with H and W divisible by {f}, got {tuple(shape)}."
            )
        return (shape[0] * f * f, shape[1] // f, shape[2] // f)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        f = self.factor
        if len(shape) != 3 or shape[0] % (f * f):
            raise InputError(
                f"Squeeze(factor={f}): expected latents (C, H, W) with C divisible by {f * f}, got {tuple(shape)}."
            )
        return (shape[0] // (f * f), shape[1] * f, shape[2] * f)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return 0.0

    log_lip_inverse = log_lip

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: self(end[None])[0])

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: self.inverse(end[None])[0])

    def extra_repr(self) -> str:
        return f"factor={self.factor}"
