"""Which likelihoods mean something?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bilip._torch import half_digits
from bilip.auditing.budget import Budget
from bilip.auditing.probes.precision import condition_numbers
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.round_trip import distances, typical
from bilip.auditing.subject import Outcome, Subject, in_dtype, run_guarded
from bilip.data import Source
from bilip.errors import InputError, NotMeasured
from bilip.record import Measurement, Quantity

__all__ = ["Trust", "TrustFlags", "trust_flags"]


@dataclass(frozen=True)
class TrustFlags:
    """Which samples of a batch have a likelihood that means something; tensors of shape `(batch,)`.

    Attributes:
        trusted: All checks passed.
        round_trip_ok: The sample comes back, finite, with a relative error within the tolerance.
        log_det_ok: Both log-determinants are finite and cancel within the tolerance.
        condition_ok: The condition number is within its limit; None if it was not asked for.
        relative_error: Of the round trip, float64.
        antisymmetry: |log det F + log det F^-1| per dimension, float64.
        log_prob: Log-likelihoods as the model states them, or None without a base.
    """

    trusted: Tensor
    round_trip_ok: Tensor
    log_det_ok: Tensor
    condition_ok: Tensor | None
    relative_error: Tensor
    antisymmetry: Tensor
    log_prob: Tensor | None


def trust_flags(
    model: Any,
    x: Tensor,
    *,
    context: Tensor | None = None,
    tolerance: float | None = None,
    log_det_tolerance: float = 1e-3,
    condition: bool | float | None = None,
) -> TrustFlags:
    r"""Check sample by sample whether a likelihood means something.

    A change of variables is about invertible maps: where a sample does not come back, or where $\log|\det J_F(x)|$ and
    $\log|\det J_{F^{-1}}(z)|$ do not cancel, the number that the model calls a likelihood is not one. The model computes
    in its own dtype, in evaluation mode and without gradients.

    Args:
        model: A `Flow`, a bijection, or anything that `as_bijection` takes.
        x: Samples, shape `(batch, ...)`; converted to the dtype and device of the model.
        context: Their contexts.
        tolerance: Largest relative error of the round trip; by default the square root of the dtype's epsilon.
        log_det_tolerance: Largest |log det F + log det F^-1| per dimension.
        condition: Also check the condition number of $J_F$: a limit, or `True` for $1/\sqrt{\epsilon}$, beyond which
            rounding may cost more than half of the digits. Costs some 120 Jacobian products in float64.

    Raises:
        NotMeasured: The model states no log-determinant, or cannot be linearised and a condition was asked for.

    Example:
        >>> from bilip import Flow
        >>> from bilip.models import real_nvp
        >>> flags = trust_flags(Flow(real_nvp(2, blocks=2)), torch.randn(5, 2), condition=True)
        >>> flags.trusted
        tensor([True, True, True, True, True])
        >>> flags.log_prob.shape
        torch.Size([5])
    """
    subject = Subject.of(model)
    if not isinstance(x, Tensor) or x.ndim < 2 or not len(x):
        raise InputError(
            f"trust_flags: expected a batch of samples, shape (batch, ...), got "
            f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}."
        )
    x = x.detach().to(subject.device, subject.dtype)
    given = None if context is None else in_dtype(context.to(subject.device), subject.dtype)
    with subject.evaluating():
        return _flags(subject, x, given, tolerance, log_det_tolerance, condition)


def _flags(
    subject: Subject,
    x: Tensor,
    context: Tensor | None,
    tolerance: float | None,
    log_det_tolerance: float,
    condition: bool | float | None,
) -> TrustFlags:
    if not subject.has_log_det:
        raise NotMeasured("the model states no log-determinant, so it has no likelihood to trust")
    z, log_det = _pair(subject.forward_and_log_det(x, context))
    back, log_det_back = _pair(subject.inverse_and_log_det(z, context))
    relative = (
        distances(x, back, typical(x)).relative
        if back.shape == x.shape
        else torch.full_like(log_det.double(), torch.nan)
    )
    antisymmetry = (log_det.double() + log_det_back.double()).abs() / x[0].numel()
    limit = half_digits(subject.dtype) if tolerance is None else tolerance
    round_trip_ok = relative <= limit  # False for NaN
    log_det_ok = torch.isfinite(log_det) & torch.isfinite(log_det_back) & (antisymmetry <= log_det_tolerance)
    trusted, condition_ok, log_prob = round_trip_ok & log_det_ok, None, None
    if condition:
        condition_ok = _conditions(subject, x, context) <= (
            1 / half_digits(subject.dtype) if condition is True else condition
        )
        trusted = trusted & condition_ok
    if subject.base is not None:
        with torch.no_grad():  # distributions may raise for latents that are not finite
            log_prob = run_guarded(subject.base.log_prob, z, context).values[-1] + log_det
        trusted = trusted & torch.isfinite(log_prob)
    return TrustFlags(trusted, round_trip_ok, log_det_ok, condition_ok, relative, antisymmetry, log_prob)


def _pair(outcome: Outcome) -> tuple[Tensor, Tensor]:
    """Values and log-determinants; NaN where every sample failed and there is only one tensor of NaN."""
    first = outcome.value
    return first, outcome.values[1] if len(outcome.values) > 1 else first.flatten(1).sum(1)


def _conditions(subject: Subject, x: Tensor, context: Tensor | None) -> Tensor:
    """Condition numbers, infinite for samples whose forward pass is not finite in float64."""
    double = subject.copy_in(torch.float64)
    finite = torch.isfinite(double.forward(x.double(), in_dtype(context, torch.float64)).value.flatten(1)).all(1)
    found = torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
    if bool(finite.any()):
        rows = None if context is None else context[finite]
        found[finite] = condition_numbers(subject, x[finite], rows).nan_to_num(torch.inf)
    return found


class Trust(Probe):
    """Shares of samples whose likelihood means something, over a source of any length.

    Args:
        limit: Largest number of samples.
        batch: Samples in one batch.
        tolerance: See `trust_flags`, like the next two.
        log_det_tolerance: See there.
        condition: See there.
        keep: Largest number of log-likelihoods kept for the medians, the first ones of each kind.

    Example:
        >>> from bilip import Flow
        >>> from bilip.models import real_nvp
        >>> Trust().measure(Flow(real_nvp(2, blocks=2)), torch.randn(100, 2))["share_trusted"]
        1.0
    """

    name = "trust"
    scope = "source"
    place = 85
    quantities = (
        Quantity("share_trusted", "share of likelihoods that can be trusted", "share", "higher"),
        Quantity("share_round_trip", "share that fails the round trip", "share", "lower"),
        Quantity("share_log_det", "share whose log-determinants do not cancel", "share", "lower"),
        Quantity("share_condition", "share that is too ill-conditioned", "share", "lower"),
        Quantity("count", "samples", "count"),
        Quantity("trusted_log_prob_median", "median log p, trusted", "nats"),
        Quantity("untrusted_log_prob_median", "median log p, not trusted", "nats"),
    )

    def __init__(
        self,
        limit: int | None = None,
        *,
        batch: int = 256,
        tolerance: float | None = None,
        log_det_tolerance: float = 1e-3,
        condition: bool | float = False,
        keep: int = 100_000,
    ) -> None:
        self.limit, self.batch, self.keep = limit, batch, keep
        self.tolerance, self.log_det_tolerance, self.condition = tolerance, log_det_tolerance, condition

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object] | None:
        limit = None if budget.samples is None else 128 if task.large else 512
        return {"limit": limit, "batch": budget.batch}

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        tally, total = _Tally(self.keep), min(source.count, self.limit or source.count)
        for batch in source.batches(self.batch, limit=self.limit, dtype=subject.dtype, device=subject.device):
            tally.add(_flags(subject, batch.x, batch.context, self.tolerance, self.log_det_tolerance, self.condition))
            self.progress((batch.start + len(batch)) / total)
        return Measurement(self.name, source.name, values=tally.values(), notes=tally.notes())


@dataclass
class _Tally:
    keep: int
    count: int = 0
    trusted: int = 0
    round_trip: int = 0
    log_det: int = 0
    condition: int | None = None
    # One buffer each: many small tensors would fragment the heap.
    seen: dict[bool, Tensor] = field(default_factory=dict)
    filled: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    has_base: bool = False

    def add(self, flags: TrustFlags) -> None:
        self.count += len(flags.trusted)
        self.trusted += int(flags.trusted.sum())
        self.round_trip += int((~flags.round_trip_ok).sum())
        self.log_det += int((~flags.log_det_ok).sum())
        if flags.condition_ok is not None:
            self.condition = (self.condition or 0) + int((~flags.condition_ok).sum())
        if flags.log_prob is not None:
            self.has_base = True
            for kind, chosen in ((True, flags.trusted), (False, ~flags.trusted)):
                start = self.filled[kind]
                new = flags.log_prob[chosen][: self.keep - start]
                if len(new):
                    buffer = self.seen.setdefault(kind, torch.empty(self.keep, dtype=torch.float64, device="cpu"))
                    buffer[start : start + len(new)] = new
                    self.filled[kind] += len(new)

    def values(self) -> dict[str, float | int | None]:
        return {
            "count": self.count,
            "share_trusted": self.trusted / self.count,
            "share_round_trip": self.round_trip / self.count,
            "share_log_det": self.log_det / self.count,
            "share_condition": None if self.condition is None else self.condition / self.count,
            "trusted_log_prob_median": self._median(kind=True),
            "untrusted_log_prob_median": self._median(kind=False),
        }

    def _median(self, *, kind: bool) -> float | None:
        """The median; NaN counts as the lowest likelihood, so that it shows as -inf if half of them are."""
        values = self.seen.get(kind, torch.empty(0, device="cpu"))[: self.filled[kind]]
        return float(values.nan_to_num(-math.inf, math.inf, -math.inf).median()) if len(values) else None

    def notes(self) -> tuple[str, ...]:
        found = [] if self.condition is not None else ["the condition number was not asked for"]
        return (*found, *([] if self.has_base else ["the model has no base distribution, so there are no likelihoods"]))
