"""Evaluating a net a second time as it was evaluated the first: randomness, BatchNorm statistics, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bilip._torch import capturing

__all__ = [
    "Advance",
    "Conditions",
    "Seeds",
    "Snapshot",
    "as_recorded",
    "batch_norms",
    "buffers_again",
    "draws_numbers",
    "evaluating",
    "frozen_statistics",
    "hooks_wait",
    "leaves_behind",
    "modes_again",
    "saves_by_hooks",
    "versions_of",
]


@dataclass(frozen=True)
class Conditions:
    """The autocast state of a call, to be restored in its backward pass.

    Never with autocast's cache of weights: a cast that is made while no gradients are recorded has none when the region uses it again.
    """

    device: str
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, x: Tensor) -> Conditions:
        """The conditions of this moment."""
        kind = x.device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> contextlib.AbstractContextManager[object]:
        """A context with these conditions."""
        if not self.autocast and not torch.is_autocast_enabled(self.device):
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.autocast, cache_enabled=False)


class Seeds:
    """The state of the random generators before each unit that draws from them."""

    def __init__(self, x: Tensor) -> None:
        self.device, self.recorded = x.device, capturing(x)
        self.states: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.last: tuple[Tensor, Tensor | None] | None = None

    def begin(self) -> None:
        """Take note of the state before the first unit."""
        self.last = self._now()
        if self.last is not None:
            self.states[-1] = self.last

    def rewind(self) -> None:
        """The generators as they were before the first unit."""
        if -1 in self.states:
            self._restore(-1)

    def _restore(self, k: int) -> None:
        host, on_device = self.states[k]
        torch.set_rng_state(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self.device)

    def remember(self, k: int) -> None:
        """Keep the present state under `k`."""
        now = self._now()
        if now is not None:
            self.states[k] = now

    def moved(self, k: int) -> bool:
        """After unit `k`: did it draw numbers? Then the state before it is kept, whatever its modules say of themselves."""
        before, self.last = self.last, self._now()
        if before is None or self.last is None:
            return False
        same = torch.equal(before[0], self.last[0])
        if before[1] is not None and self.last[1] is not None:
            same = same and torch.equal(before[1], self.last[1])
        if not same:
            self.states[k] = before
        return not same

    def _now(self) -> tuple[Tensor, Tensor | None] | None:
        """The present state; none while a CUDA graph is captured, which cannot be asked."""
        if self.recorded:
            return None
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    @contextlib.contextmanager
    def again(self, k: int) -> Iterator[None]:
        """The state of unit `k` inside, the present one afterwards."""
        if k not in self.states:
            yield
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            self._restore(k)
            yield


def draws_numbers(module: nn.Module) -> bool:
    """Whether a module draws random numbers in its present mode: dropout in training mode, or `stochastic = True` on it."""
    return any(
        (isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0)
        or getattr(part, "stochastic", False)
        for part in module.modules()
    )


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The BatchNorms that would update their running statistics."""
    return [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training and part.track_running_stats
    ]


@contextlib.contextmanager
def frozen_statistics(norms: list[nn.Module]) -> Iterator[None]:
    """These BatchNorms normalise with the batch as before, and leave their running statistics alone."""
    for part in norms:
        part.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for part in norms:
            part.track_running_stats = True  # type: ignore[assignment]


@dataclass(frozen=True)
class Advance:
    """A buffer that a call has moved on, as the vectors of a spectral norm do, and what it held before."""

    module: nn.Module
    name: str
    before: Tensor

    def undo(self) -> None:
        """What it held before, once more."""
        buffer = self.module._buffers.get(self.name)
        if buffer is not None and buffer.shape == self.before.shape and buffer.dtype == self.before.dtype:
            buffer.data.copy_(self.before)  # past autograd: no graph of another call may take this for a change
        else:
            self.module._buffers[self.name] = self.before.clone()


class Snapshot:
    """The buffers of some modules as they are now, to see which of them a call moves on.

    Left out are those of bilip's own blocks and nets, which no call moves, and running statistics, unless they are asked for: these
    are frozen in another way.
    """

    def __init__(self, modules: Iterable[nn.Module], *, statistics: bool = False) -> None:
        self.held = [
            (part, name, buffer, buffer.detach().clone(), buffer._version)
            for module in modules
            for part in module.modules()
            if not _is_still(part) and (statistics or not isinstance(part, nn.modules.batchnorm._BatchNorm))
            for name, buffer in part._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def advances(self) -> list[Advance]:
        """Those that are other ones now."""
        return [
            Advance(part, name, before)
            for part, name, buffer, before, version in self.held
            if part._buffers.get(name) is not buffer
            or buffer._version != version
            or isinstance(part, nn.modules.batchnorm._NormBase)  # their kernels write past the count of versions
        ]


def _is_still(part: nn.Module) -> bool:
    hooked = part._forward_pre_hooks or part._forward_hooks  # a hook may keep a buffer of its own there
    return type(part).__module__.startswith("bilip.") and not hooked


@contextlib.contextmanager
def buffers_again(advances: Sequence[Advance]) -> Iterator[None]:
    """What they held before the call, inside; what they hold now, afterwards."""
    now = []
    for one in advances:
        buffer = one.module._buffers.get(one.name)
        now.append((buffer, None if buffer is None else buffer.detach().clone()))
        one.undo()
    try:
        yield
    finally:
        for one, (buffer, value) in zip(advances, now, strict=True):
            one.module._buffers[one.name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(value)


def versions_of(module: nn.Module, advancing: Collection[tuple[nn.Module, str]]) -> dict[str, tuple[Tensor, int]]:
    """Frozen parameters and buffers with their versions; under hooks for saved tensors, where autograd does not look, those that are
    trained too. Not among them: running statistics, which are not used in training mode, and buffers that move on with every call.
    """
    hooked = saves_by_hooks()
    moving = {id(part._buffers.get(name)) for part, name in advancing} | {
        id(buffer)
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.training
        for buffer in part.buffers(recurse=False)
    }
    frozen = [(name, p) for name, p in module.named_parameters() if hooked or not p.requires_grad]
    still = [(name, b) for name, b in module.named_buffers() if id(b) not in moving]
    return {name: (t, t._version) for name, t in (*frozen, *still) if not t.is_inference()}


def saves_by_hooks() -> bool:
    """Whether a hook of the caller sees the tensors that autograd saves (`torch.autograd.graph.saved_tensors_hooks`)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]


@contextlib.contextmanager
def modes_again(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Training or evaluation mode as it was at the call."""
    changed = [(module, module.training) for module, mode in modes if module.training != mode]
    for module, mode in modes:
        module.training = mode
    try:
        yield
    finally:
        for module, mode in changed:
            module.training = mode


@contextlib.contextmanager
def as_recorded() -> Iterator[None]:
    """Inside, nets compute the same whether gradients are recorded or not.

    `torch.nn.utils.parametrize.cached` does nothing: a weight that is kept while no gradients are recorded has none later, and copies of a
    layer are given what is kept of the layer itself. Transformers in evaluation mode do not take the way that torch has for them without
    gradients, which gives other numbers at padded positions.
    """
    before: int = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    _slow.enter()
    try:
        yield
    finally:
        parametrize._cache_enabled = before
        _slow.leave()


class _Slow:
    """Transformers off the fast path, as long as any thread is inside."""

    def __init__(self) -> None:
        self.inside, self.before = 0, True

    def enter(self) -> None:
        if not self.inside:
            self.before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside:
            torch.backends.mha.set_fastpath_enabled(self.before)


_slow = _Slow()


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and the mode of every part as it was afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def leaves_behind(outputs: Iterable[Tensor], known: Collection[Tensor]) -> list[Tensor]:
    """The leaves that ask for gradients and that outputs depend on by ways that do not lead through known tensors.

    Example:
        >>> weight, x = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> leaves_behind([weight * x], [x])[0] is weight
        True
    """
    have, seen, found = {id(tensor) for tensor in known}, {tensor.grad_fn for tensor in known}, []
    ahead = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while ahead:
        node: Any = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ != "AccumulateGrad":
            ahead += [after for after, _ in node.next_functions if after is not None]
        elif id(node.variable) not in have:
            found.append(node.variable)
    return found


@contextlib.contextmanager
def hooks_wait(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the hooks of these tensors (`Tensor.register_hook`) do not run: what is differentiated inside a backward pass is a part of
    a gradient, and the hooks see the whole of it when that arrives.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> _ = weight.register_hook(lambda grad: 10 * grad)
        >>> with hooks_wait([weight]):
        ...     part = torch.autograd.grad((2 * weight).sum(), weight)[0]
        >>> part, torch.autograd.grad((2 * weight).sum(), weight)[0]
        (tensor([2.]), tensor([20.]))
    """
    waiting = [(tensor._backward_hooks, dict(tensor._backward_hooks)) for tensor in tensors if tensor._backward_hooks]
    for hooks, _ in waiting:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in waiting:
            hooks.update(before)
