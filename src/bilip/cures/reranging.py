r"""Fourth rung: scales that cannot come near 0 or infinity, and a short fine-tuning.

The raw scale $s$ of each channel of an affine coupling or autoregressive block is passed through $c + r \tanh((s - c) / r)$ before the
library's own $g$. The interval $(c - r, c + r)$ is where $|\log g(s) - m| < \rho$, $m$ being the mean of $\log g$ of that channel on data.
So the mean log-scale of every channel stays, values near it stay almost as they are, and $g$ is held to $(e^{m - \rho}, e^{m + \rho})$
everywhere, on noise and samples too. With `centre` the mean itself is held to $|m| \le$ `centre`. Then a constant is added to each shift,
so that the mean of every channel on data, after each block, is that of the model before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.blocks import AffineCoupling, Bijection
from bilip.bounds import Box, finite_size
from bilip.cures.rung import Case, Rung, Screen, Skipped
from bilip.cures.treated import Treated
from bilip.cures.tuning import tuned
from bilip.nets import certify

__all__ = ["Ranged", "Reranging", "Scaling", "scalings"]

LogScale = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scaling:
    """Where an affine block has its raw scales."""

    owner: nn.Module  # the module that holds the net
    attribute: str  # name of the net in it
    log_scale: LogScale  # log g as a function of the raw scale, monotone
    # Which outputs of the net are raw scales: `all`, the `first` or `second` half, every `even` or `odd` one, or
    # `pair` for a net that returns (shift, raw scale).
    layout: str
    dim: int = 1  # dimension of the outputs

    @property
    def net(self) -> nn.Module:
        """The net."""
        return getattr(self.owner, self.attribute)


def _nflows_sigmoid(s: Tensor) -> Tensor:
    return (torch.sigmoid(s + 2) + 1e-3).log()


def _softplus(s: Tensor) -> Tensor:
    return (F.softplus(s) + 1e-3).log()


def _sigmoid(s: Tensor) -> Tensor:
    return F.logsigmoid(s + 2)


def _identity(s: Tensor) -> Tensor:
    return s


def _clipped(s: Tensor) -> Tensor:
    return s.clamp(-5.0, 3.0)


def _softclip(s: Tensor) -> Tensor:
    return s / (1 + (s / math.log(1e-3)).abs())


def scalings(module: nn.Module) -> Iterator[Scaling]:
    """The raw scales of all affine blocks in a model, of bilip, FrEIA, nflows, normflows, zuko and Pyro.

    Example:
        >>> from bilip.models import real_nvp
        >>> len(list(scalings(real_nvp(2, blocks=3)))), len(list(scalings(real_nvp(2, blocks=3, coupling="additive"))))
        (3, 0)
    """
    for part in module.modules():
        if isinstance(part, AffineCoupling):
            joint = part.s is None
            yield Scaling(
                part, "t" if joint else "s", part.scale.log, "second" if joint else "all", part.partition.feature_dim
            )
            continue
        kind = type(part).__name__
        home = next(
            (k.__module__.split(".")[0] for k in type(part).__mro__ if not k.__module__.startswith("bilip")), ""
        )
        find = _FOREIGN.get((home, kind))
        if find is not None:
            yield from find(part)


def _nflows_coupling(part: Any) -> Iterator[Scaling]:
    if getattr(part, "scale_activation", None) is None:
        yield Scaling(part, "transform_net", _nflows_sigmoid, "second")


def _nflows_maf(part: Any) -> Iterator[Scaling]:
    yield Scaling(part, "autoregressive_net", _softplus, "even")


def _normflows_maf(part: Any) -> Iterator[Scaling]:
    yield Scaling(part, "autoregressive_net", _nflows_sigmoid, "even")


def _normflows_coupling(part: Any) -> Iterator[Scaling]:
    if part.scale:
        yield Scaling(part, "param_map", _identity if part.scale_map == "exp" else _sigmoid, "odd")


def _normflows_masked(part: Any) -> Iterator[Scaling]:
    if isinstance(part.s, nn.Module):
        yield Scaling(part, "s", _identity, "all")


def _clamped(part: Any) -> LogScale:
    clamp, function = float(part.clamp), part.f_clamp
    return lambda s: clamp * function(s)


def _freia_glow(part: Any) -> Iterator[Scaling]:
    for name in ("subnet1", "subnet2"):
        yield Scaling(part, name, _clamped(part), "first")


def _freia_rnvp(part: Any) -> Iterator[Scaling]:
    for name in ("subnet_s1", "subnet_s2"):
        yield Scaling(part, name, _clamped(part), "all")


def _freia_all_in_one(part: Any) -> Iterator[Scaling]:
    clamp = float(part.clamp)
    if not part.GIN:
        yield Scaling(part, "subnet", lambda s: clamp * torch.tanh(0.1 * s), "first")


def _zuko(part: Any) -> Iterator[Scaling]:
    if getattr(part.univariate, "__name__", "") == "MonotonicAffineTransform" and hasattr(part, "hyper"):
        yield Scaling(part, "hyper", _softclip, "odd", -1)


def _pyro(name: str) -> Callable[[Any], Iterator[Scaling]]:
    def find(part: Any) -> Iterator[Scaling]:
        if isinstance(getattr(part, name), nn.Module) and not getattr(part, "stable", False):
            yield Scaling(part, name, _clipped, "pair", -1)

    return find


_FOREIGN: dict[tuple[str, str], Callable[[Any], Iterator[Scaling]]] = {
    **{(home, "AffineCouplingTransform"): _nflows_coupling for home in ("nflows", "glasflow", "enflows", "flowcon")},
    ("nflows", "MaskedAffineAutoregressiveTransform"): _nflows_maf,
    ("normflows", "MaskedAffineAutoregressive"): _normflows_maf,
    ("normflows", "AffineCoupling"): _normflows_coupling,
    ("normflows", "MaskedAffineFlow"): _normflows_masked,
    ("FrEIA", "GLOWCouplingBlock"): _freia_glow,
    ("FrEIA", "RNVPCouplingBlock"): _freia_rnvp,
    ("FrEIA", "AllInOneBlock"): _freia_all_in_one,
    ("zuko", "GeneralCouplingTransform"): _zuko,
    ("zuko", "MaskedAutoregressiveTransform"): _zuko,
    ("pyro", "AffineCoupling"): _pyro("nn"),
    ("pyro", "AffineAutoregressive"): _pyro("arn"),
}


class Ranged(nn.Module):
    r"""A net whose raw scales are held between two numbers each, by $c + r \tanh((s - c) / r)$; its other outputs stay.

    The map is increasing with a slope of at most 1 in every output, so a Lipschitz constant of the net is one of this.

    Args:
        net: The net.
        outputs: Number of its outputs along `dim`.
        layout: Which of them are raw scales; see `Scaling`.
        dim: Dimension of the outputs.

    Example:
        >>> held = Ranged(nn.Linear(1, 2), 2, "second")
        >>> _ = held.radius.fill_(0.5)
        >>> bool((held(100 * torch.randn(20, 1))[:, 1].abs() <= 0.5).all())
        True
    """

    def __init__(self, net: nn.Module, outputs: int, layout: str, dim: int = 1) -> None:
        super().__init__()
        self.net, self.layout, self.dim = net, layout, dim
        like = next((p for p in net.parameters() if p.is_floating_point()), torch.empty(()))
        self.register_buffer("centre", torch.zeros(outputs, dtype=like.dtype, device=like.device))
        self.register_buffer("radius", torch.ones(outputs, dtype=like.dtype, device=like.device))
        self.register_buffer("shift", torch.zeros(outputs, dtype=like.dtype, device=like.device))
        self.register_buffer("which", _which(outputs, layout).to(like.device))
        self.__dict__["learns"] = None  # while a range is chosen from data

    def forward(self, *given: Any, **more: Any) -> Any:
        """The net, its raw scales held."""
        out = self.net(*given, **more)
        if self.layout == "pair":
            return out[0] + self._along(self.shift, out[0]), self._held(out[1])
        return self._held(out)

    def _along(self, values: Tensor, out: Tensor) -> Tensor:
        """One value for each output, in a shape that broadcasts."""
        shape = [1] * out.ndim
        shape[self.dim] = -1
        return values.view(shape)

    def _held(self, out: Tensor) -> Tensor:
        if self.learns is not None:
            self.learns(out)
        centre, half, which, shift = (self._along(t, out) for t in (self.centre, self.radius, self.which, self.shift))
        return torch.where(which, centre + half * torch.tanh((out - centre) / half), out + shift)

    def log_lipschitz(self, shape: tuple[int, ...] | None = None, outputs: slice | None = None) -> float:
        """That of the net: no slope is above 1."""
        return certify.log_lipschitz(self.net, shape, outputs)

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        """The image of the net's box: the map increases."""
        inside = certify.ball_and_interval(self.net, box, context)

        def held(end: Tensor) -> Tensor:
            shape = [1] * (end.ndim + 1)
            shape[self.dim] = -1
            centre, half, which, shift = (
                t.view(shape)[0].double() if t.is_floating_point() else t.view(shape)[0]
                for t in (self.centre, self.radius, self.which, self.shift)
            )
            return torch.where(which, centre + half * torch.tanh((end - centre) / half), end + shift)

        low, high = held(inside.low), held(inside.high)
        # A tanh, its argument and two sums are off by some roundings each, and the sums may cancel.
        parts = sum(self._along(t, low[None])[0].double().abs() for t in (self.centre, self.radius, self.shift))
        return Box.outward(low, high, 1e-14 * (parts + finite_size(low, high)))

    def __getattr__(self, name: str) -> Any:
        """What a library asks its net for, such as a permutation or a number of hidden features."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("net", "log_cap", "point", "held_weight", "state_dtype"):
                raise
            return getattr(super().__getattr__("net"), name)

    def __getitem__(self, index: int) -> Any:
        return self.net[index]  # type: ignore[index]


def _which(outputs: int, layout: str) -> Tensor:
    place = torch.arange(outputs)
    return {
        "all": place >= 0,
        "pair": place >= 0,
        "first": place < outputs // 2,
        "second": place >= outputs // 2,
        "even": place % 2 == 0,
        "odd": place % 2 == 1,
    }[layout]


class Reranging(Rung):
    """Bounded scales for all affine blocks, each channel around its own mean and moved to it, then a short fine-tuning."""

    name: ClassVar[str] = "re-range"
    place: ClassVar[int] = 40
    needs_loss: ClassVar[bool] = True

    def options(self, case: Case) -> Iterator[tuple[dict[str, Any], str]]:
        widths = _widths(case)
        count = len(widths)
        # (0.5, 1) has a half-width of 0.35 in its logarithm.
        for spread, centre in ((1.0, None), (0.35, None), (0.35, 0.35), (0.15, 0.15)):
            mean = (
                "its mean on data"
                if centre is None
                else f"its mean, that held to {math.exp(-centre):.2g} to {math.exp(centre):.2g},"
            )
            yield (
                {"spread": spread, "centre": centre, "widths": widths},
                f"the scales of {count} nets held to {math.exp(-spread):.2g} to {math.exp(spread):.2g} times {mean} and fine-tuned",
            )

    def apply(self, treated: Treated, settings: dict[str, Any]) -> Treated:
        for scaling, width in zip(list(scalings(treated.bijection)), settings["widths"], strict=True):
            net = Ranged(scaling.net, int(width), scaling.layout, scaling.dim)
            net.training = scaling.net.training
            setattr(scaling.owner, scaling.attribute, net)
        return treated

    def finish(self, treated: Treated, settings: dict[str, Any], case: Case) -> dict[str, Any]:
        screen = Screen(treated, case)
        for means in (True, False):  # where single samples explode, means are theirs and no place to move channels to
            calibrate(treated, settings, case, means=means)
            if (lost := screen()) <= 0.2:
                break
        else:
            raise Skipped(
                f"right after it {100 * lost:.3g} % of the failing sources still do not come back, so it was not tuned"
            )
        result = tuned(
            treated,
            case.tuned,
            bad=screen,
            target=case.tuned.metrics.get("loss", -math.inf),
            left=case.left,
            tell=case.tell,
        )
        return {"loss": result.loss, **result.facts()}


def _widths(case: Case) -> list[int]:
    """Numbers of outputs of the nets, seen in a forward pass of a copy."""
    subject = case.subject.copy_in(case.subject.dtype)
    found = list(scalings(subject.bijection))
    if not found:
        raise Skipped("there is no affine block whose scale could be bounded")
    widths: dict[int, int] = {}

    def see(module: nn.Module, given: Any, out: Any) -> None:
        scaling = by_net[id(module)]
        widths[id(module)] = int((out[1] if scaling.layout == "pair" else out).shape[scaling.dim])

    by_net = {id(s.net): s for s in found}
    hooks = [s.net.register_forward_hook(see) for s in found]
    try:
        batch = case.sources[0].first(4, dtype=subject.dtype, device=subject.device)
        subject.forward(batch.x, batch.context)
    finally:
        for hook in hooks:
            hook.remove()
    missing = [s for s in found if id(s.net) not in widths]
    if missing:
        raise Skipped(f"the net of {type(missing[0].owner).__name__} is not called in a pass")
    return [widths[id(s.net)] for s in found]


@torch.no_grad()
def calibrate(
    treated: Treated, settings: dict[str, Any], case: Case, samples: int = 1024, *, means: bool = True
) -> None:
    """Choose ranges and, with `means`, shifts from data, one block after the other: each sees what those before it, already held, give."""
    spread, centre = float(settings["spread"]), settings["centre"]
    subject = case.subject
    source = next((s for s in case.sources if s.role == "data"), case.sources[0])
    batch = source.first(samples, dtype=subject.dtype, device=subject.device)
    left = {id(scaling.net): scaling for scaling in scalings(treated.bijection)}
    x = before = batch.x
    for (_, part), (_, old) in zip(treated.bijection.parts(), subject.bijection.parts(), strict=True):
        found = [left.pop(id(m)) for m in part.modules() if id(m) in left]
        for scaling in found:
            net: Any = scaling.net
            net.__dict__["learns"] = _Range(net, scaling.log_scale, spread, centre)
            net.shift.zero_()
        try:
            after = part(x, batch.context)
        finally:
            for scaling in found:
                scaling.net.__dict__["learns"] = None
        before = old(before, batch.context)
        moved = [scaling.net for scaling in found if scaling.layout != "all"]
        if moved and means:
            _match_means(part, moved, x, batch.context, before)  # type: ignore[arg-type]
            after = part(x, batch.context)
        x = after


def _match_means(part: Bijection, nets: list[Ranged], x: Tensor, context: Tensor | None, aim: Tensor) -> None:
    """Set the shifts of the nets of a block such that the mean of every channel that it gives is that of `aim`.

    In a coupling each shift moves one channel, in proportion: two gradients tell which and by how much. Where a shift moves several, as in
    a block of two couplings, the whole Jacobian is taken, up to 64 channels. Shifts that do not come out finite stay 0.
    """
    rows = slice(None) if x[0].numel() <= 1024 else slice(256)
    given = None if context is None else context[rows]
    axes = [k for k in range(aim.ndim) if k != 1]
    for net in nets:
        net.shift.requires_grad_(True)
    shifts = [net.shift for net in nets]
    try:
        with torch.enable_grad():
            means = part(x[rows], given).mean(axes)
            wanted = (aim[rows].mean(axes) - means).detach().double()

            def vjp(weights: Tensor) -> Tensor:
                found = torch.autograd.grad(means @ weights.to(means), shifts, retain_graph=True, allow_unused=True)
                return torch.cat([torch.zeros_like(s) if g is None else g for g, s in zip(found, shifts, strict=True)])

            place = torch.arange(1, len(means) + 1, device=means.device)
            slope, weighted = vjp(torch.ones_like(means)).double(), vjp(place).double()
            channel = torch.where(slope == 0, torch.ones_like(slope), weighted / slope)
            if bool(((channel - channel.round()).abs() < 1e-3).all()):
                index = (channel.round().long() - 1).clamp(0, len(means) - 1)
                step = torch.where(slope == 0, torch.zeros_like(slope), wanted[index] / slope)
            elif len(means) <= 64:
                rows_of = torch.stack([vjp(row) for row in torch.eye(len(means), device=means.device)]).double()
                step = torch.linalg.pinv(rows_of, rtol=1e-6) @ wanted
            else:
                step = torch.zeros_like(slope)
    except RuntimeError:  # a block without a gradient
        step = torch.zeros(sum(map(len, shifts)), dtype=torch.float64)
    step = torch.where(torch.isfinite(step), step, torch.zeros_like(step))
    for net, some in zip(nets, step.split([len(s) for s in shifts]), strict=True):
        net.shift.requires_grad_(False)
        net.shift.copy_(some)


class _Range:
    """Sets the range of a net from its outputs on data."""

    def __init__(self, net: Ranged, log_scale: LogScale, spread: float, centre: float | None) -> None:
        self.net, self.log_scale, self.spread, self.centre = net, log_scale, spread, centre

    def __call__(self, out: Tensor) -> None:
        rows = out.detach().transpose(self.net.dim, -1).flatten(0, -2).double()  # (samples, outputs)
        rows = rows[torch.isfinite(rows).all(1)]
        if not len(rows):
            return
        logs = self.log_scale(rows)
        mean = torch.where(torch.isfinite(logs), logs, torch.zeros_like(logs)).mean(0)
        if self.centre is not None:
            mean = mean.clamp(-self.centre, self.centre)
        low, high = (self._raw(mean + sign * self.spread, float(rows.abs().max())) for sign in (-1.0, 1.0))
        low, high = torch.minimum(low, high), torch.maximum(low, high)
        which = self.net.which
        self.net.centre.copy_(torch.where(which, (low + high) / 2, torch.zeros_like(low)))
        self.net.radius.copy_(torch.where(which, ((high - low) / 2).clamp_min(1e-3), torch.ones_like(low)))

    def _raw(self, wanted: Tensor, largest: float) -> Tensor:
        """The raw scale whose log g is `wanted`, by bisection: log g is monotone. Where g ends before that, almost its end."""
        ends = torch.full_like(wanted, max(60.0, 2 * largest))
        rises = self.log_scale(ends) >= self.log_scale(-ends)
        low, high = -ends, ends.clone()
        least, most = (
            torch.minimum(self.log_scale(low), self.log_scale(high)),
            torch.maximum(self.log_scale(low), self.log_scale(high)),
        )
        wanted = wanted.clamp(least + 0.01, most - 0.01)
        for _ in range(80):
            middle = (low + high) / 2
            above = (self.log_scale(middle) > wanted) == rises
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return (low + high) / 2
