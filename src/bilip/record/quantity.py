"""What a measured value is: its unit, its label, which way is better, and which threshold judges it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNITS", "Quantity", "quantity_named"]

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
