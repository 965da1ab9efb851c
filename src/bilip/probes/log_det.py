"""Is the log-determinant the log-determinant?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip import _linalg
from bilip.data import Batch, Source
from bilip.errors import BilipError, NotMeasured
from bilip.probes.guarded import Outcome
from bilip.probes.lanczos import mean_log_singular_value
from bilip.probes.linear import Linearized
from bilip.probes.probe import Probe
from bilip.probes.subject import Subject
from bilip.record import Histogram, Measurement

__all__ = ["Estimate", "LogDet", "log_det_of_jacobian"]

_SIGMAS = 4
_DRAWS = 16


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error, 0 where it is exact."""

    value: float
    error: float = 0.0


class LogDet(Probe):
    r"""The claimed $\log |\det J_F|$ against that of the Jacobian, and forward against inverse, per dimension.

    In exact arithmetic the log-determinants of F at x and of its inverse at F(x) cancel; that says nothing about a model that has
    the same error in both. The reference is the sum of the blocks' slogdets at the stored activations, in float64; above `exact`
    dimensions it is estimated by stochastic Lanczos quadrature, with a standard error. A log-determinant that is itself an
    estimate is averaged over 16 draws. Differences are counted from four standard errors on.

    Args:
        limit: Largest number of samples for the comparison of the two directions.
        batch: Samples in one batch.
        samples: Samples compared with the Jacobian.
        exact: Largest dimension for slogdet.
        steps: Lanczos steps beyond.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = LogDet().measure(real_nvp(4, blocks=2), torch.randn(10, 4))
        >>> m["antisymmetry_max"] < 1e-5, m["slogdet_error_max"] < 1e-5
        (True, True)
    """

    name = "log_det"

    def __init__(
        self, limit: int | None = None, *, batch: int = 256, samples: int = 4, exact: int = 256, steps: int = 40
    ) -> None:
        self.limit, self.batch, self.samples, self.exact, self.steps = limit, batch, samples, exact, steps

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        if not subject.has_log_det:
            raise NotMeasured("the model states no log-determinant")
        size, notes = math.prod(source.shape), []
        found, count = Histogram(), 0
        total = min(source.count, self.limit or source.count)
        first: tuple[Batch, Tensor, Tensor] | None = None
        draws = 1
        for batch in source.batches(self.batch, limit=self.limit, dtype=subject.dtype, device=subject.device):
            try:
                if first is None:
                    draws = self._draws(subject, batch, size)
                z, forward, error = _averaged(subject.forward_and_log_det, batch.x, batch.context, draws)
                _, inverse, other = _averaged(subject.inverse_and_log_det, z, batch.context, draws)
            except BilipError as why:
                raise NotMeasured(str(why)) from why
            first = first or (batch, forward.cpu(), error.cpu())
            both = ((forward + inverse).abs() - _SIGMAS * (error + other)).clamp_min(0) / size
            found += Histogram.of(both.cpu())
            count += len(batch)
            self.progress(0.7 * count / total)
        if draws > 1:
            notes.append(f"the log-determinant is an estimate: averaged over {draws} draws")
        values = {
            "count": count,
            "antisymmetry_median": found.quantile(0.5),
            "antisymmetry_p999": found.quantile(0.999),
            "antisymmetry_max": found.largest,
            "share_non_finite": found.share_non_finite,
            "draws": draws,
            "slogdet_samples": 0,
            "slogdet_error_max": math.nan,
            "slogdet_standard_error": math.nan,
            "claimed": math.nan,
            "measured": math.nan,
        }
        if first is not None:
            values |= self._against_jacobian(subject, *first, size, notes)
        self.progress(1.0)
        return Measurement(
            self.name, source.name, values=values, histograms={"antisymmetry": found}, notes=tuple(notes)
        )

    def _draws(self, subject: Subject, batch: Batch, size: int) -> int:
        first, second = (subject.forward_and_log_det(batch.x, batch.context).values[1].double() for _ in range(2))
        apart = ((first - second).abs() / size).nan_to_num(0.0, 0.0)
        return (
            _DRAWS
            if float(apart.max()) > 10 * subject.eps * float(1 + (first.abs() / size).nan_to_num(0.0, 0.0).max())
            else 1
        )

    def _against_jacobian(
        self, subject: Subject, batch: Batch, claims: Tensor, errors: Tensor, size: int, notes: list[str]
    ) -> dict[str, float]:
        rows = []
        for k in range(min(self.samples, len(batch))):
            context = None if batch.context is None else batch.context[k : k + 1]
            try:
                true = _reference(subject, batch.x[k : k + 1], context, self.exact, self.steps)
            except NotMeasured as why:
                if str(why) not in notes:
                    notes.append(str(why))
                continue
            error = math.hypot(true.error, float(errors[k]))
            off = abs(float(claims[k]) - true.value)
            # max in this order: NaN stays NaN
            rows.append((max(off - _SIGMAS * error, 0.0) / size, float(claims[k]), true.value, error / size))
        if not rows:
            return {}
        off, claimed, measured, error = max(rows, key=lambda row: math.inf if math.isnan(row[0]) else row[0])
        if abs(claimed + measured) < 1e-3 * abs(measured) and off > 1e-3:
            notes.append("the claimed log-determinant has the wrong sign")
        return {
            "slogdet_samples": len(rows),
            "slogdet_error_max": off,
            "slogdet_standard_error": error,
            "claimed": claimed,
            "measured": measured,
        }


def _averaged(
    call: Callable[[Tensor, Tensor | None], Outcome], x: Tensor, context: Tensor | None, draws: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The image, the log-determinant as a mean over draws in float64, and its standard error."""
    outcomes = [call(x, context).values for _ in range(draws)]
    logs = torch.stack([values[1].double() for values in outcomes])
    error = logs.std(0) / math.sqrt(draws) if draws > 1 else torch.zeros_like(logs[0])
    return outcomes[0][0], logs.mean(0), error


def _reference(subject: Subject, x: Tensor, context: Tensor | None, exact: int, steps: int) -> Estimate:
    size = x[0].numel()
    if size <= exact:
        return Estimate(log_det_of_jacobian(subject, x, context))
    at = Linearized(subject, x.expand(8, *x.shape[1:]).clone(), _repeat(context, 8))
    start = torch.randn(8, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)
    found = mean_log_singular_value(at.apply, at.adjoint, start, steps=steps)
    if not bool(torch.isfinite(found).all()):
        raise NotMeasured("the Jacobian is too ill-conditioned for an estimate of its log-determinant")
    return Estimate(size * float(found.mean()), size * float(found.std()) / math.sqrt(8))


def _repeat(context: Tensor | None, count: int) -> Tensor | None:
    return None if context is None else context.expand(count, *context.shape[1:]).clone()


def log_det_of_jacobian(model: object, x: Tensor, context: Tensor | None = None) -> float:
    r"""$\log |\det J_F(x)|$ at one point from the Jacobian itself, block by block in float64.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> round(log_det_of_jacobian(DiagonalScaling(torch.tensor([2.0, 4.0])), torch.zeros(1, 2)), 4)
        2.0794
    """
    at = Linearized(Subject.of(model), x, context)
    eye = torch.eye(at.size, dtype=torch.float64, device=x.device)
    total = 0.0
    for part in at.parts:
        if part.part.rearranges:
            continue
        if part.z[0].numel() != at.size:
            raise NotMeasured(f"block {part.name} changes the number of entries, so it has no determinant")
        total += float(_linalg.slogdet(part.apply(eye))[1])
    return total
