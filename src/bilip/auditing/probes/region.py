"""Where an attack may go: a box around each sample, with ends in the model's own dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bilip.data.dequantize import grey_level
from bilip.errors import InputError, NotMeasured

__all__ = ["PAPER_RADIUS", "PAPER_STEP", "Region"]

PAPER_RADIUS = 0.5 / 2**5  # half the cell of a 5-bit pixel, for data in [0, 1)
PAPER_STEP = 5e-4


@dataclass(frozen=True)
class Region:
    """One box for each sample; the ends are numbers of the model's dtype and belong to it.

    Attributes:
        start: Where the search begins: the centre of a cell, or the sample itself.
        low: Lower ends, shape of the batch.
        high: Upper ends.
        kind: `"cell"`, `"ball"` or `"latent"`.
        radius: Half of the width before any cut.
        text: One line for reports.

    Example:
        >>> region = Region.cell(torch.tensor([[0.3, 0.99]]), bits=5)
        >>> region.start
        tensor([[0.2969, 0.9844]])
        >>> bool((region.clamp(torch.tensor([[9.0, -9.0]])) * 32).floor().equal(torch.tensor([[9.0, 31.0]])))
        True
    """

    start: Tensor
    low: Tensor
    high: Tensor
    kind: str
    radius: float
    text: str

    @classmethod
    def cell(cls, x: Tensor, bits: int, origin: float = 0.0) -> Region:
        r"""The dequantization cell $[k/2^b, (k+1)/2^b)$ of each entry, from its centre $(k + 1/2)/2^b$.

        All of a cell has the same likelihood under uniformly dequantized data, so that whatever is found there lies in the data
        distribution. The upper end belongs to the next cell; the last number below it is taken.

        Args:
            x: Samples with entries from `origin` to `origin + 1`.
            bits: Bits b of the data before dequantization.
            origin: Lower end of the lowest cell, -0.5 for images in [-0.5, 0.5].

        Raises:
            NotMeasured: Entries lie outside, or cells are too narrow for the dtype.
        """
        if not isinstance(bits, int) or not 1 <= bits <= 32:
            raise InputError(f"bits={bits!r}: expected a whole number from 1 to 32.")
        if bits > -math.log2(torch.finfo(x.dtype).eps) - 2:
            raise NotMeasured(f"{x.dtype} holds less than four numbers in a cell of {bits} bits")
        if not bool(((x >= origin) & (x <= origin + 1)).all()):
            raise NotMeasured(
                f"cells of {bits} bits are for data in [{origin:g}, {origin + 1:g}]; these reach from "
                f"{float(x.min()):.4g} to {float(x.max()):.4g}. Pass radius=, or origin= if they are shifted"
            )
        level = grey_level(x, bits, origin)
        low, end = (level / 2**bits + origin).to(x.dtype), ((level + 1) / 2**bits + origin).to(x.dtype)
        start = ((level + 0.5) / 2**bits + origin).to(x.dtype)
        text = f"dequantization cell of {bits} bits"
        return cls(start, low, torch.nextafter(end, low), "cell", 0.5 / 2**bits, text)

    @classmethod
    def ball(
        cls, x: Tensor, radius: float, *, low: float = -math.inf, high: float = math.inf, kind: str = "ball"
    ) -> Region:
        r"""All points within `radius` of a sample in every entry, cut to `[low, high]` where the sample itself lies there.

        Example:
            >>> Region.ball(torch.tensor([[0.0, 0.9]]), 0.25, low=0.0, high=1.0).high
            tensor([[0.2500, 1.0000]])
        """
        if not 0 < radius < math.inf:
            raise InputError(f"radius={radius!r}: expected a positive number.")
        x = x.detach()
        bottom = torch.minimum((x - radius).clamp_min(low), x)
        top = torch.maximum((x + radius).clamp_max(high), x)
        text = f"{'latents' if kind == 'latent' else 'samples'} ± {radius:.4g}"
        if math.isfinite(low) or math.isfinite(high):
            text += f", cut to [{low:.4g}, {high:.4g}]"
        return cls(x.clone(), bottom, top, kind, radius, text)

    @property
    def step(self) -> float:
        """The paper's step, 5e-4 for a radius of 0.5 / 32, in proportion to the radius."""
        return PAPER_STEP * self.radius / PAPER_RADIUS

    def clamp(self, x: Tensor) -> Tensor:
        """The nearest point of the box, exactly within its ends; entries that are not finite go back to the start."""
        x = x.to(self.start.dtype)
        x = torch.where(torch.isfinite(x), x, self.start)
        return torch.minimum(torch.maximum(x, self.low), self.high)

    def cpu(self) -> Region:
        """The same on the CPU."""
        return replace(self, start=self.start.cpu(), low=self.low.cpu(), high=self.high.cpu())

    def contains(self, x: Tensor) -> Tensor:
        """For each sample: does it lie in its box?"""
        return ((x >= self.low) & (x <= self.high)).flatten(1).all(1)

    def corner(self, generator: torch.Generator) -> Tensor:
        """A random corner of each box."""
        return torch.where(self._coins(generator) < 0.5, self.low, self.high)

    def inside(self, generator: torch.Generator) -> Tensor:
        """A random point of each box."""
        return self.clamp(self.low + (self.high - self.low) * self._coins(generator))

    def _coins(self, generator: torch.Generator) -> Tensor:
        return torch.rand(self.low.shape, generator=generator, dtype=torch.float64, device="cpu").to(self.low)
