"""How an attack moves: signed gradients of two objectives, a search without gradients, and singular directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bilip.auditing.probes.region import Region
from bilip.auditing.probes.route import Judgement, Route
from bilip.auditing.round_trip import norms
from bilip.errors import NotMeasured, said_by
from bilip.linalg.lanczos import largest_singular_value
from bilip.linalg.linearized import Linearized

__all__ = ["METHODS", "Hunt", "Method"]

_LANCZOS_STEPS = 12
_SHARES = (1.0, 0.5, 0.125, 0.0)  # of the entries that the search without gradients moves; 0 stands for a single entry


@dataclass
class Hunt:
    """One search of one batch: judges every point it visits and keeps the worst of each sample.

    Attributes:
        route: The round trip to break.
        region: Where the points may lie.
        step: Size of a step.
        steps: Number of steps.
        every: Steps between new perturbations.
        generator: Randomness.
        progress: Called after each step.
        random_steps: How often a sample was moved at random for want of a gradient.
    """

    route: Route
    region: Region
    step: float
    steps: int
    every: int
    generator: torch.Generator
    progress: Callable[[], None] = lambda: None
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

    def visit(self, x: Tensor) -> Judgement:
        """Judge a point for each sample; samples that ended stay where they are."""
        ended = self.ended
        x = torch.where(_wide(ended, x), self.points, self.region.clamp(x))
        seen = self.route.judge(x)
        worse = (seen.relative > self.found.relative) & ~ended
        wide = _wide(worse, x)
        self.points = torch.where(wide, x, self.points)
        self.found = Judgement(
            torch.where(wide, seen.back, self.found.back),
            torch.where(worse, seen.l2, self.found.l2),
            torch.where(worse, seen.relative, self.found.relative),
        )
        return Judgement(
            seen.back, torch.where(ended, torch.inf, seen.l2), torch.where(ended, torch.inf, seen.relative)
        )

    def settle(self) -> None:
        """Judge what was found by calls of the model, if recordings of them stood in for some."""
        if self.route.replays:
            self.found = self.route.judge(self.points, plain=True)

    def log(self, errors: Tensor) -> None:
        """Add the errors of one step to the trajectory."""
        self.trajectory.append(errors)
        self.progress()

    def signs(self) -> Tensor:
        """Random signs."""
        return (torch.rand(self.points.shape, generator=self.generator) < 0.5).to(self.points) * 2 - 1


Method = Callable[[Hunt], None]


def ascend(hunt: Hunt, gradient: Callable[[Tensor, int], Tensor]) -> None:
    """Projected signed-gradient ascent; where a sample has no gradient (zero or not finite) its signs are random."""
    x = hunt.region.start
    with hunt.route.frozen():
        for k in range(hunt.steps):
            if bool(hunt.ended.all()):
                return
            try:
                g = gradient(x, k)
            except Exception as error:  # models refuse gradients in any way they like
                if k == 0:
                    raise NotMeasured(f"no gradient ({said_by(error, 200)})") from error
                g = torch.full_like(x, torch.nan)
            flat = g.flatten(1)
            lost = ~torch.isfinite(flat).all(1) | (flat == 0).all(1)
            hunt.random_steps += int((lost & ~hunt.ended).sum())
            x = hunt.region.clamp(x + hunt.step * torch.where(_wide(lost, x), hunt.signs(), g.sign().to(x.dtype)))
            hunt.log(hunt.visit(x).l2)


def roundtrip(hunt: Hunt) -> None:
    """Ascend |x - F^-1(F(x))|: the paper's objective. Its exact gradient is zero; it follows rounding noise."""

    def pulled(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            back = _differentiable(hunt.route.back(hunt.route.out(x)))
            return torch.autograd.grad((back - x).double().flatten(1).norm(dim=1).sum(), x)[0]

    often = hunt.route.often(pulled)
    ascend(hunt, lambda x, _: often(x))


def gain(hunt: Hunt) -> None:
    r"""Ascend $|x - F^{-1}(F(x) + \delta)| / |\delta|$, a property of the exact map, in float64 where the model can be copied.

    $\delta$ is drawn anew every `every` steps. In between, its own gradient is $J^\top (F^{-1}(F(x) + \delta) - x)$ up to scale, so that
    taking it as the next $\delta$ is a step of power iteration towards the direction that the inverse stretches most, for nothing.
    """
    eps = torch.finfo(hunt.region.start.dtype).eps
    try:
        route, size = hunt.route.twin(torch.float64), max(eps, math.sqrt(torch.finfo(torch.float64).eps))
    except NotMeasured:
        route, size = hunt.route, math.sqrt(eps)
    direction: Tensor | None = None
    latent: Tensor | None = None  # what latents are like
    shrink = torch.ones(len(hunt.points), dtype=torch.float64, device=hunt.points.device)

    def drawn(z: Tensor) -> Tensor:
        return torch.randn(z.shape, generator=hunt.generator, dtype=torch.float64).to(z)

    def pulled(x: Tensor, shrink: Tensor, towards: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The gradients at the point and at the perturbation."""
        with torch.enable_grad():
            point = (x.double() if route is not hunt.route else x).detach().requires_grad_()
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
            along = fresh if k % hunt.every == 0 or direction is None else direction
            to_point, to_delta = often(x, shrink, along)
        usable = torch.isfinite(norms(to_delta)) & (norms(to_delta) > 0)
        direction = torch.where(_wide(usable, to_delta), to_delta, fresh).detach()
        # Where so small a perturbation is not inverted to anything finite, a smaller one may be.
        shrink = torch.where(usable, shrink, (shrink / 10).clamp_min(1e-6))
        return to_point

    ascend(hunt, gradient)


def random(hunt: Hunt) -> None:
    """Accept what makes the error larger: some entries of the worst point so far are moved to an end or into the box."""
    for k in range(hunt.steps):
        if bool(hunt.ended.all()):
            return
        share = _SHARES[k % len(_SHARES)]
        coins = torch.rand(hunt.points.flatten(1).shape, generator=hunt.generator)
        least = coins.amin(1, keepdim=True)
        chosen = (coins <= torch.maximum(least, torch.tensor(share))).to(hunt.points.device).view(hunt.points.shape)
        target = hunt.region.corner(hunt.generator) if (k // len(_SHARES)) % 2 else hunt.region.inside(hunt.generator)
        hunt.visit(torch.where(chosen, target, hunt.points))
        hunt.log(hunt.found.l2)


def singular(hunt: Hunt) -> None:
    """Move along the direction that the way out contracts most, both ways, and linearise again at the worst point."""
    tries = [sign * share for share in (1.0, 0.5, 0.25, 0.125) for sign in (1, -1)]
    checked: Linearized | None = None
    for k in range(max(1, min(8, hunt.steps // len(tries)))):
        if bool(hunt.ended.all()):
            return
        start = hunt.points
        try:
            direction, checked = _contracted(hunt, ~hunt.ended, checked)
        except (NotMeasured, RuntimeError):
            if k == 0:
                raise
            return  # the point found has no linearisation; the ones before it are kept
        for t in tries:
            hunt.visit(start + t * hunt.region.radius * direction)
            hunt.log(hunt.found.l2)


def _contracted(hunt: Hunt, rows: Tensor, checked: Linearized | None) -> tuple[Tensor, Linearized]:
    """The direction of each sample that the way out contracts most, largest entry 1; zero for other samples.

    How each block is solved is checked where the model is linearised first; that linearisation comes back too.
    """
    context, route = hunt.route.context, hunt.route
    context = None if context is None else context[rows]
    points = hunt.points[rows]
    if route.latent:
        at = route.subject.linearized(route.subject.inverse(points, context).value, context, like=checked)
        apply, adjoint = at.apply, at.adjoint
    else:
        at = route.subject.linearized(points, context, like=checked)
        apply, adjoint = at.solve, at.solve_adjoint
    start = torch.randn(at.count, at.size, generator=hunt.generator, dtype=torch.float64).to(points.device)
    found = apply(largest_singular_value(apply, adjoint, start, steps=_LANCZOS_STEPS).right)
    found = (found / found.abs().amax(1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)
    direction = torch.zeros_like(hunt.points)
    direction[rows] = found.view(points.shape).to(points.dtype)
    return direction, checked or at


METHODS: dict[str, Method] = {"roundtrip": roundtrip, "gain": gain, "random": random, "singular": singular}


def _wide(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def _differentiable(back: Tensor) -> Tensor:
    if not back.requires_grad:
        raise NotMeasured("the way back lets no gradient through")
    return back
