"""Three small trained flows on the 2-D checkerboard, for `bilip demo` and for trying things out.

They differ in one thing, and so do their inverses: affine coupling with a scale in (0, 1), affine coupling with a scale
in (0.5, 1), and residual blocks held to the constant 0.8. `benchmarks/train_demo.py` trains them; `trained.json` in
each folder says how, and what was measured.
"""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

from bilip.errors import InputError

if TYPE_CHECKING:
    from bilip.blocks import Flow

__all__ = ["NAMES", "how_trained", "load_demo_flow"]

NAMES = ("affine_sigmoid", "affine_half", "residual")


def load_demo_flow(name: str) -> Flow:
    """One of the flows, float32, in evaluation mode.

    Example:
        >>> flow = load_demo_flow("affine_half")
        >>> flow.sample(3).shape
        torch.Size([3, 2])
    """
    from bilip.models import load

    with as_file(files(__name__) / _known(name)) as folder:
        return load(folder).eval()


def how_trained(name: str) -> dict[str, Any]:
    """Command, seed, test likelihood and measured reconstruction errors of one of the flows.

    Example:
        >>> how_trained("residual")["seed"]
        0
    """
    return json.loads((files(__name__) / _known(name) / "trained.json").read_text())


def _known(name: str) -> str:
    if name not in NAMES:
        raise InputError(f"there is no demo flow {name!r}; there are {', '.join(NAMES)}.")
    return name
