"""The objective of normalizing flows as a penalty."""

from __future__ import annotations

import math

from torch import Tensor

from bilip.blocks import Bijection
from bilip.errors import InputError
from bilip.regularizers.penalty import Latent, Penalty

__all__ = ["FlowLikelihood"]


class FlowLikelihood(Penalty):
    r"""The negative log-likelihood under a standard normal base, in nats per sample.

    $$-\frac{1}{n} \sum_{i=1}^n \log N(F(x_i); 0, I) + \log |\det J_F(x_i)|$$

    The log-determinant $\sum_k \log \sigma_k$ holds up small singular values more than it favours large ones, and $|F(x)|^2 / 2$ holds down
    outputs: both ends of the spectrum, on the data. With `latent` from the task's own pass it costs nothing.

    The paper's code also adds the constant $d \log 256$, for 8-bit pixels scaled to [0, 1]. `bits=8` does too, for numbers to compare;
    gradients are the same.

    Samples for which the network gives NaN or Inf are left out and counted: `seen`, `skipped`.

    Args:
        weight: Factor; the paper's are 1e-5 to 1e-3 for CIFAR-10, 3072 dimensions.
        every: Steps from one penalty to the next; not made up for by a factor.
        bits: Bit depth of the data for the additive constant; `None` leaves it out.

    Example:
        >>> import torch
        >>> from bilip.models import real_nvp
        >>> model, x = real_nvp(4, blocks=6), torch.randn(32, 4)
        >>> z, log_det = model.forward_and_log_det(x)
        >>> loss = z.square().mean() + FlowLikelihood(weight=1e-3)(model, x, latent=(z, log_det), step=0)
        >>> loss.backward()
    """

    def __init__(self, weight: float, every: int = 1, *, bits: int | None = None) -> None:
        super().__init__(weight, every)
        if bits is not None and (not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 32):
            raise InputError(f"FlowLikelihood(bits={bits!r}): expected a whole number, 1 to 32, or None.")
        self.bits = bits

    def value(self, model: Bijection, x: Tensor, latent: Latent | None, step: int, context: Tensor | None) -> Tensor:
        z, log_det = (None, None) if latent is None else latent
        if z is not None and log_det is None:
            raise InputError(
                "FlowLikelihood(latent=(z, None)): pass the log-determinant of forward_and_log_det as well."
            )
        size = math.prod(x.shape[1:])
        constant = size * (0.5 * math.log(2 * math.pi) + (self.bits or 0) * math.log(2))

        def terms(points: Tensor, given: Tensor | None) -> Tensor:
            if z is None or log_det is None or points is not x:  # a row that is not finite stays in the task's graph
                return _negative(*model.forward_and_log_det(points, given)) + constant
            return _negative(z, log_det) + constant

        return self._finite_mean(terms, x, context)

    def __repr__(self) -> str:
        return f"FlowLikelihood(weight={self.weight:g}, every={self.every}, bits={self.bits})"


def _negative(z: Tensor, log_det: Tensor) -> Tensor:
    return 0.5 * z.flatten(1).square().sum(1) - log_det
