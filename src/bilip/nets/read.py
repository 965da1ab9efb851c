"""Reading a net: which layers it is made of, and what each of them does.

`read(layer)` says what is proved about one layer. A layer of torch has a reader here; a layer of anybody else states it itself
(`log_lipschitz`, and as it likes `enclose` and `point`), or gives the weight that acts (`held_weight`). Only a layer that computes what its
class says is read (`bilip.nets.readable`); everything else raises `UnknownLipschitz` with the reason and can be declared.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bilip._torch import deepcopy_memo
from bilip.bounds import EPS, Box, as_float64, log_of, log_product, norms, shares
from bilip.errors import NonFiniteParameters, UnknownLipschitz
from bilip.nets import activations
from bilip.nets.activations import TINY, Shape
from bilip.nets.coarseness import coarseness
from bilip.nets.layers import Declared, GainConv2d, LayeredNet, vouched
from bilip.nets.matrix_conv import matrix_conv2d, prefers_matrices
from bilip.nets.norms import conv_norm, matrix_norm
from bilip.nets.point import Point
from bilip.nets.readable import as_born, changed, parametrized, tampered, unstated
from bilip.nets.spectral import HeldConv2d, HeldLinear

__all__ = ["Affine", "Linear", "Reading", "Rearranged", "float64_copy", "read", "reader", "require_finite", "unknown"]


class Reading(Protocol):
    """What is proved about a layer.

    Attributes:
        fresh: Whether its output is a tensor of its own, which a layer after it may overwrite.
    """

    fresh: bool

    def log_lipschitz(
        self, shape: Shape | None = None, outputs: slice | None = None, inputs: slice | None = None
    ) -> float:
        """Log of its Lipschitz constant, rounded up."""
        ...

    def log_cap(self) -> float | None:
        """Log of a constant that no parameters exceed; `None` if there is none."""
        return None

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        """A box that holds the image of a box."""
        ...

    def point(self, known: Point, context: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Point:
        """The image of a batch of values known up to an error."""
        ...

    def out_shape(self, shape: Shape | None) -> Shape | None:
        """Shape of one output; `None` where it is not known or does not matter."""
        return None


def copies(around: Sequence[int], mode: str, shape: Shape | None) -> int:
    """How often an entry appears at most after padding by `around`, given as for `F.pad`, last dimension first."""
    total = 1
    for k in range(0, len(around), 2):
        left, right = around[k], around[k + 1]
        if mode in ("reflect", "circular"):
            total *= 1 + (left > 0) + (right > 0)
        elif mode == "replicate":
            one = shape is None or len(shape) <= k // 2 or shape[-1 - k // 2] == 1
            total *= 1 + left + right if one else 1 + max(left, right)
    return total


@dataclass(frozen=True)
class Affine:
    """A linear or convolution layer in float64, as it acts."""

    weight: Tensor
    bias: Tensor | None
    conv: nn.Module | None = None  # the layer, for a convolution
    cap: float = math.inf  # a bound on its norm, if it is held
    slack: float = 0.0  # how far each entry of the weight may be off, relative to it

    @property
    def _device(self) -> torch.device | None:
        """Where the layer itself is; what is read of it is on the CPU."""
        return getattr(getattr(self.conv, "weight", None), "device", None)

    @property
    def terms(self) -> int:
        """How many products are added up for one output."""
        return math.prod(self.weight.shape[1:])

    def log_norm(self, shape: Shape | None, outputs: slice | None, inputs: slice | None = None) -> float:
        """Log of its operator norm, for some of its outputs and inputs."""
        # Entries off by a share of themselves move the norm by at most that share of the Frobenius norm, times sqrt(taps).
        slack = log_of(1 + self.slack * math.sqrt(self.weight.numel()))
        return log_product(self._log_norm(shape, outputs, inputs), slack, log_of(self._copied(shape)))

    def _copied(self, shape: Shape | None = None) -> float:
        """The norm of the padding before a convolution: padding with pixels of the image repeats them."""
        mode = "zeros" if self.conv is None else _conv_options(self.conv)[2]
        if mode not in ("reflect", "replicate"):
            return 1.0
        return math.sqrt(copies(self.conv._reversed_padding_repeated_twice, mode, shape)) * (1 + EPS)  # type: ignore[union-attr, arg-type]

    def _log_norm(self, shape: Shape | None, outputs: slice | None, inputs: slice | None) -> float:
        weight, conv = self.weight, self.conv
        if conv is None:
            weight = weight[outputs] if outputs is not None else weight
            return log_of(matrix_norm(weight if inputs is None else weight[:, inputs]))
        groups = int(conv.groups)  # type: ignore[arg-type]
        if groups == 1:
            weight = weight[outputs] if outputs is not None else weight
            weight = weight[:, inputs] if inputs is not None else weight
        stride, dilation, mode = _conv_options(conv)
        taps, padding = weight.shape[2:], conv.padding
        if mode == "circular" and (
            isinstance(padding, str)
            or any(2 * p > d * (k - 1) for p, d, k in zip(padding, dilation, taps, strict=True))  # type: ignore[arg-type]
        ):
            raise UnknownLipschitz(
                f"{conv}: circular padding beyond what keeps the image size repeats pixels, and its norm is not bounded here. "
                f"Use padding = dilation * (kernel_size - 1) // 2. {_DECLARE}"
            )
        if weight[0, 0].numel() == 1 and groups == 1:
            return log_of(matrix_norm(weight.flatten(1)))
        size = None if shape is None or len(shape) != weight.ndim - 1 else shape[1:]
        if mode in ("reflect", "replicate"):  # padded before, and without padding of its own
            size, mode = None, "zeros"
        options = {"stride": stride, "dilation": dilation, "groups": groups}
        return log_of(conv_norm(weight, size=size, padding_mode=mode, device=self._device, **options))

    def apply(self, box: Box) -> Box:
        """The interval image, in centre-radius form, widened by the rounding of both."""
        if not box.shape:
            return Box.everything()
        loose = torch.isinf(box.low) | torch.isinf(box.high)
        if loose.any():  # outputs that no unbounded input reaches keep a finite interval
            inner = self.apply(Box(box.low.masked_fill(loose, 0.0), box.high.masked_fill(loose, 0.0)))
            reached = self.act((self.weight != 0).double(), loose.double()) > 0
            return Box(inner.low.masked_fill(reached, -math.inf), inner.high.masked_fill(reached, math.inf))
        center, radius = box.center, box.radius
        magnitude = self.weight.abs()
        middle = self.act(self.weight, center)
        reach = self.act(magnitude, radius)
        rounding = (self.terms + 4) * EPS + self.slack
        error = rounding * (self.act(magnitude, center.abs()) + reach)
        if self.bias is not None:
            bias = self._spread(self.bias)
            middle = middle + bias
            error = error + (2 * EPS + self.slack) * bias.abs() + 2 * EPS * middle.abs()
        return Box.outward(middle - reach, middle + reach, error)

    def point(self, known: Point) -> Point:
        """The image of a batch of values known up to an error; nothing is looked at on the way, so that a device is not waited for."""
        total = self.weight.abs() if self.conv is None else self.weight.abs().flatten(2).sum(2)
        gross = shares((1 + self.weight.numel() * EPS) * self._copied(), total.flatten()[None])
        image = self.act(self.weight, known.value)
        if self.bias is not None:
            image = image + self._spread(self.bias)
        found = Point(image, known.error)
        size = math.prod(image.shape[1:])
        rounding, share = (self.terms + 4) * EPS + self.slack, 2 * EPS + self.slack
        # Products below the normal range of float64 lose at most TINY each, in the bias too.
        own = gross * known.share(rounding) + self.terms * TINY * math.sqrt(size)
        if self.bias is not None:
            own = own + found.share(share) + shares(share, self.bias[None]) * math.sqrt(size / len(self.bias))
        # Also where the norm is beyond float64.
        error = torch.where(known.error > 0, gross.clamp_max(self.cap) * known.error, 0.0)
        return found.with_error((error + own).nan_to_num(math.inf, math.inf) * (1 + 4 * EPS))

    def out_shape(self, shape: Shape | None) -> Shape | None:
        """Shape of one output of a convolution; `None` where it does not matter."""
        if shape is None or self.conv is None or len(shape) != self.weight.ndim - 1:
            return None
        channels = self.weight.shape[1] * int(self.conv.groups)  # type: ignore[arg-type]
        image = torch.zeros((channels, *shape[1:]), dtype=torch.float64, device="meta")
        return tuple(self.act(self.weight.to("meta"), image).shape)

    def act(self, weight: Tensor, x: Tensor) -> Tensor:
        """The linear part with a weight in place of the layer's, on one sample or a batch."""
        if self.conv is None:
            return F.linear(x, weight)
        if x.ndim < weight.ndim:
            return self.act(weight, x[None])[0]
        stride, dilation, mode = _conv_options(self.conv)
        call = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.ndim]
        padding, groups = self.conv.padding, int(self.conv.groups)  # type: ignore[arg-type]
        if mode != "zeros":
            x = F.pad(x, self.conv._reversed_padding_repeated_twice, mode=mode)  # type: ignore[arg-type]
            padding = (0,) * (weight.ndim - 2)
        if weight.ndim == 4 and groups == 1 and not isinstance(padding, str) and prefers_matrices(x, weight):
            return matrix_conv2d(x, weight, stride=stride, padding=padding, dilation=dilation)  # type: ignore[arg-type]
        return call(x, weight, None, stride, padding, dilation, groups)  # type: ignore[arg-type]

    def _spread(self, bias: Tensor) -> Tensor:
        return bias if self.conv is None else bias.view(-1, *[1] * (self.weight.ndim - 2))


class Linear(Reading):
    """A linear or convolution layer; its weight is looked at only when that is needed."""

    fresh = True
    kind = Affine

    slack = 0.0  # how far each entry of the acting weight may be off, relative to it

    def __init__(self, layer: nn.Module) -> None:
        self.layer: Any = layer

    def acting(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias with which the layer acts."""
        return self.layer.weight, getattr(self.layer, "bias", None)

    def cap(self) -> float:
        """A constant that no parameters exceed."""
        return math.inf

    @functools.cached_property
    def affine(self) -> Affine:
        weight, bias = self._finite()
        return self._affine(weight.cpu(), None if bias is None else bias.cpu())

    def _float64(self) -> tuple[Tensor, Tensor | None]:
        """What acts, in float64."""
        weight, bias = self.acting()
        if weight.is_complex():
            raise unknown(self.layer, "has complex weights")
        return weight.detach().double(), None if bias is None else bias.detach().double()

    def _finite(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._float64()
        require_finite(self.layer, {"the weight": weight, "the bias": bias})
        return weight, bias

    def _affine(self, weight: Tensor, bias: Tensor | None) -> Affine:
        layer = self.layer
        return self.kind(weight, bias, None if isinstance(layer, nn.Linear) else layer, float(self.cap()), self.slack)

    def log_lipschitz(self, shape=None, outputs=None, inputs=None):
        return self.affine.log_norm(shape, outputs, inputs)

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        return self.affine.apply(box)

    def point(self, known, context=None, dtype=torch.float64):
        return self._affine(*self._float64()).point(known)

    def is_finite(self) -> Tensor:
        """Whether weight and bias are finite, on their device."""
        return torch.stack([torch.isfinite(value).all() for value in self._float64() if value is not None]).all()

    def require_finite(self) -> None:
        """Raise `NonFiniteParameters` where the weight or the bias holds NaN or Inf, for which `point` states an infinite error."""
        self._finite()

    def out_shape(self, shape: Shape | None) -> Shape | None:
        return self.affine.out_shape(shape)


def require_finite(layer: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise `NonFiniteParameters` where a tensor of a layer holds NaN or Inf; a device is looked at once."""
    values = {name: torch.isfinite(value).all() for name, value in tensors.items() if value is not None}
    for name, good in zip(values, torch.stack(list(values.values())).tolist() if values else (), strict=True):
        if not good:
            raise NonFiniteParameters(
                f"{name} of {layer} holds NaN or Inf, so nothing can be proved about the model. "
                "Load an earlier checkpoint, or find the step where training diverged."
            )


class _Held(Linear):
    """A layer whose weight is held to a norm."""

    def acting(self) -> tuple[Tensor, Tensor | None]:
        return self.layer.held_weight(), self.layer.bias

    def cap(self) -> float:
        return self.layer.coefficient

    def log_cap(self) -> float | None:
        # A copy that keeps the weight that acts is held to nothing.
        return log_of(self.layer.coefficient) if self.layer.coefficient < math.inf else None


class _StatesWeight(Linear):
    """A layer of somebody else that states the weight with which it acts, and perhaps the bias."""

    def acting(self) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        return layer.held_weight(), layer.held_bias() if hasattr(layer, "held_bias") else getattr(layer, "bias", None)


class _Gained(Linear):
    """A convolution times a gain for each output channel."""

    slack = 8 * EPS

    def acting(self) -> tuple[Tensor, Tensor | None]:
        # A third of the gain at a time: all of it may be beyond float64 where the product is not, and 3 l would be rounded.
        bias, third = self.layer.bias, self.layer.log_gain.double().exp()
        wide = third[:, None, None, None]
        return (
            self.layer.weight.double() * wide * wide * wide,
            None if bias is None else bias.double() * third * third * third,
        )


class Rearranged(Reading):
    """A layer that moves the entries of a sample and changes none."""

    fresh = False

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        self.act = act

    def log_lipschitz(self, shape=None, outputs=None, inputs=None):
        return 0.0

    def log_cap(self) -> float | None:
        return 0.0

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        return box.map(lambda end: self.act(end[None])[0]) if box.shape else box

    def point(self, known, context=None, dtype=torch.float64):
        return Point(self.act(known.value), known.error)

    def out_shape(self, shape: Shape | None) -> Shape | None:
        return None if shape is None else tuple(self.act(torch.empty((1, *shape), device="meta")).shape[1:])


class _Stated(Reading):
    """A module that states what is proved about it.

    What it does not state is found by evaluating a float64 copy: the image of a box lies in the ball around the image of its
    centre, and a value is charged for rounding.
    """

    fresh = False

    def __init__(self, layer: nn.Module) -> None:
        self.layer: Any = layer
        self.net = layer  # what is evaluated

    def log_lipschitz(self, shape=None, outputs=None, inputs=None):
        log = float(self.layer.log_lipschitz(shape, outputs))
        if math.isnan(log):
            raise unknown(self.layer, "states NaN as the log of its Lipschitz constant")
        return log

    def log_cap(self) -> float | None:
        return self.layer.log_cap() if self._states("log_cap") else None

    def _states(self, name: str) -> bool:
        return getattr(type(self.layer), name, None) is not None

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        if self._states("enclose"):
            # Without a context it speaks about all of them.
            some = context is not None and (context.shape or context.is_bounded)
            found: Any = self.layer.enclose(box, context) if some else self.layer.enclose(box)
            if not isinstance(found, Box):
                raise unknown(self.layer, f"encloses a box in a {type(found).__name__}, not a bilip.Box")
            return found
        if not box.is_bounded or not box.shape or (context is not None and not torch.equal(context.low, context.high)):
            return Box.everything()
        log = log_product(self.log_lipschitz(box.shape), box.log_radius)
        if max(log, box.log_radius) > 700:
            return Box.everything()
        tensors = (*self.net.parameters(), *self.net.buffers())
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
        given = None if context is None else context.center[None]
        found = self.point(Point(box.center[None], torch.zeros(1, dtype=torch.float64, device="cpu")), given, dtype)
        reach, middle = math.exp(log) * (1 + 1e-12) + float(found.error), as_float64(found.value[0])
        return Box.outward(middle - reach, middle + reach)

    def point(self, known, context=None, dtype=torch.float64):
        value, error = known.value, known.error
        if self._states("point"):
            given = () if context is None else (context,)
            image, found = self.layer.point(value, error, *given)
            if image.dtype != torch.float64 or image.shape[:1] != value.shape[:1] or found.shape != error.shape:
                raise unknown(
                    self.layer,
                    f"gives values of {image.dtype} with errors of shape {tuple(found.shape)} from its method point, not float64 "
                    f"and {tuple(error.shape)}",
                )
            return Point(image, found.nan_to_num(math.inf, math.inf))
        copied = float64_copy(self.net).to(value.device)

        def act(x: Tensor) -> Tensor:
            return (copied(x) if context is None else copied(x, context)).double()

        image = act(value)
        log = self.log_lipschitz()
        constant = math.exp(log) * (1 + 1e-15) if log < 700 else math.inf
        own = self._own_error(value, image, act, constant, dtype)
        return Point(image, torch.where(error > 0, constant * error, 0.0) + own)

    def _own_error(
        self, x: Tensor, image: Tensor, act: Callable[[Tensor], Tensor], constant: float, dtype: torch.dtype
    ) -> Tensor:
        """How far the values at `x` are at most from those in real arithmetic, by rounding in the digits in which they are computed."""
        eps = max(torch.finfo(dtype).eps, coarseness(act, x, image, dtype))
        row = max((p[0].numel() for p in self.net.parameters() if p.ndim > 1 and len(p)), default=1)
        return (16 + row) * eps * (1 + norms(image) + constant * norms(x))


class _Vouched(_Stated):
    """A module whose author states its constant, and perhaps its error."""

    def __init__(self, layer: Declared) -> None:
        super().__init__(layer)
        self.net = layer.net

    def log_lipschitz(self, shape=None, outputs=None, inputs=None):
        return log_of(vouched("Declared.lipschitz", self.layer.lipschitz))

    def log_cap(self) -> float | None:
        return self.log_lipschitz()

    def _own_error(self, x, image, act, constant, dtype):
        stated = self.layer.error
        if callable(stated):
            return torch.as_tensor(stated(x)).to(norms(x)).expand(len(x)).nan_to_num(math.inf, math.inf)
        if stated is not None:
            return norms(x).new_full((len(x),), vouched("Declared.error", stated))
        return super()._own_error(x, image, act, constant, dtype)


@functools.singledispatch
def reader(layer: nn.Module) -> Reading | None:
    """What is proved about a layer of a known class, given that it computes what its class says; `None` for other parameters."""
    return None


def _checked_held(layer: Any) -> Reading:
    """A held layer, unless what it was held for was changed since."""
    if not layer.coefficient > 0:
        raise unknown(layer, f"has coefficient={layer.coefficient}, not a positive number")
    if isinstance(layer, HeldConv2d) and tuple(layer.kernel_size) != tuple(layer.weight.shape[2:]):
        raise unknown(layer, f"has kernel_size={layer.kernel_size}, but a kernel of {tuple(layer.weight.shape[2:])}")
    held_for = ("zeros", 1, (1, 1))
    if isinstance(layer, HeldConv2d) and (layer.padding_mode, layer.groups, tuple(layer.dilation)) != held_for:
        raise unknown(layer, "is held for zero padding, one group and no dilation, and one of them was changed")
    return _checked_conv(layer, _Held)


def _checked_conv(layer: Any, reading: type[Linear]) -> Reading:
    """The options of a convolution can be set after it was built; what does not fit together is refused."""
    if not isinstance(layer, nn.Linear):
        if layer.transposed or layer.padding_mode not in ("zeros", "circular", "reflect", "replicate"):
            raise unknown(layer, f"has padding_mode={layer.padding_mode!r}, which has no certified norm here")
        if layer.padding_mode != "zeros" and not isinstance(layer.padding, str):
            around = [p for p in reversed(layer.padding) for _ in range(2)]
            if list(layer._reversed_padding_repeated_twice) != around:
                raise unknown(layer, "has another padding than it was built with")
    return reading(layer)


def _flatten(layer: nn.Flatten) -> Reading | None:
    return Rearranged(lambda v: v.flatten(1)) if (layer.start_dim, layer.end_dim) == (1, -1) else None


CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_READERS: dict[type[nn.Module], Callable[..., Reading | None]] = {
    **dict.fromkeys((nn.Linear, *CONVS), functools.partial(_checked_conv, reading=Linear)),
    **dict.fromkeys((HeldLinear, HeldConv2d), _checked_held),
    GainConv2d: functools.partial(_checked_conv, reading=_Gained),
    nn.Flatten: _flatten,
    Declared: _Vouched,
    **dict.fromkeys(activations.KNOWN, activations.facts),  # type: ignore[arg-type]
}
for _kind, _read in _READERS.items():
    reader.register(_kind, _read)

as_born(*{part for kind in reader.registry for part in kind.__mro__ if part not in (object, nn.Module)})
as_born(nn.Sequential, LayeredNet)

_STATEMENTS = ("log_lipschitz", "enclose", "point", "log_cap")


def read(layer: nn.Module) -> Reading:
    """What is proved about one layer.

    Raises:
        UnknownLipschitz: The layer cannot be read; the message says why.

    Example:
        >>> math.exp(read(nn.LeakyReLU(3.0)).log_lipschitz()) <= 3.0 + 1e-12
        True
    """
    if not isinstance(layer, nn.Module):
        raise UnknownLipschitz(f"expected an nn.Module where a layer should be, got {type(layer).__name__}.")
    why = tampered(layer)
    if why is not None:
        raise unknown(layer, why)
    kind = _class_of(layer)
    order = kind.__mro__
    known = next((k for k, part in enumerate(order) if part is not object and part in reader.registry), len(order))
    if _first(order, "log_lipschitz") < known:
        why = unstated(kind, [name for name in _STATEMENTS if hasattr(kind, name)], nn.Module)
        if why is not None:
            raise unknown(layer, f"has {why}, but inherits what was proved without it")
        return _Stated(layer)
    if known < len(order) and _first(order, "held_weight") < known and issubclass(kind, (nn.Linear, *CONVS)):
        why = unstated(kind, [name for name in ("held_weight", "held_bias") if hasattr(kind, name)], nn.Module)
        if why is not None:
            raise unknown(layer, f"has {why}, but inherits the weight that acted without it")
        return _checked_conv(layer, _StatesWeight)
    if known < len(order):
        why = changed(kind, known)
        if why is not None:
            raise unknown(layer, f"has {why} overridden")
        found = reader.dispatch(order[known])(layer)
        if found is not None:
            return found
    elif (base := container(layer)) is not None and (why := changed(kind, order.index(base))) is not None:
        raise unknown(layer, f"has {why} overridden")
    raise unknown(layer, _why_not_known(layer))


def _first(order: Sequence[type], name: str) -> int:
    """Where a name is defined first among classes."""
    return next((k for k, part in enumerate(order) if name in vars(part)), len(order))


def _class_of(layer: nn.Module) -> type:
    """The class of a layer; for a parametrized one the class it had before, if its parametrizations are known and at rest."""
    kind = type(layer)
    if not parametrize.is_parametrized(layer):
        return kind
    if layer.training:
        raise UnknownLipschitz(
            f"{kind.__name__} is parametrized and in training mode, where reading its weight may change it. "
            "Call .eval() on the model before asking for bounds."
        )
    why = parametrized(layer)
    if why is not None:
        raise unknown(layer, f"{why} (torch.nn.utils.parametrize.remove_parametrizations makes its weight a plain one)")
    return kind.__bases__[0]


def container(net: nn.Module) -> type | None:
    """The class of a net that applies layers one after the other, if it is a subclass of one."""
    return next((base for base in (nn.Sequential, LayeredNet) if isinstance(net, base)), None)


def float64_copy(net: nn.Module) -> nn.Module:
    """A float64 copy in evaluation mode that computes the same function: held layers keep the weight that acts in the original."""
    copied = copy.deepcopy(net, deepcopy_memo(net)).double().eval()
    for original, layer in zip(net.modules(), copied.modules(), strict=True):
        for kind in (HeldLinear, HeldConv2d):
            if isinstance(original, kind) and type(original).held_weight is kind.held_weight:
                # A copy of it too: what acts in the original may be kept there.
                layer.weight.data = original.held_weight().detach().to(torch.float64, copy=True)  # type: ignore[union-attr]
                layer.coefficient = math.inf  # type: ignore[assignment]
    for parameter in copied.parameters():  # a scripted module has no requires_grad_
        parameter.requires_grad_(False)
    return copied


_DECLARE = "If you know its constant, declare it: bilip.nets.Declared(net, lipschitz=...)."


def _why_not_known(layer: nn.Module) -> str:
    if layer.training and getattr(layer, "p", 0) and isinstance(layer, nn.modules.dropout._DropoutNd):
        return "is another map at every call in training mode (call .eval())"
    if any(part in reader.registry for part in type(layer).__mro__[:-1]):
        return "has parameters for which no constant is known"
    return "is not a layer whose constant is known"


def unknown(layer: nn.Module, why: str) -> UnknownLipschitz:
    """The error for a module that cannot be read."""
    return UnknownLipschitz(
        f"{type(layer).__name__} {why}, so its Lipschitz constant cannot be proved. {_DECLARE} "
        "Known are Linear, Conv, Flatten, Sequential, the nets of bilip.nets and the activations of bilip.nets.activations."
    )


def _conv_options(conv: nn.Module) -> tuple[Sequence[int], Sequence[int], str]:
    return conv.stride, conv.dilation, conv.padding_mode  # type: ignore[return-value]
