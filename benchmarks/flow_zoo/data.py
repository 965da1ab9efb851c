"""What the zoo is trained on: sets of 2, 8, 64 and 784 dimensions, drawn by code, so that the benchmark runs on a bare clone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["SETS", "Data", "read_images"]

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor | None]]
_REAL: dict[str, Tensor] = {}  # images given with --data, flat, in [0, 1)


@dataclass(frozen=True)
class Data:
    """A set of any length: `draw(count, seed)` gives samples, float32, and contexts where the set has them."""

    name: str
    shape: tuple[int, ...]
    rule: Draw
    context: int = 0

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor | None]:
        x, context = self.rule(count, torch.Generator().manual_seed(seed))
        return x.float().reshape(count, *self.shape), None if context is None else context.float()


def _normal(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=generator, dtype=torch.float64)


def _uniform(generator: torch.Generator, *size: int) -> Tensor:
    return torch.rand(size, generator=generator, dtype=torch.float64)


def moons(count: int, generator: torch.Generator) -> tuple[Tensor, None]:
    return _moons(count, generator)[0], None


def _moons(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    which = torch.randint(0, 2, (count,), generator=generator)
    angle = math.pi * _uniform(generator, count)
    x = torch.stack((angle.cos() + which * (1 - 2 * angle.cos()), angle.sin() + which * (0.5 - 2 * angle.sin())), 1)
    return 2 * (x - torch.tensor([0.5, 0.25])) + 0.1 * _normal(generator, count, 2), which


def labelled_moons(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, which = _moons(count, generator)
    return x, torch.nn.functional.one_hot(which, 2).double()


def checkerboard(count: int, generator: torch.Generator) -> tuple[Tensor, None]:
    x = 4 * _uniform(generator, count, 2)
    x[:, 1] = _uniform(generator, count) + 2 * torch.randint(0, 2, (count,), generator=generator) + x[:, 0].floor() % 2
    return 2 * x - 4, None


def rings(count: int, generator: torch.Generator) -> tuple[Tensor, None]:
    radius = 1 + torch.randint(0, 3, (count,), generator=generator) + 0.08 * _normal(generator, count)
    angle = 2 * math.pi * _uniform(generator, count)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), 1), None


def _table(size: int, heavy: float) -> Draw:
    """Correlated columns of different size, bent by each other; `heavy` of the first ones have tails like those of a t(3)."""

    def rule(count: int, generator: torch.Generator) -> tuple[Tensor, None]:
        mix = torch.linalg.qr(_normal(torch.Generator().manual_seed(size), size, size))[0]
        z = _normal(generator, count, size) * torch.logspace(0, -1, size, dtype=torch.float64)
        x = z @ mix.T
        x = x + 0.5 * torch.sin(2 * x.roll(1, 1)) * x.roll(2, 1)
        if heavy:
            columns = int(heavy * size)
            chi = _normal(generator, count, columns, 3).square().mean(2)
            x[:, :columns] = x[:, :columns] / chi.sqrt()
        return x, None

    return rule


def regression(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eight columns whose place and width follow from a context of three."""
    context = 2 * _uniform(generator, count, 3) - 1
    turn = _normal(torch.Generator().manual_seed(5), 3, 8)
    noise = _normal(generator, count, 8) * (0.1 + (context @ turn.roll(1, 1)).sigmoid() / 2)
    return torch.tanh(context @ turn) + noise + 0.3 * noise.roll(1, 1).square(), context


def _images(side: int) -> Draw:
    """Grey images of a few soft strokes, with the noise of dequantization, in [0, 1); or real ones where they were given."""

    def rule(count: int, generator: torch.Generator) -> tuple[Tensor, None]:
        real = _REAL.get(f"{side}")
        if real is not None:
            rows = torch.randint(0, len(real), (count,), generator=generator)
            return real[rows].double() + _uniform(generator, count, side * side) / 256, None
        found = []
        for start in range(0, count, 4096):
            found.append(_strokes(min(4096, count - start), side, generator))
        return torch.cat(found), None

    return rule


def _strokes(count: int, side: int, generator: torch.Generator) -> Tensor:
    grid = torch.arange(side, dtype=torch.float32) / side
    image = torch.zeros(count, side, side)
    for _ in range(3):
        place = _uniform(generator, count, 2).float() * 0.8 + 0.1
        angle = math.pi * _uniform(generator, count).float()
        dx, dy = (grid - place[:, :1])[:, None, :], (grid - place[:, 1:])[:, :, None]
        along = angle.cos()[:, None, None] * dx + angle.sin()[:, None, None] * dy
        across = -angle.sin()[:, None, None] * dx + angle.cos()[:, None, None] * dy
        image += torch.exp(-(along.square() / 0.08 + across.square() / 0.006))
    grey = (255 * (0.05 + 0.9 * image.clamp(max=1) + 0.03 * torch.randn(image.shape, generator=generator))).clamp(
        0, 255
    )
    return ((grey.floor() + torch.rand(image.shape, generator=generator)) / 256).flatten(1).double()


def read_images(path: str | Path) -> None:
    """Take real images, `.npy` or `x` of an `.npz`, uint8, (N, H, W[, C]), for the sets of 784 dimensions: grey, the middle 28 x 28."""
    found = np.load(path)
    x = torch.from_numpy(found if isinstance(found, np.ndarray) else found["x"]).float()
    x = x.mean(-1) if x.ndim == 4 else x
    if x.ndim != 3 or min(x.shape[1:]) < 28:
        raise SystemExit(
            f"--data {path}: expected images of at least 28 x 28, (N, H, W) or (N, H, W, C), got {tuple(x.shape)}."
        )
    top, left = (x.shape[1] - 28) // 2, (x.shape[2] - 28) // 2
    _REAL["28"] = x[:, top : top + 28, left : left + 28].floor().flatten(1) / 256


SETS = {
    data.name: data
    for data in (
        Data("moons", (2,), moons),
        Data("labelled moons", (2,), labelled_moons, context=2),
        Data("checkerboard", (2,), checkerboard),
        Data("rings", (2,), rings),
        Data("table", (8,), _table(8, 0.0)),
        Data("heavy table", (8,), _table(8, 0.5)),
        Data("regression", (8,), regression, context=3),
        Data("wide table", (64,), _table(64, 0.0)),
        Data("wide heavy table", (64,), _table(64, 0.25)),
        Data("small images", (1, 8, 8), _images(8)),
        Data("small flat images", (64,), _images(8)),
        Data("images", (1, 28, 28), _images(28)),
        Data("flat images", (784,), _images(28)),
    )
}
