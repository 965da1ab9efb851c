"""Constant activation memory: activations are recomputed from outputs instead of stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bilip._torch import Flag, is_transformed
from bilip.adapters import as_bijection
from bilip.blocks import AdditiveCoupling, AffineCoupling, Bijection, InvertibleConv1x1
from bilip.blocks.bijection import Directed
from bilip.blocks.chain import only_scales
from bilip.blocks.factor_out import OnKept
from bilip.blocks.wrapped import Wrapped
from bilip.errors import CheckpointError, InputError
from bilip.nets.readable import is_itself, is_untouched
from bilip.reversible.call import Call
from bilip.reversible.coupling import Coupling
from bilip.reversible.function import MemorySaving
from bilip.reversible.guard import Guard, GuardReport, Watch
from bilip.reversible.kinks import Signs
from bilip.reversible.mixing import Mixing
from bilip.reversible.units import Generic, Kept, Rearranging, Unit

__all__ = ["Reversible", "make_units"]

MEMORY = ("reversible", "checkpoint", "stored")
Kind = tuple[bool, bool, tuple[bool, ...]]  # of a call: inverse, with log-determinant, which modules train


class Outside:
    """Tensors that the blocks of one `Reversible` use and that ask for gradients, although they are none of its parameters. A copy starts
    without them: it may use other ones.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.kinds: set[Kind] = set()  # calls that were looked at

    def add(self, found: Sequence[Tensor]) -> None:
        known = {id(t) for t in self.tensors}
        self.tensors += [t for t in found if id(t) not in known]

    def besides(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those that ask for gradients now."""
        own = {id(p) for p in parameters}
        return [t for t in self.tensors if t.requires_grad and id(t) not in own]

    def __reduce__(self) -> tuple[type[Outside], tuple[()]]:
        return Outside, ()


class Reversible(Directed, Wrapped):
    r"""A bijection with the same parameters and the same numbers, whose activation memory does not grow with depth.

    The forward pass keeps its input and its output. The backward pass walks from the output to the input, recovers what entered
    each block by its inverse, and evaluates each coupling net once for inversion and gradient together. Blocks without a closed
    inverse (residual blocks, neural ODEs) keep their input. Both directions, with and without log-determinants, any loss.

    In floating point an inverse can drift, and a gradient computed from drifted activations is wrong without a word. The guard
    watches every block and, by default, repairs: see `Guard`. `guard=None` is the bare walk, for study.

    `create_graph=True` and `torch.func` get right answers by storing.

    Args:
        bijection: A bijection, or anything `as_bijection` takes.
        guard: How the walk is watched; `None` for not at all.
        memory: `"reversible"`; `"checkpoint"`, which evaluates everything again from the input in segments; or `"stored"`,
            ordinary backpropagation. For the same call with another trade between memory and time.
        keep_signs: Keep, for every piecewise activation (ReLU and its kind), on which side of its kink it stood, and use that in the
            backward pass: one byte for each unit, so that memory grows with depth. To tell kinks that rounding has crossed from drift.

    Example:
        >>> from bilip.models import real_nvp
        >>> flow = Reversible(real_nvp(4, blocks=8))
        >>> z, log_det = flow.forward_and_log_det(torch.randn(16, 4))
        >>> (z.square().sum() / 2 - log_det.sum()).backward()
        >>> flow.report().repaired
        0
    """

    bijection: Bijection

    def __init__(
        self,
        bijection: Any,
        guard: Guard | None = Guard(),  # noqa: B008 - frozen
        *,
        memory: str = "reversible",
        keep_signs: bool = False,
    ) -> None:
        if memory not in MEMORY:
            raise InputError(f"Reversible(memory={memory!r}): expected one of {', '.join(map(repr, MEMORY))}.")
        if guard is not None and not isinstance(guard, Guard):
            raise InputError(f"Reversible(guard={guard!r}): expected a Guard or None.")
        super().__init__(as_bijection(bijection))
        for name, part in self.bijection.parts():
            inner = getattr(part, "block", part)
            if type(inner).inverse is Bijection.inverse:
                raise InputError(f"Reversible: block {name} ({type(inner).__name__}) defines no inverse.")
        self.guard, self.memory, self.keep_signs = guard, memory, keep_signs
        self._watch = None if guard is None else Watch(guard)
        self._flag = Flag() if self._watch is None else self._watch.flag
        self._outside = Outside()

    # ---- the maps

    def _map(self, x: Tensor, context: Tensor | None, *, inverse: bool, log_det: bool) -> tuple[Tensor, ...]:
        self.check(x)
        parameters = [p for p in self.bijection.parameters() if p.requires_grad]
        wanted = torch.is_grad_enabled() and (
            bool(parameters) or x.requires_grad or (isinstance(context, Tensor) and context.requires_grad)
        )
        if not wanted or not len(x) or self.memory == "stored" or is_transformed(x) or self._swapped():
            b = self.bijection
            if log_det:
                return (b.inverse_and_log_det if inverse else b.forward_and_log_det)(x, context)
            return ((b.inverse if inverse else b)(x, context),)
        if context is not None and not isinstance(context, Tensor):
            raise InputError(
                f"Reversible: expected a tensor as context, got {type(context).__name__}. Convert it with torch.as_tensor, or use "
                "memory='stored'."
            )
        if self._watch is not None:
            self._watch.guard.limit(x.dtype)
        kind = (inverse, log_det, tuple(module.training for module in self.bijection.modules()))
        result, call = self._run(x, context, parameters, kind)
        if call.unknown:
            self._outside.add(call.unknown)
            call.as_before()
            result, call = self._run(x, context, parameters, kind)
        self._outside.kinds.add(kind)
        return result if log_det else (result,)  # type: ignore[return-value]

    def _run(self, x: Tensor, context: Tensor | None, parameters: list[nn.Parameter], kind: Kind):
        """One call, and what autograd made of it. The first of a kind looks for tensors from outside."""
        outside = self._outside.besides(parameters)
        call = Call(
            self.bijection,
            make_units(self.bijection.parts(), inverse=kind[0]),
            parameters,
            kind[0],
            kind[1],
            self._watch,
            self._flag,
            self.memory == "checkpoint",
            outside,
            kind not in self._outside.kinds,
            Signs() if self.keep_signs else None,
        )
        return MemorySaving.apply(call, x, context, *parameters, *outside), call

    def _swapped(self) -> bool:
        """Whether tensors stand in for parameters: torch.func.functional_call, or a replica of DataParallel; or parameters have no shape
        before this call. Those store.
        """
        if getattr(self, "_is_replica", False):
            return True
        return any(not isinstance(p, nn.Parameter) or is_lazy(p) for p in self.bijection.parameters())

    # ---- the guard

    def report(self) -> GuardReport:
        """What the guard has seen so far.

        Raises:
            InputError: There is no guard.
        """
        if self._watch is None:
            raise InputError("Reversible was built with guard=None: nothing was watched.")
        return self._watch.report()

    def guard_state(self) -> dict[str, Any]:
        """What the guard carries from step to step, as JSON values; empty without a guard. For checkpoints."""
        return {} if self._watch is None else self._watch.state()

    def load_guard_state(self, state: Mapping[str, Any]) -> None:
        """Go on as the guard whose `guard_state()` this was.

        Example:
            >>> from bilip.models import real_nvp
            >>> one, two = (Reversible(real_nvp(4, blocks=2)) for _ in range(2))
            >>> one(torch.randn(8, 4)).sum().backward()
            >>> two.load_guard_state(one.guard_state())
            >>> two.report().steps
            1
        """
        if self._watch is None or not state:
            return
        try:
            self._watch.load(state)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(f"this is not the state of a guard ({type(error).__name__}: {error}).") from error

    @property
    def flag(self) -> Flag:
        """What a captured step raises where it has to be run again."""
        return self._flag

    def drift_flag(self) -> Tensor | None:
        """The largest drift over its limit since the flag was last zeroed, a number on the device; `None` before the first step.

        A captured step cannot stop to look. Read the flag before `optimizer.step()`; if it is above 1, zero it,
        zero the gradients in place (`zero_grad(set_to_none=False)`: the graph owns their memory) and run the step again without
        the graph, which repairs.
        """
        return self._flag.value

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        return self.bijection.parts(name) if is_itself(self) else super().parts(name)

    def extra_repr(self) -> str:
        return f"memory={self.memory!r}, guard={self.guard}" + (", keep_signs=True" if self.keep_signs else "")


def make_units(parts: Sequence[tuple[str, Bijection]], *, inverse: bool) -> list[Unit]:
    """The units of a map in the order in which they run."""
    units: list[Unit] = []
    plain = _Plain()
    k = 0
    while k < len(parts):
        name, part = parts[k]
        after = parts[k + 1][1] if k + 1 < len(parts) else None
        if _is_free(after, plain) and only_scales(part, after) and plain(part):
            units.append(Mixing(parts[k + 1][0], part, after, inverse=inverse))
            k += 1
        else:
            units.append(_unit(name, part, plain, inverse=inverse))
        k += 1
    return units[::-1] if inverse else units


class _Plain:
    """Whether a block, with its partition and scale, does what its class says, so that it may be evaluated in another way; of each class
    it is found out once.
    """

    def __init__(self) -> None:
        self.blocks: dict[type, bool] = {}
        self.parts: dict[type, bool] = {}

    def __call__(self, part: Bijection) -> bool:
        inner = (part._modules.get("partition"), vars(part).get("scale"))
        return is_itself(part, self.blocks) and all(is_untouched(thing, self.parts) for thing in inner)


def _unit(name: str, part: Bijection, plain: _Plain, *, inverse: bool) -> Unit:
    if isinstance(part, OnKept):
        return Kept(_unit(name, part.block, plain, inverse=inverse), part.kept_shape, part.kept_latent)
    if type(part) in (AdditiveCoupling, AffineCoupling) and plain(part):
        return Coupling(name, part, inverse=inverse)
    if _is_free(part, plain):
        return Mixing(name, None, part, inverse=inverse)
    if part.rearranges and plain(part):
        return Rearranging(name, part, inverse=inverse)
    return Generic(name, part, inverse=inverse)


def _is_free(part: Bijection | None, plain: _Plain) -> TypeGuard[InvertibleConv1x1]:
    """Whether a block is a 1x1 convolution with a free matrix, and nothing else."""
    return type(part) is InvertibleConv1x1 and part.kind == "full" and plain(part) and "weight" in part._parameters
