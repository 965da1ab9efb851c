"""Small things that every room needs, once: names and halves of dtypes, rows of contexts, transforms,
values that are kept while they are right, and flags of captured steps.

A step that is recorded as a CUDA graph may not stop to look at a number, so what goes on in it raises a `Flag`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "EvalCache",
    "Flag",
    "Replayed",
    "can_be_read",
    "can_record",
    "capturing",
    "deepcopy_memo",
    "dtype_name",
    "half_digits",
    "has_room",
    "is_transformed",
    "keeping",
    "noting",
    "rows",
    "setting",
    "version_of",
]

T = TypeVar("T")
_KEEPING: ContextVar[bool] = ContextVar("keeping", default=False)


class setting(Generic[T]):
    """A context in which a context variable has a value, and afterwards the one that it had before.

    Example:
        >>> with setting(_KEEPING, True):
        ...     keeping()
        True
    """

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self.variable, self.value = variable, value

    def __enter__(self) -> None:
        self.token = self.variable.set(self.value)

    def __exit__(self, *error: object) -> None:
        self.variable.reset(self.token)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the module in front.

    Example:
        >>> dtype_name(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")


def half_digits(dtype: torch.dtype) -> float:
    """The root of machine epsilon: a relative error that leaves half of the digits of a dtype right, 3.5e-4 in float32.

    Example:
        >>> half_digits(torch.float64) == 2.0**-26
        True
    """
    return math.sqrt(torch.finfo(dtype).eps)


@overload
def rows(context: Tensor, count: int) -> Tensor: ...
@overload
def rows(context: Tensor | None, count: int) -> Tensor | None: ...
def rows(context: Tensor | None, count: int) -> Tensor | None:
    """A context for each of `count` samples; one context serves a sample that was repeated.

    Example:
        >>> rows(torch.ones(1, 3), 5).shape, rows(None, 5)
        (torch.Size([5, 3]), None)
    """
    return context if context is None or len(context) == count else context.expand(count, *context.shape[1:])


def is_transformed(x: Tensor | None = None) -> bool:
    """Whether a compiler, torch.func or forward mode is at work; with a tensor, forward mode counts only where that has a tangent.

    Example:
        >>> is_transformed()
        False
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        return True
    return forward_ad._current_level >= 0 and (x is None or forward_ad.unpack_dual(x).tangent is not None)


def capturing(x: Tensor) -> bool:
    """Whether what happens to a tensor now is recorded, to be replayed with other numbers.

    Example:
        >>> capturing(torch.zeros(2))
        False
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def can_be_read(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor can be looked at here: not while tracing, transforming, or capturing a CUDA graph.

    Example:
        >>> can_be_read(torch.zeros(2))
        True
    """
    return not is_transformed() and not capturing(tensor)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, as far as torch counts; -1 for an inference tensor, which has no count."""
    return -1 if tensor.is_inference() else tensor._version


def deepcopy_memo(module: nn.Module) -> dict[int, Any]:
    """What `copy.deepcopy` is told about tensors with a graph, which libraries keep from the last call and which it refuses to copy."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    left: list[Any] = list(module.modules())
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_leaf:
                found[id(value)] = value.detach().clone()
        elif isinstance(value, (list, tuple, set)):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (nn.Module, torch.distributions.Transform, torch.distributions.Distribution)):
            left.extend(vars(value).values())
    return found


class EvalCache:
    """Keeps `compute(weight)` in evaluation mode, for as long as `weight` holds the same numbers and no gradient goes to it: under
    `no_grad`, or where it is frozen.

    The key is the values themselves, not a version counter: writing through `weight.data` moves no counter. What is kept is handed
    out, and computed anew once somebody has written into it.
    """

    def __init__(self) -> None:
        # the weight, and values of it with their versions
        self._kept: tuple[Tensor, dict[Callable[[Tensor], Tensor], tuple[Tensor, int]]] | None = None

    def get(self, owner: nn.Module, weight: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The value for `weight`, from the cache when that is allowed and right."""
        return self.get_all(owner, weight, (compute,))[0]

    def get_all(self, owner: nn.Module, weight: Tensor, computes: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
        """`get` for several values of one weight, which is compared once: on a device, that has to be waited for."""
        learns = torch.is_grad_enabled() and weight.requires_grad
        if keeping() and capturing(weight) and not (owner.training or learns) and self._holds(weight, computes):
            return [self._kept[1][compute][0] for compute in computes]  # type: ignore[index]
        if owner.training or learns or not can_be_read(weight):
            self.clear()
            return [compute(weight) for compute in computes]
        kept = self._kept  # once: other threads may empty or replace it meanwhile
        if kept is None or not _same(kept[0], weight):
            kept = self._kept = weight.detach().clone(), {}
        values, found = kept[1], []
        for compute in computes:
            value = values.get(compute)
            if value is None or version_of(value[0]) != value[1]:
                # Inference tensors would have no version, and could take no part in a graph later. Leaving that mode turns gradients on.
                with torch.inference_mode(False), torch.no_grad():
                    made = compute(weight)
                value = values[compute] = made, version_of(made)
            found.append(value[0])
        return found

    def _holds(self, weight: Tensor, computes: Sequence[Callable[[Tensor], Tensor]]) -> bool:
        """Whether there are values for a weight like this one, whose numbers cannot be read."""
        if self._kept is None or is_transformed():
            return False
        key, values = self._kept
        alike = key.device == weight.device and key.dtype == weight.dtype and key.shape == weight.shape
        return alike and all(compute in values for compute in computes)

    def clear(self) -> None:
        """Forget what is kept."""
        self._kept = None

    def __deepcopy__(self, memo: dict) -> EvalCache:
        return EvalCache()

    def __reduce__(self):
        return (EvalCache, ())


def _same(key: Tensor, weight: Tensor) -> bool:
    return key.device == weight.device and key.dtype == weight.dtype and torch.equal(key, weight)


class Flag:
    """A number on the device. Above 1, the step that raised it has to be run again without its graph.

    Args:
        owner: What raises it, and keeps counts on the host that a replay does not move.

    Example:
        >>> flag = Flag()
        >>> flag.raise_to(torch.tensor(3.0))
        >>> float(flag.on(torch.device("cpu")))
        3.0
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        self.value: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The number, 0 before it is raised."""
        if self.value is None or self.value.device != device:
            self.value = torch.zeros((), dtype=torch.float64, device=device)
        return self.value

    def raise_to(self, number: Tensor) -> None:
        """Raise it, unless it is higher already."""
        self.note()
        value = self.on(number.device)
        value.copy_(torch.maximum(value, number))

    def raise_unless(self, good: Tensor) -> None:
        """Raise it to infinity where something is not as it should be."""
        self.raise_to(torch.where(good, 0.0, torch.inf))

    def note(self) -> None:
        """Tell who listens that this flag has a part in the step."""
        for flags in _LISTENING:
            if all(flag is not self for flag in flags):
                flags.append(self)


_LISTENING: list[list[Flag]] = []  # for all threads: on a GPU backward passes run in one of their own


@contextlib.contextmanager
def noting(flags: list[Flag]) -> Iterator[None]:
    """Add to a list the flags that have a part in what happens inside."""
    _LISTENING.append(flags)
    try:
        yield
    finally:
        _LISTENING.remove(flags)


def keeping() -> bool:
    """Whether what is recorded now may read values that were computed before: no weight changes between its replays."""
    return _KEEPING.get()


def can_record(*tensors: Tensor) -> bool:
    """Whether work on these tensors can be recorded as a CUDA graph now.

    Example:
        >>> can_record(torch.zeros(2))
        False
    """
    return all(t.is_cuda for t in tensors) and not torch.cuda.is_current_stream_capturing()


def has_room(x: Tensor) -> bool:
    """Whether at least half of the memory of a tensor's device is free: a recording keeps what it works in.

    Example:
        >>> has_room(torch.zeros(2))
        True
    """
    if not x.is_cuda:
        return True
    free, total = torch.cuda.mem_get_info(x.device)
    return 2 * free >= total


class Replayed:
    """A function of tensors that is called many times, while no weight changes: on a GPU its launches are recorded, then replayed at once.

    Thousands of small launches keep the host busy for longer than the device. The first call, and the second, run as they are. Then the
    function is recorded with the tensors of the first and replayed with those of the second, and if that gives what the second call gave,
    all others with these shapes are replays. Otherwise, and where the function cannot be recorded, for instance because it looks at a
    number, all calls run as they are.

    Args:
        function: What is recorded; it gives a tensor or a tuple of tensors, without gradients, and draws no random numbers.
        plain: The same, for calls that run as they are; by default the function itself.

    Attributes:
        replays: How many calls were replays.
        failed: Why there are none; empty if there may be.

    Example:
        >>> double = Replayed(lambda x: 2 * x)
        >>> [double(torch.full((1,), k)).item() for k in (1.0, 2.0, 3.0)], double.replays
        ([2.0, 4.0, 6.0], 0)
    """

    def __init__(self, function: Callable[..., Any], plain: Callable[..., Any] | None = None) -> None:
        self.function, self.plain = function, plain or function
        self.replays, self.failed = 0, ""
        self._inputs: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: Any = None

    @property
    def recorded(self) -> bool:
        """Whether calls are replays from now on."""
        return self._graph is not None

    def __call__(self, *inputs: Tensor) -> Any:
        if self.failed or not can_record(*inputs):
            return self.plain(*inputs)
        if not self._inputs:
            found = self.plain(*inputs)
            self._inputs = [x.detach().clone() for x in inputs]
            return found
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(self._inputs, inputs, strict=True)):
            return self.plain(*inputs)
        if self._graph is not None:
            self.replays += 1
            return self._replay(self._graph, inputs)
        found = self.plain(*inputs)
        self._record(inputs, found)
        return found

    def _record(self, inputs: tuple[Tensor, ...], found: Any) -> None:
        with torch.cuda.device_of(inputs[0]), setting(_KEEPING, True):
            stream = torch.cuda.current_stream()
            try:
                graph = self._recording(stream)
                again = self._replay(graph, inputs)
                if all(_alike(a, b) for a, b in zip(_each(found), _each(again), strict=True)):
                    self._graph = graph
                else:
                    self.failed = "a replay gave other numbers"
            except BaseException as error:
                cause = error.__context__ or error  # a graph that was broken off says nothing of the reason
                self.failed = str(cause) or type(cause).__name__
                torch.cuda.set_stream(stream)  # such a graph leaves its own
                torch.cuda.synchronize()
                if not isinstance(cause, Exception):
                    raise cause from None
        if self.failed:
            self._found = None

    def _recording(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):  # what libraries allocate at a first call on another stream
            self.function(*self._inputs)
        stream.wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._found = self.function(*self._inputs)
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, inputs: tuple[Tensor, ...]) -> Any:
        for static, x in zip(self._inputs, inputs, strict=True):
            static.copy_(x)
        graph.replay()
        copies = tuple(value.clone() for value in _each(self._found))
        return copies if isinstance(self._found, tuple) else copies[0]


def _each(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    size = float(torch.where(torch.isfinite(a), a, 0.0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * size, equal_nan=True)
