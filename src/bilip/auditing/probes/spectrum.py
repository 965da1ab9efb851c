"""The singular values of the Jacobian: how much the model stretches and squeezes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip.auditing.budget import Budget
from bilip.auditing.probes.jacobian import push_many
from bilip.auditing.probes.lanczos import largest_singular_value
from bilip.auditing.probes.linear import Linearized
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.subject import Subject
from bilip.data import Batch, Source
from bilip.errors import NotMeasured
from bilip.record import Measurement, Quantity

__all__ = ["Extremes", "SingularValues", "Spectrum", "extremes", "jacobian", "singular_values"]

RESOLVED = 1e-10
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class SingularValues:
    """All singular values at one point.

    Attributes:
        values: In falling order, float64.
        resolved: Which of them the method resolves; the others are only known to be small.
        min_error: Relative error estimate of the smallest; NaN if the inverse Jacobian was not available.
        note: Why the small values come from the forward Jacobian alone; empty if they do not.
    """

    values: Tensor
    resolved: Tensor
    min_error: float
    note: str = ""


@dataclass(frozen=True)
class Extremes:
    """The largest and the smallest singular value at each point of a batch, from applications of the map alone.

    Attributes:
        sigma_max: Never above the true value, but for rounding.
        sigma_max_error: Relative residual.
        sigma_min: Never below the true value, but for rounding.
        sigma_min_error: Relative residual and the effect of rounding.
        contracting: The direction, flat, that the model shrinks most.
        note: Why sigma_min is missing; empty if it is there.
    """

    sigma_max: Tensor
    sigma_max_error: Tensor
    sigma_min: Tensor
    sigma_min_error: Tensor
    contracting: Tensor
    note: str = ""


def jacobian(model: object, x: Tensor, context: Tensor | None = None, *, dtype: torch.dtype = torch.float64) -> Tensor:
    r"""The Jacobian $J_F$ at one point, by forward-mode columns, many at a time.

    Args:
        model: Anything `as_bijection` takes.
        x: One point, a batch of one.
        context: Its context.
        dtype: What the columns are computed in.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> jacobian(DiagonalScaling(torch.tensor([2.0, 4.0])), torch.zeros(1, 2)).round(decimals=6).tolist()
        [[2.0, 0.0], [0.0, 4.0]]
    """
    twin = Subject.of(model).twin(dtype)
    point = x.detach().to(dtype)
    given = context.to(dtype) if context is not None and context.is_floating_point() else context

    def function(y: Tensor) -> Tensor:
        rows = given if given is None or len(given) == len(y) else given.expand(len(y), *given.shape[1:])
        z = twin.bijection(y.clone(), rows)
        if z.dtype != dtype:
            raise NotMeasured(f"the model computes in {z.dtype} whatever it is given, so there is no {dtype} Jacobian")
        return z

    eye = torch.eye(point.numel(), dtype=dtype, device=point.device).reshape(-1, *point.shape[1:])
    return push_many(function, point, eye).flatten(1).T


def singular_values(model: object, x: Tensor, context: Tensor | None = None) -> SingularValues:
    r"""All singular values of $J_F$ at one point, in float64.

    A float64 decomposition of $J_F$ resolves values down to about $10^{-13} \sigma_\text{max}$. The small end comes from the
    inverse Jacobian, built block by block at the stored activations: there the smallest values of $J_F$ are the largest. What
    neither resolves is marked.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> block = DiagonalScaling(torch.tensor([1.0, 1e-20], dtype=torch.float64))
        >>> [f"{value:.3g}" for value in singular_values(block, torch.zeros(1, 2, dtype=torch.float64)).values]
        ['1', '1e-20']
    """
    subject = Subject.of(model)
    values = _svdvals(jacobian(subject, x, context))
    resolved = values >= RESOLVED * values[0]
    try:
        at = Linearized(subject, x, context)
        inverse = at.solve(torch.eye(at.size, dtype=torch.float64, device=x.device)).T
        back = _svdvals(inverse)
    except NotMeasured as why:
        return SingularValues(values, resolved, math.nan, str(why))
    small, trusted = 1 / back.flip(0), back.flip(0) >= RESOLVED * back[0]
    error = at.residual + _rounding(subject, x, context, inverse) + at.size * EPS
    # Each value from the side that knows it better: rounding is relative to the largest of the matrix decomposed.
    forward_error, backward_error = values[0] / small, (small / small[-1]).clamp_min(error / (at.size * EPS))
    take = trusted & (backward_error < forward_error)
    return SingularValues(torch.where(take, small, values), resolved | take, error)


def extremes(model: object, x: Tensor, context: Tensor | None = None, *, steps: int = 80, seed: int = 0) -> Extremes:
    r"""The largest and smallest singular value of $J_F$ at each point of a batch, matrix-free: Lanczos on $J_F$ and on $J_F^{-1}$.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> found = extremes(DiagonalScaling(torch.tensor([3.0, 1e-3])).double(), torch.zeros(1, 2, dtype=torch.float64))
        >>> round(float(found.sigma_max), 6), round(float(found.sigma_min), 6)
        (3.0, 0.001)
    """
    subject = Subject.of(model)
    at = Linearized(subject, x, context)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(at.count, at.size, generator=generator, dtype=torch.float64).to(x.device)
    top = largest_singular_value(at.apply, at.adjoint, start, steps=steps)
    try:
        bottom = largest_singular_value(at.solve, at.solve_adjoint, start, steps=steps)
    except NotMeasured as why:
        nan = torch.full_like(top.value, torch.nan)
        return Extremes(top.value, top.residual, nan, nan, torch.full_like(start, torch.nan), str(why))
    shaken = Linearized(subject, x, context, noise=EPS).solve(bottom.right).norm(dim=1)
    moved = ((shaken - bottom.value) / bottom.value).abs()
    image = at.solve(bottom.right)
    direction = image / image.norm(dim=1, keepdim=True)
    return Extremes(top.value, top.residual, 1 / bottom.value, bottom.residual + moved + at.residual, direction, "")


class Spectrum(Probe):
    r"""Largest and smallest singular value and condition number of the Jacobian, in float64, and all values where affordable.

    Up to `exact` dimensions the whole Jacobian and the whole inverse Jacobian are built and decomposed; beyond, Lanczos
    finds the two extremes. A number whose error estimate is above `tolerance` is reported as one-sided: the true
    $\sigma_\text{max}$ is at least, the true $\sigma_\text{min}$ at most what is stated.

    Args:
        samples: Number of samples.
        exact: Largest dimension for the exact mode.
        steps: Lanczos steps.
        tolerance: Relative error up to which a number counts as measured.
        seed: Seed of the starting directions.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = Spectrum().measure(real_nvp(4, blocks=2), torch.randn(2, 4))
        >>> m["method"], m["sigma_min_status"], m["condition"] >= 1
        ('exact', 'measured', True)
    """

    name = "spectrum"
    scope = "source"
    place = 70
    quantities = (
        Quantity("sigma_max", "largest singular value"),
        Quantity("sigma_min", "smallest singular value"),
        Quantity("condition", "condition number", "", "lower"),
        Quantity("samples", "samples", "count"),
        Quantity("method", "method", "text"),
        Quantity("dimension", "dimension", "count"),
    )

    def __init__(
        self, samples: int = 4, *, exact: int = 256, steps: int = 80, tolerance: float = 1e-3, seed: int = 0
    ) -> None:
        self.samples, self.exact, self.steps, self.tolerance, self.seed = samples, exact, steps, tolerance, seed

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object] | None:
        part = 4 if task.large else 1
        return {
            "samples": max(1, budget.spectra // part),
            "exact": budget.exact,
            "steps": max(8, budget.steps // part),
            "seed": task.seed,
        }

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        batch = next(iter(source.batches(self.samples, limit=self.samples, dtype=torch.float64, device=subject.device)))
        size = math.prod(source.shape)
        exact = size <= self.exact
        rows, notes, all_values = [], [], []
        for k in range(len(batch)):
            one = Batch(batch.x[k : k + 1], None if batch.context is None else batch.context[k : k + 1], k)
            try:
                row, values, note = self._exact(subject, one) if exact else self._lanczos(subject, one)
            except NotMeasured as why:
                nothing = "not-measured"
                row = _row(k, math.nan, math.nan, nothing, math.nan, math.nan, nothing)
                values, note = None, str(why)
            rows.append(row)
            all_values.append(values)
            if note and note not in notes:
                notes.append(note)
            self.progress((k + 1) / len(batch))
        if all(row["sigma_max_status"] == "not-measured" for row in rows):
            raise NotMeasured(notes[0] if notes else "no sample has a finite Jacobian")
        worst = max(range(len(rows)), key=lambda k: _or(rows[k]["condition"], -1.0))
        chosen = all_values[worst]
        series = {}
        if chosen is not None:
            series = {
                "singular_values": tuple(chosen.values.tolist()),
                "resolved": tuple(chosen.resolved.double().tolist()),
            }
        top, bottom = _extreme(rows, "sigma_max", max), _extreme(rows, "sigma_min", min)
        values = {
            "method": "exact" if exact else "lanczos",
            "dimension": size,
            "samples": len(rows),
            **top,
            **bottom,
            "condition": max((_or(row["condition"], -math.inf) for row in rows), default=math.nan),
            "eps": subject.eps,
        }
        if values["condition"] == -math.inf:
            values["condition"] = math.nan
        return Measurement(self.name, source.name, values=values, rows=tuple(rows), series=series, notes=tuple(notes))

    def _exact(self, subject: Subject, one: Batch):
        found = singular_values(subject, one.x, one.context)
        top, bottom = float(found.values[0]), float(found.values[-1])
        known = not math.isnan(found.min_error)
        if not known and bool(found.resolved[-1]):  # well conditioned: the forward decomposition is enough
            found = SingularValues(found.values, found.resolved, EPS * len(found.values) * top / bottom, found.note)
            known = True
        state = self._state(found.min_error) if known else "not-measured"
        bottom = bottom if known else math.nan
        row = _row(one.start, top, EPS * len(found.values), "measured", bottom, found.min_error, state)
        return row, found, "" if known and not found.note else found.note

    def _lanczos(self, subject: Subject, one: Batch):
        found = extremes(subject, one.x, one.context, steps=self.steps, seed=self.seed + one.start)
        top, top_error = float(found.sigma_max), float(found.sigma_max_error)
        bottom, bottom_error = float(found.sigma_min), float(found.sigma_min_error)
        state = "not-measured" if math.isnan(bottom) else self._state(bottom_error)
        return _row(one.start, top, top_error, self._state(top_error), bottom, bottom_error, state), None, found.note

    def _state(self, error: float) -> str:
        return "measured" if error <= self.tolerance else "one-sided"


def _row(k: int, top: float, top_error: float, top_state: str, bottom: float, error: float, state: str) -> dict:
    return {
        "sample": k,
        "sigma_max": top,
        "sigma_max_error": top_error,
        "sigma_max_status": top_state,
        "sigma_min": bottom,
        "sigma_min_error": error,
        "sigma_min_status": state,
        "condition": top / bottom if bottom > 0 else math.nan,
    }


def _extreme(rows: list[dict], name: str, pick) -> dict:
    known = [row for row in rows if not math.isnan(row[name])]
    if not known:
        return {name: math.nan, f"{name}_error": math.nan, f"{name}_status": "not-measured"}
    row = pick(known, key=lambda r: r[name])
    return {key: row[key] for key in (name, f"{name}_error", f"{name}_status")}


def _svdvals(matrix: Tensor) -> Tensor:
    if not bool(torch.isfinite(matrix).all()):
        raise NotMeasured("the Jacobian is not finite in float64")
    # On a GPU the default is Jacobi's method, which took four to ten times as long at d = 3072.
    return torch.linalg.svdvals(matrix, driver="gesvd" if matrix.is_cuda else None)


def _rounding(subject: Subject, x: Tensor, context: Tensor | None, inverse: Tensor) -> float:
    """How far noise of one rounding in every activation moves the largest singular value of the inverse Jacobian."""
    start = torch.ones(1, len(inverse), dtype=inverse.dtype, device=inverse.device)
    top = largest_singular_value(lambda v: v @ inverse.T, lambda u: u @ inverse, start, steps=30)
    shaken = Linearized(subject, x, context, noise=EPS).solve(top.right).norm()
    return float((shaken - (top.right @ inverse.T).norm()).abs() / top.value)


def _or(value: float, other: float) -> float:
    return other if math.isnan(value) else value
