"""Reading a net: which layers it is made of, and what each of them does.

A module is read only if it computes what its class says: no forward hooks, and no subclass that replaces `forward`.
Everything else raises `UnknownLipschitz` and can be declared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.bounds import EPS, Box, exp_up, log_norm, log_of, norms
from bilip.errors import InputError, NonFiniteParameters, UnknownLipschitz
from bilip.nets import activations
from bilip.nets.norms import conv_norm, matrix_norm
from bilip.nets.spectral import HeldConv2d, HeldLinear

__all__ = ["Affine", "Declared", "GainConv2d", "LayeredNet", "affine_layer", "flatten", "is_plain_flatten", "unknown"]

Shape = tuple[int, ...]


class Declared(nn.Module):
    r"""Any module, with a Lipschitz constant that its author vouches for.

    Args:
        net: The module, called as `net(x)` or `net(x, context)`.
        lipschitz: An upper bound on $|net(x) - net(x')| / |x - x'|$ for every context.

    Example:
        >>> from bilip.nets import log_lipschitz
        >>> class Sine(nn.Module):
        ...     def forward(self, x):
        ...         return torch.sin(x)
        >>> round(math.exp(log_lipschitz(Declared(Sine(), lipschitz=1.0))), 6)
        1.0
    """

    def __init__(self, net: nn.Module, *, lipschitz: float) -> None:
        super().__init__()
        if not (isinstance(lipschitz, (int, float)) and 0 <= lipschitz < math.inf):
            raise InputError(
                f"lipschitz={lipschitz!r}: expected a finite number >= 0, an upper bound that you vouch for."
            )
        self.net = net
        self.lipschitz = float(lipschitz)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.net(x) if context is None else self.net(x, context)

    def extra_repr(self) -> str:
        return f"lipschitz={self.lipschitz:g}"


class LayeredNet(nn.Module):
    """A stack of layers whose first may also see a context, concatenated to the input.

    Attributes:
        layers: The stack.
        inputs: Features or channels of the input, without the context.
        context: Features or channels of the context; 0 for none.
        dim: Dimension of the batched input that holds them.
    """

    layers: nn.Sequential

    def __init__(self, inputs: int, context: int, dim: int) -> None:
        super().__init__()
        self.inputs, self.context, self.dim = inputs, context, dim

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if not self.context:
            return self.layers(x)
        who = type(self).__name__
        if context is None:
            raise InputError(
                f"{who} was built with context={self.context}: pass context=, a tensor with {self.context} features."
            )
        if context.ndim != x.ndim or context.shape[self.dim] != self.context:
            raise InputError(
                f"{who} was built with context={self.context}, but the context has shape {tuple(context.shape)}."
            )
        return self.layers(torch.cat((x, context), self.dim))

    def join(self, box: Box, context: Box | None) -> Box:
        """The box of input and context together; a context that is not given may be anything."""
        if not box.shape and self.dim == -1:
            box = box.expand((self.inputs,))
        if not self.context or not box.shape:
            return box
        axis = self.dim if self.dim < 0 else self.dim - 1
        shape = list(box.shape)
        shape[axis] = self.context
        context = Box.everything(shape) if context is None else context.expand(shape)
        return Box(torch.cat((box.low, context.low), axis), torch.cat((box.high, context.high), axis))


class GainConv2d(nn.Conv2d):
    r"""Glow's last layer: a 3x3 convolution that starts at zero, times $e^{3 l}$ with a learned $l$ for each output channel.

    Reference: Kingma and Dhariwal, *Glow: Generative Flow with Invertible 1x1 Convolutions*, 2018.

    Example:
        >>> GainConv2d(4, 2)(torch.ones(1, 4, 8, 8)).abs().max().item()
        0.0
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)  # type: ignore[arg-type]
        self.log_gain = nn.Parameter(torch.zeros(out_channels))

    def forward(self, input: Tensor) -> Tensor:
        # On the output, not in the kernel: fewer operators for the backward pass.
        return self._conv_forward(input, self.weight, self.bias) * (3 * self.log_gain).exp()[:, None, None]


@dataclass(frozen=True)
class Affine:
    """A linear or convolution layer in float64, as it acts; `cap` bounds its norm if it is held."""

    weight: Tensor
    bias: Tensor | None
    conv: nn.Module | None = None
    cap: float = math.inf

    def log_norm(self, shape: Shape | None, outputs: slice | None, inputs: slice | None = None) -> float:
        """Log of its operator norm, for some of its outputs and inputs."""
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
        if mode not in ("zeros", "circular"):
            raise UnknownLipschitz(f"{conv}: padding_mode={mode!r} has no certified norm here. {_DECLARE}")
        if mode == "circular" and (
            isinstance(padding, str)
            or any(2 * p > d * (k - 1) for p, d, k in zip(padding, dilation, taps, strict=True))  # type: ignore[arg-type]
        ):
            raise UnknownLipschitz(
                f"{conv}: circular padding beyond what keeps the image size repeats pixels, and its norm is "
                "not bounded here. "
                f"Use padding = dilation * (kernel_size - 1) // 2. {_DECLARE}"
            )
        if weight[0, 0].numel() == 1 and groups == 1:
            return log_of(matrix_norm(weight.flatten(1)))
        size = None if shape is None or len(shape) != weight.ndim - 1 else shape[1:]
        return log_of(conv_norm(weight, size=size, padding_mode=mode, stride=stride, dilation=dilation, groups=groups))

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
        rounding = (self.weight[0].numel() + 4) * EPS
        error = rounding * (self.act(magnitude, center.abs()) + reach)
        if self.bias is not None:
            bias = self._spread(self.bias)
            middle = middle + bias
            error = error + 2 * EPS * (bias.abs() + middle.abs())
        return Box.outward(middle - reach, middle + reach, error)

    def point(self, value: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """The image of a batch of values known up to an error in length, and its own error."""
        total = self.weight.abs() if self.conv is None else self.weight.abs().flatten(2).sum(2)
        gross = exp_up(log_norm(total)) * (1 + 1e-12)
        image = self.act(self.weight, value)
        # The small factors go inside: a norm may be beyond float64 where what rounding makes of it is not.
        rounding = norms(value * ((self.weight[0].numel() + 4) * EPS)) * gross
        error = min(self.cap, gross) * error + rounding + 1e-300
        if self.bias is not None:
            image = image + self._spread(self.bias)
            spread = exp_up(log_norm(2 * EPS * self.bias)) * math.sqrt(math.prod(image.shape[1:]) / len(self.bias))
            error = error + norms(2 * EPS * image) + spread
        return image, error

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
            padding = 0
        return call(x, weight, None, stride, padding, dilation, groups)  # type: ignore[arg-type]

    def _spread(self, bias: Tensor) -> Tensor:
        return bias if self.conv is None else bias.view(-1, *[1] * (self.weight.ndim - 2))


def affine_layer(layer: nn.Module, *, move: bool = True) -> Affine | None:
    """Read a linear or convolution layer, on the CPU unless `move=False`; `None` for other modules."""
    cap, weight, bias = math.inf, None, getattr(layer, "bias", None)
    if is_plain(layer, HeldLinear) or is_plain(layer, HeldConv2d):
        weight, cap = layer.held_weight(), layer.coefficient  # type: ignore[operator, assignment]
    elif is_plain(layer, GainConv2d):
        gain = (3 * layer.log_gain.double()).exp()  # type: ignore[operator, union-attr]
        weight, bias = layer.weight.double() * gain[:, None, None, None], bias.double() * gain  # type: ignore[operator, union-attr]
    elif any(is_plain(layer, kind) for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if nn.utils.parametrize.is_parametrized(layer) and layer.training:
            raise UnknownLipschitz(
                f"{type(layer).__name__} is parametrized and in training mode, where reading its weight may change it. "
                "Call .eval() on the model before asking for bounds."
            )
        weight = layer.weight
    if weight is None:
        return None
    weight = weight.detach().double()  # type: ignore[union-attr]
    bias = None if bias is None else bias.detach().double()
    if move:
        weight, bias = weight.cpu(), None if bias is None else bias.cpu()
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and not torch.isfinite(value).all():
            raise NonFiniteParameters(
                f"the {name} of {layer} holds NaN or Inf, so nothing can be proved about the model. "
                "Load an earlier checkpoint, or find the step where training diverged."
            )
    return Affine(weight, bias, None if isinstance(layer, nn.Linear) else layer, float(cap))  # type: ignore[arg-type]


def flatten(net: nn.Module) -> list[nn.Module]:
    """The layers of a net in order: `nn.Sequential` and nets without context unrolled."""
    if is_plain(net, nn.Sequential):
        return [layer for child in net._modules.values() for layer in flatten(child)]  # type: ignore[arg-type]  # repeats count
    if is_plain(net, LayeredNet) and not net.context:
        return flatten(net.layers)  # type: ignore[arg-type]
    return [net]


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what the class `kind` computes: its own `forward`, and no hooks."""
    if not isinstance(layer, kind) or hooked(layer) or "forward" in layer.__dict__:
        return False
    parts = ("forward", "_conv_forward", "__iter__")  # what torch's forward methods call in turn
    return all(getattr(type(layer), part, None) is getattr(kind, part, None) for part in parts)


def is_plain_flatten(layer: nn.Module) -> bool:
    """Whether a module flattens whole samples."""
    return is_plain(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)


def hooked(layer: nn.Module) -> bool:
    """Whether hooks may change what a module computes."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def facts(layer: nn.Module) -> activations.Facts | None:
    """What is proved about an activation; `None` if it is none, or hooks may change it."""
    return None if hooked(layer) else activations.facts(layer)


_DECLARE = "If you know its constant, declare it: bilip.nets.Declared(net, lipschitz=...)."


def unknown(layer: nn.Module) -> UnknownLipschitz:
    """The error for a module that cannot be read."""
    why = "has hooks that may change what it computes" if hooked(layer) else "is not a layer whose constant is known"
    return UnknownLipschitz(
        f"{type(layer).__name__} {why}, so its Lipschitz constant cannot be proved. {_DECLARE} "
        "Known are Linear, Conv, Flatten, Sequential, the nets of bilip.nets and the activations of "
        "bilip.nets.activations."
    )


def _conv_options(conv: nn.Module) -> tuple[Sequence[int], Sequence[int], str]:
    return conv.stride, conv.dilation, conv.padding_mode  # type: ignore[return-value]
