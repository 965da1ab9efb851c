"""One line for a trained model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bilip.adapters import as_bijection
from bilip.auditing.round_trip import distances, typical
from bilip.errors import ContractViolation, InputError

__all__ = ["assert_invertible"]


def assert_invertible(model: Any, x: Tensor, *, tolerance: float | None = None, context: Tensor | None = None) -> None:
    r"""Fail unless $|x - F^{-1}(F(x))| \le \text{tolerance} \cdot \max(|x|, r)$ for every sample, measured in float64.

    $r$ is the median of $|x|$ over the batch, and features are measured by their own size: the relative error that the audit measures too.

    Args:
        model: A bijection, a flow, or anything `as_bijection` takes; it is called as it is, in its own dtype and mode,
            without gradients.
        x: A batch of inputs.
        tolerance: By default the square root of the dtype's epsilon: half of the digits survive.
        context: Context of the batch.

    Raises:
        ContractViolation: With the number of bad samples, the worst one and its error. It is an `AssertionError`.

    Example:
        >>> from bilip.models import real_nvp
        >>> assert_invertible(real_nvp(4, coupling="additive"), torch.randn(16, 4))
    """
    bijection = as_bijection(model)
    if not isinstance(x, Tensor) or x.ndim < 2 or not len(x):
        raise InputError("assert_invertible: expected a batch of at least one sample, shape (batch, ...).")
    if not torch.isfinite(x).all():
        raise InputError("assert_invertible: the inputs hold NaN or Inf; no reconstruction could equal them.")
    tolerance = math.sqrt(torch.finfo(x.dtype).eps) if tolerance is None else tolerance
    with torch.no_grad():
        back = bijection.inverse(bijection(x, context), context)
    found = distances(x, back, typical(x))
    error, bad = found.relative, ~(found.relative <= tolerance)
    if bad.any():
        broken = int((~torch.isfinite(error)).sum())
        worst = int(error.nan_to_num(math.inf).argmax())
        raise ContractViolation(
            f"{int(bad.sum())} of {len(x)} samples do not come back ({broken} of them not finite). Worst: "
            f"sample {worst}, "
            f"relative error {float(error[worst]):.3g}, allowed {tolerance:.3g} ({x.dtype})."
        )
