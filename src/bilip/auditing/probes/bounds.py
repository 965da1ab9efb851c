"""What is proved, beside what was measured."""

from __future__ import annotations

import math

import torch

from bilip.auditing.budget import Budget
from bilip.auditing.probes.blame import kind_of
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.probes.spectrum import Spectrum, extremes
from bilip.auditing.subject import Subject
from bilip.bounds import Box
from bilip.data import Source
from bilip.errors import BilipError, NotMeasured
from bilip.record import Measurement, Quantity

__all__ = ["Bounds"]

_LOG10 = math.log(10)


class Bounds(Probe):
    """Proven Lipschitz constants on the hull of the data, and the largest gains measured there.

    A proven number is never below a measured one. Not measured where a net cannot be read or a foreign block has no proof.

    Args:
        samples: Samples at which gains are measured.
        limit: Samples that span the hull.
        steps: Lanczos steps for the gains.
        seed: Seed of their starting directions.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = Bounds().measure(real_nvp(2, blocks=2), torch.randn(50, 2))
        >>> m["log10_inverse"] >= m["measured_log10_inverse"]
        True
    """

    name = "bounds"
    scope = "source"
    place = 80
    quantities = (
        Quantity("log10_forward", "Lip(F), proven", "log10", "lower"),
        Quantity("log10_inverse", "Lip(F⁻¹), proven", "log10", "lower"),
        Quantity("measured_log10_forward", "largest gain of F measured", "log10"),
        Quantity("measured_log10_inverse", "largest gain of F⁻¹ measured", "log10"),
        Quantity("log10_total_forward", "Lip(F) so far", "log10"),
        Quantity("log10_total_inverse", "Lip(F⁻¹) so far", "log10"),
        Quantity("domain", "range of inputs", "text"),
        Quantity("first_beyond_precision", "first block beyond precision", "text"),
    )

    def __init__(self, samples: int = 4, *, limit: int = 4096, steps: int = 12, seed: int = 0) -> None:
        self.samples, self.limit, self.steps, self.seed = samples, limit, steps, seed

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object] | None:
        if not task.large:
            return {"samples": min(4, budget.spectra), "steps": 12}
        spectrum = Spectrum.cost(budget, task) or {}  # what it finds of the first sample serves here too
        return {"samples": 1} | {name: spectrum[name] for name in ("steps", "seed")}

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        low, high, contexts = None, None, []
        for batch in source.batches(256, limit=self.limit, dtype=torch.float64):
            low = batch.x.amin(0) if low is None else torch.minimum(low, batch.x.amin(0))
            high = batch.x.amax(0) if high is None else torch.maximum(high, batch.x.amax(0))
            if batch.context is not None:
                contexts.append(torch.stack((batch.context.amin(0), batch.context.amax(0))))
        if low is None or high is None:
            raise NotMeasured("there are no samples")
        context = None
        if contexts:
            ends = torch.stack(contexts)
            context = Box(ends[:, 0].amin(0).double(), ends[:, 1].amax(0).double())
        try:
            bound = subject.bijection.bounds(Box(low, high), context=context)
        except BilipError as why:
            raise NotMeasured(str(why)) from why
        names = {name: kind_of(part) for name, part in subject.parts}
        rows = tuple(
            {
                "block": name,
                "kind": names.get(name, kind),
                "log10_forward": row.log_forward / _LOG10,
                "log10_inverse": row.log_inverse / _LOG10,
                "total_forward": _total(bound.blocks[: k + 1], "log_forward"),
                "total_inverse": _total(bound.blocks[: k + 1], "log_inverse"),
                "magnitude": row.magnitude,
            }
            for k, row in enumerate(bound.blocks)
            for name, kind in ((row.name, row.kind),)
        )
        first = bound.first_beyond_precision()
        values = {
            "log10_forward": bound.log_forward / _LOG10,
            "log10_inverse": bound.log_inverse / _LOG10,
            "first_beyond_precision": first.name if first else "",
            "domain": f"[{float(low.min()):.3g}, {float(high.max()):.3g}]: the hull of {min(source.count, self.limit)} samples",
            **self._measured(subject, source),
        }
        return Measurement(self.name, source.name, values=values, rows=rows, notes=tuple(bound.remarks()))

    def _measured(self, subject: Subject, source: Source) -> dict[str, float]:
        batch = source.first(self.samples, dtype=torch.float64, device=subject.device)
        try:
            found = extremes(subject, batch.x, batch.context, steps=self.steps, seed=self.seed)
        except NotMeasured:
            return {"measured_log10_forward": math.nan, "measured_log10_inverse": math.nan}
        forward, inverse = float(found.sigma_max.max()), float(found.sigma_min.min())
        return {
            "measured_log10_forward": math.log10(forward) if forward > 0 else math.nan,
            "measured_log10_inverse": -math.log10(inverse) if inverse > 0 else math.nan,
        }


def _total(rows, name: str) -> float:
    return sum(getattr(row, name) for row in rows) / _LOG10
