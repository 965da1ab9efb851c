"""The matrices of 1x1 convolutions along a walk, by the stack: one product, one solve, one determinant for many of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from bilip._torch import capturing
from bilip.blocks.conv1x1 import invert, log_abs_det
from bilip.reversible.mixing import Matrices, Mixing
from bilip.reversible.unit import Unit

__all__ = ["Prepared"]

WINDOW = 16  # so many 1x1 convolutions have their matrices at hand at a time


class Prepared:
    """The matrices of a walk's 1x1 convolutions. Only those of one window are held at a time: memory does not grow with depth. As a
    context, it lets go of them at the end.

    In a CUDA graph the inverse matrices of the next window are found aside, on a stream of their own: they are many small products, one
    after the other, beside which the GPU has time for the walk.

    Args:
        units: In the order in which they run.
        inverse: Whether running them needs the inverse matrices.
    """

    def __init__(self, units: Sequence[Unit], *, inverse: bool) -> None:
        self.units, self.inverse = units, inverse
        self.windows = windows(units)
        self.window = {k: w for w, span in enumerate(self.windows) for k in span}
        self.held: dict[Mixing, Matrices] = {}
        self.ready: tuple[int, bool, bool] | None = None
        self.solved: dict[int, list[Tensor]] = {}  # of windows to come
        self.under_way: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.done()

    def matrices(self, k: int, *, inverses: bool = False, log_det: bool = False) -> Matrices | None:
        """Those that unit `k` needs, the inverse ones and log-determinants where they are asked for; `None` for a unit without."""
        wanted = (self.window[k], inverses or self.inverse, log_det)
        if self.ready != wanted:
            self.done()
            self.held = found(self._span(wanted[0]), self._inverses(wanted[0]) if wanted[1] else None, log_det=log_det)
            self.ready = wanted
        mixing = self.units[k].innermost
        return self.held[mixing] if isinstance(mixing, Mixing) else None

    def done(self) -> None:
        """Let go of the matrices, and have nothing under way."""
        self._join()
        self.held, self.ready = {}, None

    def before_the_walk(self, k: int, x: Tensor) -> None:
        """When the last window is entered, on the way there, begin with the inverses that the walk needs first."""
        if k == self.windows[-1].start and not self.inverse:
            self._begin(len(self.windows) - 1, x)

    def on_the_walk(self, k: int, y: Tensor) -> None:
        """When a window is entered, begin with the inverses of the next."""
        if k == self.windows[self.window[k]][-1]:
            self.matrices(k, inverses=True)
            self._begin(self.window[k] - 1, y)

    def _begin(self, window: int, x: Tensor) -> None:
        if window < 0 or window in self.solved or not capturing(x) or not mixings(self._span(window)):
            return
        self.under_way = _aside(x.device)
        self.under_way.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.under_way):
            self.solved[window] = solve(self._span(window))

    def _inverses(self, window: int) -> list[Tensor]:
        return self.solved.pop(window) if window in self.solved else solve(self._span(window))

    def _join(self) -> None:
        if self.under_way is not None:
            torch.cuda.current_stream(self.under_way.device).wait_stream(self.under_way)
            self.under_way = None

    def _span(self, window: int) -> list[Unit]:
        return [self.units[k] for k in self.windows[window]]


@functools.cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """One for all: every stream that multiplies keeps memory of its own for it."""
    return torch.cuda.Stream(device)


def windows(units: Sequence[Unit]) -> list[range]:
    """The chain cut into spans of neighbours with at most `WINDOW` 1x1 convolutions each, all of one size."""
    spans: list[range] = []
    begin = count = 0
    size: int | None = None
    for k, unit in enumerate(units):
        mixing = unit.innermost
        if not isinstance(mixing, Mixing):
            continue
        if count == WINDOW or size not in (None, mixing.block.channels):
            spans.append(range(begin, k))
            begin, count = k, 0
        size, count = mixing.block.channels, count + 1
    return [*spans, range(begin, len(units))]


def mixings(units: Sequence[Unit]) -> list[Mixing]:
    """Those units that have matrices."""
    return [unit.innermost for unit in units if isinstance(unit.innermost, Mixing)]


@torch.no_grad()
def solve(units: Sequence[Unit]) -> list[Tensor]:
    """The inverses of all 1x1 convolutions of a window, one stack for each kind."""
    return [invert(torch.stack([unit.block.weight for unit in group])) for group in _groups(units)]


@torch.no_grad()
def found(units: Sequence[Unit], solved: Sequence[Tensor] | None, *, log_det: bool) -> dict[Mixing, Matrices]:
    """The matrices of a window, with the inverses if they were solved for, and with log-determinants if wanted."""
    groups, result = _groups(units), dict[Mixing, Matrices]()
    for group, inverses in zip(groups, solved or [None] * len(groups), strict=True):
        weights = torch.stack([unit.block.weight for unit in group])
        norms = [unit.norm for unit in group if unit.norm is not None]
        scales = torch.stack([norm.log_scale for norm in norms]).exp() if norms else None
        matrices = weights if scales is None else weights * scales[:, None, :]
        others = inverses if inverses is None or scales is None else inverses / scales[:, :, None]
        logs = log_abs_det(weights) if log_det else None
        for k, unit in enumerate(group):
            result[unit] = Matrices(matrices[k], *(None if t is None else t[k] for t in (others, inverses, logs)))
    return result


def _groups(units: Sequence[Unit]) -> list[list[Mixing]]:
    groups: dict[tuple[object, ...], list[Mixing]] = {}
    for unit in mixings(units):
        key = (unit.block.channels, unit.norm is None, unit.block.weight.dtype, unit.block.weight.device)
        groups.setdefault(key, []).append(unit)
    return list(groups.values())
