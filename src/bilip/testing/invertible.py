"""One line for a trained model: does it come back, and is what is lost more than rounding?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bilip._torch import half_digits
from bilip.adapters import as_bijection
from bilip.auditing.round_trip import distances, norms, typical, typical_norm
from bilip.auditing.subject import Subject
from bilip.blocks import Chain
from bilip.errors import ContractViolation, InputError, NotMeasured
from bilip.linalg.jacobian import vjp_many

__all__ = ["assert_invertible", "rounding_tolerance"]


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
    tolerance = half_digits(x.dtype) if tolerance is None else tolerance
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


FACTOR = 64.0
MOST_DIMENSIONS = 128


def rounding_tolerance(model: Any, x: Tensor, *, context: Tensor | None = None, samples: int = 4) -> float:
    r"""The relative round-trip error that rounding explains, at most what an audit bears: 3.5e-4 in float32 and float64.

    A block rounds its output $h_k$ to about eps times its size, and the way back from there to x magnifies that by the norm of the
    inverse Jacobian of the first k blocks. So an inverse that is right comes back within

    $$64\,\epsilon\,(1 + \sum_k \lVert J_{1..k}^{-1} \rVert\,|h_k| / |x|)$$

    computed in float64 at the samples of `x` that come back worst; the factor pays for the operations inside a block. An inverse that
    is far beyond is wrong, or solved too loosely. Where the blocks of a model are not visible they count as one, and above 128
    dimensions the 3.5e-4 of an audit are all that is asked.

    Args:
        model: A bijection, a flow, or anything `as_bijection` takes; in evaluation mode, in its own dtype.
        x: A batch.
        context: Context of the batch.
        samples: How many of the worst samples are looked at.

    Example:
        >>> from bilip.models import real_nvp
        >>> _ = torch.manual_seed(0)
        >>> flow = real_nvp(4, blocks=2, hidden=(8,)).double()
        >>> 1e-14 < rounding_tolerance(flow, torch.randn(64, 4, dtype=torch.float64)) < 1e-10
        True
    """
    if not isinstance(x, Tensor) or x.ndim < 2 or not len(x) or not isinstance(samples, int) or samples < 1:
        raise InputError(
            "rounding_tolerance: expected a batch of at least one sample, shape (batch, ...), and samples >= 1."
        )
    subject = Subject.of(model)
    x = x.to(subject.device, subject.dtype)
    most = subject.half_digits
    if x[0].numel() > MOST_DIMENSIONS:
        return most
    with subject.evaluating():
        subject.check(x[:4], None if context is None else context[:4], "rounding_tolerance")
        back = subject.inverse(subject.forward(x, context).value, context).value
        errors = distances(x, back).relative.nan_to_num(math.inf)
        worst = errors.argsort(descending=True)[:samples]
        try:
            double = subject.copy_in(torch.float64)
            floor = typical_norm(x)
            grown = [
                _magnification(double, x[k : k + 1].double(), None if context is None else context[k : k + 1], floor)
                for k in worst.tolist()
            ]
        # No copy, no gradients, or a matrix that is not finite.
        except (NotMeasured, RuntimeError, TypeError, ValueError):
            return most
    argued = FACTOR * subject.eps * max(grown)
    return min(most, argued) if math.isfinite(argued) else most


def _magnification(subject: Subject, x: Tensor, context: Tensor | None, floor: float) -> float:
    """1 + sum_k |inverse Jacobian of the first k blocks| |h_k| / |x|, in float64."""
    blocks = list(subject.bijection) if isinstance(subject.bijection, Chain) else [subject.bijection]
    context = context.double() if context is not None and context.is_floating_point() else context
    whole, total, h = None, 0.0, x
    for block in blocks:

        def function(h: Tensor, block: Any = block) -> Tensor:
            return block(h, None if context is None else context.expand(len(h), *context.shape[1:]))

        z = function(h).detach()
        eye = torch.eye(z.numel(), dtype=z.dtype, device=z.device).reshape(-1, *z.shape[1:])
        jacobian = vjp_many(function, h, eye).flatten(1)
        whole = jacobian if whole is None else jacobian @ whole
        smallest = float(torch.linalg.svdvals(whole)[-1])
        total += float(norms(z)) / smallest if smallest > 0 else math.inf
        h = z
    return 1 + total / max(float(norms(x)), floor, 1e-300)
