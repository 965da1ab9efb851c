r"""Ways to compute $\log\det(I + J_g)$ of a residual block, as values.

With $\|J_g\| \le c < 1$ the series $\sum_{k \ge 1} \frac{(-1)^{k+1}}{k} \mathrm{tr}(J_g^k)$ converges. `Exact` takes
the determinant itself, `Series` the first terms and states what it leaves out, `Roulette` stops at random and weights
the terms so that the expectation is the whole series. Traces are $v^\top J^k v$ averaged over random signs $v$, or
exact (the sum over a basis).

Gradients of the last two follow $\partial \log\det(I + J) = \mathrm{tr}\big(\sum_{k \ge 0} (-J)^k \, \partial
J\big)$: the forward pass sums the powers $n^\top = \sum_k w_k\, v^\top (-J)^k$ without a graph, and the backward pass
differentiates $n^\top J v$ together with g. So no graph of the series is kept, whatever the number of terms; the graph of g is, or it
is made again (`Residual(recompute=True)`).

Reference: Chen et al., *Residual Flows for Invertible Generative Modeling*, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip import _linalg
from bilip._torch import setting
from bilip.errors import InputError
from bilip.nets.replay import Conditions, hooks_wait, leaves_behind

__all__ = ["Exact", "Geometric", "Poisson", "Roulette", "Series", "series_error"]

Map = Callable[[Tensor], Tensor]
_DRAWN: ContextVar[dict[Roulette, int] | None] = ContextVar("drawn", default=None)


def series_error(dimension: int, c: float, terms: int) -> float:
    r"""How much the first terms leave out at most: $d \sum_{k > n} c^k / k$.

    Example:
        >>> series_error(2, 0.5, 20) < 2e-7
        True
    """
    if not 0 <= c < 1:
        return math.inf
    tail = c ** (terms + 1) / ((terms + 1) * (1 - c))
    return dimension * tail * (1 + 1e-12)


@dataclass(frozen=True)
class Exact:
    """The determinant of the full Jacobian: for small dimension.

    Example:
        >>> Exact()(lambda x: 0.5 * x, torch.zeros(1, 2))
        tensor([0.8109])
    """

    def __call__(self, g: Map, x: Tensor) -> Tensor:
        return self.with_value(g, x)[1]

    def with_value(self, g: Map, x: Tensor) -> tuple[Tensor, Tensor]:
        """g(x) and the log-determinant, from one evaluation of g."""
        size = math.prod(x.shape[1:])
        wants_graph = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            x = x if x.requires_grad else x.detach().clone().requires_grad_()
            value = g(x)
            if size == 2:  # two plain passes and the formula: a third of the time on the plane
                first, second = value.flatten(1).unbind(1)
                a, b = _slopes(first, x, wants_graph)
                c, d = _slopes(second, x, wants_graph)
                log_det = ((1 + a) * (1 + d) - b * c).abs().log()
            else:
                eye = torch.eye(size, dtype=x.dtype, device=x.device)
                basis = eye.view(size, 1, *x.shape[1:]).expand(size, *x.shape)
                rows = torch.autograd.grad(
                    value, x, basis, retain_graph=True, create_graph=wants_graph, is_grads_batched=True
                )[0]
                log_det = _linalg.slogdet(eye + rows.flatten(2).movedim(0, 1))[1]
        return (value, log_det) if wants_graph else (value.detach(), log_det.detach())


def _slopes(output: Tensor, x: Tensor, graph: bool) -> tuple[Tensor, Tensor]:
    """The derivatives of one output by the two inputs, sample by sample."""
    row = torch.autograd.grad(output.sum(), x, retain_graph=True, create_graph=graph)[0].flatten(1)
    return row[:, 0], row[:, 1]


@dataclass(frozen=True)
class Series:
    """The first terms of the series; `series_error` bounds the rest.

    Args:
        terms: Number of terms.
        samples: Random-sign probes for the traces; `None` for exact traces.

    Example:
        >>> value = Series(30, samples=None)(lambda x: 0.5 * x, torch.zeros(1, 2))
        >>> round(float(value), 5)
        0.81093
    """

    terms: int = 20
    samples: int | None = 1

    def __post_init__(self) -> None:
        if self.terms < 1 or (self.samples is not None and self.samples < 1):
            raise InputError(
                f"Series(terms={self.terms}, samples={self.samples}): expected 1 or more, or samples=None."
            )

    def __call__(self, g: Map, x: Tensor) -> Tensor:
        return self.with_value(g, x)[1]

    def with_value(self, g: Map, x: Tensor) -> tuple[Tensor, Tensor]:
        """g(x) and the estimate, from one evaluation of g."""
        return weighted_series(g, x, [1.0] * self.terms, probes(x, self.samples))


def _device(generator: torch.Generator | None) -> torch.device:
    """Where numbers of a generator are drawn; without one on the CPU, whatever the default device is."""
    return torch.device("cpu") if generator is None else generator.device


@dataclass(frozen=True)
class Geometric:
    """N further terms with probability p (1 - p)^N; the variance is finite if c^2 < 1 - p.

    Example:
        >>> Geometric(0.5).at_least(3)
        0.125
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise InputError(f"Geometric(p={self.p}): expected a number between 0 and 1.")

    def draw(self, generator: torch.Generator | None = None) -> int:
        """A number of further terms."""
        u = float(torch.rand((), generator=generator, dtype=torch.float64, device=_device(generator)))
        return int(math.log1p(-u) / math.log1p(-self.p))

    def at_least(self, n: int) -> float:
        """P(N >= n)."""
        return (1 - self.p) ** n

    def probability(self, n: int) -> float:
        """P(N = n)."""
        return self.p * (1 - self.p) ** n


@dataclass(frozen=True)
class Poisson:
    """N further terms, Poisson distributed.

    Its tail falls faster than any power, so the weights 1 / P(N >= k) of late terms outgrow $c^k$: the estimate is
    unbiased but has heavy tails, and averages of it converge slowly. Prefer more exact terms, or `Geometric` with
    $c^2 < 1 - p$.

    Example:
        >>> round(Poisson(2.0).at_least(1), 4)
        0.8647
    """

    rate: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise InputError(f"Poisson(rate={self.rate}): expected a positive number.")

    def draw(self, generator: torch.Generator | None = None) -> int:
        """A number of further terms."""
        rate = torch.tensor(self.rate, dtype=torch.float64, device=_device(generator))
        return int(torch.poisson(rate, generator=generator))

    def probability(self, n: int) -> float:
        """P(N = n)."""
        return math.exp(n * math.log(self.rate) - self.rate - math.lgamma(n + 1))

    def at_least(self, n: int) -> float:
        """P(N >= n), summed from its largest term down so that small tails keep their digits."""
        if n <= 0:
            return 1.0
        if n <= self.rate:
            return 1.0 - math.fsum(self.probability(k) for k in range(n))
        return math.fsum(self.probability(k) for k in range(n, n + 200))


@dataclass(frozen=True)
class Roulette:
    """Russian roulette: some terms always, then as many more as the law says, weighted to be unbiased.

    Args:
        law: Distribution of the number of further terms.
        exact_terms: Terms that are always there.
        samples: Random-sign probes for the traces; `None` for exact traces.
        shared: Draw the number of terms once for all blocks of a pass that have this estimator, not once for each. Each estimate, and so
            their sum, stays unbiased, as that asks nothing of the others; but the errors of the blocks are no longer independent, and
            the sum varies more. Steps of training do the same work then whenever the number is the same, and can be
            captured as CUDA graphs.

    Example:
        >>> Roulette(Geometric(0.5), exact_terms=2).weights(4)
        [1.0, 1.0, 2.0, 4.0]
    """

    law: Geometric | Poisson = Poisson(2.0)
    exact_terms: int = 8
    samples: int | None = 1
    shared: bool = False

    def __post_init__(self) -> None:
        if self.exact_terms < 0 or (self.samples is not None and self.samples < 1):
            raise InputError(
                f"Roulette(exact_terms={self.exact_terms}, samples={self.samples}): expected 0 or more, and 1 or more."
            )

    def weights(self, terms: int) -> list[float]:
        """1 / P(the k-th term is there), for the first terms."""
        return [
            1.0 if k <= self.exact_terms else 1 / self.law.at_least(k - self.exact_terms) for k in range(1, terms + 1)
        ]

    def __call__(self, g: Map, x: Tensor) -> Tensor:
        return self.with_value(g, x)[1]

    def with_value(self, g: Map, x: Tensor) -> tuple[Tensor, Tensor]:
        """g(x) and the estimate, from one evaluation of g."""
        return weighted_series(g, x, self.weights(self.exact_terms + self._further()), probes(x, self.samples))

    def _further(self) -> int:
        drawn = _DRAWN.get()
        if not self.shared or drawn is None:
            return self.law.draw()
        if self not in drawn:
            drawn[self] = self.law.draw()
        return drawn[self]

    def estimate(self, g: Map, x: Tensor, further: int, v: Tensor) -> Tensor:
        """The estimate for a given number of further terms and given probes."""
        return weighted_series(g, x, self.weights(self.exact_terms + further), v)[1]


def one_draw(drawn: Mapping[Roulette, int] | None = None) -> AbstractContextManager[None]:
    """Inside, an estimator with `shared` draws its number of further terms once; inside of another such context, that one counts.

    Args:
        drawn: Numbers that are drawn already.

    Example:
        >>> estimator = Roulette(shared=True)
        >>> with one_draw({estimator: 3}):
        ...     estimator._further()
        3
    """
    before = _DRAWN.get()
    return setting(_DRAWN, dict(drawn or {}) if before is None else before)


def drawn_now() -> dict[Roulette, int] | None:
    """The numbers of further terms that are drawn already in the present `one_draw`; `None` outside of any."""
    drawn = _DRAWN.get()
    return None if drawn is None else dict(drawn)


def drawn_again(drawn: Mapping[Roulette, int] | None) -> AbstractContextManager[None]:
    """Inside, these numbers are drawn already and others not, whatever the context around it says: as it was at `drawn_now`."""
    return setting(_DRAWN, None if drawn is None else dict(drawn))


def probes(x: Tensor, samples: int | None) -> Tensor:
    """Random signs of shape `(samples, *x.shape)`, or a whole basis scaled so that the mean over it is the trace."""
    if samples is not None:
        return torch.randint(0, 2, (samples, *x.shape), device=x.device).to(x.dtype) * 2 - 1
    size = math.prod(x.shape[1:])
    basis = math.sqrt(size) * torch.eye(size, dtype=x.dtype, device=x.device)
    return basis.view(size, 1, *x.shape[1:]).expand(size, *x.shape)


def weighted_series(g: Map, x: Tensor, weights: Sequence[float], v: Tensor) -> tuple[Tensor, Tensor]:
    r"""g(x), and $\sum_k w_k \frac{(-1)^{k+1}}{k}\, v^\top J^k v$, averaged over the probes, with the Neumann-series gradient.

    A map may say more than its value: `g.inputs`, the tensors besides x that gradients go to (others are found in its graph), `g.again(x)`,
    the same value in a backward pass, `g.recompute`, whether its graph is to be made again there, and `g.stack(x)`, the
    `bilip.blocks.layer_stack.LayerStack` that it is, if it is one.
    """
    stack = g.stack(x) if hasattr(g, "stack") else None  # type: ignore[attr-defined]
    if stack is not None:
        return stack.series(x, weights, v, recompute=getattr(g, "recompute", False))
    wants_graph = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        inner = (x.detach().clone() if x.is_inference() else x.detach()).requires_grad_()
        value = g(inner)
        total, sums = x.new_zeros(x.shape[0]), []
        for probe in v:
            power, neumann = probe, torch.zeros_like(probe)
            for k, weight in enumerate(weights, 1):
                neumann = neumann + (weight if k % 2 else -weight) * power  # v^T (-J)^(k-1), weighted
                power = torch.autograd.grad(value, inner, power, retain_graph=True)[0]  # times J
                sign = 1.0 if k % 2 else -1.0
                total = total + sign * weight / k * (power * probe).flatten(1).sum(1)
            sums.append(neumann)
        total = (total / len(v)).detach()
        if not wants_graph:
            return value.detach(), total
        stated = [tensor for tensor in getattr(g, "inputs", ()) if tensor.requires_grad]
        inputs = [*stated, *leaves_behind([value], [inner, *stated])]
    kept = None if getattr(g, "recompute", False) else (inner, value)
    pair = Pair(g, v, tuple(sums), value.detach(), total, kept, len(inputs) > len(stated), Conditions.now(x))
    return _WithNeumannGradient.apply(pair, x, *inputs)  # type: ignore[return-value]


@dataclass
class Pair:
    """A value of g and an estimate, with what their gradients need."""

    g: Map
    v: Tensor  # the probes
    sums: tuple[Tensor, ...]  # the weighted powers applied to each probe
    value: Tensor | None  # g(x)
    total: Tensor | None  # the estimate
    # The input and the value with the graph between them, until a backward pass has used it.
    kept: tuple[Tensor, Tensor] | None
    shared: bool  # whether parts of that graph lie outside of g
    precision: Conditions  # the autocast of the forward pass

    def evaluated(self, x: Tensor, twice: bool) -> tuple[Tensor, Tensor]:
        """An input and the value there, connected; for a second derivative the input has to be x itself."""
        if self.kept is not None and not twice:
            inner, value = self.kept
            self.kept = None
            return inner, value
        inner = x if twice and x.requires_grad else x.detach().requires_grad_()
        with self.precision.again():
            return inner, getattr(self.g, "again", self.g)(inner)

    def surrogate(self, inner: Tensor, value: Tensor) -> Tensor:
        """What has the gradient of the estimate, for each sample."""
        total = inner.new_zeros(inner.shape[0])
        for neumann, probe in zip(self.sums, self.v, strict=True):
            vjp = torch.autograd.grad(value, inner, neumann, retain_graph=True, create_graph=True)[0]
            total = total + (vjp * probe).flatten(1).sum(1)
        return total / len(self.v)


class _WithNeumannGradient(torch.autograd.Function):
    """The value and the estimate of a pair; one backward pass through g serves both."""

    @staticmethod
    def forward(ctx, pair: Pair, x: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.pair = pair
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *inputs)
        value, total = pair.value, pair.total
        pair.value = pair.total = None
        return value, total  # type: ignore[return-value]

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *inputs = ctx.saved_tensors
        return (None, *pair_vjp(ctx.pair, x, inputs, ctx.needs_input_grad[1:], grads))


def pair_vjp(
    pair: Pair, x: Tensor, inputs: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients for x and the inputs of a pair, by autograd; where a graph of them is wanted, with one."""
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        inner, value = pair.evaluated(x, twice)
        wanted = [tensor for tensor, need in zip((inner, *inputs), needed, strict=True) if need]
        outputs = [] if grads[0] is None else [(value, grads[0])]
        if grads[1] is not None:
            surrogate = pair.surrogate(inner, value)
            if surrogate.requires_grad:
                outputs.append((surrogate, grads[1]))
        # A second derivative is that of the value alone: the surrogate has the right first derivative, and no more.
        if twice and outputs and outputs[-1][0] is not value:
            once = _gradients(outputs[-1:], wanted, graph=False, keep=True)
            found = _gradients(outputs[:-1], wanted, graph=True, keep=True)
            found = [
                added(a, None if b is None else _Once.apply(b.requires_grad_()))
                for a, b in zip(found, once, strict=True)
            ]
        else:
            found = _gradients(outputs, wanted, graph=twice, keep=twice or pair.shared)
    gradients = iter(found)
    return [next(gradients) if need else None for need in needed]


def _gradients(
    outputs: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor], *, graph: bool, keep: bool
) -> list[Tensor | None]:
    """The sum over outputs of their gradients; `None` for what none of them depends on."""
    if not outputs:
        return [None] * len(wanted)
    values, given = zip(*outputs, strict=True)
    with hooks_wait(wanted):
        found = torch.autograd.grad(values, wanted, given, allow_unused=True, create_graph=graph, retain_graph=keep)
    return list(found)


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, of which either may be missing."""
    return a if b is None else b if a is None else a + b


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated."""

    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "the gradient of an estimated log-determinant cannot be differentiated. For second derivatives use log_det=Exact()."
        )
