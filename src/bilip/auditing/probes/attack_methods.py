"""How an attack moves, on the round trip that it tries to break.

Signed gradients of two objectives, a search without gradients, and singular directions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bilip._torch import Replayed
from bilip.auditing.probes.region import Region
from bilip.auditing.round_trip import Typical, distances, norms
from bilip.auditing.subject import Subject, in_dtype
from bilip.errors import NotMeasured, said_by
from bilip.linalg.lanczos import largest_singular_value
from bilip.linalg.linearized import AtPoint, Linearized

__all__ = ["Search", "RoundTrips", "METHODS", "Method", "Route"]

_LANCZOS_STEPS = 12
_SHARES = (1.0, 0.5, 0.125, 0.0)  # of the entries that the search without gradients moves; 0 stands for a single entry


@dataclass(frozen=True)
class RoundTrips:
    """Plain round trips of a batch in the model's own dtype.

    Attributes:
        back: What came back.
        l2: Euclidean errors, float64; infinite where something is not finite or the model raised.
        relative: The relative error of `bilip.auditing.round_trip`.
    """

    back: Tensor
    l2: Tensor
    relative: Tensor


class Route:
    r"""Out and back: $x \to z \to x$, or $z \to x \to z$ for an attack on latents.

    Errors are measured by `typical`, by default the median norm of each batch that is judged.

    Example:
        >>> from bilip.models import real_nvp
        >>> route = Route(Subject.of(real_nvp(2, coupling="additive")))
        >>> bool((route.judge(torch.randn(3, 2)).relative < 1e-5).all())
        True
    """

    def __init__(
        self, subject: Subject, context: Tensor | None = None, *, latent: bool = False, typical: Typical | None = None
    ) -> None:
        self.subject, self.context, self.latent, self.typical = subject, context, latent, typical
        self._recorded: list[Replayed] = []
        self._trip = self.often(self._bare, self._guarded)

    def often(self, function: Callable[..., Any], plain: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The function, which goes through the model, as one that is called many times: see `Replayed`.

        Only for models that are `recordable`, and without autocast, which keeps copies of weights.
        """
        plain = plain or function
        if not self.subject.recordable:
            return plain
        recorded = Replayed(function, plain)
        self._recorded.append(recorded)

        def call(*inputs: Tensor) -> Any:
            return (plain if torch.is_autocast_enabled(inputs[0].device.type) else recorded)(*inputs)

        return call

    @property
    def replays(self) -> int:
        """How many calls were replays."""
        return sum(recorded.replays for recorded in self._recorded)

    @torch.no_grad()
    def _bare(self, x: Tensor) -> Tensor:
        with self.subject.arithmetic():
            return self.back(self.out(x.clone()).clone())

    def _guarded(self, x: Tensor) -> Tensor:
        first, second = self.subject.forward, self.subject.inverse
        if self.latent:
            first, second = second, first
        return second(first(x, self.context).value, self.context).value

    def judge(self, x: Tensor, *, plain: bool = False) -> RoundTrips:
        """The errors of the plain round trip, by guarded calls; no objective has a say in it.

        Args:
            x: The points.
            plain: Call the model, also where a recording could stand in for it.
        """
        self.subject.tick()
        back = self._guarded(x) if plain else self._trip(x)
        if back.shape != x.shape:  # every sample failed, and nothing is known about the shape of what should come back
            back = torch.full_like(x, torch.nan)
        found = distances(x, back, self.typical)
        bad = ~torch.isfinite(found.l2)
        infinite = torch.full_like(found.l2, torch.inf)
        return RoundTrips(back, torch.where(bad, infinite, found.l2), torch.where(bad, infinite, found.relative))

    def out(self, x: Tensor) -> Tensor:
        """The way out, unguarded, with gradients."""
        bijection = self.subject.bijection
        return bijection.inverse(x, self.context) if self.latent else bijection(x, self.context)

    def back(self, z: Tensor) -> Tensor:
        """The way back, unguarded, with gradients."""
        bijection = self.subject.bijection
        return bijection(z, self.context) if self.latent else bijection.inverse(z, self.context)

    def copy_in(self, dtype: torch.dtype) -> Route:
        """The same route through a copy of the model in another dtype."""
        context = in_dtype(self.context, dtype)
        return Route(self.subject.copy_in(dtype), context, latent=self.latent, typical=self.typical)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Within this context no gradient is computed for parameters."""
        wanted = [p for p in self.subject.bijection.parameters() if p.requires_grad]
        try:
            for p in wanted:
                p.requires_grad_(False)
            yield
        finally:
            for p in wanted:
                p.requires_grad_(True)


@dataclass
class Search:
    """One search of one batch: judges every point it visits and keeps the worst of each sample.

    Attributes:
        every: Steps between new perturbations.
        progress: Called after each step with the length of the trajectory.
        random_steps: How often a sample was moved at random for want of a gradient.
    """

    route: Route
    region: Region
    step: float
    steps: int
    every: int
    generator: torch.Generator
    progress: Callable[[int], None] = lambda steps: None
    random_steps: int = 0
    trajectory: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.points = self.region.start
        self.found = self.route.judge(self.points)
        self.trajectory.append(self.found.l2)
        self.start_errors = self.found.relative

    @property
    def ended(self) -> Tensor:
        """The samples whose reconstruction is not finite: nothing worse can be found."""
        return torch.isinf(self.found.l2)

    def visit(self, x: Tensor) -> RoundTrips:
        """Judge a point for each sample; samples that ended stay where they are."""
        ended = self.ended
        x = torch.where(_wide(ended, x), self.points, self.region.clamp(x))
        seen = self.route.judge(x)
        worse = (seen.relative > self.found.relative) & ~ended
        wide = _wide(worse, x)
        self.points = torch.where(wide, x, self.points)
        self.found = RoundTrips(
            torch.where(wide, seen.back, self.found.back),
            torch.where(worse, seen.l2, self.found.l2),
            torch.where(worse, seen.relative, self.found.relative),
        )
        return RoundTrips(
            seen.back, torch.where(ended, torch.inf, seen.l2), torch.where(ended, torch.inf, seen.relative)
        )

    def settle(self) -> None:
        """Judge what was found by calls of the model, if recordings of them stood in for some."""
        if self.route.replays:
            self.found = self.route.judge(self.points, plain=True)

    def log(self, errors: Tensor) -> None:
        """Add the errors of one step to the trajectory."""
        self.trajectory.append(errors)
        self.progress(len(self.trajectory))

    def signs(self) -> Tensor:
        """Random signs."""
        return (torch.rand(self.points.shape, generator=self.generator, device="cpu") < 0.5).to(self.points) * 2 - 1


Method = Callable[[Search], None]


def ascend(search: Search, gradient: Callable[[Tensor, int], Tensor]) -> None:
    """Projected signed-gradient ascent; where a sample has no gradient (zero or not finite) its signs are random."""
    x = search.region.start
    with search.route.frozen():
        for k in range(search.steps):
            if bool(search.ended.all()):
                return
            try:
                g = gradient(x, k)
            except Exception as error:  # models refuse gradients in any way they like
                if k == 0:
                    raise NotMeasured(f"no gradient ({said_by(error, 200)})") from error
                g = torch.full_like(x, torch.nan)
            flat = g.flatten(1)
            lost = ~torch.isfinite(flat).all(1) | (flat == 0).all(1)
            search.random_steps += int((lost & ~search.ended).sum())
            x = search.region.clamp(x + search.step * torch.where(_wide(lost, x), search.signs(), g.sign().to(x.dtype)))
            search.log(search.visit(x).l2)


def roundtrip(search: Search) -> None:
    """Ascend |x - F^-1(F(x))|: the paper's objective. Its exact gradient is zero; it follows rounding noise."""

    def pulled(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            back = _differentiable(search.route.back(search.route.out(x)))
            return torch.autograd.grad((back - x).double().flatten(1).norm(dim=1).sum(), x)[0]

    often = search.route.often(pulled)
    ascend(search, lambda x, _: often(x))


def gain(search: Search) -> None:
    r"""Ascend $|x - F^{-1}(F(x) + \delta)| / |\delta|$, a property of the exact map, in float64 where the model can be copied.

    $\delta$ is drawn anew every `every` steps. In between, its own gradient is $J^\top (F^{-1}(F(x) + \delta) - x)$ up to scale, so that
    taking it as the next $\delta$ is a step of power iteration towards the direction that the inverse stretches most, for nothing.
    """
    eps = torch.finfo(search.region.start.dtype).eps
    try:
        route, size = search.route.copy_in(torch.float64), max(eps, math.sqrt(torch.finfo(torch.float64).eps))
    except NotMeasured:
        route, size = search.route, math.sqrt(eps)
    direction: Tensor | None = None
    latent: Tensor | None = None  # what latents are like
    shrink = torch.ones(len(search.points), dtype=torch.float64, device=search.points.device)

    def drawn(z: Tensor) -> Tensor:
        return torch.randn(z.shape, generator=search.generator, dtype=torch.float64, device="cpu").to(z)

    def pulled(x: Tensor, shrink: Tensor, towards: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The gradients at the point and at the perturbation."""
        with torch.enable_grad():
            point = (x.double() if route is not search.route else x).detach().requires_grad_()
            z = route.out(point)
            along = towards(z)
            length = (size * shrink * (1 + norms(z)) / norms(along)).to(z)
            delta = (along * _wide(length, z)).detach().requires_grad_()
            back = _differentiable(route.back(z + delta))
            value = (back - point).double().flatten(1).norm(dim=1).log().sum()
            return torch.autograd.grad(value, (point, delta))  # type: ignore[return-value]

    often = route.often(lambda x, shrink, along: pulled(x, shrink, lambda z: along))

    def gradient(x: Tensor, k: int) -> Tensor:
        nonlocal direction, latent, shrink
        if latent is None:
            fresh = x

            def first(z: Tensor) -> Tensor:
                nonlocal fresh, latent
                fresh = latent = drawn(z)
                return fresh

            to_point, to_delta = pulled(x, shrink, first)
        else:
            fresh = drawn(latent)
            along = fresh if k % search.every == 0 or direction is None else direction
            to_point, to_delta = often(x, shrink, along)
        usable = torch.isfinite(norms(to_delta)) & (norms(to_delta) > 0)
        direction = torch.where(_wide(usable, to_delta), to_delta, fresh).detach()
        # Where so small a perturbation is not inverted to anything finite, a smaller one may be.
        shrink = torch.where(usable, shrink, (shrink / 10).clamp_min(1e-6))
        return to_point

    ascend(search, gradient)


def random(search: Search) -> None:
    """Accept what makes the error larger: some entries of the worst point so far are moved to an end or into the box."""
    for k in range(search.steps):
        if bool(search.ended.all()):
            return
        share = _SHARES[k % len(_SHARES)]
        coins = torch.rand(search.points.flatten(1).shape, generator=search.generator, device="cpu")
        least = coins.amin(1, keepdim=True)
        chosen = (coins <= least.clamp_min(share)).to(search.points.device).view(search.points.shape)
        target = (
            search.region.corner(search.generator)
            if (k // len(_SHARES)) % 2
            else search.region.inside(search.generator)
        )
        search.visit(torch.where(chosen, target, search.points))
        search.log(search.found.l2)


def singular(search: Search) -> None:
    """Move along the direction that the way out contracts most, both ways, and linearise again at the worst point."""
    tries = [sign * share for share in (1.0, 0.5, 0.25, 0.125) for sign in (1, -1)]
    checked: Linearized | AtPoint | None = None
    for k in range(max(1, min(8, search.steps // len(tries)))):
        if bool(search.ended.all()):
            return
        start = search.points
        try:
            direction, checked = _contracted(search, ~search.ended, checked)
        except (NotMeasured, RuntimeError):
            if k == 0:
                raise
            return  # the point found has no linearisation; the ones before it are kept
        for t in tries:
            search.visit(start + t * search.region.radius * direction)
            search.log(search.found.l2)


def _contracted(
    search: Search, rows: Tensor, checked: Linearized | AtPoint | None
) -> tuple[Tensor, Linearized | AtPoint]:
    """The direction of each sample that the way out contracts most, largest entry 1; zero for other samples.

    How each block is solved is checked where the model is linearised first; that linearisation comes back too.
    """
    context, route = search.route.context, search.route
    context = None if context is None else context[rows]
    points = search.points[rows]
    if route.latent:
        at = route.subject.linearized(route.subject.inverse(points, context).value, context, like=checked)
        apply, adjoint = at.apply, at.adjoint
    else:
        at = route.subject.linearized(points, context, like=checked)
        apply, adjoint = at.solve, at.solve_adjoint
    start = torch.randn(at.count, at.size, generator=search.generator, dtype=torch.float64, device="cpu").to(
        points.device
    )
    found = apply(largest_singular_value(apply, adjoint, start, steps=_LANCZOS_STEPS).right)
    found = (found / found.abs().amax(1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)
    direction = torch.zeros_like(search.points)
    direction[rows] = found.view(points.shape).to(points.dtype)
    return direction, checked or at


METHODS: dict[str, Method] = {"roundtrip": roundtrip, "gain": gain, "random": random, "singular": singular}


def _wide(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def _differentiable(back: Tensor) -> Tensor:
    if not back.requires_grad:
        raise NotMeasured("the way back lets no gradient through")
    return back
