r"""What is proved about a net: its Lipschitz constant, and a box that encloses the image of a box.

Nets are read layer by layer: `nn.Linear`, `nn.Conv1d/2d/3d`, bilip's layers, known activations, `nn.Flatten`,
`nn.Sequential`, and bilip's own nets. The constant is the product of the layers' constants. Whatever cannot be read - another
module, a subclass with its own `forward`, a layer with hooks - raises `UnknownLipschitz`: declare it with `Declared`.

The statements are about the function in real arithmetic with the parameters as they are stored. Interval images are computed in
float64 and widened by a bound on their own rounding.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.bounds import EPS, Box, as_float64, log_of, log_product
from bilip.errors import InputError, NonFiniteParameters, UnknownLipschitz
from bilip.nets import activations
from bilip.nets.norms import conv_norm, matrix_norm
from bilip.nets.spectral import HeldConv2d, HeldLinear

__all__ = ["Declared", "enclose", "log_lipschitz"]

Shape = tuple[int, ...]
_MEMO: ContextVar[dict | None] = ContextVar("norms", default=None)


class Declared(nn.Module):
    r"""Any module, with a Lipschitz constant that its author vouches for.

    Args:
        net: The module, called as `net(x)` or `net(x, context)`.
        lipschitz: An upper bound on $|net(x) - net(x')| / |x - x'|$ for every context.

    Example:
        >>> class Sine(nn.Module):
        ...     def forward(self, x):
        ...         return torch.sin(x)
        >>> round(math.exp(log_lipschitz(Declared(Sine(), lipschitz=1.0))), 6)
        1.0
    """

    def __init__(self, net: nn.Module, *, lipschitz: float) -> None:
        super().__init__()
        if not (isinstance(lipschitz, (int, float)) and 0 <= lipschitz < math.inf):
            raise InputError(f"lipschitz={lipschitz!r}: expected a finite number >= 0, an upper bound that you vouch for.")
        self.net = net
        self.lipschitz = float(lipschitz)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.net(x) if context is None else self.net(x, context)

    def log_lipschitz(self, shape: Shape | None = None, outputs: slice | None = None) -> float:
        """Log of the declared constant."""
        return log_of(self.lipschitz)

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        """The ball around the image of the centre; there is no interval image of an unknown function."""
        if not box.is_bounded or not box.shape or (context is not None and not torch.equal(context.low, context.high)):
            return Box.everything()
        net = copy.deepcopy(self.net).double().cpu().eval()
        with torch.no_grad():
            value = net(box.center[None]) if context is None else net(box.center[None], context.center[None])
        value = as_float64(value)[0]
        reach = self.lipschitz * math.exp(min(box.log_radius, 700.0))
        return Box.outward(value - reach, value + reach, 1e-10 * (1 + value.abs()))

    def extra_repr(self) -> str:
        return f"lipschitz={self.lipschitz:g}"


def log_lipschitz(net: nn.Module, shape: Shape | None = None, outputs: slice | None = None) -> float:
    """Log of a certified upper bound on the Lipschitz constant of a net in its input.

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
    key = (id(net), shape, None if outputs is None else (outputs.start, outputs.stop))
    if memo is None:
        return _log_lipschitz(net, shape, outputs)
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
    own: Any = getattr(net, "log_lipschitz", None)
    if own is not None:
        return own(shape, outputs)
    total = 0.0
    layers = flatten(net)
    for index, layer in enumerate(layers):
        rows = outputs if index == len(layers) - 1 else None
        total = log_product(total, _layer_log(layer, shape, rows))
        shape = out_shape(layer, shape)
    return total


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
    if isinstance(net, Declared):
        return log_of(net.lipschitz)
    total = 0.0
    for layer in flatten(net):
        inner = getattr(layer, "layers", None)
        if isinstance(inner, nn.Sequential):
            part = log_cap(inner)
        elif hasattr(layer, "coefficient"):
            part = log_of(layer.coefficient)  # type: ignore[arg-type]
        else:
            known = None if _hooked(layer) else activations.facts(layer)
            part = 0.0 if isinstance(layer, nn.Flatten) else None if known is None else log_of(known.lipschitz)
        if part is None:
            return None
        total = log_product(total, part)
    return total


def enclose(net: nn.Module, box: Box, context: Box | None = None) -> Box:
    """A box that holds the image of a box; `Box.everything()` where nothing finite is known.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> out = enclose(net, Box(-1, 1, shape=(2,)))
        >>> x = torch.rand(100, 2) * 2 - 1
        >>> bool(out.contains(net(x)).all())
        True
    """
    own: Any = getattr(net, "enclose", None)
    if own is not None:
        return own(box, context)
    for layer in flatten(net):
        box = _layer_box(layer, box)
    return box


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


def feature_axis(net: nn.Module) -> int | None:
    """The axis of one output sample along which the rows of the last layer lie; `None` where that is not known."""
    if isinstance(net, Declared):
        return None
    last = flatten(getattr(net, "layers", net))[-1]
    affine = affine_layer(last)
    if affine is None:
        return None
    return -1 if affine.conv is None else 0


def point_image(net: nn.Module, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""`net(x)` for a batch in float64, and for each sample how far it is at most from the value in real arithmetic.

    The weights are those that act, whatever their dtype. A product with $n$ terms errs by $\gamma_n \, \||W|\| \, |x|$, and later layers
    magnify what came before by their norms. A declared net is evaluated in float64 and credited with ten correct digits.

    Example:
        >>> net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 2)
        >>> value, error = point_image(net, x)
        >>> bool((error < 1e-13).all()), value.dtype
        (True, torch.float64)
    """
    value = x.detach().double()
    return _point(net, value, value.new_zeros(len(value)), None if context is None else context.detach().double())


def _point(net: nn.Module, value: Tensor, error: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
    if isinstance(net, Declared):
        twin = double_twin(net.net)
        image = twin(value) if context is None else twin(value, context)
        return image, net.lipschitz * error + 1e-10 * (1 + _sizes(image))
    inner: Any = getattr(net, "layers", None)
    if isinstance(inner, nn.Sequential):
        if context is not None and max(getattr(net, "context_features", 0), getattr(net, "context_channels", 0)):
            value = torch.cat((value, context), 1 if hasattr(net, "context_channels") else -1)
        return _point(inner, value, error, None)
    for layer in flatten(net):
        if layer is not net and (isinstance(layer, Declared) or isinstance(getattr(layer, "layers", None), nn.Sequential)):
            value, error = _point(layer, value, error, context)
            continue
        if isinstance(layer, nn.Flatten):
            value = value.flatten(1)
            continue
        known = None if _hooked(layer) else activations.facts(layer)
        if known is not None:
            value = known.interval(value, value)[0]
            error = known.lipschitz * error + 1e-14 * (1 + _sizes(value))
            continue
        affine = affine_layer(layer, move=False)
        if affine is None:
            raise unknown(layer)
        value, error = affine.point(value, error, getattr(layer, "coefficient", math.inf))
    return value, error


def _sizes(value: Tensor) -> Tensor:
    return value.flatten(1).norm(dim=1)


def double_twin(net: nn.Module) -> nn.Module:
    """A float64 copy in evaluation mode that computes the same function: held layers keep the weight that acts in the original."""
    twin = copy.deepcopy(net).double().eval()
    for original, layer in zip(net.modules(), twin.modules(), strict=True):
        if isinstance(original, (HeldLinear, HeldConv2d)):
            layer.weight.data = original.held_weight().detach().double()  # type: ignore[union-attr]
            layer.coefficient = math.inf  # type: ignore[assignment]
    return twin


def flatten(net: nn.Module) -> list[nn.Module]:
    """The layers of a net in order; nested `nn.Sequential` unrolled."""
    if _is_plain(net, nn.Sequential):
        return [layer for child in net.children() for layer in flatten(child)]
    return [net]


@dataclass(frozen=True)
class Affine:
    """A linear or convolution layer in float64, as it acts."""

    weight: Tensor
    bias: Tensor | None
    conv: nn.Module | None = None

    def log_norm(self, shape: Shape | None, outputs: slice | None, inputs: slice | None = None) -> float:
        """Log of its operator norm, for some of its outputs and inputs."""
        weight = self.weight
        conv = self.conv
        if conv is None:
            weight = weight[outputs] if outputs is not None else weight
            return log_of(matrix_norm(weight if inputs is None else weight[:, inputs]))
        groups = int(conv.groups)  # type: ignore[arg-type]
        if groups == 1:
            weight = weight[outputs] if outputs is not None else weight
            weight = weight[:, inputs] if inputs is not None else weight
        stride, dilation, mode = _conv_options(conv)
        if weight[0, 0].numel() == 1 and groups == 1 and mode == "zeros":
            return log_of(matrix_norm(weight.flatten(1)))
        taps, padding = weight.shape[2:], conv.padding
        if mode == "circular" and (
            isinstance(padding, str) or any(2 * p > d * (k - 1) for p, d, k in zip(padding, dilation, taps, strict=True))  # type: ignore[arg-type]
        ):
            raise UnknownLipschitz(
                f"{conv}: circular padding beyond what keeps the image size repeats pixels, and its norm is not bounded here. "
                "Use padding = dilation * (kernel_size - 1) // 2, or declare the constant: bilip.nets.Declared(net, lipschitz=...)."
            )
        size = None if shape is None or len(shape) != weight.ndim - 1 else shape[1:]
        return log_of(
            conv_norm(weight, size=size, padding_mode=mode, stride=stride, dilation=dilation, groups=groups)
        )

    def apply(self, box: Box) -> Box:
        """The interval image, in centre-radius form, widened by the rounding of both."""
        if not box.shape:
            return Box.everything()
        loose = torch.isinf(box.low) | torch.isinf(box.high)
        if loose.any():  # outputs that no unbounded input reaches keep a finite interval
            inner = self.apply(Box(box.low.masked_fill(loose, 0.0), box.high.masked_fill(loose, 0.0)))
            reached = self._act((self.weight != 0).double(), loose.double()) > 0
            return Box(inner.low.masked_fill(reached, -math.inf), inner.high.masked_fill(reached, math.inf))
        center, radius = box.center, box.radius
        magnitude = self.weight.abs()
        middle = self._act(self.weight, center)
        reach = self._act(magnitude, radius)
        rounding = (self.weight[0].numel() + 4) * EPS
        error = rounding * (self._act(magnitude, center.abs()) + reach)
        if self.bias is not None:
            bias = self.bias if self.conv is None else self.bias.view(-1, *[1] * (self.weight.ndim - 2))
            middle = middle + bias
            error = error + 2 * EPS * (bias.abs() + middle.abs())
        return Box.outward(middle - reach, middle + reach, error)

    def point(self, value: Tensor, error: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        """The image of a batch of values known up to an error in length, and its own error; `cap` bounds the norm if it is known."""
        total = self.weight.abs() if self.conv is None else self.weight.abs().flatten(2).sum(2)
        gross = float(torch.linalg.matrix_norm(total)) * (1 + 1e-12)
        image = self._act(self.weight, value)
        error = min(cap, gross) * error + (self.weight[0].numel() + 4) * EPS * gross * _sizes(value)
        if self.bias is not None:
            image = image + (self.bias if self.conv is None else self.bias.view(-1, *[1] * (self.weight.ndim - 2)))
            error = error + 2 * EPS * (_sizes(image) + float(self.bias.norm()) * math.sqrt(image[0].numel() / len(self.bias)))
        return image, error

    def _act(self, weight: Tensor, x: Tensor) -> Tensor:
        if self.conv is None:
            return F.linear(x, weight)
        if x.ndim < weight.ndim:
            return self._act(weight, x[None])[0]
        stride, dilation, mode = _conv_options(self.conv)
        call = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.ndim]
        padding, groups = self.conv.padding, int(self.conv.groups)  # type: ignore[arg-type]
        if mode == "circular":
            x = F.pad(x, self.conv._reversed_padding_repeated_twice, mode="circular")  # type: ignore[arg-type]
            padding = 0
        return call(x, weight, None, stride, padding, dilation, groups)  # type: ignore[arg-type]


def affine_layer(layer: nn.Module, *, move: bool = True) -> Affine | None:
    """Read a linear or convolution layer, on the CPU unless `move=False`; `None` for other modules."""
    linear = _is_plain(layer, nn.Linear)
    conv = any(_is_plain(layer, kind) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    held = getattr(layer, "held_weight", None)
    if not (linear or conv or held):
        return None
    if nn.utils.parametrize.is_parametrized(layer) and layer.training:
        raise UnknownLipschitz(
            f"{type(layer).__name__} is parametrized and in training mode, where reading its weight may change it. "
            "Call .eval() on the model before asking for bounds."
        )
    weight = (held() if held else layer.weight).detach().double()
    bias = None if layer.bias is None else _effective_bias(layer).detach().double()
    if move:
        weight, bias = weight.cpu(), None if bias is None else bias.cpu()
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and not torch.isfinite(value).all():
            raise NonFiniteParameters(
                f"the {name} of {layer} holds NaN or Inf, so nothing can be proved about the model. "
                "Load an earlier checkpoint, or find the step where training diverged."
            )
    return Affine(weight, bias, None if isinstance(layer, nn.Linear) else layer)


def _effective_bias(layer: nn.Module) -> Tensor:
    own = getattr(layer, "held_bias", None)
    return own() if own else layer.bias  # type: ignore[return-value]


def _conv_options(conv: nn.Module) -> tuple[Sequence[int], Sequence[int], str]:
    return conv.stride, conv.dilation, conv.padding_mode  # type: ignore[return-value]


def _layer_log(layer: nn.Module, shape: Shape | None, outputs: slice | None) -> float:
    own: Any = getattr(layer, "log_lipschitz", None)
    if own is not None:
        return own(shape, outputs)
    if isinstance(layer, nn.Flatten):
        return 0.0
    known = None if _hooked(layer) else activations.facts(layer)
    if known is not None:
        return log_of(known.lipschitz)
    affine = affine_layer(layer)
    if affine is not None:
        return affine.log_norm(shape, outputs)
    raise unknown(layer)


def _layer_box(layer: nn.Module, box: Box) -> Box:
    own: Any = getattr(layer, "enclose", None)
    if own is not None:
        return own(box)
    if isinstance(layer, nn.Flatten):
        return box.map(lambda end: end.flatten()) if box.shape else box
    known = None if _hooked(layer) else activations.facts(layer)
    if known is not None:
        return known.enclose(box)
    affine = affine_layer(layer)
    if affine is not None:
        return affine.apply(box)
    raise unknown(layer)


def out_shape(layer: nn.Module, shape: Shape | None) -> Shape | None:
    if shape is None or activations.facts(layer) is not None:
        return shape
    if isinstance(layer, nn.Flatten):
        return (math.prod(shape),)
    affine = affine_layer(layer)
    if affine is None or affine.conv is None or len(shape) != affine.weight.ndim - 1:
        return None
    channels = affine.weight.shape[1] * int(affine.conv.groups)  # type: ignore[arg-type]
    image = torch.zeros((channels, *shape[1:]), dtype=torch.float64, device="meta")
    return tuple(affine._act(affine.weight.to("meta"), image).shape)


def unknown(layer: nn.Module) -> UnknownLipschitz:
    """The error for a module that cannot be read."""
    why = "has hooks that may change what it computes" if _hooked(layer) else "is not a layer whose constant is known"
    return UnknownLipschitz(
        f"{type(layer).__name__} {why}, so its Lipschitz constant cannot be proved. If you know one, declare it: "
        f"bilip.nets.Declared(net, lipschitz=...). Known are Linear, Conv, Flatten, Sequential and the activations "
        "of bilip.nets.activations."
    )


def _hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(layer, kind) and type(layer).forward is kind.forward and not _hooked(layer)
