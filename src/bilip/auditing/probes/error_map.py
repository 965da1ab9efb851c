"""Where in the plane a two-dimensional model stops being invertible."""

from __future__ import annotations

import torch

from bilip.auditing.budget import Budget
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.round_trip import distances, typical
from bilip.auditing.subject import Subject
from bilip.data import Source
from bilip.errors import NotMeasured
from bilip.record import Measurement, Quantity

__all__ = ["ErrorMap"]


class ErrorMap(Probe):
    """Relative reconstruction errors on a grid around the data, for two-dimensional models.

    Args:
        points: Grid points a side.
        widen: The grid spans this many times the range of the data.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = ErrorMap(points=9).measure(real_nvp(2, blocks=2), torch.randn(100, 2))
        >>> len(m.series["error"]), m["share_non_finite"]
        (81, 0.0)
    """

    name = "map"
    scope = "data"
    place = 90
    quantities = (
        Quantity("share_non_finite", "share of Inf/NaN", "share", "lower"),
        Quantity("error", "relative error", "relative", "lower"),
    )

    def __init__(self, points: int = 121, *, widen: float = 2.0) -> None:
        self.points, self.widen = points, widen

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object] | None:
        return {} if task.shape == (2,) and not task.conditional else None

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        if source.shape != (2,):
            raise NotMeasured("the model is not two-dimensional")
        if source.context_shape is not None:
            raise NotMeasured("the model takes a context: a map would show one context only")
        range_ = source.statistics()
        low, high = range_.center - self.widen * range_.half_range, range_.center + self.widen * range_.half_range
        axis = torch.linspace(low, high, self.points, dtype=torch.float64)
        second, first = torch.meshgrid(axis, axis, indexing="ij")
        grid = torch.stack((first, second), -1).reshape(-1, 2).to(subject.device, subject.dtype)
        errors, sizes = [], typical(source)
        for k, x in enumerate(grid.split(2048)):
            errors.append(distances(x, subject.inverse(subject.forward(x).value).value, sizes).relative.cpu())
            self.progress(min(1.0, (k + 1) * 2048 / len(grid)))
        error = torch.cat(errors)
        return Measurement(
            self.name,
            source.name,
            values={
                "low": low,
                "high": high,
                "points": self.points,
                "data_low": range_.low,
                "data_high": range_.high,
                "share_non_finite": float((~torch.isfinite(error)).double().mean()),
            },
            series={"error": tuple(float(f"{e:.3g}") for e in error.tolist())},
        )
