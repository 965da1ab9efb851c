"""The training domain [a, b]^2 as a dashed box, as in the figures of the paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bilip.figures.ticks import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["domain_entry", "draw_domain"]

_DASHES = (0, (3, 2))


def draw_domain(axes: Axes, box: tuple[float, float] | None, *, on_picture: bool = False) -> None:
    """Draw the box; on a picture in white over black, which shows on any colour."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import Normal, Stroke

    if box is None:
        return
    side = box[1] - box[0]
    frame = Rectangle((box[0], box[0]), side, side, fill=False, linestyle=_DASHES, linewidth=0.9, zorder=3)
    if on_picture:
        frame.set(edgecolor="white", path_effects=[Stroke(linewidth=2.0, foreground="black"), Normal()])
    axes.add_patch(frame)


def domain_entry(box: tuple[float, float] | None) -> dict[str, Any]:
    """Its entry in a legend; none without a box."""
    from matplotlib.lines import Line2D

    if box is None:
        return {}
    text = f"training domain [{number(box[0])}, {number(box[1])}]\N{SUPERSCRIPT TWO}"
    return {text: Line2D([], [], color="black", linestyle=_DASHES, linewidth=0.9)}
