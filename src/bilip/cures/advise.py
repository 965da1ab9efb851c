r"""Which scales and constants keep a flow invertible, before it is trained.

A block with $\mathrm{Lip}(F) \le L$ and $\mathrm{Lip}(F^{-1}) \le L^*$ has a condition of at most $L L^*$, and a chain of $n$ blocks, whose
values stay within the box, one of at most the product: that is proved, for all weights that keep the stated constants. If each block
rounds its value by $\epsilon$ of the box in both directions, which nets with few digits to lose do, a round trip is then off by
at most $2 n \epsilon \prod L L^*$ of the box, and a tolerance $\tau$ is kept if every block has

$$L L^* \le \left(\frac{\tau}{2 n \epsilon}\right)^{1/n}.$$

The worst case is rare: trained flows often do better than this, and an audit tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bilip._torch import dtype_name
from bilip.errors import InputError

__all__ = ["Advice", "Design", "advise"]


@dataclass(frozen=True)
class Design:
    """One way to build the blocks.

    Attributes:
        blocks: `additive`, `affine` or `residual`.
        constants: What has to hold: Lipschitz constants of nets, the range of a scale.
        condition: Proven bound on the condition number of the whole chain.
        error: What follows for the error of a round trip, as a part of the box, if each block rounds by one epsilon.
        code: To paste.
    """

    blocks: str
    constants: dict[str, float]
    condition: float
    error: float
    code: str


@dataclass(frozen=True)
class Advice:
    """What `advise` found.

    Attributes:
        depth: Number of blocks.
        dtype: Arithmetic.
        box: Largest size of a value.
        tolerance: Largest relative error of a round trip.
        per_block: Largest condition number of one block.
        designs: The ways to build it.
    """

    depth: int
    dtype: str
    box: float
    tolerance: float
    per_block: float
    designs: tuple[Design, ...]

    def __str__(self) -> str:
        head = f"{self.depth} blocks in {self.dtype}, values within {self.box:g}, round trips to {self.tolerance:.2g}: "
        lines = [head + f"a condition of at most {self.per_block:.4g} a block."]
        for design in self.designs:
            held = ", ".join(f"{name} {value:.4g}" for name, value in design.constants.items())
            lines += [
                f"  {design.blocks}: {held}; proven condition {design.condition:.3g}, error {design.error:.2g}",
                f"    {design.code}",
            ]
        return "\n".join(lines)


def advise(
    depth: int,
    dtype: torch.dtype | str = torch.float32,
    box: float | tuple[float, float] = 4.0,
    *,
    features: int = 2,
    tolerance: float | None = None,
) -> Advice:
    """Allowed scale ranges and Lipschitz constants for a depth, a dtype and a box, with the proven condition that they give.

    Args:
        depth: Number of blocks.
        dtype: Arithmetic in which it will run.
        box: Largest size of the values inside, in the box that ActNorm or the data keep them in; or a pair (low, high).
        features: Dimension, for the code.
        tolerance: Largest relative error of a round trip; by default what audits allow: the square root of the dtype's epsilon, and no
            less than that of float32.

    Example:
        >>> import bilip
        >>> advice = bilip.advise(16, "float32", 4.0)
        >>> [design.blocks for design in advice.designs]
        ['additive', 'affine', 'residual']
        >>> 0 < advice.designs[0].constants["net"] < 1, all(design.error <= advice.tolerance for design in advice.designs)
        (True, True)
    """
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise InputError(f"advise(depth={depth!r}): expected a whole number of blocks, 1 or more.")
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise InputError(f"advise(dtype={dtype!r}): expected a floating dtype, as in torch.float32 or 'float32'.")
    ends = tuple(box) if isinstance(box, (tuple, list)) else (-box, box) if is_number(box) else ()
    if len(ends) != 2 or not all(is_number(end) and math.isfinite(end) for end in ends) or ends[0] >= ends[1]:
        raise InputError(f"advise(box={box!r}): expected a positive number, or a pair (low, high).")
    if not isinstance(features, int) or isinstance(features, bool) or features < 2:
        raise InputError(f"advise(features={features!r}): expected a whole number, 2 or more.")
    size = max(abs(ends[0]), abs(ends[1]))
    eps = torch.finfo(kind).eps
    limit = math.sqrt(max(eps, 2.0**-23)) if tolerance is None else tolerance
    if not is_number(limit) or not 0 < limit < 1:
        raise InputError(f"advise(tolerance={tolerance!r}): expected a number between 0 and 1.")
    room = math.log(limit / (2 * depth * eps))
    if room <= 0:
        raise InputError(
            f"advise: {depth} blocks in {dtype_name(kind)} cannot be shown to keep a round trip to {limit:.2g}, whatever "
            "they are: rounding alone may add up to more. Use more bits or fewer blocks."
        )
    each = room / depth
    name = dtype_name(kind)
    designs = (_additive(each, depth, features), _affine(each, depth, features, size), _residual(each, depth, features))
    found = tuple(_design(*design, depth, eps) for design in designs)
    return Advice(depth, name, size, limit, math.exp(each), found)


def is_number(value: object) -> bool:
    """Whether this is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_Raw = tuple[str, dict[str, float], float, str]


def _design(blocks: str, constants: dict[str, float], log_block: float, code: str, depth: int, eps: float) -> Design:
    log = depth * log_block
    condition = math.exp(log) if log < 700 else math.inf
    return Design(blocks, constants, condition, 2 * depth * eps * condition, code)


def _largest(log_condition: Callable[[float], float], room: float, high: float) -> float:
    """The largest constant whose log condition fits, by bisection, rounded down to four digits."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if log_condition(middle) <= room else (low, middle)
    if low <= 0:
        return 0.0
    digits = 3 - math.floor(math.log10(low))
    return math.floor(low * 10**digits) / 10**digits


def _log_norm(off: float, diagonal: float) -> float:
    """Log of the largest singular value of [[1, 0], [off, diagonal]]."""
    total, determinant = 1 + off * off + diagonal * diagonal, diagonal
    return 0.5 * math.log((total + math.sqrt(max(0.0, total * total - 4 * determinant * determinant))) / 2)


def _additive(room: float, depth: int, features: int) -> _Raw:
    def log_condition(c: float) -> float:
        return 2 * _log_norm(c, 1.0)

    c = _largest(log_condition, room, 1e6)
    code = f'bilip.models.real_nvp({features}, blocks={depth}, coupling="additive", lipschitz={c:g})'
    return "additive", {"net": c}, log_condition(c), code


def _affine(room: float, depth: int, features: int, size: float) -> _Raw:
    """Scale in (1 - w, 1) and nets held to w: one number, so that neither takes all of the room."""

    def log_condition(w: float) -> float:
        low = 1 - w
        slope = w / 4  # of low + w sigmoid(s)
        off = size * slope * w + w
        return _log_norm(off, 1.0) + _log_norm(off / low, 1 / low)

    w = min(_largest(log_condition, room, 0.999), 0.999)
    low = round(1 - w, 12)  # all digits of it are in the code: a lower end would break the bound
    code = f"bilip.models.real_nvp({features}, blocks={depth}, scale=bilip.blocks.SigmoidScale({low!r}, 1.0), lipschitz={w:g})"
    return "affine", {"scale from": low, "scale to": 1.0, "nets": w}, log_condition(w), code


def _residual(room: float, depth: int, features: int) -> _Raw:
    def log_condition(c: float) -> float:
        return math.log1p(c) - math.log1p(-c)

    c = _largest(log_condition, room, 1 - 1e-9)
    code = f"bilip.models.residual_flow({features}, blocks={depth}, coefficient={c:g})"
    return "residual", {"branch": c}, log_condition(c), code
