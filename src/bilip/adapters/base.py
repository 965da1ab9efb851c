"""The distribution of the latents that comes with a model."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bilip.adapters.foreign import reference
from bilip.blocks import Bijection, Flow

__all__ = ["Base", "FlowBase", "drawing"]


class Base(ABC):
    """What a model's latents are drawn from.

    Example:
        >>> from bilip.adapters import adapt
        >>> from bilip.models import real_nvp
        >>> base = adapt(Flow(real_nvp(2))).base
        >>> base.sample(3).shape, base.log_prob(torch.zeros(3, 2)).shape
        (torch.Size([3, 2]), torch.Size([3]))
    """

    @abstractmethod
    def sample(self, count: int, context: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Draw `count` latents in the dtype and on the device of the model; with a context, one for each row of it."""

    @abstractmethod
    def log_prob(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Log p(z), of shape `(batch,)`."""


class FlowBase(Base):
    """The base of a `bilip.Flow`."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def sample(self, count: int, context: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        if not isinstance(self.flow.base, str):
            with drawing(generator):
                return self.flow.sample_base(count).to(reference(self.flow))
        return self.flow.sample_base(count, generator=generator)

    def log_prob(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return self.flow.base_log_prob(z)


class ForeignBase(Base):
    """A distribution module of another library, following the dtype and device of the bijection it belongs to."""

    def __init__(self, module: nn.Module, bijection: Bijection) -> None:
        self.module, self.bijection = module, bijection

    def sample(self, count: int, context: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        like = reference(self.bijection)
        with drawing(generator), torch.no_grad():
            return self.draw(self._fitting(like), count, context).to(like)

    def log_prob(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        value = self.density(self._fitting(z), z, context)
        return value.flatten(1).sum(1) if value.ndim > 1 else value

    @abstractmethod
    def draw(self, module: nn.Module, count: int, context: Tensor | None) -> Tensor:
        """Draw from a module in the right dtype."""

    @abstractmethod
    def density(self, module: nn.Module, z: Tensor, context: Tensor | None) -> Tensor:
        """Log-density under a module in the right dtype."""

    def _fitting(self, like: Tensor) -> nn.Module:
        """The module, or a converted copy: converting the bijection must not leave its base behind."""
        held = [t for t in (*self.module.parameters(), *self.module.buffers()) if t.is_floating_point() and t.ndim]
        if all(t.dtype == like.dtype and t.device == like.device for t in held):
            return self.module
        return copy.deepcopy(self.module).to(like)


@contextlib.contextmanager
def drawing(generator: torch.Generator | None) -> Iterator[None]:
    """Within this context torch's global randomness follows from a generator; libraries draw from nothing else."""
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
