"""A block of another library as a bijection, and the distribution that its latents are drawn from."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bilip._torch import deepcopy_memo
from bilip.adapters._inspect import patched_class
from bilip.blocks import Bijection, Chain, Flow
from bilip.blocks.bijection import Reach, Step
from bilip.bounds import BlockBound, Box
from bilip.errors import BilipError, InputError, NonFiniteParameters, NotInitialized, UnknownLipschitz, said_by
from bilip.nets.readable import tampered

__all__ = [
    "Base",
    "FlowBase",
    "Foreign",
    "ForeignBase",
    "compose",
    "drawing",
    "embedded",
    "has_log_det",
    "per_sample",
    "reference",
]

# Libraries some of whose blocks have a native block.
_LIBRARIES = ("FrEIA", "nflows", "glasflow", "enflows", "flowcon", "normflows", "zuko", "pyro", "memcnn")
_RENAMED = {"push": "encode", "pull": "decode", "twin": "native"}


class Foreign(Bijection):
    r"""A module of another library, seen as $z = F(x)$ from data to latents.

    It holds the module itself, so parameters, `state_dict`, `.double()`, `.eval()` and `copy.deepcopy` reach it. What the
    library raises passes through unchanged. Bounds come from a *native block*: one of `bilip.blocks` with the same nets
    that computes the same function and is used for proofs alone; a module without one raises `UnknownLipschitz`.

    A new library is one subclass with `encode` and `decode`.

    Args:
        module: The foreign module.
        kind: Its name in reports; the name of its class by default.

    Attributes:
        library: The library it comes from.
        kind: The foreign class.
        has_log_det: Whether there is a log-determinant; without one `forward_and_log_det` raises a `BilipError`.
        stochastic_log_det: Whether the log-determinant is an estimate that differs from call to call.

    Example:
        >>> class Shift(nn.Module):
        ...     def forward(self, x):
        ...         return x + 1
        ...     def inverse(self, z):
        ...         return z - 1
        >>> from bilip.adapters import as_bijection
        >>> block = as_bijection(Shift())
        >>> isinstance(block, Foreign), block.kind, block.inverse(torch.ones(1, 2))
        (True, 'Shift', tensor([[0., 0.]]))
    """

    library: str = "generic"
    proof_methods: ClassVar[tuple[str, ...]] = ("native",)
    has_log_det: bool = True
    stochastic_log_det: bool = False

    def __init__(self, module: nn.Module, *, kind: str | None = None) -> None:
        super().__init__()
        self.module = module
        self.kind = type(module).__name__ if kind is None else kind

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in _RENAMED.items():
            if old in vars(cls) and new not in vars(cls):
                warnings.warn(f"{cls.__name__}.{old} is now called {new}.", DeprecationWarning, stacklevel=2)
                setattr(cls, new, vars(cls)[old])

    # ---- what a library defines

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        """Data to latent; the second entry is the log-determinant as the library gives it, or `None`."""
        raise BilipError(f"{type(self).__name__} defines no encode.")

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        """Latent to data, with the log-determinant of that direction, or `None`."""
        raise BilipError(f"{type(self).__name__} defines no decode.")

    def native(self) -> Bijection:
        """A bilip block that computes the same function, for proofs."""
        raise self.unproved()

    def context_shape(self) -> tuple[int, ...] | None:
        """Shape of one context, for a native block that needs one."""
        return None

    def helpers(self) -> tuple[object, ...]:
        """Classes and objects that the module computes with, beside the modules in it."""
        return ()

    def unproved(self, why: str = "its scale and its nets are not known to bilip") -> UnknownLipschitz:
        """The error for a block about which nothing can be proved."""
        return UnknownLipschitz(
            f"no bound can be proved for {self.kind} of {self.library}: {why}. Measure it instead with the probes, or "
            "rebuild it from bilip.blocks."
        )

    # ---- the maps

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        self.check(x)
        return self._whole(x, self.encode(x, context, log_det=False)[0])

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        self.check(z)
        return self._whole(z, self.decode(z, context, log_det=False)[0])

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.check(x)
        self._require_log_det()
        z, log_det = self.encode(x, context, log_det=True)
        if log_det is None:
            raise self._no_log_det()
        return self._whole(x, z), per_sample(log_det, x)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.check(z)
        self._require_log_det()
        x, log_det = self.decode(z, context, log_det=True)
        if log_det is None:
            return x, -self.forward_and_log_det(x, context)[1]
        return self._whole(z, x), per_sample(log_det, z)

    def _require_log_det(self) -> None:
        if not self.has_log_det:
            raise self._no_log_det()

    def _no_log_det(self) -> BilipError:
        return BilipError(
            f"{self.kind} of {self.library} gives no log-determinant. Pass one with "
            "as_bijection(model, log_det=lambda x: ...); its inverse can be measured without."
        )

    def _whole(self, before: Tensor, after: Tensor) -> Tensor:
        """A bijection keeps the number of entries; a tensor with fewer has dropped latents."""
        if not isinstance(after, Tensor) or len(after) != len(before) or after.numel() != before.numel():
            got = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
            raise InputError(
                f"{self.kind} maps a batch of shape {tuple(before.shape)} to {got}: a bijection keeps every entry. "
                "Return all latents (a tuple of them is joined), none dropped."
            )
        return after

    # ---- shapes

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.trace_shape(shape, inverse=False) if self.reshapes() else tuple(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.trace_shape(shape, inverse=True) if self.reshapes() else tuple(shape)

    def reshapes(self) -> bool:
        """Whether latents may have another shape than inputs."""
        return False

    @torch.no_grad()
    def trace_shape(self, shape: Sequence[int], *, inverse: bool) -> tuple[int, ...]:
        """The shape that comes out, found by a run of an evaluation copy on constant numbers."""
        copied = copy.deepcopy(self, deepcopy_memo(self)).eval()
        like = reference(self)
        x = torch.full((2, *shape), 0.5, dtype=like.dtype, device=like.device)
        try:
            return tuple((copied.inverse if inverse else copied.forward)(x).shape[1:])
        except BilipError:
            raise
        except Exception as error:  # a model may raise anything
            raise InputError(
                f"{self.kind}: what shape comes out is found by a run without a context, which raised {said_by(error):.300}. For a "
                "conditional model pass the shape of its latents: bilip.Flow(model, shape=...)."
            ) from error

    # ---- proofs, by the native block

    def advance(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        native = self._checked_native(reach.box.shape, context)
        return self._one_row(native.advance(reach, context, formula, name), name)

    def retreat(self, reach: Reach, context: Box | None, formula: str, name: str = "") -> Step:
        native = self._latent_native(reach.box, context)
        return self._one_row(native.retreat(reach, context, formula, name), name)

    def _latent_native(self, box: Box, context: Box | None) -> Bijection:
        return self._checked_native(self.in_shape(box.shape) if box.shape else (), context)

    def _one_row(self, step: Step, name: str) -> Step:
        magnitude = max((row.magnitude for row in step.blocks), default=math.inf)
        row = BlockBound(name or "0", self.kind, step.log_forward, step.log_inverse, magnitude)
        return Step(step.log_forward, step.log_inverse, step.reach, (row,))

    def _checked_native(self, shape: tuple[int, ...], context: Box | None) -> Bijection:
        held = self.module.__dict__.get("held")
        made = type(self.module if held is None else held)
        if made.__module__.split(".")[0] not in (*_LIBRARIES, "torch"):
            raise self.unproved(f"{made.__module__}.{made.__qualname__} is not a class of the library itself")
        for part in (*self.module.modules(), held, *self.helpers()):
            kind = part if isinstance(part, type) else type(part)
            why = (None if part is kind else tampered(part)) or patched_class(kind, *_LIBRARIES, "torch")
            if why is not None:
                raise self.unproved(f"{kind.__name__} inside it {why}")
        try:
            native = self.native()
        except (UnknownLipschitz, NonFiniteParameters, NotInitialized):
            raise
        except Exception as error:  # whatever was done to it: no block can be built from its parts
            raise self._not_rebuilt(error) from error
        native._require_finite()
        try:
            same = not shape or agree(self, native, shape, context, self.context_shape())
        except (BilipError, RuntimeError, IndexError):  # such as a box of another shape
            raise
        except Exception as error:
            raise self._not_rebuilt(error) from error
        if not same:
            raise self.unproved(
                "the installed version computes something else than the one bilip knows, or its parts were changed"
            )
        return native

    def _not_rebuilt(self, error: Exception) -> UnknownLipschitz:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return self.unproved(f"it cannot be rebuilt from its parts ({first.rstrip('.')})")

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self._checked_native(box.shape, context).log_lip(box, context, formula)

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return self._latent_native(box, context).log_lip_inverse(box, context, formula)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return self._checked_native(box.shape, context).interval(box, context)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        return self._latent_native(box, context).interval_inverse(box, context)

    def _get_name(self) -> str:
        return f"{type(self).__name__}[{self.kind}]"


def embedded(embedding: nn.Module | None, context: Tensor | None) -> Tensor | None:
    """A context as the blocks of a flow see it: through the embedding net, where there is one."""
    return context if embedding is None or context is None else embedding(context)


def per_sample(log_det: Any, like: Tensor) -> Tensor:
    """A log-determinant of shape `(batch,)` from whatever a library gives: a number, one for all, one an entry."""
    value = torch.as_tensor(log_det, dtype=like.dtype, device=like.device)
    if value.ndim > 1:
        value = value.flatten(1).sum(1)
    return value.expand(len(like))


def reference(module: nn.Module) -> Tensor:
    """A tensor with the dtype and device that most numbers of a module have; a single number of another dtype does not count.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> module.register_buffer("rate", torch.tensor(0.5, dtype=torch.float64))
        >>> reference(module).dtype
        torch.float32
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    sizes: dict[torch.dtype, int] = {}
    for t in tensors:
        if is_lazy(t):
            raise NotInitialized(
                f"{type(module).__name__} has parameters that take their shape from the first batch (nn.LazyLinear and its kind). Pass one "
                "through the model first: model(x)."
            )
        sizes[t.dtype] = sizes.get(t.dtype, 0) + t.numel()
    return max(tensors, key=lambda t: (sizes[t.dtype], t.numel()), default=torch.empty(()))


def compose(blocks: Sequence[Bijection], shape: Sequence[int] | None = None) -> Bijection:
    """One block as it is, several as a chain."""
    if len(blocks) != 1:
        return Chain(*blocks, shape=shape)
    if shape is not None:
        blocks[0].shape = tuple(int(n) for n in shape)
    return blocks[0]


def has_log_det(bijection: Bijection) -> bool:
    """Whether every part of a bijection gives a log-determinant.

    Example:
        >>> from bilip.models import real_nvp
        >>> has_log_det(real_nvp(2))
        True
    """
    return all(block.has_log_det for block in bijection.modules() if isinstance(block, Foreign))


@torch.no_grad()
def agree(
    block: Bijection,
    native: Bijection,
    shape: tuple[int, ...],
    context: Box | None,
    context_shape: tuple[int, ...] | None,
) -> bool:
    """Compare both in float64 on 8 points, there and back; a library that changed a formula fails here, and so does a block whose two
    directions are no longer each other's inverse, so that no proof speaks about it; and one of which nothing is finite.

    The way back is compared for samples that the native block brings back itself: of the others rounding leaves nothing to compare.
    """
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(8, *shape, generator=generator, dtype=torch.float64, device="cpu")
    given = _contexts(context, context_shape, generator)
    native, block = _copy(native), _copy(block)
    z_native, z = (f(x, given) for f in (native, block))
    finite = torch.isfinite(z) & torch.isfinite(z_native)
    if not bool(finite.any()) or not bool(_close(z, z_native)[finite].all()):
        return False
    back_native, back = (f.inverse(z_native, given) for f in (native, block))
    good = (_close(back_native, x, 1e-9) & finite).flatten(1).all(1)
    return bool(_close(back, x)[good].all())


def _close(a: Tensor, b: Tensor, share: float = 1e-6) -> Tensor:
    return (a - b).abs() <= share * (1 + b.abs())


def _copy(module: Bijection) -> Bijection:
    return copy.deepcopy(module, deepcopy_memo(module)).double().cpu().eval()


def _contexts(context: Box | None, shape: tuple[int, ...] | None, generator: torch.Generator) -> Tensor | None:
    if context is not None and context.shape and context.is_bounded:
        return context.sample(8, generator=generator)
    return None if shape is None else torch.randn(8, *shape, generator=generator, dtype=torch.float64, device="cpu")


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
        """log p(z) in nats, of shape `(batch,)`."""


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
    """A distribution module of another library, following the dtype and device of the bijection it belongs to.

    Args:
        module: The module.
        bijection: The bijection.
        embedding: A net that the flow applies to contexts first.
    """

    def __init__(self, module: nn.Module, bijection: Bijection, embedding: nn.Module | None = None) -> None:
        self.module, self.bijection, self.embedding = module, bijection, embedding

    def sample(self, count: int, context: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        like = reference(self.bijection)
        with drawing(generator), torch.no_grad():
            return self.draw(self._fitting(like), count, _in(like, context)).to(like)

    def log_prob(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        value = self.density(self._fitting(z), z, _in(z, context))
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
        return copy.deepcopy(self.module, deepcopy_memo(self.module)).to(like)


def _in(like: Tensor, context: Tensor | None) -> Tensor | None:
    """A context in the dtype of latents; labels stay as they are."""
    return context.to(like.dtype) if context is not None and context.is_floating_point() else context


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
