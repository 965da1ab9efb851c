"""normflows, whose forward goes from latents to data: every block is turned round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bilip.adapters._inspect import (
    call,
    comes_from,
    context_name,
    is_a,
    is_unchanged,
    join_parts,
    no_inverse,
    require_own_map,
    split_parts,
)
from bilip.adapters._proofs import rearranged
from bilip.adapters.foreign import Base, Foreign, ForeignBase, compose
from bilip.blocks import EXP, SIGMOID, AdditiveCoupling, AffineCoupling, Bijection, ExpScale, Invert, Permutation, Split
from bilip.errors import InputError, NotInitialized

__all__ = ["NormflowsBase", "NormflowsBlock", "NormflowsMultiscale", "recognise"]


# What a flow is to its users; its `forward` may be anything, as a loss for data-parallel training.
_MAPS = ("inverse", "inverse_and_log_det", "forward_and_log_det", "log_prob", "sample")


def recognise(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A flow, a multi-scale flow with its list of latents, or one layer."""
    if not comes_from(model, "normflows"):
        return None
    if is_a(model, "MultiscaleFlow", "normflows"):
        require_own_map(model, ("log_prob", "sample"), "normflows")
        block = NormflowsMultiscale(model)
        bijection = compose([block], shape)
        return bijection, NormflowsBase(model.q0, bijection, classes=bool(model.class_cond)), "normflows"
    if hasattr(model, "q0") and hasattr(model, "flows"):
        require_own_map(model, _MAPS, "normflows")
        blocks = [block for layer in reversed(model.flows) for block in _blocks(layer)]
        if shape is None and not any(block.reshapes() for block in blocks):
            shape = _base_shape(model.q0)
        bijection = compose(blocks, shape)
        classes = is_a(model, "ClassCondFlow", "normflows")
        return bijection, NormflowsBase(nn.ModuleList([model.q0]), bijection, classes=classes), "normflows"
    if is_a(model, "Flow", "normflows"):
        return compose(list(_blocks(model)), shape), None, "normflows"
    return None


def _base_shape(base: Any) -> tuple[int, ...] | None:
    shape = getattr(base, "shape", None)
    return (shape,) if isinstance(shape, int) else None if shape is None else tuple(shape)


def _blocks(layer: Any) -> Iterator[NormflowsBlock]:
    if is_a(layer, "Composite", "normflows") and is_unchanged(layer, "normflows"):
        for part in reversed(layer._flows):
            yield from _blocks(part)
        return
    if type(layer).__module__.startswith("normflows.flows.stochastic"):
        raise no_inverse(layer, "a stochastic layer of normflows is no bijection")
    one_way = type(layer).__name__ == "Radial" or (
        type(layer).__name__ == "Planar" and getattr(layer, "act", "") != "leaky_relu"
    )
    if one_way or type(layer).inverse.__qualname__ == "Flow.inverse":
        raise no_inverse(layer, "the layer of normflows defines only the direction from latents to data")
    yield NormflowsBlock(layer)


class NormflowsBlock(Foreign):
    """One layer of normflows, turned round: F is the layer's `inverse`.

    A layer that starts from its first batch does so in evaluation mode too, and from latents if it meets them first;
    here it is refused until it has been trained or been shown data in training mode.
    """

    library = "normflows"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._names = context_name(module.inverse), context_name(module.forward)  # type: ignore[arg-type]
        self.stochastic_log_det = any(is_a(part, "iResBlock", "normflows") for part in module.modules())

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        self._require_start(allowed=self.training)
        return self._call(self.module.inverse, x, context, self._names[0])

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        self._require_start(allowed=False)
        return self._call(self.module, z, context, self._names[1])

    def _call(self, function: Any, x: Tensor, context: Tensor | None, name: str | None) -> tuple[Tensor, Any]:
        if not self.stochastic_log_det:
            return call(function, x, context, name)
        out, log_det = call(function, x.clone(), context, name)  # it marks its input as requiring a gradient
        return (out, log_det) if torch.is_grad_enabled() else (out.detach(), log_det.detach())

    def _require_start(self, *, allowed: bool) -> None:
        for part in self.module.modules() if not allowed else ():
            if not bool(getattr(part, "data_dep_init_done", True)):
                raise NotInitialized(
                    f"{type(part).__name__} of normflows in {self.kind} has seen no data and would start from this call, "
                    "even in evaluation mode. Run the model on a batch of data in training mode, or load a checkpoint."
                )

    def reshapes(self) -> bool:
        return any(kind.__name__ in ("Squeeze", "Split", "Merge") for kind in type(self.module).__mro__)

    def native(self) -> Bijection:
        module: Any = self.module
        if self.kind == "Permute" and type(module).__module__ == "normflows.flows.mixing":
            if module.mode == "shuffle":
                return Permutation(module.inv_perm)
            half = (module.num_channels + 1) // 2
            return Permutation(list(range(half, module.num_channels)) + list(range(half)))
        if self.kind == "AffineCouplingBlock" and type(module).__module__ == "normflows.flows.affine.coupling":
            kinds = [(type(part).__module__, type(part).__name__) for part in module.flows]
            if kinds != [
                ("normflows.flows.reshape", "Split"),
                (type(module).__module__, "AffineCoupling"),
                ("normflows.flows.reshape", "Merge"),
            ]:
                raise self.unproved("its parts are not those that normflows builds")
            mode, coupling = module.flows[0].mode, module.flows[1]
            if mode not in ("channel", "channel_inv"):
                raise self.unproved(f"split mode {mode!r}")
            return Invert(_coupling(coupling, swap=mode == "channel_inv"))
        raise self.unproved()


class _Half(Split):
    """`chunk(2)`: the first part is the larger one where the number is odd."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.size = -(-x.shape[1] // 2)
        return super().split(x)


def _coupling(module: Any, *, swap: bool) -> Bijection:
    """The layer from latents to data as a bilip block; shift and raw scale alternate in the outputs of its net."""
    partition = _Half(swap=swap)
    net = module.param_map
    if type(net).__module__ in ("normflows.nets.mlp", "normflows.nets.cnn"):
        net = net.net  # one Sequential in a shell
    if not module.scale:
        return AdditiveCoupling(net, partition)
    if module.scale_map == "exp":
        return AffineCoupling(rearranged(net, interleaved=True), scale=EXP, partition=partition)
    if module.scale_map == "sigmoid_inv":
        return AffineCoupling(rearranged(net, interleaved=True), scale=SIGMOID, partition=partition)
    # 1 / sigmoid(s + 2) = 1 + exp(-s - 2)
    net = rearranged(net, interleaved=True, raw_factor=-1.0, raw_offset=-2.0)
    return AffineCoupling(net, scale=ExpScale(1.0), partition=partition)


class NormflowsMultiscale(NormflowsBlock):
    """A multi-scale flow of normflows; its list of latents is joined to one flat tensor, in the order of the list."""

    def __init__(self, module: nn.Module) -> None:
        Foreign.__init__(self, module)
        shapes = [_base_shape(base) for base in module.q0]  # type: ignore[union-attr]
        self._layout = None if any(shape is None for shape in shapes) else shapes

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        self._require_start(allowed=self.training)
        parts, value = self.module.inverse_and_log_det(x)  # type: ignore[operator]
        self._layout = [tuple(part.shape[1:]) for part in parts]
        return join_parts(parts), value

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        self._require_start(allowed=False)
        if self._layout is None:
            raise InputError(
                "MultiscaleFlow: the shapes of its latents are not known before a forward pass. Run it on data once."
            )
        return self.module.forward_and_log_det(split_parts(z, self._layout))  # type: ignore[operator, arg-type]

    def reshapes(self) -> bool:
        return True

    def native(self) -> Bijection:
        raise self.unproved()


class NormflowsBase(ForeignBase):
    """The base, or the list of bases of a multi-scale flow; with classes, the context holds the labels."""

    def __init__(self, module: nn.Module, bijection: Bijection, *, classes: bool = False) -> None:
        super().__init__(module, bijection)
        self.classes = classes

    def _given(self, base: nn.Module, context: Tensor | None) -> dict[str, Tensor]:
        name = "y" if self.classes else context_name(base.log_prob)  # type: ignore[arg-type]
        if context is None or name is None or (name == "y") != self.classes:
            return {}
        return {name: context}

    def draw(self, module: Any, count: int, context: Tensor | None) -> Tensor:
        parts = [base(count, **self._given(base, context))[0] for base in module]
        return parts[0] if len(parts) == 1 else join_parts(parts)

    def density(self, module: Any, z: Tensor, context: Tensor | None) -> Tensor:
        if len(module) == 1:
            return module[0].log_prob(z, **self._given(module[0], context))
        shapes = [_base_shape(base) for base in module]
        parts = split_parts(z, shapes)  # type: ignore[arg-type]
        values = [base.log_prob(part, **self._given(base, context)) for base, part in zip(module, parts, strict=True)]
        return torch.stack(values).sum(0)
