r"""Further layers of torch that can be read: normalisation, pooling, padding, rearrangement and transposed convolution.

Each comes with the argument for its constant. Dropout and the activations are in `bilip.nets.activations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.bounds import EPS, Box, as_float64, finite_size, log_of, norms
from bilip.nets.activations import TINY, Shape
from bilip.nets.norms import conv_norm
from bilip.nets.point import Point
from bilip.nets.read import Affine, Linear, Reading, Rearranged, copies, reader, require_finite, unknown
from bilip.nets.readable import as_born

__all__: list[str] = []


@dataclass(frozen=True)
class _Map(Reading):
    """A layer whose interval image is found by its own function."""

    layer: nn.Module
    constant: Callable[[Shape | None], float]  # its Lipschitz constant for samples of a shape, rounded up
    box: Callable[[Box], Box]  # its interval image
    # Its value in float64 and the error of that value alone, for a batch.
    value: Callable[[Tensor], tuple[Tensor, Tensor]]
    shape: Callable[[Shape], Shape]  # how it changes the shape of a sample
    fresh: bool = True

    def log_lipschitz(self, shape=None, outputs=None, inputs=None):
        return log_of(self.constant(shape))

    def log_cap(self) -> float | None:
        learns = bool(self.layer._parameters or self.layer._buffers)
        return None if learns else log_of(self.constant(None))

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        return self.box(box) if box.shape else Box.everything()

    def point(self, known, context=None, dtype=torch.float64):
        image, own = self.value(known.value)
        own = own + TINY * math.sqrt(math.prod(image.shape[1:]))
        constant = self.constant(tuple(known.value.shape[1:]))
        return Point(image, (constant * known.error + own) * (1 + 8 * EPS))

    def out_shape(self, shape: Shape | None) -> Shape | None:
        return None if shape is None else self.shape(shape)


def _after(act: Callable[[Tensor], Tensor]) -> Callable[[Shape], Shape]:
    return lambda shape: tuple(act(torch.empty((1, *shape), dtype=torch.float64, device="meta")).shape[1:])


def _unrounded(
    layer: nn.Module,
    constant: Callable[[Shape | None], float],
    act: Callable[[Tensor], Tensor],
    *,
    fresh: bool = True,
) -> _Map:
    """A layer each of whose outputs is one of its inputs, or a number, and grows with its inputs: nothing is rounded."""
    return _Map(
        layer,
        constant,
        lambda box: Box(act(box.low[None])[0], act(box.high[None])[0]),
        lambda v: (act(v), torch.zeros(len(v), dtype=torch.float64, device=v.device)),
        _after(act),
        fresh,
    )


# ---- normalisation


@reader.register(nn.BatchNorm1d)
@reader.register(nn.BatchNorm2d)
@reader.register(nn.BatchNorm3d)
def _batch_norm(layer: Any) -> Reading:
    r"""In evaluation mode $x \mapsto a (x - \mu) + b$ for each channel, with $a = w / \sqrt{v + \epsilon}$: the constant is $\max |a|$."""
    if layer.training or layer.running_mean is None or layer.running_var is None:
        raise unknown(layer, "normalises by its batch, so that no sample is mapped on its own (call .eval())")
    mean, variance = as_float64(layer.running_mean), as_float64(layer.running_var)
    weight = torch.ones_like(mean) if layer.weight is None else as_float64(layer.weight)
    bias = torch.zeros_like(mean) if layer.bias is None else as_float64(layer.bias)
    require_finite(layer, {"running_mean": mean, "running_var": variance, "weight": weight, "bias": bias})
    if not bool((variance + layer.eps > 0).all()):
        raise unknown(layer, "has a running variance that is not positive")
    scale = weight / (variance + layer.eps).sqrt()
    constant = float(scale.abs().max()) * (1 + 8 * EPS)

    def spread(vector: Tensor, dims: int, like: Tensor) -> Tensor:
        return vector.view(-1, *[1] * (dims - 1)).to(like)

    def box(given: Box) -> Box:
        a, b, m = (spread(v, len(given.shape), given.low) for v in (scale, bias, mean))
        ends = torch.stack([((end - m) * a).nan_to_num(0.0, math.inf, -math.inf) for end in (given.low, given.high)])
        size = finite_size(ends[0], ends[1]) + (m * a).abs() + b.abs()
        return Box.outward(ends.amin(0) + b, ends.amax(0) + b, 16 * EPS * size)

    def value(v: Tensor) -> tuple[Tensor, Tensor]:
        a, b, m = (spread(vector, v.ndim - 1, v) for vector in (scale, bias, mean))
        size = ((v - m) * a).abs() + (m * a).abs() + b.abs()
        return (v - m) * a + b, norms(16 * EPS * size)

    return _Map(layer, lambda shape: constant, box, value, lambda shape: shape)


@reader.register(nn.LayerNorm)
def _layer_norm(layer: nn.LayerNorm) -> Reading:
    dims = len(layer.normalized_shape)
    return _normalised(layer, lambda v: v.flatten(-dims), lambda p, shape: p)


@reader.register(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm) -> Reading:
    groups = layer.num_groups
    return _normalised(
        layer, lambda v: v.reshape(len(v), groups, -1), lambda p, shape: p.view(-1, *[1] * (len(shape) - 2))
    )


def _normalised(
    layer: Any,
    group: Callable[[Tensor], Tensor],
    spread: Callable[[Tensor, Sequence[int]], Tensor],
) -> Reading:
    r"""$x \mapsto w\,h(Px) + b$ on each group of $n$ entries, with $P$ taking off the mean and $h(u) = u / s$, $s^2 = |u|^2/n + \epsilon$.

    The Jacobian of $h$ is $(I - u u^\top / (n s^2)) / s$, symmetric with eigenvalues between 0 and $1/s \le 1/\sqrt\epsilon$, so
    the constant is $\max|w| / \sqrt\epsilon$, attained where all entries of a group are equal: 316 for the usual $\epsilon$.
    Of $n$ numbers with mean zero and $|u|^2 \le n s^2$ none exceeds $s \sqrt{n - 1}$.
    """
    if not 0 < layer.eps < math.inf:
        raise unknown(layer, f"has eps={layer.eps}, without which it has no Lipschitz constant")
    if layer.eps < 1e-290:
        raise unknown(layer, f"has eps={layer.eps}, beside which squares lose their digits to underflow")
    weight = None if layer.weight is None else as_float64(layer.weight)
    bias = None if layer.bias is None else as_float64(layer.bias)
    require_finite(layer, {"weight": weight, "bias": bias})
    top = 1.0 if weight is None else float(weight.abs().max())
    constant = top / math.sqrt(layer.eps) * (1 + 8 * EPS)

    def finish(v: Tensor) -> Tensor:
        v = v if weight is None else v * spread(weight, v.shape).to(v)
        return v if bias is None else v + spread(bias, v.shape).to(v)

    def box(given: Box) -> Box:
        ones = given.low.new_ones((1, *given.shape))
        reach = math.sqrt(max(group(ones).shape[-1] - 1, 0)) * (1 + 1e-12) * ones
        ends = torch.stack((finish(-reach)[0], finish(reach)[0]))
        return Box.outward(ends.amin(0), ends.amax(0), 1e-14 * ends.abs().amax(0))

    def value(v: Tensor) -> tuple[Tensor, Tensor]:
        parts = group(v)
        size = parts.shape[-1]
        centred = parts - parts.mean(-1, keepdim=True)
        image = finish((centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt()).view(v.shape))
        shift = 0.0 if bias is None else norms(spread(bias, v.shape).to(v).expand(v.shape))
        share = 2 * (size + 8) * EPS
        own = constant * norms(share * v) + norms(share * image) + share * shift
        return image, torch.where(torch.isfinite(image.flatten(1)).all(1), own, math.inf)

    return _Map(layer, lambda shape: constant, box, value, lambda shape: shape)


# ---- pooling


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    """One number for each dimension; like torch, a sequence of one serves all of them."""
    values = [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)]
    return tuple(values * dims if len(values) == 1 else values)


def _windows(size: int, stride: int, dilation: int = 1) -> int:
    """How many windows of a pool a pixel can lie in, along one dimension."""
    return max(sum(k * dilation % stride == rest for k in range(size)) for rest in range(stride))


def _max_pool(layer: Any, dims: int) -> Reading | None:
    r"""$|\max x_W - \max y_W| \le |(x - y)_W|$ for each window, so the constant is the root of the number of windows that share a pixel."""
    if layer.return_indices:
        return None
    size, stride, padding, dilation = (
        _tuple(v, dims) for v in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    shared = math.prod(_windows(*each) for each in zip(size, stride, dilation, strict=True))

    def act(v: Tensor) -> Tensor:
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
        return pool(v, size, stride, padding, dilation, layer.ceil_mode)

    return _unrounded(layer, lambda shape: math.sqrt(shared) * (1 + EPS), act)


def _average_pool(layer: Any, dims: int) -> Reading | None:
    r"""A mean of $k$ entries moves by at most $|(x - y)_W| / \sqrt k$, so the constant is $\sqrt{\text{shared} / k}$."""
    size, stride, padding = (_tuple(v, dims) for v in (layer.kernel_size, layer.stride, layer.padding))
    shared, entries = math.prod(_windows(*each) for each in zip(size, stride, strict=True)), math.prod(size)
    override = getattr(layer, "divisor_override", None)
    if override is not None and override <= 0:
        return None
    if override is not None:
        constant = math.sqrt(shared * entries) / override
    elif layer.ceil_mode or (
        any(padding) and not layer.count_include_pad
    ):  # at the border a mean of fewer, perhaps of one
        constant = math.sqrt(shared)
    else:
        constant = math.sqrt(shared / entries)

    def act(v: Tensor) -> Tensor:
        pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
        given = (v, size, stride, padding, layer.ceil_mode, layer.count_include_pad)
        return pool(*given) if dims == 1 else pool(*given, override)

    def box(given: Box) -> Box:
        low, high, size = (
            act(end[None])[0] for end in (given.low, given.high, torch.maximum(given.low.abs(), given.high.abs()))
        )
        return Box.outward(low, high, (entries + 4) * EPS * size)

    def value(v: Tensor) -> tuple[Tensor, Tensor]:
        return act(v), norms((entries + 4) * EPS * act(v.abs()))

    return _Map(layer, lambda shape: constant * (1 + 4 * EPS), box, value, _after(act))


# ---- padding


_MODES = {
    "Zero": "constant",
    "Constant": "constant",
    "Reflection": "reflect",
    "Replication": "replicate",
    "Circular": "circular",
}


def _pad(layer: Any, mode: str) -> Reading | None:
    """Constants beside the entries change no distance; copies of entries do, by the root of their largest number."""
    around = [int(p) for p in layer.padding]
    fill = float(getattr(layer, "value", 0.0)) if mode == "constant" else 0.0
    if not math.isfinite(fill) or (mode != "constant" and min(around) < 0):
        return None

    def act(v: Tensor) -> Tensor:
        return F.pad(v, around, mode, fill) if mode == "constant" else F.pad(v, around, mode)

    # Without padding it is a view.
    return _unrounded(layer, lambda shape: math.sqrt(copies(around, mode, shape)) * (1 + EPS), act, fresh=False)


# ---- rearrangement


reader.register(
    nn.PixelShuffle, lambda layer: Rearranged(partial(F.pixel_shuffle, upscale_factor=layer.upscale_factor))
)
reader.register(
    nn.PixelUnshuffle, lambda layer: Rearranged(partial(F.pixel_unshuffle, downscale_factor=layer.downscale_factor))
)


@reader.register(nn.Unflatten)
def _unflatten(layer: nn.Unflatten) -> Reading | None:
    if not isinstance(layer.dim, int) or not (layer.dim >= 1 or layer.dim == -1):
        return None
    return Rearranged(lambda v: v.unflatten(layer.dim, layer.unflattened_size))  # type: ignore[arg-type]


# ---- transposed convolution


class _Transposed(Affine):
    """The adjoint of a convolution with the same kernel, which has the same norm."""

    @property
    def terms(self) -> int:
        return self.weight.shape[0] // int(self.conv.groups) * self.weight[0, 0].numel()  # type: ignore[union-attr, arg-type]

    def _log_norm(self, shape: Shape | None, outputs: slice | None, inputs: slice | None) -> float:
        conv: Any = self.conv
        norm = conv_norm(self.weight, size=None, stride=conv.stride, dilation=conv.dilation, groups=conv.groups)
        return log_of(norm)

    def act(self, weight: Tensor, x: Tensor) -> Tensor:
        if x.ndim < weight.ndim:
            return self.act(weight, x[None])[0]
        conv: Any = self.conv
        call: Any = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[weight.ndim]
        return call(x, weight, None, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)

    def out_shape(self, shape: Shape | None) -> Shape | None:
        if shape is None or len(shape) != self.weight.ndim - 1:
            return None
        return _after(lambda v: self.act(self.weight.to("meta"), v))(shape)


class _TransposedLinear(Linear):
    kind = _Transposed


@reader.register(nn.ConvTranspose1d)
@reader.register(nn.ConvTranspose2d)
@reader.register(nn.ConvTranspose3d)
def _conv_transpose(layer: Any) -> Reading | None:
    return _TransposedLinear(layer) if layer.padding_mode == "zeros" and layer.transposed else None


for _dims in (1, 2, 3):
    reader.register(getattr(nn, f"MaxPool{_dims}d"), partial(_max_pool, dims=_dims))
    reader.register(getattr(nn, f"AvgPool{_dims}d"), partial(_average_pool, dims=_dims))
    for _kind, _mode in _MODES.items():
        reader.register(getattr(nn, f"{_kind}Pad{_dims}d"), partial(_pad, mode=_mode))
as_born(*{part for kind in reader.registry for part in kind.__mro__ if part not in (object, nn.Module)})
