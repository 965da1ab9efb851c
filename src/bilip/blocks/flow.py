"""A bijection with a base distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from bilip.blocks.bijection import Bijection
from bilip.errors import InputError, UnknownLipschitz
from bilip.nets.readable import as_born, tampered

__all__ = ["Flow"]

_MAPS = ("__call__", "forward", "inverse", "forward_and_log_det", "inverse_and_log_det", "__getattr__")
_PROOFS = ("bounds", "enclose", "enclose_inverse")


class Flow(nn.Module):
    r"""A normalizing flow: $\log p(x) = \log p_Z(F(x)) + \log |\det J_F(x)|$.

    It has all that its bijection has, `forward`, `inverse`, `bounds` and whatever else `Bijection` defines.

    Args:
        bijection: The map F from data to latents.
        base: `"normal"`, a standard normal, or a `torch.distributions.Distribution` over latents.
        shape: Shape of one latent, for sampling; a chain that knows its shape provides it.

    Example:
        >>> import bilip
        >>> from bilip import models
        >>> flow = Flow(models.real_nvp(2, blocks=4))
        >>> flow.log_prob(torch.zeros(5, 2)).shape, flow.sample(3).shape
        (torch.Size([5]), torch.Size([3, 2]))
        >>> z = flow(torch.zeros(5, 2))
        >>> flow.inverse(z).shape, flow.bounds(bilip.Box(-4, 4)).inverse >= 1
        (torch.Size([5, 2]), True)
    """

    def __init__(
        self, bijection: Bijection, base: str | Distribution = "normal", *, shape: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        if not isinstance(bijection, Bijection):
            raise InputError(
                f"Flow: expected a Bijection, got {type(bijection).__name__}. Wrap a foreign model with bilip.as_bijection."
            )
        if not (base == "normal" or isinstance(base, Distribution)):
            raise InputError(
                f"Flow(base={base!r}): expected 'normal' or a torch.distributions.Distribution over latents."
            )
        self.bijection, self.base = bijection, base
        if shape is None and bijection.shape is not None:
            shape = bijection.out_shape(bijection.shape)
        self.latent_shape = None if shape is None else tuple(shape)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The latents F(x)."""
        return self.bijection(x, context)

    def __getattr__(self, name: str) -> Any:
        if name != "bijection" and hasattr(Bijection, name):
            if name in _PROOFS:
                self._require_itself()
            return getattr(self.bijection, name)
        return super().__getattr__(name)

    def _require_itself(self) -> None:
        """Raise unless the maps of the flow are those of its bijection, about which there are proofs."""
        kinds = type(self).__mro__[: type(self).__mro__.index(Flow)]
        own = next((name for part in (self, *kinds) for name in _MAPS if name in vars(part)), None)
        why = tampered(self) if own is None else f"has a map {own} of its own"
        if why is not None:
            raise UnknownLipschitz(
                f"{type(self).__name__} {why}, so no bound can be proved for it. Remove what changes it, or ask its bijection: "
                "flow.bijection.bounds(...)."
            )

    def base_log_prob(self, z: Tensor) -> Tensor:
        """log p_Z(z), of shape `(batch,)`."""
        if isinstance(self.base, Distribution):
            log = self.base.log_prob(z)
            return log.flatten(1).sum(1) if log.ndim > 1 else log
        size = math.prod(z.shape[1:])
        return -0.5 * (z.square().flatten(1).sum(1) + size * math.log(2 * math.pi))

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """log p(x), of shape `(batch,)`."""
        z, log_det = self.bijection.forward_and_log_det(x, context)
        return self.base_log_prob(z) + log_det

    def sample(
        self,
        count: int,
        context: Tensor | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw `count` samples; with a context, one for each row of it."""
        return self.bijection.inverse(self.sample_base(count, temperature=temperature, generator=generator), context)

    def sample_base(self, count: int, *, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Draw `count` latents from the base."""
        if count < 1:
            raise InputError(f"sample(count={count}): expected 1 or more.")
        if isinstance(self.base, Distribution):
            if temperature != 1.0 or generator is not None:
                raise InputError(
                    "sample: temperature and generator are for base='normal'; a Distribution draws from "
                    "torch's global seed."
                )
            return self.base.sample((count,))
        if self.latent_shape is None:
            raise InputError(
                "sample: the shape of a latent is not known. Build the flow with Flow(bijection, shape=(2,))."
            )
        like = next((p for p in self.bijection.parameters()), torch.empty(()))
        z = torch.randn(count, *self.latent_shape, generator=generator, dtype=like.dtype, device=like.device)
        return z * temperature

    def bits_per_dim(self, x: Tensor, context: Tensor | None = None, *, bits: int = 8) -> Tensor:
        """Bits per dimension of dequantized data scaled to unit width, `(level + noise) / 2**bits`, shape `(batch,)`."""
        size = math.prod(x.shape[1:])
        return bits - self.log_prob(x, context) / (size * math.log(2))


as_born(Flow)
