"""The neural ODE block."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from bilip._torch import can_be_read, is_transformed
from bilip.blocks._nets import require_module, require_shape, takes_context
from bilip.blocks.bijection import Directed
from bilip.blocks.log_det import probes
from bilip.bounds import Box, exp_up, log_norm, log_of, log_product
from bilip.errors import BilipError, InputError, SolverFailed, UnknownLipschitz, need
from bilip.nets import certify
from bilip.nets.spectral import again, held_layers, held_now, held_together

__all__ = ["NeuralODE"]


class NeuralODE(Directed):
    r"""$F(x) = x(T)$ for $\dot x = f(x, t)$, $x(0) = x$; the inverse integrates back.

    Both constants of the *exact* flow are at most $e^{\mathrm{Lip}(f)\,T}$. What a solver computes differs from the
    exact flow by its discretisation error, about which the bound says nothing; `discretisation_error` measures it.

    References: Chen et al., *Neural Ordinary Differential Equations*, 2018; Grathwohl et al., *FFJORD*, 2019.

    Args:
        f: The vector field, a net on x, or on x with the time as context (`nets.MLP(2, 2, context=1)`).
        time: The time T.
        trace: `"exact"`, or `"hutchinson"` with one random-sign probe for each call.
        method: A solver of torchdiffeq.
        rtol: Relative tolerance of adaptive solvers.
        atol: Absolute tolerance of adaptive solvers.
        options: Further solver options, for example `{"step_size": 0.1}` for fixed-step methods.
        adjoint: Compute gradients by the adjoint equation, at constant memory and with an error of its own.

    Example:
        >>> from bilip.nets import MLP
        >>> block = NeuralODE(MLP(2, 2, context=1, activation="tanh", lipschitz=1.0), rtol=1e-6, atol=1e-6)
        >>> x = torch.randn(5, 2)
        >>> bool(torch.allclose(block.inverse(block(x)), x, atol=1e-4))
        True
        >>> block.bounds().inverse <= math.e
        True
    """

    closed_form = False

    def __init__(
        self,
        f: nn.Module,
        *,
        time: float = 1.0,
        trace: str = "exact",
        method: str = "dopri5",
        rtol: float = 1e-5,
        atol: float = 1e-5,
        options: dict[str, Any] | None = None,
        adjoint: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < time < math.inf or trace not in ("exact", "hutchinson") or min(rtol, atol) <= 0:
            raise InputError(
                f"NeuralODE(time={time}, trace={trace!r}, rtol={rtol}, atol={atol}): expected a positive time, trace 'exact' or "
                "'hutchinson', and positive tolerances."
            )
        self.f = require_module("NeuralODE", "f", f)
        self.time, self.trace, self.method, self.rtol, self.atol = float(time), trace, method, rtol, atol
        self.options, self.adjoint = options, adjoint
        self._timed = takes_context(f)

    def field(self, t: Tensor, x: Tensor, context: Tensor | None = None) -> Tensor:
        """f(x, t)."""
        if not self._timed:
            value = self.f(x)
        else:
            clock = t.to(x).expand(x.shape[0], 1, *x.shape[2:]) if x.ndim > 2 else t.to(x).expand(x.shape[0], 1)
            value = self.f(x, clock if context is None else torch.cat((clock, context), 1))
        require_shape("NeuralODE", "f(x, t)", value, x)
        return value

    def _integrate(self, state: Any, field: Any, backward: bool) -> Any:
        with torch.inference_mode(False):  # the import makes its tables of coefficients, which gradients need later
            torchdiffeq = need("torchdiffeq", "the neural ODE block", "ode")
        like = state[0] if isinstance(state, tuple) else state
        ends = [self.time, 0.0] if backward else [0.0, self.time]
        times = torch.tensor(ends, dtype=like.dtype, device=like.device)
        anew = (torch.is_grad_enabled() or self.training) and not is_transformed()
        with held_together(held_layers(self.f) if anew else ()):  # certified once, for all evaluations
            system = _System(field, self.f)
        solve = torchdiffeq.odeint_adjoint if self.adjoint else torchdiffeq.odeint
        try:
            path = solve(system, state, times, method=self.method, rtol=self.rtol, atol=self.atol, options=self.options)
        except BilipError:
            raise
        except (AssertionError, ValueError, RuntimeError) as error:
            raise SolverFailed(
                f"NeuralODE: the solver {self.method!r} failed ({str(error) or 'step size underflow'}). Loosen rtol and atol, "
                "hold the field to a smaller constant, or use float64."
            ) from error
        end = tuple(part[-1] for part in path) if isinstance(path, tuple) else path[-1]
        first = end[0] if isinstance(end, tuple) else end
        if can_be_read(first) and not bool(torch.isfinite(first).all()):
            bad = int((~torch.isfinite(first.flatten(1)).all(1)).sum())
            raise SolverFailed(
                f"NeuralODE: {bad} of {len(first)} samples are not finite after integration; the field grows "
                f"too fast for {self.method!r}."
            )
        return end

    def _map(self, x: Tensor, context: Tensor | None, *, inverse: bool, log_det: bool) -> tuple[Tensor, ...]:
        x = self.check_net(x, self.f)
        if log_det:
            return self._with_trace(x, context, backward=inverse)
        return (self._integrate(x, lambda t, v: self.field(t, v, context), backward=inverse),)

    def _with_trace(self, x: Tensor, context: Tensor | None, backward: bool) -> tuple[Tensor, Tensor]:
        """Integrate the state and the trace of the Jacobian together."""
        probe = probes(x, 1)[0] if self.trace == "hutchinson" else None
        wants_graph = torch.is_grad_enabled()

        def augmented(t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            with torch.inference_mode(False), torch.enable_grad():
                v = state[0] if state[0].requires_grad else state[0].detach().clone().requires_grad_()
                value = self.field(t, v, context)
                rate = _trace(value, v, probe, wants_graph)
            return (value, rate) if wants_graph else (value.detach(), rate.detach())

        return self._integrate((x, x.new_zeros(len(x))), augmented, backward)

    @torch.no_grad()
    def discretisation_error(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Measured, not proved: |F(x) - F'(x)| for each sample, F' being solved with tolerances a thousand times smaller, in float64.

        For a fixed-step method F' is dopri5.
        """
        z = self(x, context).double()
        reference = NeuralODE(
            certify.float64_copy(self.f),
            time=self.time,
            method="dopri5",
            rtol=max(self.rtol * 1e-3, 1e-12),
            atol=max(self.atol * 1e-3, 1e-12),
        )
        return (z - reference(x.double(), None if context is None else context.double())).flatten(1).norm(dim=1)

    # ---- proofs, for the exact flow

    def _log(self, box: Box) -> float:
        """L T, the log of both constants."""
        if not 0 < self.time < math.inf:  # it can be set later
            raise UnknownLipschitz(
                f"NeuralODE has time={self.time}, not a positive number, so no bound can be proved for it."
            )
        return exp_up(log_product(certify.log_lipschitz(self.f, box.shape or None), log_of(self.time)))

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self._log(box)

    log_lip_inverse = log_lip

    def interval(self, box: Box, context: Box | None = None) -> Box:
        r"""$|x(t) - x_0| \le \sup_t |f(x_0, t)|\,(e^{Lt} - 1)/L$ for the centre, and $e^{LT}$ times the radius around it."""
        if not box.is_bounded:
            return Box.everything(box.shape)
        log = self._log(box)
        field = certify.enclose(self.f, Box.point(box.center), self._clock(box, context))
        if not field.is_bounded:
            return Box.everything(box.shape)
        speed = log_norm(torch.maximum(field.low.abs(), field.high.abs()))
        if log > 700:
            return Box.everything(box.shape)
        # (e^{LT} - 1) / L is T (e^u - 1) / u with u = LT, which grows with u, from 1 at u = 0.
        stretch = log_product(log_of(self.time), log_of(math.expm1(log) / log * (1 + 1e-15) if log else 1.0))
        logs = (log_product(speed, stretch), log_product(log, box.log_radius))
        if max(logs) > 700:
            return Box.everything(box.shape)
        reach = sum(exp_up(v) for v in logs) * (1 + 1e-12)
        return Box.outward(box.center - reach, box.center + reach)

    interval_inverse = interval

    def _clock(self, box: Box, context: Box | None) -> Box | None:
        """The box of time and context, in the shape that the net sees beside one sample of this box."""
        if not self._timed:
            return None
        features = int(getattr(self.f, "context", 1))
        shape = (features, *box.shape[1:])
        times = Box(0.0, self.time, shape=(1, *box.shape[1:]))
        if features == 1:
            return times
        rest = (Box.everything() if context is None else context).expand((features - 1, *box.shape[1:]))
        return Box(torch.cat((times.low, rest.low)), torch.cat((times.high, rest.high))).expand(shape)

    def extra_repr(self) -> str:
        return (
            f"time={self.time:g}, trace={self.trace!r}, method={self.method!r}, rtol={self.rtol:g}, atol={self.atol:g}"
        )


class _System(nn.Module):
    """The right-hand side as torchdiffeq wants it; the net is registered so that the adjoint finds its parameters."""

    def __init__(self, field: Any, net: nn.Module) -> None:
        super().__init__()
        self.field, self.net, self.held = field, net, held_now(net)

    def forward(self, t: Tensor, state: Any) -> Any:
        with again(self.held) if self.held else contextlib.nullcontext():
            return self.field(t, state)


def _trace(value: Tensor, x: Tensor, probe: Tensor | None, graph: bool) -> Tensor:
    if probe is not None:
        (vjp,) = torch.autograd.grad(value, x, probe, create_graph=graph, retain_graph=True)
        return (vjp * probe).flatten(1).sum(1)
    flat, total = value.flatten(1), x.new_zeros(len(x))
    for k in range(flat.shape[1]):
        (row,) = torch.autograd.grad(flat[:, k].sum(), x, create_graph=graph, retain_graph=True)
        total = total + row.flatten(1)[:, k]
    return total
