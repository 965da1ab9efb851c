"""What went non-finite first: the step, the sample, the block and the operation, forward or backward."""

from __future__ import annotations

import contextlib
import copy
import functools
import linecache
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from bilip._torch import deepcopy_memo
from bilip.adapters import Adapted, adapt
from bilip.adapters.foreign import reference
from bilip.auditing.probes.blame import kind_of
from bilip.cures.tuning import first_of, moved, scalar
from bilip.errors import BilipError, InputError, said_by

__all__ = ["Diagnosis", "diagnose"]

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Diagnosis:
    """Where numbers stopped being finite.

    Attributes:
        found: Whether anything is not finite.
        where: `forward`, `backward`, `parameters` (they were not finite to begin with), `input`, or `raised` for an exception.
        block: Path of the block, as an audit names it; empty outside of blocks.
        kind: Its class.
        module: Path of the innermost module, as the library names it.
        operation: What was computed: the name of torch's function, or of the exception.
        line: The line of code.
        sample: Index in the batch of the first sample that it hit; `None` where an operation mixes samples.
        inputs: Of each tensor that went in: its range, and the values at the place where the result is not finite.
        value: What came out there.
        in_float64: Whether the same happens in float64, with the same weights; `None` if that could not be tried.
        remedy: What to do.
        step: Step of training, where it was watched.

    Example:
        >>> import bilip, torch
        >>> flow = bilip.Flow(bilip.models.real_nvp(2, blocks=3, scale="exp"))
        >>> with torch.no_grad():
        ...     _ = flow.bijection[1].t.layers[-1].bias.fill_(100.0)
        >>> found = bilip.diagnose(flow, torch.zeros(4, 2))
        >>> found.where, found.block, found.operation, found.in_float64
        ('forward', '1', 'exp', False)
    """

    found: bool
    where: str = ""
    block: str = ""
    kind: str = ""
    module: str = ""
    operation: str = ""
    line: str = ""
    sample: int | None = None
    inputs: tuple[dict[str, Any], ...] = ()
    value: float | None = None
    in_float64: bool | None = None
    remedy: str = ""
    step: int | None = None

    def __str__(self) -> str:
        if not self.found:
            return "everything is finite."
        at = f"block {self.block} ({self.kind})" if self.block else self.module or "outside of the blocks"
        step = "" if self.step is None else f"step {self.step}: "
        sample = "" if self.sample is None else f", sample {self.sample}"
        wide = {True: " float64 has it too.", False: " float64 does not have it.", None: ""}[self.in_float64]
        around = "; ".join(
            f"{row['name']} from {row['low']:.3g} to {row['high']:.3g}, there {row['there']:.4g}"
            for row in self.inputs[:3]
        )
        around = f" Its input: {around}." if around else ""
        line = f" ({self.line})" if self.line else ""
        text = (
            f"{step}{self.where}, {at}, {self.operation}{line}{sample} gives {self.value}.{around}{wide} {self.remedy}"
        )
        return text.strip()

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def diagnose(
    model: Any,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    latents: Tensor | None = None,
    float64: bool = True,
    step: int | None = None,
) -> Diagnosis:
    """Find where a loss, a gradient or a sample stopped being finite, by running the batch again on a copy, operation by operation.

    Args:
        model: The model, in the mode in which it failed; anything `as_bijection` takes. It is not changed.
        batch: The batch, as the loss takes it.
        loss: `loss(model, batch)`; by default the negative log-likelihood of a flow, else the squares of the latents. Its gradient is
            looked at too.
        latents: Instead of a batch: latents whose decoding is not finite.
        float64: Whether to look if float64 has it too.
        step: Step of training, to be stated.

    Example:
        >>> import bilip, torch
        >>> bilip.diagnose(bilip.models.real_nvp(2), torch.zeros(4, 2)).found
        False
    """
    if (batch is None) == (latents is None):
        raise InputError("diagnose: pass a batch, or latents=, and not both.")
    again = _Again(model, batch, latents, loss)
    found = again()
    if found.found and float64 and found.where not in ("parameters", "input"):
        try:
            again64 = again(torch.float64)
            # one that raises there alone, say for a dtype that a loss has fixed, says nothing
            wide = None if again64.where == "raised" != found.where else again64.found
        except Exception:  # a model or a loss that does not run in float64
            wide = None
        found = replace(found, in_float64=wide)
    return replace(found, step=step, remedy=_remedy(found))


_MOST_ORIGINS = 8  # operations that are mended, one after the other
_OWN = ("cures/diagnose.py", "cures/watching.py")  # files whose lines are no answer to where it happened


class _Again:
    """Runs the batch again, on a copy, with the random numbers that would be drawn next; the caller's stay.

    Args:
        model: The model.
        batch: The batch, or `None` for latents.
        latents: Latents to decode, or `None`.
        loss: The user's loss, or `None`.
    """

    def __init__(self, model: Any, batch: Any, latents: Tensor | None, loss: Loss | None) -> None:
        self.model, self.loss = model, loss
        self.adapted = model if isinstance(model, Adapted) else adapt(model)
        self.given, self.decoding = latents if batch is None else batch, latents is not None
        self.devices = {t.device for t in (*self.adapted.bijection.parameters(), *self.adapted.bijection.buffers())}

    def __call__(self, dtype: torch.dtype | None = None) -> Diagnosis:
        """Where it began; in another dtype, and then without autocast, where that is given."""
        found, origins = self._once(dtype)
        if len(origins) < 2 or not any(found is origin for origin in origins.values()):
            return found
        # Several results are not finite though their inputs are, and some may be masked out later. The one that matters is the one
        # without which the loss would be finite.
        for index, origin in list(origins.items())[:_MOST_ORIGINS]:
            if not self._once(dtype, mended=index)[0].where.startswith(("forward", "raised")):
                return origin
        return found

    def _once(self, dtype: torch.dtype | None, mended: int | None = None) -> tuple[Diagnosis, dict[int, Diagnosis]]:
        """What began first, and all operations whose result is not finite though their inputs are, by their number."""
        with torch.random.fork_rng(devices=[d for d in self.devices if d.type == "cuda"]):
            if dtype is None:
                return self._run(None, mended)
            with contextlib.ExitStack() as stack:
                for kind in {"cpu", *(device.type for device in self.devices)} - {"meta"}:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                return self._run(dtype, mended)

    def _run(self, dtype: torch.dtype | None, mended: int | None) -> tuple[Diagnosis, dict[int, Diagnosis]]:
        try:
            native = copy.deepcopy(self.model, deepcopy_memo(self.adapted.bijection))
        except Exception as error:
            raise InputError(
                f"diagnose: {type(self.model).__name__} cannot be copied ({said_by(error)}). Make copy.deepcopy(model) work."
            ) from error
        adapted = native if isinstance(native, Adapted) else adapt(native)
        target: Any = native if isinstance(native, nn.Module) else adapted.bijection
        like = reference(target)
        if dtype is not None:
            target.to(dtype)
            base = getattr(adapted.base, "module", None)
            if isinstance(base, nn.Module):
                base.to(dtype)
            like = like.to(dtype)
        names = _Names(native, adapted)
        given = moved(self.given, like)
        broken = _broken_weights(target, names) or _broken_batch(given)
        if not any(parameter.requires_grad for parameter in target.parameters()):  # else frozen ones have no gradient
            for parameter in target.parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_(True)
        first = first_of(given)
        operations = _Operations(names, len(first) if isinstance(first, Tensor) and first.ndim else 0, mended)
        try:
            with operations, torch.enable_grad():
                decode = adapted.bijection.inverse
                total = decode(given).square().sum() if self.decoding else _loss(self.loss, native, adapted, given)
        except (BilipError, KeyboardInterrupt, torch.OutOfMemoryError):
            if broken is not None:
                return broken, {}
            raise
        except Exception as error:  # of the model, or of a distribution that was given what is not finite already
            return broken or next(iter(operations.origins.values()), None) or _raised(error, names), operations.origins
        if not _is_finite(total):
            unknown = Diagnosis(True, "forward", operation="loss", value=float(total.detach()))
            return broken or operations.first or unknown, operations.candidates
        # else what was not finite was masked out, or never used
        found = _backward(total, operations) if total.requires_grad else Diagnosis(False)
        return (broken if broken is not None and found.found else found), {}


def _is_finite(t: Tensor) -> bool:
    """Whether all numbers are. Nothing of it is kept for a backward pass."""
    return bool(torch.isfinite(_bare(t).detach()).all())


def _bare(t: Tensor) -> Tensor:
    """The tensor itself inside `torch.func`: all of a batch, for instance."""
    transforms = torch._C._functorch  # type: ignore[attr-defined]
    while transforms.is_functorch_wrapped_tensor(t):
        t = transforms.get_unwrapped(t)
    return t


def _broken_weights(target: nn.Module, names: _Names) -> Diagnosis | None:
    """The first parameter or buffer that is not finite to begin with."""
    for name, value in (*target.named_parameters(), *target.named_buffers()):
        if value.is_floating_point() and not _is_finite(value) and not _meant(value):
            return _held(name, value, names)
    return None


def _held(name: str, value: Tensor, names: _Names) -> Diagnosis:
    """A parameter or buffer that is not finite."""
    bad = float(value.detach()[~torch.isfinite(value)].flatten()[0])
    return Diagnosis(True, "parameters", *names.block_of_tensor(value), name, "weights", value=bad)


def _broken_batch(given: Any) -> Diagnosis | None:
    """The first entry of a batch that is not finite: of the input, of a context or of a target."""
    for k, part in enumerate(_tensors(given)):
        if part.is_floating_point() and not _is_finite(part):
            where = (~torch.isfinite(part.detach())).nonzero()[0].tolist()
            which = "batch" if k == 0 else f"batch, tensor {k}"
            return Diagnosis(
                True,
                "input",
                operation=which,
                sample=where[0] if where else None,
                value=float(part.detach()[tuple(where)]),
            )
    return None


def _loss(loss: Loss | None, native: Any, adapted: Adapted, given: Any) -> Tensor:
    if loss is not None:
        return scalar(loss(native, given), "diagnose")[0]
    x, context = given if isinstance(given, (tuple, list)) and len(given) == 2 else (first_of(given), None)
    z, log_det = adapted.bijection.forward_and_log_det(x, context)
    if adapted.base is None:
        return (z.flatten(1).square().sum(1) / 2 - log_det).mean()
    return -(adapted.base.log_prob(z, context) + log_det).mean()


def _meant(value: Tensor) -> bool:
    """Whether a tensor may hold infinities on purpose, as a mask or the ends of a range do: no parameter, and no NaN."""
    return not isinstance(value, nn.Parameter) and not bool(torch.isnan(value).any())


class _Names:
    """From objects to the names of modules and blocks."""

    def __init__(self, native: Any, adapted: Adapted) -> None:
        top = native if isinstance(native, nn.Module) else adapted.bijection
        self.modules = {id(part): name for name, part in adapted.bijection.named_modules()}
        self.modules |= {id(part): name for name, part in top.named_modules()}
        self.buffers = {id(value): name for name, value in top.named_buffers()}
        self.blocks: dict[int, tuple[str, str]] = {}
        self.tensors: dict[int, tuple[str, str]] = {}
        for name, part in adapted.bijection.parts():
            for inner in part.modules():
                self.blocks.setdefault(id(inner), (name, kind_of(part)))
                held = inner.__dict__.get("held")
                if held is not None:
                    self.blocks.setdefault(id(held), (name, kind_of(part)))
            for tensor in (*part.parameters(), *part.buffers()):
                self.tensors.setdefault(id(tensor), (name, kind_of(part)))

    def block_of_tensor(self, tensor: Tensor) -> tuple[str, str]:
        """The block that holds a tensor."""
        return self.tensors.get(id(tensor), ("", ""))

    def place(self, frame: FrameType | None) -> tuple[str, str, str, str]:
        """Block, its kind, innermost module and line of code, from the stack of calls."""
        block, kind, module, line = "", "", "", ""
        while frame is not None:
            path = frame.f_code.co_filename
            if not line and not path.endswith(_OWN) and "torch" not in Path(path).parts[:-1]:
                text = linecache.getline(path, frame.f_lineno).strip()
                line = f"{Path(path).name}:{frame.f_lineno} {text[:100]}"
            for owner in _owners(frame):
                if not module and id(owner) in self.modules:
                    module = self.modules[id(owner)]
                if id(owner) in self.blocks:
                    block, kind = self.blocks[id(owner)]
                    return block, kind, module, line
            frame = frame.f_back
        return block, kind, module, line


def _owners(frame: FrameType) -> Iterator[Any]:
    """The object whose method a frame runs, and those that it was built by: zuko's transforms hold a method of a module."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # self, by whatever name
    if owner is None:
        return
    yield owner
    if isinstance(owner, nn.Module):
        return
    for value in list(getattr(owner, "__dict__", {}).values()):
        inner = value.func if isinstance(value, functools.partial) else value
        if isinstance(inner, MethodType):
            yield inner.__self__


class _Operations(TorchFunctionMode):
    """Looks at what every function of torch returns, and keeps the first result that is not finite though its inputs are."""

    SILENT = (
        "isfinite", "isnan", "isinf", "full_like", "full", "empty", "empty_like", "nan_to_num", "where", "masked_fill", "__repr__",
        "clone", "detach", "__get__", "__set__", "copy_", "double", "float", "new_empty", "new_full", "empty_strided", "__setitem__",
        "fill_", "is_floating_point", "size", "dim", "numel", "contiguous",
    )  # fmt: skip
    MASKED = (
        "softmax",
        "log_softmax",
        "logsumexp",
        "cross_entropy",
        "scaled_dot_product_attention",
    )  # take infinities that are meant
    SETTING = (
        "full_like",
        "full",
        "where",
        "masked_fill",
        "new_full",
        "fill_",
        "__setitem__",
    )  # of them: with numbers of the user's

    def __init__(self, names: _Names, count: int, mended: int | None = None) -> None:
        super().__init__()
        self.names, self.count, self.mended = names, count, mended
        self.calls = 0
        self.origins: dict[int, Diagnosis] = {}
        self.masked: dict[int, Diagnosis] = {}
        self.others: dict[int, Diagnosis] = {}
        self.nodes: dict[Any, tuple[str, str, str, str, str]] = {}
        self.busy = False

    @property
    def first(self) -> Diagnosis | None:
        """The first result that is not finite though its inputs are; where there is none, the first candidate."""
        return next(iter(self.candidates.values()), None)

    @property
    def candidates(self) -> dict[int, Diagnosis]:
        """Where no function made it from what is finite: what makes NaN of a row that is masked out, set a constant, or was given it."""
        return self.origins or self.masked | dict(sorted(self.others.items()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy:
            return func(*args, **kwargs)
        name = _short(func)
        self.busy = True
        try:
            # in place, the input is gone afterwards
            before = self._finite(args, kwargs) if _in_place(name) or "out" in kwargs else None
        finally:
            self.busy = False
        out = func(*args, **kwargs)
        self.busy = True
        try:
            self.calls += 1
            if self.calls == self.mended and before is not None and isinstance(args[0], Tensor):
                args[0].data.nan_to_num_(0.0, 0.0, 0.0)
            elif self.calls == self.mended and isinstance(out, Tensor) and out.is_floating_point():
                return out.nan_to_num(0.0, 0.0, 0.0)
            self._look(name, args, kwargs, args[0] if name == "__setitem__" else out, before)
        finally:
            self.busy = False
        return out

    def _finite(self, args: Any, kwargs: Any) -> bool:
        return all(_is_finite(t) for t in _tensors((*args, *kwargs.values())) if t.is_floating_point())

    def _look(self, name: str, args: Any, kwargs: Any, out: Any, before: bool | None) -> None:
        results = [
            t
            for t in (out if isinstance(out, (tuple, list)) else (out,))
            if isinstance(t, Tensor) and t.is_floating_point()
        ]
        if not results or (name in self.SILENT and name not in self.SETTING):
            return
        for result in results:
            if result.grad_fn is not None and result.grad_fn not in self.nodes and name not in self.SILENT:
                self.nodes[result.grad_fn] = (name, *self.names.place(sys._getframe(2)))
        bad = next((t for t in results if not _is_finite(t)), None)
        if bad is None:
            return
        inputs = [t for t in _tensors((*args, *kwargs.values())) if t.is_floating_point()]
        finite = self._finite(args, kwargs) if before is None else before
        kept = self.origins if finite and inputs and name not in self.SILENT else self.others
        if name in self.MASKED and not finite and _has_nan(results) and not _has_nan(inputs):
            kept = self.masked
        if kept is not self.origins and len(kept) >= _MOST_ORIGINS:
            return
        held = next((t for t in inputs if not finite and id(t) in self.names.buffers and not _is_finite(t)), None)
        if held is None or kept is self.masked:
            at = self.names.place(sys._getframe(2))
            kept[self.calls] = self.found("forward", name, at, bad, inputs if before is None else [])
        else:
            kept[self.calls] = _held(self.names.buffers[id(held)], held, self.names)

    def found(
        self, where: str, name: str, at: tuple[str, str, str, str], bad: Tensor, inputs: Sequence[Tensor]
    ) -> Diagnosis:
        """The diagnosis for a result of an operation that is not finite, from where it happened and what went in."""
        bad, (block, kind, module, line) = _bare(bad).detach(), at
        place = (~torch.isfinite(bad)).nonzero()[0].tolist() if bad.ndim else []
        sample = place[0] if place and self.count and bad.shape[0] == self.count else None
        around = tuple(_around(k, _bare(t), place, bad) for k, t in enumerate(inputs[:3]))
        value = float(bad[tuple(place)] if place else bad)
        return Diagnosis(True, where, block, kind, module, name, line, sample, around, value)


def _has_nan(tensors: list[Tensor]) -> bool:
    return any(not _is_finite(torch.where(torch.isinf(t.detach()), 0.0, t.detach())) for t in tensors)


def _short(func: Any) -> str:
    """The name of a function of torch, as users write it."""
    name = (resolve_name(func) or getattr(func, "__name__", str(func))).split(".")[-1]
    return _OPERATORS.get(name, name)


_OPERATORS = {f"__{name}__": name for name in ("pow", "matmul", "mul", "add", "sub")}  # as users write them
_OPERATORS |= {f"__i{name}__": f"{name}_" for name in ("mul", "add", "sub")} | {
    "__itruediv__": "div_",
    "__rpow__": "pow",
}
_OPERATORS |= dict.fromkeys(("__truediv__", "__rtruediv__", "__rdiv__"), "div")


def _in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _around(k: int, t: Tensor, place: list[int], like: Tensor) -> dict[str, Any]:
    """The range of an input, and its value where the result is not finite: for another shape, the largest of that sample."""
    t = t.detach()
    if not t.numel():
        return {"name": f"input {k}", "low": math.nan, "high": math.nan, "there": math.nan}
    try:
        there = float(t.expand(like.shape)[tuple(place)])
    except RuntimeError:
        row = t[place[0]] if place and t.ndim and t.shape[0] == like.shape[0] else t
        there = float(row.flatten()[row.flatten().abs().argmax()])
    return {"name": f"input {k}", "low": float(t.min()), "high": float(t.max()), "there": there}


def _raised(error: Exception, names: _Names) -> Diagnosis:
    """An exception of the model, such as a spline's complaint about its domain."""
    trace: TracebackType | None = error.__traceback__
    last = trace
    while trace is not None:
        last, trace = trace, trace.tb_next
    block, kind, module, line = names.place(None if last is None else last.tb_frame)
    return Diagnosis(True, "raised", block, kind, module, said_by(error, 120), line, value=math.nan)


def _backward(total: Tensor, operations: _Operations) -> Diagnosis:
    """Run the backward pass and find the first node that makes a gradient that is not finite from one that is."""
    first: list[Diagnosis] = []
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(total.grad_fn, None)]
    near: dict[Any, Any] = {}
    while stack:
        node, consumer = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        order.append(node)
        near[node] = node if node in operations.nodes else near.get(consumer)
        stack += [(n, node) for n, _ in node.next_functions]

    def hook(node: Any) -> Callable[[Any, Any], None]:
        def look(made: Any, given: Any) -> None:
            if first:
                return
            bad = next((t for t in made if isinstance(t, Tensor) and t.is_floating_point() and not _is_finite(t)), None)
            if bad is None or any(isinstance(t, Tensor) and not _is_finite(t) for t in given):
                return
            name, *at = operations.nodes.get(near[node]) or ("", "", "", "", "")
            own: Any = torch.autograd.function.BackwardCFunction
            if isinstance(node, own):  # a function of the user's
                name = node.name().removesuffix("Backward")
            inputs = [t for t in given if isinstance(t, Tensor)]
            first.append(operations.found("backward", name or node.name(), (at[0], at[1], at[2], at[3]), bad, inputs))

        return look

    handles = [node.register_hook(hook(node)) for node in order]
    try:
        total.backward()
    except Exception as error:  # a graph that was used up inside the loss
        return Diagnosis(True, "raised", operation=said_by(error, 120), value=math.nan)
    finally:
        for handle in handles:
            handle.remove()
    return first[0] if first else Diagnosis(False)


def _remedy(found: Diagnosis) -> str:
    """What usually helps, by the operation."""
    if not found.found:
        return ""
    name, text = found.operation.lower().rstrip("_"), found.operation.lower() + " " + found.line.lower()
    if found.where == "parameters":
        return "The weights were broken before this batch: load a checkpoint from before, lower the learning rate, clip gradients."
    if found.where == "input":
        return "The batch itself is not finite: clean the data."
    if "actnorm" in found.kind.lower() or ("std" in text and found.where == "forward"):
        return "A feature that is constant in the batch that it starts from: drop it, add noise, or start from a larger batch."
    if found.where == "raised":
        return (
            _SPLINE
            if "domain" in name or "assert" in name or "spline" in found.kind.lower()
            else "The model raised: see the line."
        )
    if found.where == "backward":
        return _DERIVATIVE
    if any(math.isinf(row["low"]) or not math.isfinite(row["high"]) for row in found.inputs):
        return "What went in was not finite already, as in a row that is masked out altogether, or came from outside of torch."
    return next(
        (text for names, text in _BY_OPERATION if name in names), "Look at the line, and at the values that went in."
    )


_SPLINE = "A spline outside of its interval, or at its edge: build it with linear tails, scale the data into it, or run it in float64."
_DERIVATIVE = "The value is finite and its derivative is not (a root, a power or a norm at 0, a log near 0): keep away from there."
_BY_OPERATION = (
    (
        ("exp", "exp2", "expm1", "sinh", "cosh", "softplus", "pow"),
        "An exponent that overflows: bound it (scale='half_sigmoid', FrEIA's clamp, tanh), or cure the trained model with bilip.cure.",
    ),
    (
        ("log", "log2", "log10", "logit", "log1p", "atanh", "erfinv"),
        "A logarithm of 0 or below: use the form that cannot underflow (logsigmoid, log_softmax), or keep a floor under the scale.",
    ),
    (
        ("div", "reciprocal", "true_divide", "rsqrt", "divide", "fmod", "remainder"),
        "A division by 0, or by a number so small that it overflows: keep a floor under the scale.",
    ),
    (
        ("sqrt", "acos", "asin", "acosh"),
        "An argument outside of the domain, as of a root below 0: rounding may take it there; hold it to the domain with clamp.",
    ),
    (
        ("to", "half", "bfloat16", "type"),
        "A number too large for the dtype that it is converted to: convert later, scale it, or use bfloat16 or float32.",
    ),
    (
        (
            "linear",
            "addmm",
            "matmul",
            "mm",
            "conv1d",
            "conv2d",
            "conv3d",
            "baddbmm",
            "bmm",
            "einsum",
            "mul",
            "add",
            "sub",
            "square",
            "sum",
        ),
        "Numbers beyond the largest of the dtype: weights or the state explode. Lower the learning rate, clip gradients, audit the model.",
    ),
)
