"""The rungs of the precision ladder: one model computed with more and with fewer bits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip.auditing.float32 import float32_products
from bilip.auditing.guarded import Outcome, run_guarded
from bilip.auditing.subject import Subject

__all__ = ["LADDER", "Rung", "RungModel"]


@dataclass(frozen=True)
class Rung:
    """One precision.

    Attributes:
        name: Name in records.
        dtype: Dtype of parameters and activations.
        eps: Machine epsilon of its arithmetic.
    """

    name: str
    dtype: torch.dtype
    eps: float

    @property
    def half(self) -> bool:
        """Whether it has 16 bits."""
        return self.dtype in (torch.bfloat16, torch.float16)


def _rung(dtype: torch.dtype) -> Rung:
    return Rung(str(dtype).removeprefix("torch."), dtype, torch.finfo(dtype).eps)


LADDER = (
    _rung(torch.float64),
    _rung(torch.float32),
    Rung("tf32", torch.float32, 2.0**-10),  # matrix products of float32 with 10 bits of fraction, on CUDA
    _rung(torch.bfloat16),
    _rung(torch.float16),
)


class RungModel:
    r"""A model on one rung, and the float64 model with the same parameters: the exact map that the rung computes inexactly.

    16-bit arithmetic on a CPU is missing for some operations and faults on some processors. There it is emulated: parameters,
    inputs and the output of every visible block are rounded to the 16-bit type, and blocks compute inside in float32. That is
    kinder than real 16-bit arithmetic, which rounds inside blocks too.

    Args:
        subject: The model.
        rung: The precision.
        emulate: Emulate; by default for 16 bits on a CPU.

    Attributes:
        rung: The precision.
        emulated: Whether it is emulated.
        reference: The same parameters in float64.

    Example:
        >>> from bilip.models import real_nvp
        >>> half = RungModel(Subject.of(real_nvp(2)), LADDER[3])
        >>> half.emulated, half.enter(torch.tensor([[1.001, 2.0]])).tolist()
        (True, [[1.0, 2.0]])
    """

    def __init__(self, subject: Subject, rung: Rung, *, emulate: bool | None = None) -> None:
        self.rung = rung
        self.emulated = rung.half and (subject.device.type == "cpu" if emulate is None else emulate)
        model = subject if rung.dtype == subject.dtype else subject.twin(rung.dtype)
        self.reference = model.twin(torch.float64)
        self.subject = model.twin(torch.float32) if self.emulated else model
        self._taken = self.subject.dtype  # looked up once: it is asked for after every block

    def enter(self, x: Tensor) -> Tensor:
        """A tensor rounded to the rung, in the dtype that its model takes; integers, such as labels, stay."""
        return x.to(self.rung.dtype).to(self._taken) if x.is_floating_point() else x

    def forward(self, x: Tensor, context: Tensor | None = None) -> Outcome:
        """Z = F(x) on this rung."""
        if not self.emulated:
            with self._arithmetic():
                return self.subject.forward(x, context)
        return self._walk(x, context, inverse=False)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Outcome:
        """X = F^-1(z) on this rung."""
        if not self.emulated:
            with self._arithmetic():
                return self.subject.inverse(z, context)
        return self._walk(z, context, inverse=True)

    @torch.no_grad()
    def _walk(self, x: Tensor, context: Tensor | None, *, inverse: bool) -> Outcome:
        parts = [part for _, part in self.subject.parts]

        def through(x: Tensor, context: Tensor | None) -> Tensor:
            x = self.enter(x)
            for part in reversed(parts) if inverse else parts:
                x = self.enter(part.inverse(x, context) if inverse else part(x, context))
            return x

        return run_guarded(through, x.clone(), context)

    def _arithmetic(self) -> AbstractContextManager[None]:
        """TF32 on for its own rung; elsewhere it stays off."""
        return float32_products("tf32" if self.rung.name == "tf32" else "ieee")
