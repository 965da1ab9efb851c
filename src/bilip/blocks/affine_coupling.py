"""Affine coupling: scale, then shift."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bilip.blocks._nets import call, require_module, require_shape, takes_context
from bilip.blocks.bijection import Bijection
from bilip.blocks.partition import Partition, Split
from bilip.blocks.scale import SIGMOID, Scale, scale_from
from bilip.bounds import TINY, Box, finite_size, log_of, log_product, log_sum, log_triangular_norm
from bilip.errors import InputError
from bilip.nets import certify

__all__ = ["AffineCoupling"]


class AffineCoupling(Bijection):
    r"""$F(x)_{I_1} = x_{I_1}, \quad F(x)_{I_2} = x_{I_2} \odot g(s(x_{I_1})) + t(x_{I_1})$.

    Bi-Lipschitz on boxes only: the Jacobian holds $x_{I_2} \odot g'(s)\, J_s$, which grows with $x$. On $[a, b]^d$ the
    paper proves

    $$\mathrm{Lip}(F) \le \max(1, c_g) + M, \qquad M = \max(|a|, |b|)\, c_{g'} \mathrm{Lip}(s) + \mathrm{Lip}(t),$$
    $$\mathrm{Lip}(F^{-1}) \le \max(1, c_{1/g}) + M^*, \qquad
    M^* = \max(|a^*|, |b^*|)\, c_{(1/g)'} \mathrm{Lip}(s) + c_{(1/g)'} \mathrm{Lip}(s)\, c_t + c_{1/g}
    \mathrm{Lip}(t).$$

    `formula="sharp"` takes the norm of $\begin{pmatrix}1&0\\M&c\end{pmatrix}$ instead, with suprema entry by entry; on $F([a, b]^d)$ the
    inverse also obeys $M^* \le c_{1/g} (\max(|a|, |b|)\, c_{g'} \mathrm{Lip}(s) + \mathrm{Lip}(t))$, and the smaller one counts.

    Reference: Dinh et al., *Density estimation using Real NVP*, 2016.

    Args:
        t: The shift. Without `s`, one net with twice the outputs: shift first, then raw scale.
        s: The raw scale, if it is a net of its own.
        scale: The function g, or its name.
        partition: How the input is divided; halves along dimension 1 by default.

    Example:
        >>> from bilip.nets import MLP
        >>> block = AffineCoupling(MLP(2, 4), scale="half_sigmoid")
        >>> x = torch.randn(8, 4)
        >>> z, log_det = block.forward_and_log_det(x)
        >>> bool(torch.allclose(block.inverse(z), x, atol=1e-5)), log_det.shape
        (True, torch.Size([8]))
        >>> block.bounds(Box(-1, 1, shape=(4,))).inverse < block.bounds(Box(-9, 9, shape=(4,))).inverse
        True
    """

    def __init__(
        self,
        t: nn.Module,
        s: nn.Module | None = None,
        *,
        scale: Scale | str = SIGMOID,
        partition: Partition | None = None,
    ) -> None:
        super().__init__()
        self.t = require_module("AffineCoupling", "t", t)
        self.s = None if s is None else require_module("AffineCoupling", "s", s)
        self.scale = scale_from(scale)
        self.partition = Split() if partition is None else partition
        self._context = takes_context(t)
        self._s_context = s is not None and takes_context(s)

    def shift_and_raw_scale(self, x1: Tensor, x2: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """t(x1) and s(x1), in the shape of the transformed part."""
        shift = call(self.t, x1, context, self._context)
        if self.s is None:
            return self.halves(shift, x2)
        return self._checked(shift, call(self.s, x1, context, self._s_context), x2)

    def halves(self, h: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and raw scale from the output of a net that gives both."""
        dim = self.partition.feature_dim
        if h.shape[dim] % 2:
            raise InputError(
                "AffineCoupling: without s=, the net t gives shift and raw scale together, an even number of features along "
                f"dimension {dim}; its output has shape {tuple(h.shape)}."
            )
        shift, raw = h.chunk(2, dim)
        return self._checked(shift, raw, x2)

    def _checked(self, shift: Tensor, raw: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        shift, raw = self.partition.outputs(shift), self.partition.outputs(raw)
        require_shape("AffineCoupling", "t(x1)", shift, x2)
        require_shape("AffineCoupling", "s(x1)", raw, x2)
        return shift, raw

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the nets see, and what is transformed."""
        return self.partition.split(self.check_net(x, self.t))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x1, x2 = self.split(x)
        shift, raw = self.shift_and_raw_scale(x1, x2, context)
        return self.partition.merge(x1, torch.addcmul(shift, x2, self.scale(raw)))

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        z1, z2 = self.split(z)
        shift, raw = self.shift_and_raw_scale(z1, z2, context)
        return self.partition.merge(z1, (z2 - shift) / self.scale(raw))

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x1, x2 = self.split(x)
        shift, raw = self.shift_and_raw_scale(x1, x2, context)
        gain, log_gain = self.scale.with_log(raw)
        return self.partition.merge(x1, torch.addcmul(shift, x2, gain)), log_gain.flatten(1).sum(1)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z1, z2 = self.split(z)
        shift, raw = self.shift_and_raw_scale(z1, z2, context)
        gain, log_gain = self.scale.with_log(raw)
        return self.partition.merge(z1, (z2 - shift) / gain), -log_gain.flatten(1).sum(1)

    # ---- proofs

    def log_lip(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        part, moved = self.partition.split_box(box)
        log_t, log_s = self._log_constants(part)
        _, raw = self._enclose_nets(part, context)
        sup = self.scale.suprema(raw.low, raw.high)
        if formula == "paper":
            off = log_sum(log_product(log_of(box.magnitude), _log_max(sup.slope), log_s), log_t)
            return log_sum(max(0.0, _log_max(sup.value)), off)
        grip = _log_grip(torch.maximum(moved.low.abs(), moved.high.abs()), sup.slope)
        off = self._off_diagonal(part, log_t, log_s, grip, log_of(1.0))
        return log_triangular_norm(off, _log_max(sup.value))

    def log_lip_inverse(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        part, moved = self.partition.split_box(box)
        log_t, log_s = self._log_constants(part)
        shift, raw = self._enclose_nets(part, context)
        sup = self.scale.suprema(raw.low, raw.high)
        reciprocal, slope = _log_max(sup.reciprocal), _log_max(sup.reciprocal_slope)
        if formula == "paper":
            off = log_sum(
                log_product(log_of(box.magnitude), slope, log_s),
                log_product(slope, log_s, log_of(shift.magnitude)),
                log_product(reciprocal, log_t),
            )
            return log_sum(max(0.0, reciprocal), off)
        size = torch.maximum((moved.low - shift.high).abs(), (moved.high - shift.low).abs()).nan_to_num(
            math.inf, math.inf
        )
        grip = _log_grip(size, sup.reciprocal_slope)
        off = self._off_diagonal(part, log_t, log_s, grip, reciprocal)
        return log_triangular_norm(off, reciprocal)

    def log_lip_inverse_on_image(self, box: Box, context: Box | None = None, formula: str = "sharp") -> float:
        r"""For $x, x'$ in the box, $x_2 - x_2' = (z_2 - z_2' - (t - t'))/g' + x_2\,(g' - g)/g'$: no box around the image is needed."""
        if formula == "paper" or not box.is_bounded:
            return math.inf
        part, moved = self.partition.split_box(box)
        log_t, log_s = self._log_constants(part)
        _, raw = self._enclose_nets(part, context)
        sup = self.scale.suprema(raw.low, raw.high)
        reciprocal = _log_max(sup.reciprocal)
        grip = _log_grip(torch.maximum(moved.low.abs(), moved.high.abs()), sup.slope + sup.reciprocal)
        return log_triangular_norm(self._off_diagonal(part, log_t, log_s, grip, reciprocal), reciprocal)

    def _off_diagonal(self, part: Box, log_t: float, log_s: float, grip: float, weight_t: float) -> float:
        r"""Log of a bound on $\|D_a J_s + D_b J_t\|$, given the logs of $\max a$ and $\max b$."""
        apart = log_sum(log_product(grip, log_s), log_product(weight_t, log_t))
        if self.s is not None:
            return apart
        # One net: (D_a D_b) times its Jacobian, at most sqrt(a^2 + b^2) Lip.
        joint = log_product(log_sum(2 * grip, 2 * weight_t) / 2, certify.log_lipschitz(self.t, part.shape or None))
        return min(apart, joint + 1e-15 * (1 + abs(joint)) if math.isfinite(joint) else joint)

    def _log_constants(self, part: Box) -> tuple[float, float]:
        """Logs of Lip(t) and Lip(s)."""
        shape = part.shape or None
        if self.s is not None:
            return certify.log_lipschitz(self.t, shape), certify.log_lipschitz(self.s, shape)
        rows = self._rows(part)
        return certify.log_lipschitz(self.t, shape, rows[0]), certify.log_lipschitz(self.t, shape, rows[1])

    def _rows(self, part: Box) -> tuple[slice | None, slice | None]:
        """The rows of a joint net's last layer that give the shift and the raw scale; `None` where they are not those halves."""
        axis = certify.feature_axis(self.t)
        if axis is None or not part.shape:
            return None, None
        wanted = self.partition.feature_dim
        wanted = wanted - 1 if wanted > 0 else len(part.shape) + wanted
        if axis % len(part.shape) != wanted:
            return None, None
        half = certify.output_rows(self.t) // 2
        return slice(0, half), slice(half, 2 * half)

    def _enclose_nets(self, part: Box, context: Box | None) -> tuple[Box, Box]:
        """Boxes that hold t and s over the conditioning part."""
        shift = certify.ball_and_interval(self.t, part, context if self._context else None)
        if self.s is not None:
            raw = certify.ball_and_interval(self.s, part, context if self._s_context else None)
        else:
            dim = self.partition.feature_dim
            shift, raw = (
                shift.map(lambda end, k=k: end[None].chunk(2, dim)[k][0]) if shift.shape else shift for k in (0, 1)
            )
        return self.partition.outputs_box(shift), self.partition.outputs_box(raw)

    def interval(self, box: Box, context: Box | None = None) -> Box:
        part, moved = self.partition.split_box(box)
        shift, raw = self._enclose_nets(part, context)
        gain = self.scale.enclose(raw)
        low, high = _interval_product(moved.low, moved.high, gain)
        return self.partition.merge_box(part, Box.outward(low + shift.low, high + shift.high, _rounding(low, high)))

    def interval_inverse(self, box: Box, context: Box | None = None) -> Box:
        part, moved = self.partition.split_box(box)
        shift, raw = self._enclose_nets(part, context)
        gain = self.scale.enclose(raw)
        inverse = Box((1 / gain.high * (1 - 1e-15) - TINY).clamp_min(0.0), 1 / gain.low * (1 + 1e-15) + TINY)
        centered = Box.outward(moved.low - shift.high, moved.high - shift.low)
        low, high = _interval_product(centered.low, centered.high, inverse)
        return self.partition.merge_box(part, Box.outward(low, high, _rounding(low, high)))

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


def _interval_product(low: Tensor, high: Tensor, gain: Box) -> tuple[Tensor, Tensor]:
    """[low, high] times a non-negative interval; a product that is not defined is unbounded."""
    corners = torch.stack(torch.broadcast_tensors(low * gain.low, low * gain.high, high * gain.low, high * gain.high))
    unclear = corners.isnan().any(0)
    return corners.amin(0).masked_fill(unclear, -math.inf), corners.amax(0).masked_fill(unclear, math.inf)


def _rounding(low: Tensor, high: Tensor) -> Tensor:
    return 1e-14 * finite_size(low, high)


def _log_grip(size: Tensor, log_slope: Tensor) -> float:
    """Log of the largest product of a magnitude and a slope; a magnitude of zero wins over any slope."""
    log = torch.where((size == 0) | (log_slope == -math.inf), -math.inf, size.log() + log_slope)
    return _log_max(log + 1e-14 * (1 + log.abs()).nan_to_num(0.0, 0.0, 0.0))


def _log_max(logs: Tensor) -> float:
    top = float(logs.max())
    return math.inf if math.isnan(top) else top
