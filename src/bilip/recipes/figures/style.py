"""The style of print: sizes, a look for each curve that also reads in black and white, ticks, and files; and what a figure accepts.

A figure is built and drawn inside `house`, so that a reader's own matplotlib settings neither change it nor are changed.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bilip.errors import InputError
from bilip.record import write_aside
from bilip.report.plot import GREY, SMALL, TEXT, house

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SINGLE = 3.25
DOUBLE = 6.75
# Okabe and Ito (2008) without yellow, which is lost on white paper; neighbours differ in lightness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (7, 2)))


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


# ---- ticks


@dataclass(frozen=True)
class Ticks:
    """Places of the ticks, a text for each, and the places of small ticks without one."""

    major: np.ndarray
    names: list[str]
    minor: np.ndarray


def number(value: float) -> str:
    """A number on an axis, complete in itself: no factor stands elsewhere.

    Example:
        >>> number(2e-12), number(1e30), number(0.25)
        ('2e−12', '1e30', '0.25')
    """
    return _print(f"{value:g}")


def linear_ticks(low: float, high: float, *, count: int = 5) -> Ticks:
    """At most `count` + 1 ticks in [low, high], with the same number of digits.

    Example:
        >>> linear_ticks(0.9, 2.1).names
        ['1.0', '1.5', '2.0']
    """
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(count, steps=[1, 2, 5, 10]).tick_values(low, high)
    ticks = np.array([0.0 if abs(t) < 1e-9 * (high - low) else t for t in found if low <= t <= high])
    names = next(texts for n in range(6, 18) if len(set(texts := [f"{t:.{n}g}" for t in ticks])) == len(ticks))
    if not any("e" in name for name in names):
        digits = max((len(name.partition(".")[2]) for name in names), default=0)
        names = [f"{t:.{digits}f}" for t in ticks]
    return Ticks(ticks, [_print(name) for name in names], np.empty(0))


def log_ticks(low: float, high: float) -> Ticks:
    """Ticks between 10^low and 10^high, placed by exponent; where fewer than three decades lie inside, plain numbers.

    Example:
        >>> log_ticks(-8, 0).names[0], log_ticks(0, 0.7).names
        ('$10^{-8}$', ['1', '2', '5'])
    """
    low, high = low - 1e-3, high + 1e-3
    decades = np.arange(math.ceil(low), math.floor(high) + 1)
    if len(decades) >= 3 or high > 300 or low < -300:
        step = next((s for s in (1, 2, 5, 10, 20, 50) if len(decades) <= 6 * s), 100)
        major = decades[decades % step == 0]
        minor = decades if len(decades) <= 20 else np.empty(0)
        if step == 1 and len(decades) < 6:
            minor = (np.arange(math.floor(low), math.ceil(high))[:, None] + np.log10(np.arange(2, 10))).ravel()
        return Ticks(major, [f"$10^{{{k}}}$" for k in major], minor[(minor >= low) & (minor <= high)])
    values = np.outer(10.0 ** np.arange(math.floor(low), math.ceil(high)), [1, 2, 5]).ravel()
    values = values[(np.log10(values) >= low) & (np.log10(values) <= high)]
    if len(values) < 3:
        plain = linear_ticks(10**low, 10**high)
        return Ticks(np.log10(plain.major), plain.names, plain.minor)
    return Ticks(np.log10(values), [number(v) for v in values], np.empty(0))


def _print(text: str) -> str:
    mantissa, e, exponent = text.partition("e")
    return (mantissa + (f"e{int(exponent)}" if e else "")).replace("-", "\N{MINUS SIGN}")


# ---- files


def save(figure: Figure, path: str | Path, *, dpi: float = 200) -> None:
    """Write a figure as PNG: aside first, then renamed; neither a date nor a version goes into the file.

    Args:
        figure: What the functions of this room return.
        path: A file name that ends in `.png`; its folder exists.
        dpi: Pixels for one inch of paper.

    Raises:
        InputError: The name is not that of a PNG file, or the file cannot be written; an old one stays as it was.

    Example:
        >>> import tempfile
        >>> from bilip.recipes.figures import curves
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(curves({"loss": {"flow": ([0, 1, 2], [1.0, 0.1, 0.01])}}), f"{folder}/loss.png")
        ...     Path(folder, "loss.png").read_bytes()[1:4]
        b'PNG'
    """
    if Path(path).suffix.lower() != ".png":
        raise InputError(f"cannot write {str(path)!r}: expected a name that ends in .png.")
    if not hasattr(figure, "savefig"):
        raise InputError(f"cannot save a {type(figure).__name__}; expected a matplotlib Figure.")
    content = io.BytesIO()
    with house():
        figure.savefig(content, format="png", dpi=dpi, pil_kwargs={"compress_level": 0})
    write_aside(path, _smaller(content, dpi))


def _smaller(png: io.BytesIO, dpi: float) -> bytes:
    """The picture with 256 colours: a third of the size, and no difference on paper."""
    from PIL import Image  # matplotlib itself needs it

    small = io.BytesIO()
    picture = Image.open(png).convert("RGB")
    picture.quantize(256, Image.Quantize.MEDIANCUT, 3, None, Image.Dither.NONE).save(
        small, "png", optimize=True, dpi=(dpi, dpi)
    )
    return small.getvalue()


# ---- what a figure accepts: plain numbers in the right shape, or a sentence that says what was wrong


def named(value: Any, what: str) -> Mapping[str, Any]:
    """A mapping with at least one entry and text for keys."""
    if not isinstance(value, Mapping):
        raise InputError(f"{what} is a {type(value).__name__}; expected a mapping from names to data.")
    if not value:
        raise InputError(f"{what} is empty; expected at least one entry.")
    for name in value:
        if not isinstance(name, str):
            raise InputError(f"{what} has the key {name!r}; expected text, for it is printed.")
    return value


def array(values: Any, what: str, *, shape: tuple[int | None, ...] = (None,)) -> np.ndarray:
    """Numbers as float64 in the given shape, where None stands for any length; Inf and NaN pass.

    Example:
        >>> array([1, "inf"], "y")
        array([ 1., inf])
    """
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{what} is not an array of numbers ({error}).") from error
    if found.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, found.shape, strict=True)):
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise InputError(f"{what} has shape {found.shape}; expected ({expected}).")
    return found


def interval(value: Any, what: str) -> tuple[float, float]:
    """Two finite numbers, the smaller one first."""
    low, high = array(value, what, shape=(2,)).tolist()
    if not (np.isfinite([low, high]).all() and low < high):
        raise InputError(f"{what} is ({low:g}, {high:g}); expected two finite numbers, the smaller one first.")
    return low, high
