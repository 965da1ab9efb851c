"""1x1 convolutions in a memory-saving walk, with the ActNorm before them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bilip._torch import capturing
from bilip.blocks import ActNorm, InvertibleConv1x1
from bilip.blocks.conv1x1 import Stack, invert, log_abs_det
from bilip.reversible.units import Grads, Ran, Recovered, Unit

__all__ = ["Matrices", "MatrixWindows", "Mixing"]


WINDOW = 16  # so many 1x1 convolutions have their matrices at hand at a time


class Matrices(NamedTuple):
    r"""The matrices of one `Mixing`; `MatrixWindows` finds those of many at once.

    Attributes:
        matrix: $M = W \mathrm{diag}(e^s)$.
        inverse: $M^{-1}$, where it is wanted.
        inverse_weight: $W^{-1}$, likewise.
        log_abs_det: Log of the size of the determinant of W, if wanted.
    """

    matrix: Tensor
    inverse: Tensor | None = None
    inverse_weight: Tensor | None = None
    log_abs_det: Tensor | None = None


class Mixing(Unit):
    r"""ActNorm, if there is one, and a free 1x1 convolution as one matrix: $y = M (x + b)$ with $M = W \mathrm{diag}(e^s)$."""

    block: InvertibleConv1x1
    fresh = True

    def __init__(self, name: str, norm: ActNorm | None, block: InvertibleConv1x1, *, inverse: bool) -> None:
        super().__init__(name, block, inverse=inverse)
        self.norm = norm

    @property
    def modules(self):
        return ()

    @property
    def pair(self) -> tuple[Tensor, Tensor | None]:
        """The matrix of the convolution, and the log-scale before it."""
        return self.block.weight, None if self.norm is None else self.norm.log_scale

    def run(self, x, context, *, log_det, own=False, mark=None, matrices=None):
        log = self._log(x, matrices) if log_det else None
        seen = None if mark is None else mark.of(x)
        return Ran((self._undo if self.inverse else self._do)(x, matrices), log, seen)

    def traced(self, x, context, *, log_det, matrices=None):
        return self.run(x, context, log_det=log_det, matrices=matrices), ()

    def undo(self, y, context, matrices=None):
        return (self._do if self.inverse else self._undo)(y, matrices)

    def _do(self, x: Tensor, matrices: Matrices) -> Tensor:
        return self.block.mix(matrices.matrix, self._shifted(x, 1))

    def _undo(self, y: Tensor, matrices: Matrices) -> Tensor:
        return self._shifted(self.block.mix(_known(matrices.inverse), y), -1)

    def _shifted(self, x: Tensor, sign: int) -> Tensor:
        """With ActNorm's bias, or without it."""
        return x if self.norm is None else self.norm.shift(x, sign)

    def _log(self, x: Tensor, matrices: Matrices) -> Tensor:
        total = _known(matrices.log_abs_det)
        total = total if self.norm is None else total + self.norm.log_scale.sum()
        return total * (math.prod(x.shape[2:]) * (-1 if self.inverse else 1))

    def back(self, y, context, grad, grad_log, known, *, own=False, mark=None, matrices=None, outside=(), output=False):
        mix = self.block.mix
        with torch.no_grad(), torch.autocast(y.device.type, enabled=False):  # autocast is for nets
            if self.inverse:  # y = M^-1 x - b, so x = M u with u = y + b
                u = self._shifted(y, 1)
                x = mix(matrices.matrix, u) if known is None else known
                g_x = mix(_known(matrices.inverse).mT, grad)
                g_matrix, g_bias = -_outer(g_x, u), -grad
            else:  # y = M u with u = x + b
                u = mix(_known(matrices.inverse), y) if known is None else self._shifted(known, 1)
                x = self._shifted(u, -1) if known is None else known
                g_x = mix(matrices.matrix.mT, grad)
                g_matrix, g_bias = _outer(grad, u), g_x
            grads = self._parameters(g_matrix, g_bias, grad_log, math.prod(x.shape[2:]), matrices.inverse_weight)
            again = (self._undo if self.inverse else self._do)(x, matrices) if output else None
            return Recovered(x, g_x, grads, output=again)

    def _parameters(
        self, g_matrix: Tensor, g_bias: Tensor, grad_log: Tensor | None, pixels: int, inverse_weight: Tensor | None
    ) -> Grads:
        """From the gradients of M and b to those of W, b and s; the log-determinant adds W^-T and 1 for each pixel."""
        weight, grads = self.block.weight, {}
        total = None if grad_log is None else grad_log.sum() * (-pixels if self.inverse else pixels)
        scale = None if self.norm is None else self.norm.log_scale.exp()
        if weight.requires_grad:
            g_weight = g_matrix if scale is None else g_matrix * scale
            grads[weight] = g_weight if total is None else torch.addcmul(g_weight, total, _known(inverse_weight).mT)
        if self.norm is not None and scale is not None:
            if self.norm.log_scale.requires_grad:
                g_scale = (g_matrix * weight).sum(0) * scale
                grads[self.norm.log_scale] = g_scale if total is None else g_scale + total
            if self.norm.bias.requires_grad:
                grads[self.norm.bias] = g_bias.sum([k for k in range(g_bias.ndim) if k != 1])
        return grads


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Sum over samples and pixels of a b^T."""
    if a.ndim == 2:
        return a.T @ b
    if math.prod(a.shape[2:]) < a.shape[1]:  # a product for each sample would be larger than what goes into it
        return a.transpose(0, 1).flatten(1) @ b.transpose(0, 1).flatten(1).T
    return torch.bmm(a.flatten(2), b.flatten(2).mT).sum(0)


def _known(matrix: Tensor | None) -> Tensor:
    if matrix is None:
        raise RuntimeError("a matrix was not asked for that is needed")
    return matrix


class MatrixWindows:
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

    def of(self, k: int, *, inverses: bool = False, log_det: bool = False) -> Matrices | None:
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
            self.of(k, inverses=True)
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
    return [invert(stack.weights) for _, stack in _stacks(units)]


@torch.no_grad()
def found(units: Sequence[Unit], solved: Sequence[Tensor] | None, *, log_det: bool) -> dict[Mixing, Matrices]:
    """The matrices of a window, with the inverses if they were solved for, and with log-determinants if wanted."""
    stacks, result = _stacks(units), dict[Mixing, Matrices]()
    for (group, stack), inverses in zip(stacks, solved or [None] * len(stacks), strict=True):
        matrices, others = stack.matrices(), None if inverses is None else stack.inverses(inverses)
        logs = log_abs_det(stack.weights) if log_det else None
        for k, unit in enumerate(group):
            result[unit] = Matrices(matrices[k], *(None if t is None else t[k] for t in (others, inverses, logs)))
    return result


def _stacks(units: Sequence[Unit]) -> list[tuple[list[Mixing], Stack]]:
    groups: dict[tuple[object, ...], list[Mixing]] = {}
    for unit in mixings(units):
        groups.setdefault(Stack.key_of(*unit.pair), []).append(unit)
    return [(group, Stack([unit.pair for unit in group])) for group in groups.values()]
