"""Bijections around another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from bilip.blocks.bijection import Bijection, Reach, Step
from bilip.bounds import Box
from bilip.errors import InputError
from bilip.nets.readable import is_itself

__all__ = ["Invert", "Wrapped"]


class _Fact:
    """An attribute that is read from the wrapped bijection each time, unless the wrapper or its class sets it."""

    def __init__(self, default: Any) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Wrapped | None, kind: type | None = None) -> Any:
        return self.default if wrapper is None else getattr(wrapper.wrapped, self.name, self.default)


class Wrapped(Bijection):
    r"""A bijection that holds another one and has all that it has: every map, shape, fact and proof that the wrapper does not define is
    that of the wrapped bijection.

    A wrapper states what it changes and nothing else: one that computes the same map in another way defines the four maps; one that
    computes another map defines `log_lip`, `log_lip_inverse`, `interval`, `interval_inverse`, `advance` and `retreat` as well. `parts`
    alone is not passed on: a wrapper is one block unless it says how it is taken apart. Facts are `shape`, `volume_preserving`,
    `rearranges`, `closed_form`, `has_log_det`, `stochastic_log_det` and `takes_context`; they are looked up at each use, and an attribute
    of the wrapper, or of its class, comes first.

    Args:
        wrapped: The bijection inside. It is kept under the name that the class states as `holds`, which is its place in a `state_dict`.

    Example:
        >>> import torch
        >>> from bilip.blocks import Permutation
        >>> class Told(Wrapped):
        ...     def forward(self, x, context=None):
        ...         print("forward")
        ...         return super().forward(x, context)
        >>> block = Told(Permutation.reverse(2))
        >>> block(torch.tensor([[1.0, 2.0]])), block.rearranges, block.bijection is block.wrapped
        forward
        (tensor([[2., 1.]]), True, True)
    """

    holds: ClassVar[str] = "bijection"
    shape: tuple[int, ...] | None = _Fact(None)  # type: ignore[assignment]
    volume_preserving: bool = _Fact(False)  # type: ignore[assignment]
    rearranges: bool = _Fact(False)  # type: ignore[assignment]
    closed_form: bool = _Fact(True)  # type: ignore[assignment]
    has_log_det: bool = _Fact(True)  # type: ignore[assignment]
    stochastic_log_det: bool = _Fact(False)  # type: ignore[assignment]
    takes_context: bool = _Fact(False)  # type: ignore[assignment]

    def __init__(self, wrapped: Bijection) -> None:
        super().__init__()
        if not isinstance(wrapped, Bijection):
            raise InputError(f"{type(self).__name__}: expected a Bijection, got {type(wrapped).__name__}.")
        setattr(self, self.holds, wrapped)

    @property
    def wrapped(self) -> Bijection:
        """The bijection inside."""
        return getattr(self, self.holds)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.wrapped(x, context)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return self.wrapped.inverse(z, context)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.wrapped.forward_and_log_det(x, context)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.wrapped.inverse_and_log_det(z, context)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.wrapped.out_shape(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.wrapped.in_shape(shape)

    def natural_domain(self) -> Box:
        return self.wrapped.natural_domain()

    def advance(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self.wrapped.advance(reach, context, formula, name)

    def retreat(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self.wrapped.retreat(reach, context, formula, name)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.wrapped.log_lip(box, context, formula)

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.wrapped.log_lip_inverse(box, context, formula)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return self.wrapped.interval(box, context)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return self.wrapped.interval_inverse(box, context)


class Invert(Wrapped):
    r"""$F^{-1}$ as a bijection of its own, sharing the parameters of $F$.

    Args:
        bijection: The map $F$.

    Example:
        >>> import torch
        >>> from bilip import blocks
        >>> squeeze = blocks.Squeeze()
        >>> Invert(squeeze)(squeeze(torch.ones(1, 3, 4, 4))).shape
        torch.Size([1, 3, 4, 4])
    """

    bijection: Bijection

    def __init__(self, bijection: Bijection) -> None:
        super().__init__(bijection)
        self.shape = None if bijection.shape is None else bijection.out_shape(bijection.shape)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.bijection.inverse(x, context)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return self.bijection(z, context)

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.bijection.inverse_and_log_det(x, context)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.bijection.forward_and_log_det(z, context)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.bijection.in_shape(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.bijection.out_shape(shape)

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        inner = self.bijection.parts(name) if is_itself(self) else [(name or "0", self.bijection)]
        return [(path, self if len(inner) == 1 else Invert(block)) for path, block in reversed(inner)]

    def natural_domain(self) -> Box:
        return self.bijection.bijection.natural_domain() if isinstance(self.bijection, Invert) else Box.everything()

    def advance(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self.bijection.retreat(reach, context, formula, name)

    def retreat(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        return self.bijection.advance(reach, context, formula, name)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.bijection.log_lip_inverse(box, context, formula)

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self.bijection.log_lip(box, context, formula)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return self.bijection.interval_inverse(box, context)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return self.bijection.interval(box, context)
