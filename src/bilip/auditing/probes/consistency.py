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


_USES = ("inversion", "sampling", "likelihood", "ood-likelihood")


class Consistency(Probe):
    """Calls that should agree: twice on one batch, on half of a batch, one sample and many, and on latents in another order.

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
        batch = 0.0
        for count in (1, half):
            batch = max(batch, _apart(z[:count], model.forward(x[:count], _rows(context, count)).value))
        many = model.forward(torch.cat([x] * times), None if context is None else torch.cat([context] * times)).value
        batch = max(batch, _apart(z, many[: len(x)]))
        straight, around = self._inverses(model, x, context)
        spread = self._log_det_spread(model, x, context)
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
        }
        training = [name for name, module in subject.bijection.named_modules() if module.training]
        if training:
            notes.append(f"still in training mode after eval(): {', '.join(training[:3])}")
        wrong = subject.half_digits if self.wrong is None else self.wrong
        values["cache_hides"] = bool(values["cached"]) and not around <= wrong
        return Measurement(self.name, source.name, values=values, notes=tuple(notes))

    def _log_det_spread(self, model: Subject, x: Tensor, context: Tensor | None) -> float:
        """Largest difference, per dimension, between two answers for the log-determinant; an estimate has one."""
        try:
            first, second = (model.forward_and_log_det(x, context).values[1] for _ in range(2))
        except (BilipError, IndexError):
            return math.nan
        found = ((first - second).abs() / x[0].numel()).double()
        return float(torch.where(torch.isfinite(found), found, torch.zeros_like(found)).max())

    def _inverses(self, model: Subject, x: Tensor, context: Tensor | None) -> tuple[float, float]:
        """Largest error when the very latents are given back at once, and when others came in between and the order changed."""
        z = model.forward(x, context).value
        straight = run_guarded(model.bijection.inverse, z, context).value
        flipped = None if context is None else context.flip(0)
        z = model.forward(x, context).value
        model.forward(x.roll(1, 0), None if context is None else context.roll(1, 0))
        around = model.inverse(z.flip(0), flipped).value.flip(0)
        return _apart(x, straight), _apart(x, around)


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
