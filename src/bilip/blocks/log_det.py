r"""Ways to compute $\log\det(I + J_g)$ of a residual block, as values.

With $\|J_g\| \le c < 1$ the series $\sum_{k \ge 1} \frac{(-1)^{k+1}}{k} \mathrm{tr}(J_g^k)$ converges. `Exact` takes
the determinant itself, `Series` the first terms and states what it leaves out, `Roulette` stops at random and weights
the terms so that the expectation is the whole series. Traces are $v^\top J^k v$ averaged over random signs $v$, or
exact (the sum over a basis).

Gradients of the last two follow $\partial \log\det(I + J) = \mathrm{tr}\big(\sum_{k \ge 0} (-J)^k \, \partial
J\big)$: the forward pass sums the powers $n^\top = \sum_k w_k\, v^\top (-J)^k$ without a graph, and the backward pass
differentiates $n^\top J v$ together with g. So no graph of the series is kept, whatever the number of terms; the graph of g is, or it
is made again (`Residual(recompute=True)`).

**By hand.** For a `Stack` of linear layers and activations that act entry by entry, all of this is written out, without autograd. A
product with $J$ is then one product with each weight and one with the slopes of each activation, which are computed once. The last
term of the series is $(v^\top J^{n-1})(J v)$, and on the way to $J v$ lie the tangents $t$ that the backward pass needs anyway: with
the cotangents $c$ on the way of $n^\top J$,

$$\partial\,(n^\top J v) = \sum_\text{weights} c^\top\, \partial W\, t + \sum_\text{activations} (c \cdot t)\, a''(h)\, \partial h,$$

where the last sum joins the gradient of g on its way down. Kept are the inputs $h$ of the activations, and their tangents $t$.

Reference: Chen et al., *Residual Flows for Invertible Generative Modeling*, 2019.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bilip import _linalg
from bilip._torch import setting
from bilip.blocks._nets import require_shape
from bilip.errors import InputError
from bilip.nets.replay import Conditions, hooks_wait, leaves_behind

__all__ = ["Exact", "Geometric", "Poisson", "Roulette", "Series", "series_error"]

_aten = torch.ops.aten

Map = Callable[[Tensor], Tensor]
T = TypeVar("T")
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
        u = float(torch.rand((), generator=generator, dtype=torch.float64))
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
        return int(torch.poisson(torch.tensor(self.rate, dtype=torch.float64), generator=generator))

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
    the same value in a backward pass, `g.recompute`, whether its graph is to be made again there, and `g.stack(x)`, the `Stack` that it
    is, if it is one.
    """
    stack = g.stack(x) if hasattr(g, "stack") else None  # type: ignore[attr-defined]
    if stack is not None:
        return _stacked_series(stack, x, weights, v, recompute=getattr(g, "recompute", False))
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
    pair = _Pair(g, v, tuple(sums), value.detach(), total, kept, len(inputs) > len(stated), Conditions.now(x))
    return _WithNeumannGradient.apply(pair, x, *inputs)  # type: ignore[return-value]


@dataclass
class _Pair:
    """A value of g and an estimate, with what their gradients need.

    Attributes:
        g: The map.
        v: The probes.
        sums: The weighted powers applied to each probe.
        value: g(x).
        total: The estimate.
        kept: The input and the value with the graph between them, until a backward pass has used it.
        shared: Whether parts of that graph lie outside of g.
        precision: The autocast of the forward pass.
    """

    g: Map
    v: Tensor
    sums: tuple[Tensor, ...]
    value: Tensor | None
    total: Tensor | None
    kept: tuple[Tensor, Tensor] | None
    shared: bool
    precision: Conditions

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
            pulled = torch.autograd.grad(value, inner, neumann, retain_graph=True, create_graph=True)[0]
            total = total + (pulled * probe).flatten(1).sum(1)
        return total / len(self.v)


class _WithNeumannGradient(torch.autograd.Function):
    """The value and the estimate of a pair; one backward pass through g serves both."""

    @staticmethod
    def forward(ctx, pair: _Pair, x: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.pair = pair
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *inputs)
        value, total = pair.value, pair.total
        pair.value = pair.total = None
        return value, total  # type: ignore[return-value]

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *inputs = ctx.saved_tensors
        return (None, *_pulled(ctx.pair, x, inputs, ctx.needs_input_grad[1:], grads))


def _pulled(
    pair: _Pair, x: Tensor, inputs: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor | None]
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
            pulled = _gradients(outputs[:-1], wanted, graph=True, keep=True)
            pulled = [
                _sum(a, None if b is None else _Once.apply(b.requires_grad_()))
                for a, b in zip(pulled, once, strict=True)
            ]
        else:
            pulled = _gradients(outputs, wanted, graph=twice, keep=twice or pair.shared)
    found = iter(pulled)
    return [next(found) if need else None for need in needed]


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


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
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


# ---- by hand


@dataclass(frozen=True)
class Affine:
    """A linear layer, or a convolution with zero padding, as a part of a `Stack`.

    Attributes:
        tensors: The weight that acts, and the bias if there is one. The methods get them once more, as they were saved.
        convolution: Stride, padding, dilation and groups; `None` for a linear layer.
    """

    tensors: tuple[Tensor, ...]
    convolution: tuple[list[int], list[int], list[int], int] | None = None

    def value(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer at x; without the bias, the product of its Jacobian with x."""
        if self.convolution is None:
            return F.linear(x, weight, bias)
        return torch.conv2d(x, weight, bias, *self.convolution)

    def vjp(self, c: Tensor, x: Tensor, weight: Tensor, *, needs: tuple[bool, bool]) -> Sequence[Tensor | None]:
        """The gradients of `(c * value).sum()` for x and for the weight, as far as they are needed."""
        if self.convolution is None:
            return c @ weight if needs[0] else None, c.mT @ x if needs[1] else None
        if not any(needs):
            return None, None
        stride, padding, dilation, groups = self.convolution
        return _aten.convolution_backward(
            c, x, weight, None, stride, padding, dilation, False, [0, 0], groups, (*needs, False)
        )[:2]


Look = tuple[Tensor, Tensor, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Activation(ABC):
    """A function of each entry alone, as a part of a `Stack`.

    Attributes:
        tensors: Its parameters. The methods get them once more, as they were saved.
    """

    tensors: tuple[Tensor, ...] = ()

    @abstractmethod
    def value(self, h: Tensor, *tensors: Tensor) -> Tensor:
        """The activation of h."""

    @abstractmethod
    def look(self, h: Tensor, *tensors: Tensor) -> Look:
        """Its value and its derivative at h, entry by entry, and what else `backward` can use."""

    @abstractmethod
    def backward(
        self,
        h: Tensor,
        look: Look,
        grad: Tensor | None,
        bend: Tensor | None,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """The gradients of `(grad * value + bend * slope).sum()` for h and, where they are needed, for the parameters."""


@dataclass(frozen=True)
class ByAutograd(Activation):
    """An activation without parameters, whose derivatives are found by autograd.

    Attributes:
        function: The function.
    """

    function: Map = torch.tanh

    def value(self, h: Tensor, *tensors: Tensor) -> Tensor:
        return self.function(h)

    def look(self, h: Tensor, *tensors: Tensor) -> Look:
        _, value, slope = self._derivative(h, graph=False)
        return value.detach(), slope, ()

    def backward(self, h, look, grad, bend, tensors, needs):
        found = None if grad is None else grad * look[1]
        if bend is not None:
            inner, _, slope = self._derivative(h, graph=True)
            if slope.requires_grad:  # not where it is constant
                found = _sum(found, torch.autograd.grad(slope, inner, bend, allow_unused=True)[0])
        return found, ()

    def _derivative(self, h: Tensor, graph: bool) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            inner = h.detach().requires_grad_()
            value = self.function(inner)
            return inner, value, torch.autograd.grad(value, inner, torch.ones_like(value), create_graph=graph)[0]


@dataclass(frozen=True)
class LipSwish(Activation):
    r"""`nets.activations.ScaledSwish`, $a(h) = h\,s/1.1$ with $s = \sigma(u)$ and $u = \beta h$.

    With $d = s\,(1 - s)$ and $q = 2 + u\,(1 - 2 s)$

    $$1.1\,a' = s + u\,d, \quad 1.1\,a'' = \beta\,d\,q, \quad 1.1\,\partial_\beta a = h^2 d, \quad 1.1\,\partial_\beta a' = h\,d\,q.$$

    Its parameter is $\beta$.
    """

    def value(self, h: Tensor, *tensors: Tensor) -> Tensor:
        return h * torch.sigmoid(h * tensors[0]) / 1.1

    def look(self, h: Tensor, *tensors: Tensor) -> Look:
        u = (h * tensors[0]).clamp_(-1000, 1000)  # the sigmoid is 0 or 1 there, and no infinity times 0 comes up
        s = torch.sigmoid(u)
        return (h * s).div_(1.1), _aten.silu_backward(u.new_full((), 1 / 1.1), u), (u, s)

    def backward(self, h, look, grad, bend, tensors, needs):
        _, slope, (u, s) = look
        if bend is None:
            if grad is None or not needs[0]:
                return None if grad is None else grad * slope, (None,)
            bent = grad * h
        else:
            bent = torch.addcmul(u.new_full((), 2.0), u, torch.rsub(s, 1, alpha=2)).mul_(bend)
            bent = bent if grad is None else bent.addcmul_(grad, h)
        bent = _aten.sigmoid_backward(bent, s)  # d (bend q + grad h)
        found = bent * tensors[0] if grad is None else (grad * s).addcmul_(bent, tensors[0])
        return found.div_(1.1), (bent.mul_(h).sum() / 1.1 if needs[0] else None,)


@dataclass(frozen=True)
class Stack:
    """A map made of layers and activations, one after the other, for which products with the Jacobian are written out.

    Attributes:
        parts: The layers and activations.
        channels_last: Whether images are convolved with the channels innermost.
    """

    parts: tuple[Affine | Activation, ...]
    channels_last: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """What gradients go to besides x."""
        return [tensor for part in self.parts for tensor in part.tensors]

    def split(self, tensors: Sequence[T]) -> list[Sequence[T]]:
        """The tensors, or something about each of them, part by part."""
        given = iter(tensors)
        return [[next(given) for _ in part.tensors] for part in self.parts]

    def turned(self, x: Tensor) -> Tensor:
        """The same numbers, stored as the layers like it best."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x

    def steps(self, x: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """What every part is given, one after the other, and then the value."""
        value = self.turned(x)
        for part, own in zip(self.parts, self.split(tensors), strict=True):
            yield value
            value = part.value(value, *own)
        yield value

    def is_made(self, k: int) -> bool:
        """Whether what part k is given can be made from what the part before is given, entry by entry."""
        return k > 0 and isinstance(self.parts[k], Affine) and isinstance(self.parts[k - 1], Activation)

    def kept(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What has to be kept of what the parts are given, but for the first, which is given x."""
        return [one for k, one in enumerate(given) if k and not self.is_made(k)]

    def from_kept(self, first: Tensor, kept: Iterator[Tensor]) -> list[Tensor | None]:
        """What the parts are given, where that was kept."""
        return [first if not k else None if self.is_made(k) else next(kept) for k in range(len(self.parts))]

    def tangents(
        self, t: Tensor, slopes: Sequence[Tensor | None], tensors: Sequence[Tensor], *, last: bool = True
    ) -> list[Tensor]:
        """What becomes of a tangent before every part, and after the last one: that is the product with the Jacobian."""
        found, whole = [t], list(zip(self.parts, slopes, self.split(tensors), strict=True))
        for part, slope, own in whole if last else whole[:-1]:
            found.append(part.value(found[-1], own[0]) if isinstance(part, Affine) else found[-1] * slope)  # type: ignore[operator]
        return found

    def vjp(
        self, c: Tensor, points: Sequence[Tensor], slopes: Sequence[Tensor | None], tensors: Sequence[Tensor]
    ) -> Tensor:
        """The product of a cotangent with the Jacobian."""
        whole = list(zip(self.parts, points, slopes, self.split(tensors), strict=True))
        for part, point, slope, own in reversed(whole):
            c = part.vjp(c, point, own[0], needs=(True, False))[0] if isinstance(part, Affine) else c * slope  # type: ignore[assignment,operator]
        return c


@dataclass
class _Sums:
    """A value of a stack and an estimate, with what their gradients need.

    Attributes:
        value: g(x).
        total: The estimate.
        neumann: The weighted powers applied to each probe.
        points: What is kept of what the parts are given.
        tangents: The same of the tangents of the last probe.
    """

    value: Tensor
    total: Tensor
    neumann: list[Tensor]
    points: list[Tensor]
    tangents: list[Tensor]


@torch.no_grad()
def _sums(stack: Stack, x: Tensor, weights: Sequence[float], v: Tensor, tensors: Sequence[Tensor]) -> _Sums:
    points, slopes, value = [], [], stack.turned(x)
    for part, own in zip(stack.parts, stack.split(tensors), strict=True):
        points.append(value)
        value, slope = part.look(value, *own)[:2] if isinstance(part, Activation) else (part.value(value, *own), None)
        slopes.append(slope)
    require_shape("Residual", "g(x)", value, x)
    total, sums, tangents, jvp = x.new_zeros(x.shape[0]), [], [], x
    for probe in v:
        power, neumann = probe, torch.zeros_like(probe)
        if weights:
            *tangents, jvp = stack.tangents(stack.turned(probe), slopes, tensors)
            tangents = stack.kept(tangents)
        for k, weight in enumerate(weights, 1):
            signed = weight if k % 2 else -weight
            neumann = neumann + signed * power  # v^T (-J)^(k-1), weighted
            if k < len(weights):
                power = stack.vjp(power, points, slopes, tensors)  # times J
                trace = power * probe
            else:
                trace = power * jvp  # (v^T J^(k-1)) (J v)
            total = total + signed / k * trace.flatten(1).sum(1)
        sums.append(neumann)
    return _Sums(
        value.contiguous() if stack.channels_last else value, total / len(v), sums, stack.kept(points), tangents
    )


def _stacked_series(
    stack: Stack, x: Tensor, weights: Sequence[float], v: Tensor, *, recompute: bool
) -> tuple[Tensor, Tensor]:
    wants_graph = torch.is_grad_enabled()
    with torch.inference_mode(False):
        x = x.clone() if x.is_inference() else x
        if not wants_graph:
            found = _sums(stack, x, weights, v, stack.tensors)
            return found.value, found.total
        return _StackedGradient.apply(stack, weights, v, recompute, x, *stack.tensors)  # type: ignore[return-value]


class _StackedGradient(torch.autograd.Function):
    """The value and the estimate of a stack; one walk back through its parts serves both."""

    @staticmethod
    def forward(
        ctx, stack: Stack, weights: Sequence[float], v: Tensor, recompute: bool, x: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        found = _sums(stack, x, weights, v, tensors)
        ctx.set_materialize_grads(False)
        # Tangents are kept for one probe: with many, they are made again.
        ctx.stack, ctx.terms, ctx.probes = stack, len(weights), len(v)
        ctx.keeps, ctx.keeps_tangents = not recompute, not recompute and len(v) == 1 and bool(weights)
        points = found.points if ctx.keeps else []
        tangents = found.tangents if ctx.keeps_tangents else []
        ctx.save_for_backward(x, *tensors, v, *found.neumann, *points, *tangents)
        return found.value, found.total

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        stack: Stack = ctx.stack
        saved = iter(ctx.saved_tensors)
        x, tensors = next(saved), [next(saved) for _ in stack.tensors]
        v, sums = next(saved), [next(saved) for _ in range(ctx.probes)]
        needed = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():  # a graph of the gradients is wanted: by autograd
            pair = _Pair(
                lambda t: list(stack.steps(t, tensors))[-1], v, tuple(sums), None, None, None, True, Conditions.now(x)
            )
            return (*[None] * 4, *_pulled(pair, x, tensors, needed, grads))
        kept = (
            saved if ctx.keeps else iter(stack.kept(list(itertools.islice(stack.steps(x, tensors), len(stack.parts)))))
        )
        points = stack.from_kept(stack.turned(x), kept)
        looks = _Looks(stack, points, tensors)
        pairs = []
        if grads[1] is not None and ctx.terms:
            share = (grads[1] / ctx.probes).view(-1, *[1] * (x.ndim - 1))
            for probe, neumann in zip(map(stack.turned, v), sums, strict=True):
                if ctx.keeps_tangents:
                    tangents = stack.from_kept(probe, saved)
                else:
                    slopes = [
                        looks.at(k)[1] if isinstance(part, Activation) else None for k, part in enumerate(stack.parts)
                    ]
                    tangents = stack.tangents(probe, slopes, tensors, last=False)
                pairs.append((stack.turned(share * neumann), tangents))
        return (*[None] * 4, *_walk_back(stack, points, tensors, looks, grads[0], pairs, needed))


class _Looks:
    """Values and slopes of the activations of a stack, made again when they are asked for."""

    def __init__(self, stack: Stack, points: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> None:
        self.parts, self.points, self.tensors = stack.parts, points, stack.split(tensors)
        self.found: dict[int, Look] = {}

    def at(self, k: int) -> Look:
        if k not in self.found:
            self.found[k] = self.parts[k].look(self.points[k], *self.tensors[k])  # type: ignore[union-attr, arg-type]
        return self.found[k]


def _walk_back(
    stack: Stack,
    points: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    looks: _Looks,
    grad: Tensor | None,
    pairs: Sequence[tuple[Tensor, Sequence[Tensor | None]]],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    r"""The gradients of $g \cdot \text{grad}$ plus the sum of $c^\top J t$ over pairs of a cotangent and a tangent, for x and the tensors.

    Args:
        stack: The map.
        points: What its parts are given, where that is not the value of an activation before.
        tensors: The tensors of its parts.
        looks: Its activations.
        grad: The gradient for the value.
        pairs: Cotangents at the end, each with the tangents before every part.
        needed: Which gradients are needed.
    """
    own, needs = stack.split(tensors), stack.split(needed[1:])
    found: list[list[Tensor | None]] = [[None] * len(part) for part in own]
    ends = [c for c, _ in pairs]
    tangents = [ts for _, ts in pairs]
    for k in reversed(range(len(stack.parts))):
        part = stack.parts[k]
        if isinstance(part, Activation):
            here = looks.at(k)
            bend = None
            for j, ts in enumerate(tangents):
                product = ends[j] * ts[k]  # type: ignore[operator]
                bend = product if bend is None else bend.add_(product)
                ends[j] = ends[j] * here[1]
            grad, others = part.backward(points[k], here, grad, bend, own[k], needs[k])  # type: ignore[arg-type]
            found[k] = list(others)
            del looks.found[k]
            continue
        below = looks.at(k - 1) if stack.is_made(k) else None
        weight, weight_grad = own[k][0], None
        if grad is not None:
            if len(own[k]) > 1 and needs[k][1]:
                found[k][1] = grad.sum([dim for dim in range(grad.ndim) if dim != 1])
            point = points[k] if below is None else below[0]
            grad, weight_grad = part.vjp(grad, point, weight, needs=(k > 0 or needed[0], needs[k][0]))  # type: ignore[arg-type]
        for j, ts in enumerate(tangents):
            t = ts[k] if below is None else below[1] * ts[k - 1]  # type: ignore[operator]
            ends[j], more = part.vjp(ends[j], t, weight, needs=(k > 0, needs[k][0]))  # type: ignore[call-overload, arg-type]
            weight_grad = _sum(weight_grad, more)
        found[k][0] = weight_grad
    return [grad if needed[0] else None, *(one for part in found for one in part)]
