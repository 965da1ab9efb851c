r"""How a coupling block divides its input into the part $x_{I_1}$ that conditions and the part $x_{I_2}$ that is transformed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bilip.bounds import Box
from bilip.errors import BilipError, PartitionError
from bilip.nets.readable import as_born

__all__ = ["Checkerboard", "Indices", "Partition", "Split", "Streams"]


class Partition(nn.Module):
    """Divide and put together again.

    Attributes:
        feature_dim: Dimension of a net's output along which one joint net stacks shift and raw scale.
    """

    feature_dim: int = 1
    proof_methods: ClassVar[tuple[str, ...]] = ("split_box", "merge_box", "outputs_box")

    def require_sound(self) -> None:
        """Raise a `PartitionError` if its numbers were changed so that it is no partition any more."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        as_born(cls)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the nets see, and what is transformed."""
        raise BilipError(f"{type(self).__name__} defines no split.")

    def merge(self, x1: Tensor, x2: Tensor) -> Tensor:
        """The inverse of `split`."""
        raise BilipError(f"{type(self).__name__} defines no merge.")

    def outputs(self, h: Tensor) -> Tensor:
        """The entries of a net's output that belong to the transformed part."""
        return h

    def split_box(self, box: Box) -> tuple[Box, Box]:
        """`split` for a box."""
        if not box.shape:
            return box, box
        (low1, low2), (high1, high2) = self.split(box.low[None]), self.split(box.high[None])
        return Box(low1[0], high1[0]), Box(low2[0], high2[0])

    def merge_box(self, box1: Box, box2: Box) -> Box:
        """`merge` for a box."""
        if not (box1.shape and box2.shape):
            return Box.everything()
        return Box(self.merge(box1.low[None], box2.low[None])[0], self.merge(box1.high[None], box2.high[None])[0])

    def outputs_box(self, box: Box) -> Box:
        """`outputs` for a box."""
        return box.map(lambda end: self.outputs(end[None])[0]) if box.shape else box


class Split(Partition):
    """Contiguous parts along one dimension.

    Args:
        dim: Dimension of the batched input.
        size: Size of the first part; half, rounded down, by default.
        swap: Let the second part condition and transform the first.

    Example:
        >>> x1, x2 = Split(dim=1, swap=True).split(torch.tensor([[1.0, 2.0, 3.0]]))
        >>> x1, x2
        (tensor([[2., 3.]]), tensor([[1.]]))
    """

    def __init__(self, dim: int = 1, *, size: int | None = None, swap: bool = False) -> None:
        super().__init__()
        if size is not None and size < 1:
            raise PartitionError(f"Split(size={size}): the first part must hold at least one entry.")
        self.dim, self.size, self.swap = _check_dim(dim), size, swap
        self.feature_dim = dim if dim in (1, -1) else 1

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.shape[self.dim] if -x.ndim <= self.dim < x.ndim else 0
        size = total // 2 if self.size is None else self.size
        if not 0 < size < total:
            raise PartitionError(
                f"{self}: an input of shape {tuple(x.shape)} cannot be divided along dimension {self.dim} into {size} and "
                f"{total - size} entries; both parts need at least one."
            )
        first, second = x.split((size, total - size), self.dim)
        return (second, first) if self.swap else (first, second)

    def merge(self, x1: Tensor, x2: Tensor) -> Tensor:
        return torch.cat((x2, x1) if self.swap else (x1, x2), self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}" + (f", size={self.size}" if self.size else "") + (", swap=True" if self.swap else "")


class Indices(Partition):
    """Any two index sets along one dimension.

    Args:
        first: Indices of the conditioning part.
        second: Indices of the transformed part; all others by default.
        total: Size of the dimension.
        dim: Dimension of the batched input.

    Example:
        >>> part = Indices([0, 2], total=3)
        >>> part.split(torch.tensor([[1.0, 2.0, 3.0]]))
        (tensor([[1., 3.]]), tensor([[2.]]))
    """

    first: Tensor
    second: Tensor
    order: Tensor

    def __init__(self, first: Sequence[int], second: Sequence[int] | None = None, *, total: int, dim: int = 1) -> None:
        super().__init__()
        a = [int(i) for i in first]
        b = [i for i in range(total) if i not in set(a)] if second is None else [int(i) for i in second]
        if not a or not b:
            raise PartitionError(
                f"Indices: a part is empty (sizes {len(a)} and {len(b)} of {total}); both need at least one index."
            )
        both = a + b
        twice = sorted({i for i in both if both.count(i) > 1})
        if twice:
            raise PartitionError(f"Indices: the parts overlap or repeat at {twice}; every index may appear once.")
        if sorted(both) != list(range(total)):
            missing = sorted(set(range(total)) - set(both))
            outside = sorted(set(both) - set(range(total)))
            raise PartitionError(
                f"Indices: the parts must cover 0..{total - 1} (total={total}); missing {missing}, out of "
                f"range {outside}."
            )
        self.dim, self.total = _check_dim(dim), total
        self.feature_dim = dim if dim in (1, -1) else 1
        self.register_buffer("first", torch.tensor(a), persistent=False)
        self.register_buffer("second", torch.tensor(b), persistent=False)
        self.register_buffer("order", torch.argsort(torch.tensor(both)), persistent=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not -x.ndim <= self.dim < x.ndim or x.shape[self.dim] != self.total:
            raise PartitionError(
                f"{self}: an input of shape {tuple(x.shape)} does not have {self.total} entries along "
                f"dimension {self.dim}."
            )
        device = x.device
        return x.index_select(self.dim, self.first.to(device)), x.index_select(self.dim, self.second.to(device))

    def merge(self, x1: Tensor, x2: Tensor) -> Tensor:
        return torch.cat((x1, x2), self.dim).index_select(self.dim, self.order.to(x1.device))

    def require_sound(self) -> None:
        both = torch.cat((self.first, self.second))
        if len(both) != self.total or not torch.equal(
            both[self.order.clamp(0, len(both) - 1)], torch.arange(self.total, device=both.device)
        ):
            raise PartitionError(
                f"{self}: its buffers no longer hold each of 0..{self.total - 1} once, with the order that puts them back, so nothing "
                "can be proved. Were they left empty by to_empty()? Build the block anew."
            )

    def extra_repr(self) -> str:
        return f"{len(self.first)} + {len(self.second)} of {self.total}, dim={self.dim}"


class Checkerboard(Partition):
    """Alternating pixels of an image; the nets see the whole image with the other pixels set to zero.

    The output of a net has the shape of the image; the entries at the transformed pixels are used.

    Args:
        swap: Exchange the two colours.

    Example:
        >>> x1, x2 = Checkerboard().split(torch.arange(4.0).view(1, 1, 2, 2))
        >>> x1.tolist(), x2.tolist()
        ([[[[0.0, 0.0], [0.0, 3.0]]]], [[[1.0, 2.0]]])
    """

    def __init__(self, *, swap: bool = False) -> None:
        super().__init__()
        self.swap = swap
        self._known: dict[tuple[int, int, bool, torch.device], tuple[Tensor, ...]] = {}

    def _places(self, x: Tensor) -> tuple[Tensor, ...]:
        """Mask of the conditioning pixels, flat indices of both parts, and the order that merges them."""
        key = (x.shape[-2], x.shape[-1], self.swap, x.device)
        if key not in self._known:
            height, width, swap, device = key
            rows, columns = (torch.arange(size, device="cpu") for size in (height, width))
            mask = (rows[:, None] + columns) % 2 == (1 if swap else 0)
            kept, moved = mask.flatten().nonzero().squeeze(1), (~mask).flatten().nonzero().squeeze(1)
            places = (mask, kept, moved, torch.argsort(torch.cat((kept, moved))))
            self._known[key] = tuple(place.to(device) for place in places)
        return self._known[key]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim < 3 or x.shape[-2] * x.shape[-1] < 2:
            raise PartitionError(
                "Checkerboard: expected images (batch, channels, height, width) of two pixels or more, got "
                f"{tuple(x.shape)}."
            )
        return x.masked_fill(~self._places(x)[0], 0.0), self.outputs(x)

    def outputs(self, h: Tensor) -> Tensor:
        return h.flatten(-2).index_select(-1, self._places(h)[2])

    def merge(self, x1: Tensor, x2: Tensor) -> Tensor:
        _, kept, _, order = self._places(x1)
        return torch.cat((x1.flatten(-2).index_select(-1, kept), x2), -1).index_select(-1, order).view_as(x1)

    def extra_repr(self) -> str:
        return "swap=True" if self.swap else ""


class Streams(Partition):
    """Two streams of one shape, stacked along a dimension of size 2 that the nets do not see, as in reversible ResNets.

    Args:
        dim: Dimension of the batched input along which the streams are stacked.
        swap: Let the second stream condition and transform the first.

    Example:
        >>> x1, x2 = Streams().split(torch.zeros(5, 2, 3, 8, 8))
        >>> x1.shape
        torch.Size([5, 3, 8, 8])
    """

    def __init__(self, dim: int = 1, *, swap: bool = False) -> None:
        super().__init__()
        self.dim, self.swap = _check_dim(dim), swap

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim < 3 or not -x.ndim <= self.dim < x.ndim or x.shape[self.dim] != 2:
            raise PartitionError(
                f"{self}: expected two streams stacked along dimension {self.dim}, got shape {tuple(x.shape)}."
            )
        first, second = x.unbind(self.dim)
        return (second, first) if self.swap else (first, second)

    def merge(self, x1: Tensor, x2: Tensor) -> Tensor:
        return torch.stack((x2, x1) if self.swap else (x1, x2), self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}" + (", swap=True" if self.swap else "")


def _check_dim(dim: int) -> int:
    if dim == 0:
        raise PartitionError("dim=0 is the batch; pass the dimension of the features, for example dim=1.")
    return dim
