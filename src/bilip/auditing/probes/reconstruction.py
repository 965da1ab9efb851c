"""Does the model give back what it was given: samples of a source, and points of the plane around two-dimensional data?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bilip.auditing.budget import Budget
from bilip.auditing.looks import Looks, SequentialTest
from bilip.auditing.probes.pictures import is_image, picture
from bilip.auditing.probes.probe import Finding, Probe, Task
from bilip.auditing.reference import Reference
from bilip.auditing.round_trip import Distances, Typical, distances, typical
from bilip.auditing.subject import Subject
from bilip.data import Batch, Source
from bilip.errors import NotMeasured
from bilip.record import Histogram, Measurement, Picture, Quantity

__all__ = ["ErrorMap", "Reconstruction"]

_TRIED = 512  # bad samples kept and tried again


class Reconstruction(Probe):
    r"""Errors of the round trips $x \to z \to x$ and $z \to x \to z$, once and after `rounds` times.

    Round trips run in the model's own dtype; the errors are computed in float64, so that no norm overflows by itself. A sample for
    which the model raises is *failed*; one that comes back finite with a relative error above `wrong` (by default the square root
    of the dtype's epsilon: half of the digits, and 3.5e-4 in float64 as in float32) is *wrong*. Failed, wrong and not finite
    together are *bad*. Those are tried again in float64.

    Args:
        limit: Largest number of samples.
        batch: Samples in one batch; memory grows with it, not with the number of samples.
        rounds: Number of repeated round trips, on the first 64 samples only.
        wrong: Relative error above which a finite reconstruction is counted as wrong.
        keep: Number of worst samples kept.
        looks: When to look at the share of bad samples, and to stop; by default all samples are read.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = Reconstruction().measure(real_nvp(2, coupling="additive"), torch.randn(100, 2))
        >>> m["share_nan"], m["share_wrong"], m["relative_max"] < 1e-5
        (0.0, 0.0, True)
    """

    name = "reconstruction"
    scope = "source"
    place = 10
    quantities = (
        Quantity("share_bad", "share that does not come back", "share", "lower", "bad_share", ("inversion",)),
        Quantity("count", "samples", "count"),
        Quantity("bad", "samples that do not come back", "count", "lower"),
        Quantity("look", "number of the last look", "count"),
        *(
            Quantity(f"share_{name}", label, "share", "lower")
            for name, label in (
                ("nan", "share of NaN"),
                ("inf", "share of Inf"),
                ("failed", "share of samples that raised"),
                ("wrong", "share of wrong reconstructions"),
            )
        ),
        Quantity("wrong_limit", "relative error above which a sample is wrong", "relative"),
        *(
            Quantity(f"{name}_{part}", f"{says} {what}", "relative" if name != "l2" and name != "max" else "", "lower")
            for name, what in (
                ("l2", "L2 error"),
                ("relative", "relative error"),
                ("max", "error of one entry"),
                ("latent_relative", "relative error of z → x → z"),
                ("after_relative", "relative error after several round trips"),
            )
            for part, says in (("median", "median"), ("p99", "p99"), ("p999", "p99.9"), ("max", "largest"))
        ),
        Quantity("latent_share_non_finite", "share of Inf/NaN of z → x → z", "share", "lower"),
        Quantity("after_share_non_finite", "share of Inf/NaN after several round trips", "share", "lower"),
        Quantity("rounds", "round trips", "count"),
        Quantity("float64_tried", "bad samples tried in float64", "count"),
        Quantity("float64_bad", "of them bad in float64 too", "count", "lower"),
        Quantity("failure", "first exception", "text"),
        Quantity("relative", "relative error", "relative", "lower"),
        Quantity("finite", "finite", "flag"),
        Quantity("sample", "sample", "count"),
    )

    def __init__(
        self,
        limit: int | None = None,
        *,
        batch: int = 256,
        rounds: int = 10,
        wrong: float | None = None,
        keep: int = 8,
        looks: Looks | None = None,
    ) -> None:
        self.limit, self.batch, self.rounds, self.wrong, self.keep = limit, batch, rounds, wrong, keep
        self.looks = looks

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object]:
        return {
            "limit": budget.samples,
            "batch": budget.batch,
            "rounds": budget.repeats,
            "wrong": task.relative,
            "looks": task.looks,
        }

    def _measure(self, subject: Subject, source: Source) -> Finding:
        limit = subject.half_digits if self.wrong is None else self.wrong
        tally, total = _Tally(limit, self.keep), min(source.count, self.limit or source.count)
        sizes = typical(source)
        test = SequentialTest(self.looks, total, self.batch)
        for start, stop in test:
            batch = source.read(start, stop, dtype=subject.dtype, device=subject.device)
            forward = subject.forward(batch.x, batch.context)
            z = forward.value
            back = subject.inverse(z, batch.context)
            found = distances(batch.x, back.value, sizes)
            failed = forward.failed | back.failed
            test.bad += tally.add(batch, back.value, found, failed, forward.message or back.message)
            if not (forward.exact and back.exact):
                tally.notes.add(
                    "some samples marked as failed may be innocent: they could not be told apart from the guilty"
                )
            if batch.start == 0:
                again = subject.forward(back.value, batch.context)
                tally.latent += Histogram.of(distances(z, again.value).relative.cpu())
                few = slice(64)
                some = None if batch.context is None else batch.context[few]
                tally.after = self._repeat(subject, batch.x[few], back.value[few], some, sizes)
            self.progress(test.progress)
        return tally.finding(self, subject, source, test.look, sizes)

    def _repeat(self, subject: Subject, x: Tensor, y: Tensor, context: Tensor | None, sizes: Typical) -> Histogram:
        for _ in range(self.rounds - 1):
            y = subject.inverse(subject.forward(y, context).value, context).value
        return Histogram.of(distances(x, y, sizes).relative.cpu())


@dataclass
class _Tally:
    """What is kept of a stream of any length."""

    limit: float
    keep: int
    l2: Histogram = field(default_factory=Histogram)
    relative: Histogram = field(default_factory=Histogram)
    largest: Histogram = field(default_factory=Histogram)
    latent: Histogram = field(default_factory=Histogram)
    after: Histogram = field(default_factory=Histogram)
    count: int = 0
    nan: int = 0
    inf: int = 0
    failed: int = 0
    wrong: int = 0
    failure: str = ""
    notes: set[str] = field(default_factory=set)
    worst: list[tuple[float, int, float, Tensor, Tensor]] = field(default_factory=list)
    failing: list[Batch] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return self.nan + self.inf + self.failed + self.wrong

    def add(self, batch: Batch, back: Tensor, found: Distances, failed: Tensor, message: str) -> int:
        """Count a batch; the number of bad samples in it."""
        x, start, before = batch.x, batch.start, self.bad
        flat = back.flatten(1)
        nan = torch.isnan(flat).any(1) & ~failed
        self.count += len(x)
        self.nan += int(nan.sum())
        self.inf += int((torch.isinf(flat).any(1) & ~nan & ~failed).sum())
        self.failed += int(failed.sum())
        self.wrong += int((found.finite & (found.relative > self.limit)).sum())
        self.failure = self.failure or message
        self.l2 += Histogram.of(found.l2.cpu())
        self.relative += Histogram.of(found.relative.cpu())
        self.largest += Histogram.of(found.largest.cpu())
        order = found.relative.nan_to_num(math.inf).argsort(descending=True)[: self.keep].tolist()
        rows = [
            (float(found.relative[k]), start + k, float(found.l2[k]), x[k].cpu().clone(), back[k].cpu().clone())
            for k in order
        ]
        key = lambda row: (math.inf if math.isnan(row[0]) else row[0], -row[1])  # noqa: E731
        self.worst = sorted(self.worst + rows, key=key, reverse=True)[: self.keep]
        bad = ~(found.relative <= self.limit) | failed
        if bool(bad.any()) and sum(map(len, self.failing)) < _TRIED:
            self.failing.append(Batch(x[bad], None if batch.context is None else batch.context[bad], start))
        return self.bad - before

    def in_float64(self, subject: Subject, sizes: Typical) -> tuple[int, int, Batch | None]:
        """How many bad samples were tried again in float64, how many of them are bad there, and the samples."""
        if not self.failing:
            return 0, 0, None
        failing = Batch.joined(self.failing).take(slice(_TRIED))
        x, context = failing.x, failing.context
        try:
            reference = Reference(subject)
            if reference.own:
                return 0, 0, failing
            there = reference.encode(x, context)
            back = reference.decode(there.value, context)
        except NotMeasured:
            return 0, 0, failing
        good = (distances(x, back.value, sizes).relative <= self.limit) & ~there.failed & ~back.failed
        return len(x), int((~good).sum()), failing

    def finding(
        self, probe: Reconstruction, subject: Subject, source: Source, look: int | None, sizes: Typical
    ) -> Finding:
        tried, still, failing = self.in_float64(subject, sizes)
        values: dict[str, float | int | str | None] = {
            "count": self.count,
            "bad": self.bad,
            "share_bad": self.bad / self.count,
            "look": look,
            "float64_tried": tried,
            "float64_bad": still,
            "share_nan": self.nan / self.count,
            "share_inf": self.inf / self.count,
            "share_failed": self.failed / self.count,
            "share_wrong": self.wrong / self.count,
            "wrong_limit": self.limit,
            "eps": subject.eps,
        }
        for name, histogram in (("l2", self.l2), ("relative", self.relative), ("max", self.largest)):
            values |= {
                f"{name}_{q}": histogram.quantile(p) for q, p in (("median", 0.5), ("p99", 0.99), ("p999", 0.999))
            }
            values[f"{name}_max"] = histogram.largest
        values |= {
            "latent_relative_median": self.latent.quantile(0.5),
            "latent_relative_p999": self.latent.quantile(0.999),
            "latent_relative_max": self.latent.largest,
            "latent_share_non_finite": self.latent.share_non_finite,
            "rounds": probe.rounds,
            "after_relative_median": self.after.quantile(0.5),
            "after_relative_max": self.after.largest,
            "after_share_non_finite": self.after.share_non_finite,
            "failure": self.failure[:500],
        }
        found = Measurement(
            probe.name,
            source.name,
            values=values,
            rows=tuple(
                {"sample": source.row(k), "l2": l2, "relative": relative, "finite": math.isfinite(relative)}
                for relative, k, l2, _, _ in self.worst
            ),
            histograms={"relative": self.relative, "latent_relative": self.latent, "after_relative": self.after},
            pictures=self._pictures(source),
            notes=tuple(sorted(self.notes)),
        )
        return Finding(found, failing)

    def _pictures(self, source: Source) -> tuple[Picture, ...]:
        if not is_image(source.shape):
            return ()
        found, range_ = [], source.statistics()
        for relative, k, _, x, back in self.worst[:4]:
            broken = int((~torch.isfinite(back)).any(0).sum()) if back.shape == x.shape else 0
            for image, title in ((x, "input"), (back, "reconstruction")):
                if image.shape != x.shape:
                    continue
                row = source.row(k)
                alt = f"{title} {row} of {source.name}, relative error {relative:.2g}, {broken} broken pixels"
                found.append(picture(image, range_.low, range_.high, f"{title} {row}", alt, f"{source.name} {row}"))
        return tuple(found)


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
        axis = torch.linspace(low, high, self.points, dtype=torch.float64, device="cpu")
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
