"""The house style: print sizes, fonts, and a look for each curve that also reads in black and white.

A figure is built and drawn inside `house`, so that a reader's own matplotlib settings neither change it nor are changed.
"""

from __future__ import annotations

import contextlib
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bilip.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "DOUBLE",
    "GREY",
    "SINGLE",
    "SMALL",
    "Look",
    "columns",
    "finish",
    "heading",
    "house",
    "legend",
    "look",
    "sheet",
    "square_sheet",
    "wrap",
]

SINGLE = 3.25
DOUBLE = 6.75
TEXT, SMALL = 8.0, 7.0
GREY = "#555555"
# Okabe and Ito (2008) without yellow, which is lost on white paper; neighbours differ in lightness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (7, 2)))
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


@dataclass(frozen=True)
class Look:
    """Colour, marker and dashes of one curve."""

    colour: str
    marker: str
    dashes: Any


def look(index: int) -> Look:
    """The look of the curve with this number; the first 280 differ.

    Example:
        >>> look(0).colour, look(7).marker
        ('#0072B2', '*')
    """
    return Look(_COLOURS[index % 7], _MARKERS[index % 8], _DASHES[index % 5])


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


def columns(count: int) -> int:
    """How many panels stand side by side: all of them up to five, then even rows of at most four."""
    return count if count <= 5 else math.ceil(count / math.ceil(count / 4))


def sheet(count: int, *, width: float, height: float, layout: Any = "constrained") -> tuple[Figure, list[Axes]]:
    """A figure with this many panels in rows; `height` is that of one row, in inches."""
    from matplotlib.figure import Figure

    across = columns(count)
    down = math.ceil(count / across)
    figure = Figure(figsize=(width, height * down), layout=layout)
    cells = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for cell in cells[count:]:
        cell.remove()
    return figure, cells[:count]


def square_sheet(count: int) -> tuple[Figure, list[Axes]]:
    """A figure for square panels, two or more over the whole page; it is too high until `finish` has cut it."""
    width = DOUBLE if count > 1 else SINGLE
    return sheet(count, width=width, height=width / columns(count) + 2, layout="compressed")


def wrap(text: str, inches: float) -> str:
    """Break a title so that it fits over its panel; a no-break space and a formula hold together."""
    width = max(8, int(inches * 72 / (0.57 * TEXT)))
    text = re.sub(r"\$[^$\n]*\$", lambda formula: formula[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")]
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def heading(axes: Axes, title: str, note: str, inches: float) -> None:
    """A title over a panel of this width, and under it a note in small print."""
    note = wrap(note, inches * TEXT / SMALL)
    axes.set_title(wrap(title, inches), pad=4 + 1.25 * SMALL * len(note.split("\n")))
    axes.annotate(
        note, (0.5, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", ha="center", va="bottom",
        fontsize=SMALL, color=GREY,
    )  # fmt: skip


def legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """One legend for all panels, in as many columns as the page is wide."""
    if not handles:
        return
    widths = [len(name) * 0.58 * SMALL / 72 + 0.5 for name in names]
    page = figure.get_figwidth()
    across = len(names) if sum(widths) <= page else max(1, int(page / max(widths)))
    figure.set_figheight(figure.get_figheight() + 0.16 * (math.ceil(len(names) / across) - 1))
    figure.legend(list(handles), list(names), loc="outside upper center", ncols=across, borderaxespad=0.1)


def finish(figure: Figure, squares: Sequence[Axes] = ()) -> Figure:
    """Draw once inside the house: ticks and layout are made now, and no later setting changes them.

    Square panels are as high as the page allows in width; with `squares` the figure is cut to the height that they need.
    """
    figure.draw_without_rendering()
    if squares:
        across = columns(len(squares))
        rows = [squares[start : start + across] for start in range(0, len(squares), across)]
        boxes = [[box for axes in row if (box := axes.get_tightbbox()) is not None] for row in rows]
        pixels = sum(max(box.y1 for box in row) - min(box.y0 for box in row) for row in boxes)
        pixels += sum(item.get_window_extent().height for item in figure.legends)
        figure.set_figheight(pixels / figure.dpi + 0.04 * (len(rows) + 1))
        figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure
