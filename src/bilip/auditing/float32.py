"""What a product of float32 matrices means: all of its bits, or those of TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import backends

__all__ = ["float32_products", "switches", "uses_tf32"]


@contextlib.contextmanager
def float32_products(kind: str = "ieee") -> Iterator[None]:
    """Inside, products of float32 matrices are full (`"ieee"`) or, on CUDA, TF32 (`"tf32"`); every switch is put back.

    torch has two sets of switches for it, and reading one may raise after the other was used; so what can be read is
    put back by itself.

    Example:
        >>> torch.set_float32_matmul_precision("high")
        >>> with float32_products():
        ...     torch.get_float32_matmul_precision()
        'highest'
        >>> torch.get_float32_matmul_precision()
        'high'
        >>> torch.set_float32_matmul_precision("highest")
    """
    leaves = [(leaf, leaf.fp32_precision) for leaf in _leaves(kind)]
    matmul, cudnn = _readable(torch.get_float32_matmul_precision), _readable(lambda: backends.cudnn.allow_tf32)
    try:
        if matmul is not None:
            torch.set_float32_matmul_precision("highest" if kind == "ieee" else "high")
        if cudnn is not None:
            backends.cudnn.allow_tf32 = kind == "tf32"
        for leaf, _ in leaves:
            leaf.fp32_precision = kind
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            backends.cudnn.allow_tf32 = cudnn
        for leaf, before in leaves:
            leaf.fp32_precision = before


def uses_tf32() -> bool:
    """Whether products of float32 matrices or convolutions on CUDA have the 10 bits of TF32, as torch's switches stand.

    Example:
        >>> with float32_products():
        ...     uses_tf32()
        False
    """
    if _readable(torch.get_float32_matmul_precision) in ("high", "medium"):
        return True
    if _readable(lambda: backends.cudnn.allow_tf32):
        return True
    return any(leaf.fp32_precision == "tf32" for leaf in _leaves("tf32"))


def switches() -> tuple[Any, ...]:
    """How torch's switches for float32 products stand, all that can be read.

    Example:
        >>> with float32_products():
        ...     full = switches()
        >>> with float32_products("tf32"):
        ...     switches() == full
        False
    """
    old = _readable(torch.get_float32_matmul_precision), _readable(lambda: backends.cudnn.allow_tf32)
    return (*old, *(leaf.fp32_precision for leaf in _leaves("tf32")))


def _leaves(kind: str) -> list[Any]:
    """The switches of newer versions of torch, one for each kind of product; those of the CPU know no TF32 everywhere."""
    cuda = [backends.cuda.matmul, getattr(backends.cudnn, "conv", None), getattr(backends.cudnn, "rnn", None)]
    cpu = [getattr(backends.mkldnn, name, None) for name in ("matmul", "conv", "rnn")] if kind == "ieee" else []
    found: list[Any] = [*cuda, *cpu]
    return [leaf for leaf in found if _readable(lambda leaf=leaf: leaf.fp32_precision) is not None]


def _readable(read: Any) -> Any:
    try:
        return read()
    except (RuntimeError, AttributeError):
        return None
