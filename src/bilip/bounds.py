r"""Boxes and proven bi-Lipschitz bounds.

A map $F$ is bi-Lipschitz on a set $D$ when

$$\tfrac{1}{L^*}\,|x - x'| \;\le\; |F(x) - F(x')| \;\le\; L\,|x - x'| \qquad (x, x' \in D),$$

with $L \ge \mathrm{Lip}(F)$ on $D$ and $L^* \ge \mathrm{Lip}(F^{-1})$ on $F(D)$. This module holds the two numbers
(`BiLipschitz`), the sets on which they are proved (`Box`), and the arithmetic that keeps both on the safe side:
constants are logarithms, because products over a network overflow, and every operation rounds outward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bilip.errors import InputError

__all__ = ["BiLipschitz", "BlockBound", "Box", "as_float64", "log_of", "log_sum", "log_triangular_norm"]

EPS = 2.0**-52
INF = math.inf


def as_float64(value: object) -> Tensor:
    """A detached float64 copy on the CPU, where all proofs are computed."""
    return torch.as_tensor(value, dtype=torch.float64).detach().to("cpu")


def log_of(value: float) -> float:
    """Natural logarithm of a non-negative number, rounded up; `log_of(0)` is `-inf`."""
    if value <= 0:
        return -INF
    log = math.log(value) if value < INF else INF
    return log + 2 * EPS * (1 + abs(log))


def log_sum(*logs: float) -> float:
    r"""$\log \sum_i e^{l_i}$, rounded up."""
    top = max(logs)
    if math.isinf(top):
        return top
    log = top + math.log(sum(math.exp(term - top) for term in logs))
    return log + 8 * EPS * (1 + abs(log))


def log_product(*logs: float) -> float:
    """The logarithm of a product of constants, rounded up; a factor of zero makes it zero."""
    if -INF in logs:
        return -INF
    log = sum(logs)
    return log + EPS * (1 + len(logs) * sum(map(abs, logs))) if log < INF else INF


def log_triangular_norm(log_off_diagonal: float, log_diagonal: float) -> float:
    r"""Log of the spectral norm of $\begin{pmatrix} 1 & 0 \\ m & d \end{pmatrix}$, given $\log m$ and $\log d$, rounded up.

    The Jacobian of every coupling block has this block structure, so the norm of the matrix of block norms bounds
    it. With $d = 1$ the norm is $(m + \sqrt{m^2 + 4}) / 2$.

    Example:
        >>> round(math.exp(log_triangular_norm(math.log(1.5), 0.0)), 6)
        2.0
    """
    top = max(0.0, log_off_diagonal, log_diagonal)
    if top == INF:
        return INF
    one, m, d = (math.exp(log - top) for log in (0.0, log_off_diagonal, log_diagonal))
    # The larger root of q^2 - (1 + m^2 + d^2) q + d^2, with its discriminant in a form that cannot cancel.
    root = math.sqrt(((one + d) ** 2 + m**2) * ((one - d) ** 2 + m**2))
    squared = (one**2 + m**2 + d**2 + root) / 2
    log = top + math.log(squared) / 2
    return log + 16 * EPS * (1 + abs(log))


class Box:
    r"""The axis-aligned box $[a, b]$: the set on which a bound is asked for or proved.

    Args:
        low: Lower end, a number or a tensor of the shape of one sample (no batch dimension).
        high: Upper end, likewise; infinite ends are allowed.
        shape: Shape of one sample, when `low` and `high` are numbers. A box of numbers takes the shape of the
            model it is given to, where the model knows it.

    Example:
        >>> box = Box(-4, 4)
        >>> box.expand((2,)).contains(torch.tensor([[0.0, 3.0], [0.0, 5.0]]))
        tensor([ True, False])
    """

    __slots__ = ("high", "low")

    def __init__(self, low: float | Tensor, high: float | Tensor, shape: Sequence[int] | None = None) -> None:
        try:
            low_, high_ = torch.broadcast_tensors(as_float64(low), as_float64(high))
            if shape is not None:
                low_, high_ = low_.expand(tuple(shape)), high_.expand(tuple(shape))
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"Box({_short(low)}, {_short(high)}, shape={shape}): the ends must be numbers or tensors that "
                "broadcast "
                f"to one shape ({error})."
            ) from error
        if torch.isnan(low_).any() or torch.isnan(high_).any():
            raise InputError("Box: an end is NaN. Pass numbers, or infinities for an unbounded side.")
        if (low_ > high_).any():
            raise InputError(
                f"Box({_short(low)}, {_short(high)}) is empty: a lower end lies above its upper end. Swap the two."
            )
        self.low, self.high = low_, high_

    @classmethod
    def everything(cls, shape: Sequence[int] | None = None) -> Box:
        """All of space."""
        return cls(-INF, INF, shape)

    @classmethod
    def point(cls, value: Tensor) -> Box:
        """The box that holds one point."""
        return cls(value, value)

    @classmethod
    def outward(cls, low: Tensor, high: Tensor, error: Tensor | float = 0.0) -> Box:
        """A box widened by `error` and by the rounding of its own ends; NaN (`inf - inf`) becomes unbounded."""
        low = low - error - 4 * EPS * low.abs() - 1e-300
        high = high + error + 4 * EPS * high.abs() + 1e-300
        return cls(low.nan_to_num(-INF, INF, -INF), high.nan_to_num(INF, INF, -INF))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample; `()` for a box that takes any shape."""
        return tuple(self.low.shape)

    @property
    def is_bounded(self) -> bool:
        """Whether every end is finite."""
        return bool(torch.isfinite(self.low).all() and torch.isfinite(self.high).all())

    @property
    def center(self) -> Tensor:
        """The midpoint, for a bounded box."""
        return self.low / 2 + self.high / 2

    @property
    def radius(self) -> Tensor:
        """Half the side lengths, rounded up so that `center ± radius` covers the box."""
        return torch.maximum(self.high - self.center, self.center - self.low) * (1 + 4 * EPS)

    @property
    def log_radius(self) -> float:
        """Log of the Euclidean norm of `radius`."""
        return log_norm(self.radius)

    @property
    def magnitude(self) -> float:
        r"""The paper's $\max(|a|, |b|)$: the largest absolute value of a coordinate."""
        if self.low.numel() == 0:
            return 0.0
        return float(torch.maximum(self.low.abs(), self.high.abs()).max())

    def expand(self, shape: Sequence[int]) -> Box:
        """The same box for samples of the given shape."""
        return Box(self.low, self.high, shape)

    def map(self, function) -> Box:
        """Apply a rearrangement of entries (reshape, permutation, slice) to both ends."""
        return Box(function(self.low), function(self.high))

    def intersect(self, other: Box) -> Box:
        """The overlap of two boxes that both enclose one set."""
        low, high = torch.maximum(self.low, other.low), torch.minimum(self.high, other.high)
        return Box(torch.minimum(low, high), torch.maximum(low, high))

    def contains(self, x: Tensor) -> Tensor:
        """For each sample of a batch `(B, *shape)`: does it lie in the box?"""
        value = as_float64(x)
        return ((value >= self.low) & (value <= self.high)).flatten(1).all(1)

    def sample(self, count: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw points uniformly from a bounded box; float64, shape `(count, *shape)`."""
        if not self.is_bounded:
            raise InputError("Box.sample: the box is unbounded. Give it finite ends, for example Box(-4, 4).")
        unit = torch.rand(count, *self.shape, generator=generator, dtype=torch.float64)
        return self.low + unit * (self.high - self.low)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and torch.equal(self.low, other.low) and torch.equal(self.high, other.high)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        low, high = self.low, self.high
        if low.numel() == 0:
            return f"Box(shape={self.shape})"
        if bool((low == low.flatten()[0]).all() and (high == high.flatten()[0]).all()):
            ends = f"{float(low.flatten()[0]):.4g}, {float(high.flatten()[0]):.4g}"
        elif low.numel() <= 4:
            ends = f"{_numbers(low)}, {_numbers(high)}"
        else:
            ends = f"low in [{float(low.min()):.4g}, {float(low.max()):.4g}], high in [{float(high.min()):.4g}, {float(high.max()):.4g}]"
        return f"Box({ends}{f', shape={self.shape}' if self.shape else ''})"


def log_norm(vector: Tensor) -> float:
    """Log of the Euclidean norm of a float64 tensor, rounded up; safe from overflow."""
    if vector.numel() == 0:
        return -INF
    top = float(vector.abs().max())
    if top == 0 or math.isinf(top) or math.isnan(top):
        return -INF if top == 0 else INF
    scaled = float((vector / top).square().sum().sqrt())
    return log_of(top) + log_of(scaled * (1 + vector.numel() * EPS))


def _numbers(t: Tensor) -> str:
    return "[" + ", ".join(f"{v:.4g}" for v in t.flatten().tolist()) + "]"


def _short(value: object) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, Tensor) and value.ndim else str(value)


@dataclass(frozen=True)
class BlockBound:
    """One row of a bound: what is proved about one block of a network.

    Attributes:
        name: Path of the block inside the network.
        kind: Its class.
        log_forward: Log of the bound on the block's Lipschitz constant on the box that reaches it.
        log_inverse: Log of the bound on its inverse's, on the box that encloses its output.
        magnitude: Largest absolute value in the box that encloses its output.
    """

    name: str
    kind: str
    log_forward: float
    log_inverse: float
    magnitude: float


@dataclass(frozen=True, init=False, eq=False)
class BiLipschitz:
    r"""Proven upper bounds on $\mathrm{Lip}(F)$ and $\mathrm{Lip}(F^{-1})$.

    With a `domain` given, `forward` holds on `domain`, and `inverse` holds on $F(\text{domain})$, which lies in
    `image`.
    With a latent box given (`given == "latent"`) it is the other way round: `inverse` holds on `image`, and `forward`
    on
    $F^{-1}(\text{image})$, which lies in `domain`.

    The constants are kept as natural logarithms (`log_forward`, `log_inverse`); `forward` and `inverse` are floats and
    `inf` when they overflow.

    Args:
        forward: Upper bound on Lip(F).
        inverse: Upper bound on Lip(F^-1).
        domain: Where it holds; everywhere if not given.

    Example:
        >>> first, second = BiLipschitz(2.0, 3.0), BiLipschitz(10.0, 1.0)
        >>> both = first.then(second)
        >>> print(f"{both.forward:.3f} {both.inverse:.3f} {both.inverse_lower:.3f}")
        20.000 3.000 0.050
    """

    log_forward: float
    log_inverse: float
    domain: Box
    image: Box
    given: str
    formula: str
    eps: float
    blocks: tuple[BlockBound, ...] = field(repr=False)

    def __init__(
        self,
        forward: float | None = None,
        inverse: float | None = None,
        domain: Box | None = None,
        *,
        log_forward: float | None = None,
        log_inverse: float | None = None,
        image: Box | None = None,
        given: str = "domain",
        formula: str = "sharp",
        eps: float = 2.0**-23,
        blocks: Sequence[BlockBound] = (),
    ) -> None:
        values = {
            "log_forward": _one_of("forward", forward, log_forward),
            "log_inverse": _one_of("inverse", inverse, log_inverse),
            "domain": Box.everything() if domain is None else domain,
            "image": Box.everything() if image is None else image,
            "given": given,
            "formula": formula,
            "eps": eps,
            "blocks": tuple(blocks),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def forward(self) -> float:
        """Upper bound on Lip(F)."""
        return _exp_up(self.log_forward)

    @property
    def inverse(self) -> float:
        """Upper bound on Lip(F^-1)."""
        return _exp_up(self.log_inverse)

    @property
    def forward_lower(self) -> float:
        r"""Lower bound on Lip(F): $1 / L^*$, by the paper's remark on reversing the inequality."""
        return _exp_down(-self.log_inverse)

    @property
    def inverse_lower(self) -> float:
        r"""Lower bound on Lip(F^-1): $1 / L$."""
        return _exp_down(-self.log_forward)

    def then(self, after: BiLipschitz) -> BiLipschitz:
        """The bound of the composition: first this map, then `after`, whose domain must enclose this map's image."""
        return BiLipschitz(
            log_forward=log_product(self.log_forward, after.log_forward),
            log_inverse=log_product(self.log_inverse, after.log_inverse),
            domain=self.domain,
            image=after.image,
            given=self.given,
            formula=self.formula if self.formula == after.formula else f"{self.formula}+{after.formula}",
            eps=max(self.eps, after.eps),
            blocks=self.blocks + after.blocks,
        )

    def swap(self) -> BiLipschitz:
        """The bound of the inverse map."""
        return replace_bound(
            self,
            log_forward=self.log_inverse,
            log_inverse=self.log_forward,
            domain=self.image,
            image=self.domain,
            given={"domain": "latent", "latent": "domain"}[self.given],
            blocks=tuple(
                replace(row, log_forward=row.log_inverse, log_inverse=row.log_forward) for row in reversed(self.blocks)
            ),
        )

    def first_beyond_precision(self, direction: str = "inverse") -> BlockBound | None:
        """The first block at which the bound of the network so far passes 1/eps of the model's dtype.

        From there on the proof no longer excludes that rounding errors grow to the size of the data. `direction` is
        `"inverse"` or `"forward"`; `None` means that no block does.
        """
        limit, total = -math.log(self.eps), 0.0
        for row in self.blocks:
            total = log_product(total, getattr(row, f"log_{direction}"))
            if total > limit:
                return row
        return None

    def table(self) -> str:
        """The bounds block by block as plain text, in powers of ten.

        Example:
            >>> row = BlockBound("0", "AdditiveCoupling", math.log(10), math.log(10), 4.0)
            >>> print(BiLipschitz(10.0, 10.0, blocks=[row]).table())  # doctest: +NORMALIZE_WHITESPACE
            block  kind              lip F  lip F^-1  total F  total F^-1   max|box|
            0      AdditiveCoupling   1.00      1.00     1.00        1.00          4
            all constants are log10; formula: sharp; domain: Box(-inf, inf)
        """
        head = ("block", "kind", "lip F", "lip F^-1", "total F", "total F^-1", "max|box|")
        rows = [head, *self.rows()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
        lines = [
            "  ".join(c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        where = f"domain: {self.domain}" if self.given == "domain" else f"latent: {self.image}"
        return "\n".join([*lines, f"all constants are log10; formula: {self.formula}; {where}", *self.remarks()])

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of `table`, for other renderers."""
        forward = inverse = 0.0
        cells = []
        for row in self.blocks:
            forward, inverse = log_product(forward, row.log_forward), log_product(inverse, row.log_inverse)
            logs = (row.log_forward, row.log_inverse, forward, inverse)
            cells.append((row.name, row.kind, *(_log10(log) for log in logs), f"{row.magnitude:.3g}"))
        return cells

    def remarks(self) -> list[str]:
        """What a reader of the numbers has to know: the first block beyond precision, and overflow."""
        lines = []
        for direction, label in (("forward", "F"), ("inverse", "F^-1")):
            row = self.first_beyond_precision(direction)
            total = getattr(self, f"log_{direction}")
            if row is not None:
                lines.append(
                    f"the bound on Lip({label}) passes 1/eps = {1 / self.eps:.2g} at block {row.name} ({row.kind})"
                )
            if total == INF:
                lines.append(
                    f"the bound on Lip({label}) is +inf: an enclosing box or a logarithm left the range of "
                    "float64, a context was not "
                    "bounded (pass context=), or the map is not Lipschitz there; it proves nothing, also no divergence"
                )
        return lines

    def __repr__(self) -> str:
        where = f"domain={self.domain}" if self.given == "domain" else f"latent={self.image}"
        return f"BiLipschitz(forward={_number(self.log_forward)}, inverse={_number(self.log_inverse)}, {where})"


def replace_bound(bound: BiLipschitz, **changes: object) -> BiLipschitz:
    """A copy with some fields changed."""
    names = ("log_forward", "log_inverse", "domain", "image", "given", "formula", "eps", "blocks")
    return BiLipschitz(**{**{name: getattr(bound, name) for name in names}, **changes})  # type: ignore[arg-type]


def _one_of(name: str, value: float | None, log: float | None) -> float:
    if (value is None) == (log is None):
        raise InputError(f"BiLipschitz: give either {name}= or log_{name}=, exactly one of them.")
    if value is not None:
        if not value >= 0:
            raise InputError(f"BiLipschitz: {name}={value} is not an upper bound; it must be a number >= 0.")
        return log_of(float(value))
    if math.isnan(log):  # type: ignore[arg-type]
        raise InputError(f"BiLipschitz: log_{name} is NaN.")
    return float(log)  # type: ignore[arg-type]


def _exp_up(log: float) -> float:
    try:
        return math.exp(log) * (1 + 4 * EPS) if log < INF else INF
    except OverflowError:
        return INF


def _exp_down(log: float) -> float:
    return max(0.0, math.exp(min(log, 700.0)) * (1 - 4 * EPS)) if log > -INF else 0.0


def _log10(log: float) -> str:
    if math.isinf(log):
        return "+inf" if log > 0 else "-inf"
    power = log / math.log(10)
    return f"{power:.2f}" if abs(power) < 1e5 else f"{power:.2e}"


def _number(log: float) -> str:
    return f"{math.exp(log):.6g}" if log < 200 else ("inf" if log == INF else f"10^{log / math.log(10):.6g}")
