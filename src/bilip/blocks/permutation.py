"""Fixed permutations of features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bilip.blocks.bijection import Bijection
from bilip.bounds import Box
from bilip.errors import PartitionError

__all__ = ["Permutation"]


class Permutation(Bijection):
    r"""$F(x)_i = x_{\pi(i)}$ along one dimension: an isometry, so both constants are 1.

    Args:
        order: The permutation $\pi$.
        dim: Dimension of the batched input that is permuted.

    Example:
        >>> Permutation.reverse(3)(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[3., 2., 1.]])
    """

    volume_preserving = True
    rearranges = True
    order: Tensor
    undo: Tensor

    def __init__(self, order: Sequence[int] | Tensor, *, dim: int = 1) -> None:
        super().__init__()
        order = torch.as_tensor(order)
        if (
            order.ndim != 1
            or order.is_floating_point()
            or sorted(order.tolist()) != list(range(len(order)))
            or not len(order)
        ):
            raise PartitionError(
                f"Permutation: {order.tolist()} is not a permutation of 0..{max(0, order.numel() - 1)}."
            )
        self.dim = dim
        self.register_buffer("order", order.long())
        self.register_buffer("undo", torch.argsort(order), persistent=False)

    @classmethod
    def reverse(cls, features: int, *, dim: int = 1) -> Permutation:
        """The features in reverse order."""
        return cls(torch.arange(features - 1, -1, -1), dim=dim)

    @classmethod
    def shuffle(cls, features: int, *, dim: int = 1, generator: torch.Generator | None = None) -> Permutation:
        """A random order, drawn once."""
        return cls(torch.randperm(features, generator=generator), dim=dim)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.undo = torch.argsort(self.order)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        self.check(x, len(self.order), self.dim)
        return x.index_select(self.dim, self.order)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        self.check(z, len(self.order), self.dim)
        return z.index_select(self.dim, self.undo)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        undone = self.order.gather(0, self.undo) if len(self.undo) == len(self.order) else self.order
        if not torch.equal(undone, torch.arange(len(undone), device=undone.device)):
            raise PartitionError(
                f"{self}: its buffers, order {self.order.tolist()} and undo {self.undo.tolist()}, are not a permutation and "
                "its inverse, so nothing can be proved. Set order with load_state_dict, or build a new Permutation."
            )
        return 0.0

    log_lip_inverse = log_lip

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: self(end[None].to(self.order.device))[0])

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: self.inverse(end[None].to(self.order.device))[0])

    def extra_repr(self) -> str:
        return f"{len(self.order)}, dim={self.dim}"
