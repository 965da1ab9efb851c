"""What is proved about a map and its inverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bilip.bounds.box import Box
from bilip.bounds.logs import INF, exp_down, exp_up, log_of, log_product
from bilip.errors import InputError

__all__ = ["BiLipschitz", "BlockBound"]


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
    `image`. With a latent box given (`given == "latent"`) it is the other way round: `inverse` holds on `image`, and
    `forward` on $F^{-1}(\text{image})$, which lies in `domain`.

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
        return exp_up(self.log_forward)

    @property
    def inverse(self) -> float:
        """Upper bound on Lip(F^-1)."""
        return exp_up(self.log_inverse)

    @property
    def forward_lower(self) -> float:
        r"""Lower bound on Lip(F): $1 / L^*$, by the paper's remark on reversing the inequality."""
        return exp_down(-self.log_inverse)

    @property
    def inverse_lower(self) -> float:
        r"""Lower bound on Lip(F^-1): $1 / L$."""
        return exp_down(-self.log_forward)

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
        return replace(
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


def _log10(log: float) -> str:
    if math.isinf(log):
        return "+inf" if log > 0 else "-inf"
    power = log / math.log(10)
    return f"{power:.2f}" if abs(power) < 1e5 else f"{power:.2e}"


def _number(log: float) -> str:
    return f"{math.exp(log):.6g}" if log < 200 else ("inf" if log == INF else f"10^{log / math.log(10):.6g}")
