"""Invertible 1x1 convolution."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip import _linalg
from bilip._capture import capturing
from bilip.blocks.bijection import Bijection
from bilip.bounds import EPS, Box, as_float64, log_of
from bilip.errors import InputError, NoGlobalBound
from bilip.nets.cache import EvalCache
from bilip.nets.norms import matrix_norm, smallest_singular_value

__all__ = ["InvertibleConv1x1", "invert", "log_abs_det"]

KINDS = ("full", "plu", "orthogonal")


class InvertibleConv1x1(Bijection):
    r"""$F(x) = W x$ at every pixel, with a square matrix over the channels.

    Its constants are $\mathrm{Lip}(F) = \|W\|_2$ and $\mathrm{Lip}(F^{-1}) = \|W^{-1}\|_2$.

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
                f"InvertibleConv1x1(channels={channels}, kind={kind!r}): expected channels >= 1 and kind one "
                f"of {KINDS}."
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
        else:
            self.weight = nn.Parameter(start.float())
            if kind == "orthogonal":
                # Without trivialization the matrix is orthogonal to the precision of whatever dtype the block is moved to.
                nn.utils.parametrizations.orthogonal(self, "weight", "matrix_exp", use_trivialization=False)
        self.volume_preserving = kind == "orthogonal"
        self._cache = EvalCache()

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
        upper = self.upper.to(dtype).triu(1) + torch.diag(self.sign.to(dtype) * self.log_diagonal.to(dtype).exp())
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
        fixed = torch.stack((self.sign, self.permutation.to(self.sign.dtype)))
        return torch.cat((self.lower, self.upper, self.log_diagonal[None], fixed.to(self.lower.dtype)))

    def _invert_plu(self, parameters: Tensor) -> Tensor:
        lower, upper = self._factors(torch.float64)
        eye = torch.eye(self.channels, dtype=torch.float64, device=lower.device)
        half = torch.linalg.solve_triangular(
            lower, eye.index_select(0, self.permutation), upper=False, unitriangular=True
        )
        return torch.linalg.solve_triangular(upper, half, upper=True).to(parameters.dtype)

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

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        return log_of(matrix_norm(self.matrix(torch.float64)))

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        smallest = smallest_singular_value(self.matrix(torch.float64))
        if not smallest:
            raise NoGlobalBound(
                f"{self}: the matrix is singular to working precision, so the block has no inverse and no bound on one. "
                "Use kind='plu' or kind='orthogonal', which cannot become singular, or load an earlier checkpoint."
            )
        return -math.log(smallest) + 1e-15 * (1 + abs(math.log(smallest)))

    def interval(self, box: Box, context: Box | None = None) -> Box:
        return _apply(as_float64(self.matrix(torch.float64)), box)

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        matrix = as_float64(self.matrix(torch.float64))
        inverse = torch.linalg.pinv(matrix)
        # With R = I - XW and x = W^-1 y: |x - Xy| = |Rx| <= |R| |W^-1| |y|, pixel by pixel.
        residual = torch.linalg.matrix_norm(torch.eye(self.channels, dtype=torch.float64) - inverse @ matrix)
        wobble = float(residual) + 4 * self.channels**1.5 * EPS * float(
            torch.linalg.matrix_norm(inverse) * torch.linalg.matrix_norm(matrix)
        )
        log = self.log_lip_inverse(box)
        return _apply(inverse, box, wobble * math.exp(min(log, 700.0)) if log < math.inf else math.inf)

    def extra_repr(self) -> str:
        return f"{self.channels}, kind={self.kind!r}"


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


def _apply(matrix: Tensor, box: Box, relative: float = 0.0) -> Box:
    """The interval image of a box under a matrix over its first dimension."""
    if not box.is_bounded:
        return Box.everything(box.shape)

    def mix(weight: Tensor, x: Tensor) -> Tensor:
        return torch.tensordot(weight, x, ([1], [0]))  # type: ignore[arg-type]

    center, radius, size = box.center, box.radius, torch.maximum(box.low.abs(), box.high.abs())
    middle, reach = mix(matrix, center), mix(matrix.abs(), radius)
    error = (matrix.shape[0] + 4) * EPS * (mix(matrix.abs(), center.abs()) + reach)
    if relative:
        error = error + relative * size.square().sum(0, keepdim=True).sqrt()
    return Box.outward(middle - reach, middle + reach, error)
