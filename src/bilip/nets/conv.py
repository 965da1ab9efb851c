"""The paper's convolutional nets: 3x3, 1x1, 3x3."""

from __future__ import annotations

from torch import nn

from bilip.errors import InputError
from bilip.nets import activations
from bilip.nets.layers import GainConv2d, LayeredNet
from bilip.nets.mlp import certify_share
from bilip.nets.spectral import HeldConv2d

__all__ = ["ConvNet"]


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
        >>> import torch
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
        if min(in_channels, out_channels, hidden) < 1 or context < 0:
            raise InputError(
                f"ConvNet({in_channels}, {out_channels}, hidden={hidden}, context={context}): every size must "
                "be at least 1."
            )
        self.in_channels, self.out_channels = in_channels, out_channels
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
