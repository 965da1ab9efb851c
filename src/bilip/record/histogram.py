"""Distributions of any number of values, in one size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Histogram"]


@dataclass(frozen=True)
class Histogram:
    r"""How many values fell into each of a fixed set of logarithmic bins: a distribution of any number of samples in one size.

    Bin k holds values in $(10^{k/40}, 10^{(k+1)/40}]$, so that a quantile is known to 6 %, and always rounded up.

    Attributes:
        counts: Count by bin.
        zeros: Values that are exactly 0 (or below the smallest bin).
        infinite: Values that are infinite.
        nans: Values that are NaN.
        smallest: Smallest finite value, NaN if there is none.
        largest: Largest finite value, NaN if there is none.

    Example:
        >>> h = Histogram.of([0.0, 1e-3, 1e-2, float("inf")])
        >>> h.count, h.share_above(0.005), round(h.quantile(0.5), 4)
        (4, 0.5, 0.001)
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    infinite: int = 0
    nans: int = 0
    smallest: float = math.nan
    largest: float = math.nan

    PER_DECADE = 40

    @classmethod
    def of(cls, values: Any) -> Histogram:
        """The histogram of non-negative numbers: a list, an array or a one-dimensional tensor."""
        import numpy as np

        array = np.asarray(values.tolist() if hasattr(values, "tolist") else values, dtype=float).ravel()
        nans, infinite = np.isnan(array), np.isinf(array)
        finite = array[~(nans | infinite)]
        positive = finite[finite > 0]
        bins, counts = np.unique(
            np.ceil(np.log10(positive) * cls.PER_DECADE - 1e-9).astype(int) - 1, return_counts=True
        )
        return cls(
            counts={int(k): int(n) for k, n in zip(bins, counts, strict=True)},
            zeros=int(len(finite) - len(positive)),
            infinite=int(infinite.sum()),
            nans=int(nans.sum()),
            smallest=float(finite.min()) if len(finite) else math.nan,
            largest=float(finite.max()) if len(finite) else math.nan,
        )

    def __add__(self, other: Histogram) -> Histogram:
        counts = dict(self.counts)
        for k, n in other.counts.items():
            counts[k] = counts.get(k, 0) + n
        low = [v for v in (self.smallest, other.smallest) if not math.isnan(v)]
        high = [v for v in (self.largest, other.largest) if not math.isnan(v)]
        return Histogram(
            counts=counts,
            zeros=self.zeros + other.zeros,
            infinite=self.infinite + other.infinite,
            nans=self.nans + other.nans,
            smallest=min(low, default=math.nan),
            largest=max(high, default=math.nan),
        )

    @property
    def count(self) -> int:
        """Number of values, also those that are not finite."""
        return sum(self.counts.values()) + self.zeros + self.infinite + self.nans

    @property
    def share_non_finite(self) -> float:
        """Share of NaN and Inf; NaN for an empty histogram."""
        return (self.infinite + self.nans) / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """The value that a share `q` of all values does not exceed, rounded up to its bin; NaN counts as infinite."""
        if not self.count:
            return math.nan
        wanted = q * self.count
        seen = self.zeros
        if seen >= wanted and seen:
            return 0.0
        for k in sorted(self.counts):
            seen += self.counts[k]
            if seen >= wanted - 1e-9:
                return min(_edge(k + 1), self.largest)
        return math.inf

    def share_above(self, limit: float) -> float:
        """Share of values above a limit; NaN and Inf count as above. Values in the limit's own bin count if its largest does."""
        if not self.count:
            return math.nan
        above = self.infinite + self.nans
        for k, n in self.counts.items():
            if _edge(k) >= limit or (_edge(k + 1) > limit and self.largest > limit):
                above += n
        return above / self.count


def _edge(k: int) -> float:
    """The value where bin k begins; the last one ends beyond the largest float."""
    exponent = k / Histogram.PER_DECADE
    return 10.0**exponent if exponent < 308.25 else math.inf
