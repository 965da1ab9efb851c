r"""Blocks and models linearised at points: products with their Jacobians and with the inverses of those.

The composed inverse overflows exactly where its Jacobian is wanted. So each visible block's inverse Jacobian is applied at the
*stored forward activations*: $J_F^{-1} = J_1^{-1} \cdots J_n^{-1}$, with $J_k$ taken where the forward pass went through block $k$.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bilip import _linalg
from bilip._torch import Replayed, rows
from bilip.blocks import ActNorm, AdditiveCoupling, AffineCoupling, Bijection, DiagonalScaling, Residual
from bilip.blocks.factor_out import OnKept
from bilip.errors import NotMeasured
from bilip.linalg.jacobian import jvp, jvp_many, vjp, vjp_many
from bilip.linalg.structured import Room, Structured, structured
from bilip.nets import MLP, ConvNet
from bilip.nets.readable import tampered

__all__ = ["AtPoint", "LinearPart", "Linearized", "Repointed"]

_WORST_RESIDUAL = 1e-4
_DENSE = 1024
_SMALL = 64
_SWEEPS = 400
_OWN = ("bilip.", "torch.nn.modules.")


class LinearPart:
    r"""One block, linearised at a batch of points: $v \mapsto J v$, $J^\top u$, $J^{-1} w$ and $J^{-\top} v$, all flat.

    Up to 64 entries the Jacobians themselves are built. Diagonals, matrices over channels, rearrangements and couplings have a
    `structured` Jacobian, which is compared once with what autograd finds for a random direction. Other blocks are differentiated
    in every product. Coupling and residual blocks are solved from their forward Jacobian
    alone: that of a coupling is triangular, with a diagonal for the part that is transformed, and for $x + g(x)$ the map
    $v \mapsto w - J_g v$ contracts. Of other blocks the own inverse is differentiated at their output. Every part is checked
    on a random direction, $|J J^{-1} w - w|$; where its road fails the check, as with an iterative inverse that autograd does
    not see through, the other roads are tried.

    Args:
        part: The block.
        x: The points, `(batch, ...)`, float64.
        context: Their contexts.
        name: Path for messages.
        room: Where the graphs of nets are kept, shared by the blocks of a model.
        like: The same block at points a rounding away, whose checks serve here too.
        whole: See `structured`.

    Attributes:
        residual: Largest $|J J^{-1} w - w| / |w|$ over the batch, on random directions.
        log_det: The log-determinant of a linear block, kept here by who finds it.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> block = DiagonalScaling(torch.tensor([2.0, 0.5])).double()
        >>> LinearPart(block, torch.zeros(1, 2, dtype=torch.float64)).solve(torch.ones(1, 2, dtype=torch.float64))
        tensor([[0.5000, 2.0000]], dtype=torch.float64)
    """

    def __init__(
        self,
        part: Bijection,
        x: Tensor,
        context: Tensor | None = None,
        name: str = "",
        *,
        room: Room | None = None,
        like: LinearPart | None = None,
        whole: bool = False,
    ) -> None:
        self.part, self.x, self.context, self.name = part, x, context, name
        self._room, self._like, self._whole = room or Room(x.device), like, whole
        with torch.no_grad():
            self.z = part(x.clone(), context).detach()
        self.residual = math.nan
        self._moved = _moved_entries(part, x)
        self._small = x[0].numel() <= _SMALL
        self._road = "triangle" if self._moved is not None else "dense" if self._small else "inverse"
        if _is_residual(part) and not self._small:
            self._road = "contraction"
        self._checked = False
        self._dense: Tensor | None = None
        self._scales: Tensor | None = None
        self._structure: Structured | None = None
        self._looked = False
        self.log_det: float | None = None

    def _forward(self, x: Tensor) -> Tensor:
        return self.part(x.clone(), rows(self.context, len(x)))

    def _inverse(self, z: Tensor) -> Tensor:
        return self.part.inverse(z.clone(), rows(self.context, len(z)))

    @property
    def moved(self) -> Tensor | None:
        """1 where a coupling block transforms an entry of the flat state, 0 where it passes it on; `None` for other blocks."""
        return self._moved

    @property
    def extremes(self) -> tuple[float, float] | None:
        """The largest and the smallest singular value of a large block that is linear, from its numbers; `None` for other blocks."""
        known = self._structured()
        return None if known is None else known.extremes

    # ---- J

    def apply(self, v: Tensor) -> Tensor:
        """$J v$, for each point its own direction; for one point any number of directions."""
        if self._small:
            return torch.einsum("...ij,...j->...i", self._matrix(), v)
        if (known := self._structured()) is not None:
            return known.apply(v.reshape(len(v), *self.x.shape[1:])).flatten(1)
        return self._over(jvp, jvp_many, self._forward, self.x, v)

    def adjoint(self, u: Tensor) -> Tensor:
        r"""$J^\top u$."""
        if self._small:
            return torch.einsum("...ji,...j->...i", self._matrix(), u)
        if (known := self._structured()) is not None:
            return known.adjoint(u.reshape(len(u), *self.z.shape[1:])).flatten(1)
        return self._over(vjp, vjp_many, self._forward, self.x, u, self.z)

    def _structured(self) -> Structured | None:
        """The written-down Jacobian, where there is one that does what autograd does."""
        if self._looked:
            return self._structure
        self._looked = True
        if self._small or (self._like is not None and self._like._structured() is None):
            return None
        try:
            known = structured(self.part, self.x, self.context, self._room, whole=self._whole)
            if known is None:
                return None
            if self._like is None and not _does_what_its_class_says(self.part):
                v, u = (_random(one) for one in (self.x, self.z))
                # Nothing on trust: a subclass or a hook may have made another map of the block, and a backward pass that
                # cannot be differentiated loses products without a word.
                pairs = (
                    (known.apply(v), jvp(self._forward, self.x, v)),
                    (known.adjoint(u), vjp(self._forward, self.x, u)),
                )
                if not all(_same(own, differentiated) for own, differentiated in pairs):
                    return None
            self._structure = known
        except (RuntimeError, AssertionError, ValueError, TypeError, KeyError, AttributeError):
            return None
        if self._road in ("triangle", "inverse"):
            self._road = "structured"
        return known

    def jacobians(self) -> Tensor:
        """The Jacobians at all points, `(batch, outputs, inputs)`, from one product with every direction."""
        if self._dense is None:
            count, size = len(self.x), self.x[0].numel()
            eye = torch.eye(size, dtype=self.x.dtype, device=self.x.device).repeat(count, 1)
            points = self.x.repeat_interleave(size, 0)
            context = None if self.context is None else self.context.repeat_interleave(size, 0)
            columns = jvp(lambda y: self.part(y.clone(), context), points, eye.view_as(points)).flatten(1)
            self._dense = columns.reshape(count, size, -1).mT.contiguous()
        return self._dense

    def _matrix(self) -> Tensor:
        """The Jacobians; for one point only that one, without a batch."""
        return self.jacobians()[0] if len(self.x) == 1 else self.jacobians()

    # ---- J^-1

    def solve(self, w: Tensor) -> Tensor:
        """$J^{-1} w$."""
        self._check()
        return self._solve(w)

    def solve_adjoint(self, v: Tensor) -> Tensor:
        r"""$J^{-\top} v$."""
        self._check()
        return self._solve(v, transpose=True)

    def _solve(self, w: Tensor, *, transpose: bool = False) -> Tensor:
        r"""$J^{-1} w$, or $J^{-\top} w$, on the road that was chosen."""
        if self._road == "structured" and self._structure is not None:
            act, like = (self._structure.solve_adjoint, self.x) if transpose else (self._structure.solve, self.z)
            return act(w.reshape(len(w), *like.shape[1:])).flatten(1)
        if self._road == "inverse" and transpose:
            return self._over(vjp, vjp_many, self._inverse, self.z, w, self.x)
        if self._road == "inverse":
            return self._over(jvp, jvp_many, self._inverse, self.z, w, self.z)
        if self._road == "contraction":
            return self._contract(self.adjoint if transpose else self.apply, w)
        if self._road == "triangle":
            moved, scale = self._diagonal()
            if transpose:
                second = moved * w / scale
                return (1 - moved) * (w - self.adjoint(second)) + second
            first = (1 - moved) * w
            return first + moved * (w - self.apply(first)) / scale
        matrix = self._matrix().mT if transpose else self._matrix()
        return _linalg.solve(matrix, w.T).T if len(self.x) == 1 else _linalg.solve(matrix, w[..., None])[..., 0]

    def _diagonal(self) -> tuple[Tensor, Tensor]:
        """Which entries a coupling block transforms, and their scales; 1 for the others."""
        moved = self._moved
        if moved is None:
            raise NotMeasured(f"{self._who()} is not a coupling block")
        if self._scales is None:
            self._scales = torch.where(moved > 0, self.apply(moved.expand(len(self.x), -1)), 1.0)
        return moved, self._scales

    def _contract(self, apply, w: Tensor) -> Tensor:
        v, size = w, w.norm().clamp_min(1e-300)
        for _ in range(_SWEEPS):
            after = w - (apply(v).reshape(w.shape) - v)
            change = (after - v).norm() / size
            v = after
            if not change > 1e-14:
                break
        return v

    def _check(self) -> None:
        """Choose the first road on which J J^-1 w = w holds, and keep the residual as the error estimate."""
        if self._checked:
            return
        self._checked = True
        self._structured()
        if self._like is not None:
            self._like._check()
            self._road, self.residual = self._like._road, self._like.residual
            return
        w = _random(self.z).flatten(1)
        if self.z[0].numel() != self.x[0].numel():
            raise NotMeasured(
                f"{self._who()} turns {self.x[0].numel()} numbers into {self.z[0].numel()}: it has no inverse"
            )
        roads = dict.fromkeys(
            [self._road, *(["triangle"] if self._moved is not None else []), "inverse", "contraction", "dense"]
        )
        for road in roads:
            if road == "dense" and self.x[0].numel() > _DENSE:
                continue
            self._road = road
            try:
                left = self.residuals(w)
            except (RuntimeError, AssertionError, ValueError, TypeError):
                continue
            self.residual = float(left.max()) + self._cancellation()
            if self.residual <= _WORST_RESIDUAL:
                return
        raise NotMeasured(
            f"{self._who()}: the Jacobian of its inverse is not the inverse of its Jacobian (|J J_inv v - v| = "
            f"{self.residual:.1e} |v|), so the smallest singular value is not measured"
        )

    def residuals(self, w: Tensor) -> Tensor:
        r"""$|J J^{-1} w - w| / |w|$ at each point, on the road that was chosen; and that the adjoint belongs to the same map,
        $\langle w, J^{-1} w \rangle = \langle J^{-\top} w, w \rangle$.
        """
        v, u = self._solve(w), self._solve(w, transpose=True)
        left = (self.apply(v).reshape(w.shape) - w).norm(dim=1) / w.norm(dim=1)
        pair = ((w * v).sum(1) - (u * w).sum(1)).abs() / (w.norm(dim=1) * torch.maximum(v.norm(dim=1), u.norm(dim=1)))
        return torch.maximum(left, pair)

    def write_down(self) -> bool:
        """Settle now how every product is computed, from what is written down; whether that can be done without a look at numbers."""
        self._whole = self._checked = True
        return self._structured() is not None and self._road == "structured" and _does_what_its_class_says(self.part)

    def _cancellation(self) -> float:
        """What rounding inside a block can do to its smallest singular value, where nothing is known about how it computes."""
        if not self._small or self._moved is not None or isinstance(self.part, (ActNorm, DiagonalScaling)):
            return 0.0
        values = torch.linalg.svdvals(self._matrix())
        return float((torch.finfo(values.dtype).eps * (1 + 1 / values[..., -1].clamp_min(1e-300))).max())

    def _who(self) -> str:
        return f"block {self.name} ({type(self.part).__name__})" if self.name else type(self.part).__name__

    def _over(self, batch, many, function, point: Tensor, v: Tensor, like: Tensor | None = None) -> Tensor:
        shape = (point if like is None else like).shape[1:]
        v = v.reshape(len(v), *shape)
        act = many if len(point) == 1 and len(v) > 1 else batch
        return act(function, point, v).flatten(1)


class Linearized:
    r"""A model linearised at a batch of points, in float64.

    Args:
        parts: The blocks of a model with their paths, in the order of the forward pass, as `Bijection.parts` gives them; float64.
        x: The points.
        context: Their contexts.
        noise: Relative size of noise added to every stored activation, to see how far rounding moves a result.
        like: With noise, the same without: how each block is solved was checked there.
        written: Noise for each block, `(blocks, batch, size)`: Jacobians are written down at once and nothing is looked at, so that it can
            be recorded; whoever asks for this checks what is found.

    Attributes:
        parts: The blocks, linearised where the forward pass met them.

    Example:
        >>> from bilip.models import real_nvp
        >>> at = Linearized(real_nvp(2, blocks=2).double().parts(), torch.zeros(1, 2))
        >>> v = torch.ones(1, 2, dtype=torch.float64)
        >>> bool(torch.allclose(at.solve(at.apply(v)), v))
        True
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, Bijection]],
        x: Tensor,
        context: Tensor | None = None,
        *,
        noise: float = 0.0,
        like: Linearized | None = None,
        written: Tensor | None = None,
    ) -> None:
        x = x.detach().double()
        context = context.double() if context is not None and context.is_floating_point() else context
        self.parts: list[LinearPart] = []
        self.count, self.size = len(x), x[0].numel()
        generator = torch.Generator().manual_seed(1)
        room = Room(x.device) if written is None else Room.none()
        for k, (name, part) in enumerate(parts):
            if written is not None:
                x = x * (1 + written[k].view(x.shape))
                self.parts.append(LinearPart(part, x, context, name, room=room))
                if not self.parts[-1].write_down():
                    raise NotMeasured(f"the Jacobian of block {name} is not one that is written down")
                x = self.parts[-1].z
                continue
            if noise:
                x = x * (
                    1 + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu").to(x.device)
                )
            try:
                linear = LinearPart(part, x, context, name, room=room, like=None if like is None else like.parts[k])
            except (RuntimeError, AssertionError, ValueError, TypeError, KeyError) as error:
                raise NotMeasured(f"block {name} raised in float64 ({type(error).__name__}: {error})") from error
            self.parts.append(linear)
            x = linear.z
            if x.dtype != torch.float64:
                raise NotMeasured(
                    f"block {name} computes in {x.dtype} whatever it is given, so there is no float64 Jacobian"
                )
            if not bool(torch.isfinite(x).all()):
                raise NotMeasured(f"the forward pass is not finite after block {name}, even in float64")
        self.z = x

    @property
    def residual(self) -> float:
        """Sum of the parts' residuals: an estimate of the relative error of an inverse product."""
        return sum(part.residual for part in self.parts)

    def apply(self, v: Tensor) -> Tensor:
        """$J_F v$."""
        for part in self.parts:
            v = part.apply(v)
        return v

    def adjoint(self, u: Tensor) -> Tensor:
        r"""$J_F^\top u$."""
        for part in reversed(self.parts):
            u = part.adjoint(u)
        return u

    def solve(self, w: Tensor) -> Tensor:
        """$J_F^{-1} w$, block by block."""
        for part in reversed(self.parts):
            w = part.solve(w)
        return w

    def solve_adjoint(self, v: Tensor) -> Tensor:
        r"""$J_F^{-\top} v$, block by block."""
        for part in self.parts:
            v = part.solve_adjoint(v)
        return v


class Repointed:
    r"""A model of blocks whose Jacobians can be written down, linearised at one batch of points after the other: on a GPU by replays.

    Linearising is recorded once, and so is each of the products, which read what the former writes: at other points the same recordings
    serve. What is found at a point is what `Linearized` finds there, but for rounding.

    Args:
        parts: As in `Linearized`.

    Example:
        >>> from bilip.models import glow
        >>> model = glow((3, 8, 8), levels=1, blocks=1, hidden=4, actnorm="identity").double().eval().requires_grad_(False)
        >>> Repointed(model.parts()).at(torch.rand(1, 3, 8, 8)) is None  # nothing is recorded on a CPU
        True
    """

    def __init__(self, parts: Sequence[tuple[str, Bijection]]) -> None:
        self.parts = parts
        self.here: AtPoint | None = None  # whose numbers are written down now
        self.linear: Linearized | None = None
        self._write = Replayed(self._written)
        names = ("apply", "adjoint", "solve", "solve_adjoint")
        self.products = {name: Replayed(partial(self._product, name)) for name in names}
        self.each = {name: Replayed(partial(self._each, name)) for name in names}
        self._residuals = Replayed(self._left)

    def at(self, x: Tensor, noise: float = 0.0, like: AtPoint | None = None) -> AtPoint | None:
        """The model linearised at points; `None` where that cannot be replayed, or not be trusted there.

        Args:
            x: The points.
            noise: As in `Linearized`.
            like: With noise, the same without, whose residual serves here too.
        """
        x = x.detach().double()
        moved = torch.zeros(len(self.parts), *x.flatten(1).shape, dtype=x.dtype, device=x.device)
        if noise:
            generator = torch.Generator().manual_seed(1)
            draws = [
                torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu").flatten(1) for _ in self.parts
            ]
            moved = noise * torch.stack(draws).to(x.device)
        point = AtPoint(self, x, moved)
        for other in (0.9 * x + 0.01, x):  # recorded at one point and tried at another
            if not self._write.recorded:
                self._write(other, moved)
        if not self._write.recorded:
            return None
        if not bool(point.write().all()):
            return None
        if like is not None:
            point.residual = like.residual
            return point
        left = self._residuals(_random(x).flatten(1))
        if not bool((left <= _WORST_RESIDUAL).all()):
            return None
        point.residual = float(left.sum())
        return point

    def write(self, point: AtPoint) -> Tensor:
        """Linearise at a point; for each block, whether what it gives is finite."""
        self.here = None
        found = self._write(point.x, point.noise)[0]
        self.here = point
        return found

    def _written(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """For each block whether what it gives is finite; and a product, by which a replay is compared with what it stands for."""
        self.linear = Linearized(self.parts, x, written=noise)
        return torch.stack([torch.isfinite(part.z).all() for part in self.linear.parts]), self.linear.apply(
            x.flatten(1)
        )

    def _product(self, name: str, v: Tensor) -> Tensor:
        return getattr(self.linear, name)(v)

    def _each(self, name: str, v: Tensor) -> Tensor:
        """A product of each coupling, with rows of its own."""
        parts = [part for part in self._linear().parts if part.moved is not None]
        return torch.cat([getattr(part, name)(w) for part, w in zip(parts, v.chunk(len(parts)), strict=True)])

    def _left(self, w: Tensor) -> Tensor:
        return torch.stack([part.residuals(w).max() for part in self._linear().parts])

    def _linear(self) -> Linearized:
        if self.linear is None:
            raise NotMeasured("the model is not linearised")
        return self.linear


class AtPoint:
    """A model linearised at a batch of points, with the products of `Linearized`; see `Repointed`."""

    def __init__(self, model: Repointed, x: Tensor, noise: Tensor) -> None:
        self.model, self.x, self.noise = model, x, noise
        self.count, self.size = len(x), x[0].numel()
        self.residual = math.nan

    def write(self) -> Tensor:
        """Linearise here."""
        return self.model.write(self)

    @property
    def parts(self) -> list[LinearPart]:
        """The blocks, as they are until another point is looked at."""
        self._here()
        return self.model._linear().parts

    def _here(self) -> None:
        if self.model.here is not self:
            self.write()

    def apply(self, v: Tensor) -> Tensor:
        """$J_F v$."""
        return self._product("apply", v)

    def adjoint(self, u: Tensor) -> Tensor:
        r"""$J_F^\top u$."""
        return self._product("adjoint", u)

    def solve(self, w: Tensor) -> Tensor:
        """$J_F^{-1} w$."""
        return self._product("solve", w)

    def solve_adjoint(self, v: Tensor) -> Tensor:
        r"""$J_F^{-\top} v$."""
        return self._product("solve_adjoint", v)

    def each(self, name: str, v: Tensor) -> Tensor:
        """A product, named as the methods are, of every coupling, with rows of its own: `(couplings * batch, size)`."""
        self._here()
        return self.model.each[name](v)

    @torch.no_grad()
    def local_round_trips(self) -> tuple[Tensor, Tensor]:
        """What reaches each block, and what its own inverse makes of what it gives; both `(blocks, batch, size)`."""
        pairs = [(part.x.flatten(1), part._inverse(part.z).flatten(1)) for part in self.parts]
        return torch.stack([x for x, _ in pairs]), torch.stack([back for _, back in pairs])

    def _product(self, name: str, v: Tensor) -> Tensor:
        self._here()
        return self.model.products[name](v)


def _does_what_its_class_says(part: Bijection) -> bool:
    """Whether a block is made of parts of bilip and layers of torch that nobody has changed: its Jacobian is what is written down."""
    inner = part.block if isinstance(part, OnKept) else part
    nets = [inner._modules[name] for name in ("t", "s") if inner._modules.get(name) is not None]
    if any(type(net) not in (MLP, ConvNet) for net in nets):  # others may hold functions of somebody else
        return False
    held = (*part.modules(), vars(inner).get("scale"))
    return all(type(one).__module__.startswith(_OWN) and tampered(one) is None for one in held if one is not None)


def _is_residual(part: Bijection) -> bool:
    inner = part.block if isinstance(part, OnKept) else part
    return isinstance(inner, Residual)


def _moved_entries(part: Bijection, x: Tensor) -> Tensor | None:
    """1 where a coupling block transforms an entry of the flat state, 0 where it passes it on; `None` for other blocks."""
    inner = part.block if isinstance(part, OnKept) else part
    if not isinstance(inner, (AdditiveCoupling, AffineCoupling)):
        return None
    like = x.new_zeros(1, *part.kept_shape) if isinstance(part, OnKept) else x[:1]
    passed, moved = inner.partition.split(like)
    mask = inner.partition.merge(torch.zeros_like(passed), torch.ones_like(moved)).flatten(1)
    return torch.cat((mask, mask.new_zeros(1, x[0].numel() - mask.shape[1])), 1)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).flatten(1).norm(dim=1) <= 1e-9 * b.flatten(1).norm(dim=1)).all())


def _random(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)
