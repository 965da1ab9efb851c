"""From images to vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from bilip.blocks.bijection import Bijection
from bilip.bounds import Box
from bilip.errors import InputError

__all__ = ["Flatten"]


class Flatten(Bijection):
    """One long vector for each sample: an isometry.

    Args:
        shape: Shape of one input.

    Example:
        >>> import torch
        >>> Flatten((3, 2, 2))(torch.zeros(5, 3, 2, 2)).shape
        torch.Size([5, 12])
    """

    volume_preserving = True
    rearranges = True

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(int(n) for n in shape)
        self.size = math.prod(self.shape)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        self.check(x)
        self.out_shape(x.shape[1:])
        return x.flatten(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        self.check(z)
        self.in_shape(z.shape[1:])
        return z.view(z.shape[0], *self.in_shape(z.shape[1:]))

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        if tuple(shape) != self.shape:
            raise InputError(f"Flatten: expected samples of shape {self.shape}, got {tuple(shape)}.")
        return (self.size,)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        if tuple(shape) != (self.size,):
            raise InputError(f"Flatten: expected vectors of size {self.size}, got {tuple(shape)}.")
        return self.shape or ()

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return 0.0

    log_lip_inverse = log_lip

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: end.flatten())

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: end.reshape(self.shape or ()))

    def extra_repr(self) -> str:
        return f"{self.shape}"
