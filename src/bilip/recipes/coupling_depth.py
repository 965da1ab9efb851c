"""Rounding errors in two constructed coupling blocks, repeated.

The block of the paper has t(x1) = 0.123456789 and g(s(x1)) = 0.1 on (x1, x2) = (1, 1): affine y2 = x2 * 0.1 + t, additive y2 = x2 + t. The
halves do not take turns. A constant t makes the Jacobian diag(1, 0.1^n), so its singular values are known; they are measured all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bilip import Chain
from bilip.blocks import AdditiveCoupling, AffineCoupling, Split
from bilip.blocks.scale import SigmoidScale
from bilip.probes import jacobian
from bilip.recipes import figures
from bilip.recipes.recipe import Figures, Found, Line, Measured, Recipe, Work, require

__all__ = ["RECIPE", "Config"]


@dataclass(frozen=True)
class Config:
    """Sizes of the figure; the same for every size of the recipe, as it takes seconds."""

    depth: int = 60  # largest number of blocks
    t: float = 0.123456789  # the shift
    g: float = 0.1  # the scale

    def __post_init__(self) -> None:
        require(self, free=("t",))


class Constant(nn.Module):
    """A net that has the same outputs for every input."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.values.expand(len(x), -1)


def chain(kind: str, depth: int, config: Config, dtype: torch.dtype) -> Chain:
    """So many equal blocks, without taking turns."""
    if kind == "additive":
        blocks = [AdditiveCoupling(Constant(config.t), Split()) for _ in range(depth)]
    else:
        scale = SigmoidScale(0.0, 2 * config.g, shift=0.0)  # exactly g at 0, in every precision
        blocks = [AffineCoupling(Constant(config.t, 0.0), scale=scale, partition=Split()) for _ in range(depth)]
    return Chain(*blocks, shape=(2,)).to(dtype).eval()


class CouplingDepth(Recipe):
    """Reconstruction error, singular values and condition number against depth."""

    name = "coupling_depth"
    where = "figure on numerical error and instability in coupling blocks"
    claim = "Repeated affine blocks lose their input to rounding, exponentially in depth; additive blocks do not."
    sizes: Mapping[str, Config] = {"quick": Config(), "gpu": Config(), "paper": Config()}
    cost: Mapping[str, str] = dict.fromkeys(("quick", "gpu", "paper"), "seconds on one core")
    corrected = (
        "The original has no code for this figure; the blocks here are those of the library. The halves do not take turns: the paper's "
        "text says 'the trivial partition'.",
    )

    def parts(self, config: Config) -> Sequence[str]:
        return ("float32", "float64")

    def run(self, part: str, config: Config, work: Work) -> Measured:
        dtype = getattr(torch, part)
        x = torch.ones(1, 2, dtype=dtype, device=work.device)
        found: dict[str, dict[str, list[float]]] = {}
        for kind in ("affine", "additive"):
            blocks, rows = list(chain(kind, config.depth, config, dtype).to(work.device)), []
            z, slope = x, torch.eye(2, dtype=torch.float64, device=work.device)
            for depth in range(1, config.depth + 1):
                slope = jacobian(blocks[depth - 1], z) @ slope  # diagonal, so that no small value is lost
                model = Chain(*blocks[:depth], shape=(2,))
                with torch.no_grad():
                    z = model(x)
                    error = float((model.inverse(z) - x).double().norm())
                high, low = torch.linalg.svdvals(slope).tolist()
                rows.append((error, low, high, high / low))
                work.progress(f"{kind}, {depth} blocks", (depth / config.depth + (kind == "additive")) / 2)
            names = ("error", "sigma_min", "sigma_max", "condition")
            found[kind] = {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
        return Measured(found)

    def lines(self, config: Config, found: Found) -> list[Line]:
        affine, additive = (found[min(found)]["float32"].numbers[kind]["error"] for kind in ("affine", "additive"))
        said = self.paper()["in_short"]
        lost = next((k + 1 for k, error in enumerate(affine) if not math.isfinite(error)), None)
        tail = f", not finite from depth {lost}" if lost else ""
        shown = ", ".join(f"{affine[k - 1]:.2g} at {k}" for k in (1, 5, 10, 20) if k <= config.depth)
        rising = affine[min(config.depth, 10) - 1] > 1e3 * max(affine[0], torch.finfo(torch.float32).eps)
        small = found[min(found)]["float32"].numbers["affine"]["sigma_min"]
        vanishing = all(b < a for a, b in zip(small, small[1:], strict=False)) and small[-1] < 1e-3
        wide = found[min(found)]["float64"].numbers["affine"]["error"]
        return [
            Line("error of affine blocks, float32", said["affine"], shown + tail, rising),
            Line(
                "smallest singular value of affine blocks",
                said["sigma_min"],
                f"{small[-1]:.2g} at {config.depth}",
                vanishing,
            ),
            Line(
                "error of additive blocks, float32",
                said["additive"],
                f"at most {max(additive):.2g}",
                max(additive) <= 1.2e-7,
            ),
            Line(
                "error of affine blocks, float64",
                "",
                f"{wide[min(config.depth, 20) - 1]:.2g} at {min(config.depth, 20)}",
            ),
        ]

    def figures(self, config: Config, found: Found) -> Figures:
        curves = {
            f"{kind}, {part}": measured.numbers[kind]
            for part, measured in found[min(found)].items()
            for kind in ("affine", "additive")
        }
        return {"depth": figures.depth_panels(list(range(1, config.depth + 1)), curves)}


RECIPE = CouplingDepth()
