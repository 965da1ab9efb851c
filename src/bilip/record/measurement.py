"""What a probe found on a source: values with their units and labels, distributions, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["UNITS", "Histogram", "Measurement", "Picture", "Quantity", "quantity_named"]

Scalar = float | int | str | bool | None
UNITS = {
    "": "a plain number",
    "share": "a part of all samples, 0 to 1",
    "relative": "relative to the size of a sample",
    "count": "a whole number",
    "nats": "nats",
    "nats/dim": "nats per dimension",
    "bits/dim": "bits per dimension",
    "rad": "radians",
    "log10": "the decimal logarithm of a number that may be beyond every float",
    "flag": "yes or no",
    "text": "words",
}


@dataclass(frozen=True)
class Quantity:
    """What a value of a measurement is; verdicts, tables, pages and comparisons read it and nothing else.

    Attributes:
        name: Name of the value in `Measurement.values`, or of a column of its rows.
        label: What people call it, as in "median relative error".
        unit: One of `UNITS`.
        better: `"lower"`, `"higher"`, or empty where neither is.
        judged_by: The field of `Thresholds` that it is compared with; empty if it is shown and not judged.
        uses: The uses whose verdict it decides.

    Example:
        >>> angle = Quantity("angle", "gradient angle", "rad", "lower", judged_by="angle", uses=("reversible-gradients",))
        >>> angle.judged, Quantity("count").label
        (True, 'count')
    """

    name: str
    label: str = ""
    unit: str = ""
    better: str = ""
    judged_by: str = ""
    uses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(
                f"Quantity({self.name!r}, unit={self.unit!r}): expected one of {', '.join(map(repr, UNITS))}."
            )
        if self.better not in ("", "lower", "higher"):
            raise ValueError(f"Quantity({self.name!r}, better={self.better!r}): expected 'lower', 'higher' or ''.")
        if not self.label:
            object.__setattr__(self, "label", self.name.replace("_", " "))
        object.__setattr__(self, "uses", tuple(self.uses))

    @property
    def judged(self) -> bool:
        """Whether a verdict depends on it."""
        return bool(self.judged_by and self.uses)


def quantity_named(name: str) -> Quantity:
    """What a name of version 0.1 means; its records hold names alone, and so may measurements made by hand.

    Example:
        >>> quantity_named("share_nan").unit, quantity_named("relative_p999").label
        ('share', 'p99.9 relative error')
    """
    unit, better, label = "", "", _LABELS.get(name, "")
    if "share" in name:
        unit = "share"
    elif "log10" in name:
        unit = "log10"
    elif name.startswith(("relative", "latent_relative", "after_relative", "reencode_relative", "carried", "local")):
        unit = "relative"
    if unit in ("share", "relative") or name in ("condition", "angle", "antisymmetry_p999"):
        better = "lower"
    if name == "share_trusted":
        better = "higher"
    return Quantity(name, label, unit, better)


_LABELS = {
    "relative_median": "median relative error",
    "relative_p99": "p99 relative error",
    "relative_p999": "p99.9 relative error",
    "relative_max": "largest relative error",
    "share_non_finite": "share of Inf/NaN",
    "share_wrong": "share of wrong reconstructions",
    "share_failed": "share of samples that raised",
    "antisymmetry_p999": "p99.9 of |log det F + log det F⁻¹| per dimension",
    "condition": "condition number",
}


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


@dataclass(frozen=True)
class Picture:
    """A small image for the report.

    Attributes:
        title: What it shows.
        alt: The same for those who cannot see it.
        png: The PNG file, base64.
        group: Pictures of one group stand side by side, as an input and its reconstruction.
    """

    title: str
    alt: str
    png: str
    group: str = ""


@dataclass(frozen=True)
class Measurement:
    """What one probe found on one source.

    Attributes:
        probe: Name of the probe.
        source: Name of the source; empty if the probe does not speak about one.
        values: Numbers and words by name.
        series: Curves by name.
        rows: A table, for example one row for each block.
        histograms: Distributions by name.
        pictures: Images for the report.
        notes: Sentences that a reader of the numbers has to know.
        reason: Why nothing was measured; empty if something was.
        quantities: What the values and the columns of the rows are.

    Example:
        >>> m = Measurement("reconstruction", "test", values={"relative_max": float("inf")})
        >>> m.measured, m["relative_max"], m.quantity("relative_max").label
        (True, inf, 'largest relative error')
    """

    probe: str
    source: str = ""
    values: Mapping[str, Scalar] = field(default_factory=dict)
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    rows: tuple[Mapping[str, Scalar], ...] = ()
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    quantities: tuple[Quantity, ...] = ()

    def quantity(self, name: str) -> Quantity:
        """What the value of this name is; for a measurement that does not say, what version 0.1 meant by the name."""
        return next((q for q in self.quantities if q.name == name), None) or quantity_named(name)

    @property
    def measured(self) -> bool:
        """Whether there are numbers."""
        return not self.reason

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A value by name, or the default."""
        return self.values.get(name, default)
