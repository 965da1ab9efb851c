"""FrEIA: sequences, graphs and single invertible modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bilip.adapters._inspect import comes_from, is_a, is_unchanged, join_parts, no_inverse, split_parts
from bilip.adapters._proofs import AtanExpScale, Joint, rearranged
from bilip.adapters.foreign import Base, Foreign, compose
from bilip.blocks import AdditiveCoupling, AffineCoupling, Bijection, Chain, Permutation, Scale, Split, TanhExpScale
from bilip.errors import InputError, NotInitialized

__all__ = ["FreiaBlock", "recognise"]

Shapes = tuple[tuple[int, ...], ...]


def recognise(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A sequence or a linear graph as a chain, any other graph or module as one block; FrEIA has no base."""
    if not is_a(model, "InvertibleModule", "FrEIA"):
        return None
    blocks, whole = None, is_unchanged(model, "FrEIA")
    if whole and is_a(model, "SequenceINN", "FrEIA"):
        blocks = _sequence(model)
    elif whole and is_a(model, "GraphINN", "FrEIA"):
        blocks = _linear_graph(model)
    if blocks is None:
        blocks = [_whole(model)]
    if not blocks:
        raise no_inverse(model, "it holds no modules yet")
    start = blocks[0].inputs
    return compose(blocks, start[0] if shape is None and len(start) == 1 else shape), None, "FrEIA"


def _shapes(dims: Any) -> Shapes:
    """Some modules keep the list of shapes, some only the first of them."""
    return (tuple(dims),) if dims and isinstance(dims[0], int) else tuple(tuple(shape) for shape in dims)


def _whole(model: Any) -> FreiaBlock:
    """A module or graph as it is."""
    if is_a(model, "SequenceINN", "FrEIA"):
        inputs, outputs, conditions = model.shapes[:1], model.shapes[-1:], _sequence_conditions(model)
    else:
        inputs, conditions = _shapes(model.dims_in), _shapes(model.dims_c)
        outputs = model.global_out_shapes if hasattr(model, "global_out_shapes") else model.output_dims(list(inputs))
    return FreiaBlock(model, _shapes(inputs), _shapes(outputs), conditions, tuple(range(len(conditions))))


def _sequence_conditions(model: Any) -> Shapes:
    known: dict[int, tuple[int, ...]] = {}
    for index, module in zip(model.conditions, model.module_list, strict=True):
        if index is not None:
            known[index] = _shapes(module.dims_c)[0]
    return tuple(known.get(k, ()) for k in range(max(known, default=-1) + 1))


def _sequence(model: Any) -> list[FreiaBlock]:
    conditions = _sequence_conditions(model)
    return [
        FreiaBlock(module, (tuple(before),), (tuple(after),), conditions, () if index is None else (index,))
        for module, before, after, index in zip(
            model.module_list, model.shapes[:-1], model.shapes[1:], model.conditions, strict=True
        )
    ]


def _linear_graph(model: Any) -> list[FreiaBlock] | None:
    """The modules of a graph that is one path; `None` for a graph that splits or joins."""
    if len(model.in_nodes) != 1 or len(model.out_nodes) != 1:
        return None
    conditions = _shapes(model.dims_c)
    blocks, node = [], model.in_nodes[0].outputs[0][0]
    while node.module is not None:
        if len(node.inputs) != 1 or len(node.outputs) != 1:
            return None
        used = tuple(model.condition_nodes.index(condition) for condition in node.conditions)
        blocks.append(FreiaBlock(node.module, _shapes(node.input_dims), _shapes(node.output_dims), conditions, used))
        node = node.outputs[0][0]
    return blocks if len(blocks) == len(model.module_list) else None


class FreiaBlock(Foreign):
    """One module of FrEIA, called on tuples with `rev=` and `jac=True`.

    Args:
        module: The module.
        inputs: Shapes of its inputs; several are joined to one flat tensor.
        outputs: Shapes of its outputs, likewise.
        conditions: Shapes of all conditions of the model. One is the context itself; several are its slices.
        used: Which of them this module takes.
    """

    library = "FrEIA"

    def __init__(
        self, module: nn.Module, inputs: Shapes, outputs: Shapes, conditions: Shapes = (), used: tuple[int, ...] = ()
    ) -> None:
        super().__init__(module)
        self.inputs, self.outputs, self.conditions, self.used = inputs, outputs, conditions, used
        self._residual = is_a(module, "IResNetLayer", "FrEIA")
        self.stochastic_log_det = any(is_a(part, "IResNetLayer", "FrEIA") for part in module.modules())

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        self._require_start(allowed=self.training)
        if self._residual:
            return self._residual_encode(x, log_det)
        return self._run(x, context, self.inputs, rev=False)

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        self._require_start(allowed=False)
        if self._residual:
            return self._residual_decode(z), None
        return self._run(z, context, self.outputs, rev=True)

    def _run(self, x: Tensor, context: Tensor | None, shapes: Shapes, *, rev: bool) -> tuple[Tensor, Any]:
        # jac=True always: with False a sequence or graph adds None to a number.
        parts = (x,) if len(shapes) == 1 else tuple(split_parts(x, shapes))
        given = {"c": self._given(context)} if self.used else {}
        if self.stochastic_log_det:  # it differentiates inside, and marks its input
            with torch.enable_grad():
                out, log_det = self.module(tuple(part.clone() for part in parts), rev=rev, jac=True, **given)
            if not torch.is_grad_enabled():
                out = out.detach() if isinstance(out, Tensor) else [part.detach() for part in out]
        else:
            out, log_det = self.module(parts, rev=rev, jac=True, **given)
        if not isinstance(out, Tensor):
            out = out[0] if len(out) == 1 else join_parts(out)
        return out, log_det

    def _residual_encode(self, x: Tensor, log_det: bool) -> tuple[Tensor, Any]:
        z = self.module((x,), rev=False, jac=False)[0][0]
        if not log_det:
            return z, None
        with torch.inference_mode(False), torch.enable_grad():
            point = x.clone() if x.requires_grad else x.detach().clone().requires_grad_()
            value = self.module((point,), rev=False, jac=True)[1]
        return z, value if torch.is_grad_enabled() else value.detach()

    def _residual_decode(self, z: Tensor) -> Tensor:
        """x from z by the fixed-point iteration of the library.

        Its own log-determinant of this direction is taken at z in place of x, and its derivative is that of the last
        step alone, with x held fixed. Steps that are differentiated start from the solution, so they only add the rest.
        """
        module: Any = self.module
        x = module((z,), rev=True, jac=False)[0][0]
        if torch.is_grad_enabled():
            x = x.detach()
            for _ in range(module.fixed_point_iterations):
                x = z - module.residual(x)
        return x

    def _given(self, context: Tensor | None) -> list[Tensor]:
        if context is None:
            raise InputError(f"{self.kind} of FrEIA takes a condition: pass context=, of shape {self.conditions}.")
        parts = [context] if len(self.conditions) == 1 else split_parts(context.flatten(1), self.conditions)
        return [parts[k] for k in self.used]

    def _require_start(self, *, allowed: bool) -> None:
        for part in self.module.modules() if not allowed else ():
            if getattr(part, "init_on_next_batch", False):
                raise NotInitialized(
                    f"{type(part).__name__} of FrEIA has seen no data and would start from this call, even in evaluation "
                    "mode. Run the model on a batch of data in training mode, or load a checkpoint."
                )

    def reshapes(self) -> bool:
        return self.inputs != self.outputs or len(self.inputs) > 1

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape) if not self.reshapes() else _joint_shape(self.outputs)

    def in_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape) if not self.reshapes() else _joint_shape(self.inputs)

    def context_shape(self) -> tuple[int, ...] | None:
        return self.conditions[0] if len(self.conditions) == 1 and self.used else None

    def native(self) -> Bijection:
        module: Any = self.module
        if not comes_from(module, "FrEIA") or not type(module).__module__.startswith("FrEIA.modules"):
            raise self.unproved()
        if self.kind == "PermuteRandom":
            return Permutation(module.perm.detach())
        if self.kind == "NICECouplingBlock":
            return self._halves(AdditiveCoupling, {"t": module.F}, {"t": module.G})
        if self.kind == "RNVPCouplingBlock":
            nets = (
                {"t": getattr(module, f"subnet_t{k}"), "s": self._raw(getattr(module, f"subnet_s{k}"))} for k in (2, 1)
            )
            return self._halves(AffineCoupling, *nets, scale=self._scale())
        if self.kind == "GLOWCouplingBlock":
            factor = self._raw_factor()
            nets = (
                {"t": rearranged(net, scale_first=True, raw_factor=factor)} for net in (module.subnet2, module.subnet1)
            )
            return self._halves(AffineCoupling, *nets, scale=self._scale())
        raise self.unproved()

    def _halves(self, block: Any, first: dict[str, nn.Module], second: dict[str, nn.Module], **options: Any) -> Chain:
        """The second half moves the first, then the first half the second; conditions follow the input of a net."""
        module: Any = self.module
        if module.conditional and len(self.conditions) != 1:
            raise self.unproved("several conditions")
        width = module.condition_length
        sides = []
        for nets, swap in ((first, True), (second, False)):
            nets = {name: Joint(net, width) if width else net for name, net in nets.items()}
            sides.append(block(**nets, partition=Split(size=module.split_len1, swap=swap), **options))
        return Chain(*sides)

    def _clamp(self) -> str:
        """Which soft clamp: FrEIA keeps only the function."""
        function: Any = self.module.f_clamp
        if function is torch.tanh:
            return "tanh"
        if getattr(function, "__module__", "") == "FrEIA.modules.coupling_layers" and hasattr(function, "__code__"):
            names, numbers = set(function.__code__.co_names), set(function.__code__.co_consts) - {None}
            if names == {"torch", "atan"} and numbers == {0.636}:
                return "atan"
            if names == {"torch", "sigmoid"} and numbers == {2.0, 0.5}:
                return "sigmoid"
        raise self.unproved("its clamp_activation is not one of FrEIA's own")

    def _raw_factor(self) -> float:
        return 0.5 if self._clamp() == "sigmoid" else 1.0  # 2 (sigmoid(u) - 1/2) = tanh(u / 2)

    def _raw(self, net: nn.Module) -> nn.Module:
        return net if self._raw_factor() == 1.0 else rearranged(net, all_raw=True, raw_factor=0.5)

    def _scale(self) -> Scale:
        clamp = float(self.module.clamp)  # type: ignore[arg-type]
        if clamp <= 0:
            raise self.unproved(f"clamp={clamp:g} is not positive")
        return AtanExpScale(0.636 * clamp) if self._clamp() == "atan" else TanhExpScale(clamp)


def _joint_shape(shapes: Shapes) -> tuple[int, ...]:
    return shapes[0] if len(shapes) == 1 else (sum(math.prod(shape) for shape in shapes),)
