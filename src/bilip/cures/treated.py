"""Copies of a user's model, and the wrappers that a cure puts around them: the model itself is never changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bilip._torch import deepcopy_memo
from bilip.adapters import Adapted, Base, adapt
from bilip.adapters.foreign import reference
from bilip.auditing.float32 import float32_products
from bilip.auditing.subject import Subject
from bilip.blocks import Bijection, Flow
from bilip.blocks.bijection import Directed
from bilip.errors import InputError, said_by

__all__ = ["Plain", "Stepwise", "Treated", "TreatedFlow", "copied", "wrapped"]


@dataclass(frozen=True)
class Treated:
    """A copy of a model, perhaps changed."""

    model: Any  # what the user calls: an object of their library, or a wrapper around one
    native: Any  # the object of their library, whose `state_dict` is saved
    adapted: Adapted  # the model as an audit takes it

    @property
    def bijection(self) -> Bijection:
        """The map from data to latents."""
        return self.adapted.bijection

    def evaluated(self) -> Treated:
        """The same, everything in evaluation mode: what the library built and what was put around it."""
        for part in (self.model, self.native, self.adapted.bijection):
            if isinstance(part, nn.Module):
                part.eval()
        return self

    def state(self) -> dict[str, Tensor]:
        """The tensors of the library's object, by the names that the library gives them."""
        if isinstance(self.native, nn.Module):
            return dict(self.native.state_dict())
        return dict(adapt(self.native).bijection.state_dict())

    def load(self, state: dict[str, Tensor]) -> None:
        """Fill in the tensors of `state`."""
        target = self.native if isinstance(self.native, nn.Module) else adapt(self.native).bijection
        wanted = target.state_dict()
        # a transform may have computed more meanwhile, such as the inverse of a permutation
        target.load_state_dict({k: v for k, v in state.items() if k in wanted or isinstance(self.native, nn.Module)})
        for part in target.modules():  # transforms of torch.distributions hold their tensors elsewhere
            if hasattr(part, "places") and hasattr(part, "object"):
                part.object()  # type: ignore[operator]


def copied(model: Any) -> Treated:
    """A copy in evaluation mode that shares nothing with the model.

    Raises:
        InputError: The model cannot be copied, or is not one that bilip takes.

    Example:
        >>> from bilip.models import real_nvp
        >>> flow = real_nvp(2)
        >>> made = copied(flow)
        >>> made.model is flow, torch.equal(next(made.model.parameters()), next(flow.parameters()))
        (False, True)
    """
    if isinstance(model, Adapted):
        try:
            bijection = copy.deepcopy(model.bijection, deepcopy_memo(model.bijection)).eval()
            base = Subject(model, "").base_in(reference(bijection).dtype, bijection)
        except Exception as error:
            raise _uncopied(model.library, error) from error
        found = Adapted(bijection, base, model.library)
        return Treated(_shown(found), bijection, found).evaluated()
    seen = adapt(model)
    try:
        native = copy.deepcopy(model, deepcopy_memo(seen.bijection))
        found = adapt(native)
        (native if isinstance(native, nn.Module) else found.bijection).eval()
    except Exception as error:  # foreign objects may refuse to be copied in any way they like
        raise _uncopied(type(model).__name__, error) from error
    mine = {id(t) for t in (*seen.bijection.parameters(), *seen.bijection.buffers())}
    if any(id(t) in mine for t in (*found.bijection.parameters(), *found.bijection.buffers())):
        raise InputError(
            f"cure: a copy of {type(model).__name__} shares its tensors with the model, so it would be changed as well. Give it a "
            "__deepcopy__ that copies them."
        )
    return Treated(native, native, found).evaluated()


def _uncopied(name: str, error: Exception) -> InputError:
    return InputError(
        f"cure: {name} cannot be copied ({said_by(error)}), and a cure changes a copy only. Make copy.deepcopy(model) work."
    )


def _shown(adapted: Adapted) -> Any:
    return adapted.bijection if adapted.base is None else TreatedFlow(adapted.bijection, adapted.base)


def wrapped(treated: Treated, bijection: Bijection) -> Treated:
    """The same model with another bijection in its place: a flow where there is a base, a classifier where there is a head."""
    found = Adapted(bijection, treated.adapted.base, treated.adapted.library)
    model, native = _shown(found), treated.native
    if isinstance(native, nn.Module) and isinstance(getattr(native, "trunk", None), Bijection):
        model = copy.copy(native)  # the head is shared, the trunk is not
        model._modules = {**native._modules, "trunk": bijection}
        head = native._modules.get("head")
        if head is not None:
            model._modules["head"] = AnyDtype(head)
    return Treated(model, native, found).evaluated()


class AnyDtype(nn.Module):
    """A net that converts what it is given to the dtype of its own parameters."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """The net, in its own dtype."""
        return self.net(x.to(reference(self.net).dtype))


class TreatedFlow(Flow):
    """A bijection with the base that came with the model: `log_prob` and `sample`, whatever the library.

    Latents keep the dtype in which they are computed; converting them back to float32 would lose what a cure in float64 gains.

    Args:
        bijection: The map from data to latents.
        base: The model's own base.
    """

    def __init__(self, bijection: Bijection, base: Base) -> None:
        shape = None if bijection.shape is None else bijection.out_shape(bijection.shape)
        super().__init__(bijection, shape=shape)
        self.adapted_base = base

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        z, log_det = self.bijection.forward_and_log_det(x, context)
        return self.adapted_base.log_prob(z, context) + log_det

    def base_log_prob(self, z: Tensor) -> Tensor:
        return self.adapted_base.log_prob(z)

    def sample(self, count: int, context: Tensor | None = None, **options: Any) -> Tensor:
        temperature = options.pop("temperature", 1.0)
        if temperature != 1.0:
            raise InputError("sample(temperature=...): the base of another library has none.")
        z = self.adapted_base.sample(count, context, options.pop("generator", None))
        return self.bijection.inverse(z, context)

    def sample_base(self, count: int, **options: Any) -> Tensor:
        return self.adapted_base.sample(count, None, options.get("generator"))


class Stepwise(Directed):
    """The blocks of a model one after the other, each in the dtype of its own parameters; latents keep the last one.

    Args:
        blocks: Paths and blocks, in forward order.
        shape: Shape of one sample.
    """

    def __init__(self, blocks: Sequence[tuple[str, Bijection]], shape: Sequence[int] | None = None) -> None:
        super().__init__()
        self.names = [name for name, _ in blocks]
        self.blocks = nn.ModuleList(block for _, block in blocks)
        self.shape = None if shape is None else tuple(shape)

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        return [part for name, block in zip(self.names, self._all(), strict=True) for part in block.parts(name)]

    def _all(self) -> list[Bijection]:
        return list(self.blocks)  # type: ignore[arg-type]

    def _map(self, x: Tensor, context: Tensor | None, *, inverse: bool, log_det: bool) -> tuple[Tensor, ...]:
        total = x.new_zeros(len(x), dtype=torch.float64)
        for block in reversed(self._all()) if inverse else self._all():
            x, context = _fitting(block, x, context)
            if log_det:
                x, term = (block.inverse_and_log_det if inverse else block.forward_and_log_det)(x, context)
                total = total + term
            else:
                x = block.inverse(x, context) if inverse else block(x, context)
        return x, total

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        for block in self._all():
            shape = block.out_shape(shape)
        return tuple(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        for block in reversed(self._all()):
            shape = block.in_shape(shape)
        return tuple(shape)


def _fitting(block: nn.Module, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A batch in the dtype of a block; one without numbers takes any."""
    if next(_floats(block), None) is None:
        return x, context
    dtype = getattr(block, "state_dtype", None) or reference(block).dtype
    return x.to(dtype), context.to(dtype) if context is not None and context.is_floating_point() else context


def _floats(block: nn.Module) -> Iterator[Tensor]:
    return (t for t in (*block.parameters(), *block.buffers()) if t.is_floating_point())


class CallWrapper(Directed):
    """A bijection around another one, whose four calls all pass through `_run`; shapes and parts are those of the inner one."""

    def __init__(self, inner: Bijection) -> None:
        super().__init__()
        self.inner = inner
        self.shape = inner.shape
        self.volume_preserving, self.closed_form = inner.volume_preserving, inner.closed_form

    def _run(self, call: Callable[..., Any], x: Tensor, context: Tensor | None) -> Any:
        return call(x, context)

    def _map(self, x: Tensor, context: Tensor | None, *, inverse: bool, log_det: bool) -> tuple[Tensor, ...]:
        inner = self.inner
        if log_det:
            return self._run(inner.inverse_and_log_det if inverse else inner.forward_and_log_det, x, context)
        return (self._run(inner.inverse if inverse else inner.__call__, x, context),)

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        return self.inner.parts(name)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.inner.out_shape(shape)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.inner.in_shape(shape)


class Plain(CallWrapper):
    """A model without autocast and TF32, whatever surrounds the call.

    Example:
        >>> from bilip.models import real_nvp
        >>> model = Plain(real_nvp(2))
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     model(torch.zeros(1, 2)).dtype
        torch.float32
    """

    def _run(self, call: Callable[..., Any], x: Tensor, context: Tensor | None) -> Any:
        dtype = reference(self).dtype
        with torch.autocast(x.device.type, enabled=False), float32_products("ieee"):
            given = context.to(dtype) if context is not None and context.is_floating_point() else context
            return call(x.to(dtype) if x.dtype.itemsize < dtype.itemsize else x, given)

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        return [(name or "0", self)]


class Wide(CallWrapper):
    """A model in float64 that takes a batch of any dtype and hands out float64."""

    def _run(self, call: Callable[..., Any], x: Tensor, context: Tensor | None) -> Any:
        given = context.double() if context is not None and context.is_floating_point() else context
        with torch.autocast(x.device.type, enabled=False):
            return call(x.double(), given)
