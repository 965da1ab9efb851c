"""What figures share: a logarithmic axis, curves, rules and labels, and histograms. The figure of one probe stands in its section."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bilip.record import Histogram, Measurement
from bilip.report.format import as_float, clean, number, power, share
from bilip.report.parts import Figure

__all__ = ["LEGEND", "SYMBOLS", "LogScale", "curve", "distribution_figure", "note", "rule", "safe_text"]

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
COARSE = 5
ROW = 112
CEILING = 3


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


def safe_text(text: Any, limit: int = 40) -> str:
    """Text for a figure, where tags would be read.

    Example:
        >>> safe_text("<b>flow</b>")
        '&lt;b&gt;flow&lt;/b&gt;'
    """
    return html.escape(clean(text, limit), quote=False)


def curve(
    name: str, values: Sequence[Any], scale: LogScale, texts: Sequence[str], *, style: int, dash: int, start: int = 0
) -> dict[str, Any]:
    """A line with marks over `start`, `start` + 1, ...; missing values leave a gap.

    `texts` are said when the pointer is over a value; `style` is the number of the colour and of the symbol.
    """
    tone = f"@c{style % 6 + 1}"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(range(start, start + len(values))),
        "y": [scale.place(v) for v in values],
        "text": list(texts),
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": tone, "dash": DASHES[dash % 6], "width": 2},
        "marker": {
            "color": tone,
            "symbol": SYMBOLS[style % 6],
            "size": 7,
            "maxdisplayed": 60 if len(values) > 120 else 0,
        },
    }


def note(text: str, x: float, y: float, *, xref: str = "paper", yref: str = "paper", **more: Any) -> dict[str, Any]:
    """A label that stands to the right of and above its point."""
    place = {"x": x, "xref": xref, "xanchor": "left", "y": y, "yref": yref, "yanchor": "bottom"}
    return {"text": text, "showarrow": False, **place, **more}


def rule(at: float, text: str, axis: str = "y", tone: str = "@muted") -> tuple[dict[str, Any], dict[str, Any]]:
    """A dashed line across the figure, and its label."""
    line = {"type": "line", "line": {"color": tone, "width": 1.5, "dash": "dash"}}
    look = {"font": {"size": 11, "color": tone}, "bgcolor": "@card"}
    if axis.startswith("y"):
        line |= {"yref": axis, "y0": at, "y1": at, "xref": "paper", "x0": 0, "x1": 1}
        return line, note(text, 1, at, yref=axis, **look) | {"xanchor": "right"}
    line |= {"xref": axis, "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1}
    return line, note(text, at, 1, xref=axis, **look) | {"xanchor": "center"}


def distribution_figure(
    measurements: Sequence[Measurement], name: str, title: str, unit: str, limit: Any = None
) -> Figure | None:
    """Histograms `name` of the measurements, a row for each, or None if there are none; values beyond the limit are drawn as wrong."""
    rows = [(m.source, m.histograms[name]) for m in measurements if name in m.histograms and m.histograms[name].count]
    if not rows:
        return None
    limit = as_float(limit)
    extremes = [v for _, h in rows for v in _extremes(h)]
    scale = LogScale([*extremes, *([limit] if limit > 0 and math.isfinite(limit) else [])], CEILING)
    data, notes = [], []
    layout: dict[str, Any] = {"showlegend": False, "bargap": 0, "shapes": scale.lane("x")}
    for i, (source, h) in enumerate(rows):
        axis = "" if i == 0 else str(i + 1)
        top, height = 1 - i / len(rows), 1 / len(rows)
        domain = [max(top - height + 0.02, 0), top - min(26 / (ROW * len(rows)), 0.3 * height)]
        trace = _bars(h, scale, limit)
        data.append(trace | {"yaxis": f"y{axis}"})
        layout[f"yaxis{axis}"] = {
            "domain": domain,
            "range": [0, max(trace["y"], default=1) * 1.08],
            "nticks": 3,
            "ticksuffix": " %",
            "zeroline": False,
        }
        text = f"<b>{safe_text(source) or 'all'}</b>  median {number(h.quantile(0.5))}, {share(h.share_non_finite)} Inf/NaN"
        notes.append(note(text, 0, domain[1], bgcolor="@card"))
    layout["xaxis"] = scale.axis(unit, 8) | {"anchor": f"y{len(rows) if len(rows) > 1 else ''}"}
    if limit > 0 and math.isfinite(limit):
        line, text = rule(scale.place(limit) or 0.0, f"wrong beyond {number(limit)}", "x", "@bad")
        layout["shapes"].append(line)
        low, high = map(float, layout["xaxis"]["range"])
        part = ((scale.place(limit) or 0.0) - low) / (high - low)
        side = "right" if part > 0.85 else "left" if part < 0.15 else "center"  # inside the figure
        notes.append(text | {"xanchor": side})
    layout["annotations"] = notes
    worst = max(rows, key=lambda row: (row[1].share_non_finite, as_float(row[1].largest)))
    summary = f"{title}: " + "; ".join(f"{s or 'all'} median {number(h.quantile(0.5))}" for s, h in rows[:6])
    summary += f". Worst on {worst[0] or 'all'}: {share(worst[1].share_non_finite)} not finite, largest finite {number(worst[1].largest)}."
    return Figure(title, summary, data, layout, ROW * len(rows) + 80)


def _extremes(h: Histogram) -> list[float]:
    edges = [_power(k / h.PER_DECADE) for k in (min(h.counts), max(h.counts) + 1)] if h.counts else []
    return [*edges, *([0.0] if h.zeros else []), *([math.inf] if h.infinite + h.nans else [])]


def _power(exponent: float) -> float:
    """10 to this power; the last bin of a histogram ends beyond the largest float."""
    return 10.0 ** min(exponent, 308.25)


@dataclass(frozen=True)
class _Bar:
    at: float
    width: float
    count: int
    wrong: bool
    text: str


def _bars(h: Histogram, scale: LogScale, limit: float) -> dict[str, Any]:
    width, lane = COARSE / h.PER_DECADE, 0.7 * scale.gap
    coarse: dict[int, int] = {}
    over = 0
    for k, n in h.counts.items():
        if scale.has_over and k >= scale.high * h.PER_DECADE:
            over += n
        else:
            coarse[k // COARSE] = coarse.get(k // COARSE, 0) + n
    bars = [_Bar(scale.zero, lane, h.zeros, False, "exactly 0")] if h.zeros else []
    for k, n in sorted(coarse.items()):
        low, high = _power(k * width), _power((k + 1) * width)
        bars.append(_Bar((k + 0.5) * width, width, n, low >= limit, f"{number(low)} to {number(high)}"))
    if over:
        bars.append(
            _Bar(scale.over, lane, over, True, f"above {number(_power(scale.high))}, up to {number(h.largest)}")
        )
    if h.infinite + h.nans:
        text = f"{h.infinite:,} Inf, {h.nans:,} NaN"
        bars.append(_Bar(scale.broken, lane, h.infinite + h.nans, True, text))
    return {
        "type": "bar",
        "x": [round(b.at, 4) for b in bars],
        "width": [round(b.width, 4) for b in bars],
        "y": [100 * b.count / h.count for b in bars],
        "text": [f"{b.text}<br>{b.count:,} of {h.count:,} samples, {share(b.count / h.count)}" for b in bars],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": ["@bad" if b.wrong else "@c1" for b in bars],
            "pattern": {
                "shape": ["/" if b.wrong else "" for b in bars],
                "fillmode": "overlay",
                "size": 6,
                "solidity": 0.25,
                "fgcolor": "@paper",
            },
            "line": {"width": 0},
        },
    }
