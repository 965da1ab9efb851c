r"""Operator norms: exact for matrices, certified upper bounds for convolutions, lower bounds by power iteration.

**Convolutions.** A stride-1 convolution with zero padding on an $n \times n$ image is a compression (a restriction of
inputs and outputs) of the circular convolution on any torus of side $N \ge n + k - 1$, so its norm is at most that of
the circular one, which the Fourier transform turns into one small matrix a frequency: $\max_\theta \|\hat
K(\theta)\|_2$. With circular padding the torus is the image itself and the value is exact.

**Unknown or large images.** $u^* \hat K(\theta) v$ is a trigonometric polynomial of degree $(k-1)/2$ after a shift, and
such a polynomial is at most $1/\cos(\pi (k-1)/(2N))$ times its largest value on an $N$-point grid, in each dimension.
A coarse grid times this factor bounds the norm for *every* image size.

**Strides.** Sorting the pixels of the input by their position modulo the stride is a rearrangement, hence an isometry,
and turns a stride-$s$ convolution into a stride-1 convolution with $s^2$ times as many input channels and $\lceil k/s
\rceil$ taps. (With circular padding this needs a size that the stride divides; otherwise the stride is ignored, which
only adds outputs.)

**Wide layers.** Gram iteration: $\|A\|_2 \le \|(A^* A)^{2^{t-1}}\|_F^{2^{-t}}$, an upper bound for every $t$ that
exceeds the norm by a factor of at most $r^{2^{-t-1}}$ for rank $r$ (Delattre et al., *Efficient bound of Lipschitz
constant for convolutional layers by Gram iteration*, 2023).

Power iteration approaches a norm from below; here it is only ever called a lower bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from bilip.bounds import EPS
from bilip.errors import InputError, NonFiniteParameters

__all__ = ["conv_norm", "gram_norm", "matrix_norm", "power_lower_bound", "smallest_singular_value"]

SVD_WIDTH = 48  # up to this many channels on the narrow side an SVD per frequency is fast


def matrix_norm(weight: Tensor) -> float:
    r"""$\|W\|_2$ by SVD in float64, rounded up.

    Example:
        >>> round(matrix_norm(torch.diag(torch.tensor([3.0, 0.5]))), 9)
        3.0
    """
    _require_finite(weight, "matrix_norm")
    if weight.numel() == 0:
        return 0.0
    scaled, unit = _in_units(weight)
    return _times(float(torch.linalg.matrix_norm(scaled, ord=2)) * (1 + _svd_error(weight.shape)), unit, math.inf)


def smallest_singular_value(weight: Tensor) -> float:
    r"""$\sigma_{\min}(W)$ by SVD in float64, rounded down; 0 when it cannot be told from 0."""
    _require_finite(weight, "smallest_singular_value")
    scaled, unit = _in_units(weight)
    values = torch.linalg.svdvals(scaled)
    return _times(max(0.0, float(values[-1]) - float(values[0]) * _svd_error(weight.shape)), unit, 0.0)


def gram_norm(matrices: Tensor, steps: int = 10) -> Tensor:
    r"""Certified upper bound on $\max_i \|A_i\|_2$ over a batch of real or complex matrices, differentiable once.

    Example:
        >>> a = torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64))
        >>> round(float(gram_norm(a[None])), 6)
        2.0
    """
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    if len(flat) > 1:
        largest = gram_bounds(flat, steps)[0].argmax()
        flat = flat.index_select(0, largest[None])
    return gram_norms(flat, steps)[0]


def gram_norms(matrices: Tensor, steps: int = 10) -> Tensor:
    r"""Certified upper bounds on $\|A_i\|_2$ for each of a batch of real or complex matrices, differentiable once.

    Example:
        >>> a = torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64))
        >>> gram_norms(torch.stack((a, 3 * a)))
        tensor([2.0000, 6.0000], dtype=torch.float64)
    """
    wanted = torch.is_grad_enabled() or forward_ad._current_level >= 0
    bounds, slopes = gram_bounds(matrices, steps, slopes=wanted)
    if slopes is None:
        return bounds
    inner = (slopes.conj() * matrices).real.sum((-2, -1))
    return bounds * (1 + (inner - inner.detach()))


@torch.no_grad()
def gram_bounds(matrices: Tensor, steps: int = 10, *, slopes: bool = False) -> tuple[Tensor, Tensor | None]:
    r"""The bounds as constants, and the slopes $\nabla_A \log \|A\|$ that carry their gradients.

    The bound is the Schatten norm $\|A\|_p$ with $p = 2^{t+1}$. Its gradient is a multiple of $A (A^* A)^{p/2 - 1}$, and the inner
    product of the slope with $A$ is 1, which gives the factor. No iteration is kept for a backward pass, and second derivatives
    are not carried.
    """
    matrices = matrices.detach()
    wide = matrices.shape[-1] > matrices.shape[-2]
    tall = matrices.mH if wide else matrices
    rank, tiny = tall.shape[-1], torch.finfo(tall.real.dtype).tiny

    def halved(a: Tensor) -> tuple[Tensor, Tensor]:
        """Divide by the size, and return it too."""
        if (
            a.is_complex()
        ):  # as pairs of real numbers: dividing complex ones takes several times as long, so does their size
            pairs = torch.view_as_real(a)
            size = pairs.flatten(-3).norm(dim=-1).clamp_min(tiny)
            return torch.view_as_complex(pairs / size[..., None, None, None]), size
        size = torch.linalg.matrix_norm(a).clamp_min(tiny)
        return a / size[..., None, None], size

    # In units of its largest entry no square overflows or underflows, and the logs stay small enough for exp to keep its digits.
    unit = tall.abs().amax((-2, -1)).clamp_min(tiny) if tall.numel() else tall.real.new_full((len(tall),), tiny)
    a = scaled = tall / unit[..., None, None]
    power = None  # of A^* A, on the narrow side
    log = torch.zeros(len(tall), dtype=tall.real.dtype, device=tall.device)
    for step in range(steps):
        a, size = halved(a)
        log = log + size.log() * 2.0**-step
        a = a.mH @ a
        if slopes:
            power = a if power is None else halved(power @ a)[0]
    log = log + halved(a)[1].log() * 2.0**-steps
    # With ||A||_F = 1 a product errs by at most gamma = (rows + 2) eps, and ||A^* A||_2 >= 1/rank, so its norm errs by
    # gamma * rank relative to itself; the 2^-step roots make the errors of later steps a geometric series. What is computed again
    # for one matrix alone differs by no more.
    slack = 8 * (tall.shape[-2] + tall.shape[-1] + 8) * rank * torch.finfo(log.dtype).eps
    bounds = log.exp() * (1 + slack) * unit
    # Below the smallest number, products keep no digits.
    bounds = torch.where((bounds < tiny) & (tall.abs().amax((-2, -1)) > 0), tiny, bounds)
    if not slopes:
        return bounds, None
    slope = scaled if power is None else halved(scaled @ power)[0]
    inner = (slope.conj() * scaled).real.sum((-2, -1)).clamp_min(tiny)
    slope = slope / inner[..., None, None] / unit[..., None, None]
    slope = torch.where(unit[..., None, None] < 1e16 * tiny, 0.0, slope)  # of zero, or too steep for this dtype
    return bounds, slope.mH if wide else slope


def conv_norm(
    weight: Tensor,
    *,
    size: Sequence[int] | None = None,
    padding_mode: str = "zeros",
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    method: str = "auto",
    device: torch.device | None = None,
) -> float:
    """Certified upper bound on the operator norm of a convolution (any number of spatial dimensions).

    Args:
        weight: Kernel, `(out, in / groups, *taps)`.
        size: Spatial size of the input; without it the bound holds for every size.
        padding_mode: `"zeros"` (any amount of padding) or `"circular"` (no more padding than keeps the size).
        stride: Stride; see the module's text for the argument.
        dilation: Dilation of the taps.
        groups: Channel groups: the operator is block diagonal, its norm the largest of the groups'.
        method: `"svd"`, `"gram"`, or `"auto"`: an SVD for up to 48 channels on the narrow side, Gram iteration beyond.
        device: Where Gram iteration runs; a GPU does for a whole model what takes a CPU many seconds. On the CPU by default, as all else.

    Example:
        >>> mean = torch.full((1, 1, 3, 3), 1 / 9)
        >>> round(conv_norm(mean, size=(16, 16), padding_mode="circular"), 6)
        1.0
    """
    _require_finite(weight, "conv_norm")
    scaled, unit = _in_units(weight)
    symbol, slack = conv_symbol(
        scaled, size=size, padding_mode=padding_mode, stride=stride, dilation=dilation, groups=groups
    )
    if symbol.numel() == 0:
        return 0.0
    if method not in ("auto", "svd", "gram"):
        raise InputError(f"conv_norm: method={method!r}; expected 'auto', 'svd' or 'gram'.")
    if method == "svd" or (method == "auto" and min(symbol.shape[-2:]) <= SVD_WIDTH):
        norm = float(torch.linalg.matrix_norm(symbol, ord=2).max()) * (1 + _svd_error(symbol.shape[-2:]))
    else:
        norm = float(gram_norm(symbol if device is None or device.type != "cuda" else symbol.to(device)))
    return _times(norm * slack, unit, math.inf)


def conv_symbol(
    weight: Tensor,
    *,
    size: Sequence[int] | None = None,
    padding_mode: str = "zeros",
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> tuple[Tensor, float]:
    r"""The matrices $\hat K(\theta)$ on a grid, and the factor by which their largest norm may fall short of the operator's.

    Differentiable in `weight`. The matrices have shape `(frequencies * groups, out / groups, in / groups)`.
    """
    dims = weight.ndim - 2
    strides, dilations = _per_dim(stride, dims), _per_dim(dilation, dims)
    if padding_mode not in ("zeros", "circular"):
        raise InputError(
            f"conv_norm: padding_mode={padding_mode!r} has no certified bound here; use 'zeros' or 'circular', "
            "or declare the constant with bilip.nets.Declared(net, lipschitz=...)."
        )
    if padding_mode == "circular":
        if size is None:
            padding_mode = "circular-any"
        if size is None or any(n % s for n, s in zip(size, strides, strict=True)):
            # Phases would not close up around the torus; leaving out outputs only shrinks the norm.
            strides = (1,) * dims
    # Images up to this side get their own torus; larger ones share a grid that serves every size.
    largest, grid = (48, 32) if min(weight.shape[0] // groups, weight.shape[1]) <= SVD_WIDTH else (24, 16)
    kernel, taps, sizes = weight.unflatten(0, (groups, -1)), [], []
    for k in range(dims):
        n = None if size is None else int(size[k])
        kernel, offsets, n = _polyphase(kernel, k, strides[k], dilations[k], n, padding_mode == "circular")
        taps.append(offsets)
        sizes.append(n)
    slack = 1.0
    for k in range(dims):
        degree = (max(taps[k]) - min(taps[k])) / 2
        if padding_mode == "circular":
            points = sizes[k]
        else:
            n = sizes[k]
            torus = n + max(taps[k]) - min(taps[k]) if n is not None and padding_mode == "zeros" else None
            if torus is not None and torus <= largest:
                points = torus
            else:
                points = max(grid, 4 * math.ceil(degree))
                slack /= math.cos(math.pi * degree / points)
        last = k == dims - 1  # real kernels: half the frequencies of one dimension suffice
        freq = torch.arange(points // 2 + 1 if last else points, dtype=torch.float64, device=weight.device)
        angle = 2 * math.pi / points * freq[:, None] * torch.tensor(taps[k], dtype=torch.float64, device=weight.device)
        waves = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
        kernel = torch.tensordot(kernel.to(torch.complex128), waves, ([3], [1]))  # type: ignore[arg-type]  # taps to frequencies
    return kernel.flatten(3).permute(3, 0, 1, 2).flatten(0, 1), slack * (1 + 64 * EPS)


def _polyphase(
    kernel: Tensor, dim: int, stride: int, dilation: int, size: int | None, circular: bool
) -> tuple[Tensor, list[int], int | None]:
    """The taps of one spatial dimension, its stride turned into input channels (axis 2)."""
    offsets = [dilation * j for j in range(kernel.shape[3 + dim])]
    if stride == 1:
        return kernel, offsets, size
    coarse = list(range(offsets[-1] // stride + 1))
    taps = kernel.movedim(3 + dim, 3)
    phases = kernel.new_zeros(*taps.shape[:3], stride, len(coarse), *taps.shape[4:])
    for j, offset in enumerate(offsets):
        phases[:, :, :, offset % stride, offset // stride] = taps[:, :, :, j]
    # With zero padding the image may begin in the middle of a stride; one more pixel, or a larger torus, covers that.
    exact = size is not None and size % stride == 0
    coarse_size = None if size is None else size // stride if exact and circular else math.ceil(size / stride) + 1
    return phases.flatten(2, 3).movedim(3, 3 + dim), coarse, coarse_size


def power_lower_bound(module: nn.Module, shape: Sequence[int], steps: int = 100, seed: int = 0) -> float:
    """A *lower* bound on the norm of a linear module (its bias ignored), by power iteration in float64.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False).double()
        >>> _ = layer.weight.data.copy_(torch.diag(torch.tensor([3.0, 0.5])))
        >>> round(power_lower_bound(layer, (2,)), 6)
        3.0
    """
    module = copy.deepcopy(module).double().cpu()
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(1, *shape, generator=generator, dtype=torch.float64, device="cpu")
    zero = torch.zeros_like(v)
    best = 0.0
    for _ in range(steps):
        v = v / v.norm()
        jv = torch.func.jvp(module, (zero,), (v,))[1]
        top = float(jv.detach().abs().max())
        if not 0 < top < math.inf:
            break
        jv = jv / top  # so that no square overflows or underflows
        best = max(best, top * float(jv.detach().norm()))
        (v,) = torch.func.vjp(module, zero)[1](jv)
        v = v.detach() / v.detach().abs().max()
        if not torch.isfinite(v).all():
            break
    return best


def _per_dim(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value)


def _in_units(weight: Tensor) -> tuple[Tensor, float]:
    """A weight in float64 on the CPU, divided by a power of two near its largest entry, and that power."""
    exact = weight.detach().double().cpu()
    top = float(exact.abs().max()) if exact.numel() else 0.0
    unit = 2.0 ** max(math.frexp(top)[1] - 1, -1022) if top else 1.0
    return exact / unit, unit


def _times(value: float, unit: float, toward: float) -> float:
    """The product, rounded towards `toward` where it is so small that it is rounded at all."""
    product = value * unit
    return math.nextafter(product, toward) if value > 0 and product < 2.0**-1000 else product


def _svd_error(shape: Sequence[int]) -> float:
    return 8 * (shape[-2] + shape[-1]) * EPS


def _require_finite(weight: Tensor, who: str) -> None:
    if not torch.isfinite(weight).all():
        raise NonFiniteParameters(
            f"{who}: the weight of shape {tuple(weight.shape)} holds NaN or Inf; nothing can be proved of it."
        )
