"""The invertible residual block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bilip._torch import capturing, half_digits, is_transformed
from bilip.blocks._nets import call, require_module, require_shape, takes_context
from bilip.blocks.bijection import Bijection
from bilip.blocks.fixed_point import solve_fixed_point
from bilip.blocks.layer_stack import LayerStack, stack_of
from bilip.blocks.log_det import Exact, Roulette, Series
from bilip.bounds import EPS, Box, exp_up, log_norm, log_of, log_product, norms, shares
from bilip.errors import InputError, NotAContraction, NotConverged
from bilip.nets import certify
from bilip.nets.layers import Declared
from bilip.nets.replay import Seeds, as_recorded, hooks_wait, modes_again
from bilip.nets.spectral import again, held_layers, held_now, held_together, pinned

__all__ = ["Residual", "Solution", "inverting"]


@dataclass(frozen=True)
class Solution:
    r"""An inverse with its error, sample by sample.

    Attributes:
        x: The inverse.
        residual: $|y - x - g(x)|$, computed in float64 with the weights as they act.
        error_bound: $(\text{residual} + \text{rounding}) / (1 - c)$, with a bound on the rounding of the residual:
            the true inverse is no farther than this from `x`. It holds for any `x`, however it was found, because
            $|F(x) - F(x^*)| \ge (1 - c)\,|x - x^*|$; `inf` where nothing is known.
        tolerance: What was asked for.
        evaluations: Evaluations of g.
    """

    x: Tensor
    residual: Tensor
    error_bound: Tensor
    tolerance: Tensor
    evaluations: Tensor

    @property
    def converged(self) -> Tensor:
        """Whether the stated error is finite and within the tolerance."""
        return torch.isfinite(self.error_bound) & (self.error_bound <= self.tolerance)


class Residual(Bijection):
    r"""$F(x) = x + g(x)$ with $\mathrm{Lip}(g) \le c < 1$, certified; $\mathrm{Lip}(F) \le 1 + c$ and $\mathrm{Lip}(F^{-1}) \le 1/(1 - c)$.

    The inverse is found by accelerated fixed-point iteration to a tolerance and comes with a bound on its error
    (`solve`). Its gradient is that of the exact inverse, by the implicit function theorem, at a memory cost that does
    not depend on the number of iterations; `unrolled_inverse` differentiates a fixed number of plain iterations
    instead.

    References: Behrmann et al., *Invertible Residual Networks*, 2019; Chen et al., *Residual Flows*, 2019.

    Args:
        g: The residual branch: a net of held layers (`nets.MLP(..., lipschitz=0.9)`), or any net certified or
            declared below 1.
        tolerance: Largest distance from the exact inverse; by default what the dtype can give,
            $16\,\epsilon\,(1 + |y|)/(1 - c)$ for each sample, or more where x is larger or g loses more to rounding, at most half
            of the digits.
        log_det: `Exact()`, `Series(...)` or `Roulette(...)`; by default exact up to 64 dimensions, beyond that
            Russian roulette in training mode and 20 terms in evaluation mode.
        max_evaluations: When to give up.
        recompute: Evaluate g again in the backward pass of `forward_and_log_det` with an estimated log-determinant, instead of keeping
            its activations: memory for a few tensors of the size of x, at the cost of one more evaluation.

    Example:
        >>> from bilip.nets import MLP
        >>> block = Residual(MLP(2, 2, lipschitz=0.9)).eval()
        >>> solution = block.solve(torch.randn(5, 2), tolerance=1e-5)
        >>> bool(solution.converged.all())
        True
        >>> block.bounds().inverse <= 1 / (1 - 0.9) + 1e-6
        True
    """

    closed_form = False
    recompute = False
    _solutions: list[Solution] | None = None  # where to note what `inverse` has found

    def __init__(
        self,
        g: nn.Module,
        *,
        tolerance: float | None = None,
        log_det: Exact | Series | Roulette | None = None,
        max_evaluations: int = 1000,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.g = require_module("Residual", "g", g)
        if tolerance is not None and not 0 < tolerance < math.inf:
            raise InputError(f"Residual(tolerance={tolerance}): expected a positive number.")
        self.tolerance, self.estimator, self.max_evaluations = tolerance, log_det, max_evaluations
        self._context = takes_context(g)
        self.contraction()

    def contraction(self) -> float:
        """c, from the coefficients of held layers where all are held, otherwise from the norms of the present weights."""
        cap = certify.log_cap(self.g)
        log = certify.log_lipschitz(self.g) if cap is None else cap
        if not log < -1e-9:
            raise NotAContraction(
                f"Residual: Lip(g) is certified only as {math.exp(min(log, 700)):.6g}, but x + g(x) is invertible for a constant "
                "below 1. Build g from held layers, for example bilip.nets.MLP(..., lipschitz=0.9), or declare a smaller constant."
            )
        return exp_up(log)

    def branch(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """g(x)."""
        value = call(self.g, x, context, self._context)
        require_shape("Residual", "g(x)", value, x)
        return value

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return x + self.branch(self.check_net(x, self.g), context)

    def log_det(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Log det J_F(x), by the estimator of this block."""
        return self.forward_and_log_det(x, context)[1]

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        estimator = self.estimator
        if estimator is None:
            estimator = Exact() if math.prod(x.shape[1:]) <= 64 else Roulette() if self.training else Series(20)
        x = self.check_net(x, self.g)
        anew = torch.is_grad_enabled() and not is_transformed()  # elsewhere held layers look into their caches
        with held_together(held_layers(self.g) if anew else ()):
            g, log_det = estimator.with_value(_Branch(self, x, context), x)
        return x + g, log_det

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.inverse(z, context)
        return x, -self.log_det(x, context)

    # ---- the inverse

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        """F^-1(z) to the tolerance of this block; raises `NotConverged` for samples that miss it."""
        solution = self.solve(z, context)
        if self._solutions is not None:
            self._solutions.append(solution)
        if not bool(solution.converged.all()):
            bad = (~solution.converged).nonzero().squeeze(1)
            worst = int(bad[torch.argmax(solution.error_bound[bad])])
            raise NotConverged(
                f"Residual: {len(bad)} of {len(z)} inverses missed their tolerance; worst is sample {worst}, residual "
                f"{float(solution.residual[worst]):.3g}, error at most {float(solution.error_bound[worst]):.3g}, asked for "
                f"{float(solution.tolerance[worst]):.3g} ({z.dtype}, {int(solution.evaluations[worst])} evaluations). "
                "Ask for a larger tolerance, use float64, or take solve() and its flags.",
                solution,
            )
        wanted = torch.is_grad_enabled() and (
            z.requires_grad
            or any(p.requires_grad for p in self.g.parameters())
            or (context is not None and context.requires_grad)
        )
        if not wanted:
            return solution.x
        named = {name: p for name, p in self.g.named_parameters() if p.requires_grad}
        extra = [] if context is None else [context]
        return _ImplicitInverse.apply(self, solution.x, tuple(named), z, *extra, *named.values())  # type: ignore[return-value]

    @torch.no_grad()
    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        method: str = "anderson",
        memory: int = 5,
    ) -> Solution:
        """F^-1(z) with its error bound and status for each sample; nothing is raised for samples that miss the tolerance."""
        with as_recorded(), certify.remembering():  # the constant and the certificate read the same layers
            return self._solve(z, context, tolerance, method=method, memory=memory)

    def _solve(self, z: Tensor, context: Tensor | None, tolerance: float | None, **options: Any) -> Solution:
        z = self.check_net(z, self.g).detach()
        c, eps = self.contraction(), torch.finfo(z.dtype).eps
        tolerance = self.tolerance if tolerance is None else tolerance
        if tolerance is not None and not 0 < tolerance < math.inf:
            raise InputError(f"solve(tolerance={tolerance}): expected a positive number.")
        last = norms(z.double() * eps)  # what the last digits of z amount to: it is finite for every finite z
        asked = 16 * (eps + last) / (1 - c) if tolerance is None else torch.full_like(last, tolerance)
        if tolerance is not None and bool((torch.isfinite(last) & (asked < last / 4)).any()):
            worst = int(torch.where(torch.isfinite(last), last, 0.0).argmax())
            raise InputError(
                f"solve(tolerance={tolerance:g}) is below what {z.dtype} can give: a vector of length "
                f"{float(norms(z)[worst]):.3g} is itself only stored to about {float(last[worst]) / 4:.1g}. Ask for more than "
                "that, or use float64."
            )

        def g(x: Tensor, rows: Tensor) -> Tensor:
            return self.branch(x, None if context is None else context[rows])

        enough = asked * (1 - c) / 2
        target = enough / 4 if tolerance is None else enough  # errors add up over many blocks: no more than rounding
        options["max_evaluations"] = self.max_evaluations
        with again(pinned(self.g)):
            found = solve_fixed_point(g, z, target, enough=enough, expect=tolerance is not None, **options)
            x, evaluations = found.x, found.evaluations
            residual, rounding = self._residual(x, z, context)
            missed = (found.residual > target) & ~((residual + rounding) / (1 - c) * (1 + 8 * EPS) <= asked)
            if tolerance is not None and bool(missed.any()):  # what was expected has not come true
                left = missed.nonzero().squeeze(1)
                options |= {"enough": enough[left], "start": x[left]}
                more = solve_fixed_point(lambda x, rows: g(x, left[rows]), z[left], target[left], **options)
                x = x.index_copy(0, left, more.x)
                evaluations = evaluations.index_add(0, left, more.evaluations)
                anew = self._residual(more.x, z[left], None if context is None else context[left])
                residual, rounding = residual.index_copy(0, left, anew[0]), rounding.index_copy(0, left, anew[1])
            bound = ((residual + rounding) / (1 - c) * (1 + 8 * EPS)).nan_to_num(torch.inf, torch.inf)
            if tolerance is None:
                asked = asked + 2 * rounding / (1 - c)
                left = (bound > asked).nonzero().squeeze(1)
                if len(left):  # g may lose more to rounding than the last digits of z, and x have larger ones
                    digits = eps + last[left] + norms(x[left].double() * eps)
                    lost = 8 * (digits + self._evaluation_error(x[left], None if context is None else context[left]))
                    lost = torch.minimum(lost, digits / half_digits(z.dtype)).nan_to_num(0.0)
                    asked = asked.index_add(0, left, lost / (1 - c))
        return Solution(x, residual, bound, asked, evaluations)

    def _evaluation_error(self, x: Tensor, context: Tensor | None) -> Tensor:
        """How far g, evaluated as in the iteration, is from its value in float64."""
        value, _ = certify.point_image(self.g, x, context if self._context else None)
        return norms(self.branch(x, context).double() - value)

    def _residual(self, x: Tensor, z: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """|z - x - g(x)| in float64, whatever the dtype of the model, and a bound on the rounding in it."""
        value, error = certify.point_image(self.g, x, context if self._context else None)
        parts = (z.double(), x.double(), value)
        # The small factor goes inside: a norm may be beyond float64 where what rounding makes of it is not.
        error = error + shares(4 * EPS, torch.cat(parts)).view(3, -1).sum(0) + 1e-300
        return norms(parts[0] - parts[1] - parts[2]), error.nan_to_num(torch.inf, torch.inf)

    def unrolled_inverse(self, z: Tensor, steps: int, context: Tensor | None = None) -> Tensor:
        """`steps` plain iterations x <- z - g(x) from x = z, differentiated by plain autograd."""
        if steps < 1:
            raise InputError(f"unrolled_inverse(steps={steps}): expected 1 or more.")
        x = self.check_net(z, self.g)
        for _ in range(steps):
            x = z - self.branch(x, context)
        return x

    # ---- proofs

    def _log_c(self, box: Box) -> float:
        cap = certify.log_cap(self.g)
        log = certify.log_lipschitz(self.g, box.shape or None)
        return log if cap is None else min(log, cap)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return log_of((1 + exp_up(self._log_c(box))) * (1 + EPS))

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        c = exp_up(self._log_c(box))
        return log_of(1 / (1 - c) * (1 + 4 * EPS)) if c < 1 else math.inf

    def interval(self, box: Box, context: Box | None = None) -> Box:
        g = certify.ball_and_interval(self.g, box, context if self._context else None)
        return Box.outward(box.low + g.low, box.high + g.high)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        r"""$x = y - g(x)$, and $|g(x)| \le (|g(y_0)| + c\,|y - y_0|)/(1 - c)$ starts a box that $y - g(\cdot)$ then shrinks."""
        if not box.is_bounded:
            return Box.everything(box.shape)
        log_c = self._log_c(box)
        c, log_move = exp_up(log_c), log_product(log_c, box.log_radius)
        if c >= 1 or log_move > 700:
            return Box.everything(box.shape)
        given = context if self._context else None
        at_center = certify.enclose(self.g, Box.point(box.center), given)
        if not at_center.is_bounded:
            return Box.everything(box.shape)
        value = exp_up(log_norm(torch.maximum(at_center.low.abs(), at_center.high.abs())))
        reach = (value + exp_up(log_move)) / (1 - c) * (1 + 1e-12)
        found = Box.outward(box.low - reach, box.high + reach)
        for _ in range(8):
            g = certify.ball_and_interval(self.g, found, given)
            found = found.intersect(Box.outward(box.low - g.high, box.high - g.low))
        return found


@contextlib.contextmanager
def inverting(model: nn.Module, *, tolerance: float) -> Iterator[list[Solution]]:
    """Inside, every residual block of a model inverts to this tolerance, and the list holds what each solve has stated.

    A looser tolerance takes fewer evaluations. Each block is certified as ever: its inverse is no farther than `error_bound` from the
    exact inverse of what it was given, or `NotConverged` is raised. How far the inverse of a whole chain is off is not
    certified by that, as the blocks after may magnify it; measure it with a round trip.

    Args:
        model: A chain, a flow, or any module with `Residual` blocks.
        tolerance: Largest distance from the exact inverse, for each sample and block.

    Example:
        >>> from bilip import models
        >>> flow = models.residual_flow(2, blocks=3, hidden=(16,)).eval()
        >>> with torch.no_grad(), inverting(flow, tolerance=1e-2) as solutions:
        ...     x = flow.inverse(torch.randn(5, 2))
        >>> len(solutions), max(float(solution.error_bound.max()) for solution in solutions) <= 1e-2
        (3, True)
    """
    if not 0 < tolerance < math.inf:
        raise InputError(f"inverting(tolerance={tolerance}): expected a positive number.")
    found: list[Solution] = []
    parts = [(part, part.tolerance, part._solutions) for part in model.modules() if isinstance(part, Residual)]
    if not parts:
        raise InputError(f"inverting: {type(model).__name__} has no Residual block, so there is nothing to solve.")
    try:
        for part, _, _ in parts:
            part.tolerance, part._solutions = tolerance, found
        yield found
    finally:
        for part, before, solutions in parts:
            part.tolerance, part._solutions = before, solutions


class _Branch:
    """g of a block as it is in one pass, for a log-determinant.

    The backward pass may come when the block has other tensors (`torch.func.functional_call`), other certificates, another mode, and
    torch another random state; what is evaluated `again` is what was, and moves no buffer on.
    """

    def __init__(self, block: Residual, x: Tensor, context: Tensor | None) -> None:
        self.block, self.context = block, context
        self.tensors = {**dict(block.g.named_parameters()), **dict(block.g.named_buffers())}
        self.held = held_now(block.g)
        self.draws = any(isinstance(part, (Declared, nn.modules.dropout._DropoutNd)) for part in block.g.modules())
        self.seeds = Seeds(x)
        self.modes = [(part, part.training) for part in block.g.modules()]
        self.before: dict[str, Tensor] = {}  # buffers of nets that may move them, as they were
        self.recompute = block.recompute and not (self.draws and capturing(x))

    @property
    def inputs(self) -> list[Tensor]:
        """What gradients go to besides x."""
        return [*self.tensors.values(), *(() if self.context is None else (self.context,))]

    def stack(self, x: Tensor) -> LayerStack | None:
        """The net as a stack of layers and activations, where it is one and nobody watches or changes what its parts do."""
        block = self.block
        if is_transformed() or torch.is_autocast_enabled(x.device.type) or block._context:
            return None
        if type(block).branch is not Residual.branch or "branch" in vars(block):
            return None
        return stack_of(block.g, x)

    def __call__(self, x: Tensor) -> Tensor:
        if self.draws and not capturing(x):
            self.seeds.remember(0)
            self.before = {name: buffer.detach().clone() for name, buffer in self.block.g.named_buffers()}
        return self.block.branch(x, self.context)

    def again(self, x: Tensor) -> Tensor:
        """The same function in a backward pass."""
        g, now = self.block.g, {**dict(self.block.g.named_parameters()), **dict(self.block.g.named_buffers())}
        with again(self.held), modes_again(self.modes), self.seeds.again(0), as_recorded():
            if not self.before and all(tensor is now.get(name) for name, tensor in self.tensors.items()):
                return self.block.branch(x, self.context)
            tensors = {**self.tensors, **{name: buffer.clone() for name, buffer in self.before.items()}}
            given = (x, self.context) if self.context is not None and self.block._context else (x,)
            return torch.func.functional_call(g, tensors, given)


class _ImplicitInverse(torch.autograd.Function):
    r"""The gradient of $x = F^{-1}(y)$.

    With $u$ from $u + J_g^\top u = \partial L/\partial x$ it is $\partial L/\partial y = u$ for the right-hand side, and
    $-u^\top \partial_\theta g$ for the parameters.
    """

    @staticmethod
    def forward(ctx, block: Residual, x: Tensor, names: tuple[str, ...], y: Tensor, *others: Tensor) -> Tensor:
        ctx.block, ctx.names = block, names
        ctx.held, ctx.modes = held_now(block.g), [(part, part.training) for part in block.g.modules()]
        ctx.save_for_backward(x, *others)
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *others = ctx.saved_tensors
        (grad,) = grads
        block: Residual = ctx.block
        context = others[0] if len(others) > len(ctx.names) else None
        # The parameters of the forward pass, which torch.func.functional_call may have lent to the block.
        parameters = dict(zip(ctx.names, others[len(others) - len(ctx.names) :], strict=True))
        with torch.enable_grad(), again(ctx.held), modes_again(ctx.modes), as_recorded():
            inner = x.detach().requires_grad_()
            given = (inner, context) if context is not None and block._context else (inner,)
            value = torch.func.functional_call(block.g, parameters, given)

        def vjp(u: Tensor, rows: Tensor) -> Tensor:
            whole = torch.zeros_like(value).index_copy(0, rows, u)
            return torch.autograd.grad(value, inner, whole, retain_graph=True)[0][rows]

        target = norms(4 * torch.finfo(grad.dtype).eps * grad.double())
        u = solve_fixed_point(vjp, grad, target, max_evaluations=block.max_evaluations).x
        wanted = [other for other in others if other.requires_grad]
        with hooks_wait(wanted):
            found = torch.autograd.grad(value, wanted, -u, allow_unused=True) if wanted else ()
        results = iter(found)
        return (None, None, None, u, *(next(results) if other.requires_grad else None for other in others))
