"""A better-computed answer to hold a model against: its float64 copy, checked by shaking its input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bilip._torch import dtype_name
from bilip.auditing.subject import Outcome, Subject, in_dtype, run_guarded
from bilip.errors import NotMeasured

__all__ = ["Reference", "log_prob", "same_draws", "tolerance"]

_Result = TypeVar("_Result", Outcome, Tensor)
_ULP = torch.finfo(torch.float64).eps


class Reference:
    """A float64 copy of a model.

    For a model that computes in float64 itself there is nothing better: the reference is then the model at an input that differs in
    the last bit, and what differs is what rounding may do.

    A net inside that converts what it is given to fewer bits is kept in float64.

    Raises:
        NotMeasured: The model cannot be copied in float64, or computes in fewer bits whatever is done.

    Example:
        >>> from bilip.models import real_nvp
        >>> reference = Reference(Subject.of(real_nvp(2)))
        >>> reference.encode(torch.zeros(1, 2)).value.dtype
        torch.float64
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject.copy_in(torch.float64)
        self.own = subject.dtype == torch.float64
        # Calls that were looked at, and whether they have to be kept in float64; where blocks make no choices, once for all sources.
        self._watched = self.subject.watched_products if self.subject.recordable else {}

    def encode(self, x: Tensor, context: Tensor | None = None, *, shaken: bool = False) -> Outcome:
        """F(x) by the float64 copy; `shaken` moves x in its last bit."""
        return self._run("encode", lambda: self.subject.forward(*self._inputs(x, context, shaken)))

    def decode(self, z: Tensor, context: Tensor | None = None, *, shaken: bool = False) -> Outcome:
        """F^-1(z) by the float64 copy; `shaken` moves z in its last bit."""
        return self._run("decode", lambda: self.subject.inverse(*self._inputs(z, context, shaken)))

    def log_prob(self, x: Tensor, context: Tensor | None = None, *, shaken: bool = False) -> Tensor:
        """Log-likelihoods, or log-determinants where there is no base; NaN where the model raised."""
        return self._run("log_prob", lambda: log_prob(self.subject, *self._inputs(x, context, shaken)))

    def _inputs(self, x: Tensor, context: Tensor | None, shaken: bool) -> tuple[Tensor, Tensor | None]:
        x = x.detach().double()
        if shaken or self.own:
            generator = torch.Generator().manual_seed(2 + shaken)
            signs = torch.randint(0, 2, x.shape, generator=generator, device="cpu").to(x) * 2 - 1
            x = x * (1 + _ULP * signs)
        return x, in_dtype(context, torch.float64)

    def _run(self, call: str, function: Callable[[], _Result]) -> _Result:
        """What a call gives. The first time, look whether the copy multiplies in fewer bits than it was given: then it is no longer let."""
        narrow, numbers = "", torch.get_rng_state()
        for wide in (False, True) if call not in self._watched else (self._watched[call],):
            if wide and call not in self._watched:
                torch.set_rng_state(numbers)
            watch = contextlib.nullcontext() if call in self._watched else _Products()
            with watch as products, _Wide() if wide else contextlib.nullcontext():
                found = function()
            dtype = (found.value if isinstance(found, Outcome) else found).dtype
            inside = None if products is None else products.narrow
            if inside is None and dtype == torch.float64:
                self._watched[call] = wide
                return found
            narrow = narrow or (
                _NARROW.format(dtype_name(dtype)) if inside is None else _INSIDE.format(dtype_name(inside))
            )
        raise NotMeasured(narrow)


_FEWER = (torch.float32, torch.float16, torch.bfloat16)
_NARROW = "the model computes in {} whatever it is given, so there is no float64 reference"
_INSIDE = "a net of the model multiplies in {} whatever it is given, so there is no float64 reference"


class _Wide(TorchDispatchMode):
    """Numbers of float64 are not converted to fewer bits: a net that computes in float16 on its own computes as it was meant to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64 and kwargs.get("dtype") in _FEWER:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class _Products(TorchDispatchMode):
    """Notes the dtype of products of matrices and convolutions that are narrower than float64."""

    KINDS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution", "_convolution", "dot")

    def __init__(self) -> None:
        super().__init__()
        self.narrow: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        product = func.overloadpacket.__name__ in self.KINDS and isinstance(out, Tensor)
        if product and out.dtype in _FEWER:
            self.narrow = out.dtype
        return out


@torch.no_grad()
def log_prob(
    subject: Subject, x: Tensor, context: Tensor | None = None, *, said: list[Outcome] | None = None
) -> Tensor:
    """What a model computes as log p(x), shape `(batch,)`; without a base log |det J_F(x)|. NaN where the model raises, and `said`
    then holds what it raised.

    Example:
        >>> from bilip import Flow
        >>> from bilip.blocks import Permutation
        >>> log_prob(Subject.of(Flow(Permutation.reverse(2), shape=(2,))), torch.zeros(1, 2))
        tensor([-1.8379])
    """
    outcome = subject.forward_and_log_det(x, context)
    if said is not None and outcome.message:
        said.append(outcome)
    if bool(outcome.failed.all()) or len(outcome.values) < 2:
        return torch.full((len(x),), torch.nan, dtype=x.dtype, device=x.device)
    z, log_det = outcome.values
    base = subject.base
    if base is None:
        return log_det
    finite = torch.isfinite(z.flatten(1)).all(1)
    safe = torch.where(finite.view(-1, *[1] * (z.ndim - 1)), z, torch.zeros_like(z))  # distributions may raise for NaN
    with subject.arithmetic():
        values = run_guarded(lambda z, c: base.log_prob(z, c), safe, context).values[-1]
    if values.ndim != 1:
        values = values.flatten(1).sum(1)
    return torch.where(finite & ~outcome.failed, values + log_det, torch.full_like(log_det, torch.nan))


class _Draws(TorchDispatchMode):
    """Random numbers of floats are drawn in float32 and then converted, so that they do not depend on the dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if not any(_is_wide(value) for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        out = func(*map(_narrow, args), **{name: _narrow(value) for name, value in kwargs.items()})
        # In place; the tag that says so is newer than the oldest torch that is supported.
        if func._schema.name.endswith("_"):
            return args[0].copy_(out)
        return out.double() if isinstance(out, Tensor) and out.dtype == torch.float32 else out


def _is_wide(value: Any) -> bool:
    return value.dtype == torch.float64 if isinstance(value, Tensor) else value == torch.float64


def _narrow(value: Any) -> Any:
    if not _is_wide(value):
        return value
    return value.float() if isinstance(value, Tensor) else torch.float32


@contextlib.contextmanager
def same_draws(seed: int) -> Iterator[None]:
    """Within this context a model draws the same random numbers whatever its dtype.

    Example:
        >>> drawn = []
        >>> for dtype in (torch.float32, torch.float64):
        ...     with same_draws(0):
        ...         drawn.append(torch.randn(3, dtype=dtype))
        >>> drawn[0].double().equal(drawn[1])
        True
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    before = np.random.get_state()  # noqa: NPY002 - some libraries draw from it
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            with _Draws():
                yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


def tolerance(value: Tensor, size: int, part: float) -> Tensor:
    """How far a log-likelihood may be off: `part` of d + |log p|."""
    return part * (size + value.double().abs())
