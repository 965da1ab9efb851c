"""Models of no library: pairs of callables, modules with an `inverse` method or a flag such as `reverse=`, vector fields of neural ODEs."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from bilip.adapters._inspect import CONTEXT_NAMES, call, context_name, join_parts, no_inverse, split_parts
from bilip.adapters._proofs import Joint
from bilip.adapters.foreign import Base, Foreign, compose
from bilip.blocks import Bijection, Invert, NeuralODE
from bilip.errors import InputError
from bilip.nets.layers import takes_context

__all__ = ["Callables", "Flagged", "Function", "from_callables", "from_vector_field", "recognise", "reverse_flag"]


def from_callables(
    forward: Callable[..., Any],
    inverse: Callable[..., Any],
    *,
    log_det: Callable[..., Any] | None = None,
    inverse_log_det: Callable[..., Any] | None = None,
    shape: Sequence[int] | None = None,
    kind: str | None = None,
) -> Bijection:
    r"""A bijection from two callables.

    Args:
        forward: Data to latent. It returns z, several latents, or either with a log-determinant: `(z, log_det)`. An
            argument named `context`, `condition`, `c`, `y` or the like, or a second one without a default, is the context.
        inverse: Latent to data, likewise. Several latents are given back as `forward` returned them.
        log_det: log |det J_F| as a function of x, if `forward` does not return it.
        inverse_log_det: log |det J_F^-1| as a function of z, if `inverse` does not return it; minus the former by default.
        shape: Shape of one sample.
        kind: Its name in reports.

    Example:
        >>> import torch
        >>> flow = from_callables(torch.sinh, torch.asinh, log_det=lambda x: torch.log(torch.cosh(x)))
        >>> x = torch.randn(5, 2)
        >>> z, log_det = flow.forward_and_log_det(x)
        >>> bool(torch.allclose(flow.inverse(z), x, atol=1e-5)), log_det.shape
        (True, torch.Size([5]))
    """
    for name, value in (("forward", forward), ("inverse", inverse)):
        if not callable(value):
            raise InputError(f"from_callables({name}={type(value).__name__}): expected a callable.")
    return compose([Callables(forward, inverse, log_det, inverse_log_det, kind=kind)], shape)


def recognise(model: Any, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A pair of callables or a module with an inverse."""
    if isinstance(model, tuple) and len(model) == 2 and all(callable(part) for part in model):
        return from_callables(model[0], model[1], shape=shape), None, "generic"
    if isinstance(model, nn.Module) and callable(getattr(model, "inverse", None)):
        forward: Any = model
        inverse: Any = model.inverse
        if getattr(inverse, "__isabstractmethod__", False):
            raise no_inverse(model, "the method is abstract")
        if callable(getattr(model, "forward_and_log_det", None)):
            forward = model.forward_and_log_det
        if callable(getattr(model, "inverse_and_log_det", None)):
            inverse = model.inverse_and_log_det
        return from_callables(forward, inverse, shape=shape, kind=type(model).__name__), None, "generic"
    if isinstance(model, nn.Module):
        flag = reverse_flag(model.forward)
        if flag is not None:
            return compose([Flagged(model, flag)], shape), None, "generic"
    return None


FLAGS = ("reverse", "rev", "inverse", "invert", "inverted", "reversed")


def reverse_flag(function: Callable[..., Any]) -> str | None:
    """The argument of a callable that turns it round: one of `FLAGS` that is `False` by default, or has no default.

    Example:
        >>> reverse_flag(lambda x, reverse=False: x), reverse_flag(lambda x, rev=3: x)
        ('reverse', None)
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    for name in FLAGS:
        for p in parameters[1:]:
            named = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            if named and p.name == name and (p.default is p.empty or p.default is False):
                return name
    return None


class Callables(Foreign):
    """Two callables; see `from_callables`."""

    def __init__(
        self,
        forward: Callable[..., Any],
        inverse: Callable[..., Any],
        log_det: Callable[..., Any] | None = None,
        inverse_log_det: Callable[..., Any] | None = None,
        *,
        kind: str | None = None,
    ) -> None:
        name = getattr(forward, "__name__", type(forward).__name__) if kind is None else kind
        super().__init__(Function(forward), kind=name)
        self.back = Function(inverse)
        extra = {"forward_log_det": log_det, "inverse_log_det": inverse_log_det}
        given = {key: function for key, function in extra.items() if function is not None}
        self.extra = nn.ModuleDict({key: Function(function) for key, function in given.items()})
        named = {"forward": forward, "inverse": inverse, **given}
        self._names = {key: context_name(_signature(function)) for key, function in named.items()}
        self._arguments = _arguments(inverse)
        self._layout: list[tuple[int, ...]] | None = None
        self._sequence: type = tuple

    @property
    def takes_context(self) -> bool:
        """Whether the forward callable has an argument for a context."""
        return self._names["forward"] is not None

    def encode(self, x: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        parts, value = _read(call(self.module, x, context, self._names["forward"]), x)
        if len(parts) > 1:
            self._layout = [tuple(part.shape[1:]) for part in parts]
            self._sequence = parts.kind
        else:
            self._layout = None
        if value is None and "forward_log_det" in self.extra:
            value = self._extra("forward_log_det", x, context) if log_det else None
        elif value is None:
            self.has_log_det = False
        return parts.joined(), value

    def decode(self, z: Tensor, context: Tensor | None, *, log_det: bool) -> tuple[Tensor, Any]:
        name = self._names["inverse"]
        if self._layout is None:
            out = call(self.back, z, context, name)
        elif 1 < len(self._layout) <= self._arguments:  # it takes the parts as arguments of their own
            given = {name: context} if name in CONTEXT_NAMES and context is not None else {}
            out = self.back(*split_parts(z, self._layout), **given)
        else:
            out = call(self.back, self._sequence(split_parts(z, self._layout)), context, name)
        parts, value = _read(out, z)
        if value is None and log_det and "inverse_log_det" in self.extra:
            value = self._extra("inverse_log_det", z, context)
        return parts.joined(), value

    def _extra(self, name: str, x: Tensor, context: Tensor | None) -> Tensor:
        value = call(self.extra[name], x, context, self._names[name])
        return value.flatten(1).sum(1) if isinstance(value, Tensor) and value.ndim > 1 else value

    def reshapes(self) -> bool:
        return True


class Flagged(Callables):
    """A module that is turned round by an argument of its forward: `model(z, reverse=True)`.

    Args:
        model: The module.
        flag: Name of the argument.

    Example:
        >>> import torch
        >>> class Double(nn.Module):
        ...     def forward(self, x, reverse=False):
        ...         return x / 2 if reverse else 2 * x
        >>> block = Flagged(Double(), "reverse")
        >>> block.inverse(torch.ones(1, 2)), block.called
        (tensor([[0.5000, 0.5000]]), 'Double(x, reverse=False) and Double(z, reverse=True)')
    """

    def __init__(self, model: nn.Module, flag: str) -> None:
        kind = type(model).__name__
        super().__init__(_Turned(model, flag, False), _Turned(model, flag, True), kind=kind)
        name = context_name(_without(model.forward, flag))
        self._names |= {"forward": name, "inverse": name}
        self.called = f"{kind}(x, {flag}=False) and {kind}(z, {flag}=True)"


class _Turned(nn.Module):
    """A module with its flag set."""

    def __init__(self, model: nn.Module, flag: str, value: bool) -> None:
        super().__init__()
        self.model, self.flag, self.value = model, flag, value

    def forward(self, x: Any, **given: Any) -> Any:
        return self.model(x, **{self.flag: self.value}, **given)


def _without(function: Callable[..., Any], flag: str) -> Callable[..., Any]:
    """A callable with the signature of another, one argument less."""

    def bare(*args: Any, **kwargs: Any) -> None:
        """Only its signature is looked at."""

    signature = inspect.signature(function)
    bare.__signature__ = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != flag])  # type: ignore[attr-defined]
    return bare


class _Parts(list):
    """Latents as they came, with the kind of sequence they came in."""

    kind: type = tuple

    def joined(self) -> Any:
        return self[0] if len(self) == 1 else join_parts(self)


def _read(out: Any, x: Tensor) -> tuple[_Parts, Any]:
    """Tell latents from a log-determinant: the latents of a bijection have as many entries as its input."""
    if not isinstance(out, (tuple, list)):
        return _Parts([out]), None
    values = list(out)
    if values and isinstance(values[0], (tuple, list)):
        parts, rest = _Parts(values[0]), values[1:]
        parts.kind = type(values[0])
        return parts, rest[0] if rest else None
    total = 0
    for k, value in enumerate(values):
        total += value.numel() if isinstance(value, Tensor) else 0
        if total == x.numel():
            parts = _Parts(values[: k + 1])
            parts.kind = type(out)
            return parts, values[k + 1] if k + 1 < len(values) else None
    return _Parts([values[0]]), None


def _signature(function: Any) -> Callable[..., Any]:
    return function.forward if isinstance(function, nn.Module) else function


def _arguments(function: Any) -> float:
    """How many arguments a callable asks for, contexts with a usual name left out; infinity for `*args`."""
    try:
        parameters = list(inspect.signature(_signature(function)).parameters.values())
    except (TypeError, ValueError):
        return 1
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return math.inf
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return len(named[:1]) + len([name for name in named[1:] if name not in CONTEXT_NAMES])


class Function(nn.Module):
    """Registers the modules that a callable uses: it may be one, a method or partial of one, or a function that names some.

    Args:
        function: The callable.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> double = copy.deepcopy(Function(lambda x: layer(x) + 1)).double()
        >>> double(torch.zeros(1, 2, dtype=torch.float64)).dtype, layer.weight.dtype
        (torch.float64, torch.float32)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["function"] = function
        for name, module in _modules(function).items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["function"](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        parts = {name: copy.deepcopy(module, memo) for name, module in _modules(self.__dict__["function"]).items()}
        new = Function(_rebuilt(self.__dict__["function"], parts, memo))
        new.train(self.training)
        memo[id(self)] = new
        return new

    def _get_name(self) -> str:
        return f"Function[{getattr(self.__dict__['function'], '__qualname__', type(self.function).__name__)}]"


def _modules(function: Any) -> dict[str, nn.Module]:
    """The modules that a callable uses, by name."""
    if isinstance(function, nn.Module):
        return {"module": function}
    if isinstance(function, MethodType):
        return {"module": function.__self__} if isinstance(function.__self__, nn.Module) else {}
    if isinstance(function, functools.partial):
        parts = enumerate((function.func, *function.args, *function.keywords.values()))
        return {f"{name}_{k}": module for k, part in parts for name, module in _modules(part).items()}
    if not isinstance(function, FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    named = {name: _contents(cell) for name, cell in cells}
    named |= {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    return {name: value for name, value in named.items() if isinstance(value, nn.Module)}


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _rebuilt(function: Any, parts: dict[str, nn.Module], memo: dict[int, Any]) -> Any:
    """The same callable on other modules."""
    if not isinstance(function, FunctionType):
        return copy.deepcopy(function, memo)
    if not parts:
        return function
    cells = tuple(
        CellType(parts[name]) if name in parts else cell
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    names = {**function.__globals__, **parts} if any(name in function.__globals__ for name in parts) else None
    new = FunctionType(
        function.__code__, names or function.__globals__, function.__name__, function.__defaults__, cells
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new


_ORDERS = ("t,x", "x,t", "x", "cat")


def from_vector_field(
    field: nn.Module, *, order: str | None = None, data_at: str = "start", **options: Any
) -> Bijection:
    r"""The flow of $\dot x = f(t, x)$ from time 0 to `time` as a bijection.

    Args:
        field: The vector field, a module.
        order: How it is called: `"t,x"` as in torchdiffeq, `"x,t"`, `"x"` without time, or `"cat"` on x and t in one
            tensor as in torchcfm's MLP. By default what the names of its arguments say.
        data_at: `"start"` if data lies at time 0, as in FFJORD; `"end"` if it lies at the end, as in flow matching.
        options: `time`, `method`, `rtol`, `atol`, `trace`, `options` and `adjoint` of `bilip.blocks.NeuralODE`.

    Example:
        >>> import torch
        >>> class Field(nn.Module):
        ...     def forward(self, t, x):
        ...         return -x * t
        >>> flow = from_vector_field(Field(), rtol=1e-6, atol=1e-6)
        >>> x = torch.ones(1, 2)
        >>> bool(torch.allclose(flow(x), torch.exp(torch.tensor(-0.5)) * x, atol=1e-4))
        True
    """
    if not isinstance(field, nn.Module):
        raise InputError(
            f"from_vector_field: expected an nn.Module, got {type(field).__name__}. Wrap a function in one."
        )
    order = _guess(field) if order is None else order
    if order not in _ORDERS or data_at not in ("start", "end"):
        raise InputError(
            f"from_vector_field(order={order!r}, data_at={data_at!r}): expected an order of {', '.join(_ORDERS)} and "
            "data_at 'start' or 'end'."
        )
    net: nn.Module = Joint(field, 1) if order == "cat" else _Timed(field, order)
    if order == "x":  # a second argument, which may be left out, is not the time
        net = nn.Sequential(field) if takes_context(field) else field
    block = NeuralODE(net, **options)
    return Invert(block) if data_at == "end" else block


class _Timed(nn.Module):
    """A field with the time as one number, called by bilip with a time for each sample."""

    def __init__(self, field: nn.Module, order: str) -> None:
        super().__init__()
        self.field, self.order = field, order

    def forward(self, x: Tensor, clock: Tensor) -> Tensor:
        t = clock.flatten()[0]
        return self.field(t, x) if self.order == "t,x" else self.field(x, t)


def _guess(field: nn.Module) -> str:
    names = [p.name for p in inspect.signature(field.forward).parameters.values() if p.default is p.empty]
    if len(names) == 1:
        return "x"
    if len(names) >= 2 and names[0].startswith("t"):
        return "t,x"
    if len(names) >= 2 and names[1].startswith("t"):
        return "x,t"
    raise InputError(
        f"from_vector_field: the arguments ({', '.join(names)}) of {type(field).__name__} do not say which one is the time. "
        "Pass order='t,x', 'x,t', 'x' or 'cat'."
    )
