"""Diagonal maps: a scale for each feature, as it is given or started from data."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from bilip._torch import capturing, setting, version_of
from bilip.blocks.bijection import Bijection
from bilip.bounds import TINY, Box, as_float64, finite_size, log_of
from bilip.errors import InputError, NotInitialized

__all__ = ["ActNorm", "DiagonalScaling", "shared_statistics"]


class _Diagonal(Bijection):
    """A scale for each feature, `exp(log_scale)` up to its sign.

    Attributes:
        log_scale: One number for each feature, or for each entry of a sample.
        dim: The dimension of the batched input that holds the features; `None` where there is a number for each entry.
    """

    log_scale: nn.Parameter
    dim: Any  # an int, or None

    def _axis(self, ndim: int) -> list[int]:
        """The shape in which one number for each feature broadcasts over a batch."""
        shape = [1] * ndim
        shape[self.dim] = -1
        return shape

    def _along(self, box: Box, values: Tensor) -> Tensor:
        """One number for each feature, float64, in a shape that broadcasts over the box."""
        values = as_float64(values)
        if self.dim is None:
            return values
        axis = self.dim - 1 if self.dim > 0 else self.dim
        if box.shape[axis] != len(values):
            raise InputError(f"{self._who()}: a box of shape {box.shape} does not have {len(values)} features.")
        shape = [1] * len(box.shape)
        shape[axis] = -1
        return values.view(shape)

    def _who(self) -> str:
        return type(self).__name__

    def _log_det(self, x: Tensor) -> Tensor:
        return (self.log_scale.sum() * (math.prod(x.shape[1:]) // self.log_scale.numel())).expand(x.shape[0])

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self(x), self._log_det(x)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.inverse(z), -self._log_det(z)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return float(as_float64(self.log_scale).max()) + log_of(1.0)

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return -float(as_float64(self.log_scale).min()) + log_of(1.0)


class DiagonalScaling(_Diagonal):
    r"""$F(x) = D x$ with a diagonal $D$ whose entries stay non-zero.

    Its constants are $\mathrm{Lip}(F) = \max |D_{ii}|$ and $\mathrm{Lip}(F^{-1}) = 1/\min |D_{ii}|$. Of the buffer `sign` only the sign
    counts, whatever numbers are loaded into it.

    Args:
        scale: The starting diagonal: a tensor of non-zero numbers in the shape of one sample, or one entry for each
            feature.
        dim: With one entry for each feature: the dimension of the batched input that holds the features.

    Example:
        >>> block = DiagonalScaling(torch.tensor([2.0, -0.1]))
        >>> block.bounds()
        BiLipschitz(forward=2, inverse=10, domain=Box(-inf, inf))
    """

    sign: Tensor

    def __init__(self, scale: Tensor, dim: int | None = 1) -> None:
        super().__init__()
        scale = torch.as_tensor(scale)
        scale = scale if scale.is_floating_point() else scale.to(torch.get_default_dtype())
        if scale.ndim == 0 or not torch.isfinite(scale).all() or bool((scale == 0).any()):
            raise InputError("DiagonalScaling: expected a tensor of finite, non-zero numbers, one for each feature.")
        self.dim = dim if scale.ndim == 1 else None
        self.log_scale = nn.Parameter(scale.detach().abs().log())
        self.register_buffer("sign", scale.detach().sign())

    def diagonal(self, x: Tensor) -> Tensor:
        """The diagonal of D, in a shape that broadcasts over a batch."""
        self.check(x)
        self.check_like(x, self.log_scale)
        diagonal = torch.copysign(self.log_scale.exp(), self.sign)
        if self.dim is None:
            if x.shape[1:] != diagonal.shape:
                raise InputError(
                    f"DiagonalScaling: expected samples of shape {tuple(diagonal.shape)}, got an input of "
                    f"shape {tuple(x.shape)}."
                )
            return diagonal
        self.check(x, len(diagonal), self.dim)
        return diagonal.view(self._axis(x.ndim))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return x * self.diagonal(x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return z / self.diagonal(z)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return _scale_box(box, *(self._along(box, value) for value in (self.log_scale, self.sign)))

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return _scale_box(box, *(self._along(box, value) for value in (-self.log_scale, self.sign)))


_SUM: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("sum_over_processes", default=None)


def shared_statistics(sum_over_processes: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """While it is open, ActNorms start from the batches of all processes; every process has to run the same model.

    Args:
        sum_over_processes: The sum of a tensor over the processes.

    Example:
        >>> block = ActNorm(1)
        >>> with shared_statistics(lambda value: value):  # one process
        ...     _ = block(torch.randn(8, 1))
    """
    return setting(_SUM, sum_over_processes)


def _sum(value: Tensor) -> Tensor:
    """The sum over the processes whose statistics are shared."""
    over = _SUM.get()
    return value if over is None else over(value)


class ActNorm(_Diagonal):
    r"""$F(x) = (x + b) \odot e^{l}$ with one $b$ and one $l$ for each feature, started so that the first batch has mean 0 and deviation 1.

    The start happens in training mode, on the first forward pass, or with `initialize(x)`. That it happened is the buffer
    `initialized`, and nothing else: it follows `state_dict`, `torch.func.functional_call`, averaged copies and whoever writes to it.

    Reference: Kingma and Dhariwal, *Glow: Generative Flow with Invertible 1x1 Convolutions*, 2018.

    Args:
        features: Number of features or channels.
        dim: Dimension of the batched input that holds them.
        start: `"data"`, or `"identity"` for a block that is ready at once.

    Example:
        >>> block = ActNorm(3)
        >>> z = block(torch.randn(64, 3) * 5 + 2)
        >>> bool((z.mean(0).abs() < 1e-5).all())
        True
    """

    initialized: Tensor

    def __init__(self, features: int, *, dim: int = 1, start: str = "data") -> None:
        super().__init__()
        if features < 1 or start not in ("data", "identity"):
            raise InputError(
                f"ActNorm(features={features}, start={start!r}): expected features >= 1 and start 'data' or 'identity'."
            )
        self.features, self.dim = features, dim
        self.bias = nn.Parameter(torch.zeros(features))
        self.log_scale = nn.Parameter(torch.zeros(features))
        self.register_buffer("initialized", torch.tensor(start == "identity"))
        # The buffer, and its version, that was last seen to be true.
        self._read: tuple[Tensor, int] | None = (self.initialized, 0) if start == "identity" else None

    @torch.no_grad()
    def initialize(self, x: Tensor) -> None:
        """Set bias and scale from a batch."""
        self.check(x, self.features, self.dim)
        if x.numel() // self.features < 2:
            raise InputError(
                f"ActNorm: a batch of shape {tuple(x.shape)} has a single value for each feature, too few for a deviation. "
                "Start from a larger batch."
            )
        values = x.detach().movedim(self.dim, 0).flatten(1).double()
        if not torch.isfinite(values).all():
            raise InputError("ActNorm: the batch it should start from holds NaN or Inf.")
        count = _sum(values.new_tensor(float(values.shape[1])))
        mean = _sum(values.sum(1)) / count
        deviation = (_sum((values - mean[:, None]).square().sum(1)) / (count - 1)).sqrt()
        if not torch.isfinite(deviation).all():
            raise InputError(
                "ActNorm: the numbers of the batch it should start from are too large to square in float64."
            )
        self.bias.copy_(-mean)
        self.log_scale.copy_(-(deviation + 1e-6).log())
        self._mark(True)

    def _mark(self, ready: bool) -> None:
        self.initialized.fill_(ready)
        _ = self.ready

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        _ = self.ready  # so that it is known where it cannot be read

    @property
    def ready(self) -> bool:
        """What the buffer says. On a device it is waited for only until it was seen to be true, or when it may have changed."""
        flag = self.initialized
        seen = self._read
        if torch.compiler.is_compiling() or capturing(flag):  # a value cannot be read here: as it was before
            return seen is not None
        version = version_of(flag)
        if flag.device.type != "cpu" and seen is not None and seen[0] is flag and seen[1] == version:
            return True
        try:
            ready = bool(flag.all())
        except (
            RuntimeError
        ):  # on the meta device, or one for each model of an ensemble under vmap: whoever lends it knows
            return True
        self._read = (flag, version) if ready else None
        return ready

    def _view(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.check(x, self.features, self.dim)
        self.check_like(x, self.bias)
        shape = self._axis(x.ndim)
        return self.bias.view(shape), self.log_scale.view(shape)

    def _require_ready(self) -> None:
        if not self.ready:
            raise NotInitialized(
                "ActNorm starts from data and has seen none. Pass one batch through the model in training mode (model.train(); "
                "model(x)), or build it with start='identity'."
            )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if not self.ready and self.training:
            self.initialize(x)
        self._require_ready()
        bias, log_scale = self._view(x)
        return (x + bias) * log_scale.exp()

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        self._require_ready()
        bias, log_scale = self._view(z)
        return z / log_scale.exp() - bias

    def shift(self, x: Tensor, sign: int = 1) -> Tensor:
        """Add the bias, or take it away, and leave the scale to the 1x1 convolution that follows."""
        self._require_ready()
        return torch.add(x, self._view(x)[0], alpha=sign)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        self._require_ready()
        return super().log_lip(box, context, formula)

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        self._require_ready()
        return super().log_lip_inverse(box, context, formula)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        bias, log_scale = self._along(box, self.bias), self._along(box, self.log_scale)
        return _scale_box(Box.outward(box.low + bias, box.high + bias), log_scale, torch.ones((), device="cpu"))

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        bias, log_scale = self._along(box, self.bias), self._along(box, self.log_scale)
        unscaled = _scale_box(box, -log_scale, torch.ones((), device="cpu"))
        return Box.outward(unscaled.low - bias, unscaled.high - bias)

    def extra_repr(self) -> str:
        return f"{self.features}, dim={self.dim}" + ("" if self.ready else ", waiting for data")

    def _who(self) -> str:
        return str(self)


def _scale_box(box: Box, log_scale: Tensor, sign: Tensor) -> Box:
    """A box that holds every point of a box times exactly `exp(log_scale)`, with the sign of `sign`."""
    scale = torch.copysign(log_scale.exp(), sign)
    a, b = box.low * scale, box.high * scale
    # Two roundings of the exponential, one of the product; an exponential that underflows is known to TINY only.
    error = 1e-15 * finite_size(a, b) + TINY * finite_size(box.low, box.high)
    return Box.outward(torch.minimum(a, b), torch.maximum(a, b), error)
