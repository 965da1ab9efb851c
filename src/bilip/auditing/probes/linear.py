r"""A model linearised at points: products with $J_F$ and with $J_F^{-1}$.

The composed inverse overflows exactly where its Jacobian is wanted. So each visible block's inverse Jacobian is applied at the
*stored forward activations*: $J_F^{-1} = J_1^{-1} \cdots J_n^{-1}$, with $J_k$ taken where the forward pass went through block $k$.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bilip.auditing.probes.linear_part import LinearPart
from bilip.auditing.probes.structured import Room
from bilip.auditing.subject import Subject
from bilip.errors import NotMeasured

__all__ = ["Linearized"]


class Linearized:
    r"""A model linearised at a batch of points, in float64.

    Args:
        subject: The model; its float64 twin is linearised.
        x: The points.
        context: Their contexts.
        noise: Relative size of noise added to every stored activation, to see how far rounding moves a result.
        like: With noise, the same without: how each block is solved was checked there.

    Attributes:
        parts: The visible blocks, linearised where the forward pass met them.

    Example:
        >>> from bilip.models import real_nvp
        >>> at = Linearized(Subject.of(real_nvp(2, blocks=2)), torch.zeros(1, 2))
        >>> v = torch.ones(1, 2, dtype=torch.float64)
        >>> bool(torch.allclose(at.solve(at.apply(v)), v))
        True
    """

    def __init__(
        self,
        subject: Subject,
        x: Tensor,
        context: Tensor | None = None,
        *,
        noise: float = 0.0,
        like: Linearized | None = None,
    ) -> None:
        twin = subject.twin(torch.float64)
        x = x.detach().double()
        context = context.double() if context is not None and context.is_floating_point() else context
        self.parts: list[LinearPart] = []
        self.count, self.size = len(x), x[0].numel()
        generator = torch.Generator().manual_seed(1)
        room = Room(x.device)
        for k, (name, part) in enumerate(twin.parts):
            if noise:
                x = x * (1 + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device))
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
