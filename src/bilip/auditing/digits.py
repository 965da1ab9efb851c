"""A model evaluated with as many digits as it takes, at a few points where float64 cannot be trusted.

Under a dispatch mode each float64 tensor has a shadow: the same numbers as mpmath holds them. An operation is computed on the shadows, and
its result is rounded into the tensor, so that branches and indices follow the better numbers. What mpmath is not taught here is said, never
guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bilip.auditing.reference import log_prob
from bilip.auditing.subject import Subject, in_dtype
from bilip.errors import NotMeasured, said_by

__all__ = ["Digits"]

_DIGITS = (40, 80, 160, 320, 640)
_MOST = 4_000_000  # multiplications of one evaluation, some seconds
_LARGEST = 1e18  # argument of an exponential function


class Digits:
    """Log p of a float64 copy of a model with as many digits as it takes.

    Example:
        >>> from bilip import Flow
        >>> from bilip.models import real_nvp
        >>> _ = torch.manual_seed(0)
        >>> flow, x = Flow(real_nvp(2)).double(), torch.ones(1, 2, dtype=torch.float64)
        >>> abs(Digits(Subject.of(flow)).log_prob(x) - flow.log_prob(x).item()) < 1e-12
        True
    """

    def __init__(self, subject: Subject) -> None:
        self.subject, self._shadows = subject, _Shadows()

    def log_prob(self, x: Tensor, context: Tensor | None = None, *, close: float = 1e-6) -> float:
        """Log p of one sample, or its log-determinant where there is no base.

        The digits are doubled until two results differ by at most `close` times 1 + their size.

        Raises:
            NotMeasured: The model does something that is not known with more digits, is too large, or draws no nearer.
        """
        x, context = x.double(), in_dtype(context, torch.float64)
        before = math.nan
        for digits in _DIGITS:
            self._shadows.begin(digits)
            with self._shadows:
                out = log_prob(self.subject, x, context)
            if self._shadows.refused:  # a guarded call may have turned what was raised into NaN
                raise NotMeasured(self._shadows.refused)
            found = self._shadows.number(out)
            if not math.isfinite(found):
                raise NotMeasured(f"log p is not finite with {digits} digits either")
            if abs(found - before) <= close * (1 + abs(found)):
                return found
            before = found
        raise NotMeasured(f"log p still moves between {_DIGITS[-2]} and {_DIGITS[-1]} digits")


class _Shadows(TorchDispatchMode):
    """The shadows of storages, by their address; what has one is kept alive."""

    def __init__(self) -> None:
        super().__init__()
        try:
            import mpmath  # torch brings it along
        except ImportError as error:
            raise NotMeasured("more digits need mpmath: pip install mpmath") from error
        self.mp: Any = mpmath.MPContext()
        self.table: dict[int, np.ndarray] = {}
        self.kept: list[Tensor] = []
        self.spent = 0
        self.refused = ""
        self.unary = _unary(self.mp)

    def begin(self, digits: int) -> None:
        """Start an evaluation. What was converted from float64 is exact, and stays."""
        self.mp.dps, self.spent, self.refused = digits, 0, ""

    # ---- tensors and their shadows

    def read(self, value: Any) -> Any:
        """The shadow of a tensor, in its shape; other values as they are."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value.numpy(force=True) if isinstance(value, Tensor) else value
        return self._flat(value)[_places(value).reshape(-1)].reshape(tuple(value.shape))

    def _flat(self, value: Tensor) -> np.ndarray:
        storage = value.untyped_storage()
        flat = self.table.get(storage.data_ptr())
        if flat is None:
            whole = torch.empty(0, dtype=value.dtype, device="cpu").set_(storage).double()  # type: ignore[call-overload]
            flat = np.empty(len(whole), dtype=object)
            flat[:] = [self.mp.mpf(v) for v in whole.tolist()]
            self.table[storage.data_ptr()] = flat
            self.kept.append(value)
        return flat

    def write(self, value: Tensor, numbers: Any) -> None:
        """Set the shadow of a tensor, and round it into the tensor."""
        given = np.broadcast_to(np.asarray(numbers, dtype=object), tuple(value.shape))
        storage, size = value.untyped_storage(), value.numel() * value.element_size()
        if storage.data_ptr() not in self.table and storage.nbytes() == size:  # all of it is written
            self.table[storage.data_ptr()] = np.empty(value.numel(), dtype=object)
            self.kept.append(value)
        self._flat(value)[_places(value).reshape(-1)] = given.reshape(-1)
        rounded = [_float(v) for v in given.flatten().tolist()]
        value.copy_(torch.tensor(rounded, dtype=torch.float64, device="cpu").reshape(value.shape))

    def number(self, value: Tensor) -> float:
        return _float(self.read(value).flatten()[0])

    # ---- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        try:
            return self._call(func, args, kwargs)
        except Exception as why:  # what a rule does not expect
            self.refused = self.refused or (str(why) if isinstance(why, NotMeasured) else f"{func}: {said_by(why)}")
            raise NotMeasured(self.refused) from why

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        given = _tensors((args, kwargs))
        floats = [t for t in given if t.is_floating_point()]
        if name == "_local_scalar_dense" and floats:
            self.lossy(args[0])
        if not floats or func.is_view or name in _AS_IT_IS.split():
            return func(*args, **kwargs)
        bare = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        if bare in _MOVES.split():
            numbers = self._moved(func, args, kwargs)
        elif bare in self.unary:
            numbers = self.unary[bare](self.read(args[0]), *args[1:], **kwargs)
        elif bare in _RULES:
            numbers = _RULES[bare](self, *(self.read(a) for a in args), **{k: self.read(v) for k, v in kwargs.items()})
        else:
            numbers = None
        out = func(*args, **kwargs)
        outs = [t for t in _tensors(out) if t.is_floating_point()]
        if not outs:
            return out  # comparisons, indices: of tensors that hold the better numbers
        if any(t.dtype != torch.float64 for t in outs):
            raise NotMeasured("the model computes in fewer bits than float64 inside")
        if numbers is None:
            raise NotMeasured(f"the model calls {name}, which is not known with more digits")
        for tensor, value in zip(outs, numbers if isinstance(numbers, tuple) else (numbers,), strict=False):
            self.write(tensor, value)
        return out

    def lossy(self, value: Tensor) -> None:
        """A number leaves the tensors: it is rounded to float64, unless it is one exactly."""
        exact = self.read(value).flatten()[0]
        if self.mp.isnan(exact) or exact != self.mp.mpf(_float(exact)):
            raise NotMeasured("the model takes a number out of a tensor, which rounds it to float64")

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that moves numbers and computes nothing: it is done to their places in a pool."""
        pool: list[Any] = [self.mp.mpf(0)]

        def placed(value: Any, label: str = "") -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                start = len(pool)
                pool.extend(self.read(value).flatten().tolist())
                return torch.arange(start, len(pool), dtype=torch.float64, device="cpu").reshape(value.shape)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
                return [placed(v) for v in value]
            if isinstance(value, (int, float)) and not isinstance(value, bool) and label in _FILLS:
                pool.append(self.mp.mpf(value))
                return float(len(pool) - 1)
            return value

        names = [a.name for a in func._schema.arguments]
        places = func(
            *(placed(a, n) for a, n in zip(args, names, strict=False)), **{k: placed(v, k) for k, v in kwargs.items()}
        )
        held = np.empty(len(pool), dtype=object)
        held[:] = pool
        found = tuple(held[t.long().numpy()] for t in _tensors(places) if t.is_floating_point())
        return found if len(found) > 1 else found[0] if found else None

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """A product of matrices, or of stacks of them."""
        self.spent += int(np.prod(a.shape)) * int(b.shape[-1] if b.ndim > 1 else 1)
        if self.spent > _MOST:
            raise NotMeasured("the model is too large to be evaluated with more digits")
        if a.ndim == 3:
            return np.stack([x @ y for x, y in zip(a, b, strict=True)])
        return a @ b


def _places(value: Tensor) -> np.ndarray:
    """Where the entries of a tensor lie in its storage."""
    size = value.untyped_storage().nbytes() // value.element_size()
    return (
        torch.arange(size, device="cpu").as_strided(tuple(value.shape), value.stride(), value.storage_offset()).numpy()
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# ---- what is known

_AS_IT_IS = """
detach alias lift_fresh _unsafe_view set_ empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full
_local_scalar_dense
"""
_MOVES = """
clone cat stack index index_select index_put index_copy gather scatter where repeat flip roll constant_pad_nd masked_fill masked_select
masked_scatter copy _to_copy fill zero tril triu diag_embed _unsafe_index take
"""
_FILLS = ("value", "other", "self")  # arguments of theirs that are numbers


def _each(function: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    return np.frompyfunc(function, count, 1)


def _unary(mp: Any) -> dict[str, Callable[..., Any]]:
    """Functions of each number, as torch defines them."""

    def exp(v: Any) -> Any:
        if abs(v) > _LARGEST:
            raise NotMeasured("the model takes the exponential function of a number beyond 1e18")
        return mp.exp(v)

    def log(v: Any) -> Any:
        return mp.log(v) if v > 0 else (-mp.inf if v == 0 else mp.nan)

    def sigmoid(v: Any) -> Any:
        return 1 / (1 + exp(-v)) if v > -_LARGEST else mp.mpf(0)

    def softplus(v: Any, beta: float = 1, threshold: float = 20) -> Any:
        return v if v * beta > threshold else mp.log1p(exp(v * beta)) / beta

    def elu(v: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
        return scale * v if v > 0 else scale * alpha * mp.expm1(max(v * input_scale, -_LARGEST))

    def gelu(v: Any) -> Any:
        return v * (1 + mp.erf(v / mp.sqrt(2))) / 2

    def tanh(v: Any) -> Any:
        return mp.sign(v) if abs(v) > 1e6 else mp.tanh(v)

    def bounded(v: Any, low: Any = None, high: Any = None) -> Any:
        v = v if low is None or not v < low else mp.mpf(low)
        return v if high is None or not v > high else mp.mpf(high)

    plain: dict[str, Callable[..., Any]] = {
        "exp": exp,
        "log": log,
        "tanh": tanh,
        "sigmoid": sigmoid,
        "softplus": softplus,
        "elu": elu,
        "clamp": bounded,
        "hardtanh": bounded,
        "clamp_min": bounded,
        "clamp_max": lambda v, high: bounded(v, None, high),
        "relu": lambda v: v if v > 0 else mp.mpf(0),
        "leaky_relu": lambda v, slope=0.01: v if v > 0 else v * slope,
        "silu": lambda v: v * sigmoid(v),
        "log_sigmoid": lambda v: -softplus(-v, threshold=math.inf),
        "neg": lambda v: -v,
        "abs": abs,
        "reciprocal": lambda v: 1 / v,
        "square": lambda v: v * v,
        "rsqrt": lambda v: 1 / mp.sqrt(v),
        **{
            name: getattr(mp, name)
            for name in ["expm1", "log1p", "sqrt", "sign", "sin", "cos", "sinh", "cosh", "asinh", "atan", "erf"]
        },
    }
    table: dict[str, Callable[..., Any]] = {
        name: lambda a, *more, function=function, **kwargs: _each(lambda v: function(v, *more, **kwargs))(a)
        for name, function in plain.items()
    }
    table["gelu"] = lambda a, **kwargs: _each(gelu)(a) if kwargs.get("approximate", "none") == "none" else None
    table["log_sigmoid_forward"] = lambda a: (_each(plain["log_sigmoid"])(a), a * 0)
    return table


def _axes(a: np.ndarray, dim: Any) -> Any:
    return None if dim is None or dim == [] else tuple(dim) if isinstance(dim, (list, tuple)) else dim


def _sum(m: _Shadows, a: np.ndarray, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    return np.sum(a, axis=_axes(a, dim), keepdims=keepdim)


def _mean(m: _Shadows, a: np.ndarray, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    total = np.asarray(_sum(m, a, dim, keepdim), dtype=object)
    return total / (a.size // max(1, total.size))


def _top(a: np.ndarray, dim: int) -> np.ndarray:
    return np.maximum.reduce(a, axis=dim, keepdims=True)


def _softmax(m: _Shadows, a: np.ndarray, dim: int, *_: Any) -> Any:
    e = m.unary["exp"](a - _top(a, dim))
    return e / np.sum(e, axis=dim, keepdims=True)


def _logsumexp(m: _Shadows, a: np.ndarray, dim: Any, keepdim: bool = False) -> Any:
    dim = dim[0] if isinstance(dim, (list, tuple)) else dim
    top = _top(a, dim)
    total = top + m.unary["log"](np.sum(m.unary["exp"](a - top), axis=dim, keepdims=True))
    return total if keepdim else np.squeeze(total, axis=dim)


def _glu(m: _Shadows, a: np.ndarray, dim: int = -1) -> Any:
    first, second = np.split(a, 2, axis=dim)
    return first * m.unary["sigmoid"](second)


def _power(m: _Shadows, a: Any, b: Any) -> Any:
    def one(v: Any, w: Any) -> Any:
        whole = int(w) if float(w).is_integer() else None
        return v**whole if whole is not None else (m.mp.power(v, w) if v >= 0 else m.mp.nan)

    return _each(one, 2)(a, b)


def _divided(m: _Shadows, a: Any, b: Any, **kwargs: Any) -> Any:
    if kwargs.get("rounding_mode"):
        return None

    def one(v: Any, w: Any) -> Any:
        if w != 0:
            return v / w
        return m.mp.nan if v == 0 or m.mp.isnan(v) else m.mp.inf * m.mp.sign(v)

    return _each(one, 2)(a, b)


_RULES: dict[str, Callable[..., Any]] = {
    "add": lambda m, a, b, alpha=1: a + (b * alpha if alpha != 1 else b),
    "sub": lambda m, a, b, alpha=1: a - (b * alpha if alpha != 1 else b),
    "rsub": lambda m, a, b, alpha=1: b - a * alpha,
    "mul": lambda m, a, b: a * b,
    "div": _divided,
    "pow": _power,
    "maximum": lambda m, a, b: np.maximum(a, b),
    "minimum": lambda m, a, b: np.minimum(a, b),
    "addcmul": lambda m, a, b, c, value=1: a + value * b * c,
    "addcdiv": lambda m, a, b, c, value=1: a + value * b / c,
    "sum": _sum,
    "mean": _mean,
    "cumsum": lambda m, a, dim, **_: np.cumsum(a, axis=dim),
    "prod": lambda m, a, dim=None, keepdim=False, **_: np.prod(a, axis=dim, keepdims=keepdim),
    "amax": lambda m, a, dim=None, keepdim=False: np.maximum.reduce(a, axis=_axes(a, dim), keepdims=keepdim),
    "amin": lambda m, a, dim=None, keepdim=False: np.minimum.reduce(a, axis=_axes(a, dim), keepdims=keepdim),
    "max": lambda m, a, dim=None, keepdim=False: np.maximum.reduce(a, axis=dim, keepdims=keepdim),
    "min": lambda m, a, dim=None, keepdim=False: np.minimum.reduce(a, axis=dim, keepdims=keepdim),
    "_softmax": _softmax,
    "_log_softmax": lambda m, a, dim, *_: a - _logsumexp(m, a, dim, True),
    "logsumexp": _logsumexp,
    "glu": _glu,
    "mm": lambda m, a, b: m.product(a, b),
    "bmm": lambda m, a, b: m.product(a, b),
    "mv": lambda m, a, b: m.product(a, b),
    "dot": lambda m, a, b: m.product(a[None], b)[0],
    "addmm": lambda m, c, a, b, beta=1, alpha=1: beta * c + alpha * m.product(a, b),
    "baddbmm": lambda m, c, a, b, beta=1, alpha=1: beta * c + alpha * m.product(a, b),
}
