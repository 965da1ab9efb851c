r"""Solve $x + g(x) = y$ for a contraction $g$, sample by sample, with as few evaluations of $g$ as possible.

**Plain** iteration, $x \leftarrow y - g(x)$, shrinks the residual $r = y - x - g(x)$ by the contraction factor each
time.
**Anderson** acceleration combines the last few residuals linearly to the smallest one and steps from there. A step that
shrinks the residual less than plain iteration was seen to do is taken back, which costs one evaluation; after two
such steps the sample goes on plainly. So the accelerated solver needs at most two evaluations more than the plain
one, and mostly far fewer.

What is returned is one plain step beyond the best iterate. It costs nothing, as $g$ is known there, and but for rounding the
error shrinks by the contraction factor once more. Who looks at the residual of what is returned anyway can let the iteration `expect`
that: where plain steps shrink the residual fast, it ends one evaluation earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip import _linalg
from bilip.bounds import norms
from bilip.errors import InputError

__all__ = ["FixedPoint", "solve_fixed_point"]

METHODS = ("anderson", "plain")
GROWTH = 1.5  # an accelerated step may let the residual grow this much before it is taken back
FAST = 0.35  # plain iteration this fast is left alone
WARM_UP = 5  # plain steps before the first accelerated one


@dataclass(frozen=True)
class FixedPoint:
    """Where the iteration ended."""

    x: Tensor  # one plain step from the iterates with the smallest residuals
    # |y - x - g(x)| of these iterates, before that step: of the difference as computed in the dtype of y, in float64.
    residual: Tensor
    evaluations: Tensor  # evaluations of g that each sample took


def solve_fixed_point(
    g: Callable[[Tensor, Tensor], Tensor],
    y: Tensor,
    target: Tensor,
    *,
    method: str = "anderson",
    memory: int = 5,
    max_evaluations: int = 1000,
    enough: Tensor | None = None,
    start: Tensor | None = None,
    expect: bool = False,
) -> FixedPoint:
    r"""Iterate until $|y - x - g(x)| \le$ `target` for each sample, or until nothing improves any more.

    Args:
        g: The contraction, called as `g(x, rows)` with some of the samples and their row numbers.
        y: Right-hand sides, shape `(batch, ...)`.
        target: Largest residual allowed for each sample, shape `(batch,)`; best in float64, whatever the dtype of y.
        method: `"anderson"` or `"plain"`.
        memory: How many residuals Anderson acceleration combines.
        max_evaluations: When to give up on a sample.
        enough: A residual for each sample that will do: below it two evaluations without a better one end the sample.
        start: Where to begin; by default at y.
        expect: Among the first plain steps, end also where the residual after the step beyond is expected to be half of the target, at the
            rate of the step before.

    Example:
        >>> solution = solve_fixed_point(lambda x, rows: 0.9 * x, torch.ones(1, 2), torch.tensor([1e-6]))
        >>> [round(v, 4) for v in solution.x[0].tolist()], int(solution.evaluations) < 10
        ([0.5263, 0.5263], True)
    """
    if method not in METHODS or memory < 1 or max_evaluations < 1:
        raise InputError(
            f"solve_fixed_point(method={method!r}, memory={memory}, max_evaluations={max_evaluations}) is not possible."
        )
    rows = torch.arange(len(y), device=y.device)
    first = _Start(y, y if start is None else start)
    if first.reaches(g, target, rows, max_evaluations, expect=expect):
        return first.found()
    state = _State(y, memory if method == "anderson" else 0)
    state.proposal = y if start is None else start
    enough = target if enough is None else enough
    for k in range(max_evaluations):
        known = k < len(first.residuals)  # samples that are not done yet have taken the same plain steps
        r = first.residuals[k][rows] if known else y[rows] - state.proposal - g(state.proposal, rows)
        state.step(r, target[rows], enough[rows], rows)
        going = state.going
        if not bool(going.all()):
            rows = rows[going]
            state.keep(going)
        if not len(rows):
            break
    return FixedPoint(state.best, state.best_residual, state.evaluations)


class _Start:
    """Plain steps for all samples and without any bookkeeping, which on a device takes longer than a small g: a few of them, and more as
    long as they are fast.
    """

    def __init__(self, y: Tensor, start: Tensor) -> None:
        self.y, self.start, self.best = y, start, y
        self.residuals: list[Tensor] = []
        self.sizes: list[Tensor] = []
        self.under_way: list[Tensor] = []

    def reaches(
        self, g: Callable[[Tensor, Tensor], Tensor], target: Tensor, rows: Tensor, steps: int, *, expect: bool
    ) -> bool:
        """Whether all samples reach their target; the whole batch is looked at once for each evaluation."""
        x, least, done = self.start, None, torch.zeros_like(target, dtype=torch.bool)
        for k in range(steps):
            r = self.y - x - g(x, rows)
            size = norms(r)
            x = x + r
            better = size if least is None else torch.minimum(size, least)
            wide = (size <= better).view(-1, *[1] * (x.ndim - 1))
            self.best = x if least is None else torch.where(wide, x, self.best)
            least = better
            reached = least <= target
            ratio = size / self.sizes[-1] if k else torch.full_like(size, torch.inf)
            done = done | reached | (2 * size * ratio <= target) if expect else reached
            self.residuals.append(r)
            self.sizes.append(size)
            self.under_way.append(~done)
            if bool(done.all()):
                return True
            if k >= WARM_UP and not bool((reached | (ratio < FAST)).all()):
                return False
        return False

    def found(self) -> FixedPoint:
        """The solution, if all have reached it."""
        return FixedPoint(self.best, torch.stack(self.sizes).amin(0), torch.stack(self.under_way).sum(0) + 1)


_ACTIVE = (
    "proposal", "x", "r", "size", "accelerated", "plain_ratio", "start", "stalled", "count", "dx", "dr", "going",
)  # fmt: skip


class _State:
    """The iterates of the samples that are still under way, and the best of all."""

    def __init__(self, y: Tensor, memory: int) -> None:
        self.memory = memory
        self.best = y.clone()
        # Sizes are float64 whatever the dtype of y: the norm of a float16 residual can be beyond float16.
        self.best_residual = torch.full(y.shape[:1], torch.inf, dtype=torch.float64, device=y.device)
        self.evaluations = torch.zeros(len(y), dtype=torch.long, device=y.device)
        self.proposal = y  # where g is evaluated next
        # Per active sample: the accepted point and residual, histories, and what plain iteration achieved.
        self.x = self.r = y
        self.size = self.best_residual.clone()
        self.accelerated = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        self.plain_ratio = torch.full_like(self.size, 0.05)
        self.start = self.size
        self.stalled = torch.zeros(len(y), dtype=torch.long, device=y.device)
        self.count = torch.zeros(len(y), dtype=torch.long, device=y.device)
        flat = y.flatten(1).shape[1]
        self.dx = torch.zeros(len(y), memory, flat, dtype=torch.float64, device=y.device)
        self.dr = torch.zeros_like(self.dx)
        self.going = torch.ones(len(y), dtype=torch.bool, device=y.device)

    def keep(self, mask: Tensor) -> None:
        for name in _ACTIVE:
            setattr(self, name, getattr(self, name)[mask])

    def step(self, r: Tensor, target: Tensor, enough: Tensor, rows: Tensor) -> None:
        """Take in the residual at the proposal and make the next one."""
        size = norms(r)
        self.evaluations[rows] += 1
        better = size < self.best_residual[rows]
        self.best[rows[better]] = (self.proposal + r)[better]
        self.best_residual[rows] = torch.minimum(size, self.best_residual[rows])
        self.stalled = torch.where(better, 0, self.stalled + 1)

        first = torch.isinf(self.size)
        self.start = torch.where(first, size, self.start)
        ratio = size / self.size
        observed = ~self.accelerated & ~first & (ratio < 1)
        self.plain_ratio = torch.where(observed, ratio.clamp(0.05, 0.9999), self.plain_ratio)

        rejected = self.accelerated & ~(ratio < GROWTH)
        accepted = ~rejected
        if self.memory:
            self._remember(r, accepted & ~first)
            self.count = torch.where(
                rejected, 0, torch.where(first, self.count, (self.count + 1).clamp_max(self.memory))
            )
        wide = accepted.view(-1, *[1] * (r.ndim - 1))
        self.x, self.r = torch.where(wide, self.proposal, self.x), torch.where(wide, r, self.r)
        self.size = torch.where(accepted, size, self.size)

        self.proposal = self.x + self.r
        if self.memory:
            # How many evaluations behind plain iteration at the rate it was last seen to have.
            plain_steps = (self.start / self.size).log() / -self.plain_ratio.log()
            behind = (self.evaluations[rows] - 1) - plain_steps
            slow = (self.plain_ratio > FAST) & (self.count >= WARM_UP)
            use = accepted & slow & (behind < 1.5)
            if bool(use.any()):
                self.proposal = torch.where(use.view_as(wide), self._mix(), self.proposal)
            self.accelerated = use
        # Ten evaluations without a better residual, or two where it will do: rounding is all that is left.
        left = self.best_residual[rows]
        self.going = (left > target) & (self.stalled < torch.where(left > enough, 10, 2))

    def _remember(self, r: Tensor, mask: Tensor) -> None:
        dx = (self.proposal - self.x).flatten(1).double()
        dr = (r - self.r).flatten(1).double()
        for store, new in ((self.dx, dx), (self.dr, dr)):
            shifted = torch.cat((store[:, 1:], new[:, None]), 1)
            store.copy_(torch.where(mask[:, None, None], shifted, store))

    def _mix(self) -> Tensor:
        """The step from the combination of the last residuals that is smallest; the newest entries stand last."""
        slots = torch.arange(self.memory, device=self.count.device)
        used = (slots >= self.memory - self.count[:, None]).double()
        dr, dx = self.dr * used[..., None], self.dx * used[..., None]
        residual = self.r.flatten(1).double()
        # The weights do not depend on the unit, and in this one no square overflows or underflows.
        unit = dr.abs().amax((1, 2)).clamp_min(torch.finfo(dr.dtype).tiny)
        unit_dr = dr / unit[:, None, None]
        gram = unit_dr @ unit_dr.mT
        scale = gram.diagonal(dim1=1, dim2=2).amax(1).clamp_min(torch.finfo(dr.dtype).tiny)
        ridge = (1e-14 * scale)[:, None, None] * torch.eye(self.memory, dtype=gram.dtype, device=gram.device)
        idle = torch.diag_embed((1 - used) * scale[:, None])
        weights = _linalg.solve_ex(gram + ridge + idle, unit_dr @ (residual / unit[:, None])[..., None])[0]
        move = residual - ((dx + dr).mT @ weights)[..., 0]
        return (self.x.flatten(1).double() + move).to(self.x.dtype).view_as(self.x)
