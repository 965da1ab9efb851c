"""The multi-scale architecture: part of the channels leaves early."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bilip.blocks.bijection import Bijection
from bilip.blocks.chain import Chain
from bilip.blocks.on_kept import OnKept
from bilip.blocks.reach import Reach, Step
from bilip.bounds import BlockBound, Box
from bilip.errors import InputError
from bilip.nets.readable import is_itself

__all__ = ["FactorOut"]


class FactorOut(Bijection):
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

    def __init__(self, inner: Bijection, shape: Sequence[int], *, keep: int | None = None) -> None:
        super().__init__()
        self.shape = self.image_shape = tuple(int(n) for n in shape)
        self.keep = (self.image_shape[0] + 1) // 2 if keep is None else keep
        if not 0 < self.keep < self.image_shape[0]:
            raise InputError(
                f"FactorOut(shape={self.image_shape}, keep={self.keep}): some channels must remain and some must leave."
            )
        self.inner = inner
        self.kept_shape = (self.keep, *self.image_shape[1:])
        self.inner_latent = inner.out_shape(self.kept_shape)
        self.volume_preserving, self.closed_form = inner.volume_preserving, inner.closed_form

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
        size = math.prod(self.inner_latent)
        left = (self.image_shape[0] - self.keep, *self.image_shape[1:])
        return z[:, :size].unflatten(1, self.inner_latent), z[:, size:].unflatten(1, left)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        kept, left = self._split(x)
        return torch.cat((self.inner(kept, context).flatten(1), left.flatten(1)), 1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        kept, left = self._split_latent(z)
        return torch.cat((self.inner.inverse(kept, context), left), 1)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept, left = self._split(x)
        inner, log_det = self.inner.forward_and_log_det(kept, context)
        return torch.cat((inner.flatten(1), left.flatten(1)), 1), log_det

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept, left = self._split_latent(z)
        inner, log_det = self.inner.inverse_and_log_det(kept, context)
        return torch.cat((inner, left), 1), log_det

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

    # ---- proofs: the inner proof on the channels that remain

    def advance(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self._inner_proof(reach, context, formula, name, backward=False)

    def retreat(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self._inner_proof(reach, context, formula, name, backward=True)

    def _inner_proof(self, reach: Reach, context: Box | None, formula: str, name: str, *, backward: bool) -> Step:
        split = self._split_latent if backward else self._split
        act = self.inner.retreat if backward else self.inner.advance
        entered = self.kept_shape if not backward else self.inner_latent

        def part(box: Box, k: int) -> Box:
            return box.map(lambda end: split(end[None])[k][0]) if box.shape else Box.everything()

        def join(inner: Box, box: Box) -> Box:
            if not (inner.shape and box.shape):
                return Box.everything()
            left = part(box, 1)
            if backward:
                return Box(torch.cat((inner.low, left.low)), torch.cat((inner.high, left.high)))
            return Box(
                torch.cat((inner.low.flatten(), left.low.flatten())),
                torch.cat((inner.high.flatten(), left.high.flatten())),
            )

        box = part(reach.box, 0) if reach.box.shape else Box.everything(entered)
        start = Reach(
            box, None if reach.center is None else part(reach.center, 0), reach.log_radius, reach.asked_bounded
        )
        step = act(start, context, formula, f"{name}.inner" if name else "inner")
        image = join(step.reach.box, reach.box)
        fresh = reach.restarted(image)
        # The channels that leave keep the maps from being contractions: the row of this block says by how much.
        forward, inverse = max(0.0, step.log_forward), max(0.0, step.log_inverse)
        row = BlockBound(
            name or "0", "FactorOut", max(0.0, -step.log_forward), max(0.0, -step.log_inverse), image.magnitude
        )
        return Step(forward, inverse, fresh, (*step.blocks, row))

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.advance(Reach.start(box), context, formula).log_forward

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.retreat(Reach.start(box), context, formula).log_forward

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return self.enclose(box, context)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return self.enclose_inverse(box, context)

    def extra_repr(self) -> str:
        return f"shape={self.image_shape}, keep={self.keep}"
