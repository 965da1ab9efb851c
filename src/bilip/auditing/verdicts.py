"""Measurements in, one verdict per use out, and what to do about an unsafe one.

What is judged, and by which limit, stands beside each measured value: see `Quantity`. A remedy follows from the cause: what is cheap was
tried on the failing samples, and the rest is called untried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from bilip.auditing.looks import Looks, share_interval
from bilip.auditing.probes.probe import PROBES
from bilip.errors import InputError
from bilip.record import USES, Measurement, Quantity, Status, Verdict

__all__ = ["Thresholds", "judge", "remedy"]

_FLOAT32 = 2.0**-23
_ROLES = {"inversion": "data", "likelihood": "data", "ood-likelihood": "ood"}
_NO_SOURCE = {
    "data": "there is no data source",
    "ood": "there is no out-of-distribution source; name one with ood=",
}


@dataclass(frozen=True)
class Thresholds:
    r"""What a model has to keep to be called safe.

    Attributes:
        relative: Largest relative error of a round trip or a sample; by default $\sqrt{\epsilon}$ of the model's dtype, half of the
            digits, and no less than that of float32.
        bad_share: Largest share of bad samples, those included that are not finite; by default that of the budget: 1 % at `quick`,
            0.1 % else.
        share: The same as the share that must be good: `share=0.95` is `bad_share=0.05`.
        log_prob: Largest error of a log-likelihood, as a part of $d + |\log p|$.
        log_det: Largest difference between the claimed log-determinant and that of the Jacobian, per dimension.
        range: Samples may lie within so many times the range of the data.
        sample_gap: Largest difference between the median bits per dimension of samples and of data; infinite to ignore it.
        non_finite: Largest share of batches whose memory-saving gradient is not finite while the stored one is.
        angle: Largest angle between memory-saving and stored gradients, in radians.
        more: Limits for quantities of your own probes, by the name that they state as `judged_by`.

    Example:
        >>> Thresholds(share=0.99).limit(eps=1e-6), Thresholds(bad_share=0.05).bad_share
        (0.001, 0.05)
    """

    relative: float | None = None
    share: float | None = None
    non_finite: float = 0.0
    log_det: float = 1e-3
    sample_gap: float = math.inf
    angle: float = 1e-2
    bad_share: float | None = None
    log_prob: float = 1e-3
    range: float = 10.0
    more: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.more is not None and not isinstance(self.more, Mapping):
            raise InputError(f"Thresholds(more={self.more!r:.80}): expected a table of names and numbers.")
        values = {k: v for k, v in asdict(self).items() if k != "more"} | dict(self.more or {})
        for name, value in values.items():
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                raise InputError(f"Thresholds({name}={value!r}): expected a number >= 0.")
        for name in ("share", "bad_share"):
            if (getattr(self, name) or 0) > 1:
                raise InputError(f"Thresholds({name}={getattr(self, name)}): a share is at most 1.")
        if self.share is not None and self.bad_share is None:
            object.__setattr__(self, "bad_share", round(1 - self.share, 12))

    def limit(self, eps: float) -> float:
        """The largest relative error for a dtype with this epsilon."""
        return math.sqrt(max(eps, _FLOAT32)) if self.relative is None else self.relative

    def as_settings(self) -> dict[str, float]:
        """All limits by name, those of `more` among them, as the settings of a record hold them."""
        known = {name: value for name, value in asdict(self).items() if name not in ("share", "more")}
        return {name: value for name, value in known.items() if value is not None} | dict(self.more or {})

    def named(self, name: str) -> float | None:
        """The limit of this name, or `None` if there is none."""
        if name in (self.more or {}):
            return (self.more or {})[name]
        return getattr(self, name, None) if name in self.__dataclass_fields__ else None


@dataclass(frozen=True)
class Check:
    """One quantity of one measurement beside its limit.

    Attributes:
        quantity: What was measured.
        value: Its value; for a share the share of bad samples.
        limit: What it is compared with.
        measurement: Where it comes from.
        low: The least that it may be, all uncertainty considered.
        high: The most.
        bad: For a share: how many samples.
        count: For a share: of how many.
    """

    quantity: Quantity
    value: float
    limit: float
    measurement: Measurement
    low: float
    high: float
    bad: int | None = None
    count: int = 0

    @property
    def source(self) -> str:
        """Where it was measured."""
        return self.measurement.source

    @property
    def status(self) -> Status:
        """Safe if all that it may be is within the limit, unsafe if nothing is."""
        higher = self.quantity.better == "higher"
        least, most = (-self.high, -self.low) if higher else (self.low, self.high)
        limit = -self.limit if higher else self.limit
        if most <= limit:
            return Status.SAFE
        if self.bad is not None and self.limit == 0 and self.bad == 0:
            return Status.SAFE  # none is allowed, and none was found: no number of samples says more
        return Status.UNSAFE if not least <= limit else Status.NOT_MEASURED

    @property
    def pressure(self) -> float:
        """How close to the limit; the largest decides what a safe verdict names."""
        if self.quantity.unit == "flag":
            return -1.0
        return self.high / self.limit if self.limit else (math.inf if self.high else 0.0)

    def sentence(self) -> str:
        """The number and its limit in words."""
        label, where = self.quantity.label, f" on {self.source}" if self.source else ""
        if self.quantity.unit == "flag":
            return f"{_capital(label)}."
        if self.bad is None:
            apart = (self.high - self.low) / 2
            spread = f" (± {apart:.2g})" if not apart <= 0.01 * self.limit else ""
            allowed = "at least" if self.quantity.better == "higher" else "at most"
            if self.quantity.unit == "share":
                return f"{_capital(label)}{where}: {_percent(self.value)} ({allowed} {_percent(self.limit)} allowed)."
            open_ = self.status == Status.NOT_MEASURED
            decides = ": it is not known well enough to decide; a larger budget may" if open_ else ""
            return f"{_capital(label)}{where}: {self.value:.3g}{spread} ({allowed} {self.limit:.3g} allowed){decides}."
        counted = f"{_capital(label)}{where}: {self.bad:,} of {self.count:,}"
        unknown, tried = (int(self.measurement.get(name) or 0) for name in ("unknown", "digits_tried"))
        if tried:
            wrong = int(self.measurement["digits_bad"])
            counted += f", and of {unknown:,} for which float64 is no reference {wrong} of {tried} that were computed with more digits"
        allowed = f"({_percent(self.limit)} allowed)"
        referenced = self.measurement.get("referenced")
        if referenced is not None and 0 < int(referenced) < self.count and not tried:
            counted += f" ({int(referenced):,} of them held against float64, the others look sound without)"
        if self.status == Status.SAFE:
            return f"{counted}, at most {_percent(self.high)} with 99 % confidence {allowed}."
        between = f"{_percent(self.low)} to {_percent(self.high)} with 99 % confidence"
        if self.status == Status.UNSAFE:
            return f"{counted}, {between} {allowed}."
        if unknown and not tried:
            why = (
                "the float64 reference is not stable"
                if self.measurement.get("referenced")
                else "there is no float64 reference"
            )
            return f"{counted} are bad, and for {unknown:,} {why}, so that nothing can be said {allowed}."
        if not self.bad:
            return f"{counted}: too few samples to exclude {_percent(self.limit)}; {Looks(self.limit).needed:,} without a bad one would."
        return f"Borderline. {counted}, {between} {allowed}: more samples would decide."


def judge(
    measurements: Sequence[Measurement], sources: Sequence[Mapping[str, object]], thresholds: Thresholds, eps: float
) -> dict[str, Verdict]:
    """One verdict for each use, and for each further use that a measured quantity names.

    Example:
        >>> verdicts = judge([], [], Thresholds(), eps=1e-7)
        >>> verdicts["likelihood"].status.value
        'not-measured'
    """
    if thresholds.bad_share is None:
        thresholds = replace(thresholds, bad_share=0.001)
    thresholds = replace(thresholds, relative=thresholds.limit(eps))
    found = [_with_quantities(m) for m in measurements]
    further = dict.fromkeys(use for m in found for q in m.quantities if q.judged for use in q.uses if use not in USES)
    return {use: _verdict(use, found, sources, thresholds) for use in (*USES, *further)}


def _with_quantities(m: Measurement) -> Measurement:
    known = PROBES.get(m.probe)
    return m if m.quantities or known is None else replace(m, quantities=tuple(known.quantities))


def _verdict(
    use: str, measurements: Sequence[Measurement], sources: Sequence[Mapping[str, object]], thresholds: Thresholds
) -> Verdict:
    role = _ROLES.get(use)
    names = [str(s["name"]) for s in sources if role is None or s["role"] == role]
    if role is not None and not names:
        return Verdict(use, Status.NOT_MEASURED, _NO_SOURCE[role])
    checks = [c for m in measurements if _concerns(m, names, role) for c in _checks(m, use, thresholds)]
    missing = list(_missing(use, measurements, names, role))
    broken = [c for c in checks if c.status == Status.UNSAFE]
    if broken:
        worst = broken[0]
        return _said(use, worst, Status.UNSAFE, remedy(use, worst, measurements))
    open_ = [c for c in checks if c.status == Status.NOT_MEASURED]
    if open_:
        return _said(use, open_[0], Status.NOT_MEASURED)
    if missing or not checks:
        return Verdict(use, Status.NOT_MEASURED, missing[0] if missing else f"nothing was measured for {use}")
    return _said(
        use, max(checks, key=lambda c: c.pressure), Status.SAFE, also=_elsewhere(use, measurements, names, thresholds)
    )


def _said(use: str, check: Check, status: Status, what_to_do: str = "", also: str = "") -> Verdict:
    interval = None if check.bad is None else (check.low, check.high)
    return Verdict(
        use,
        status,
        check.sentence() + also,
        check.quantity.name,
        check.value,
        check.limit,
        check.source,
        what_to_do,
        check.quantity,
        interval,
    )


def _concerns(m: Measurement, names: Sequence[str], role: str | None) -> bool:
    """Whether a measurement speaks about a use: on its sources, or about the model as a whole."""
    probe = PROBES.get(m.probe)
    whole = probe is not None and probe.scope == "data"
    return role is None or whole or m.source in names


def _checks(m: Measurement, use: str, thresholds: Thresholds) -> Iterator[Check]:
    if not m.measured:
        return
    for q in m.quantities:
        if use not in q.uses or q.name not in m.values:
            continue
        value = m[q.name]
        if q.unit == "flag":
            number = float(bool(value))
            yield Check(q, number, 0.0, m, number, number)
            continue
        limit = thresholds.named(q.judged_by)
        if limit is None or limit == math.inf:
            continue
        value = math.nan if value is None else float(value)
        if q.unit == "share" and "bad" in m.values:
            bad, count, look = int(m["bad"]), int(m["count"]), m.get("look")
            least, most = _of_unknown(m)
            low = share_interval(bad + least, count, look)[0]
            high = share_interval(min(count, bad + most), count, look)[1]
            yield Check(q, value, limit, m, low, high, bad, count)
            continue
        spread = float(m.get(f"{q.name}_uncertainty") or 0.0)
        if math.isnan(value) and (m.get("slogdet_samples") == 0 or _no_stored(m)):
            continue  # nothing was compared: that is missing, not wrong
        yield Check(q, value, limit, m, value - spread, value + spread)


def _of_unknown(m: Measurement) -> tuple[int, int]:
    """How many of the samples without a stable reference are bad, at least and at most, from the few that have more digits."""
    unknown, tried = int(m.get("unknown") or 0), int(m.get("digits_tried") or 0)
    low, high = share_interval(int(m.get("digits_bad") or 0), tried, look=0)  # the least that an interval may err with
    return math.floor(low * unknown), math.ceil(high * unknown)


def _missing(use: str, measurements: Sequence[Measurement], names: Sequence[str], role: str | None) -> Iterator[str]:
    """What a safe verdict would need and does not have."""
    needed = [probe for probe in PROBES.values() if any(q.judged and use in q.uses for q in probe.quantities)]
    for probe in needed:
        found = [m for m in measurements if m.probe == probe.name]
        if not found:
            yield f"{probe.name} was not probed"
            continue
        places = names if role is not None and probe.scope != "data" else [m.source for m in found]
        for name in places:
            here = [m for m in found if m.source == name or probe.scope == "data"]
            if not here:
                yield f"{probe.name} was not measured on {name}"
            elif not any(m.measured for m in here):
                yield here[0].reason
            elif here[0].get("slogdet_samples") == 0:
                why = f": {here[0].notes[0]}" if here[0].notes else ""
                yield f"the log-determinant was not held against the Jacobian on {name}{why}"
            elif _no_stored(here[0]):
                yield "no batch has a finite stored gradient"


def _no_stored(m: Measurement) -> bool:
    """Whether memory-saving gradients were held against none: no batch has a stored one that is finite."""
    return m.get("batches") is not None and m["batches"] == m.get("stored_non_finite")


def _elsewhere(use: str, measurements: Sequence[Measurement], names: Sequence[str], thresholds: Thresholds) -> str:
    """Beside a safe verdict: where a model that is safe to invert on its data is not, at how many points a log-determinant was checked,
    and whether the inverse states another one, which no use needs but densities of samples.
    """
    if use == "sampling":
        first = next((m for m in measurements if m.probe == "log_det" and m.measured), None)
        apart = math.nan if first is None else float(first.get("antisymmetry_median") or math.nan)
        if apart > max(thresholds.log_det, thresholds.relative or 0.0):
            return (
                f" But the log-determinant of the inverse is not that of the forward pass ({apart:.2g} nats per dimension apart): "
                "densities of samples that are taken from it, as in variational inference, are wrong."
            )
        return ""
    if use in ("likelihood", "ood-likelihood"):
        found = [m for m in measurements if m.probe == "log_det" and m.source in names and m.measured]
        points = min((int(m.get("slogdet_samples") or 0) for m in found), default=0)
        return (
            f" The log-determinant is that of the Jacobian at {points:,} point{'s' * (points != 1)}." if points else ""
        )
    if use != "inversion":
        return ""
    lost = [
        f"{_percent(float(m['share_bad']))} of {m.source}"
        for m in measurements
        if m.probe == "reconstruction" and m.source not in names and m.measured and m.get("share_bad")
    ]
    return f" Outside the data it is not: {', '.join(lost[:3])} do not come back." if lost else ""


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.3g} %"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_SIZES = "Look for squeeze(), for sums and means over the batch, and for branches on its size: one sample alone and many must agree."
_FLAGS = {
    "stochastic": "Remove dropout, dequantization noise and other draws from the evaluation pass.",
    "batch_dependent": "Use running statistics: BatchNorm with track_running_stats=True, in evaluation mode; or ActNorm.",
    "inverse_batch_dependent": _SIZES,
    "log_det_batch_dependent": _SIZES,
    "base_wrong": "Check log_prob of the base, its constants and the sum over dimensions, against what it draws.",
    "cache_hides": "Switch the cache off (cache_size=0) and write the inverse.",
}
_GRADIENTS = (
    "Train with bilip.Reversible and its guard, which repairs such steps, or store the activations. Untried: a finite-difference "
    "penalty keeps the inverse accurate where you train."
)
_SCALES = (
    "Untried: bound its scale away from 0, as with the range (0.5, 1), and fine-tune; that changes the model. A penalty on data does not "
    "reach samples or other input."
)


def remedy(use: str, check: Check, measurements: Sequence[Measurement]) -> str:
    """What to do, the surest first, in sentences."""
    m = check.measurement
    if check.quantity.name in _FLAGS:
        return _FLAGS[check.quantity.name]
    blame = _blame(measurements, m.source)
    broken = str(blame.get("broken_weight") or "") if blame else ""
    if broken:
        return (
            f"The weights are broken: {broken}. Load a checkpoint from before that, and train with gradients clipped."
        )
    if use == "reversible-gradients":
        return _GRADIENTS
    if m.probe == "log_det":
        return _log_det(m, measurements)
    steps = [*_failure(m), *_precision(m)]
    if float(m.get("share_failed") or 0) < 0.5 * check.value:  # else what the model said is the reason
        steps += _block(use, m, blame)
    return " ".join(steps)


def _blame(measurements: Sequence[Measurement], source: str) -> Measurement | None:
    """What was found at the failing samples of a source; where those come back themselves, a bug that shows on another source."""
    found = [m for m in measurements if m.probe == "blame" and m.measured]
    here = [m for m in found if m.source == source]
    anywhere = [m for m in found if m.get("broken_weight") or m.get("cause") == "bug"]
    known = [m for m in here if m.get("guilty") or m.get("wrong") or m.get("broken_weight")]
    return next(iter((*known, *anywhere, *here)), None)


def _log_det(m: Measurement, measurements: Sequence[Measurement]) -> str:
    liars = (b.get("guilty_log_det") for b in measurements if b.probe == "blame" and b.measured)
    block = next((b for b in liars if b), "")
    claimed, measured = float(m["claimed"]), float(m["measured"])
    sign = abs(claimed + measured) < 1e-3 * abs(measured)
    text = f"The claimed log-determinant is {claimed:.6g}, that of the Jacobian {measured:.6g}. "
    off, points = int(m.get("slogdet_off") or 0), int(m.get("slogdet_samples") or 0)
    if 0 < off < points:
        text += (
            f"So it is at {off:,} of the {points:,} points that were compared, not everywhere: look at branches, as "
        )
        text += "the tails of a spline, masks and clamps. "
    if block:
        text += f"Block {block} claims one that is not that of its own Jacobian. "
    return text + (
        "Its sign is wrong."
        if sign
        else ""
        if 0 < off < points
        else "Check the sign, the sum over dimensions and layers left out of the sum."
    )


def _failure(m: Measurement) -> list[str]:
    """What the model itself complained about."""
    text = str(m.get("failure") or "")
    if not text:
        return []
    if "domain" in text.lower():
        return [
            "A spline without tails takes values inside its interval alone: scale the data into it, or build it with linear tails "
            f"(the model said: {text[:120]})."
        ]
    return [f"The model raised for some samples: {text[:160]}."]


def _precision(m: Measurement) -> list[str]:
    tried, still = m.get("float64_tried"), m.get("float64_bad")
    if not tried:
        return []
    count = int(m.get("count") or tried)
    if not still:
        return [
            f"Tried: in float64 0 of {count:,} fail (the {tried:,} bad ones were tried again). Call model.double()."
        ]
    share = still / tried
    if share < 0.5:
        return [
            f"Tried: in float64 {still:,} of the {tried:,} bad ones still fail; model.double() helps, and does not cure it."
        ]
    return [f"More bits do not cure it: in float64 {still:,} of the {tried:,} bad ones fail as well."]


def _block(use: str, m: Measurement, blame: Measurement | None) -> list[str]:
    """The block that stands out, and what usually helps with its kind."""
    outside = use == "sampling" and int(m.get("out_of_range") or 0) > int(m.get("wrong") or 0)
    steps = []
    if outside:
        largest, known = (math.nan if m.get(name) is None else float(m[name]) for name in ("largest", "data_largest"))
        steps.append(
            f"The largest sample is {largest:.2g}, the data lie within {known:.2g}: the model itself decodes latents far outside. "
            "Untried: a lower temperature, or linear tails."
        )
    if blame is None or not blame.get("guilty"):
        nobody = "Run the probe blame to find the block."
        if blame is not None:
            nobody = "No block stands out: the error grows over many." if blame.get("wrong") != 0 else ""
        return steps or [nobody] * bool(nobody)
    kind, why = str(blame["guilty_kind"]), str(blame["why"])
    steps.append(f"Look at block {blame['guilty']} ({kind}): {why}.")
    lower = kind.lower()
    cause = str(blame.get("cause") or "")
    if cause == "bug":
        steps.append(
            "Its Jacobian at the failing samples is harmless, so its inverse is not the inverse of its forward pass: a bug."
        )
    elif cause == "solver" or any(word in lower for word in ("residual", "iresblock", "ode", "cnf", "ffjord")):
        steps.append("Its inverse iterates: a tighter tolerance or more iterations are untried here.")
    elif any(word in lower for word in ("spline", "rational", "rqs", "piecewise")):
        steps.append("Untried: a wider tail bound and larger minimal bin widths and derivatives.")
    elif any(word in lower for word in ("autoregressive", "maf", "masked")):
        steps.append("Untried: bound its scale, as in softclamped log-scales, and fine-tune.")
    else:
        steps.append(_SCALES)
    return steps
