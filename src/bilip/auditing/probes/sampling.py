"""Are the model's own samples finite, and does the model recognise them?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bilip.adapters import Base
from bilip.auditing.budget import Budget
from bilip.auditing.looks import Looks, SequentialTest
from bilip.auditing.probes.pictures import is_image, picture
from bilip.auditing.probes.probe import Finding, Probe, Task
from bilip.auditing.reference import Reference
from bilip.auditing.round_trip import Typical, distances, typical
from bilip.auditing.subject import Outcome, Subject
from bilip.data import Batch, Source
from bilip.errors import BilipError, NotMeasured
from bilip.record import Histogram, Measurement, Picture, Quantity

__all__ = ["Sampling"]

_KNOWN = 32  # samples of data from which on their range is known; of fewer it is no less than their size
_SMALL = 128  # up to so many dimensions every sample gets its reference


class Sampling(Probe):
    r"""Latents from the base, $x = F^{-1}(z)$: what the model would decode in exact arithmetic, and within the data's range?

    A sample is *bad* when it is not finite; when both its forward error, against a float64 copy's decoding of the same latent, and its
    backward error, the copy's encoding of the sample against the latent, exceed `wrong`; or when a feature lies outside `range` times
    the range of the data (for images: of all pixels), less the share of held-out data that does. A decoding that the copy itself does
    not encode back is no reference: then the backward error decides.

    Up to 128 dimensions every sample is held against the reference. Beyond, those are whose own encoding does not lead back to half
    of `wrong`, or that are not finite or out of range; and `referenced` of the rest. If one of these is bad, all follow.

    A model that cannot be copied in float64 has no reference: its finite samples within the range are *unknown*.

    Not measured without a base distribution. Conditional models take the contexts of the source, in order.

    Args:
        count: Largest number of samples drawn.
        batch: Samples in one batch.
        seed: Seed of the draws.
        wrong: Relative error above which a sample is wrong; by default the square root of the dtype's epsilon.
        range: Samples may lie within so many times the range of the data.
        referenced: Samples with a reference although nothing looks suspicious; `None` for all.
        looks: When to look at the share of bad samples, and to stop; by default all are drawn.

    Example:
        >>> import bilip
        >>> flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, coupling="additive"))
        >>> m = Sampling(100).measure(flow, torch.randn(100, 2))
        >>> m["bad"], m["share_non_finite"], m["reencode_relative_max"] < 1e-5
        (0, 0.0, True)
    """

    name = "sampling"
    scope = "data"
    place = 40
    quantities = (
        Quantity("share_bad", "share of samples that are wrong", "share", "lower", "bad_share", ("sampling",)),
        Quantity("count", "samples", "count"),
        Quantity("bad", "wrong samples", "count", "lower"),
        Quantity("look", "number of the last look", "count"),
        Quantity("referenced", "samples held against the reference", "count"),
        Quantity("wrong", "samples whose decoding is wrong", "count", "lower"),
        Quantity("unknown", "samples without a reference", "count", "lower"),
        Quantity("out_of_range", "samples far outside the data", "count", "lower"),
        Quantity("share_held_out", "share of held-out data that far outside", "share"),
        Quantity("float64_tried", "bad samples tried in float64", "count"),
        Quantity("float64_bad", "of them bad in float64 too", "count", "lower"),
        Quantity("largest", "largest entry of a sample", "", "lower"),
        Quantity("data_largest", "largest entry of the data"),
        Quantity("share_non_finite", "share of Inf/NaN", "share", "lower"),
        Quantity("share_failed", "share of samples that raised", "share", "lower"),
        Quantity("failure", "first exception", "text"),
        Quantity("forward_error_max", "largest error against the reference's decoding", "relative", "lower"),
        Quantity("backward_error_max", "largest error of the reference's encoding", "relative", "lower"),
        Quantity("reencode_share_non_finite", "share of Inf/NaN encoded again", "share", "lower"),
        Quantity("reencode_relative_median", "median error of samples encoded again", "relative", "lower"),
        Quantity("reencode_relative_p999", "p99.9 error of samples encoded again", "relative", "lower"),
        Quantity("reencode_relative_max", "largest error of samples encoded again", "relative", "lower"),
        Quantity("sample_bits_median", "median bits per dimension of samples", "bits/dim"),
        Quantity("data_bits_median", "median bits per dimension of data", "bits/dim"),
        Quantity("sample_bits_share_non_finite", "share of samples without finite bits", "share", "lower"),
        Quantity(
            "bits_gap", "bits per dimension between samples and data", "bits/dim", "lower", "sample_gap", ("sampling",)
        ),
        Quantity("reencode_relative", "relative error of z", "relative", "lower"),
    )

    def __init__(
        self,
        count: int = 512,
        *,
        batch: int = 256,
        seed: int = 0,
        wrong: float | None = None,
        range: float = 10.0,
        referenced: int | None = 64,
        looks: Looks | None = None,
    ) -> None:
        self.count, self.batch, self.seed, self.wrong, self.range = count, batch, seed, wrong, range
        self.referenced, self.looks = referenced, looks

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object]:
        return {
            "count": budget.draws,
            "batch": budget.batch,
            "seed": task.seed,
            "wrong": task.relative,
            "range": task.range,
            "referenced": budget.referenced,
            "looks": task.looks,
        }

    def _measure(self, subject: Subject, source: Source) -> Finding:
        if subject.base is None:
            raise NotMeasured("the model has no base distribution; pass a flow, or wrap the bijection with bilip.Flow")
        size, notes = math.prod(source.shape), []
        torch.manual_seed(self.seed)
        generator = torch.Generator(device=subject.device).manual_seed(self.seed)
        wrong = subject.half_digits if self.wrong is None else self.wrong
        reference = None
        try:
            reference = Reference(subject)
        except NotMeasured as why:
            notes.append(
                f"no reference: {why}; only samples that are not finite or far outside the data are known to be bad"
            )
        known = _Range.of(source, self.range)
        sizes = Typical(None, typical(source).scale)
        found = _Tally(
            wrong, known, sizes, everyone=self.referenced is None or size <= _SMALL, left=self.referenced or 0
        )
        bits = []
        pictures: tuple[Picture, ...] = ()
        wanted = self.count if source.context_shape is None else min(self.count, source.count)
        test = SequentialTest(self.looks, wanted, self.batch)
        for start, stop in test:
            context = _contexts(source, start, stop, subject) if source.context_shape is not None else None
            z = _draw(subject.base, stop - start, context, generator)
            drawn = subject.inverse(z, context)
            x = drawn.value
            if not start and is_image(tuple(x.shape[1:])):
                pictures = _samples(x, source)
            if len(bits) < 4:
                bits.append(_bits(subject, x, context, size))
            test.bad = found.add(subject, reference, z, drawn, context, start)
            self.progress(test.progress)
        data = source.first(self.batch, dtype=subject.dtype, device=subject.device)
        data_bits = _bits(subject, data.x, data.context, size)
        all_bits = torch.cat(bits)
        gap = abs(_median(all_bits) - _median(data_bits))
        if known.held_out:
            notes.append(f"{100 * known.held_out:.2g} % of held-out data lie as far outside; so many samples may")
        values = found.values() | {
            "look": test.look,
            "share_held_out": known.held_out,
            "data_largest": known.largest,
            "sample_bits_median": _median(all_bits),
            "sample_bits_share_non_finite": float((~torch.isfinite(all_bits)).double().mean()),
            "data_bits_median": _median(data_bits),
            "bits_gap": gap,
        }
        return Finding(
            Measurement(
                self.name,
                "base",
                values=values,
                histograms={"reencode_relative": found.code},
                pictures=pictures,
                notes=tuple(notes),
            ),
            found.failing(),
        )


@dataclass(frozen=True)
class _Range:
    """Where data lie, feature by feature, widened; learned from one half of the data and tried on the other."""

    low: Tensor
    high: Tensor
    held_out: float
    largest: float

    @classmethod
    def of(cls, source: Source, times: float) -> _Range:
        x = source.spread(4096).x.double()
        least = float(x.abs().max()) if len(x) < _KNOWN else 0.0  # few samples are closer together than the data
        whole = is_image(source.shape)
        learned, other = x[::2], x[1::2]

        def ends(part: Tensor) -> tuple[Tensor, Tensor]:
            low, high = (part.amin(), part.amax()) if whole else (part.amin(0), part.amax(0))
            centre, half = (low + high) / 2, (high - low) / 2
            half = torch.where(half > 0, half, half.max().clamp_min(1e-30))  # a constant feature: the widest other one
            half = half.clamp_min(least)
            return centre - times * half, centre + times * half

        low, high = ends(learned)
        out = ((other < low) | (other > high)).flatten(1).any(1) if len(other) else torch.zeros(1, device="cpu")
        low, high = ends(x)
        return cls(low, high, float(out.double().mean()), float(x.abs().max()))

    def outside(self, x: Tensor) -> Tensor:
        """For each sample: does a feature lie outside?"""
        if self.low.ndim and x.shape[1:] != self.low.shape:
            x = x.reshape(len(x), *self.low.shape)
        wide = x.double()
        return ((wide < self.low.to(x.device)) | (wide > self.high.to(x.device))).flatten(1).any(1)


@dataclass
class _Tally:
    wrong_limit: float
    known: _Range
    sizes: Typical
    everyone: bool
    left: int
    code: Histogram = field(default_factory=Histogram)
    count: int = 0
    non_finite: int = 0
    failed: int = 0
    wrong: int = 0
    unknown: int = 0
    outside: int = 0
    both: int = 0
    referenced: int = 0
    tried: int = 0
    still: int = 0
    failure: str = ""
    largest: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    surprised: bool = False
    skipped: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    kept: list[Batch] = field(default_factory=list)

    @property
    def excess(self) -> int:
        """Samples far outside, less what held-out data would have."""
        return max(0, math.ceil(self.outside - self.known.held_out * self.count))

    @property
    def bad(self) -> int:
        return self.non_finite + self.wrong + max(0, self.excess - self.both)

    def add(
        self,
        subject: Subject,
        reference: Reference | None,
        z: Tensor,
        drawn: Outcome,
        context: Tensor | None,
        start: int,
    ) -> int:
        """Count a batch of samples; the number of bad ones so far."""
        x = drawn.value
        self.count += len(x)
        self.failed += int(drawn.failed.sum())
        self.failure = self.failure or drawn.message
        finite = torch.isfinite(x.flatten(1)).all(1)
        self.non_finite += int((~finite).sum())
        if bool(finite.any()):
            self.largest = max(self.largest, float(x[finite].double().abs().max()))
        again = subject.forward(_filled(x, finite), context).value
        own = torch.where(finite, distances(z, again).relative, math.nan)
        self.code += Histogram.of(own.cpu())
        outside = finite & self.known.outside(x)
        suspicious = ~finite | outside | ~(own <= self.wrong_limit / 2)
        if reference is None:  # the encoding may be as wrong as the sample, or wrong where the sample is right
            self.unknown += int((finite & ~outside).sum())
            self._count(x, torch.zeros_like(finite), outside, finite, x.double(), context)
            return self.bad
        chosen = torch.ones_like(suspicious) if self.everyone or self.surprised else suspicious
        sure = torch.zeros_like(chosen)
        if not bool(chosen.all()):
            calm = (~chosen).nonzero().flatten()
            order = torch.randperm(len(calm), generator=torch.Generator().manual_seed(start), device="cpu")
            sure[calm[order[: max(0, self.left - self.referenced)].to(calm.device)]] = True
            rest = ~chosen & ~sure
            self.skipped.append((x[rest], z[rest], None if context is None else context[rest]))
        for rows, calm in ((chosen, False), (sure, True)):
            if bool(rows.any()):
                before = self.wrong
                self._reference(reference, x[rows], z[rows], None if context is None else context[rows], outside[rows])
                self.surprised |= calm and self.wrong > before
        if self.surprised and self.skipped:
            for x, z, context in self.skipped:
                self._reference(reference, x, z, context, torch.zeros(len(x), dtype=torch.bool, device=x.device))
            self.skipped.clear()
        return self.bad

    def _reference(
        self,
        reference: Reference,
        x: Tensor,
        z: Tensor,
        context: Tensor | None,
        outside: Tensor,
    ) -> None:
        if not len(x):
            return
        self.referenced += len(x)
        finite = torch.isfinite(x.flatten(1)).all(1)
        exact = reference.decode(z, context).value
        forward = distances(exact, x.double(), self.sizes).relative
        backward = distances(z, reference.encode(_filled(x.double(), finite), context).value).relative
        astray = ~finite | outside | ~(backward <= self.wrong_limit)
        consistent = torch.ones_like(finite)  # whether the reference's decoding leads back to the latent
        if bool(astray.any()):
            some = None if context is None else context[astray]
            there = torch.isfinite(exact[astray].flatten(1)).all(1)
            again = reference.encode(_filled(exact[astray], there), some).value
            consistent[astray] = there & (distances(z[astray], again).relative <= self.wrong_limit)
        wrong = finite & ~(backward <= self.wrong_limit) & (~(forward <= self.wrong_limit) | ~consistent)
        inside = finite & ~outside
        if bool(inside.any()):
            self.forward = max(self.forward, float(forward[inside].nan_to_num(math.inf).max()))
            self.backward = max(self.backward, float(backward[inside].nan_to_num(math.inf).max()))
        self._count(x, wrong, outside, finite, exact, context)
        if not reference.own:
            bad = wrong | astray & (~finite | outside)
            self.tried += int(bad.sum())
            self.still += int((bad & ~(consistent & ~self.known.outside(exact))).sum())

    def _count(
        self,
        x: Tensor,
        wrong: Tensor,
        outside: Tensor,
        finite: Tensor,
        exact: Tensor,
        context: Tensor | None,
    ) -> None:
        self.wrong += int(wrong.sum())
        self.outside += int(outside.sum())
        self.both += int((wrong & outside).sum())
        bad = wrong | outside | ~finite
        if bool(bad.any()) and sum(map(len, self.kept)) < 256:
            shown = bad & torch.isfinite(exact.flatten(1)).all(1)
            if bool(shown.any()):
                self.kept.append(Batch(exact[shown].to(x.dtype), None if context is None else context[shown], 0))

    def failing(self) -> Batch | None:
        """Bad samples as the reference decodes them, for a closer look."""
        if not self.kept:
            return None
        whole = Batch.joined(self.kept)
        finite = torch.isfinite(whole.x.flatten(1)).all(1)
        return whole.take(finite) if bool(finite.any()) else None

    def values(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "bad": self.bad,
            "share_bad": self.bad / self.count,
            "referenced": self.referenced,
            "wrong": self.wrong,
            "unknown": self.unknown,
            "out_of_range": self.outside,
            "largest": self.largest,
            "float64_tried": self.tried,
            "float64_bad": self.still,
            "share_non_finite": self.non_finite / self.count,
            "share_failed": self.failed / self.count,
            "failure": self.failure[:500],
            "forward_error_max": self.forward,
            "backward_error_max": self.backward,
            "reencode_share_non_finite": self.code.share_non_finite,
            "reencode_relative_median": self.code.quantile(0.5),
            "reencode_relative_p999": self.code.quantile(0.999),
            "reencode_relative_max": self.code.largest,
        }


def _filled(x: Tensor, finite: Tensor) -> Tensor:
    """Samples with zeros for those that are not finite: a model may raise for NaN."""
    return torch.where(finite.view(-1, *[1] * (x.ndim - 1)), x, torch.zeros_like(x))


def _contexts(source: Source, start: int, stop: int, subject: Subject) -> Tensor | None:
    """Contexts of the source, from the beginning again when they run out."""
    parts, done = [], start
    while done < stop:
        first = done % source.count
        take = min(stop - done, source.count - first)
        parts.append(source.read(first, first + take, dtype=subject.dtype, device=subject.device).context)
        done += take
    return torch.cat(parts)


def _draw(base: Base, count: int, context: Tensor | None, generator: torch.Generator) -> Tensor:
    try:
        return base.sample(count, context, generator)
    except Exception as error:  # a foreign base may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        raise NotMeasured(f"the base distribution gives no samples: {text}") from error


def _bits(subject: Subject, x: Tensor, context: Tensor | None, size: int) -> Tensor:
    """Bits per dimension of each sample; NaN where the model states no log-determinant."""
    if not subject.has_log_det or subject.base is None:
        return torch.full((len(x),), math.nan, device="cpu")
    try:
        z, log_det = subject.forward_and_log_det(x, context).values[:2]
    except (BilipError, NotImplementedError, ValueError):  # no log-determinant, or every sample failed
        return torch.full((len(x),), math.nan, device="cpu")
    with torch.no_grad():
        finite = torch.isfinite(z.flatten(1)).all(1)
        log_prob = subject.base.log_prob(_filled(z, finite), context).double() + log_det.double()
    log_prob = torch.where(finite, log_prob, torch.full_like(log_prob, math.nan))
    return (-log_prob / (size * math.log(2))).cpu()


def _median(values: Tensor) -> float:
    finite = values[torch.isfinite(values)]
    return float(finite.median()) if len(finite) else math.nan


def _samples(x: Tensor, source: Source) -> tuple[Picture, ...]:
    range_ = source.statistics()
    return tuple(
        picture(x[k], range_.low, range_.high, f"sample {k}", f"sample {k} of the model", "samples")
        for k in range(min(8, len(x)))
    )
