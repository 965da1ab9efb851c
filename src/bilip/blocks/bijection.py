"""The interface of every invertible map, and the state of a proof on its way through one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bilip.blocks._nets import first_parameter
from bilip.blocks.partition import Partition
from bilip.bounds import BiLipschitz, BlockBound, Box, log_product
from bilip.errors import BilipError, InputError, NoGlobalBound, NonFiniteParameters, UnknownLipschitz
from bilip.nets.certify import remembering
from bilip.nets.readable import as_born, odd_tensor, parametrized, tampered, unstated

__all__ = ["FORMULAS", "Bijection", "Composite", "Directed", "Reach", "Step"]

FORMULAS = ("sharp", "paper")


@dataclass(frozen=True)
class Reach:
    """A set enclosed twice: by a box, and by a ball around the image of one point."""

    box: Box  # encloses the set
    center: Box | None  # encloses the image of the starting box's centre; `None` when there is no ball
    log_radius: float  # log of the ball's radius: the product of the constants so far times the starting radius
    asked_bounded: bool  # whether the proof began on a bounded set, so that an infinity now means overflow

    @classmethod
    def start(cls, box: Box) -> Reach:
        """The box that a proof begins with."""
        if box.shape and box.is_bounded:
            return cls(box, Box.point(box.center), box.log_radius, True)
        return cls(box, None, math.inf, box.is_bounded)

    def through(self, interval: Callable[[Box], Box], log_lip: float) -> Reach:
        """The reach after a map with this interval extension and this Lipschitz constant on the present box."""
        if not self.box.shape:
            return Reach(Box.everything(), None, math.inf, False)  # without a shape nothing is enclosed
        image = interval(self.box)
        if self.center is None:
            return self.restarted(image)
        center, log_radius = interval(self.center), log_product(self.log_radius, log_lip)
        if log_radius < 700 and center.is_bounded:
            radius = math.exp(log_radius) * (1 + 1e-12)
            image = image.intersect(Box.outward(center.low - radius, center.high + radius))
        ball = Reach(image, center, log_radius, self.asked_bounded)
        fresh = self.restarted(image)
        # The centre's own enclosure widens with depth; what counts is how far ball and width together reach.
        worn = log_radius if not center.is_bounded else max(log_radius, center.log_radius)
        return fresh if fresh.center is not None and (fresh.log_radius < worn or not center.is_bounded) else ball

    def restarted(self, image: Box) -> Reach:
        """The reach that knows only this box."""
        fresh = Reach.start(image)
        return Reach(fresh.box, fresh.center, fresh.log_radius, self.asked_bounded)


@dataclass(frozen=True)
class Step:
    """What a proof learned from one block or a whole chain."""

    log_forward: float
    log_inverse: float
    reach: Reach
    blocks: tuple[BlockBound, ...]


class Bijection(nn.Module):
    r"""An invertible map $F$ between tensors with a batch dimension, $z = F(x)$.

    A block of your own defines the four maps. To take part in proofs it also defines the two Lipschitz constants and
    the two interval images at the end of this class; `bilip.testing.check_contract` checks all of it. Nothing is proved about a
    subclass that overrides a map and inherits the constants: it states them anew.

    Attributes:
        shape: Shape of one input sample, where it is known.
        volume_preserving: `True` if the log-determinant is always zero, which lets a chain skip it.
        rearranges: `True` if the map only moves entries around.
        closed_form: `False` if the inverse is iterative, so that it is known to a tolerance only.

    Example:
        >>> import math
        >>> class Double(Bijection):
        ...     def forward(self, x, context=None):
        ...         return 2 * x
        ...     def inverse(self, z, context=None):
        ...         return z / 2
        ...     def forward_and_log_det(self, x, context=None):
        ...         return 2 * x, x.new_full(x.shape[:1], x[0].numel() * math.log(2))
        ...     def log_lip(self, box, context=None, formula="sharp"):
        ...         return math.log(2)
        ...     def log_lip_inverse(self, box, context=None, formula="sharp"):
        ...         return -math.log(2)
        ...     def interval(self, box, context=None):
        ...         return Box(2 * box.low, 2 * box.high)
        ...     def interval_inverse(self, box, context=None):
        ...         return Box(box.low / 2, box.high / 2)
        >>> Double().bounds()
        BiLipschitz(forward=2, inverse=0.5, domain=Box(-inf, inf))
    """

    shape: tuple[int, ...] | None = None
    volume_preserving: bool = False
    rearranges: bool = False
    closed_form: bool = True
    # The methods that state what is proved: a subclass that changes a map defines all of them, and of `advance`, `retreat` and
    # `log_lip_inverse_on_image` those that its bases define.
    proof_methods: ClassVar[tuple[str, ...]] = ("log_lip", "log_lip_inverse", "interval", "interval_inverse")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        as_born(cls)

    # ---- the maps

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """z = F(x)."""
        raise BilipError(f"{type(self).__name__} defines no forward.")

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        """x = F^-1(z)."""
        raise BilipError(f"{type(self).__name__} defines no inverse.")

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """z = F(x) and log |det J_F(x)|, of shape `(batch,)`."""
        if self.volume_preserving:
            return self(x, context), x.new_zeros(x.shape[:1])
        raise BilipError(f"{type(self).__name__} defines no forward_and_log_det.")

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x = F^-1(z) and log |det J_F^-1(z)|, of shape `(batch,)`."""
        x = self.inverse(z, context)
        if self.volume_preserving:
            return x, z.new_zeros(z.shape[:1])
        return x, -self.forward_and_log_det(x, context)[1]

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one latent, for inputs of the given shape."""
        return tuple(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one input, for latents of the given shape."""
        return tuple(shape)

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        """The blocks that this map is made of, with their paths: applied one after the other they are the map."""
        return [(name or "0", self)]

    # ---- the proofs

    def bounds(
        self,
        domain: Box | None = None,
        *,
        latent: Box | None = None,
        context: Box | None = None,
        formula: str = "sharp",
    ) -> BiLipschitz:
        r"""Proven bounds on Lip(F) and Lip(F^-1).

        Args:
            domain: The box on which F is bounded; F^-1 is bounded on its image. Everywhere by default.
            latent: Start from a box of latents instead: F^-1 is bounded on it and F on its preimage.
            context: A box that holds the contexts; any context by default.
            formula: `"sharp"`, the norm of the matrix of block norms, or `"paper"`, the lemmas of the paper.

        Raises:
            NoGlobalBound: No constant holds on all of space; pass a box.
            UnknownLipschitz: A net inside cannot be read (declare its constant), or a block does not compute what its
                class says: it has hooks, replaced methods, or a subclass that overrides a map and inherits the constants.
            NonFiniteParameters: A parameter is NaN or Inf.
        """
        if formula not in FORMULAS:
            raise InputError(f"bounds(formula={formula!r}): expected one of {', '.join(map(repr, FORMULAS))}.")
        for name, box in (("domain", domain), ("latent", latent), ("context", context)):
            if box is not None and not isinstance(box, Box):
                raise InputError(f"bounds({name}={box!r}): expected a bilip.Box, for example bilip.Box(-4, 4).")
        if domain is not None and latent is not None:
            raise InputError("bounds: give a domain or a latent box, not both.")
        self._require_finite()
        if latent is None:
            box = self._shaped(self.natural_domain() if domain is None else domain, self.shape)
            step = self._prove(self.advance, box, context, formula)
            return self._result(step, box, formula)
        box = self._shaped(latent, None if self.shape is None else self.out_shape(self.shape))
        step = self._prove(self.retreat, box, context, formula)
        return self._result(step, box, formula).swap()

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        """A box that holds F(box): the interval image cut with a ball around the image of the centre."""
        return self._prove(self.advance, self._shaped(box, self.shape), context, "sharp").reach.box

    def enclose_inverse(self, box: Box, context: Box | None = None) -> Box:
        """A box that holds F^-1(box), likewise."""
        shape = None if self.shape is None else self.out_shape(self.shape)
        return self._prove(self.retreat, self._shaped(box, shape), context, "sharp").reach.box

    def _prove(self, act: Callable[..., Step], box: Box, context: Box | None, formula: str) -> Step:
        self._require_readable()
        try:
            with torch.no_grad(), remembering():
                return act(Reach.start(box), context, formula)
        except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
            if isinstance(error, BilipError):
                raise
            # A part of another kind, or a number, than it was built with.
            if not isinstance(error, (RuntimeError, IndexError)):
                raise UnknownLipschitz(
                    f"{type(self).__name__} holds a part about which nothing can be proved ({error}). Use the nets, partitions and "
                    "scales of bilip, or such as state what is proved about them."
                ) from error
            raise InputError(
                f"{type(self).__name__}: a box of shape {box.shape}"
                + (f" with a context of shape {context.shape}" if context is not None else "")
                + f" does not fit ({error}). Give the box the shape of one sample."
            ) from error

    def advance(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        """One step of a proof: bound F on the set that reaches this block, enclose its image, bound F^-1 there."""
        log_forward = self.log_lip(reach.box, context, formula)
        after = reach.through(lambda box: self.interval(box, context), log_forward)
        log_inverse = self.log_lip_inverse(after.box, context, formula)
        log_inverse = min(log_inverse, self.log_lip_inverse_on_image(reach.box, context, formula))
        return self._step(reach, after, log_forward, log_inverse, name, after.box)

    def retreat(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        """`advance` for the inverse map: bound F^-1 on the set of latents, enclose its preimage, bound F there."""
        log_forward = self.log_lip_inverse(reach.box, context, formula)
        after = reach.through(lambda box: self.interval_inverse(box, context), log_forward)
        log_inverse = self.log_lip(after.box, context, formula)
        return self._step(reach, after, log_forward, log_inverse, name, reach.box)

    def _step(
        self, before: Reach, after: Reach, log_forward: float, log_inverse: float, name: str, output: Box
    ) -> Step:
        if max(log_forward, log_inverse) == float("inf") and not before.asked_bounded:
            where = f"block {name} ({type(self).__name__})" if name else type(self).__name__
            end = ")" if before.box.shape else ", shape=(2,)), with the shape of one sample,"
            raise NoGlobalBound(
                f"{where} has no Lipschitz constant that holds on all of space: its Jacobian grows with its input. "
                f"Pass a box, for example bounds(bilip.Box(-4, 4{end}) or --box -4 4 on the command line, for a constant that "
                "holds there; or use additive coupling, which has a global one."
            )
        row = BlockBound(name or "0", type(self).__name__, log_forward, log_inverse, output.magnitude)
        return Step(log_forward, log_inverse, after, (row,))

    def natural_domain(self) -> Box:
        """Where F is defined: what `bounds()` without a box speaks about."""
        return Box.everything()

    def _shaped(self, box: Box, shape: tuple[int, ...] | None) -> Box:
        if shape is not None:
            if box.shape and box.shape != tuple(shape):
                raise InputError(
                    f"the box has shape {box.shape}, but {type(self).__name__} takes samples of shape {tuple(shape)}."
                )
            return box.expand(shape)
        if not box.shape and box != self.natural_domain() and box.is_bounded:
            raise InputError(
                f"{type(self).__name__} does not know the shape of its input, so {box} says too little. "
                "Give the box a shape: bilip.Box(-4, 4, shape=(2,))."
            )
        return box

    def _result(self, step: Step, domain: Box, formula: str) -> BiLipschitz:
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())
        return BiLipschitz(
            log_forward=step.log_forward,
            log_inverse=step.log_inverse,
            domain=domain,
            image=step.reach.box,
            formula=formula,
            eps=torch.finfo(dtype).eps,
            blocks=step.blocks,
        )

    def _require_readable(self) -> None:
        """Raise unless every block inside, with its partition and scale, computes what its class says."""
        for name, part in self.named_modules():
            for thing in (part, *vars(part).values()):
                statements: tuple[str, ...] | None = getattr(type(thing), "proof_methods", None)
                if statements is None:
                    continue
                if "log_lip" in statements:
                    steps = ("advance", "retreat", "log_lip_inverse_on_image")
                    statements += tuple(
                        name for name in steps if getattr(type(thing), name) is not vars(Bijection)[name]
                    )
                why = tampered(thing) or (parametrized(thing) if isinstance(thing, nn.Module) else None)
                if why is None:
                    root = next(kind for kind in reversed(type(thing).__mro__) if "proof_methods" in vars(kind))
                    overridden = unstated(type(thing), statements, root)
                    if overridden is not None:
                        why = f"has {overridden}, but inherits what was proved without it ({', '.join(statements)})"
                if isinstance(thing, Partition):
                    thing.require_sound()
                if why is not None:
                    where = f" (at {name!r})" if name else ""
                    raise UnknownLipschitz(
                        f"{type(thing).__name__}{where} {why}, so no bound can be proved for it. "
                        "Remove what changes it, or state the bounds of the changed map in a class of your own."
                    )

    @torch.no_grad()
    def _require_finite(self) -> None:
        for name, value in (*self.named_parameters(), *self.named_buffers()):
            if (odd := odd_tensor(value)) is not None:
                raise UnknownLipschitz(
                    f"{name!r} of {type(self).__name__} is {odd}, so no bound can be proved. Convert it to plain numbers, or load "
                    "them, first."
                )
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                bad = int((~torch.isfinite(value)).sum())
                raise NonFiniteParameters(
                    f"{name!r} of {type(self).__name__} holds {bad} NaN or Inf of {value.numel()} entries, so nothing can be "
                    "proved. Load an earlier checkpoint, or find the step where training diverged."
                )

    # ---- what a block states about itself, in real arithmetic

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        """Log of an upper bound on Lip(F) on a box; `inf` if there is none."""
        raise self._unproved("log_lip")

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        """Log of an upper bound on Lip(F^-1) on a box of latents."""
        raise self._unproved("log_lip_inverse")

    def log_lip_inverse_on_image(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        """Log of an upper bound on Lip(F^-1) on F(box), for blocks that know a better one than on a box around F(box)."""
        return float("inf")

    def interval(self, box: Box, context: Box | None = None) -> Box:
        """A box that holds F(box), by interval arithmetic."""
        raise self._unproved("interval")

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        """A box that holds F^-1(box), by interval arithmetic."""
        raise self._unproved("interval_inverse")

    def _unproved(self, name: str) -> BilipError:
        return BilipError(
            f"{type(self).__name__} does not define {name}, so no bound can be proved for it. Add the method to the block."
        )

    # ---- input checks

    def check(self, x: Tensor, features: int | None = None, dim: int = 1) -> None:
        """Raise an `InputError` unless `x` is a batch of floats that fits the parameters of this block."""
        who = type(self).__name__
        if not isinstance(x, Tensor):
            raise InputError(f"{who}: expected a tensor, got {type(x).__name__}. Convert it with torch.as_tensor.")
        if not x.is_floating_point():
            raise InputError(f"{who}: expected floating-point input, got {x.dtype}. Convert it with x.float().")
        if x.ndim < 2:
            raise InputError(
                f"{who}: expected a batch, shape (batch, ...), got {tuple(x.shape)}. Add a batch dimension with x[None]."
            )
        if features is not None and (not -x.ndim <= dim < x.ndim or x.shape[dim] != features):
            raise InputError(
                f"{who}: expected {features} features along dimension {dim}, got an input of shape {tuple(x.shape)}."
            )

    def check_net(self, x: Tensor, net: nn.Module) -> Tensor:
        """Return `x`, or raise an `InputError` unless it is a batch of floats that fits the parameters of a net."""
        self.check(x)
        parameter = first_parameter(net)
        if parameter is not None:
            self.check_like(x, parameter)
        return x

    def check_like(self, x: Tensor, parameter: Tensor) -> None:
        """Raise an `InputError` unless `x` has the dtype and device of a parameter."""
        if x.device != parameter.device:
            raise InputError(
                f"{type(self).__name__}: the input is on {x.device}, the parameters on {parameter.device}. "
                "Move one of them with .to()."
            )
        if x.dtype != parameter.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InputError(
                f"{type(self).__name__}: the input is {x.dtype}, the parameters are {parameter.dtype}. "
                "Convert one of them, for example model.to(x.dtype)."
            )


class Directed(Bijection):
    """A bijection whose four maps are one method, which is told the direction and whether the log-determinant is wanted."""

    def _map(self, x: Tensor, context: Tensor | None, *, inverse: bool, log_det: bool) -> tuple[Tensor, ...]:
        """What comes out; with `log_det`, and the log-determinant."""
        raise BilipError(f"{type(self).__name__} defines no _map.")

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self._map(x, context, inverse=False, log_det=False)[0]

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return self._map(z, context, inverse=True, log_det=False)[0]

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._map(x, context, inverse=False, log_det=True)  # type: ignore[return-value]

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._map(z, context, inverse=True, log_det=True)  # type: ignore[return-value]


class Composite(Bijection):
    """A map whose proofs go through the blocks inside, one after the other; what is stated about it is what that finds."""

    def _walk(self, reach: Reach, context: Box | None, formula: str, name: str, *, backward: bool) -> Step:
        """What `advance` finds, or, where `backward` is set, `retreat`: from the steps of the blocks inside."""
        raise self._unproved("_walk")

    def advance(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self._walk(reach, context, formula, name, backward=False)

    def retreat(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self._walk(reach, context, formula, name, backward=True)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.advance(Reach.start(box), context, formula).log_forward

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.retreat(Reach.start(box), context, formula).log_forward

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return self.enclose(box, context)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return self.enclose_inverse(box, context)
