"""A logarithmic axis with a lane for zero and a lane for what is not finite, so that nothing drops out of a figure unseen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from bilip.report.format import as_float, number, power

__all__ = ["LogScale"]


class LogScale:
    """Positions on a logarithmic axis.

    Args:
        values: What the axis has to hold.
        ceiling: A power of ten; if values go more than two decades beyond, all that are beyond share one lane.

    Example:
        >>> scale = LogScale([1e-6, 1e-2, 0.0, float("inf")])
        >>> scale.place(1e-4), scale.place(0.0) < -6, scale.place(float("inf")) > -2
        (-4.0, True, True)
    """

    def __init__(self, values: Iterable[Any], ceiling: int | None = None) -> None:
        numbers = [as_float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        logs = [math.log10(abs(v)) for v in numbers if v and math.isfinite(v)]
        self.low, self.high = math.floor(min(logs, default=-1) + 0.05), math.ceil(max(logs, default=0) - 0.05)
        self.has_over = ceiling is not None and max(logs, default=0.0) > ceiling + 2
        if ceiling is not None and self.has_over:
            self.low, self.high = min(self.low, ceiling - 1), ceiling
        if self.high <= self.low:
            self.high = self.low + 1
        self.gap = max(0.08 * (self.high - self.low), 0.35)
        self.has_zero = any(v == 0 for v in numbers)
        self.has_broken = any(not math.isfinite(v) for v in numbers)
        self.zero, self.over = self.low - self.gap, self.high + self.gap
        self.broken = self.over + self.gap if self.has_over else self.over

    def place(self, value: Any) -> float | None:
        """Where a value stands; None for a missing one."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        value = as_float(value)  # a whole number may be beyond every float
        if value == 0:
            return self.zero
        if not math.isfinite(value):
            return self.broken
        log = math.log10(abs(value))
        return self.over if self.has_over and log > self.high else round(log, 4)

    def axis(self, title: str, most: int = 6) -> dict[str, Any]:
        """The axis for plotly."""
        step = max(1, math.ceil((self.high - self.low) / most))
        ticks: dict[float, str] = {self.zero: "0"} if self.has_zero else {}
        ticks |= {k: number(10.0**k) if -4 < k < 4 else power(k) for k in range(self.low, self.high + 1, step)}
        if self.has_over or self.has_broken:
            ticks = {k: text for k, text in ticks.items() if k < self.high or step == 1}
        ticks |= {self.over: f"> {power(self.high)}"} if self.has_over else {}
        ticks |= {self.broken: "Inf/NaN"} if self.has_broken else {}
        low = self.zero - self.gap / 2 if self.has_zero else self.low - self.gap / 3
        top = self.broken if self.has_broken else self.over
        high = top + self.gap / 2 if self.has_broken or self.has_over else self.high + self.gap / 3
        marks = {"tickvals": list(ticks), "ticktext": list(ticks.values())}
        return {"title": {"text": title}, "range": [low, high], "zeroline": False, **marks}

    def lane(self, axis: str = "y") -> list[dict[str, Any]]:
        """A shaded lane behind what is not finite."""
        if not self.has_broken:
            return []
        other = "x" if axis.startswith("y") else "y"
        low, high = self.broken - self.gap / 2, self.broken + self.gap / 2
        ends = {"y0": low, "y1": high, "x0": 0, "x1": 1} if other == "x" else {"x0": low, "x1": high, "y0": 0, "y1": 1}
        refs = {"yref": axis, "xref": "paper"} if other == "x" else {"xref": axis, "yref": "paper"}
        return [{"type": "rect", **ends, **refs, "fillcolor": "@lane", "line": {"width": 0}, "layer": "below"}]
