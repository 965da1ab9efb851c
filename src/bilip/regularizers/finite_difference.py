"""Bi-directional finite differences: neither the map nor its inverse may stretch a small step much."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bilip._torch import capturing
from bilip.blocks import ActNorm, Bijection
from bilip.data import seed_of
from bilip.errors import InputError
from bilip.nets.replay import Seeds, draws_numbers
from bilip.regularizers.penalty import Latent, Penalty
from bilip.reversible.fingerprint import scales
from bilip.reversible.function import hold

__all__ = ["FiniteDifference"]

MODES = ("both", "forward", "inverse")
SCALINGS = ("clean", "original")
SLACK = 10.0  # drift d turns the gradient over a relative step s by about 0.15 d / s in a planted model: 5e-4 rad in float32
BACK = 2.3  # the same for the inverse, which turns faster: with 10, one of 10,000 random models was 1.2e-3 rad off


class FiniteDifference(Penalty):
    r"""The paper's penalty on how much F and its inverse stretch a small step.

    With `scaling="clean"`, the paper's formula: unit directions $v, v'$, one for each sample, and the mean over the batch of

    $$\frac{1}{\varepsilon} |F(x) - F(x + \varepsilon v)| + \frac{1}{\varepsilon} |x - F^{-1}(F(x) + \varepsilon v')|,$$

    which is about $(|J_F|_F + |J_{F^{-1}}|_F) / \sqrt{d}$. Its weight means the same for every batch size and dimension.

    With `scaling="original"`, what the paper's code computes, so that the paper's coefficients mean the same: $V \sim N(0, I)$ of shape
    (batch, d), each *column* divided by its norm, and

    $$\frac{1}{\varepsilon} |F(x) - F(x + \varepsilon V)|_F^2 + \frac{1}{\varepsilon} |x - F^{-1}(F(x) + \varepsilon V')|_F^2$$

    over the whole batch; about $\varepsilon$ times the mean of $|J_F|_F^2 + |J_{F^{-1}}|_F^2$.

    As $F^{-1}(F(x)) = x$, only the perturbed latents go through the inverse. Gradients flow through all of it, nothing is detached. Without
    `latent`, x and its neighbours go through F as one batch; where a net draws numbers (dropout) or looks at the batch (BatchNorm), in
    passes of their own that see the same random numbers and leave running statistics alone. With a `bilip.Reversible` memory
    stays flat in depth.

    Samples for which the network gives NaN or Inf are left out and counted: `seen`, `skipped`.

    Args:
        weight: Factor; docs/regularizers.md has working values for each scaling.
        every: Steps from one penalty to the next; not made up for by a factor.
        mode: `"both"` directions, `"forward"` or `"inverse"`.
        eps: Length of a step.
        scaling: `"clean"` or `"original"`.
        fraction: Share of the batch, drawn anew in each step: an alternative to `every`.
        seed: Directions and rows are a function of seed, step and device alone. A captured step draws from the device's own generator.

    Example:
        >>> from bilip.models import real_nvp
        >>> _ = torch.manual_seed(0)
        >>> model, x = real_nvp(4, blocks=6), torch.randn(32, 4)
        >>> penalty = FiniteDifference(weight=0.3, every=10)
        >>> z, log_det = model.forward_and_log_det(x)
        >>> loss = z.square().mean() + penalty(model, x, latent=(z, log_det), step=0)
        >>> loss.backward()
        >>> float(penalty(model, x, step=1)), penalty.seen, penalty.skipped
        (0.0, 32, 0)
    """

    uses_log_det = False

    def __init__(
        self,
        weight: float,
        every: int = 1,
        *,
        mode: str = "both",
        eps: float = 0.1,
        scaling: str = "clean",
        fraction: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(weight, every)
        for name, value, known in (("mode", mode, MODES), ("scaling", scaling, SCALINGS)):
            if value not in known:
                raise InputError(f"FiniteDifference({name}={value!r}): expected one of {', '.join(map(repr, known))}.")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise InputError(f"FiniteDifference(seed={seed!r}): expected a whole number.")
        self.eps = self._number("eps", eps, least=0.0, open_end=True)
        self.fraction = self._number("fraction", fraction, least=0.0, open_end=True, most=1.0)
        self.mode, self.scaling, self.seed = mode, scaling, seed

    def value(self, model: Bijection, x: Tensor, latent: Latent | None, step: int, context: Tensor | None) -> Tensor:
        generator = self._generator(x, step)
        count = max(1, round(self.fraction * len(x)))
        if count < len(x):
            rows = torch.randperm(len(x), generator=generator, device=x.device)[:count]
            x, context = x[rows], None if context is None else context[rows]
            latent = None if latent is None else (latent[0][rows], None)
        size = math.prod(x.shape[1:])
        v, w = torch.randn(2, count, size, generator=generator, device=x.device, dtype=x.dtype)
        v, w = self._scaled(v), self._scaled(w)
        z = None if latent is None else latent[0]

        def terms(points: Tensor, given: Tensor | None, v: Tensor, w: Tensor) -> Tensor:
            # A row that is not finite stays in the task's graph: without it the clean pass is run again.
            return self._terms(model, points, given, z if points is x else None, v, w)

        found = self._finite_only(terms, x, context, v, w)
        if not len(found):
            return x.new_zeros(())
        return found.mean() if self.scaling == "clean" else found.sum()

    def _generator(self, x: Tensor, step: int) -> torch.Generator | None:
        if capturing(x):
            return None
        return torch.Generator(device=x.device).manual_seed(seed_of(self.seed, step, "finite difference"))

    def _scaled(self, v: Tensor) -> Tensor:
        """A step for each sample, length eps in the clean scaling."""
        return v * (self.eps / torch.linalg.vector_norm(v, dim=1 if self.scaling == "clean" else 0, keepdim=True))

    def _terms(self, model: Bijection, x: Tensor, context: Tensor | None, z: Tensor | None, v: Tensor, w: Tensor):
        """What each sample adds, shape `(batch,)`."""
        run = _Passes(model, x)
        near = x + v.view_as(x) if self.mode != "inverse" else None
        z, z_near = run.forward(x, near, context, z)
        total = x.new_zeros(len(x))
        if z_near is not None:
            total = total + self._held(z - z_near, v, x)
        if self.mode != "forward":
            back, back_near = run.inverse(x, z, z + w.view_as(z), context)
            total = total + self._held(back - back_near, w, z, BACK)
        return total

    def _held(self, difference: Tensor, step: Tensor, start: Tensor, slack: float = SLACK) -> Tensor:
        """The term of a difference. The gradients of its two sides nearly cancel, the more so the smaller the step is beside the spread of
        where it starts: memory-saving walks are held to so much less drift.
        """
        with torch.no_grad():
            flat = start.detach().flatten(1)
            relative = (step.double() / scales(flat)).square().sum(1).mean().sqrt()
            share = torch.nan_to_num(relative, 0.0).mul(slack).clamp_max(1.0)
        hold(difference, share if capturing(start) else float(share))
        return self._term(difference)

    def _term(self, difference: Tensor) -> Tensor:
        if self.scaling == "original":
            return difference.flatten(1).square().sum(1) / self.eps
        return torch.linalg.vector_norm(difference.flatten(1), dim=1) / self.eps

    def __repr__(self) -> str:
        return (
            f"FiniteDifference(weight={self.weight:g}, every={self.every}, mode={self.mode!r}, eps={self.eps:g}, "
            f"scaling={self.scaling!r}, fraction={self.fraction:g}, seed={self.seed})"
        )


class _Passes:
    """The passes of one penalty, so that they differ in their input alone."""

    def __init__(self, model: Bijection, x: Tensor) -> None:
        self.model, self.seeds = model, Seeds(x)
        self.draws = draws_numbers(model)
        if self.draws:
            self.seeds.remember(0)
        self.norms = [part for part in model.modules() if _looks_at_batch(part)]

    def forward(
        self, x: Tensor, near: Tensor | None, context: Tensor | None, z: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """F(x), unless it is known, and F(near)."""
        if z is not None and not (self.draws and near is not None):
            return z, None if near is None else self._run(self.model, near, context)
        if near is None:
            return self._run(self.model, x, context), None
        if self.draws or self.norms:  # which random numbers the task's pass has seen is not known: x once more
            return self._run(self.model, x, context), self._run(self.model, near, context)
        both = self._run(self.model, torch.cat((x, near)), None if context is None else torch.cat((context, context)))
        return both[: len(x)], both[len(x) :]

    def inverse(self, x: Tensor, z: Tensor, near: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """F^-1(z), which is x unless a net draws numbers, and F^-1(near)."""
        back = self._run(self.model.inverse, z, context) if self.draws else x
        return back, self._run(self.model.inverse, near, context)

    def _run(self, call: Callable[..., Tensor], x: Tensor, context: Tensor | None) -> Tensor:
        with self.seeds.again(0), _kept_statistics(self.norms):
            return call(x, context)


def _looks_at_batch(part: nn.Module) -> bool:
    """Whether the answer for one sample depends on the others of its batch."""
    if isinstance(part, ActNorm):
        return part.training and not part.ready
    return isinstance(part, nn.modules.batchnorm._NormBase) and (part.training or not part.track_running_stats)


@contextlib.contextmanager
def _kept_statistics(norms: list[nn.Module]) -> Iterator[None]:
    """Running statistics as they were. Switching the update off instead would not last until a `Reversible` runs backward."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    kept = [
        (value, value.clone())
        for norm in norms
        if not isinstance(norm, ActNorm)
        for value in (getattr(norm, name, None) for name in names)
        if value is not None
    ]
    yield
    for value, before in kept:
        value.data.copy_(before)  # past autograd: in training mode the backward pass does not read them
