"""Can a search find, close to the data, what the model does not reconstruct?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bilip._torch import half_digits
from bilip.auditing.budget import Budget
from bilip.auditing.probes.attack_methods import METHODS, Route, Search
from bilip.auditing.probes.pictures import is_image, picture
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.probes.region import Region
from bilip.auditing.round_trip import Typical, typical, typical_norm
from bilip.auditing.subject import Subject
from bilip.data import Source, as_source
from bilip.errors import InputError, NotMeasured
from bilip.record import Measurement, Picture, Quantity

__all__ = ["Attack", "AttackResult", "AttackRun"]

_SHARE_OF_RANGE = 1 / 64  # the paper's radius, 0.5 / 32, as a share of its data's range [0, 1)
_NOISE_NOTE = "roundtrip: the exact gradient of |x - F^-1(F(x))| is zero, so this objective follows rounding noise; it is the paper's"


class Attack(Probe):
    r"""Search a box around each sample for points that the model does not reconstruct.

    The paper's attack is projected signed-gradient ascent, $x \leftarrow \Pi(x + \alpha\, \mathrm{sign} \nabla L(x))$,
    inside the dequantization cell of an image. Methods:

    * `"gain"`: $L = |x - F^{-1}(F(x) + \delta)| / |\delta|$ for a small $\delta$, a true gradient of the exact map, taken in
      float64 where the model can be copied; works through implicit inverses that can be differentiated.
    * `"roundtrip"`: $L = |x - F^{-1}(F(x))|$, the paper's. Its exact gradient is zero: what is followed is rounding noise.
    * `"random"`: changes some entries at random and keeps what is worse; needs no gradient.
    * `"singular"`: moves along the direction that $F$ contracts most, both ways, and linearises again.

    Whether an attack succeeded is judged by the plain round trip in the model's own dtype and by nothing else. No point ever
    leaves its box. A reconstruction that is not finite ends the search of its sample.

    Args:
        bits: Attack the dequantization cell of data with so many bits, scaled to [0, 1).
        radius: Attack all points within this distance in every entry; by default 1/64 of the range of the data, the
            paper's share, and no further than that range.
        box: `"cell"`, `"ball"`, `"latent"` (points near F(x), for $z \to x \to z$) or `"auto"`: a cell where `bits` is
            given, otherwise a ball.
        step: Size of a step; by default the paper's 5e-4 in proportion to the radius.
        steps: Number of steps.
        objective: `"gain"`, `"roundtrip"` or `"auto"`, which is gain: the objective of the gradient method.
        methods: Exactly these methods instead of the objective's, random search and singular directions.
        samples: Number of samples, attacked all at once.
        every: Steps between new perturbations of the gain objective.
        seed: Seed of all randomness.
        fail_at: Relative error that counts as success; by default the square root of the dtype's epsilon.
        origin: Lower end of the lowest cell, -0.5 for images in [-0.5, 0.5].

    Example:
        >>> from bilip.models import real_nvp
        >>> attack = Attack(radius=0.1, steps=8, samples=4)
        >>> m = attack.measure(real_nvp(2, coupling="additive"), torch.randn(16, 2))
        >>> m["success"], m["radius"], [row["method"] for row in m.rows]
        (False, 0.1, ['gain', 'random', 'singular'])
    """

    name = "attack"
    scope = "data"
    place = 94
    load = 3
    quantities = (
        Quantity("success", "broke it", "flag", "lower"),
        Quantity("share_success", "share of samples that were broken", "share", "lower"),
        Quantity("worst_relative", "worst relative error", "relative", "lower"),
        Quantity("samples", "samples", "count"),
        Quantity("radius", "radius"),
        Quantity("method", "strongest method", "text"),
        Quantity("box", "where the search stays", "text"),
    )

    def __init__(
        self,
        bits: int | None = None,
        radius: float | None = None,
        *,
        box: str = "auto",
        step: float | None = None,
        steps: int = 200,
        objective: str = "auto",
        methods: Sequence[str] | None = None,
        samples: int = 8,
        every: int = 10,
        seed: int = 0,
        fail_at: float | None = None,
        origin: float = 0.0,
    ) -> None:
        for label, value, known in (
            ("box", box, ("auto", "cell", "ball", "latent")),
            ("objective", objective, ("auto", "gain", "roundtrip")),
            *(("methods", method, tuple(METHODS)) for method in methods or ()),
        ):
            if value not in known:
                raise InputError(f"Attack({label}={value!r}): expected one of {', '.join(map(repr, known))}.")
        for label, number in (("steps", steps), ("samples", samples), ("every", every)):
            if not isinstance(number, int) or number < 1:
                raise InputError(f"Attack({label}={number!r}): expected a whole number, 1 or more.")
        if bits is None and box == "cell":
            raise InputError("Attack(box='cell'): how many bits had the data? Pass bits=5 or bits=8.")
        if step is not None and not 0 < step < math.inf:
            raise InputError(f"Attack(step={step!r}): expected a positive number.")
        if methods is not None and not methods:
            raise InputError("Attack(methods=()): expected one method or more.")
        self.bits, self.radius, self.step, self.steps, self.origin = bits, radius, step, steps, origin
        self.box = ("ball" if bits is None else "cell") if box == "auto" else box
        gradient = "gain" if objective == "auto" else objective
        self.methods = (gradient, "random", "singular") if methods is None else tuple(dict.fromkeys(methods))
        self.samples, self.every, self.seed, self.fail_at = samples, every, seed, fail_at
        self.pieces = len(self.methods)

    def search(self, model: Any, x: Any) -> AttackResult:
        """Attack the samples of a batch, a pair `(x, context)`, a file or a `Source`; tensors come back.

        Samples whose latents are not finite are left out of an attack on latents.

        Raises:
            NotMeasured: No method can run on this model, or the data do not fit the box.

        Example:
            >>> from bilip.models import real_nvp
            >>> found = Attack(bits=5, steps=4).search(real_nvp(2, coupling="additive"), torch.rand(8, 2))
            >>> bool(found.region.contains(found.points).all()), bool(found.success.any())
            (True, False)
        """
        subject = Subject.of(model)
        source = x if isinstance(x, Source) else as_source("x", x)
        with subject.evaluating(), torch.random.fork_rng(devices=[]):
            return self._search(subject, source)

    def _search(self, subject: Subject, source: Source) -> AttackResult:
        route, region = self._set_out(subject, source)
        return _together([self._run(route, region, k) for k in range(len(self.methods))], region)

    def _set_out(self, subject: Subject, source: Source) -> tuple[Route, Region]:
        """The round trip to break, and where the search stays."""
        batch = source.first(self.samples, dtype=subject.dtype, device=subject.device)
        x, context = batch.x, batch.context
        if self.box == "latent":
            z = subject.forward(x, context).value
            finite = torch.isfinite(z.flatten(1)).all(1)
            if not bool(finite.any()):
                raise NotMeasured("no sample has a finite latent to start from")
            x, context = z[finite], None if context is None else context[finite]
        sizes = Typical(typical_norm(x)) if self.box == "latent" else typical(source)
        route = Route(subject, context, latent=self.box == "latent", typical=sizes)
        return route, self._region(subject, source, x)

    def _run(self, route: Route, region: Region, done: int) -> AttackRun | str:
        """What one method finds, or why it finds nothing. Each begins from the same random state, whoever ran before it."""
        method, generator = self.methods[done], torch.Generator().manual_seed(self.seed)

        def told(steps: int) -> None:
            self.progress((done + steps / (self.steps + 1)) / len(self.methods))

        with torch.random.fork_rng(devices=route.subject.devices):
            search = Search(route, region, self.step or region.step, self.steps, self.every, generator, told)
            try:
                METHODS[method](search)
                search.settle()
                return AttackRun.of(method, search, self._limit(route.subject))
            except NotMeasured as why:
                return f"{method} not measured: {why}"

    def _limit(self, subject: Subject) -> float:
        """The relative error that counts as success."""
        return half_digits(subject.dtype) if self.fail_at is None else self.fail_at

    def _piece(self, subject: Subject, source: Source, piece: int) -> AttackRun | str:
        found = self._run(*self._set_out(subject, source), piece)
        return found if isinstance(found, str) else found.cpu()

    def _join(self, subject: Subject, source: Source, found: Sequence[AttackRun | str]) -> Measurement:
        return self._measured(subject, source, _together(found, self._set_out(subject, source)[1].cpu()))

    def _region(self, subject: Subject, source: Source, x: Tensor) -> Region:
        if self.box == "cell":
            return Region.cell(x, self.bits or 8, self.origin)
        if self.box == "latent":
            radius = _SHARE_OF_RANGE * float(x.max() - x.min()) if self.radius is None else self.radius
            return Region.ball(x, radius or _SHARE_OF_RANGE, kind="latent")
        domain = subject.bijection.natural_domain()
        low, high = float(domain.low.max()), float(domain.high.min())
        if self.radius is not None:
            return Region.ball(x, self.radius, low=low, high=high)
        seen = source.statistics()
        if not seen.half_range > 0:  # all entries alike: there is no range to take a share of
            return Region.ball(x, _SHARE_OF_RANGE, low=low, high=high)
        radius = 2 * _SHARE_OF_RANGE * seen.half_range
        return Region.ball(x, radius, low=max(low, seen.low), high=min(high, seen.high))

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object] | None:
        if not budget.attack:
            return None
        part = 2 if task.large else 1
        return {
            "samples": max(1, budget.attack // part),
            "steps": max(min(12, budget.attack_steps), budget.attack_steps // part),
            "bits": task.bits,
            "seed": task.seed,
        }

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        return self._measured(subject, source, self._search(subject, source))

    def _measured(self, subject: Subject, source: Source, result: AttackResult) -> Measurement:
        region, best = result.region, result.strongest
        notes, limit = list(result.notes), self._limit(subject)
        lost = int((result.start_errors > limit).sum())
        if lost:
            notes.append(f"{lost} of {len(result.success)} samples fail at their start already, without any attack")
        if "roundtrip" in result.runs:
            notes.append(_NOISE_NOTE)
        for run in result.runs.values():
            if run.random_steps:
                notes.append(f"{run.method}: {run.random_steps} moves at random, where there was no gradient")
        return Measurement(
            self.name,
            source.name,
            values={
                "box": region.text,
                "radius": region.radius,
                "step": self.step or region.step,
                "steps": self.steps,
                "success": bool(result.success.any()),
                "share_success": float(result.success.double().mean()),
                "worst_relative": float(result.errors.max()),
                "method": best.method,
                "samples": len(result.success),
                "fail_at": limit,
            },
            series={name: tuple(run.trajectory.amax(1).tolist()) for name, run in result.runs.items()},
            rows=tuple(_row(run, region) for run in result.runs.values()),
            pictures=_pictures(result, source),
            notes=tuple(notes),
        )


def _together(found: Sequence[AttackRun | str], region: Region) -> AttackResult:
    """All that the methods found; a text says why one found nothing."""
    runs = {run.method: run for run in found if isinstance(run, AttackRun)}
    notes = tuple(note for note in found if isinstance(note, str))
    if not runs:
        raise NotMeasured("; ".join(notes))
    return AttackResult.together(runs, notes, region)


def _row(run: AttackRun, region: Region) -> dict[str, float | int | str | bool]:
    return {
        "method": run.method,
        "success": bool(run.success.any()),
        "successes": int(run.success.sum()),
        "steps": len(run.trajectory) - 1,
        "start_error": float(run.trajectory[0].max()),
        "end_error": float(run.trajectory[-1].max()),
        "worst_error": float(run.l2.max()),
        "worst_relative": float(run.errors.max()),
        "left_box": not bool(region.contains(run.points).all()),
        "samples": len(run.success),
    }


def _pictures(result: AttackResult, source: Source) -> tuple[Picture, ...]:
    x, back = result.points, result.back
    if not is_image(tuple(x.shape[1:])) or result.region.kind == "latent":
        return ()
    worst, seen = int(result.errors.argmax()), source.statistics()
    error, group = float(result.errors[worst]), f"attack on {source.name}"
    shown = (("start", result.region.start), ("point found", x), ("its reconstruction", back))
    return tuple(
        picture(image[worst], seen.low, seen.high, title, f"{title}, sample {worst}, relative error {error:.2g}", group)
        for title, image in shown
    )


@dataclass(frozen=True)
class AttackRun:
    """What one method found.

    Attributes:
        method: Its name.
        points: The worst point of each sample, in the model's dtype.
        back: Their reconstructions.
        l2: Euclidean errors of the plain round trip, float64; infinite where something is not finite or the model raised.
        errors: Relative errors.
        success: Whether the relative error is above the limit.
        trajectory: Euclidean errors along the steps, shape `(steps + 1, batch)`, the start first.
        random_steps: Moves at random for want of a gradient, summed over samples.
        start_errors: Relative errors where the search began.
    """

    method: str
    points: Tensor
    back: Tensor
    l2: Tensor
    errors: Tensor
    success: Tensor
    trajectory: Tensor
    random_steps: int
    start_errors: Tensor

    @classmethod
    def of(cls, method: str, search: Search, limit: float) -> AttackRun:
        """The outcome of a search; success is a relative error above the limit."""
        found, trajectory = search.found, torch.stack(search.trajectory).cpu()
        success = found.relative > limit
        return cls(
            method,
            search.points,
            found.back,
            found.l2,
            found.relative,
            success,
            trajectory,
            search.random_steps,
            search.start_errors,
        )

    def cpu(self) -> AttackRun:
        """The same with all tensors on the CPU."""
        return replace(self, **{name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class AttackResult:
    """What all methods found together: for each sample the worst point of any.

    Attributes:
        points: The points, in the model's dtype.
        back: Their reconstructions.
        errors: Relative errors of the plain round trip, float64.
        success: Whether they are above the limit.
        runs: Each method by itself.
        notes: Methods that could not run, and why.
        region: Where the points lie.
    """

    points: Tensor
    back: Tensor
    errors: Tensor
    success: Tensor
    runs: Mapping[str, AttackRun]
    notes: tuple[str, ...]
    region: Region

    @classmethod
    def together(cls, runs: Mapping[str, AttackRun], notes: tuple[str, ...], region: Region) -> AttackResult:
        """Take for each sample the worst point of any method."""
        everyone = list(runs.values())
        best = torch.stack([run.errors for run in everyone]).argmax(0)
        rows = torch.arange(len(best), device=best.device)

        def pick(name: str) -> Tensor:
            return torch.stack([getattr(run, name) for run in everyone])[best, rows]

        return cls(pick("points"), pick("back"), pick("errors"), pick("success"), runs, notes, region)

    @property
    def trajectory(self) -> Tensor:
        """Euclidean errors along the steps of the strongest method, shape `(steps + 1, batch)`."""
        return self.strongest.trajectory

    @property
    def start_errors(self) -> Tensor:
        """Relative errors where the search began, before any attack."""
        return self.strongest.start_errors

    @property
    def strongest(self) -> AttackRun:
        """The method with most successes, among equals the one with the largest error."""
        return max(self.runs.values(), key=lambda run: (int(run.success.sum()), float(run.errors.max())))
