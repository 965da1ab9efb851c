"""Maps that move the entries of a sample around and change none: permutations, squeezing, flattening."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bilip.blocks.bijection import Bijection
from bilip.bounds import Box
from bilip.errors import InputError, PartitionError

__all__ = ["Flatten", "Permutation", "Squeeze"]


class _Rearranging(Bijection):
    """An isometry: both constants are 1, and a box goes through like a sample."""

    volume_preserving = True
    rearranges = True

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return 0.0

    log_lip_inverse = log_lip

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: self(end[None])[0])

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: self.inverse(end[None])[0])


class Permutation(_Rearranging):
    r"""$F(x)_i = x_{\pi(i)}$ along one dimension: an isometry, so both constants are 1.

    Args:
        order: The permutation $\pi$.
        dim: Dimension of the batched input that is permuted.

    Example:
        >>> Permutation.reverse(3)(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[3., 2., 1.]])
    """

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
        return cls(torch.randperm(features, generator=generator, device=generator and generator.device), dim=dim)

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


class Squeeze(_Rearranging):
    """Trade image size for channels, `(C, H, W)` to `(f² C, H / f, W / f)`: an isometry.

    Args:
        factor: The factor f.

    Example:
        >>> Squeeze()(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 12, 16, 16])
    """

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

    def extra_repr(self) -> str:
        return f"factor={self.factor}"


class Flatten(_Rearranging):
    """One long vector for each sample: an isometry.

    Args:
        shape: Shape of one input.

    Example:
        >>> Flatten((3, 2, 2))(torch.zeros(5, 3, 2, 2)).shape
        torch.Size([5, 12])
    """

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

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: end.flatten())

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: end.reshape(self.shape or ()))

    def extra_repr(self) -> str:
        return f"{self.shape}"
