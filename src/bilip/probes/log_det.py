"""Is the log-determinant the log-determinant?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bilip.data import Batch, Source
from bilip.errors import BilipError, NotMeasured
from bilip.probes.linear import Linearized
from bilip.probes.probe import Probe
from bilip.probes.subject import Subject
from bilip.record import Histogram, Measurement

__all__ = ["LogDet", "log_det_of_jacobian"]


class LogDet(Probe):
    r"""The claimed $\log |\det J_F|$ against slogdet of the Jacobian, and forward against inverse.

    In exact arithmetic the log-determinants of F at x and of its inverse at F(x) cancel. The reference is the sum of the blocks' slogdets
    at the stored activations, in float64. Numbers are per dimension.

    Args:
        limit: Largest number of samples for the comparison of the two directions.
        batch: Samples in one batch.
        samples: Samples compared with slogdet.
        exact: Largest dimension for slogdet.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = LogDet().measure(real_nvp(4, blocks=2), torch.randn(10, 4))
        >>> m["antisymmetry_max"] < 1e-5, m["slogdet_error_max"] < 1e-5
        (True, True)
    """

    name = "log_det"

    def __init__(self, limit: int | None = None, *, batch: int = 256, samples: int = 4, exact: int = 256) -> None:
        self.limit, self.batch, self.samples, self.exact = limit, batch, samples, exact

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        if not subject.has_log_det:
            raise NotMeasured("the model states no log-determinant")
        size, notes = math.prod(source.shape), []
        found, count = Histogram(), 0
        total = min(source.count, self.limit or source.count)
        first: tuple[Batch, Tensor] | None = None
        for batch in source.batches(self.batch, limit=self.limit, dtype=subject.dtype, device=subject.device):
            try:
                z, forward = subject.forward_and_log_det(batch.x, batch.context).values
                inverse = subject.inverse_and_log_det(z, batch.context).values[1]
            except (BilipError, NotImplementedError) as error:
                raise NotMeasured(f"the model gives no log-determinant: {error}") from error
            first = first or (batch, forward.double().cpu())
            found += Histogram.of(((forward.double() + inverse.double()).abs() / size).cpu())
            count += len(batch)
            self.progress(0.7 * count / total)
        values = {
            "count": count,
            "antisymmetry_median": found.quantile(0.5),
            "antisymmetry_p999": found.quantile(0.999),
            "antisymmetry_max": found.largest,
            "share_non_finite": found.share_non_finite,
            "slogdet_samples": 0,
            "slogdet_error_max": math.nan,
            "claimed": math.nan,
            "measured": math.nan,
        }
        if first is None or size > self.exact:
            notes.append(f"slogdet was left out: {size} dimensions, more than {self.exact}")
        else:
            values |= self._against_slogdet(subject, *first, size, notes)
        self.progress(1.0)
        return Measurement(
            self.name, source.name, values=values, histograms={"antisymmetry": found}, notes=tuple(notes)
        )

    def _against_slogdet(
        self, subject: Subject, batch: Batch, claims: Tensor, size: int, notes: list[str]
    ) -> dict[str, float]:
        rows = []
        x, context = batch.x, batch.context
        for k in range(min(self.samples, len(x))):
            try:
                true = log_det_of_jacobian(subject, x[k : k + 1], None if context is None else context[k : k + 1])
            except NotMeasured as why:
                if str(why) not in notes:
                    notes.append(str(why))
                continue
            rows.append((abs(float(claims[k]) - true) / size, float(claims[k]), true))
        if not rows:
            return {}
        error, claimed, measured = max(rows, key=lambda row: math.inf if math.isnan(row[0]) else row[0])
        if abs(claimed + measured) < 1e-3 * abs(measured) and error > 1e-3:
            notes.append("the claimed log-determinant has the wrong sign")
        return {"slogdet_samples": len(rows), "slogdet_error_max": error, "claimed": claimed, "measured": measured}


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
        total += float(torch.linalg.slogdet(part.apply(eye))[1])
    return total
