"""One block of the inside of a `FactorOut`, as a map of the whole state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bilip.blocks.bijection import Bijection

__all__ = ["OnKept"]


class OnKept(Bijection):
    r"""A block that acts on the first entries of a flat state and leaves the rest alone: what a part of a `FactorOut` does.

    Args:
        block: The block inside.
        shape: Shape of what the block takes.

    Example:
        >>> from bilip.blocks import Permutation
        >>> OnKept(Permutation.reverse(2), shape=(2,))(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[2., 1., 3.]])
    """

    def __init__(self, block: Bijection, shape: Sequence[int]) -> None:
        super().__init__()
        self.block, self.kept_shape = block, tuple(shape)
        self.kept_latent = block.out_shape(self.kept_shape)
        self.volume_preserving = block.volume_preserving
        self.closed_form = block.closed_form

    def _split(self, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        size = math.prod(shape)
        return x[:, :size].unflatten(1, shape), x[:, size:]

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        kept, left = self._split(x, self.kept_shape)
        return torch.cat((self.block(kept, context).flatten(1), left), 1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        kept, left = self._split(z, self.kept_latent)
        return torch.cat((self.block.inverse(kept, context).flatten(1), left), 1)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept, left = self._split(x, self.kept_shape)
        inner, log_det = self.block.forward_and_log_det(kept, context)
        return torch.cat((inner.flatten(1), left), 1), log_det

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept, left = self._split(z, self.kept_latent)
        inner, log_det = self.block.inverse_and_log_det(kept, context)
        return torch.cat((inner.flatten(1), left), 1), log_det
