"""Measurements in, one verdict per use out. The rules, their thresholds and the remedies stand here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from bilip.errors import InputError
from bilip.record import USES, Measurement, Status, Verdict

__all__ = ["Thresholds", "judge"]


@dataclass(frozen=True)
class Thresholds:
    r"""What a model has to keep to be called safe.

    Attributes:
        relative: Largest relative reconstruction error; by default $\sqrt{\epsilon}$ of the model's dtype: half of the digits survive.
        share: Share of samples that must keep it.
        non_finite: Largest share of samples with NaN, Inf or an exception.
        log_det: Largest $|\log\det F + \log\det F^{-1}|$ and largest difference from slogdet, per dimension.
        angle: Largest angle between memory-saving and stored gradients, in radians.
        sample_gap: Largest difference between the median bits per dimension of samples and of data; infinite to ignore it.

    Example:
        >>> Thresholds(share=0.99).limit(eps=1e-6)
        0.001
    """

    relative: float | None = None
    share: float = 0.999
    non_finite: float = 0.0
    log_det: float = 1e-3
    sample_gap: float = math.inf
    angle: float = 1e-2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                raise InputError(f"Thresholds({name}={value!r}): expected a number >= 0.")
        if self.share > 1:
            raise InputError(f"Thresholds(share={self.share}): a share is at most 1.")

    def limit(self, eps: float) -> float:
        """The largest relative error for a dtype with this epsilon."""
        return math.sqrt(eps) if self.relative is None else self.relative


@dataclass(frozen=True)
class _Check:
    """One comparison: `value <= limit` is required."""

    number: str
    value: float
    limit: float
    source: str
    says: str

    @property
    def kept(self) -> bool:
        return self.value <= self.limit

    @property
    def pressure(self) -> float:
        return self.value / self.limit if self.limit else (math.inf if self.value else 0.0)


def judge(
    measurements: Sequence[Measurement], sources: Sequence[Mapping[str, object]], thresholds: Thresholds, eps: float
) -> dict[str, Verdict]:
    """One verdict for each use.

    Example:
        >>> verdicts = judge([], [], Thresholds(), eps=1e-7)
        >>> verdicts["likelihood"].status.value
        'not-measured'
    """
    found = _Found(measurements, thresholds, eps)
    roles = {role: [str(s["name"]) for s in sources if s["role"] == role] for role in ("data", "ood")}
    verdicts = {
        "sampling": found.verdict("sampling", list(found.sampling()), found.why_not("sampling")),
        "likelihood": found.verdict("likelihood", list(found.likelihood(roles["data"])), "there is no data source"),
        "ood-likelihood": found.verdict(
            "ood-likelihood",
            list(found.likelihood(roles["ood"])),
            "there is no out-of-distribution source; name one with ood=",
        ),
        "reversible-gradients": found.verdict(
            "reversible-gradients", list(found.gradients()), found.why_not("gradient_angle")
        ),
    }
    return {use: verdicts[use] for use in USES}


class _Found:
    def __init__(self, measurements: Sequence[Measurement], thresholds: Thresholds, eps: float) -> None:
        self.measurements, self.thresholds, self.eps = measurements, thresholds, eps
        self.limit = thresholds.limit(eps)

    def get(self, probe: str, source: str | None = None) -> Measurement | None:
        hits = (m for m in self.measurements if m.probe == probe and source in (None, m.source) and m.measured)
        return next(hits, None)

    def why_not(self, probe: str) -> str:
        return next((m.reason for m in self.measurements if m.probe == probe and m.reason), f"{probe} was not probed")

    # ---- rules

    def likelihood(self, names: Sequence[str]) -> Iterator[_Check | str]:
        t = self.thresholds
        for name in names:
            yield from self.function(name)
            m = self.get("reconstruction", name)
            if m is None:
                yield f"reconstruction was not measured on {name}"
            else:
                lost = m["share_nan"] + m["share_inf"] + m["share_failed"]
                yield _Check(
                    "non-finite reconstructions",
                    lost,
                    t.non_finite,
                    name,
                    "of {source} came back as NaN, Inf or an exception",
                )
                exact = lost + m["share_wrong"]  # the histogram rounds up within its bin
                above = exact if m["wrong_limit"] == self.limit else m.histograms["relative"].share_above(self.limit)
                yield _Check(
                    f"relative errors above {self.limit:.1e}",
                    above,
                    _rest(t.share),
                    name,
                    f"of {{source}} came back with a relative error above {self.limit:.1e}",
                )
            m = self.get("log_det", name)
            if m is None:
                yield self.why_not("log_det")
                continue
            both = m.histograms["antisymmetry"].share_above(t.log_det)
            yield _Check(
                "log-determinants that do not cancel",
                both,
                _rest(t.share),
                name,
                f"of {{source}} have |log det F + log det F⁻¹| above {t.log_det:g} per dimension",
            )
            if not m["slogdet_samples"]:
                yield f"the log-determinant was not held against the Jacobian on {name}"
            else:
                yield _Check(
                    "log-determinant against slogdet",
                    m["slogdet_error_max"],
                    t.log_det,
                    name,
                    "nats per dimension between the claimed log-determinant and slogdet of the Jacobian",
                )

    def function(self, name: str) -> Iterator[_Check | str]:
        m = self.get("consistency", name) or self.get("consistency")
        if m is None:
            yield "whether the model is a function was not measured (consistency)"
            return
        for flag, says in (
            ("stochastic", "the model gives another answer when asked again"),
            ("batch_dependent", "the model's answer depends on the other samples of the batch"),
        ):
            if m[flag]:
                yield _Check(flag, 1.0, 0.0, name, says)
        if m["cached"] and not m["around_error"] <= self.limit:
            says = f"the inverse answers from a cache: without it, it is off by {m['around_error']:.2g}"
            yield _Check("cached", 1.0, 0.0, name, says)

    def sampling(self) -> Iterator[_Check | str]:
        m, t = self.get("sampling"), self.thresholds
        if m is None:
            return
        yield from self.function(m.source)
        yield _Check(
            "non-finite samples",
            m["share_non_finite"],
            t.non_finite,
            "base",
            "of the samples are NaN, Inf or an exception",
        )
        above = m.histograms["reencode_relative"].share_above(self.limit)
        yield _Check(
            "samples that are not re-encoded",
            above,
            _rest(t.share),
            "base",
            f"of the samples are not encoded back to within {self.limit:.1e}",
        )
        if math.isfinite(t.sample_gap):
            gap = abs(m["sample_bits_median"] - m["data_bits_median"])
            yield _Check(
                "bits per dimension of samples against data",
                gap,
                t.sample_gap,
                "base",
                "bits per dimension between samples and data",
            )

    def gradients(self) -> Iterator[_Check | str]:
        m, t = self.get("gradient_angle"), self.thresholds
        if m is None:
            return
        if m["batches"] == m["stored_non_finite"]:
            yield "no batch has a finite stored gradient"
            return
        yield _Check(
            "non-finite memory-saving gradients",
            m["share_non_finite"],
            t.non_finite,
            m.source,
            "of the batches of {source} have a memory-saving gradient with NaN or Inf and a finite stored one",
        )
        if not m["share_non_finite"]:  # otherwise there is no angle
            yield _Check(
                "gradient angle", m["angle"], t.angle, m.source, "rad between memory-saving and stored gradients"
            )

    # ---- verdicts

    def verdict(self, use: str, checks: Sequence[_Check | str], nothing: str) -> Verdict:
        made = [c for c in checks if isinstance(c, _Check)]
        missing = [c for c in checks if isinstance(c, str)]
        broken = [c for c in made if not c.kept]
        if broken:
            check = broken[0]
            return Verdict(
                use,
                Status.UNSAFE,
                _sentence(check),
                check.number,
                check.value,
                check.limit,
                check.source,
                self.remedy(check),
            )
        if missing or not made:
            return Verdict(use, Status.NOT_MEASURED, missing[0] if missing else nothing)
        check = max(made, key=lambda c: c.pressure)
        return Verdict(use, Status.SAFE, _sentence(check), check.number, check.value, check.limit, check.source)

    def remedy(self, check: _Check) -> str:
        if check.number == "stochastic":
            return "Remove dropout, dequantization noise and sampled log-determinants from the evaluation pass."
        if check.number == "batch_dependent":
            return "Use running statistics: BatchNorm with track_running_stats=True, in evaluation mode; or ActNorm."
        if check.number == "cached":
            return "Switch the cache off (cache_size=0) and write the inverse."
        blame = self.get("blame", check.source) or self.get("blame")
        if "gradient" in check.number:
            return (
                "Train with bilip.Reversible and its guard, which repairs such steps, or store the activations; or keep the "
                "inverse accurate with a finite-difference or flow-likelihood penalty."
            )
        if "log-det" in check.number:
            block = blame.get("guilty_log_det") if blame else ""
            note = f" Block {block} claims a log-determinant that is not the one of its Jacobian." if block else ""
            return "Check the sign and the sum over dimensions of each block's log-determinant." + note
        steps = []
        if blame and blame["guilty"]:
            steps.append(f"Look at block {blame['guilty']} ({blame['guilty_kind']}): {blame['why']}.")
            if "own round trip" in blame["why"] and not _ill_conditioned(blame, self.eps):
                steps.append("Its Jacobian is harmless, so its inverse is not the inverse of its forward pass: a bug.")
                return " ".join(steps)
        precision = self.get("precision")
        cure = str(precision["cure"]) if precision else ""
        if cure and cure not in ("none", str(precision["own"]) if precision else ""):
            steps.append(f"As it stands, evaluate it in {cure}, where the round trip holds on the data probed.")
        elif cure == "none":
            steps.append("More bits do not cure it: float64 fails as well.")
        steps.append(
            "Retrain with blocks that stay stable: additive coupling with held nets, affine scales bounded away from 0 "
            "such as (0.5, 1), residual blocks; or add a flow-likelihood or finite-difference penalty."
        )
        return " ".join(steps)


def _ill_conditioned(blame: Measurement, eps: float) -> bool:
    row = next((r for r in blame.rows if r["block"] == blame["guilty"]), None)
    condition = row["condition"] if row else math.nan
    return not (isinstance(condition, float) and condition * eps < 1e-6)


def _rest(share: float) -> float:
    return round(1 - share, 12)


def _sentence(check: _Check) -> str:
    text = check.says.format(source=check.source)
    if check.number in ("stochastic", "batch_dependent", "cached"):
        return f"{text[0].upper()}{text[1:]}."
    if text.startswith("of "):
        return f"{100 * check.value:.3g} % {text} (at most {100 * check.limit:.3g} % allowed)."
    return f"{check.value:.3g} {text} on {check.source} (at most {check.limit:.3g} allowed)."
