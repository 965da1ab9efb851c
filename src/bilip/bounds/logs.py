"""Constants as logarithms, rounded up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "EPS",
    "INF",
    "TINY",
    "as_float64",
    "exp_down",
    "exp_up",
    "finite_size",
    "log_norm",
    "log_of",
    "log_product",
    "log_sum",
    "log_triangular_norm",
    "norms",
    "shares",
]

EPS = 2.0**-52
INF = math.inf
TINY = 2.0**-1022  # below it float64 keeps no relative precision, and some machines flush to zero


def as_float64(value: object) -> Tensor:
    """A detached float64 copy on the CPU, where all proofs are computed."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()


def log_of(value: float) -> float:
    """Natural logarithm of a non-negative number, rounded up; `log_of(0)` is `-inf`."""
    if value <= 0:
        return -INF
    log = math.log(value) if value < INF else INF
    return log + 2 * EPS * (1 + abs(log))


def exp_up(log: float) -> float:
    """The number with this natural logarithm, rounded up: never 0 unless the logarithm is `-inf`, and `inf` on overflow.

    Example:
        >>> exp_up(-1e6), exp_up(1e6)
        (5e-324, inf)
    """
    if log == -INF:
        return 0.0
    return math.nextafter(math.exp(log) * (1 + 4 * EPS), INF) if log < 709.7 else INF


def exp_down(log: float) -> float:
    """The number with this natural logarithm, rounded down; at most the largest finite number.

    Example:
        >>> exp_down(-1e6), exp_down(0.0) <= 1
        (0.0, True)
    """
    return max(0.0, math.nextafter(math.exp(min(log, 709.7)) * (1 - 4 * EPS), 0.0)) if log > -INF else 0.0


def log_sum(*logs: float) -> float:
    r"""$\log \sum_i e^{l_i}$, rounded up."""
    top = max(logs)
    if math.isinf(top):
        return top
    log = top + math.log(sum(math.exp(term - top) for term in logs))
    return log + 8 * EPS * (1 + abs(log))


def log_product(*logs: float) -> float:
    """The logarithm of a product of constants, rounded up; a factor of zero makes it zero."""
    if -INF in logs:
        return -INF
    log = sum(logs)
    return log + EPS * (1 + len(logs) * sum(map(abs, logs))) if log < INF else INF


def log_triangular_norm(log_off_diagonal: float, log_diagonal: float) -> float:
    r"""Log of the spectral norm of $\begin{pmatrix} 1 & 0 \\ m & d \end{pmatrix}$, given $\log m$ and $\log d$, rounded up.

    The Jacobian of every coupling block has this block structure, so the norm of the matrix of block norms bounds
    it. With $d = 1$ the norm is $(m + \sqrt{m^2 + 4}) / 2$.

    Example:
        >>> round(math.exp(log_triangular_norm(math.log(1.5), 0.0)), 6)
        2.0
    """
    top = max(0.0, log_off_diagonal, log_diagonal)
    if top == INF:
        return INF
    one, m, d = (math.exp(log - top) for log in (0.0, log_off_diagonal, log_diagonal))
    # The larger root of q^2 - (1 + m^2 + d^2) q + d^2, with its discriminant in a form that cannot cancel.
    root = math.sqrt(((one + d) ** 2 + m**2) * ((one - d) ** 2 + m**2))
    squared = (one**2 + m**2 + d**2 + root) / 2
    log = top + math.log(squared) / 2
    return log + 16 * EPS * (1 + abs(log))


def finite_size(low: Tensor, high: Tensor) -> Tensor:
    """The largest magnitude of the finite ends of intervals, entry by entry: what rounding is relative to.

    An infinite end takes nothing away from the other one, which is rounded all the same.

    Example:
        >>> finite_size(torch.tensor([-2.0, -2.0]), torch.tensor([3.0, INF]))
        tensor([3., 2.])
    """
    return torch.maximum(*(end.abs().nan_to_num(0.0, 0.0, 0.0) for end in (low, high)))


def norms(values: Tensor) -> Tensor:
    """Euclidean norms of the samples of a batch in float64, shape `(batch,)`, rounded up; no square overflows or underflows.

    `inf` where a sample holds NaN or Inf, or where the norm itself is too large for float64.

    Example:
        >>> norms(torch.tensor([[3e200, 4e200], [3e-200, 4e-200]], dtype=torch.float64))
        tensor([5.0000e+200, 5.0000e-200], dtype=torch.float64)
    """
    flat = values.detach().flatten(1)
    slack = 1 + (flat.shape[1] + 8) * EPS
    if not flat.shape[1]:
        return torch.zeros(len(flat), dtype=torch.float64, device=flat.device)
    if flat.dtype != torch.float64:  # squares of the other dtypes are far inside float64
        return (flat.double().norm(dim=1) * slack).nan_to_num(INF, INF)
    top = flat.abs().amax(1)
    known = (top > 0) & (top < INF)
    scaled = flat / torch.where(known, top, 1.0)[:, None]
    size = top * (scaled.square().sum(1).sqrt() * slack)
    size = torch.where(known, torch.nextafter(size, size.new_full((), INF)), top)
    return size.nan_to_num(INF, INF)


def shares(factor: float, values: Tensor) -> Tensor:
    r"""At least `factor` times the Euclidean norms of the samples of a float64 batch, shape `(batch,)`, in two reads of the batch.

    For what rounding adds: between 1e-140 and 1e140 it is rounded up in the last digits as `norms` is, outside of that it is
    $\sqrt d$ times the largest entry.

    Example:
        >>> shares(0.5, torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64))
        tensor([2.5000, 0.0000], dtype=torch.float64)
    """
    flat = values.detach().flatten(1)
    count = flat.shape[1]
    if not count:
        return torch.zeros(len(flat), dtype=torch.float64, device=flat.device)
    slack = factor * (1 + (count + 16) * EPS)
    top = torch.linalg.vector_norm(flat, INF, dim=1)
    size = torch.linalg.vector_norm(flat, dim=1) * slack
    usual = top == top.clamp(1e-140, 1e140)
    return torch.where(usual, size, top * (slack * math.sqrt(count))).nan_to_num(INF, INF)


def log_norm(vector: Tensor) -> float:
    """Log of the Euclidean norm of a float64 tensor, rounded up; safe from overflow.

    Example:
        >>> round(log_norm(torch.tensor([3e200, 4e200], dtype=torch.float64)) / math.log(10), 3)
        200.699
    """
    if vector.numel() == 0:
        return -INF
    top = float(vector.abs().max())
    if top == 0 or math.isinf(top) or math.isnan(top):
        return -INF if top == 0 else INF
    scaled = float((vector / top).square().sum().sqrt())
    return log_of(top) + log_of(scaled * (1 + vector.numel() * EPS))
