r"""What is proved about a net: its Lipschitz constant, and a box that encloses the image of a box.

Nets are read layer by layer (`bilip.nets.layers`); the constant is the product of the layers' constants. Whatever
cannot be read raises `UnknownLipschitz`: declare it with `Declared`.

The statements are about the function in real arithmetic with the parameters as they are stored. Images are computed
in float64 and widened by a bound on their own rounding.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from bilip.bounds import Box, as_float64, log_of, log_product, norms
from bilip.nets.layers import (
    Declared,
    LayeredNet,
    Shape,
    affine_layer,
    facts,
    flatten,
    is_plain,
    is_plain_flatten,
    unknown,
)
from bilip.nets.spectral import HeldConv2d, HeldLinear

__all__ = ["enclose", "log_cap", "log_lipschitz", "point_image"]

_MEMO: ContextVar[dict | None] = ContextVar("norms", default=None)


def log_lipschitz(net: nn.Module, shape: Shape | None = None, outputs: slice | None = None) -> float:
    """Log of a certified upper bound on the Lipschitz constant of a net in its input, for every context.

    Args:
        net: The net.
        shape: Shape of one input, which sharpens the norms of convolutions; any size without it.
        outputs: Only these outputs (along the feature or channel dimension), where the last layer is linear.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> log_lipschitz(net) < math.log(10)
        True
    """
    memo = _MEMO.get()
    if memo is None:
        return _log_lipschitz(net, shape, outputs)
    key = (id(net), shape, None if outputs is None else (outputs.start, outputs.stop))
    if key not in memo:
        memo[key] = (net, _log_lipschitz(net, shape, outputs))  # holding the net keeps its id from being used again
    return memo[key][1]


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Within this context no norm is computed twice; parameters must not change meanwhile."""
    token = _MEMO.set({} if _MEMO.get() is None else _MEMO.get())
    try:
        yield
    finally:
        _MEMO.reset(token)


def _log_lipschitz(net: nn.Module, shape: Shape | None, outputs: slice | None) -> float:
    if is_plain(net, Declared):
        return log_of(net.lipschitz)  # type: ignore[arg-type]
    layers, columns = _read(net)
    total = 0.0
    for index, layer in enumerate(layers):
        if is_plain(layer, Declared):
            total, shape = log_product(total, log_of(layer.lipschitz)), None  # type: ignore[arg-type]
            continue
        known = facts(layer)
        if known is not None:
            total = log_product(total, log_of(known.lipschitz))
        elif is_plain_flatten(layer):
            shape = None
        else:
            affine = affine_layer(layer)
            if affine is None:
                raise unknown(layer)
            rows = outputs if index == len(layers) - 1 else None
            total = log_product(total, affine.log_norm(shape, rows, columns if index == 0 else None))
            shape = affine.out_shape(shape)
    return total


def _read(net: nn.Module) -> tuple[list[nn.Module], slice | None]:
    """The layers of a net, and which inputs of the first one are not context."""
    if is_plain(net, LayeredNet) and net.context:
        return flatten(net.layers), slice(0, net.inputs)  # type: ignore[arg-type]
    return flatten(net), None


def log_cap(net: nn.Module) -> float | None:
    """Log of a constant that no weights can exceed: the coefficients of held layers times those of the activations.

    `None` where some layer is not held. Unlike `log_lipschitz` it needs no norms and stays true during training.

    Example:
        >>> from bilip.nets import MLP
        >>> log_cap(MLP(2, 2, lipschitz=0.5)) <= math.log(0.5)
        True
        >>> log_cap(MLP(2, 2)) is None
        True
    """
    total = 0.0
    for layer in _read(net)[0]:
        known = facts(layer)
        if is_plain(layer, Declared):
            part = layer.lipschitz
        elif is_plain(layer, HeldLinear) or is_plain(layer, HeldConv2d):
            part = layer.coefficient
        elif known is not None:
            part = known.lipschitz
        elif is_plain_flatten(layer):
            part = 1.0
        else:
            return None
        total = log_product(total, log_of(part))  # type: ignore[arg-type]
    return total


def feature_axis(net: nn.Module) -> int | None:
    """The axis of one output sample along which the rows of the last layer lie; `None` where that is not known."""
    affine = affine_layer(_read(net)[0][-1])
    return None if affine is None else -1 if affine.conv is None else 0


def output_rows(net: nn.Module) -> int:
    """How many rows the last layer has; 0 where it is not linear."""
    affine = affine_layer(_read(net)[0][-1])
    return 0 if affine is None else affine.weight.shape[0]


def enclose(net: nn.Module, box: Box, context: Box | None = None) -> Box:
    """A box that holds the image of a box; `Box.everything()` where nothing finite is known.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> out = enclose(net, Box(-1, 1, shape=(2,)))
        >>> x = torch.rand(100, 2) * 2 - 1
        >>> bool(out.contains(net(x)).all())
        True
    """
    if is_plain(net, Declared):
        return _enclose_declared(net, box, context)  # type: ignore[arg-type]
    if is_plain(net, LayeredNet):
        box = net.join(box, context)  # type: ignore[operator]
    for layer in _read(net)[0]:
        known = facts(layer)
        if is_plain(layer, Declared):
            box = _enclose_declared(layer, box, None)  # type: ignore[arg-type]
        elif known is not None:
            box = known.enclose(box)
        elif is_plain_flatten(layer):
            box = box.map(lambda end: end.flatten()) if box.shape else box
        else:
            affine = affine_layer(layer)
            if affine is None:
                raise unknown(layer)
            box = affine.apply(box)
    return box


def _enclose_declared(net: Declared, box: Box, context: Box | None) -> Box:
    """The ball around the image of the centre; there is no interval image of an unknown function."""
    if not box.is_bounded or not box.shape or (context is not None and not torch.equal(context.low, context.high)):
        return Box.everything()
    if box.log_radius > 700:
        return Box.everything()
    twin = double_twin(net.net).cpu()
    value = as_float64(twin(box.center[None]) if context is None else twin(box.center[None], context.center[None]))[0]
    reach = net.lipschitz * math.exp(box.log_radius) if net.lipschitz else 0.0
    return Box.outward(value - reach, value + reach, 1e-10 * (1 + value.abs()))


def ball_and_interval(net: nn.Module, box: Box, context: Box | None = None) -> Box:
    r"""The intersection of the interval image and the ball of radius $\mathrm{Lip} \cdot |\text{radius}|_2$ around the centre's image."""
    image = enclose(net, box, context)
    if not (box.is_bounded and box.shape) or image.shape == ():
        return image
    log_reach = log_product(log_lipschitz(net, box.shape), box.log_radius)
    if log_reach > 700:
        return image
    center = enclose(net, Box.point(box.center), context)
    reach = math.exp(log_reach) * (1 + 1e-12)
    return image.intersect(Box.outward(center.low - reach, center.high + reach))


def point_image(net: nn.Module, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""`net(x)` for a batch in float64, and for each sample how far it is at most from the value in real arithmetic.

    The weights are those that act, whatever their dtype. A product with $n$ terms errs by $\gamma_n \, \||W|\| \,
    |x|$, and later layers magnify what came before by their norms. A declared net is evaluated in float64 and charged
    with 64 roundings of the dtype of `x`, or $10^{-10}$ if that is more: it may compute in that dtype inside.

    Example:
        >>> net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 2)
        >>> value, error = point_image(net, x)
        >>> bool((error < 1e-13).all()), value.dtype
        (True, torch.float64)
    """
    value = x.detach().double()
    error = value.new_zeros(len(value))
    given = None if context is None else context.detach().double()
    if is_plain(net, LayeredNet) and net.context and given is not None:
        value = torch.cat((value, given), net.dim)  # type: ignore[arg-type]
    for layer in _read(net)[0]:
        known = facts(layer)
        if is_plain(layer, Declared):
            twin = double_twin(layer.net)  # type: ignore[arg-type]
            share, reach = max(1e-10, 64 * torch.finfo(x.dtype).eps), norms(value)
            value = twin(value) if given is None else twin(value, given)
            error = layer.lipschitz * error + share * (1 + norms(value) + layer.lipschitz * reach)  # type: ignore[operator]
        elif known is not None:
            value = known.interval(value, value)[0]
            error = known.lipschitz * error + 1e-14 + norms(1e-14 * value)
        elif is_plain_flatten(layer):
            value = value.flatten(1)
        else:
            affine = affine_layer(layer, move=False)
            if affine is None:
                raise unknown(layer)
            value, error = affine.point(value, error)
    return value, error


def double_twin(net: nn.Module) -> nn.Module:
    """A float64 copy in evaluation mode that computes the same function: held layers keep the weight that acts in the original."""
    twin = copy.deepcopy(net).double().eval()
    for original, layer in zip(net.modules(), twin.modules(), strict=True):
        if isinstance(original, (HeldLinear, HeldConv2d)):
            layer.weight.data = original.held_weight().detach().double()  # type: ignore[union-attr]
            layer.coefficient = math.inf  # type: ignore[assignment]
    return twin.requires_grad_(False)
