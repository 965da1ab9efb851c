"""A batch of values that are known up to an error."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from bilip.bounds import shares

__all__ = ["Point"]

_UNIT = 2.0**-20  # of lengths: in this one the length of every tensor of finite numbers is finite


@dataclass(frozen=True)
class Point:
    """A batch of values in float64, and for each sample how far it is at most from what it stands for.

    Attributes:
        value: The values, shape `(batch, ...)`.
        error: Upper bounds on the distances, in length, shape `(batch,)`.

    Example:
        >>> import torch
        >>> point = Point(torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
        >>> point.share(0.5)
        tensor([2.5000], dtype=torch.float64)
    """

    value: Tensor
    error: Tensor

    def share(self, factor: float) -> Tensor:
        """At least `factor`, which is at most 1, times the lengths of the samples; the values are read once, not each time."""
        return self._lengths * (factor / _UNIT)

    def with_error(self, error: Tensor) -> Point:
        """The same values with another error; what is known of their lengths stays."""
        found = Point(self.value, error)
        if "_lengths" in vars(self):
            vars(found)["_lengths"] = self._lengths
        return found

    @functools.cached_property
    def _lengths(self) -> Tensor:
        return shares(_UNIT, self.value)
