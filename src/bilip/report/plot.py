"""The figures of the page as matplotlib figures, for notebooks and papers."""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from bilip.errors import InputError, MissingExtra, nearest
from bilip.record import AuditRecord
from bilip.report.parts import Figure, Fold, Part
from bilip.report.sections import sections

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawn

__all__ = ["GREY", "SMALL", "TEXT", "house", "plot"]

TEXT, SMALL = 8.0, 7.0  # sizes of print, in points
GREY = "#555555"
_SETTINGS: dict[str, Any] = {
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": GREY,
    "axes.titlepad": 4.0,
    "axes.labelpad": 2.0,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.35,
    "grid.color": "#D0D0D0",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "ytick.minor.size": 1.2,
    "ytick.minor.width": 0.4,
    "xtick.major.pad": 2.0,
    "ytick.major.pad": 2.0,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.2,
    "hatch.linewidth": 0.4,
    "figure.constrained_layout.w_pad": 0.02,
    "figure.constrained_layout.h_pad": 0.02,
}

TONES = {
    "@c1": "#0072b2", "@c2": "#c25500", "@c3": "#00805c", "@c4": "#b8578f", "@c5": "#b07900", "@c6": "#3a8fc4",
    "@bad": "#b03a00", "@lane": "#fbe9df", "@guilty": "#fdeee5", "@muted": "#59636e", "@card": "#ffffff", "@paper": "#ffffff",
}  # fmt: skip
DASHES = {"dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (7, 2)), "longdashdot": (0, (7, 2, 1, 2))}
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X", "cross": "P"}


def plot(record: AuditRecord, what: str = "errors", *, which: int = 0) -> Drawn:
    """A figure of the page, drawn by matplotlib.

    Args:
        record: What `bilip.audit` returned, or `AuditRecord.load`.
        what: A section of the page: `"errors"`, `"map"`, `"blame"`, `"spectrum"`, `"precision"`, `"attack"`, `"sampling"`,
            `"likelihood"`, `"log-det"`, ..., or the name of a probe, also of yours, that leaves histograms.
        which: The figure of that section, where it has several: 0 is the first, the worst source.

    Returns:
        A `matplotlib.figure.Figure` of its own, which `pyplot` knows nothing about; `figure.savefig` writes it.

    Raises:
        InputError: The record has no such figure; the message lists those it has.
        MissingExtra: Matplotlib is not installed.

    Example:
        >>> from bilip.record import Histogram, Measurement
        >>> found = Measurement("reconstruction", "test", histograms={"relative": Histogram.of([1e-7, 2e-7, 1e-3])})
        >>> figure = plot(AuditRecord(measurements=(found,)), "errors")
        >>> figure.axes[-1].get_xlabel()
        'relative error'
    """
    if not isinstance(record, AuditRecord):
        raise InputError(f"plot: expected an AuditRecord (AuditRecord.load reads one); got {type(record).__name__}.")
    figures = {}
    for section in sections(record):
        found = list(_figures(section.parts))
        if found:
            figures[section.probe or section.id] = figures[section.id] = found
    if what not in figures:  # by its probe
        what = {"reconstruction": "errors"}.get(what, str(what).replace("_", "-"))
    if what not in figures:
        known = ", ".join(dict.fromkeys(map(repr, figures))) or "none"
        hint = nearest(str(what), figures, cutoff=0.6)
        raise InputError(f"plot({what!r}): the figures of this record are {known}.{hint}")
    if not isinstance(which, int) or not -len(figures[what]) <= which < len(figures[what]):
        raise InputError(f"plot({what!r}, which={which!r}): there are {len(figures[what])}, counted from 0.")
    return _drawn(figures[what][which])


@contextlib.contextmanager
def house() -> Iterator[None]:
    """Matplotlib's own defaults with the house's settings on top; what the user had set comes back at the end.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    try:
        import matplotlib.style
    except ImportError as error:
        raise MissingExtra("figures need matplotlib: pip install 'bilip[train]'.") from error
    with matplotlib.style.context(["default", _SETTINGS]):
        yield


def _figures(parts: Iterable[Part]) -> Iterator[Figure]:
    for part in parts:
        if isinstance(part, Figure):
            yield part
        elif isinstance(part, Fold):
            yield from _figures(part.parts)


def _drawn(spec: Figure) -> Drawn:
    with house():
        from matplotlib.figure import Figure as New

        figure = New(figsize=(6.4, 5.6) if spec.square else (6.75, max(2.2, spec.height / 110)), layout="constrained")
        names = [key for key in spec.layout if key.startswith("yaxis")] or ["yaxis"]
        names.sort(key=lambda key: -spec.layout.get(key, {}).get("domain", [0, 1])[1])
        heights = [b - a for a, b in (spec.layout.get(key, {}).get("domain", [0, 1]) for key in names)]
        rows = figure.subplots(len(names), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        axes = {_axis(key): row for key, row in zip(names, rows, strict=True)}
        for trace in spec.data:
            _trace(axes[trace.get("yaxis", "y")], trace)
        for key, row in zip(names, rows, strict=True):
            _ticks(row.yaxis, row.set_ylim, spec.layout.get(key, {}))
        bottom = rows[-1]
        _ticks(bottom.xaxis, bottom.set_xlim, spec.layout.get("xaxis", {}))
        _shapes(axes, spec.layout.get("shapes", ()))
        _notes(axes, rows, spec.layout.get("annotations", ()))
        if len({t.get("name") for t in spec.data if t.get("name")}) > 1 or spec.layout.get("showlegend"):
            handles, labels = rows[0].get_legend_handles_labels()
            if handles:
                figure.legend(handles, labels, loc="outside lower center", ncols=3)
        figure.suptitle(spec.title, fontsize=9, fontweight="bold")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def _trace(axes: Axes, trace: dict[str, Any]) -> None:
    if trace["type"] == "bar":
        marker = trace.get("marker", {})
        tones = [TONES.get(c, c) for c in marker.get("color", [])]
        bars = axes.bar(trace["x"], trace["y"], width=trace.get("width", 0.8), color=tones or None)
        for bar, hatch in zip(bars, marker.get("pattern", {}).get("shape", ()), strict=False):
            bar.set_hatch(hatch * 3 or None)
            bar.set_edgecolor("white" if hatch else "none")
    elif trace["type"] == "heatmap":
        _heatmap(axes, trace)
    else:
        symbols = trace["marker"].get("symbol", "circle")
        first = symbols if isinstance(symbols, str) else (symbols or ["circle"])[0]
        tone, values = TONES.get(trace["line"]["color"], trace["line"]["color"]), [_number(v) for v in trace["y"]]
        style: dict[str, Any] = {"color": tone, "linestyle": DASHES.get(trace["line"].get("dash", ""), "-")}
        style |= {"marker": MARKERS.get(first.removesuffix("-open"), "o"), "markevery": max(1, len(values) // 60)}
        axes.plot(trace["x"], values, label=_plain(trace.get("name", "")) or None, **style)
        if not isinstance(symbols, str):  # open marks: values that could not be resolved
            points = [(x, y) for x, y, s in zip(trace["x"], values, symbols, strict=True) if s.endswith("-open")]
            if points:
                look = {"markerfacecolor": "white", "markeredgecolor": tone, "marker": style["marker"]}
                axes.plot(*zip(*points, strict=True), linestyle="none", zorder=3, **look)


def _heatmap(axes: Axes, trace: dict[str, Any]) -> None:
    import numpy as np
    from matplotlib.colors import ListedColormap

    cells = np.array([[_number(v) for v in row] for row in trace["z"]])
    down, across = cells.shape
    x0, y0, dx, dy = trace["x0"], trace["y0"], trace["dx"], trace["dy"]
    ends = (x0 - dx / 2, x0 + (across - 0.5) * dx, y0 - dy / 2, y0 + (down - 0.5) * dy)
    scale = trace.get("colorscale")
    colours = ListedColormap([scale[0][1]]) if isinstance(scale, list) else str(scale or "viridis").lower()
    drawn = axes.imshow(np.ma.masked_invalid(cells), extent=ends, origin="lower", cmap=colours, interpolation="nearest")
    axes.grid(visible=False)
    bar = trace.get("colorbar")
    if bar and axes.figure is not None:
        key = axes.figure.colorbar(drawn, ax=axes, label=_plain(bar["title"]["text"]), ticks=bar["tickvals"])
        key.ax.set_yticklabels([_plain(t) for t in bar["ticktext"]])


def _ticks(axis: Any, limits: Any, spec: dict[str, Any]) -> None:
    if "range" in spec:
        limits(*spec["range"])
    if "tickvals" in spec:
        axis.set_ticks(spec["tickvals"], [_plain(t) for t in spec["ticktext"]])
    if spec.get("ticksuffix"):
        axis.set_major_formatter(f"{{x:g}}{spec['ticksuffix']}")
    if spec.get("title"):
        axis.set_label_text(_plain(spec["title"]["text"]))


def _shapes(axes: dict[str, Axes], shapes: Iterable[dict[str, Any]]) -> None:
    """Rules, lanes and boxes; one that spans the figure is drawn in each row."""
    from matplotlib.patches import Rectangle

    for shape in shapes:
        tone = TONES.get(shape["line"].get("color", ""), shape["line"].get("color", "none"))
        dash = DASHES.get(shape["line"].get("dash", ""), "-")
        yref = shape.get("yref", "y")
        for row in axes.values() if yref == "paper" else [axes[yref]]:
            if shape["type"] == "line":
                draw, at = (row.axvline, shape["x0"]) if yref == "paper" else (row.axhline, shape["y0"])
                draw(at, color=tone, linestyle=dash, linewidth=1)
            elif yref == "paper":
                row.axvspan(shape["x0"], shape["x1"], color=TONES[shape["fillcolor"]], linewidth=0, zorder=0)
            elif shape.get("xref") == "paper":
                row.axhspan(shape["y0"], shape["y1"], color=TONES[shape["fillcolor"]], linewidth=0, zorder=0)
            else:
                size = (shape["x1"] - shape["x0"], shape["y1"] - shape["y0"])
                width = shape["line"].get("width", 1) / 2
                row.add_patch(
                    Rectangle(
                        (shape["x0"], shape["y0"]), *size, fill=False, edgecolor=tone, linestyle=dash, linewidth=width
                    )
                )


def _notes(axes: dict[str, Axes], rows: Any, notes: Iterable[dict[str, Any]]) -> None:
    """Labels: of a row above it, of a point at the point, of the whole figure above its first row."""
    heads = [a for a in notes if a["xref"] == a["yref"] == "paper"]
    for row, note in zip(rows, heads, strict=False):
        row.set_title(_plain(note["text"]), loc="left", fontsize=7)
    for note in notes:
        if note in heads:
            continue
        tone = note.get("font", {}).get("color", "black")
        yref = note["yref"].removesuffix(" domain")
        row = rows[0] if yref == "paper" else axes[yref]
        x = "axes fraction" if note["xref"] == "paper" else "data"
        y = "axes fraction" if note["yref"] == "paper" or note["yref"].endswith("domain") else "data"
        back = {"facecolor": "black", "alpha": 0.65, "edgecolor": "none"} if tone == "#fff" else None
        beside = note["yref"] == "paper"  # of a vertical rule: beside its upper end
        row.annotate(
            _plain(note["text"]),
            (note["x"], note["y"]),
            (3, -2) if beside else (0, 2),
            xycoords=(x, y),
            textcoords="offset points",
            ha="left" if beside else note["xanchor"],
            va="top" if beside else "bottom",
            fontsize=6.5,
            color=TONES.get(tone, tone),
            bbox=back,
        )


def _axis(key: str) -> str:
    return "y" + key.removeprefix("yaxis")


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _plain(text: Any) -> str:
    """Text without the tags that the page reads, and without what matplotlib would take for a formula."""
    lines = str(text).replace("<br>", "\n")
    lines = re.sub(r"<sub>(.*?)</sub>", r"_\1", lines)
    return html.unescape(re.sub(r"</?[bi]>", "", lines)).replace("$", r"\$")
