"""The singular values of the Jacobian: how much the model stretches and squeezes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bilip.auditing.budget import Budget
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.subject import Subject, in_dtype
from bilip.data import Batch, Source
from bilip.errors import NotMeasured
from bilip.linalg.jacobian import jvp_many
from bilip.linalg.lanczos import largest_singular_value
from bilip.record import Measurement, Quantity

__all__ = ["Extremes", "SingularValues", "Spectrum", "extremes", "jacobian", "singular_values"]

RESOLVED = 1e-3  # relative error up to which a singular value counts as resolved
SAFETY = 32  # over a measured rounding error: one draw of it may be small by chance
EPS = torch.finfo(torch.float64).eps
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SingularValues:
    """All singular values at one point.

    Attributes:
        values: In falling order, float64.
        resolved: Which of them the method resolves, to a relative error of at most 1e-3.
        errors: Relative error estimate of each.
        min_error: That of the smallest; NaN if the inverse Jacobian was not available.
        note: Why the small values come from the forward Jacobian alone; empty if they do not.
    """

    values: Tensor
    resolved: Tensor
    errors: Tensor
    min_error: float
    note: str = ""


@dataclass(frozen=True)
class Extremes:
    """The largest and the smallest singular value at each point of a batch, from applications of the map alone.

    Attributes:
        sigma_max: Never above the true value, but for rounding.
        sigma_max_error: Relative residual and the effect of rounding.
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
    eye = torch.eye(x[0].numel(), dtype=dtype, device=x.device)
    return _columns(Subject.of(model), x, context, eye)


def _columns(subject: Subject, x: Tensor, context: Tensor | None, directions: Tensor) -> Tensor:
    """The Jacobian at one point times directions (rows), one column for each."""
    dtype = directions.dtype
    converted = subject.copy_in(dtype)
    point = x.detach().to(dtype)
    given = in_dtype(context, dtype)

    def function(y: Tensor) -> Tensor:
        rows = given if given is None or len(given) == len(y) else given.expand(len(y), *given.shape[1:])
        z = converted.bijection(y.clone(), rows)
        if z.dtype != dtype:
            raise NotMeasured(f"the model computes in {z.dtype} whatever it is given, so there is no {dtype} Jacobian")
        return z

    return jvp_many(function, point, directions.reshape(-1, *point.shape[1:])).flatten(1).T


def singular_values(model: object, x: Tensor, context: Tensor | None = None) -> SingularValues:
    r"""All singular values of $J_F$ at one point, in float64.

    A float64 decomposition of $J_F$ resolves values down to about $10^{-13} \sigma_\text{max}$. The small end comes from the
    inverse Jacobian, built block by block at the stored activations: there the smallest values of $J_F$ are the largest.

    How far rounding goes is measured: products of both matrices with random directions are also computed block by block, at
    activations with noise of one rounding. There the products of a chain round differently, so that what cancellation between
    blocks costs shows in the difference. Each value is taken from the side that knows it better; what neither
    resolves is marked.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> block = DiagonalScaling(torch.tensor([1.0, 1e-20], dtype=torch.float64))
        >>> [f"{value:.3g}" for value in singular_values(block, torch.zeros(1, 2, dtype=torch.float64)).values]
        ['1', '1e-20']
    """
    subject = Subject.of(model)
    forward = jacobian(subject, x, context)
    values = _svdvals(forward)
    turn = _directions(forward.shape[1]).to(forward)
    least = (len(values) + 2 * len(subject.parts)) * EPS
    known = _apart(_columns(subject, x, context, turn), forward, turn) + least * float(values[0])
    try:
        at = subject.linearized(x, context)
        shaken = subject.linearized(x, context, noise=EPS, like=at)
        known = max(known, _apart(shaken.apply(turn).T, forward, turn))
        inverse = at.solve(torch.eye(at.size, dtype=torch.float64, device=x.device)).T
        back = _svdvals(inverse)
        known_back = _apart(shaken.solve(turn).T, inverse, turn) + (at.residual + least) * float(back[0])
    except NotMeasured as why:
        errors = known / values
        return SingularValues(values, errors <= RESOLVED, errors, math.nan, str(why))
    small = 1 / back.flip(0)
    forward_error, backward_error = known / values, known_back * small
    take = backward_error < forward_error
    errors = torch.where(take, backward_error, forward_error)
    return SingularValues(torch.where(take, small, values), errors <= RESOLVED, errors, float(errors[-1]))


def extremes(
    model: object,
    x: Tensor,
    context: Tensor | None = None,
    *,
    steps: int = 80,
    tolerance: float = 1e-7,
    seed: int = 0,
) -> Extremes:
    r"""The largest and smallest singular value of $J_F$ at each point of a batch, matrix-free: Lanczos on $J_F$ and on $J_F^{-1}$.

    Args:
        model: Anything `as_bijection` takes.
        x: The points.
        context: Their contexts.
        steps: Largest number of steps.
        tolerance: Stop earlier when every relative residual is below it; the error of a value that stands apart is of its square.
        seed: Seed of the starting directions.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> found = extremes(DiagonalScaling(torch.tensor([3.0, 1e-3])).double(), torch.zeros(1, 2, dtype=torch.float64))
        >>> round(float(found.sigma_max), 6), round(float(found.sigma_min), 6)
        (3.0, 0.001)
    """
    subject = Subject.of(model)
    key = ("extremes", steps, tolerance, seed)
    return subject.once(key, (x, context), lambda: _extremes(subject, x, context, steps, tolerance, seed))


def _extremes(subject: Subject, x: Tensor, context: Tensor | None, steps: int, tolerance: float, seed: int) -> Extremes:
    at = subject.linearized(x, context)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(at.count, at.size, generator=generator, dtype=torch.float64, device="cpu").to(x.device)
    top = largest_singular_value(at.apply, at.adjoint, start, steps=steps, tolerance=tolerance)
    shaken = subject.linearized(x, context, noise=EPS, like=at)
    top_error = top.residual + _rounding(at.apply, shaken.apply, top.right, start)
    try:
        bottom = largest_singular_value(at.solve, at.solve_adjoint, start, steps=steps, tolerance=tolerance)
        moved = _rounding(at.solve, shaken.solve, bottom.right, start)
    except NotMeasured as why:
        nan = torch.full_like(top.value, torch.nan)
        return Extremes(top.value, top_error, nan, nan, torch.full_like(start, torch.nan), str(why))
    image = at.solve(bottom.right)
    direction = image / image.norm(dim=1, keepdim=True)
    return Extremes(top.value, top_error, 1 / bottom.value, bottom.residual + moved + at.residual, direction, "")


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
        batch = source.first(self.samples, dtype=torch.float64, device=subject.device)
        size = math.prod(source.shape)
        exact = size <= self.exact
        rows, notes, all_values = [], [], []
        for k in range(len(batch)):
            one = replace(batch.take(slice(k, k + 1)), start=k)
            try:
                row, values, note = self._exact(subject, one) if exact else self._lanczos(subject, one)
            except NotMeasured as why:
                nothing = "not-measured"
                row = _row(k, math.nan, math.nan, nothing, math.nan, math.nan, nothing)
                values, note = None, str(why)
            rows.append(row | {"sample": source.row(k)})
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
        top, top_error = float(found.values[0]), float(found.errors[0])
        bottom, error = float(found.values[-1]), float(found.errors[-1])
        top_state, state = self._state(top_error), self._state(error)
        # Rounding errs to both sides: what is one-sided is stated at the end of its interval.
        if top_state == "one-sided":
            top *= 1 - top_error
        if state == "one-sided":
            bottom = bottom / (1 - error) if error < 1 else math.nan
        if not top > 0:
            top, top_state = math.nan, "not-measured"
        if math.isnan(bottom):
            state = "not-measured"
        note = found.note
        if not note and "not-measured" in (top_state, state):
            note = "the products of the blocks' Jacobians cancel to less than float64 resolves"
        return _row(one.start, top, top_error, top_state, bottom, error, state), found, note

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


def _directions(size: int) -> Tensor:
    """Random orthonormal directions (rows), the same each time: up to 64, a rotation of smaller spaces."""
    generator = torch.Generator().manual_seed(2)
    return torch.linalg.qr(torch.randn(size, min(size, 64), dtype=torch.float64, generator=generator, device="cpu"))[
        0
    ].T


def _apart(columns: Tensor, matrix: Tensor, directions: Tensor) -> float:
    """An estimate of the error of a matrix in Frobenius norm, from its products with some directions computed in another way."""
    size = float(torch.linalg.matrix_norm(columns - matrix @ directions.T)) * math.sqrt(len(matrix.T) / len(directions))
    return SAFETY * size if math.isfinite(size) else math.inf


def _rounding(exact: Map, shaken: Map, v: Tensor, r: Tensor) -> Tensor:
    """What rounding does to |A v|, relative to it: A v against A r + A (v - r) at activations with noise of one rounding."""
    image = exact(v)
    difference = (shaken(r) + shaken(v - r) - image).norm(dim=1)
    return SAFETY * difference / image.norm(dim=1)


def _or(value: float, other: float) -> float:
    return other if math.isnan(value) else value
