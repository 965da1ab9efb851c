r"""Nets of linear layers and activations whose estimated log-determinant, and its gradient, are written out without autograd.

Where a net is a `LayerStack`, linear layers and activations that act entry by entry, a product with its Jacobian $J$ is one product with
each weight and one with the slopes of each activation, which are computed once. The last term of the series that `bilip.blocks.log_det`
describes is $(v^\top J^{n-1})(J v)$, and on the way to $J v$ lie the tangents $t$ that the backward pass needs anyway: with the
cotangents $c$ on the way of $n^\top J$,

$$\partial\,(n^\top J v) = \sum_\text{weights} c^\top\, \partial W\, t + \sum_\text{activations} (c \cdot t)\, a''(h)\, \partial h,$$

where the last sum joins the gradient of g on its way down. Kept are the inputs $h$ of the activations, and their tangents $t$.

`stack_of` finds the stack that a net is, and `LayerStack.series` takes the place of `bilip.blocks.log_det.weighted_series`.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from bilip.blocks._nets import _faster_channels_last, require_shape
from bilip.blocks.log_det import Map, Pair, added, pair_vjp
from bilip.nets import MLP, ConvNet
from bilip.nets.activations import ScaledSwish
from bilip.nets.readable import is_watched, tampered
from bilip.nets.replay import Conditions
from bilip.nets.spectral import HeldConv2d, HeldLinear

__all__ = ["Activation", "Affine", "ByAutograd", "LayerStack", "LipSwish", "stack_of"]

_aten = torch.ops.aten
T = TypeVar("T")


@dataclass(frozen=True)
class Affine:
    """A linear layer, or a convolution with zero padding, as a part of a `LayerStack`."""

    # The weight that acts, and the bias if there is one. The methods get them once more, as they were saved.
    tensors: tuple[Tensor, ...]
    # Stride, padding, dilation and groups; `None` for a linear layer.
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
    """A function of each entry alone, as a part of a `LayerStack`.

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
                found = added(found, torch.autograd.grad(slope, inner, bend, allow_unused=True)[0])
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
class LayerStack:
    """A map made of layers and activations, one after the other, for which products with the Jacobian are written out."""

    parts: tuple[Affine | Activation, ...]  # the layers and activations
    channels_last: bool = False  # whether images are convolved with the channels innermost

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

    def series(self, x: Tensor, weights: Sequence[float], v: Tensor, *, recompute: bool) -> tuple[Tensor, Tensor]:
        """What `bilip.blocks.log_det.weighted_series` gives for this map; with `recompute` little is kept for the gradient."""
        wants_graph = torch.is_grad_enabled()
        with torch.inference_mode(False):
            x = x.clone() if x.is_inference() else x
            if not wants_graph:
                found = _sums(self, x, weights, v, self.tensors)
                return found.value, found.total
            return _StackedGradient.apply(self, weights, v, recompute, x, *self.tensors)  # type: ignore[return-value]


@dataclass
class _Sums:
    """A value of a stack and an estimate, with what their gradients need."""

    value: Tensor  # g(x)
    total: Tensor  # the estimate
    neumann: list[Tensor]  # the weighted powers applied to each probe
    points: list[Tensor]  # what is kept of what the parts are given
    tangents: list[Tensor]  # the same of the tangents of the last probe


@torch.no_grad()
def _sums(stack: LayerStack, x: Tensor, weights: Sequence[float], v: Tensor, tensors: Sequence[Tensor]) -> _Sums:
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


class _StackedGradient(torch.autograd.Function):
    """The value and the estimate of a stack; one walk back through its parts serves both."""

    @staticmethod
    def forward(
        ctx, stack: LayerStack, weights: Sequence[float], v: Tensor, recompute: bool, x: Tensor, *tensors: Tensor
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
        stack: LayerStack = ctx.stack
        saved = iter(ctx.saved_tensors)
        x, tensors = next(saved), [next(saved) for _ in stack.tensors]
        v, sums = next(saved), [next(saved) for _ in range(ctx.probes)]
        needed = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():  # a graph of the gradients is wanted: by autograd
            pair = Pair(
                lambda t: list(stack.steps(t, tensors))[-1], v, tuple(sums), None, None, None, True, Conditions.now(x)
            )
            return (*[None] * 4, *pair_vjp(pair, x, tensors, needed, grads))
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

    def __init__(self, stack: LayerStack, points: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> None:
        self.parts, self.points, self.tensors = stack.parts, points, stack.split(tensors)
        self.found: dict[int, Look] = {}

    def at(self, k: int) -> Look:
        if k not in self.found:
            self.found[k] = self.parts[k].look(self.points[k], *self.tensors[k])  # type: ignore[union-attr, arg-type]
        return self.found[k]


def _walk_back(
    stack: LayerStack,
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
            weight_grad = added(weight_grad, more)
        found[k][0] = weight_grad
    return [grad if needed[0] else None, *(one for part in found for one in part)]


# ---- the stack that a net is


def stack_of(net: nn.Module, x: Tensor) -> LayerStack | None:
    """A net as layers and activations that act on tensors like x; `None` where it is something else, or somebody watches its parts."""
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        return None
    layers = _unrolled(net)
    parts = None if layers is None else [_part(layer, x) for layer in layers]
    if not parts or any(part is None for part in parts):
        return None
    return LayerStack(tuple(parts), isinstance(net, ConvNet) and _faster_channels_last(x))  # type: ignore[arg-type]


def _unrolled(net: nn.Module) -> list[nn.Module] | None:
    """The layers of a net, if all of them compute what their class says, and nobody watches."""
    if is_watched(net) or tampered(net) is not None:
        return None
    if type(net) in (MLP, ConvNet):
        return None if net.context else _unrolled(net.layers)  # type: ignore[arg-type]
    if type(net) is not nn.Sequential:
        return [net]
    parts = [None if child is None else _unrolled(child) for child in net._modules.values()]
    return None if None in parts else [layer for part in parts for layer in part]  # type: ignore[union-attr]


# Activations by what they compute; others may have parameters, or draw.
_FUNCTIONS: dict[type[nn.Module], Callable[..., Callable[[Tensor], Tensor]]] = {
    nn.ReLU: lambda act: F.relu,
    nn.LeakyReLU: lambda act: functools.partial(F.leaky_relu, negative_slope=act.negative_slope),
    nn.ELU: lambda act: functools.partial(F.elu, alpha=act.alpha),
    nn.Tanh: lambda act: torch.tanh,
    nn.Softplus: lambda act: functools.partial(F.softplus, beta=act.beta, threshold=act.threshold),
    nn.SiLU: lambda act: F.silu,
    nn.GELU: lambda act: functools.partial(F.gelu, approximate=act.approximate),
}


def _part(layer: nn.Module, x: Tensor) -> Affine | Activation | None:
    """A layer as a part of a `LayerStack` that acts on tensors like x; `None` if it is none."""
    kind = type(layer)
    if kind in _FUNCTIONS:
        return ByAutograd(function=_FUNCTIONS[kind](layer))
    if kind is ScaledSwish:
        part = LipSwish(tensors=(layer.beta(),))  # type: ignore[operator]
        return part if part.tensors[0].ndim == 0 and part.tensors[0].dtype == x.dtype else None
    if kind not in (nn.Linear, nn.Conv2d, HeldLinear, HeldConv2d):
        return None
    weight = layer.held_weight() if isinstance(layer, (HeldLinear, HeldConv2d)) else layer.weight
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    tensors = (weight,) if bias is None else (weight, bias)
    if any(tensor.dtype != x.dtype or tensor.device != x.device for tensor in tensors):  # type: ignore[union-attr]
        return None
    if isinstance(layer, nn.Linear):
        return Affine(tensors) if x.ndim == 2 else None  # type: ignore[arg-type]
    if x.ndim != 4 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    options = list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups  # type: ignore[arg-type]
    return Affine(tensors, options)  # type: ignore[arg-type]
