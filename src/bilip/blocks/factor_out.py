"""The multi-scale architecture: part of the channels leaves early."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bilip.blocks.bijection import Bijection, Composite, Reach, Step
from bilip.blocks.chain import Chain
from bilip.blocks.wrapped import Wrapped
from bilip.bounds import BlockBound, Box
from bilip.errors import InputError
from bilip.nets.readable import is_itself

__all__ = ["FactorOut", "OnKept"]


class _OnPart(Composite, Wrapped):
    """A part of the input goes through the wrapped bijection, the rest is passed on: each constant is the larger of 1 and the inner one."""

    shape = None
    kept_shape: tuple[int, ...]  # of what goes in
    kept_latent: tuple[int, ...]  # of what comes out

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What goes through the wrapped bijection, and the rest."""
        raise NotImplementedError

    def _split_latent(self, z: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _join(self, kept: Tensor, left: Tensor) -> Tensor:
        """The latent: what came out of the wrapped bijection and the rest, flattened and joined."""
        return torch.cat((kept.flatten(1), left.flatten(1)), 1)

    _join_input = _join

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        kept, left = self._split(x)
        return self._join(self.wrapped(kept, context), left)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        kept, left = self._split_latent(z)
        return self._join_input(self.wrapped.inverse(kept, context), left)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept, left = self._split(x)
        inner, log_det = self.wrapped.forward_and_log_det(kept, context)
        return self._join(inner, left), log_det

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept, left = self._split_latent(z)
        inner, log_det = self.wrapped.inverse_and_log_det(kept, context)
        return self._join_input(inner, left), log_det

    def natural_domain(self) -> Box:
        return Box.everything()

    # ---- proofs: the inner proof on the part that goes through

    def _walk(self, reach: Reach, context: Box | None, formula: str, name: str, *, backward: bool) -> Step:
        split = self._split_latent if backward else self._split
        act = self.wrapped.retreat if backward else self.wrapped.advance
        entered = self.kept_shape if not backward else self.kept_latent

        def part(box: Box, k: int) -> Box:
            return box.map(lambda end: split(end[None])[k][0]) if box.shape else Box.everything()

        def join(inner: Box, box: Box) -> Box:
            if not (inner.shape and box.shape):
                return Box.everything()
            left, joined = part(box, 1), self._join_input if backward else self._join
            return Box(joined(inner.low[None], left.low[None])[0], joined(inner.high[None], left.high[None])[0])

        box = part(reach.box, 0) if reach.box.shape else Box.everything(entered)
        start = Reach(
            box, None if reach.center is None else part(reach.center, 0), reach.log_radius, reach.asked_bounded
        )
        step = act(start, context, formula, f"{name}.inner" if name else "inner")
        image = join(step.reach.box, reach.box)
        fresh = reach.restarted(image)
        # What is passed on keeps the maps from being contractions: the row of this block says by how much.
        forward, inverse = max(0.0, step.log_forward), max(0.0, step.log_inverse)
        row = BlockBound(
            name or "0", type(self).__name__, max(0.0, -step.log_forward), max(0.0, -step.log_inverse), image.magnitude
        )
        return Step(forward, inverse, fresh, (*step.blocks, row))


class FactorOut(_OnPart):
    r"""The first half of the channels goes on through `inner`, the rest is done; the latent is both, flattened and joined.

    $F(x) = (\text{inner}(x_{1}), x_{2})$, so each constant is the larger of 1 and inner's. A learned prior of the
    part that leaves is an affine coupling placed before this block, which turns it into a standard normal.

    Reference: Dinh et al., *Density estimation using Real NVP*, 2016.

    Args:
        inner: What the remaining channels go through.
        shape: Shape of one input, `(C, H, W)`.
        keep: Channels that remain; half, rounded up, by default.

    Example:
        >>> from bilip.blocks import Squeeze
        >>> block = FactorOut(Squeeze(), shape=(4, 8, 8))
        >>> block(torch.zeros(3, 4, 8, 8)).shape
        torch.Size([3, 256])
    """

    holds = "inner"  # the name under which the wrapped bijection is kept, in a `state_dict` too
    inner: Bijection

    def __init__(self, inner: Bijection, shape: Sequence[int], *, keep: int | None = None) -> None:
        super().__init__(inner)
        self.shape = self.image_shape = tuple(int(n) for n in shape)
        self.keep = (self.image_shape[0] + 1) // 2 if keep is None else keep
        if not 0 < self.keep < self.image_shape[0]:
            raise InputError(
                f"FactorOut(shape={self.image_shape}, keep={self.keep}): some channels must remain and some must leave."
            )
        self.kept_shape = (self.keep, *self.image_shape[1:])
        self.inner_latent = inner.out_shape(self.kept_shape)

    @property
    def kept_latent(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.inner_latent

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.check(x)
        if tuple(x.shape[1:]) != self.image_shape:
            raise InputError(
                f"FactorOut: expected samples of shape {self.image_shape}, got an input of shape {tuple(x.shape)}."
            )
        return x[:, : self.keep], x[:, self.keep :]

    def _split_latent(self, z: Tensor) -> tuple[Tensor, Tensor]:
        self.check(z)
        if tuple(z.shape[1:]) != (math.prod(self.image_shape),):
            raise InputError(
                f"FactorOut: expected flat latents of size {math.prod(self.image_shape)}, got an input of shape "
                f"{tuple(z.shape)}."
            )
        size = math.prod(self.kept_latent)
        left = (self.image_shape[0] - self.keep, *self.image_shape[1:])
        return z[:, :size].unflatten(1, self.kept_latent), z[:, size:].unflatten(1, left)

    def _join_input(self, kept: Tensor, left: Tensor) -> Tensor:
        return torch.cat((kept, left), 1)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        if tuple(shape) != self.image_shape:
            raise InputError(f"FactorOut was built for samples of shape {self.image_shape}, not {tuple(shape)}.")
        return (math.prod(shape),)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        if tuple(shape) != (math.prod(self.image_shape),):
            raise InputError(
                f"FactorOut gives flat latents of size {math.prod(self.image_shape)}, not of shape {tuple(shape)}."
            )
        return self.image_shape

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        if not is_itself(self):
            return super().parts(name)
        shape, prefix = self.kept_shape, f"{name}." if name else ""
        found: list[tuple[str, Bijection]] = [(f"{prefix}split", FactorOut(Chain(), self.image_shape, keep=self.keep))]
        for path, block in self.inner.parts(f"{prefix}inner"):
            found.append((path, OnKept(block, shape)))
            shape = block.out_shape(shape)
        return found

    def extra_repr(self) -> str:
        return f"shape={self.image_shape}, keep={self.keep}"


class OnKept(_OnPart):
    r"""A block that acts on the first entries of a flat state and leaves the rest alone: what a part of a `FactorOut` does.

    Args:
        block: The block inside.
        shape: Shape of what the block takes.

    Example:
        >>> from bilip.blocks import Permutation
        >>> OnKept(Permutation.reverse(2), shape=(2,))(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[2., 1., 3.]])
    """

    holds = "block"  # the name under which the wrapped bijection is kept, in a `state_dict` too
    block: Bijection

    def __init__(self, block: Bijection, shape: Sequence[int]) -> None:
        super().__init__(block)
        self.kept_shape = tuple(shape)
        self.kept_latent = block.out_shape(self.kept_shape)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = math.prod(self.kept_shape)
        return x[:, :size].unflatten(1, self.kept_shape), x[:, size:]

    def _split_latent(self, z: Tensor) -> tuple[Tensor, Tensor]:
        size = math.prod(self.kept_latent)
        return z[:, :size].unflatten(1, self.kept_latent), z[:, size:]

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)
