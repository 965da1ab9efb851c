"""Activation normalisation, started from data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bilip._torch import capturing
from bilip.blocks.bijection import Bijection
from bilip.blocks.diagonal_scaling import scale_box
from bilip.bounds import Box, as_float64, log_of
from bilip.errors import InputError, NotInitialized

__all__ = ["ActNorm", "shared_statistics"]

_sum: Callable[[Tensor], Tensor] = lambda value: value  # noqa: E731 - replaced while statistics are shared


@contextlib.contextmanager
def shared_statistics(sum_over_processes: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While it is open, ActNorms start from the batches of all processes; every process has to run the same model.

    Args:
        sum_over_processes: The sum of a tensor over the processes.

    Example:
        >>> block = ActNorm(1)
        >>> with shared_statistics(lambda value: value):  # one process
        ...     _ = block(torch.randn(8, 1))
    """
    global _sum
    before, _sum = _sum, sum_over_processes
    try:
        yield
    finally:
        _sum = before


class ActNorm(Bijection):
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
                f"ActNorm: a batch of shape {tuple(x.shape)} has a single value for each feature, too few for "
                "a deviation. "
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
        _ = self._ready

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        _ = self._ready  # so that it is known where it cannot be read

    @property
    def _ready(self) -> bool:
        """What the buffer says. On a device it is waited for only until it was seen to be true, or when it may have changed."""
        flag = self.initialized
        seen = self._read
        if torch.compiler.is_compiling() or capturing(flag):  # a value cannot be read here: as it was before
            return seen is not None
        version = -1 if flag.is_inference() else flag._version
        if flag.device.type != "cpu" and seen is not None and seen[0] is flag and seen[1] == version:
            return True
        try:
            ready = bool(flag.all())
        except (
            RuntimeError
        ):  # on the meta device, or one for each model of an ensemble under vmap: whoever lends them knows
            return True
        self._read = (flag, version) if ready else None
        return ready

    def _view(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.check(x, self.features, self.dim)
        self.check_like(x, self.bias)
        shape = [1] * x.ndim
        shape[self.dim] = self.features
        return self.bias.view(shape), self.log_scale.view(shape)

    def _require_ready(self) -> None:
        if not self._ready:
            raise NotInitialized(
                "ActNorm starts from data and has seen none. Pass one batch through the model in training "
                "mode (model.train(); "
                "model(x)), or build it with start='identity'."
            )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if not self._ready and self.training:
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

    def _log_det(self, x: Tensor) -> Tensor:
        return (self.log_scale.sum() * (math.prod(x.shape[1:]) // self.features)).expand(x.shape[0])

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self(x), self._log_det(x)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.inverse(z), -self._log_det(z)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        self._require_ready()
        return float(as_float64(self.log_scale).max()) + log_of(1.0)

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        self._require_ready()
        return -float(as_float64(self.log_scale).min()) + log_of(1.0)

    def _exact(self, box: Box) -> tuple[Tensor, Tensor]:
        shape = [1] * len(box.shape)
        axis = self.dim - 1 if self.dim > 0 else self.dim
        if box.shape[axis] != self.features:
            raise InputError(f"{self}: a box of shape {box.shape} does not have {self.features} features.")
        shape[axis] = -1
        return as_float64(self.bias).view(shape), as_float64(self.log_scale).view(shape)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        bias, log_scale = self._exact(box)
        return scale_box(Box.outward(box.low + bias, box.high + bias), log_scale, torch.ones(()))

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        bias, log_scale = self._exact(box)
        unscaled = scale_box(box, -log_scale, torch.ones(()))
        return Box.outward(unscaled.low - bias, unscaled.high - bias)

    def extra_repr(self) -> str:
        return f"{self.features}, dim={self.dim}" + ("" if self._ready else ", waiting for data")
