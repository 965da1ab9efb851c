"""Invertible 1x1 convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip import _linalg
from bilip._torch import EvalCache, capturing
from bilip.blocks.bijection import Bijection
from bilip.bounds import EPS, Box, as_float64, exp_up, log_norm, log_of, log_product, log_sum, norms
from bilip.errors import InputError, NoGlobalBound, PartitionError
from bilip.nets.norms import matrix_norm, smallest_singular_value

__all__ = ["InvertibleConv1x1", "Stack", "invert", "log_abs_det"]

KINDS = ("full", "plu", "orthogonal")


class InvertibleConv1x1(Bijection):
    r"""$F(x) = W x$ at every pixel, with a square matrix over the channels.

    Its constants are $\mathrm{Lip}(F) = \|W\|_2$ and $\mathrm{Lip}(F^{-1}) = \|W^{-1}\|_2$. An orthogonal matrix is one only up to the
    rounding of its dtype, and the inverse multiplies with its transpose: both constants then hold for the stored matrix, its
    transpose and its inverse.

    The inverse matrix is solved for in float64. It is kept only in evaluation mode where no gradient goes to the
    parameters, and only while these hold the very same numbers.

    Reference: Kingma and Dhariwal, *Glow: Generative Flow with Invertible 1x1 Convolutions*, 2018.

    Args:
        channels: Number of channels (dimension 1 of the batched input; any number of further dimensions).
        kind: `"full"`, a free matrix; `"plu"`, $P L (U + \mathrm{diag}(s))$, which cannot become singular;
            `"orthogonal"`, an isometry.

    Example:
        >>> block = InvertibleConv1x1(4)
        >>> x = torch.randn(2, 4, 8, 8)
        >>> bool(torch.allclose(block.inverse(block(x)), x, atol=1e-5))
        True
    """

    permutation: Tensor
    sign: Tensor

    def __init__(self, channels: int, *, kind: str = "full") -> None:
        super().__init__()
        if channels < 1 or kind not in KINDS:
            raise InputError(
                f"InvertibleConv1x1(channels={channels}, kind={kind!r}): expected channels >= 1 and kind one of {KINDS}."
            )
        self.channels, self.kind = channels, kind
        start = torch.linalg.qr(torch.randn(channels, channels, dtype=torch.float64))[0]
        if kind == "plu":
            p, lower, upper = _linalg.lu(start)
            diagonal = upper.diagonal()
            self.register_buffer("permutation", p.argmax(0))  # P[permutation[j], j] = 1
            self.register_buffer("sign", diagonal.sign().float())
            self.lower = nn.Parameter(lower.tril(-1).float())
            self.upper = nn.Parameter(upper.triu(1).float())
            self.log_diagonal = nn.Parameter(diagonal.abs().log().float())
        elif kind == "full":
            self.weight = nn.Parameter(start.float())
        else:
            self.parametrizations = nn.ModuleDict({"weight": _Exponential(nn.Parameter(start.float()))})
        self.volume_preserving = kind == "orthogonal"
        self._cache = EvalCache()

    def __getattr__(self, name: str):
        if name == "weight" and "parametrizations" in self.__dict__.get("_modules", ()):
            return self.parametrizations["weight"]()
        return super().__getattr__(name)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """W, computed in the given dtype where it is composed of factors."""
        if self.kind != "plu":
            return self.weight if dtype is None else self.weight.to(dtype)
        lower, upper = self._factors(dtype or self.lower.dtype)
        product = lower @ upper
        return torch.zeros_like(product).index_copy(0, self.permutation, product)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        eye = torch.eye(self.channels, dtype=dtype, device=self.lower.device)
        lower = self.lower.to(dtype).tril(-1) + eye
        # Only the sign of the sign counts.
        diagonal = torch.copysign(self.log_diagonal.to(dtype).exp(), self.sign.to(dtype))
        upper = self.upper.to(dtype).triu(1) + torch.diag(diagonal)
        return lower, upper

    def inverse_matrix(self) -> Tensor:
        """W^-1, solved for in float64 and rounded to the dtype of the parameters."""
        if self.kind == "orthogonal":
            return self.weight.mT
        if self.kind == "full":
            return self._cache.get(self, self.weight, invert)
        return self._cache.get(self, self._plu_key(), self._invert_plu)

    def _plu_key(self) -> Tensor:
        """Everything that the inverse depends on."""
        fixed = torch.stack((self.sign.double(), self.permutation.double()))  # 16 bits would not tell 256 from 257
        return torch.cat((*(part.double() for part in (self.lower, self.upper, self.log_diagonal[None])), fixed))

    def _invert_plu(self, parameters: Tensor) -> Tensor:
        lower, upper = self._factors(torch.float64)
        eye = torch.eye(self.channels, dtype=torch.float64, device=lower.device)
        half = torch.linalg.solve_triangular(
            lower, eye.index_select(0, self.permutation), upper=False, unitriangular=True
        )
        return torch.linalg.solve_triangular(upper, half, upper=True).to(self.lower.dtype)

    def mix(self, matrix: Tensor, x: Tensor) -> Tensor:
        """A matrix times the channels, at every pixel."""
        self.check(x, self.channels)
        self.check_like(x, matrix)
        if torch.is_autocast_enabled(x.device.type):  # autocast is for nets: the state keeps its precision
            with torch.autocast(x.device.type, enabled=False):
                return self.mix(matrix, x.to(matrix.dtype))
        if x.ndim == 2:
            return F.linear(x, matrix)
        # One product for each image is faster than a convolution.
        return torch.bmm(matrix.expand(len(x), -1, -1), x.flatten(2)).view(x.shape)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.mix(self.matrix(), x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return self.mix(self.inverse_matrix(), z)

    def _log_det(self, x: Tensor) -> Tensor:
        pixels = math.prod(x.shape[2:])
        if self.kind == "plu":
            return (self.log_diagonal.sum() * pixels).expand(x.shape[0])
        if self.kind == "orthogonal":
            return x.new_zeros(x.shape[0])
        return (log_abs_det(self.weight) * pixels).expand(x.shape[0])

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self(x), self._log_det(x)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.inverse(z), -self._log_det(z)

    # ---- proofs

    def _enclosed(self) -> tuple[Tensor, Tensor]:
        """W in float64 on the CPU, and for each entry how far it may be from the exact one."""
        matrix = as_float64(self.matrix(torch.float64))
        if self.kind == "orthogonal":  # as it acts, and as it would be without rounding
            exact = as_float64(self.parametrizations["weight"](torch.float64))
            return matrix, (matrix - exact).abs() + 16 * self.channels * EPS
        if self.kind == "full":
            return matrix, torch.zeros_like(matrix)
        order = self.permutation.cpu()
        if not torch.equal(order.sort().values, torch.arange(self.channels, device="cpu")):
            raise PartitionError(
                f"{self}: {order.tolist()} is not a permutation of 0..{self.channels - 1}, so the block has no inverse. Load an earlier "
                "checkpoint."
            )
        lower, upper = (as_float64(factor).abs() for factor in self._factors(torch.float64))
        # n products and sums, and an exponential that errs by less than two roundings; the last for what underflows.
        error = (self.channels + 8) * EPS * (lower @ upper) + 1e-300 * (1 + lower.sum(1, keepdim=True))
        return matrix, torch.zeros_like(error).index_copy(0, order, error)

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        matrix, error = self._enclosed()
        log = log_of(matrix_norm(matrix))
        return max(0.0, log) if self.kind == "orthogonal" else log_sum(log, log_norm(error))

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        matrix, error = self._enclosed()
        wobble = 0.0 if self.kind == "orthogonal" else exp_up(log_norm(error))
        smallest = (smallest_singular_value(matrix) - wobble) * (1 - EPS)
        log = -math.log(smallest) + 1e-15 * (1 + abs(math.log(smallest))) if smallest > 0 else math.inf
        if self.kind == "plu":
            log = min(log, self._log_inverse_of_factors())
        if log == math.inf:
            raise NoGlobalBound(
                f"{self}: the matrix is singular to working precision, so the block has no inverse and no bound on one. "
                "Use kind='plu' or kind='orthogonal', which cannot become singular, or load an earlier checkpoint."
            )
        return max(log, self.log_lip(box)) if self.kind == "orthogonal" else log

    def _log_inverse_of_factors(self) -> float:
        r"""A bound on $\log\|U^{-1} L^{-1}\|$ that survives cancellation in $L U$.

        Entry by entry $|T^{-1}| \le M(T)^{-1}$ for a triangular $T$, where $M(T)$ has $|T|$ on and $-|T|$ off the diagonal; solving with
        that only adds positive numbers.
        """
        total = 0.0
        for factor, upper in zip(self._factors(torch.float64), (False, True), strict=True):
            size = as_float64(factor).abs()
            if not bool((size.diagonal() > 0).all()) or not bool(torch.isfinite(size).all()):
                return math.inf
            comparison = 2 * torch.diag(size.diagonal()) - size
            inverse = torch.linalg.solve_triangular(
                comparison, torch.eye(len(size), dtype=size.dtype, device="cpu"), upper=upper
            )
            total = log_product(total, log_norm(inverse) + 8 * (len(size) + 4) ** 2 * EPS)
        return total

    def interval(self, box: Box, context: Box | None = None) -> Box:
        matrix, error = self._enclosed()
        return _apply(matrix, box, error)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        matrix, error = self._enclosed()
        inverse = matrix.mT if self.kind == "orthogonal" else torch.linalg.pinv(matrix)
        # With R = I - XW and x = W^-1 y: |x - Xy| = |Rx| <= |R| |W^-1| |y|, pixel by pixel.
        residual = torch.linalg.matrix_norm(
            torch.eye(self.channels, dtype=torch.float64, device="cpu") - inverse @ matrix
        )
        size = exp_up(log_norm(inverse))
        rounding = 4 * self.channels**1.5 * EPS * exp_up(log_norm(matrix)) + exp_up(log_norm(error))
        wobble = log_product(log_of(float(residual) + size * rounding), self.log_lip_inverse(box))
        return _apply(inverse, box, error.mT if self.kind == "orthogonal" else None, relative=exp_up(wobble))

    def extra_repr(self) -> str:
        return f"{self.channels}, kind={self.kind!r}"


class Stack:
    r"""Free matrices $W$ of 1x1 convolutions and the log-scales $s$ of the ActNorms right before them, by the stack.

    Both together are $M = W \mathrm{diag}(e^s)$ after a shift: one product, one solve, one determinant for many blocks, since on a
    device each launch counts. A stack holds matrices of one size, dtype and device, all of them with a scale or none.

    Args:
        pairs: $W$ and $s$, or `None` for $s$ where no ActNorm stands before.

    Attributes:
        key: What the pairs of a stack have in common.
        weights: Of shape `(count, channels, channels)`.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        self.key = self.key_of(*pairs[0])
        self.weights = torch.stack([weight for weight, _ in pairs])
        self._logs = [log_scale for _, log_scale in pairs if log_scale is not None]

    @staticmethod
    def key_of(weight: Tensor, log_scale: Tensor | None) -> tuple[object, ...]:
        """Pairs with the same key fit into one stack."""
        return len(weight), log_scale is not None, weight.dtype, weight.device

    @cached_property
    def _scales(self) -> Tensor:
        return torch.stack(self._logs).exp()

    def matrices(self) -> Tensor:
        """The matrix M of each pair."""
        return self.weights * self._scales[:, None, :] if self._logs else self.weights

    def inverses(self, solved: Tensor) -> Tensor:
        """The inverse of each M, from the inverses of the weights."""
        return solved / self._scales[:, :, None] if self._logs else solved


def invert(weight: Tensor) -> Tensor:
    """The inverse of a matrix, or of each of a stack, solved for in float64 and rounded."""
    if capturing(weight):
        return _newton(weight)
    return _linalg.inv_ex(weight.double())[0].to(weight.dtype)


def log_abs_det(weight: Tensor) -> Tensor:
    """The log of |det W|, of a matrix or of each of a stack."""
    if not capturing(weight):
        return _linalg.slogdet(weight)[1]
    before = torch.backends.cuda.preferred_linalg_library()
    torch.backends.cuda.preferred_linalg_library("cusolver")  # the other one allocates, which a capture forbids
    try:
        return _linalg.slogdet(weight)[1]
    finally:
        torch.backends.cuda.preferred_linalg_library(before)


def _newton(weight: Tensor) -> Tensor:
    r"""The inverse by products alone, for CUDA graphs: $X \leftarrow c X (2 - W X)$, at the end in float64.

    It begins with $X = W^\top / \|W^\top W\|_\infty$, so that the eigenvalues of $X W$ lie in $(0, 1]$. The factors $c$ bring all those
    from $10^{-10}$ on, of matrices with condition numbers up to $10^5$, near 1 in half the steps that Newton's method takes without
    them. A captured step cannot look whether that was enough; the guard of a walk does.
    """
    double = weight.dtype == torch.float64 or _tf32()  # 16 bits, or the inputs of products in TF32, would not converge
    with torch.autocast(weight.device.type, enabled=False):
        exact = weight.reshape(-1, *weight.shape[-2:]).double()
        stack = exact if double else exact.float()
        x = stack.mT / (stack.mT @ stack).abs().sum(-1).amax(-1)[:, None, None]
        for c in _FACTORS:
            x = torch.baddbmm(x, x, stack @ x, beta=2 * c, alpha=-c)
        x = x.double()
        for _ in range(2):
            x = torch.baddbmm(x, x, exact @ x, beta=2, alpha=-1)
    return x.to(weight.dtype).view(weight.shape)


def _tf32() -> bool:
    """Whether products on a GPU round their inputs to ten bits."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # set in another of torch's ways
        return True


def _newton_factors(low: float) -> list[float]:
    """Of a step that takes eigenvalues from [low, 1] to a wider interval around 1 than it would alone, until `low` is near 1."""
    found = []
    while low < 0.5:
        image = low * (2 - low)
        found.append(1.96 / (1 + image))  # 2 would be the best, and leaves no room for rounding
        low = min(found[-1] * image, 2 - found[-1])
    return [*found, 1.0, 1.0, 1.0, 1.0]


_FACTORS = _newton_factors(1e-10)


class _Exponential(nn.Module):
    """The orthogonal matrix $e^{A - A^T}$ with $A$ the part of `original` below the diagonal, computed in float32 at least."""

    def __init__(self, original: nn.Parameter) -> None:
        super().__init__()
        self.original = original

    def forward(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.original.dtype
        below = self.original.to(torch.promote_types(dtype, torch.float32)).tril(-1)
        return torch.linalg.matrix_exp(below - below.mT).to(dtype)


def _apply(matrix: Tensor, box: Box, wobble: Tensor | None = None, *, relative: float = 0.0) -> Box:
    """The interval image of a box under a matrix over its first dimension, known up to `wobble` entry by entry or `relative` in norm."""
    if not box.is_bounded:
        return Box.everything(box.shape)

    def mix(weight: Tensor, x: Tensor) -> Tensor:
        return torch.tensordot(weight, x, ([1], [0]))  # type: ignore[arg-type]

    center, radius, size = box.center, box.radius, torch.maximum(box.low.abs(), box.high.abs())
    middle, reach = mix(matrix, center), mix(matrix.abs(), radius)
    error = (matrix.shape[0] + 4) * EPS * (mix(matrix.abs(), center.abs()) + reach)
    if wobble is not None:
        error = error + mix(wobble, size)
    if relative:
        length = norms(size.flatten(1).mT if size.ndim > 1 else size[None]).reshape(1, *size.shape[1:])
        error = error + relative * length
    return Box.outward(middle - reach, middle + reach, error)
