"""A bijection the other way round."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bilip.blocks.bijection import Bijection
from bilip.blocks.reach import Reach, Step
from bilip.bounds import Box
from bilip.errors import InputError
from bilip.nets.readable import is_itself

__all__ = ["Invert"]


class Invert(Bijection):
    r"""$F^{-1}$ as a bijection of its own, sharing the parameters of $F$.

    Args:
        bijection: The map $F$.

    Example:
        >>> import torch
        >>> from bilip import blocks
        >>> squeeze = blocks.Squeeze()
        >>> Invert(squeeze)(squeeze(torch.ones(1, 3, 4, 4))).shape
        torch.Size([1, 3, 4, 4])
    """

    def __init__(self, bijection: Bijection) -> None:
        super().__init__()
        if not isinstance(bijection, Bijection):
            raise InputError(f"Invert: expected a Bijection, got {type(bijection).__name__}.")
        self.bijection = bijection
        self.volume_preserving = bijection.volume_preserving
        self.closed_form = bijection.closed_form
        if bijection.shape is not None:
            self.shape = bijection.out_shape(bijection.shape)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.bijection.inverse(x, context)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return self.bijection(z, context)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.bijection.inverse_and_log_det(x, context)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.bijection.forward_and_log_det(z, context)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.bijection.in_shape(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.bijection.out_shape(shape)

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        inner = self.bijection.parts(name) if is_itself(self) else [(name or "0", self.bijection)]
        return [(path, self if len(inner) == 1 else Invert(block)) for path, block in reversed(inner)]

    def natural_domain(self) -> Box:
        return self.bijection.bijection.natural_domain() if isinstance(self.bijection, Invert) else Box.everything()

    def advance(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self.bijection.retreat(reach, context, formula, name)

    def retreat(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self.bijection.advance(reach, context, formula, name)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.bijection.log_lip_inverse(box, context, formula)

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.bijection.log_lip(box, context, formula)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return self.bijection.interval_inverse(box, context)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return self.bijection.interval(box, context)
