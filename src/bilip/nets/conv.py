"""The paper's convolutional nets: 3x3, 1x1, 3x3."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bilip.bounds import Box
from bilip.errors import InputError
from bilip.nets import activations, certify
from bilip.nets.cache import is_plain
from bilip.nets.mlp import certify_layers, certify_share, join_boxes, join_context
from bilip.nets.spectral import HeldConv2d

__all__ = ["ConvNet", "GainConv2d"]


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

    def held_weight(self) -> Tensor:
        """The kernel that acts, gain included."""
        return self.weight.double() * (3 * self.log_gain.double()).exp()[:, None, None, None]

    def held_bias(self) -> Tensor:
        """The bias that acts, gain included."""
        return self.bias.double() * (3 * self.log_gain.double()).exp()  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3 * self.log_gain).exp()[:, None, None]


class ConvNet(nn.Module):
    r"""Convolutions 3x3, 1x1, 3x3 with an activation in between, as in Glow and the paper's classifiers.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        hidden: Channels of both hidden layers.
        activation: Name of the activation.
        context: Channels of a context image that is concatenated to the input.
        gain: End in `GainConv2d`, zero at the start; without it the last layer starts as torch's default.
        lipschitz: Hold the net to this certified constant; its last layer then starts at torch's default and has no gain.

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
        super().__init__()
        if min(in_channels, out_channels, hidden) < 1 or context < 0:
            raise InputError(
                f"ConvNet({in_channels}, {out_channels}, hidden={hidden}, context={context}): every size must be at least 1."
            )
        self.in_channels, self.out_channels, self.context_channels = in_channels, out_channels, context
        share = certify_share(lipschitz, 3, activation)

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
            conv(in_channels + context, hidden, 3),
            activate(),
            conv(hidden, hidden, 1),
            activate(),
            last,
        )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = join_context(self, x, context, self.context_channels, dim=1)
        if not _faster_channels_last(x):
            return self.layers(x)
        return self.layers(x.contiguous(memory_format=torch.channels_last)).contiguous()

    def log_lipschitz(self, shape: tuple[int, ...] | None = None, outputs: slice | None = None) -> float:
        """Log of a certified constant with respect to the input."""
        return certify_layers(self.layers, slice(0, self.in_channels), shape, outputs)

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        """A box that holds the image of a box; nothing finite is known of a box without a shape."""
        if not box.shape:
            return Box.everything()
        return certify.enclose(self.layers, join_boxes(box, context, (self.context_channels, *box.shape[1:])))


def _faster_channels_last(x: Tensor) -> bool:
    """Whether to convolve with the channels innermost: faster on the CPU, but for small batches of small images."""
    if x.ndim != 4 or x.device.type != "cpu" or x.dtype != torch.float32 or not is_plain(x):
        return False
    return x.shape[0] * x.shape[2] * x.shape[3] >= 2048 and not x.is_contiguous(memory_format=torch.channels_last)
