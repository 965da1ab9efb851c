r"""Linear and convolution layers whose operator norm is held at or below a coefficient, as certified.

The weight that acts is $W \cdot \min(1, c / b)$ with $b \ge \|W\|_2$ an upper bound, computed in float64; no state of a power
iteration can lag behind it. The product is taken in float64 and rounded once, so that it also holds for weights near the largest
number of their dtype; in float64, entries beyond $2^{500}$ count as that.

**Two bounds.** A `Certificate` holds a weight $W_0$, a bound $\bar\sigma(W_0) \ge \|W_0\|_2$ found by Gram iteration (for a
convolution at every frequency of a grid), and its slope. For any other weight

$$\|W\|_2 \le \|W_0\|_2 + \|W - W_0\|_2 \le \bar\sigma(W_0) + \sqrt{T}\,\|W - W_0\|_8 = b,$$

with $T$ the taps of the kernel, 1 for a matrix, and the Schatten norm $\|\cdot\|_8 \ge \|\cdot\|_2$ of the kernel written as a matrix
of `(out, in * taps)`: a convolution is that matrix applied to $T$ shifted copies of the image, which together are $\sqrt T$ times as
long as the image at most. Two products give $\|\cdot\|_8$; the Frobenius norm would bound the change too, but in a layer of 512
channels it is up to $\sqrt{512}$ times too large. So a chain of blocks in training looks at the change of all its weights
together, in each pass, and certifies anew only the layers whose $b$ is more than `SLACK` above $\bar\sigma(W_0)$ and shrinks the
weight. However $W$ was changed, $b$ is a bound: nothing has to be noticed. A layer on its own, a layer in evaluation mode and all proofs
certify the present weight.

**Gradients** are those of $W \cdot \min(1, c / \bar\sigma(W))$, with $\nabla \log \bar\sigma$ taken at $W_0$.

**Under autocast** held layers compute in the dtype of their weight, as outside of it: rounding the weight once more, to 16 bits, would
take it above its coefficient.

`torch.nn.utils.parametrizations.spectral_norm` promises neither: it flattens a kernel to a matrix, whose norm can be several times
smaller than the convolution's, and it approaches that norm from below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip._torch import EvalCache, can_be_read, capturing, setting, version_of
from bilip.errors import InputError
from bilip.nets.norms import conv_symbol, gram_bounds, gram_norm

__all__ = [
    "SLACK",
    "Certificate",
    "HeldConv2d",
    "HeldLinear",
    "certify_anew",
    "held_layers",
    "held_together",
    "restore_certificate",
]

SLACK = 0.01  # how far above the certified bound that of a changed weight may be in training, relative to it
_STEPS = 2  # of Gram iteration for a change: the Schatten norm of order 8
_MOST = 2**22  # entries of weights that are taken together
_LARGEST = 2.0**500  # entries of float64 weights beyond count as this
_MOST_FREQUENCIES = 2**25  # and of their matrices at all frequencies
_TOGETHER: ContextVar[Mapping[nn.Module, _Known]] = ContextVar("together", default={})  # noqa: B039


class Held(nn.Module):
    """What held layers have in common: the weight that acts, kept while it is right, and what was certified last."""

    weight: Tensor
    coefficient: float
    _certificate: Certificate | None = None

    def _hold_to(self, coefficient: float) -> None:
        self.coefficient = _check_coefficient(coefficient)
        self._cache, self._held_to = EvalCache(), (self.coefficient, _stride(self))

    def _hold(self, weight: Tensor) -> Tensor:
        """The weight that acts in the place of this one, differentiable in every way torch has."""
        raise NotImplementedError

    def held_weight(self) -> Tensor:
        """The weight that acts."""
        known = _TOGETHER.get().get(self)
        weight = self.weight
        if known is not None and known.fits(self):
            return _Hold.apply(weight, known.value, known.factor, known.slope)  # type: ignore[return-value]
        if self._held_to != (self.coefficient, _stride(self)):
            self._cache, self._held_to = EvalCache(), (self.coefficient, _stride(self))
        if self.training and self.coefficient < math.inf and can_be_read(weight) and not weight.is_inference():
            self._cache.clear()
            known = _known([self], slack=0.0)[self]
            return _Hold.apply(weight, known.value, known.factor, known.slope)  # type: ignore[return-value]
        return self._cache.get(self, weight, self._hold)

    def _apply_held(self, input: Tensor) -> Tensor:
        """The layer with the weight that acts."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """The output, in the dtype of the weight also under autocast: another one would act with another weight."""
        kind = input.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return self._apply_held(input)
        with torch.autocast(kind, enabled=False):
            return self._apply_held(input.to(self.weight.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, coefficient={self.coefficient:g}"


class HeldLinear(Held, nn.Linear):
    r"""A linear layer with $\|W\|_2 \le$ `coefficient`, in the dtype of its weight also under autocast.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        coefficient: The largest allowed norm.
        bias: Whether to add a bias.

    Example:
        >>> from bilip.nets import matrix_norm
        >>> layer = HeldLinear(8, 8, coefficient=0.9)
        >>> _ = layer.weight.data.mul_(100)
        >>> matrix_norm(layer.held_weight()) <= 0.9
        True
    """

    def __init__(self, in_features: int, out_features: int, *, coefficient: float, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self._hold_to(coefficient)

    def _hold(self, weight: Tensor) -> Tensor:
        if self.coefficient == math.inf:  # a copy whose weight is held already
            return weight
        (bound,), (slope,) = _certified([weight])
        limit = torch.full_like(bound, _target(weight, self.coefficient))
        factor = limit / torch.maximum(bound, limit)  # exactly 1 where nothing is to be shrunk
        weight = _in_range(weight)
        inner = (torch.where(bound > limit, slope, 0.0) * weight).sum().double()
        return (weight.double() * (factor - factor * (inner - inner.detach()))).to(weight.dtype)

    def _apply_held(self, input: Tensor) -> Tensor:
        return F.linear(input, self.held_weight(), self.bias)


class HeldConv2d(Held, nn.Conv2d):
    r"""A convolution whose operator norm is at most `coefficient`, for every image size, in the dtype of its weight also under autocast.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Side of the kernel.
        coefficient: The largest allowed norm.
        stride: Stride.
        padding: Zero padding; by default what keeps the image size at stride 1.
        bias: Whether to add a bias.

    Example:
        >>> from bilip.nets import conv_norm
        >>> layer = HeldConv2d(4, 4, 3, coefficient=0.9)
        >>> _ = layer.weight.data.fill_(1.0)
        >>> conv_norm(layer.held_weight()) <= 0.9
        True
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        coefficient: float,
        stride: int = 1,
        padding: int | None = None,
        bias: bool = True,
    ) -> None:
        padding = kernel_size // 2 if padding is None else padding
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self._hold_to(coefficient)

    def _hold(self, weight: Tensor) -> Tensor:
        if self.coefficient == math.inf:
            return weight
        stride = _stride(self)
        weight = _in_range(weight)
        if self.kernel_size == (1, 1) and stride == (1, 1):
            return _shrink(weight, gram_norm(weight.double().flatten(1)[None]), self.coefficient)
        symbol, slack = conv_symbol(weight.double(), stride=stride)
        return _shrink(weight, gram_norm(symbol) * slack, self.coefficient)

    def _apply_held(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.held_weight(), self.bias)


@dataclass(frozen=True)
class Certificate:
    r"""What was proved of a weight. Copies and pickles of a layer do not take it along.

    Attributes:
        weight: The weight.
        bound: At least its operator norm, float64.
        slope: $\nabla_W \log$ of the bound.
        stride: That of the convolution.
    """

    weight: Tensor
    bound: Tensor
    slope: Tensor
    stride: tuple[int, int] = (1, 1)

    def is_about(self, layer: Held) -> bool:
        """Whether a change from the one weight to that of the layer can be computed, and nothing else has changed."""
        return self.is_like(layer.weight, _stride(layer))

    def is_like(self, weight: Tensor, stride: tuple[int, int]) -> bool:
        """Whether it speaks about weights of this shape, dtype and place, in a convolution with this stride."""
        mine = self.weight
        same = mine.shape == weight.shape and mine.dtype == weight.dtype and mine.device == weight.device
        return same and self.stride == stride

    def renew(self, other: Certificate) -> None:
        """Take over what another one says, in the same memory, which a CUDA graph may read."""
        self.weight.copy_(other.weight)
        self.bound.copy_(other.bound)
        self.slope.copy_(other.slope)

    def tensors(self) -> dict[str, Tensor]:
        """What it consists of, by name."""
        return {"weight": self.weight, "bound": self.bound, "slope": self.slope}

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self):
        return (_nothing, ())


def _nothing() -> None:
    return None


def held_layers(module: nn.Module) -> list[HeldLinear | HeldConv2d]:
    """The held layers of a module, of these very classes: a subclass may differ.

    Example:
        >>> len(held_layers(nn.Sequential(HeldLinear(2, 2, coefficient=0.9), nn.Linear(2, 2))))
        1
    """
    return [part for part in module.modules() if type(part) in (HeldLinear, HeldConv2d)]  # type: ignore[misc]


@torch.no_grad()
def restore_certificate(layer: Held, tensors: Mapping[str, Tensor]) -> None:
    """Give a layer the certificate that was saved as `Certificate.tensors`; one that does not fit, or is not true, is left out."""
    stride = _stride(layer)
    parts = (tensors[name].to(layer.weight.device).clone() for name in ("weight", "bound", "slope"))
    known = Certificate(*parts, stride=stride)
    layer._certificate = None
    kind = torch.promote_types(layer.weight.dtype, torch.float32)
    fits = known.is_about(layer) and known.bound.shape == () and known.bound.dtype == torch.float64
    if fits and known.slope.shape == layer.weight.shape and known.slope.dtype == kind:
        found = _certified([known.weight], stride)[0][0]
        if bool(((found - known.bound).abs() <= 1e-9 * found) & known.slope.isfinite().all()):
            layer._certificate = known  # to the last digit, so that training goes on as if it had not stopped


@torch.no_grad()
def certify_anew(layers: Iterable[Held], *, slack: float = SLACK, in_place: bool = False) -> int:
    """Certify the layers that have no certificate, or one that their weight has left; how many that were.

    Args:
        layers: The layers; those of one shape are certified together.
        slack: How far above the certified bound that of a changed weight may be, relative to it; 0 for none.
        in_place: Write into the memory of certificates that there are.

    Example:
        >>> layer = HeldLinear(4, 4, coefficient=0.9)
        >>> [certify_anew([layer]), certify_anew([layer])]
        [1, 0]
    """
    count = 0
    groups = _groups(layer for layer in layers if layer.coefficient < math.inf)
    left = {}
    for part in groups:
        known = [layer for layer in part if _is_certified(layer)]
        if known:
            # Where nothing is shrunk with the larger bound either, nothing is lost.
            bounds, changes = _bounds(known)
            limit = _target(known[0].weight, known[0].coefficient)
            left[id(part)] = known, torch.where(bounds + changes <= limit, 0.0, changes / bounds)
    shares = iter(torch.cat([share for _, share in left.values()]).tolist() if left else ())  # one look at the device
    for part in groups:
        known = {layer: next(shares) for layer in left.get(id(part), ((), None))[0]}
        due = [layer for layer in part if not known.get(layer, math.nan) <= slack]
        for layer, certificate in zip(due, _certificates(due), strict=True):
            if in_place and _is_certified(layer):
                layer._certificate.renew(certificate)  # type: ignore[union-attr]
            else:
                layer._certificate = certificate
        count += len(due)
    return count


def held_together(layers: Iterable[Held]) -> AbstractContextManager[None]:
    """Inside, the weights that act are computed for all layers of one shape at once: on a device, each launch counts.

    Only where they would be computed anew anyway: with gradients to them, and outside of transforms. Every layer keeps a graph of its
    own. In training mode they are held by the bound for a changed weight; while a CUDA graph is recorded nothing is certified
    but what has no certificate.
    """
    before = _TOGETHER.get()
    wanted = [
        layer
        for layer in layers
        if layer not in before
        and layer.coefficient < math.inf
        and layer.weight.requires_grad
        and not layer.weight.is_inference()
    ]
    found = _known(wanted) if wanted else {}
    return setting(_TOGETHER, {**before, **found}) if found else nullcontext()


def again(known: Mapping[nn.Module, _Known]) -> AbstractContextManager[None]:
    """Inside, layers act with the weights they had inside another `held_together`: what is evaluated again is the same."""
    return setting(_TOGETHER, known)


def pinned(module: nn.Module) -> Mapping[nn.Module, _Known]:
    """The weights that act now in the layers of a module, for many evaluations without gradients: see `again`."""
    found = {}
    for layer in held_layers(module):
        if can_be_read(layer.weight):
            value = layer.held_weight().detach()
            found[layer] = _Known(layer.weight, version_of(layer.weight), layer.coefficient, value, value, value)
    return found


def held_now(module: nn.Module) -> Mapping[nn.Module, _Known]:
    """What is known of the layers of a module inside the present `held_together`."""
    known = _TOGETHER.get()
    return {layer: known[layer] for layer in module.modules() if layer in known} if known else {}


@dataclass(frozen=True)
class _Known:
    """What was computed for a layer, and from what."""

    weight: Tensor
    version: int
    coefficient: float
    value: Tensor
    factor: Tensor
    slope: Tensor

    def fits(self, layer: Held) -> bool:
        """Whether the layer is still as it was; writing through `weight.data` in the middle of a pass is not noticed."""
        same = self.weight is layer.weight and self.coefficient == layer.coefficient
        return same and self.version == version_of(self.weight)


@torch.no_grad()
def _known(layers: Sequence[Held], slack: float = SLACK) -> dict[Held, _Known]:
    """The weights that act, for layers that may differ in shape."""
    fresh: dict[Held, Certificate] = {}
    if capturing(layers[0].weight):
        for part in _groups(layer for layer in layers if not _is_certified(layer)):
            fresh.update(zip(part, _certificates(part), strict=True))
    else:
        certify_anew((layer for layer in layers if layer.training), slack=slack)
        certify_anew((layer for layer in layers if not layer.training), slack=0.0)
    found = {}
    for part in _groups(layers):
        bounds, changes = _bounds(part, fresh)
        bounds = (bounds + changes) * (1 + 1e-15)
        limit = torch.full_like(bounds, _target(part[0].weight, part[0].coefficient))
        factors = limit / torch.maximum(bounds, limit)  # exactly 1 where nothing is to be shrunk
        weights = torch.stack([layer.weight for layer in part])
        one = (-1, *[1] * (weights.ndim - 1))
        slopes = torch.stack([_certificate(layer, fresh).slope for layer in part])
        slopes = torch.where((bounds > limit).view(one), slopes, 0.0)
        values = (_in_range(weights).double() * factors.view(one)).to(weights.dtype)
        for layer, *made in zip(part, values.unbind(), factors.unbind(), slopes.unbind(), strict=True):
            found[layer] = _Known(layer.weight, version_of(layer.weight), layer.coefficient, *made)
    return found


class _Hold(torch.autograd.Function):
    r"""$f W$; as $\mathrm{d}f = -f \langle S, \mathrm{d}W \rangle$, the gradient is $f G - f \langle G, W \rangle S$."""

    @staticmethod
    def forward(ctx, weight: Tensor, value: Tensor, factor: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(weight, factor, slope)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, factor, slope = ctx.saved_tensors
        grad = grads[0].double()
        inner = (grad * _in_range(weight).double()).sum()
        grad = factor * (grad - inner * slope.double())
        if weight.dtype == torch.float64:
            grad = torch.where(weight.abs() <= _LARGEST, grad, 0.0)
        return grad.to(weight.dtype), None, None, None


def _certificate(layer: Held, fresh: Mapping[Held, Certificate]) -> Certificate:
    return fresh.get(layer, layer._certificate)  # type: ignore[return-value,arg-type]


def _is_certified(layer: Held) -> bool:
    return layer._certificate is not None and layer._certificate.is_about(layer)


def _stride(layer: Held) -> tuple[int, int]:
    stride = getattr(layer, "stride", (1, 1))
    return int(stride[0]), int(stride[1])


def _groups(layers: Iterable[Held]) -> list[list[Held]]:
    """Layers that can be computed with together."""
    groups: dict[tuple[object, ...], list[Held]] = {}
    for layer in layers:
        weight = layer.weight
        key = (weight.shape, weight.dtype, weight.device, layer.coefficient, _stride(layer))
        groups.setdefault(key, []).append(layer)
    parts = []
    for group in groups.values():
        size = max(1, _MOST // max(1, group[0].weight.numel()))
        parts += [group[k : k + size] for k in range(0, len(group), size)]
    return parts


def _bounds(layers: Sequence[Held], fresh: Mapping[Held, Certificate] | None = None) -> tuple[Tensor, Tensor]:
    """Of layers of one shape the certified bounds, and by how much the present weights may exceed them."""
    known = [_certificate(layer, fresh or {}) for layer in layers]
    bounds = torch.stack([certificate.bound for certificate in known])
    now = _in_range(torch.stack([layer.weight.detach() for layer in layers])).double()
    then = _in_range(torch.stack([certificate.weight for certificate in known])).double()
    change = now - then
    taps = math.prod(change.shape[3:])
    if change.ndim > 3 and change.shape[1] > change.shape[2]:
        change = change.transpose(1, 2)  # the narrow side stays alone: as good a bound, a smaller matrix
    return bounds, gram_bounds(change.flatten(2), _STEPS)[0] * (math.sqrt(taps) * (1 + 1e-15))


def _certificates(layers: Sequence[Held]) -> list[Certificate]:
    """Certificates for layers of one shape."""
    if not layers:
        return []
    weights = [layer.weight.detach() for layer in layers]
    stride = _stride(layers[0])
    bounds, slopes = _certified(weights, stride)
    return [
        Certificate(weight.clone(), bound.clone(), slope.clone(), stride)
        for weight, bound, slope in zip(weights, bounds, slopes, strict=True)
    ]


@torch.no_grad()
def _certified(weights: Sequence[Tensor], stride: tuple[int, int] = (1, 1)) -> tuple[Tensor, Tensor]:
    """Bounds on the norms of weights of one shape, in float64, and the slopes of their logs, in the dtype they are used in."""
    stack = _in_range(torch.stack([weight.detach() for weight in weights])).double()
    shape = stack.shape
    if len(shape) == 3 or (stride == (1, 1) and shape[3:] == (1, 1)):
        bounds, slopes = gram_bounds(stack.flatten(2), slopes=True)
    else:
        points = 4 * math.ceil(max(shape[3:]) / 2) + 32
        size = max(1, _MOST_FREQUENCIES // (points * (points // 2 + 1) * math.prod(shape[1:3])))
        parts = [_certified_kernels(part, stride) for part in stack.split(size)]
        bounds, slopes = (torch.cat(values) for values in zip(*parts, strict=True))
    return bounds, slopes.view(shape).to(torch.promote_types(weights[0].dtype, torch.float32))  # type: ignore[union-attr]


def _certified_kernels(kernels: Tensor, stride: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Bounds and slopes for kernels of shape `(count, out, in, *taps)`, all frequencies of all kernels at once."""
    count = len(kernels)
    with torch.inference_mode(False), torch.enable_grad():
        stack = kernels.clone().requires_grad_()
        symbols, slack = conv_symbol(stack.flatten(0, 1), stride=stride, groups=count)
        symbols = symbols.unflatten(0, (-1, count))  # frequencies, kernels
        largest = gram_bounds(symbols.detach().flatten(0, 1))[0].view(-1, count).argmax(0)
        chosen = symbols[largest, torch.arange(count, device=stack.device)]
        bounds, slopes = gram_bounds(chosen, slopes=True)
        inner = (slopes.conj() * chosen).real.sum()  # type: ignore[union-attr]
        (slope,) = torch.autograd.grad(inner, stack)
    return bounds * slack, slope


def _shrink(weight: Tensor, bound: Tensor, coefficient: float) -> Tensor:
    limit = torch.full_like(bound, _target(weight, coefficient))
    return (weight.double() * (limit / torch.maximum(bound, limit))).to(weight.dtype)


def _in_range(weight: Tensor) -> Tensor:
    """The weight, its entries cut off where sums of them would leave float64; other dtypes never come near."""
    return weight.clamp(-_LARGEST, _LARGEST) if weight.dtype == torch.float64 else weight


def _target(weight: Tensor, coefficient: float) -> float:
    # Rounding moves each entry by at most eps of itself, hence the norm by at most eps * ||W||_F, times sqrt(taps) for a kernel:
    # eps * sqrt(entries) of the norm. Where it is subnormal it moves by the spacing there, or all of it is flushed to zero.
    # Certifying again may add the slack of the bound itself.
    kind = torch.finfo(weight.dtype)
    spacing = kind.tiny * (kind.eps if weight.dtype == torch.float16 else 1.0)
    absolute = spacing * math.sqrt(weight.numel() * weight[0, 0].numel())
    target = (coefficient * (1 - 1e-8) - absolute) / (1 + 1.1 * math.sqrt(weight.numel()) * kind.eps)
    if not target > 0:
        raise InputError(
            f"coefficient={coefficient:g} is too small for a weight of shape {tuple(weight.shape)} in {weight.dtype}, whose "
            f"entries are rounded to about {spacing:.1g}. Use a larger coefficient, or a dtype with a wider range."
        )
    return target


def _check_coefficient(coefficient: float) -> float:
    if not (isinstance(coefficient, (int, float)) and 0 < coefficient < math.inf):
        raise InputError(f"coefficient={coefficient!r}: the largest allowed operator norm must be a positive number.")
    return float(coefficient)
