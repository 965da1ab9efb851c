"""Axis-aligned boxes: the sets on which bounds are asked for and proved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bilip.bounds.logs import EPS, INF, as_float64, log_norm
from bilip.errors import InputError

__all__ = ["Box"]


class Box:
    r"""The axis-aligned box $[a, b]$: the set on which a bound is asked for or proved.

    Args:
        low: Lower end, a number or a tensor of the shape of one sample (no batch dimension).
        high: Upper end, likewise; infinite ends are allowed.
        shape: Shape of one sample, when `low` and `high` are numbers. A box of numbers takes the shape of the
            model it is given to, where the model knows it.

    Example:
        >>> box = Box(-4, 4)
        >>> box.expand((2,)).contains(torch.tensor([[0.0, 3.0], [0.0, 5.0]]))
        tensor([ True, False])
    """

    __slots__ = ("high", "low")

    def __init__(self, low: float | Tensor, high: float | Tensor, shape: Sequence[int] | None = None) -> None:
        try:
            # Copies: what was proved on a box stays true when the caller writes into a tensor that it was made of.
            low_, high_ = torch.broadcast_tensors(as_float64(low).clone(), as_float64(high).clone())
            if shape is not None:
                low_, high_ = low_.expand(tuple(shape)), high_.expand(tuple(shape))
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"Box({_short(low)}, {_short(high)}, shape={shape}): the ends must be numbers or tensors that broadcast "
                f"to one shape ({error})."
            ) from error
        if torch.isnan(low_).any() or torch.isnan(high_).any():
            raise InputError("Box: an end is NaN. Pass numbers, or infinities for an unbounded side.")
        if (low_ > high_).any():
            raise InputError(
                f"Box({_short(low)}, {_short(high)}) is empty: a lower end lies above its upper end. Swap the two."
            )
        self.low, self.high = low_, high_

    @classmethod
    def everything(cls, shape: Sequence[int] | None = None) -> Box:
        """All of space."""
        return cls(-INF, INF, shape)

    @classmethod
    def point(cls, value: Tensor) -> Box:
        """The box that holds one point."""
        return cls(value, value)

    @classmethod
    def outward(cls, low: Tensor, high: Tensor, error: Tensor | float = 0.0) -> Box:
        """A box widened by `error` and by the rounding of its own ends; NaN (`inf - inf`) becomes unbounded."""
        low = low - error - 4 * EPS * low.abs() - 1e-300
        high = high + error + 4 * EPS * high.abs() + 1e-300
        return cls(low.nan_to_num(-INF, INF, -INF), high.nan_to_num(INF, INF, -INF))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample; `()` for a box that takes any shape."""
        return tuple(self.low.shape)

    @property
    def is_bounded(self) -> bool:
        """Whether every end is finite."""
        return bool(torch.isfinite(self.low).all() and torch.isfinite(self.high).all())

    @property
    def center(self) -> Tensor:
        """The midpoint, for a bounded box."""
        return self.low / 2 + self.high / 2

    @property
    def radius(self) -> Tensor:
        """Half the side lengths, rounded up so that `center ± radius` covers the box."""
        return torch.maximum(self.high - self.center, self.center - self.low) * (1 + 4 * EPS)

    @property
    def log_radius(self) -> float:
        """Log of the Euclidean norm of `radius`."""
        return log_norm(self.radius)

    @property
    def magnitude(self) -> float:
        r"""The paper's $\max(|a|, |b|)$: the largest absolute value of a coordinate."""
        if self.low.numel() == 0:
            return 0.0
        return float(torch.maximum(self.low.abs(), self.high.abs()).max())

    def expand(self, shape: Sequence[int]) -> Box:
        """The same box for samples of the given shape."""
        return Box(self.low, self.high, shape)

    def map(self, function) -> Box:
        """Apply a rearrangement of entries (reshape, permutation, slice) to both ends."""
        return Box(function(self.low), function(self.high))

    def intersect(self, other: Box) -> Box:
        """The overlap of two boxes that both enclose one set."""
        low, high = torch.maximum(self.low, other.low), torch.minimum(self.high, other.high)
        return Box(torch.minimum(low, high), torch.maximum(low, high))

    def contains(self, x: Tensor) -> Tensor:
        """For each sample of a batch `(B, *shape)`: does it lie in the box?"""
        value = as_float64(x)
        return ((value >= self.low) & (value <= self.high)).flatten(1).all(1)

    def sample(self, count: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw points uniformly from a bounded box; float64, shape `(count, *shape)`."""
        if not self.is_bounded:
            raise InputError("Box.sample: the box is unbounded. Give it finite ends, for example Box(-4, 4).")
        unit = torch.rand(count, *self.shape, generator=generator, dtype=torch.float64, device="cpu")
        return self.low + unit * (self.high - self.low)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and torch.equal(self.low, other.low) and torch.equal(self.high, other.high)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        low, high = self.low, self.high
        if low.numel() == 0:
            return f"Box(shape={self.shape})"
        if bool((low == low.flatten()[0]).all() and (high == high.flatten()[0]).all()):
            ends = f"{float(low.flatten()[0]):.4g}, {float(high.flatten()[0]):.4g}"
        elif low.numel() <= 4:
            ends = f"{_numbers(low)}, {_numbers(high)}"
        else:
            ends = f"low in [{float(low.min()):.4g}, {float(low.max()):.4g}], high in [{float(high.min()):.4g}, {float(high.max()):.4g}]"
        return f"Box({ends}{f', shape={self.shape}' if self.shape else ''})"


def _numbers(t: Tensor) -> str:
    return "[" + ", ".join(f"{v:.4g}" for v in t.flatten().tolist()) + "]"


def _short(value: object) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, Tensor) and value.ndim else str(value)
