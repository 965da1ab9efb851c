"""How a measured error is distributed, one row for each source; zeros and broken values have columns of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bilip.record import Histogram, Measurement
from bilip.report.charts.marks import note, rule, safe_text
from bilip.report.charts.scale import LogScale
from bilip.report.format import as_float, number, share
from bilip.report.parts import Figure

__all__ = ["distribution_figure"]

COARSE = 5
ROW = 112
CEILING = 3


def distribution_figure(
    measurements: Sequence[Measurement], name: str, title: str, unit: str, limit: Any = None
) -> Figure | None:
    """Histograms `name` of the measurements, or None if there are none.

    Args:
        measurements: One for each row.
        name: Name of the histogram.
        title: Heading of the figure.
        unit: What the horizontal axis measures.
        limit: Values beyond are drawn as wrong.
    """
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
        notes.append(
            text | {"xanchor": "right" if part > 0.85 else "left" if part < 0.15 else "center"}
        )  # inside the figure
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
