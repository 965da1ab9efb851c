r"""The Jacobians of blocks whose structure is known, written down once instead of differentiated in every product.

A diagonal, a matrix over the channels and a rearrangement are what they are at every point. A coupling's Jacobian is a triangle,
$$\begin{pmatrix} 1 & 0 \\ N & D \end{pmatrix}, \qquad
\begin{pmatrix} 1 & 0 \\ N & D \end{pmatrix}^{-1} = \begin{pmatrix} 1 & 0 \\ -D^{-1} N & D^{-1} \end{pmatrix},$$
with the diagonal $D$ of its scales and the Jacobian $N$ of its nets. Of the nets the graph of one evaluation is kept: products with
$N^\top$ are its backward pass, and products with $N$ the backward pass of that, which is linear in what it is given; for nets of
known layers $N$ itself is kept, weights and slopes in turn. Written down `whole`, its transpose is kept too, and no product needs a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from bilip._torch import rows
from bilip.blocks import ActNorm, AdditiveCoupling, AffineCoupling, Bijection, DiagonalScaling, InvertibleConv1x1
from bilip.blocks.factor_out import OnKept
from bilip.blocks.partition import Partition
from bilip.linalg.jacobian import jvp_many, vjp_many
from bilip.nets import MLP, ConvNet, activations
from bilip.nets.layers import GainConv2d, LayeredNet

__all__ = ["Room", "Structured", "structured"]


class Structured(Protocol):
    """A Jacobian, or one for each point of a batch; directions and images have the shapes of the block's input and output."""

    def apply(self, v: Tensor, /) -> Tensor:
        """$J v$."""
        ...

    def adjoint(self, u: Tensor, /) -> Tensor:
        r"""$J^\top u$."""
        ...

    def solve(self, w: Tensor, /) -> Tensor:
        """$J^{-1} w$."""
        ...

    def solve_adjoint(self, v: Tensor, /) -> Tensor:
        r"""$J^{-\top} v$."""
        ...

    @property
    def extremes(self) -> tuple[float, float] | None:
        """The largest and the smallest singular value, where they are read off; else `None`."""
        ...


class Room:
    """How many bytes of graphs may still be kept; shared by the blocks of a model.

    Args:
        device: Where the graphs are: on a GPU a quarter of what is free, elsewhere 1 GiB.

    Example:
        >>> room = Room(torch.device("cpu"))
        >>> room.take(2**29), room.take(2**30), room.take(2**29)
        (True, False, True)
    """

    def __init__(self, device: torch.device) -> None:
        self.left = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 2**30

    @classmethod
    def none(cls) -> Room:
        """No room, found without asking the device."""
        room = cls(torch.device("cpu"))
        room.left = 0
        return room

    def take(self, size: int) -> bool:
        """Whether there is room for this many bytes; they are then taken."""
        if size > self.left:
            return False
        self.left -= size
        return True


def structured(
    part: Bijection, x: Tensor, context: Tensor | None, room: Room, *, whole: bool = False
) -> Structured | None:
    """The Jacobian of a block at points, if its structure is known.

    Args:
        part: The block.
        x: The points, float64.
        context: Their contexts.
        room: Where graphs are kept.
        whole: Write the nets of couplings down as well, now: products then read what was written and build no graphs. `None` where
            that cannot be.

    Example:
        >>> from bilip.blocks import Squeeze
        >>> x = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
        >>> structured(Squeeze(), x, None, Room(x.device)).apply(x + 1).shape
        torch.Size([1, 4, 1, 1])
    """
    if isinstance(part, OnKept):
        size, shape, latent = math.prod(part.kept_shape), part.kept_shape, part.kept_latent
        inner = structured(part.block, x[:, :size].unflatten(1, shape), context, room, whole=whole)
        return None if inner is None else _Kept(inner, shape, latent)
    with torch.no_grad():
        if isinstance(part, ActNorm):
            return _Diagonal(part.log_scale.exp().view([-1 if k == part.dim % x.ndim else 1 for k in range(x.ndim)]))
        if isinstance(part, DiagonalScaling):
            return _Diagonal(part.diagonal(x))
        if isinstance(part, InvertibleConv1x1):
            return _Channels(part.matrix(x.dtype).detach(), part.inverse_matrix().detach())
    if part.rearranges:
        return _Rearranged(part)
    if isinstance(part, (AdditiveCoupling, AffineCoupling)):
        known = _Triangle(part, x, context, room)
        return known if not whole or known.write_down() else None
    return None


@dataclass(frozen=True)
class _Diagonal:
    diagonal: Tensor

    def apply(self, v: Tensor) -> Tensor:
        return v * self.diagonal

    def solve(self, w: Tensor) -> Tensor:
        return w / self.diagonal

    adjoint, solve_adjoint = apply, solve

    @property
    def extremes(self) -> tuple[float, float]:
        return self._ends

    @cached_property
    def _ends(self) -> tuple[float, float]:
        return float(self.diagonal.abs().max()), float(self.diagonal.abs().min())


@dataclass(frozen=True)
class _Channels:
    matrix: Tensor
    inverse: Tensor

    def apply(self, v: Tensor) -> Tensor:
        return _mix(self.matrix, v)

    def adjoint(self, u: Tensor) -> Tensor:
        return _mix(self.matrix.mT, u)

    def solve(self, w: Tensor) -> Tensor:
        return _mix(self.inverse, w)

    def solve_adjoint(self, v: Tensor) -> Tensor:
        return _mix(self.inverse.mT, v)

    @property
    def extremes(self) -> tuple[float, float]:
        return self._ends

    @cached_property
    def _ends(self) -> tuple[float, float]:
        values = torch.linalg.svdvals(self.matrix)
        return float(values[0]), float(values[-1])


def _mix(matrix: Tensor, v: Tensor) -> Tensor:
    if v.ndim == 2:
        return v @ matrix.mT
    return torch.bmm(matrix.expand(len(v), -1, -1), v.flatten(2)).view(v.shape)


@dataclass(frozen=True)
class _Rearranged:
    part: Bijection

    @torch.no_grad()
    def apply(self, v: Tensor) -> Tensor:
        return self.part(v)

    @torch.no_grad()
    def solve(self, w: Tensor) -> Tensor:
        return self.part.inverse(w)

    adjoint, solve_adjoint = solve, apply
    extremes = 1.0, 1.0


@dataclass(frozen=True)
class _Kept:
    """A block that acts on the first entries of a flat state."""

    inner: Structured
    shape: tuple[int, ...]
    latent: tuple[int, ...]

    def apply(self, v: Tensor) -> Tensor:
        return self._on(self.inner.apply, v, self.shape)

    def adjoint(self, u: Tensor) -> Tensor:
        return self._on(self.inner.adjoint, u, self.latent)

    def solve(self, w: Tensor) -> Tensor:
        return self._on(self.inner.solve, w, self.latent)

    def solve_adjoint(self, v: Tensor) -> Tensor:
        return self._on(self.inner.solve_adjoint, v, self.shape)

    @property
    def extremes(self) -> tuple[float, float] | None:
        inner = self.inner.extremes
        return None if inner is None else (max(inner[0], 1.0), min(inner[1], 1.0))  # the rest is passed on

    @staticmethod
    def _on(act, v: Tensor, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        return torch.cat((act(v[:, :size].unflatten(1, shape)).flatten(1), v[:, size:]), 1)


class _Triangle:
    """A coupling: what it passes on stays, what it transforms is scaled and moved with what the nets see."""

    extremes = None

    def __init__(self, part: AdditiveCoupling | AffineCoupling, x: Tensor, context: Tensor | None, room: Room) -> None:
        self.part, self.context, self.room = part, context, room
        self.x1, self.x2 = part.partition.split(x.detach())
        self.gain: Tensor | None = None
        self.slope: Tensor | None = None  # x2 g'(s), what a change of the raw scale does
        if isinstance(part, AffineCoupling):
            with torch.enable_grad():
                raw = part.shift_and_raw_scale(self.x1, self.x2, context)[1].detach().requires_grad_()
                gain = part.scale(raw)
                self.slope = self.x2 * torch.autograd.grad(gain.sum(), raw)[0]
            self.gain = gain.detach()
        self.known: _Graph | None = None
        self.written: _Chain | None = None

    def write_down(self) -> bool:
        """Keep the Jacobian of the nets, both ways; whether that can be done."""
        chain = self._chain()
        if chain is None or not chain.both_ways or type(self.part.partition).outputs is not Partition.outputs:
            return False
        self.written = chain
        return True

    def apply(self, v: Tensor) -> Tensor:
        v1, v2 = self.part.partition.split(v)
        moved = self._jvp(v1)
        return self.part.partition.merge(v1, moved + v2 if self.gain is None else torch.addcmul(moved, self.gain, v2))

    def adjoint(self, u: Tensor) -> Tensor:
        u1, u2 = self.part.partition.split(u)
        return self.part.partition.merge(u1 + self._vjp(u2), u2 if self.gain is None else self.gain * u2)

    def solve(self, w: Tensor) -> Tensor:
        w1, w2 = self.part.partition.split(w)
        rest = w2 - self._jvp(w1)
        return self.part.partition.merge(w1, rest if self.gain is None else rest / self.gain)

    def solve_adjoint(self, v: Tensor) -> Tensor:
        v1, v2 = self.part.partition.split(v)
        second = v2 if self.gain is None else v2 / self.gain
        return self.part.partition.merge(v1 - self._vjp(second), second)

    # ---- N

    def _jvp(self, v1: Tensor) -> Tensor:
        if len(v1) != len(self.x1):
            return jvp_many(self._moved, self.x1, v1)
        graph = None if self.written is not None else self._graph()
        chain = self.written if graph is None else graph.chain
        if chain is not None:
            shift, *raw = self._outputs(chain.apply(v1))
        else:
            shift, *raw = (graph or self._graph()).jvp(v1)
        return shift if self.slope is None else torch.addcmul(shift, self.slope, *raw)

    def _vjp(self, u2: Tensor) -> Tensor:
        if len(u2) != len(self.x1):
            return vjp_many(self._moved, self.x1, u2)
        directions = [u2] if self.slope is None else [u2, self.slope * u2]
        if self.written is not None:
            return self.written.adjoint(torch.cat(directions, self.part.partition.feature_dim))
        return self._graph().vjp(directions)

    def _moved(self, x1: Tensor) -> Tensor:
        """The transformed part as a function of the part that the nets see."""
        x2, context = rows(self.x2, len(x1)), rows(self.context, len(x1))
        shift, *raw = self._nets(x1, x2, context)
        if isinstance(self.part, AffineCoupling):
            return torch.addcmul(shift, x2, self.part.scale(*raw))
        return x2 + shift

    def _nets(self, x1: Tensor, x2: Tensor, context: Tensor | None) -> list[Tensor]:
        if isinstance(self.part, AffineCoupling):
            return list(self.part.shift_and_raw_scale(x1, x2, context))
        return [self.part.shift(x1, x2, context)]

    def _outputs(self, h: Tensor) -> list[Tensor]:
        """Shift and raw scale from what a single net gives."""
        if isinstance(self.part, AffineCoupling):
            return list(self.part.halves(h, self.x2))
        return [self.part.partition.outputs(h)]

    def _chain(self) -> _Chain | None:
        net = self.part.t
        if getattr(self.part, "s", None) is not None or not isinstance(net, (MLP, ConvNet)):
            return None
        return _chain_of(net, self.x1, self.context)

    def _graph(self) -> _Graph:
        """The nets at the points, evaluated once; anew in each product where there is no room to keep the graph."""
        if self.known is not None:
            return self.known
        sizes = []

        def count(saved: Tensor) -> Tensor:
            sizes.append(saved.numel() * saved.element_size())
            return saved

        point = self.x1.clone().requires_grad_()
        with torch.enable_grad():
            if not self.room.left:
                return _Graph(point, self._nets(point, self.x2, self.context))
            with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
                outputs = self._nets(point, self.x2, self.context)
            if not self.room.take(2 * sum(sizes)):  # and as much again for its backward pass
                self.room.left = 0
                return _Graph(point, outputs)
            self.known = _Graph(point, self._nets(point, self.x2, self.context), self._chain())
        return self.known


class _Graph:
    """Nets at points: their outputs with the graph behind them, and for one net of known layers the chain of their Jacobians."""

    def __init__(self, point: Tensor, outputs: list[Tensor], chain: _Chain | None = None) -> None:
        self.point, self.outputs, self.chain = point, outputs, chain
        self.probes: list[Tensor] = []
        self.vjp_of_probes: Tensor | None = None

    def vjp(self, directions: list[Tensor]) -> Tensor:
        return torch.autograd.grad(
            self.outputs, self.point, directions, retain_graph=True, allow_unused=True, materialize_grads=True
        )[0]

    def jvp(self, direction: Tensor) -> list[Tensor]:
        if self.vjp_of_probes is None:
            self.probes = [torch.zeros_like(output, requires_grad=True) for output in self.outputs]
            with torch.enable_grad():
                self.vjp_of_probes = torch.autograd.grad(
                    self.outputs, self.point, self.probes, create_graph=True, allow_unused=True, materialize_grads=True
                )[0]
        if not self.vjp_of_probes.requires_grad:
            return [torch.zeros_like(probe) for probe in self.probes]
        return list(
            torch.autograd.grad(
                self.vjp_of_probes, self.probes, direction, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        )


@dataclass(frozen=True)
class _Chain:
    """The Jacobian of a net, layer by layer: what each does to a direction, and its transpose where that is known."""

    steps: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]]

    @property
    def both_ways(self) -> bool:
        return all(back is not None for _, back in self.steps)

    def apply(self, v: Tensor) -> Tensor:
        for step, _ in self.steps:
            v = step(v)
        return v

    def adjoint(self, u: Tensor) -> Tensor:
        for _, back in reversed(self.steps):
            u = back(u)  # type: ignore[misc]
        return u


def _chain_of(net: LayeredNet, x1: Tensor, context: Tensor | None) -> _Chain | None:
    """The Jacobian of a net of known layers at points, one product or one convolution a layer; `None` for other layers."""
    steps: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]] = []
    h = x1
    if net.context and context is not None:
        none, width = torch.zeros_like(context), x1.shape[net.dim]
        steps.append((lambda v: torch.cat((v, none), net.dim), lambda u: u.narrow(net.dim, 0, width)))
        h = torch.cat((x1, context), net.dim)
    for layer in net.layers:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            held = getattr(layer, "held_weight", None)
            weight = layer.weight if held is None else held()
            if isinstance(layer, GainConv2d):
                weight = weight * (3 * layer.log_gain).exp()[:, None, None, None]
            act = F.linear if isinstance(layer, nn.Linear) else layer._conv_forward
            weight = weight.detach()
            steps.append((partial(_linear, act, weight), _transposed(layer, weight, h.shape)))
        elif activations.facts(layer) is not None:
            with torch.enable_grad():
                point = h.detach().requires_grad_()
                slope = torch.autograd.grad(layer(point.clone()).sum(), point)[0]
            steps.append((partial(torch.mul, slope), partial(torch.mul, slope)))
        else:
            return None
        with torch.no_grad():
            h = layer(h.clone())
    return _Chain(steps)


def _linear(act: Callable[..., Tensor], weight: Tensor, v: Tensor) -> Tensor:
    return act(v, weight, None)


def _transposed(layer: nn.Linear | nn.Conv2d, weight: Tensor, shape: torch.Size) -> Callable[[Tensor], Tensor] | None:
    """The transpose of a layer for inputs of a shape; `None` for a convolution that pads with anything but zeros."""
    if isinstance(layer, nn.Linear):
        return lambda u: u @ weight
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    options: Any = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}
    return lambda u: conv2d_input(list(shape), weight, u, **options)
