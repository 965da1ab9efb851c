"""Bijections one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeGuard, overload

import torch
from torch import Tensor, nn

from bilip._torch import EvalCache, is_transformed
from bilip.blocks.bijection import Bijection, Composite, Directed, Reach, Step
from bilip.blocks.conv1x1 import InvertibleConv1x1, Stack, invert, log_abs_det
from bilip.blocks.diagonal import ActNorm
from bilip.blocks.log_det import one_draw
from bilip.blocks.neural_ode import NeuralODE
from bilip.blocks.residual import Residual
from bilip.bounds import Box, log_product
from bilip.errors import InputError, UnknownLipschitz
from bilip.nets.readable import is_itself, is_watched
from bilip.nets.spectral import Held, held_layers, held_together

__all__ = ["Chain"]


class _OfAll:
    """A fact about a chain that holds if it holds of every block: looked up at each use, since blocks may be replaced and added."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, chain: Chain | None, kind: type | None = None) -> bool:
        return getattr(Bijection, self.name) if chain is None else all(getattr(block, self.name) for block in chain)


class Chain(Directed, Composite):
    r"""The composition $F = F_n \circ \dots \circ F_1$; slicing gives sub-chains that share the blocks.

    Its bounds are products of the blocks' bounds, each proved on the box that encloses what reaches the block. No
    usefulness is promised for deep chains of affine blocks: their bounds grow without limit, and that they do is the
    paper's point.

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

    volume_preserving: bool = _OfAll()  # type: ignore[assignment]
    closed_form: bool = _OfAll()  # type: ignore[assignment]

    def __init__(self, *blocks: Bijection, shape: Sequence[int] | None = None) -> None:
        super().__init__()
        for k, block in enumerate(blocks):
            if not isinstance(block, Bijection):
                raise InputError(
                    f"Chain: block {k} is a {type(block).__name__}, not a Bijection. "
                    "Unpack a list with Chain(*blocks); bring in a foreign block with bilip.as_bijection."
                )
        self.blocks = nn.ModuleList(blocks)
        if shape is not None:
            self.shape = tuple(int(n) for n in shape)
            self.latent_shape = self.out_shape(self.shape)
        self._caches: dict[tuple[object, ...], EvalCache] = {}

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

    def _map(self, x: Tensor, context: Tensor | None, *, inverse: bool, log_det: bool) -> tuple[Tensor, ...]:
        run = _Pass(self, inverse=inverse, log_det=log_det)
        x = run.through(x, context)
        return (x, run.log_det(x)) if log_det else (x,)

    latent_shape: tuple[int, ...] | None = None

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        if not is_itself(self):
            return super().parts(name)
        prefix = f"{name}." if name else ""
        return [part for k, block in enumerate(self) for part in block.parts(f"{prefix}{k}")]

    def _check_shape(self, x: Tensor, shape: tuple[int, ...] | None, what: str) -> None:
        if shape is None:
            return
        self.check(x)
        if tuple(x.shape[1:]) != shape:
            raise InputError(
                f"Chain: expected {what} samples of shape {shape}, so a batch of shape (batch, "
                f"{', '.join(map(str, shape))}), got {tuple(x.shape)}."
            )

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        for block in self:
            shape = block.out_shape(shape)
        return tuple(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        for block in reversed(list(self)):
            shape = block.in_shape(shape)
        return tuple(shape)

    def natural_domain(self) -> Box:
        for block in self:
            domain = block.natural_domain()
            if domain.is_bounded or not block.rearranges:
                return domain
        return Box.everything()

    def _walk(self, reach: Reach, context: Box | None, formula: str, name: str, *, backward: bool) -> Step:
        if not isinstance(self.blocks, nn.Module):  # so that nobody has looked at what is in it
            raise UnknownLipschitz(
                f"Chain has as blocks a plain {type(self.blocks).__name__}; make it an nn.ModuleList."
            )
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


class _Pass:
    """One pass through a chain, with the work on parameters done for many blocks at once: on a device, each launch counts.

    The 1x1 convolutions with a free matrix are taken together by size: one solve, one determinant, and one product with
    the scales of the ActNorms before them. So are the norms of held layers. Log-determinants that do not depend on the input are
    added up at the end.
    """

    def __init__(self, chain: Chain, *, inverse: bool, log_det: bool) -> None:
        self.chain, self.inverse, self.with_log_det = chain, inverse, log_det
        self.blocks: list[Bijection] = list(chain)
        self.matrices: dict[int, Tensor] = {}  # by the place of the convolution in the chain
        self.shifts: set[int] = set()  # places of the ActNorms whose scale went into the matrix after them
        self.fixed: dict[int, tuple[int, Tensor]] = {}  # features, and logs whose sum counts once for each pixel
        self.terms: list[Tensor] = []
        self.constants: dict[int, list[Tensor]] = {}  # by the number of pixels
        self.held: list[Held] = []
        stacks: dict[tuple[object, ...], dict[int, tuple[Tensor, Tensor | None]]] = {}
        anew = torch.is_grad_enabled() and not is_transformed()  # elsewhere held layers look into their caches
        for k, block in enumerate(self.blocks):  # only these very classes: a subclass may differ
            if type(block) is ActNorm and not is_watched(block):
                self.fixed[k] = block.features, block.log_scale
            elif anew and (net := iterated(block)) is not None:
                self.held += held_layers(net)
            elif type(block) is InvertibleConv1x1 and block.kind == "full" and not is_watched(block):
                norm = self.blocks[k - 1] if k else None
                pair = block.weight, norm.log_scale if only_scales(norm, block) else None
                stacks.setdefault(Stack.key_of(*pair), {})[k] = pair
        for pairs in stacks.values():
            self._prepare(list(pairs), Stack(list(pairs.values())))
            self.shifts.update(k - 1 for k, (_, log_scale) in pairs.items() if log_scale is not None)

    def _prepare(self, places: list[int], stack: Stack) -> None:
        wanted = [invert] * self.inverse + [log_abs_det] * self.with_log_det
        values = self.chain._caches.setdefault(stack.key, EvalCache()).get_all(self.chain, stack.weights, wanted)
        matrices = stack.inverses(values[0]) if self.inverse else stack.matrices()
        self.matrices.update(zip(places, matrices.unbind(), strict=True))
        if self.with_log_det:
            channels = len(stack.weights[0])
            self.fixed.update((k, (channels, log)) for k, log in zip(places, values[-1].split(1), strict=True))

    def through(self, x: Tensor, context: Tensor | None) -> Tensor:
        """The image of `x`."""
        if self.inverse:
            self.chain._check_shape(x, self.chain.latent_shape, "latent")
        else:
            self.chain._check_shape(x, self.chain.shape, "input")
        places = range(len(self.blocks))
        with held_together(self.held), one_draw():
            for k in reversed(places) if self.inverse else places:
                x = self._step(k, self.blocks[k], x, context)
                if self.with_log_det and k in self.fixed:
                    features, logs = self.fixed[k]
                    self.constants.setdefault(math.prod(x.shape[1:]) // features, []).append(logs)
        return x

    def _step(self, k: int, block: Bijection, x: Tensor, context: Tensor | None) -> Tensor:
        if k in self.matrices:
            return block.mix(self.matrices[k], x)  # type: ignore[operator]
        if k in self.shifts:
            return block.shift(x, -1 if self.inverse else 1)  # type: ignore[operator]
        if not self.with_log_det or block.volume_preserving or k in self.fixed:
            return block.inverse(x, context) if self.inverse else block(x, context)
        x, term = (block.inverse_and_log_det if self.inverse else block.forward_and_log_det)(x, context)
        self.terms.append(term)
        return x

    def log_det(self, x: Tensor) -> Tensor:
        """The log-determinant, after `through`."""
        total = torch.stack(self.terms).sum(0) if self.terms else x.new_zeros(x.shape[:1])
        for pixels, logs in self.constants.items():
            total = total + torch.cat(logs).sum() * (-pixels if self.inverse else pixels)
        return total


def iterated(block: Bijection) -> nn.Module | None:
    """The net of a block that evaluates it many times in one pass, whose held layers are certified once for all of them."""
    if type(block) is Residual:
        return block.g
    return block.f if type(block) is NeuralODE else None


def only_scales(norm: Bijection | None, conv: InvertibleConv1x1) -> TypeGuard[ActNorm]:
    """Whether a block is an ActNorm whose scale can go into the matrix of the 1x1 convolution after it."""
    if type(norm) is not ActNorm or norm.features != conv.channels or norm.dim != 1:
        return False
    return norm.ready and not is_watched(norm)
