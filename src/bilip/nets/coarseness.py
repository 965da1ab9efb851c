"""In how few digits a function that nobody states the error of computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["coarseness"]

_FLOAT32 = torch.finfo(torch.float32).eps
# What gives the numbers that it is given, or constants: it rounds only where it gives fewer digits than it was given.
_MOVES = {
    getattr(torch.ops.aten, name)
    for name in (
        "_to_copy",
        "clone",
        "copy_",
        "where",
        "scalar_tensor",
        "empty",
        "full",
        "ones",
        "zeros",
        "masked_fill",
    )
}
# Methods that hand numbers, or where they lie, to what is not torch.
_LEAVES = {"numpy", "__array__", "__dlpack__", "tolist", "data_ptr", "storage", "untyped_storage"}
_OPENS = {"aten::_local_scalar_dense", "aten::view.dtype"}  # to a number of Python, to bits
_OF_TORCH = {"aten", "prim", "prims"}  # where the operations stand whose inside is known


def coarseness(act: Callable[[Tensor], Tensor], x: Tensor, image: Tensor, dtype: torch.dtype) -> float:
    """The unit of rounding of the fewest digits in which a function of float64 numbers computes; 0 if it keeps those of `dtype`.

    Every operation of torch at `x` is watched: what has a skip in float64 beside a part in float32 moves with every step of its input, and
    loses the digits all the same. Numbers that leave torch are taken to come back in float32, also by an operation that somebody registered
    (`torch.library`) and by the address of a tensor. What an operation of torch does inside is seen by its result alone: one that rounds to
    fewer digits, on its way in or out, does not see a step below them. Nobody watches what goes on in another thread.

    Args:
        act: The function, of a batch.
        x: Where it is evaluated, float64.
        image: Its values there.
        dtype: The one whose digits it should keep.
    """
    with _Digits() as seen, _Leaving(seen):
        act(x)
    found = max(seen.eps, _visible(act, x, image, dtype))
    return found if found > torch.finfo(dtype).eps else 0.0


def _eps(values: Any) -> float:
    """The unit of rounding of the coarsest floating dtype among tensors; 0 if there are none."""
    tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())]
    return max((torch.finfo(v.dtype).eps for v in tensors), default=0.0)


def _finest(values: Any) -> float:
    return min((eps for v in tree_leaves(values) if (eps := _eps(v))), default=1.0)


class _Digits(TorchDispatchMode):
    """Notes the coarsest unit of rounding of what operations compute."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = _finest((args, kwargs))  # before: an operation may write into what it is given
        result = func(*args, **(kwargs or {}))
        eps = _eps(result)
        if (func.namespace not in _OF_TORCH or func.name() in _OPENS) and _eps((args, kwargs)):
            eps = max(eps, _FLOAT32)
        elif (func.is_view or func.overloadpacket in _MOVES) and not given < eps:
            eps = 0.0
        self.eps = max(self.eps, eps)
        return result


class _Leaving(TorchFunctionMode):
    """Notes that numbers leave torch."""

    def __init__(self, seen: _Digits) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in _LEAVES and _eps(args):
            self.seen.eps = max(self.seen.eps, _FLOAT32)
        return func(*args, **(kwargs or {}))


def _visible(act: Callable[[Tensor], Tensor], x: Tensor, image: Tensor, dtype: torch.dtype) -> float:
    """The unit of rounding in which a function of float64 numbers visibly computes; 0 if it keeps the digits of `dtype`.

    A function that rounds to fewer digits, on its way in or out, does not see a step below them: its value stays the same to the last
    bit for most entries that a larger step moves.
    """
    generator = torch.Generator().manual_seed(0)
    turn = 0.5 + torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x.device) / 2

    def change(step: float) -> Tensor:
        return (act(x * (1 + step * turn)) - image).abs()

    alive = change(2.0**-4) > 2.0**-13 * image.abs()  # where float64 would see every step below
    if not bool(alive.any()):  # out of range, perhaps: looked at where numbers are of the size of 1
        x, image = turn, act(turn)
        alive = change(2.0**-4) > 2.0**-13 * image.abs()
    # Steps that float32 sees and dtypes of 16 bits do not, and that float64 sees and float32 does not.
    for step, coarse in ((2.0**-21, torch.bfloat16), (2.0**-36, torch.float32)):
        eps = torch.finfo(coarse).eps
        if eps > torch.finfo(dtype).eps and 2 * int((change(step)[alive] > 0).sum()) < int(alive.sum()):
            return eps
    return 0.0
