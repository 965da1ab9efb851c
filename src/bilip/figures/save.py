"""Write a figure as PNG, whole or not at all, with the same bytes for the same figure."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from bilip.errors import InputError
from bilip.figures.style import house
from bilip.record import write_aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save"]


def save(figure: Figure, path: str | Path, *, dpi: float = 250) -> None:
    """Write a figure as PNG: aside first, then renamed; neither a date nor a version goes into the file.

    Args:
        figure: What the functions of this room return.
        path: A file name that ends in `.png`; its folder exists.
        dpi: Pixels for one inch of paper.

    Raises:
        InputError: The name is not that of a PNG file, or the file cannot be written; an old one stays as it was.

    Example:
        >>> import tempfile
        >>> from bilip.figures import curves
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
