r"""What is proved about a net: its Lipschitz constant, and a box that encloses the image of a box.

Nets are read layer by layer (`bilip.nets.read`); the constant is the product of the layers' constants. Whatever
cannot be read raises `UnknownLipschitz`: declare it with `Declared`.

The statements are about the function in real arithmetic with the parameters as they are stored. Images are computed
in float64 and widened by a bound on their own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bilip._torch import setting
from bilip.bounds import Box, log_product
from bilip.errors import UnknownLipschitz
from bilip.nets.activations import Shape
from bilip.nets.layers import GainConv2d, LayeredNet, takes_context
from bilip.nets.point import Point
from bilip.nets.read import CONVS, Affine, Linear, Reading, container, float64_copy, read, unknown
from bilip.nets.readable import changed, tampered
from bilip.nets.spectral import HeldConv2d, HeldLinear

__all__ = ["float64_copy", "enclose", "log_cap", "log_lipschitz", "point_image"]

T = TypeVar("T")
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
    return _remembered((id(net), shape, _ends(outputs)), net, lambda: _log_lipschitz(net, shape, outputs))


def _ends(part: slice | None) -> tuple[int | None, int | None] | None:
    return None if part is None else (part.start, part.stop)


def remembering() -> AbstractContextManager[None]:
    """Within this context no layer is read, no norm, and no image of the same box, computed twice; parameters must not change meanwhile.

    What is remembered is as old as the context, so that no proof speaks of weights that have changed since. A cache that outlives a proof
    could not promise that: no counter moves when somebody writes through `weight.data` or sets `Declared.lipschitz`. And it is no
    argument, because it would have to go through the methods with which blocks of users state what is proved about them.
    """
    return setting(_MEMO, {} if _MEMO.get() is None else _MEMO.get())


def _remembered(key: tuple[Any, ...], owner: nn.Module, compute: Callable[[], T]) -> T:
    """What was computed under a key; holding its owner keeps the owner's id from being used again."""
    memo = _MEMO.get()
    if memo is None:
        return compute()
    if key not in memo:
        memo[key] = owner, compute()
    return memo[key][1]


def _log_lipschitz(net: nn.Module, shape: Shape | None, outputs: slice | None) -> float:
    readings, columns = _read(net)
    total = 0.0
    for index, (layer, reading) in enumerate(zip(_layers(net), readings, strict=True)):
        rows, inputs = outputs if index == len(readings) - 1 else None, columns if index == 0 else None
        key = (
            "layer",
            id(layer),
            shape,
            _ends(rows),
            _ends(inputs),
        )  # all but the last serve every part of the outputs
        log, shape = _remembered(key, layer, partial(_through, reading, shape, rows, inputs))
        total = log_product(total, log)
    return total


def _through(
    reading: Reading, shape: Shape | None, rows: slice | None, inputs: slice | None
) -> tuple[float, Shape | None]:
    """The log of the constant of a layer for inputs of a shape, and the shape after it."""
    return reading.log_lipschitz(shape, rows, inputs), reading.out_shape(shape)


def _layers(net: nn.Module) -> list[nn.Module]:
    return flatten(net.layers) if _is_conditional(net) else flatten(net)  # type: ignore[arg-type]


def _is_conditional(net: nn.Module) -> bool:
    return isinstance(net, LayeredNet) and bool(net.context) and is_container(net)


def _read(net: nn.Module) -> tuple[list[Reading], slice | None]:
    """What is proved about each layer of a net, and which inputs of the first one are not context."""
    return _remembered(("read", id(net)), net, lambda: _read_now(net))


def _read_now(net: nn.Module) -> tuple[list[Reading], slice | None]:
    layers = _layers(net)
    readings = [read(layer) for layer in layers]
    owned, columns = _is_conditional(net), None  # input and context are put together in a tensor of the net's own
    if owned:
        columns = slice(0, net.inputs)  # type: ignore[arg-type]
        taken = linear_size(layers[0])[1] if layers else None
        if taken not in (None, net.inputs + net.context):  # type: ignore[operator]
            raise unknown(net, f"has inputs={net.inputs} and context={net.context}, but its first layer takes {taken}")
    for layer, reading in zip(layers, readings, strict=True):
        if getattr(layer, "inplace", False) and not owned:
            raise unknown(layer, "works in place on what the net was given, which it changes")
        owned = owned or reading.fresh
    return readings, columns


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
    try:
        readings = _read(net)[0]
    except UnknownLipschitz:
        return None
    for reading in readings:
        cap = reading.log_cap()
        if cap is None:
            return None
        total = log_product(total, cap)
    return total


def feature_axis(net: nn.Module) -> int | None:
    """The axis of one output sample along which the rows of the last layer lie; `None` where that is not known."""
    last = _layers(net)[-1:]
    return None if not last or linear_size(last[0])[0] is None else -1 if isinstance(last[0], nn.Linear) else 0


def output_rows(net: nn.Module) -> int:
    """How many rows the last layer has; 0 where it is not linear."""
    last = _layers(net)[-1:]
    return (linear_size(last[0])[0] or 0) if last else 0


def enclose(net: nn.Module, box: Box, context: Box | None = None) -> Box:
    """A box that holds the image of a box; `Box.everything()` where nothing finite is known.

    A net that takes a context may be given any, unless a box says which.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> out = enclose(net, Box(-1, 1, shape=(2,)))
        >>> x = torch.rand(100, 2) * 2 - 1
        >>> bool(out.contains(net(x)).all())
        True
    """
    readings, columns = _read(net)
    if columns is not None or (isinstance(net, LayeredNet) and is_container(net)):
        box = net.join(box, context)  # type: ignore[operator]
    given = None  # to what is in a container no context is handed on
    if _layers(net) == [net]:
        given = Box.everything() if context is None and takes_context(net) else context
    for reading in readings:
        box = reading.enclose(box, given)
    return box


def ball_and_interval(net: nn.Module, box: Box, context: Box | None = None) -> Box:
    r"""The intersection of the interval image and the ball of radius $\mathrm{Lip} \cdot |\text{radius}|_2$ around the centre's image."""
    # Of the last two boxes: a block asks for both of them once for each statement.
    known: list[tuple[Box, Box | None, Box]] = _remembered(("image", id(net)), net, list)
    for old, given, image in known:
        if old == box and given == context:
            return image
    known[:] = [*known[-1:], (box, context, _ball_and_interval(net, box, context))]
    return known[-1][2]


def _ball_and_interval(net: nn.Module, box: Box, context: Box | None) -> Box:
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
    |x|$, and later layers magnify what came before by their norms. A declared net is evaluated in float64 and charged with
    the error it states, or with that of the dtype of `x`.

    Example:
        >>> net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 2)
        >>> value, error = point_image(net, x)
        >>> bool((error < 1e-13).all()), value.dtype
        (True, torch.float64)
    """
    value = x.detach().double()
    given = None if context is None else context.detach().double()
    readings, columns = _read(net)
    if columns is not None and given is not None:
        value, given = torch.cat((value, given), net.dim), None  # type: ignore[arg-type]
    known = Point(value, value.new_zeros(len(value)))
    for reading in readings:
        known = reading.point(known, given if len(readings) == 1 else None, x.dtype)
    linear = [reading for reading in readings if isinstance(reading, Linear)]
    # Looked at once for all layers: a device has to be waited for. An error alone does not tell: a layer behind may bound it.
    if linear and not bool(torch.stack([reading.is_finite().to(value.device) for reading in linear]).all()):
        for reading in linear:
            reading.require_finite()
    return known.value, known.error


# ---- what a net is made of


def is_container(net: nn.Module) -> bool:
    """Whether a module applies its layers one after the other and does nothing else."""
    base = container(net)
    if base is None or tampered(net) is not None or hasattr(type(net), "log_lipschitz"):
        return False
    return changed(type(net), type(net).__mro__.index(base)) is None


def flatten(net: nn.Module) -> list[nn.Module]:
    """The layers of a net in order: `nn.Sequential` and nets without context unrolled."""
    if not is_container(net):
        return [net]
    if isinstance(net, nn.Sequential):
        return [layer for child in net._modules.values() for layer in flatten(child)]  # type: ignore[arg-type]  # repeats count
    return [net] if net.context else flatten(net.layers)  # type: ignore[arg-type]


def overwriting(net: nn.Module) -> nn.Module | None:
    """The layer of a net that works in place on the net's own input; `None` if there is none as far as can be seen.

    Some layers hand on a view of what they were given, so it need not be the first.

    Example:
        >>> overwriting(nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)))
        ReLU(inplace=True)
        >>> overwriting(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)))
    """
    return _overwriting(net)[0]


def _overwriting(net: nn.Module) -> tuple[nn.Module | None, bool]:
    """The layer, and whether what comes out may still be a view of what went in."""
    if isinstance(net, LayeredNet) and net.context:
        return None, False
    if isinstance(net, (nn.Sequential, LayeredNet)):
        children = net._modules.values() if isinstance(net, nn.Sequential) else [net.layers]
        for child in children:
            found, view = _overwriting(child) if child is not None else (None, False)
            if found is not None or not view:
                return found, view
        return None, True
    if getattr(net, "inplace", False):
        return net, False
    if net._modules:  # it does what it likes with its parts
        return _overwriting(next(part for part in net._modules.values() if part is not None))[0], False
    return None, isinstance(net, _VIEWS)


_VIEWS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)


def affine_layer(layer: nn.Module) -> Affine | None:
    """Read a linear or convolution layer, on the CPU; `None` for other modules."""
    if not isinstance(layer, (nn.Linear, *CONVS)):
        return None
    found = read(layer)
    return found.affine if isinstance(found, Linear) else None


def linear_size(layer: nn.Module) -> tuple[int | None, int | None]:
    """Features or channels that a linear or convolution layer gives and takes; `None` for other modules."""
    if not isinstance(layer, (nn.Linear, *CONVS)) or not isinstance(read(layer), Linear):
        return None, None
    weight: Any = layer.weight
    return weight.shape[0], weight.shape[1] * (1 if isinstance(layer, nn.Linear) else layer.groups)


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer is a linear or convolution layer of torch that acts with the weight it stores."""
    if linear_size(layer)[0] is None or isinstance(layer, (HeldLinear, HeldConv2d, GainConv2d)):
        return False
    return not hasattr(layer, "held_weight") and not parametrize.is_parametrized(layer)
