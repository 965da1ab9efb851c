"""Bijections one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor, nn

from bilip.bounds import Box, log_product
from bilip.blocks.actnorm import ActNorm
from bilip.blocks.bijection import Bijection
from bilip.blocks.conv1x1 import FreeMatrices, invert, log_abs_det
from bilip.blocks.reach import Reach, Step
from bilip.errors import InputError

__all__ = ["Chain"]


class Chain(Bijection):
    r"""The composition $F = F_n \circ \dots \circ F_1$; slicing gives sub-chains that share the blocks.

    Its bounds are products of the blocks' bounds, each proved on the box that encloses what reaches the block. No usefulness is
    promised for deep chains of affine blocks: their bounds grow without limit, and that they do is the paper's point.

    Args:
        blocks: The bijections, first applied first.
        shape: Shape of one input sample; checked against every block, and needed to give a box of numbers a shape.

    Example:
        >>> import torch
        >>> from bilip import blocks
        >>> chain = Chain(blocks.Permutation.reverse(4), blocks.ActNorm(4, start="identity"), shape=(4,))
        >>> x = torch.randn(3, 4)
        >>> bool(torch.allclose(chain.inverse(chain(x)), x))
        True
        >>> len(chain[:1])
        1
    """

    def __init__(self, *blocks: Bijection, shape: Sequence[int] | None = None) -> None:
        super().__init__()
        for k, block in enumerate(blocks):
            if not isinstance(block, Bijection):
                raise InputError(
                    f"Chain: block {k} is a {type(block).__name__}, not a Bijection. Wrap it with bilip.as_bijection, or unpack a "
                    "list with Chain(*blocks)."
                )
        self.blocks = nn.ModuleList(blocks)
        if shape is not None:
            self.shape = tuple(int(n) for n in shape)
            self.latent_shape = self.out_shape(self.shape)
        self.volume_preserving = all(block.volume_preserving for block in blocks)
        self._inverses, self._log_dets = FreeMatrices(invert), FreeMatrices(log_abs_det)

    def __iter__(self) -> Iterator[Bijection]:
        return iter(self.blocks)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, index: int) -> Bijection: ...
    @overload
    def __getitem__(self, index: slice) -> Chain: ...
    def __getitem__(self, index: int | slice) -> Bijection:
        if not isinstance(index, slice):
            return self.blocks[index]  # type: ignore[return-value]
        chosen = list(self)[index]
        shape = self.shape
        if shape is not None:
            if index.step not in (None, 1):
                shape = None
            else:
                for block in list(self)[: slice(index.start).indices(len(self))[1] if index.start is not None else 0]:
                    shape = block.out_shape(shape)
        return Chain(*chosen, shape=shape)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        self._check_shape(x, self.shape, "input")
        for block in self.blocks:
            x = block(x, context)
        return x

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        self._check_shape(z, self.latent_shape, "latent")
        inverses = self._inverses.of(self, self.blocks)
        for block in reversed(self.blocks):  # type: ignore[call-overload]
            z = block.mix(inverses[block], z) if block in inverses else block.inverse(z, context)
        return z

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_shape(x, self.shape, "input")
        log_det = _LogDet(self)
        for block in self.blocks:
            if block.volume_preserving or log_det.knows(block, x):
                x = block(x, context)
            else:
                x, term = block.forward_and_log_det(x, context)
                log_det.terms.append(term)
        return x, log_det.total(x)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_shape(z, self.latent_shape, "latent")
        inverses, log_det = self._inverses.of(self, self.blocks), _LogDet(self, sign=-1)
        for block in reversed(self.blocks):  # type: ignore[call-overload]
            if block.volume_preserving or log_det.knows(block, z):
                z = block.mix(inverses[block], z) if block in inverses else block.inverse(z, context)
            else:
                z, term = block.inverse_and_log_det(z, context)
                log_det.terms.append(term)
        return z, log_det.total(z)

    latent_shape: tuple[int, ...] | None = None

    def _check_shape(self, x: Tensor, shape: tuple[int, ...] | None, what: str) -> None:
        if shape is None:
            return
        self.check(x)
        if tuple(x.shape[1:]) != shape:
            raise InputError(f"Chain: expected {what} samples of shape {shape}, so a batch of shape (batch, {', '.join(map(str, shape))}), got {tuple(x.shape)}.")

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        for block in self:
            shape = block.out_shape(shape)
        return tuple(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        for block in reversed(list(self)):
            shape = block.in_shape(shape)
        return tuple(shape)

    def natural_domain(self) -> Box:
        return self[0].natural_domain() if len(self) else Box.everything()

    def advance(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self._walk(reach, context, formula, name, backward=False)

    def retreat(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self._walk(reach, context, formula, name, backward=True)

    def _walk(self, reach: Reach, context: Box | None, formula: str, name: str, *, backward: bool) -> Step:
        total = Step(0.0, 0.0, reach, ())
        prefix = f"{name}." if name else ""
        order = range(len(self) - 1, -1, -1) if backward else range(len(self))
        for k in order:
            act = self[k].retreat if backward else self[k].advance
            step = act(total.reach, context, formula, f"{prefix}{k}")
            total = Step(
                log_product(total.log_forward, step.log_forward),
                log_product(total.log_inverse, step.log_inverse),
                step.reach,
                total.blocks + step.blocks,
            )
        return total

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.advance(Reach.start(box), context, formula).log_forward

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.retreat(Reach.start(box), context, formula).log_forward

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return self.enclose(box, context)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return self.enclose_inverse(box, context)


class _LogDet:
    """The log-determinant of a pass through a chain; what does not depend on the input is added up once, at the end."""

    def __init__(self, chain: Chain, sign: int = 1) -> None:
        self.sign = sign
        self.terms: list[Tensor] = []  # of shape (batch,)
        self._of_pixel = {block: value[None] for block, value in chain._log_dets.of(chain, chain.blocks).items()}
        self._of_pixel |= {block: block.log_scale for block in chain.blocks if type(block) is ActNorm}
        self._constants: dict[int, list[Tensor]] = {}  # by the number of pixels

    def knows(self, block: nn.Module, x: Tensor) -> bool:
        """Whether the term of this block is added up here."""
        if block not in self._of_pixel:
            return False
        features = block.features if isinstance(block, ActNorm) else block.channels
        self._constants.setdefault(math.prod(x.shape[1:]) // features, []).append(self._of_pixel[block])  # type: ignore
        return True

    def total(self, x: Tensor) -> Tensor:
        """The sum."""
        total = torch.stack(self.terms).sum(0) if self.terms else x.new_zeros(x.shape[:1])
        for pixels, values in self._constants.items():
            total = total + torch.cat(values).sum() * (self.sign * pixels)
        return total
