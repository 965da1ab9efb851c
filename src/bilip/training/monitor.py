"""Stability while a model trains: one row every so many steps."""

from __future__ import annotations

import csv
import io
import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from bilip.auditing.probes.spectrum import Spectrum
from bilip.auditing.round_trip import distances, typical
from bilip.auditing.subject import Subject
from bilip.blocks import Bijection
from bilip.data import Source, as_source
from bilip.errors import InputError, NotInitialized
from bilip.record import write_aside
from bilip.reversible import Reversible

__all__ = ["StabilityMonitor", "StabilityRow"]


@dataclass(frozen=True)
class StabilityRow:
    """Where a model stands at one step of its training; NaN is what could not be measured.

    Attributes:
        step: The step.
        relative_median: Median of the relative round-trip error; infinite if that many samples are lost.
        relative_max: Largest that is finite.
        share_non_finite: Share of samples that came back with NaN or Inf, or raised.
        sigma_min: Smallest singular value of the Jacobian at the sample, in float64; the true one may be smaller.
        sigma_max: Largest; the true one may be larger.
        condition: Their ratio.
        drift: Largest relative drift over the blocks in the last step that a `Reversible` watched.
        repaired: Steps that its guard has repaired so far.
        seconds: What this row took.
    """

    step: int
    relative_median: float
    relative_max: float
    share_non_finite: float
    sigma_min: float
    sigma_max: float
    condition: float
    drift: float
    repaired: int
    seconds: float


class StabilityMonitor:
    """Called in every step of a training loop, measures every so many: round trip, guard report, extremes of the spectrum.

    The measurement runs in evaluation mode, in the model's own dtype and without gradients, and leaves modes, random numbers,
    statistics and gradients as they were. A model whose ActNorms have not seen any data yet gives a row of NaN.

    Args:
        model: A bijection, for example a `Reversible`; a flow, a classifier with a `trunk`, or anything `as_bijection` takes.
        x: A fixed batch, a pair `(x, context)` or a `Source`.
        every: Steps from one row to the next; step 0 has one.
        spectrum: Whether the singular values are measured: a copy of the model in float64, and a few Lanczos steps.
        samples: Samples of the round trip.
        spectra: Samples whose spectrum is taken; the most extreme values count.
        steps: Lanczos steps beyond 64 dimensions.

    Attributes:
        rows: The rows so far.

    Example:
        >>> from bilip.models import real_nvp
        >>> monitor = StabilityMonitor(real_nvp(4, blocks=2), torch.randn(100, 4), every=10)
        >>> for step in range(25):
        ...     row = monitor(step)  # after optimizer.step()
        >>> [row.step for row in monitor.rows], monitor.rows[-1].relative_max < 1e-5, monitor.rows[-1].condition > 1
        ([0, 10, 20], True, True)
    """

    def __init__(
        self,
        model: Any,
        x: Any,
        *,
        every: int = 100,
        spectrum: bool = True,
        samples: int = 64,
        spectra: int = 1,
        steps: int = 20,
    ) -> None:
        for label, value in (("every", every), ("samples", samples), ("spectra", spectra), ("steps", steps)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"StabilityMonitor({label}={value!r}): expected a whole number, 1 or more.")
        trunk = getattr(model, "trunk", None)
        model = trunk if isinstance(trunk, Bijection) and not isinstance(model, Bijection) else model
        self._walk = model if isinstance(model, Reversible) else getattr(model, "bijection", None)
        self._subject = Subject.of(model.bijection if isinstance(model, Reversible) else model)
        while isinstance(self._subject.bijection, Reversible):
            self._subject.bijection = self._subject.bijection.bijection
        self._source = x if isinstance(x, Source) else as_source("x", x)
        self._source.check(samples)
        self.every, self.samples = every, samples
        self._spectrum = Spectrum(spectra, exact=64, steps=steps) if spectrum else None
        self.rows: list[StabilityRow] = []

    def __call__(self, step: int) -> StabilityRow | None:
        """A new row, or `None` where none is due."""
        if step % self.every:
            return None
        row = self.measure(step)
        self.rows.append(row)
        return row

    def measure(self, step: int) -> StabilityRow:
        """A row for this step, whether it is due or not; it is not kept."""
        began = time.perf_counter()
        subject = self._subject
        subject.forget_copies()  # copies of a model that has moved on
        with subject.evaluating(), torch.random.fork_rng(devices=subject.devices):
            try:
                found = self._round_trip() | self._extremes()
            except NotInitialized:
                found = {}
        subject.forget_copies()
        names = ("relative_median", "relative_max", "share_non_finite", "sigma_min", "sigma_max", "condition")
        drift, repaired = self._guard()
        values = {name: found.get(name, math.nan) for name in names}
        return StabilityRow(step, **values, drift=drift, repaired=repaired, seconds=time.perf_counter() - began)

    def _round_trip(self) -> dict[str, float]:
        subject = self._subject
        batch = self._source.first(self.samples, dtype=subject.dtype, device=subject.device)
        there = subject.forward(batch.x, batch.context)
        back = subject.inverse(there.value, batch.context)
        relative = distances(batch.x, back.value, typical(self._source)).relative
        finite = torch.isfinite(relative) & ~there.failed & ~back.failed
        return {
            "relative_median": float(torch.where(finite, relative, torch.inf).median()),
            "relative_max": float(relative[finite].max()) if bool(finite.any()) else math.nan,
            "share_non_finite": 1 - float(finite.double().mean()),
        }

    def _extremes(self) -> dict[str, float]:
        if self._spectrum is None:
            return {}
        m = self._spectrum.measure(self._subject, self._source)
        return {name: float(m[name]) for name in ("sigma_min", "sigma_max", "condition")} if m.measured else {}

    def _guard(self) -> tuple[float, int]:
        walk = self._walk
        if not isinstance(walk, Reversible) or walk.guard is None:
            return math.nan, 0
        report = walk.report()
        return max(report.drift.values(), default=math.nan), report.repaired

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as CSV, whole or not at all."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(StabilityRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        write_aside(path, text.getvalue())
