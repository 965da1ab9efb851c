"""Is log p the log p of the model, or of its rounding errors?"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bilip.auditing.budget import Budget
from bilip.auditing.digits import Digits
from bilip.auditing.looks import Looks, SequentialTest, share_interval
from bilip.auditing.probes.probe import Finding, Probe, Task
from bilip.auditing.reference import Reference, log_prob, same_draws, tolerance
from bilip.auditing.subject import Outcome, Subject, parameter_count
from bilip.data import Batch, Source
from bilip.errors import NotMeasured, said_by
from bilip.record import Histogram, Measurement, Quantity

__all__ = ["Likelihood"]

_SMALL = 128  # up to so many dimensions every sample gets its reference
_SUSPICIOUS = 0.05  # of the tolerance: a sample whose log p moves by more when its input is rounded anew
_CHEAP = 4e9  # weights times samples, where a list of features is as large as an image and its nets are not
_FEW = 32  # samples that tell whether log p is drawn
_STABLE = 0.25  # of the tolerance: a reference that moves by more when it is shaken is none


class Likelihood(Probe):
    r"""$\log p(x)$ as the model computes it, in its own dtype, against a float64 copy with the same parameters.

    A sample is *bad* when the two differ by more than $10^{-3} (d + |\log p|)$, or the model's is NaN, or one is infinite and the
    other not. The reference itself is computed again with the last bit of the input changed; where it moves by more than a quarter of
    the tolerance, the sample is *unknown*. If these decide, log p of a few of them is computed with as many digits as it takes, and counts
    for as many of the others as that excludes. A log-likelihood that is itself an estimate is compared under the same random draws, so
    that its spread is not taken for an error; the spread is stated.

    Up to 128 dimensions every sample gets its reference, and beyond where samples are lists of features and nets are small. Else those
    do that look suspicious (their log p moves when the input is rounded anew), and `referenced` of the rest; if one of these is bad, all
    follow.

    Without a base distribution the log-determinant takes the place of log p.

    Args:
        limit: Largest number of samples.
        batch: Samples in one batch.
        part: Tolerance, as a part of d + |log p|.
        referenced: Samples with a reference although nothing looks suspicious; `None` for all.
        looks: When to look at the share of bad samples, and to stop; by default all samples are read.
        digits: Largest number of samples computed with more digits than float64 has.

    Example:
        >>> from bilip import Flow
        >>> from bilip.models import real_nvp
        >>> m = Likelihood().measure(Flow(real_nvp(2, blocks=2)), torch.randn(100, 2))
        >>> m["bad"], m["unknown"], m["error_max"] < 1e-4
        (0, 0, True)
    """

    name = "likelihood"
    scope = "source"
    place = 20
    quantities = (
        Quantity(
            "share_bad",
            "share whose log p is not that of the reference",
            "share",
            "lower",
            "bad_share",
            ("likelihood", "ood-likelihood"),
        ),
        Quantity("count", "samples", "count"),
        Quantity("bad", "samples with a wrong log p", "count", "lower"),
        Quantity("unknown", "samples without a stable reference", "count", "lower"),
        Quantity("digits_tried", "of them computed with more digits", "count"),
        Quantity("digits_bad", "of these with a wrong log p", "count", "lower"),
        Quantity("look", "number of the last look", "count"),
        Quantity("referenced", "samples held against the reference", "count"),
        Quantity("share_non_finite", "share of log p that is NaN or Inf", "share", "lower"),
        Quantity("error_median", "median error of log p", "nats", "lower"),
        Quantity("error_max", "largest finite error of log p", "nats", "lower"),
        Quantity("spread", "standard deviation of log p over draws", "nats", "lower"),
        Quantity("float64_tried", "bad samples tried in float64", "count"),
        Quantity("float64_bad", "of them without a finite log p there", "count", "lower"),
        Quantity("share_failed", "share of samples that raised", "share", "lower"),
        Quantity("failure", "first exception", "text"),
        Quantity("worst_log_prob", "log p as run, worst sample", "nats"),
        Quantity("worst_reference", "log p of the reference there", "nats"),
        Quantity("log_prob_median", "median log p", "nats"),
        Quantity("excess", "error of log p, in parts of d + |log p|", "relative", "lower"),
    )

    def __init__(
        self,
        limit: int | None = None,
        *,
        batch: int = 256,
        part: float = 1e-3,
        referenced: int | None = 64,
        looks: Looks | None = None,
        digits: int = 4,
    ) -> None:
        self.limit, self.batch, self.part, self.referenced, self.looks = limit, batch, part, referenced, looks
        self.digits = digits

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object]:
        return {
            "limit": budget.samples,
            "batch": budget.batch,
            "part": task.log_prob,
            "referenced": budget.referenced,
            "looks": task.looks,
            "digits": 2 * budget.log_dets,
        }

    def _measure(self, subject: Subject, source: Source) -> Finding:
        if not subject.has_log_det:
            raise NotMeasured("the model states no log-determinant")
        reference = Reference(subject)
        _as_stated(subject, source, self.part)
        size, total = math.prod(source.shape), min(source.count, self.limit or source.count)
        everyone = self.referenced is None or size <= _SMALL
        everyone |= len(source.shape) == 1 and parameter_count(subject.bijection) * min(total, self.batch * 4) <= _CHEAP
        tally, test, spread = _Tally(self.part, size), SequentialTest(self.looks, total, self.batch), math.nan
        for start, stop in test:
            batch = source.read(start, stop, dtype=subject.dtype, device=subject.device)
            if start == 0:
                spread = _spread(subject, batch)
                tally.draws = spread > 0
                everyone |= tally.draws  # the draws of a part of a batch are not those of the whole
            with tally.drawing(start):
                value = log_prob(subject, batch.x, batch.context, said=tally.said).double()
            chosen = torch.ones_like(value, dtype=torch.bool)
            if not (everyone or tally.surprised):
                chosen = self._suspicious(subject, batch, value, tally)
                left = (self.referenced or 0) - tally.trusted
                calm = (~chosen).nonzero().flatten()
                picked = calm[
                    torch.randperm(len(calm), generator=torch.Generator().manual_seed(start), device="cpu")[
                        : max(left, 0)
                    ]
                ]
                tally.trusted += len(picked)
                sure = torch.zeros_like(chosen)
                sure[picked] = True
                test.bad += self._compare(reference, batch, value, sure, tally, surprise=True)
                tally.skipped.append((start, stop, value, ~chosen & ~sure))
            test.bad += self._compare(reference, batch, value, chosen, tally)
            tally.count += len(value)
            tally.values.append(value.cpu())
            if tally.surprised and tally.skipped:  # float32 looked fine and was not: nothing is taken on trust any more
                for first, end, known, rest in tally.skipped:
                    past = source.read(first, end, dtype=subject.dtype, device=subject.device)
                    test.bad += self._compare(reference, past, known, rest, tally)
                tally.skipped.clear()
            self.progress(test.progress)
        if tally.unknown and not tally.draws and self._open(tally, test):
            tally.compute_more_digits(reference.subject, self.digits, self.progress)
        return tally.finding(self, source, test, spread, base=subject.base is not None, own=reference.own)

    def _open(self, tally: _Tally, test: SequentialTest) -> bool:
        """Whether the samples without a reference decide."""
        if self.looks is None:
            return True
        low, _ = share_interval(tally.bad, tally.count, test.look)
        _, high = share_interval(tally.bad + tally.unknown, tally.count, test.look)
        return low <= self.looks.allowed < high

    def _suspicious(self, subject: Subject, batch: Batch, value: Tensor, tally: _Tally) -> Tensor:
        if batch.x.shape not in tally.signs:  # the same for every batch of a size
            generator = torch.Generator().manual_seed(1)
            signs = torch.randint(0, 2, batch.x.shape, generator=generator, device="cpu").to(batch.x) * 2 - 1
            tally.signs = {batch.x.shape: signs}
        moved = log_prob(subject, batch.x * (1 + subject.eps * tally.signs[batch.x.shape]), batch.context).double()
        return ~((moved - value).abs() <= _SUSPICIOUS * tolerance(value, tally.size, self.part))

    def _compare(
        self, reference: Reference, batch: Batch, value: Tensor, rows: Tensor, tally: _Tally, *, surprise: bool = False
    ) -> int:
        """Hold some rows of a batch against the reference; the number of bad ones."""
        if not bool(rows.any()):
            return 0
        x, context = batch.x[rows], None if batch.context is None else batch.context[rows]
        with tally.drawing(batch.start):
            exact = reference.log_prob(x, context)
        value = value[rows]
        error = (value - exact).abs()
        allowed = tolerance(exact, tally.size, self.part)
        same = (value == exact) & ~torch.isnan(value)  # equal infinities agree
        bad = ~((error <= allowed) | same)
        unknown = torch.zeros_like(bad)
        if bool(bad.any()) and not reference.own:
            with tally.drawing(batch.start):
                again = reference.log_prob(x, context, shaken=True)
            stable = ((again - exact).abs() <= _STABLE * allowed) | (again == exact)
            unknown = bad & torch.isfinite(value) & ~stable
            bad &= ~unknown
        tally.add(batch, rows, value, exact, error, allowed, bad, unknown)
        if bool(unknown.any()) and len(tally.unsure) < self.digits:
            wide = [None] * int(unknown.sum()) if context is None else list(context[unknown].split(1))
            tally.unsure += zip(x[unknown].split(1), wide, value[unknown].tolist(), strict=True)
        if surprise and bool(bad.any()):
            tally.surprised = True
        return int(bad.sum())


@torch.no_grad()
def _as_stated(subject: Subject, source: Source, part: float) -> None:
    """Refuse to judge a log-determinant where a user's own module has a `log_prob` that is something else."""
    stated = subject.stated_log_prob
    if stated is None:
        return
    batch = source.first(_FEW, dtype=subject.dtype, device=subject.device)
    given = (batch.x,) if batch.context is None else (batch.x, batch.context)
    outcome = subject.forward_and_log_det(batch.x, batch.context)
    z, log_det = outcome.values[0].double().flatten(1), outcome.values[1].double()
    base = -0.5 * (z.square().sum(1) + z.shape[1] * math.log(2 * math.pi))
    try:
        value = stated(*given).double()
    except Exception as error:  # a user's code may raise anything
        raise NotMeasured(f"log_prob of {subject.name} raised {said_by(error):.300}") from error
    if value.shape != base.shape:
        raise NotMeasured(
            f"log_prob of {subject.name} has shape {tuple(value.shape)}: expected one number for each sample"
        )

    def same(other: Tensor) -> bool:
        known = torch.isfinite(other) & torch.isfinite(value)
        return bool(((other - value).abs() <= tolerance(other, z.shape[1], part))[known].all())

    if same(base + log_det):
        return
    wrong = "it leaves out the log-determinant" if same(base) else "it has another base, or is wrong"
    raise NotMeasured(
        f"log_prob of {subject.name} is not log N(z; 0, 1) + log_det, {float(value[0]):.6g} and {float((base + log_det)[0]):.6g} at the "
        f"first sample: {wrong}. With another base pass bilip.Flow(bilip.as_bijection(model), base=...), which the audit can call"
    )


def _spread(subject: Subject, batch: Batch) -> float:
    """Median standard deviation of log p over draws; 0 for a model that draws nothing, as a few samples tell."""
    few = batch.take(slice(_FEW))
    apart = _apart(subject, few)
    if not len(apart) or bool((apart > 0).any()):
        apart = _apart(subject, batch)
    return float(apart.median()) / math.sqrt(2) / 0.6745 if len(apart) else math.nan


def _apart(subject: Subject, batch: Batch) -> Tensor:
    """How far log p is apart under two draws, where it is finite."""
    found = []
    for seed in range(2):
        with same_draws(seed):
            found.append(log_prob(subject, batch.x, batch.context).double())
    apart = (found[1] - found[0]).abs()
    return apart[torch.isfinite(apart)]


@dataclass
class _Tally:
    part: float
    size: int
    count: int = 0
    bad: int = 0
    unknown: int = 0
    referenced: int = 0
    trusted: int = 0
    surprised: bool = False
    errors: Histogram = field(default_factory=Histogram)
    excess: Histogram = field(default_factory=Histogram)
    values: list[Tensor] = field(default_factory=list)
    draws: bool = False
    beyond: int = 0
    said: list[Outcome] = field(default_factory=list)
    skipped: list[tuple[int, int, Tensor, Tensor]] = field(default_factory=list)
    failing: list[Batch] = field(default_factory=list)
    unsure: list[tuple[Tensor, Tensor | None, float]] = field(default_factory=list)
    signs: dict[torch.Size, Tensor] = field(default_factory=dict)
    digits_tried: int = 0
    digits_bad: int = 0
    notes: list[str] = field(default_factory=list)
    worst: tuple[float, float, float] = (-1.0, math.nan, math.nan)

    def drawing(self, seed: int) -> AbstractContextManager[None]:
        """The same random numbers for both sides, for a model that draws any."""
        return same_draws(seed) if self.draws else nullcontext()

    def add(
        self,
        batch: Batch,
        rows: Tensor,
        value: Tensor,
        exact: Tensor,
        error: Tensor,
        allowed: Tensor,
        bad: Tensor,
        unknown: Tensor,
    ) -> None:
        self.bad += int(bad.sum())
        self.beyond += int((bad & ~torch.isfinite(exact)).sum())
        self.unknown += int(unknown.sum())
        self.referenced += len(value)
        error = torch.where(value == exact, torch.zeros_like(error), error)
        ratio = error / (allowed / self.part)
        self.errors += Histogram.of(error.cpu())
        self.excess += Histogram.of(ratio.cpu())
        order = ratio.nan_to_num(math.inf, math.inf)
        k = int(order.argmax())
        if float(order[k]) > self.worst[0]:
            self.worst = (float(order[k]), float(value[k]), float(exact[k]))
        wrong = bad | unknown
        if bool(wrong.any()) and sum(map(len, self.failing)) < 256:
            at = rows.nonzero().flatten()[wrong]
            self.failing.append(batch.take(at))

    def compute_more_digits(self, reference: Subject, most: int, progress: Callable[[float], None]) -> None:
        """Compute a few samples without a stable reference with more digits."""
        digits = None
        for x, context, value in self.unsure[:most]:
            try:
                digits = digits or Digits(reference)
                true = digits.log_prob(x, context)
            except NotMeasured as why:
                self.notes.append(f"not computed with more digits: {why}")
                return
            self.digits_tried += 1
            self.digits_bad += not abs(value - true) <= self.part * (self.size + abs(true))
            self.worst = (math.inf, value, true)
            progress(1.0)

    def finding(
        self, probe: Likelihood, source: Source, test: SequentialTest, spread: float, *, base: bool, own: bool
    ) -> Finding:
        values = torch.cat(self.values)
        finite = values[torch.isfinite(values)]
        failing = Batch.joined(self.failing) if self.failing else None
        notes = [] if base else ["the model has no base distribution: the log-determinant stands for log p"]
        notes += self.notes
        if self.referenced < self.count:
            rest = self.count - self.referenced
            notes.append(
                f"{rest:,} samples that looked sound in the model's own arithmetic were not held against float64"
            )
        return Finding(
            Measurement(
                probe.name,
                source.name,
                values={
                    "count": self.count,
                    "bad": self.bad,
                    "unknown": self.unknown,
                    "digits_tried": self.digits_tried,
                    "digits_bad": self.digits_bad,
                    "share_bad": self.bad / self.count,
                    "look": test.look,
                    "referenced": self.referenced,
                    "share_non_finite": float((~torch.isfinite(values)).double().mean()),
                    "error_median": self.errors.quantile(0.5),
                    "error_max": self.errors.largest,
                    "spread": spread,
                    "float64_tried": 0 if own else self.bad,
                    "float64_bad": 0 if own else self.beyond,
                    "share_failed": sum(int(o.failed.sum()) for o in self.said) / self.count,
                    "failure": self.said[0].message[:500] if self.said else "",
                    "worst_log_prob": self.worst[1],
                    "worst_reference": self.worst[2],
                    "log_prob_median": float(finite.median()) if len(finite) else math.nan,
                },
                histograms={"excess": self.excess},
                notes=tuple(notes),
            ),
            failing,
        )
