"""What to do about an unsafe verdict, by its cause. What is cheap was tried on the failing samples; the rest is called untried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bilip.record import Measurement

if TYPE_CHECKING:
    from bilip.auditing.verdicts import Check

__all__ = ["remedy"]

_FLAGS = {
    "stochastic": "Remove dropout, dequantization noise and other draws from the evaluation pass.",
    "batch_dependent": "Use running statistics: BatchNorm with track_running_stats=True, in evaluation mode; or ActNorm.",
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
        largest, known = (float(m.get(name) or math.nan) for name in ("largest", "data_largest"))
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
