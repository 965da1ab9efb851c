"""Is the model a function at all? The same answer twice, in any company, without a memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bilip._torch import half_digits
from bilip.auditing.budget import Budget
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.round_trip import distances
from bilip.auditing.subject import Subject, run_guarded
from bilip.data import Source
from bilip.errors import BilipError, NotMeasured
from bilip.record import Measurement, Quantity

__all__ = ["Consistency"]


_DRAWN = 2048  # draws of the base
_MARGIN = 10  # times what some roundings of the input do may differ by rounding
_USES = ("inversion", "sampling", "likelihood", "ood-likelihood")


class Consistency(Probe):
    """Calls that should agree: twice on one batch, on half of a batch, one sample and many, and on latents in another order.

    Latents, log-determinants and, at samples that come back, the inverse are compared.

    A stochastic forward pass, BatchNorm that still computes batch statistics, and an inverse that answers from a cache make
    every other number meaningless. The comparisons run in a float64 copy where there is one, so that rounding does not look
    like a dependence.

    Args:
        samples: Number of samples.
        company: Size of the largest batch, in which they are repeated.
        tolerance: Relative difference above which two answers differ; by default the square root of the model's epsilon.
        wrong: Relative error of the inverse without its cache that is not forgiven; by default the same in float32.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = Consistency().measure(real_nvp(2, blocks=2), torch.randn(8, 2))
        >>> m["stochastic"], m["batch_dependent"], m["cached"]
        (False, False, False)
    """

    name = "consistency"
    scope = "data"
    place = 0
    quantities = (
        *(
            Quantity(name, label, "flag", "lower", "consistent", _USES)
            for name, label in (
                ("stochastic", "the model gives another answer when asked again"),
                ("batch_dependent", "the answer depends on the other samples of the batch"),
                ("cache_hides", "the inverse answers from a cache and is wrong without it"),
            )
        ),
        *(
            Quantity(
                f"{name}_batch_dependent",
                f"{label} depends on the size of the batch",
                "flag",
                "lower",
                "consistent",
                uses,
            )
            for name, label, uses in (
                ("inverse", "the inverse", _USES[:2]),
                ("log_det", "the log-determinant", _USES[2:]),
            )
        ),
        Quantity(
            "base_wrong",
            "the density of the base is not that of its samples, or does not integrate to 1",
            "flag",
            "lower",
            "consistent",
            _USES[2:],
        ),
        Quantity("cached", "the inverse answers from a cache", "flag", "lower"),
        Quantity("samples", "samples", "count"),
        Quantity("repeat_difference", "difference between two calls", "relative", "lower"),
        Quantity("batch_difference", "difference between batches of other sizes", "relative", "lower"),
        Quantity("straight_error", "error of latents given back at once", "relative", "lower"),
        Quantity("around_error", "error of latents given back later", "relative", "lower"),
        Quantity("tolerance", "difference that counts", "relative"),
        Quantity("log_det_spread", "difference between two log-determinants, per dimension", "nats/dim", "lower"),
    )

    def __init__(
        self, samples: int = 64, *, company: int = 256, tolerance: float | None = None, wrong: float | None = None
    ) -> None:
        self.samples, self.company, self.tolerance, self.wrong = samples, company, tolerance, wrong

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object] | None:
        return {"samples": 16 if task.large else 64, "company": 32 if task.large else 256, "wrong": task.relative}

    @torch.no_grad()
    def _measure(self, subject: Subject, source: Source) -> Measurement:
        notes = []
        tolerance = half_digits(subject.dtype) if self.tolerance is None else self.tolerance
        try:
            model = subject.copy_in(torch.float64)
            with model.evaluating():
                x, context = _first(source, 2, model)
                if bool(model.inverse(model.forward(x, context).value, context).failed.all()):
                    raise NotMeasured("the copy in float64 has no working inverse")
        except Exception as why:  # no float64 copy, or one that does not run
            model, tolerance = subject, max(tolerance, 1e-2)
            notes.append(
                f"compared in {subject.dtype}: {why}"
                if isinstance(why, NotMeasured)
                else "compared in the model's dtype"
            )
        x, context = _first(source, self.samples, model)
        half, times = max(1, len(x) // 2), max(2, self.company // len(x))
        z = model.forward(x, context).value
        repeat = _apart(z, model.forward(x, context).value)
        others = [(x[:count], _rows(context, count)) for count in (1, half)]
        others.append((torch.cat([x] * times), None if context is None else torch.cat([context] * times)))
        straight, around, back = self._inverses(model, x, context)
        spread, log_det, found = self._log_dets(model, x, context, others)
        found += [model.forward(y, c).value for y, c in others[len(found) :]]
        batch = max(_apart(z[: len(y)], y[: len(x)]) for y in found)
        inverse = _inverse_alone(model, x, z, back, context, times, tolerance)
        values = {
            "samples": len(x),
            "repeat_difference": repeat,
            "batch_difference": batch,
            "straight_error": straight,
            "around_error": around,
            "stochastic": not repeat <= tolerance,
            "batch_dependent": not batch <= tolerance and repeat <= tolerance,
            "cached": math.isfinite(straight) and around > 1e-4 * tolerance and straight <= 1e-3 * around,
            "tolerance": tolerance,
            "cache_hides": False,
            "log_det_spread": spread,
            "base_wrong": _base_wrong(subject, context),
            "inverse_batch_dependent": not inverse <= tolerance,
            "log_det_batch_dependent": not log_det <= tolerance and not spread > 1e-3 * tolerance,
        }
        training = [name for name, module in subject.bijection.named_modules() if module.training]
        if training:
            notes.append(f"still in training mode after eval(): {', '.join(training[:3])}")
        wrong = subject.half_digits if self.wrong is None else self.wrong
        values["cache_hides"] = bool(values["cached"]) and not around <= wrong
        return Measurement(self.name, source.name, values=values, notes=tuple(notes))

    def _log_dets(
        self, model: Subject, x: Tensor, context: Tensor | None, others: list[tuple[Tensor, Tensor | None]]
    ) -> tuple[float, float, list[Tensor]]:
        """How far answers for the log-determinant are apart: twice per dimension, in other batches as a part of d + |log det|; and the
        latents of these batches.
        """
        size = x[0].numel()
        try:
            first, second = (model.forward_and_log_det(x, context).values[1] for _ in range(2))
            outcomes = [model.forward_and_log_det(y, c).values for y, c in [*others, (_shaken(x), context)]]
            pairs = [(first[: len(values[1])], values[1][: len(x)]) for values in outcomes]
        except (BilipError, IndexError):
            return math.nan, 0.0, []
        *apart, rounding = (_largest((known - other).abs() / (size + known.abs())) for known, other in pairs)
        found = 0.0 if max(apart) <= _MARGIN * rounding else max(apart)
        return _largest((first - second).abs() / size), found, [values[0] for values in outcomes[:-1]]

    def _inverses(self, model: Subject, x: Tensor, context: Tensor | None) -> tuple[float, float, Tensor]:
        """Largest error when the very latents are given back at once, and when others came in between and the order changed; and what
        came back then.
        """
        z = model.forward(x, context).value
        straight = run_guarded(model.bijection.inverse, z, context).value
        flipped = None if context is None else context.flip(0)
        z = model.forward(x, context).value
        model.forward(x.roll(1, 0), None if context is None else context.roll(1, 0))
        around = model.inverse(z.flip(0), flipped).value.flip(0)
        return _apart(x, straight), _apart(x, around), around


def _inverse_alone(
    model: Subject, x: Tensor, z: Tensor, back: Tensor, context: Tensor | None, times: int, tolerance: float
) -> float:
    """Largest error of one latent alone and of many, among those that come back in a batch: others would show rounding. 0 where latents
    that are off by some roundings come back as badly.
    """
    good = (distances(x, back).relative <= 0.1 * tolerance).nonzero().flatten()
    if not len(good):
        return 0.0
    calls = [(z, good[:1]), (z, good.repeat(times)), (_shaken(z), good)]
    given = [(y[rows], None if context is None else context[rows], rows) for y, rows in calls]
    *found, rounding = (_apart(x[rows], model.inverse(y, c).value) for y, c, rows in given)
    return 0.0 if max(found) <= _MARGIN * rounding else max(found)


def _shaken(x: Tensor) -> Tensor:
    """x with every entry off by some roundings, up or down."""
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(x) * 2 - 1
    return x * (1 + 16 * torch.finfo(x.dtype).eps * signs)


def _base_wrong(subject: Subject, context: Tensor | None) -> bool:
    r"""Whether $p_Z$ is visibly no density of what the base draws: by importance weights of a normal distribution q fitted to draws.

    $E_{p} [q / p] \le 1$ for every q, and $E_q [p / q] = 1$ where p is positive: the latter is looked at where weights are even, else it
    says nothing. Both are estimates, so that errors below 0.1 nats or 6 standard errors are not seen.
    """
    base = subject.base
    if base is None:
        return False
    generator = torch.Generator(device=subject.device).manual_seed(0)
    context = None if context is None else context[:1].to(subject.dtype).expand(_DRAWN, *context.shape[1:])
    try:
        drawn = base.sample(_DRAWN, context, generator)
        flat = drawn.double().flatten(1)
        mean, deviation = flat[::2].mean(0), flat[::2].std(0)
        normal = torch.distributions.Normal(mean, deviation)
        noise = torch.randn(flat.shape, generator=generator, dtype=torch.float64, device=flat.device)
        other = (mean + deviation * noise).to(drawn.dtype)
        inside, outside = (
            normal.log_prob(z.double().flatten(1)).sum(1) - base.log_prob(z.reshape(drawn.shape), context).double()
            for z in (drawn, other)
        )
    except Exception:  # a foreign base may raise anything, and where it has no samples Sampling says so
        return False
    (low, error), (total, spread) = _log_mean(inside[1::2]), _log_mean(-outside)
    return low > 0.1 + 6 * error or (float(outside.std()) <= 1.5 and abs(total) > 0.1 + 6 * spread)


def _log_mean(logs: Tensor) -> tuple[float, float]:
    """The log of the mean of numbers that are given by their logs, and its standard error; NaN where one is not finite."""
    weights = (logs - logs.max()).exp()
    return float(logs.max() + weights.mean().log()), float(weights.std() / weights.mean()) / math.sqrt(len(logs))


def _largest(values: Tensor) -> float:
    return float(torch.where(torch.isfinite(values), values, torch.zeros_like(values)).max())


def _rows(context: Tensor | None, count: int) -> Tensor | None:
    return None if context is None else context[:count]


def _first(source: Source, count: int, subject: Subject) -> tuple[Tensor, Tensor | None]:
    batch = source.first(count, dtype=subject.dtype, device=subject.device)
    return batch.x, batch.context


def _apart(a: Tensor, b: Tensor) -> float:
    """Largest relative distance over samples that are finite in both; NaN in the same places counts as equal."""
    if a.shape != b.shape:
        return torch.inf
    same = torch.isfinite(a.flatten(1)).all(1) == torch.isfinite(b.flatten(1)).all(1)
    found = distances(a, b).relative
    found = torch.where(
        torch.isfinite(found), found, torch.where(same, torch.zeros_like(found), torch.full_like(found, torch.inf))
    )
    return float(found.max())
