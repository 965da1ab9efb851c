"""The layers and nets of bilip: fully connected and convolutional nets, and any module with a constant that its author vouches for."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bilip.bounds import Box
from bilip.errors import InputError
from bilip.nets import activations
from bilip.nets.spectral import HeldConv2d, HeldLinear

__all__ = ["ConvNet", "Declared", "GainConv2d", "LayeredNet", "MLP", "takes_context", "vouched"]


class Declared(nn.Module):
    r"""Any module, with a Lipschitz constant that its author vouches for.

    Args:
        net: The module, called as `net(x)` or `net(x, context)`.
        lipschitz: An upper bound on $|net(x) - net(x')| / |x - x'|$ for every context.
        error: An upper bound on how far a computed `net(x)` lies from the exact value, in length: a number, or a function of the
            batch `x` that gives one for each sample. By default the net is charged for rounding in the dtype of the block it is in,
            or in the coarsest one in which any of its operations computes:
            $(16 + n)\,\epsilon\,(1 + |net(x)| + \mathrm{Lip}\,|x|)$ with $n$ the longest row of a weight. What a net computes in threads
            of its own is not seen: state its error.

    Example:
        >>> from bilip.nets import log_lipschitz
        >>> class Sine(nn.Module):
        ...     def forward(self, x):
        ...         return torch.sin(x)
        >>> round(math.exp(log_lipschitz(Declared(Sine(), lipschitz=1.0))), 6)
        1.0
    """

    def __init__(
        self, net: nn.Module, *, lipschitz: float, error: float | Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.net = net
        self.lipschitz = vouched("lipschitz", lipschitz)
        self.error = error if error is None or callable(error) else vouched("error", error)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.net(x) if context is None else self.net(x, context)

    def extra_repr(self) -> str:
        stated = "" if self.error is None else f", error={self.error if callable(self.error) else f'{self.error:g}'}"
        return f"lipschitz={self.lipschitz:g}{stated}"


def vouched(name: str, value: float) -> float:
    """The number, or an `InputError` unless it can be an upper bound."""
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise InputError(f"{name}={value!r}: expected a finite number >= 0, an upper bound that you vouch for.")
    return float(value)


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


def takes_context(net: nn.Module) -> bool:
    """Whether `net.forward` has room for a second argument; of a net in a wrapper that the wrapped net does."""
    if isinstance(net, Declared):
        return takes_context(net.net)
    if isinstance(net, LayeredNet):
        return bool(net.context)
    try:
        parameters = list(inspect.signature(net.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters) >= 2


class MLP(LayeredNet):
    r"""Linear layers with an activation in between.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        hidden: Sizes of the hidden layers.
        activation: Name of the activation (`bilip.nets.activations.make`).
        context: Size of a context vector that is concatenated to the input; its constant is with respect to the
            input alone.
        zero_init: Start the last layer at zero, so that a coupling block starts as the identity.
        lipschitz: Hold the net to this certified constant, shared equally among its layers.

    Example:
        >>> net = MLP(2, 4, hidden=(16, 16), activation="elu", lipschitz=0.5)
        >>> from bilip.nets import log_lipschitz
        >>> math.exp(log_lipschitz(net)) <= 0.5
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        context: int = 0,
        zero_init: bool = False,
        lipschitz: float | None = None,
    ) -> None:
        super().__init__(in_features, context, dim=-1)
        if not isinstance(hidden, Sequence):
            raise InputError(
                f"MLP(hidden={hidden!r}): expected the sizes of the hidden layers, for example hidden=(64, 64)."
            )
        _require_whole("MLP", in_features, out_features, *hidden, context)
        if min(in_features, out_features, *hidden, 1) < 1 or context < 0:
            raise InputError(
                f"MLP({in_features}, {out_features}, hidden={tuple(hidden)}, context={context}): every size "
                "must be at least 1."
            )
        self.in_features, self.out_features = in_features, out_features
        sizes = [in_features + context, *hidden, out_features]
        share = _share_of(lipschitz, len(sizes) - 1, activation)
        layers: list[nn.Module] = []
        for k, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            layers.append(nn.Linear(a, b) if share is None else HeldLinear(a, b, coefficient=share))
            if k < len(sizes) - 2:
                layers.append(activations.make(activation))
        if zero_init:
            nn.init.zeros_(layers[-1].weight)  # type: ignore[arg-type]
            nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]
        self.layers = nn.Sequential(*layers)


class ConvNet(LayeredNet):
    r"""Convolutions 3x3, 1x1, 3x3 with an activation in between, as in Glow and the paper's classifiers.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        hidden: Channels of both hidden layers.
        activation: Name of the activation.
        context: Channels of a context image that is concatenated to the input.
        gain: End in `GainConv2d`, zero at the start; without it the last layer starts as torch's default.
        lipschitz: Hold the net to this certified constant; its last layer then starts at torch's default and has no
            gain.

    Example:
        >>> net = ConvNet(6, 12, hidden=32)
        >>> net(torch.randn(2, 6, 16, 16)).shape
        torch.Size([2, 12, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int = 128,
        activation: str = "relu",
        context: int = 0,
        gain: bool = True,
        lipschitz: float | None = None,
    ) -> None:
        super().__init__(in_channels, context, dim=1)
        if isinstance(hidden, Sequence):
            raise InputError(
                f"ConvNet(hidden={hidden!r}): expected one number, the channels inside, for example hidden=128."
            )
        _require_whole("ConvNet", in_channels, out_channels, hidden, context)
        if min(in_channels, out_channels, hidden) < 1 or context < 0:
            raise InputError(
                f"ConvNet({in_channels}, {out_channels}, hidden={hidden}, context={context}): every size must "
                "be at least 1."
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        share = _share_of(lipschitz, 3, activation)

        def conv(a: int, b: int, side: int) -> nn.Module:
            if share is not None:
                return HeldConv2d(a, b, side, coefficient=share)
            return nn.Conv2d(a, b, side, padding=side // 2)

        def activate() -> nn.Module:
            module = activations.make(activation)
            if isinstance(module, nn.ReLU):
                module.inplace = True  # a convolution does not need its output again
            return module

        last = GainConv2d(hidden, out_channels) if gain and share is None else conv(hidden, out_channels, 3)
        self.layers = nn.Sequential(
            conv(in_channels + context, hidden, 3), activate(), conv(hidden, hidden, 1), activate(), last
        )


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


def _require_whole(kind: str, *sizes: object) -> None:
    for size in sizes:
        try:
            operator.index(size)  # type: ignore[arg-type]
        except TypeError:
            raise InputError(f"{kind}: a size is {size!r}; expected whole numbers.") from None


def _share_of(lipschitz: float | None, layers: int, activation: str) -> float | None:
    """The coefficient of one of several layers, so that the net with its activations stays below `lipschitz`."""
    if lipschitz is None:
        return None
    if not 0 < lipschitz < float("inf"):
        raise InputError(f"lipschitz={lipschitz!r}: the constant to hold must be a positive number.")
    facts = activations.facts(activations.make(activation))
    gain = facts.lipschitz if facts else 1.0
    return float((lipschitz / gain ** (layers - 1)) ** (1 / layers)) * (1 - 1e-12)
