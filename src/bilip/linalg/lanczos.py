"""The largest singular value of a linear map that can only be applied: Golub-Kahan-Lanczos bidiagonalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip import _linalg

__all__ = ["Extreme", "largest_singular_value", "mean_log_brackets"]


@dataclass(frozen=True)
class Extreme:
    r"""The largest singular value of each map of a batch, as far as found.

    Attributes:
        value: Ritz values, shape `(batch,)`; never above the true value but for rounding.
        residual: $|A^\top u - \theta v| / \theta$: there is a singular value within `residual * value` of `value`.
        right: The direction $v$ that the map stretches most, shape `(batch, size)`.
        steps: Applications of the map and of its adjoint.
    """

    value: Tensor
    residual: Tensor
    right: Tensor
    steps: int

    def converged(self, tolerance: float = 1e-6) -> Tensor:
        """For each map: is the value known to the tolerance?"""
        return self.residual <= tolerance


def largest_singular_value(
    apply: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    steps: int = 60,
    tolerance: float = 1e-7,
) -> Extreme:
    r"""Largest singular values of a batch of linear maps.

    $k$ steps find the best approximation in a Krylov space of dimension $k$; all vectors are kept and orthogonalised twice,
    so that no copies of converged values appear. Directions are flat, `(batch, size)`, and float64.

    Args:
        apply: $v \mapsto A v$, for each map of the batch its own direction.
        adjoint: $u \mapsto A^\top u$.
        start: Starting directions, for example random ones.
        steps: Largest number of steps.
        tolerance: Stop when every residual is below it.

    Example:
        >>> scales = torch.arange(1.0, 51.0, dtype=torch.float64)
        >>> found = largest_singular_value(lambda v: scales * v, lambda u: scales * u, torch.ones(1, 50, dtype=torch.float64))
        >>> round(float(found.value), 6), bool(found.converged())
        (50.0, True)
    """
    v = start / start.norm(dim=1, keepdim=True)
    batch, size = v.shape
    found: Extreme | None = None
    steps = min(steps, size)
    for k, (alphas, betas, rights) in enumerate(_bidiagonalised(apply, adjoint, v, steps), 1):
        if k == steps or k % 10 == 0 or bool((betas[-1] <= 1e-14 * alphas[-1]).all()):
            found = _ritz(alphas, betas, rights, k)
            if not bool(torch.isfinite(found.value).all()) or bool((found.residual <= tolerance).all()):
                return found
    return found or Extreme(torch.zeros(batch, device="cpu"), torch.full((batch,), torch.inf, device="cpu"), v, steps)


def _bidiagonalised(
    apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], v: Tensor, steps: int
) -> Iterator[tuple[list[Tensor], list[Tensor], _Basis]]:
    """After each step the two diagonals so far, and the right vectors; the same lists, which grow."""
    rights, lefts, alphas, betas = _Basis(v), _Basis(), [], []
    u, tiny = apply(v), torch.finfo(v.dtype).tiny
    for _ in range(steps):
        u = _orthogonal(u, lefts)
        alphas.append(u.norm(dim=1))
        u = u / alphas[-1].clamp_min(tiny)[:, None]
        lefts.append(u)
        w = _orthogonal(adjoint(u) - alphas[-1][:, None] * v, rights)
        betas.append(w.norm(dim=1))
        yield alphas, betas, rights
        v = w / betas[-1].clamp_min(tiny)[:, None]
        rights.append(v)
        u = apply(v) - betas[-1][:, None] * u


def mean_log_brackets(
    apply: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    start: Tensor,
    smallest: Tensor,
    *,
    steps: int = 40,
) -> tuple[Tensor, Tensor]:
    r"""What $v^\top \log(A^\top A)\, v / 2$ lies between, for each starting direction $v$ of length 1.

    The derivatives of the logarithm alternate in sign, so that Gauss quadrature, $k$ steps of Lanczos on $A^\top A$, is never below, and
    Gauss-Radau quadrature with a node at or below the smallest eigenvalue never above; but for rounding.

    Args:
        apply: $v \mapsto A v$.
        adjoint: $u \mapsto A^\top u$.
        start: Starting directions, `(batch, size)`.
        smallest: A number at or below the smallest singular value of each map, `(batch,)`.
        steps: Largest number of steps.

    Returns:
        The lower and the upper ends, shape `(batch,)`.

    Example:
        >>> scales = torch.logspace(-3, 0, 200, dtype=torch.float64)
        >>> start = torch.ones(1, 200, dtype=torch.float64)
        >>> low, high = mean_log_brackets(lambda v: scales * v, lambda u: scales * u, start, scales[:1], steps=20)
        >>> bool(low <= scales.log().mean() <= high)
        True
    """
    v = start / start.norm(dim=1, keepdim=True)
    *_, (alphas, betas, _) = _bidiagonalised(apply, adjoint, v, min(steps, v.shape[1] - 1))
    a, b = torch.stack(alphas, 1), torch.stack(betas, 1)
    lows, highs = [], []
    for k in range(len(start)):  # one by one: small, and batched decompositions are not safe on every machine
        side = a[k, :-1] * b[k, :-1]
        inner = torch.diag(a[k].square() + torch.cat((a.new_zeros(1), b[k, :-1].square())))
        inner = inner + torch.diag(side, 1) + torch.diag(side, -1)
        highs.append(_log_moment(inner))
        node, last = smallest[k].square(), a[k, -1] * b[k, -1]
        unit = torch.zeros(len(inner), 1, dtype=a.dtype, device=a.device)
        unit[-1] = 1
        corner = _linalg.solve(inner - node * torch.eye(len(inner), dtype=a.dtype, device=a.device), unit)[-1, 0]
        outer = torch.zeros(len(inner) + 1, len(inner) + 1, dtype=a.dtype, device=a.device)
        outer[:-1, :-1] = inner
        outer[-1, -2] = outer[-2, -1] = last
        outer[-1, -1] = node + last.square() * corner
        lows.append(_log_moment(outer))
    return torch.stack(lows), torch.stack(highs)


def _log_moment(matrix: Tensor) -> Tensor:
    """Half of the first diagonal entry of the logarithm of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return 0.5 * (vectors[0].square() * values.clamp_min(1e-300).log()).sum()


def _ritz(alphas: list[Tensor], betas: list[Tensor], rights: _Basis, k: int) -> Extreme:
    diagonal, above = torch.stack(alphas, 1), torch.stack(betas, 1)
    scale = torch.maximum(diagonal.amax(1), above.amax(1)).clamp_min(torch.finfo(diagonal.dtype).tiny)
    small = torch.diag_embed(diagonal / scale[:, None])
    if k > 1:
        small = small + torch.diag_embed(above[:, : k - 1] / scale[:, None], offset=1)
    if not bool(torch.isfinite(small).all()):
        nan = torch.full_like(scale, torch.nan)
        return Extreme(nan, nan, rights.stack[:, 0], k)
    left, values, right = torch.linalg.svd(small)
    value = values[:, 0]
    residual = (above[:, k - 1] / scale) * left[:, k - 1, 0].abs() / value.clamp_min(1e-300)
    direction = torch.einsum("bk,bkn->bn", right[:, 0], rights.stack[:, :k])
    return Extreme(value * scale, residual, direction, k)


class _Basis:
    """Vectors of a batch of Krylov spaces, kept as one tensor `(batch, count, size)` that grows by doubling."""

    def __init__(self, *first: Tensor) -> None:
        self.count = 0
        self._kept: Tensor | None = None
        for v in first:
            self.append(v)

    @property
    def stack(self) -> Tensor:
        """All vectors so far."""
        if self._kept is None:
            raise ValueError("the basis is empty")
        return self._kept[:, : self.count]

    def append(self, v: Tensor) -> None:
        if self._kept is None:
            self._kept = v.new_empty(len(v), 8, v.shape[1])
        elif self.count == self._kept.shape[1]:
            self._kept = torch.cat((self._kept, torch.empty_like(self._kept)), 1)
        self._kept[:, self.count] = v
        self.count += 1


def _orthogonal(w: Tensor, basis: _Basis) -> Tensor:
    if basis.count:
        stack = basis.stack
        for _ in range(2):
            w = torch.baddbmm(w[:, None], torch.bmm(w[:, None], stack.mT), stack, alpha=-1)[:, 0]
    return w
