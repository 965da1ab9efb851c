"""Are memory-saving gradients the gradients?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from bilip.auditing.budget import Budget
from bilip.auditing.probes.blame import kind_of
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.subject import Subject
from bilip.blocks import Bijection
from bilip.data import Batch, Source
from bilip.errors import BilipError, InputError, NotMeasured
from bilip.record import Measurement, Quantity
from bilip.reversible import Reversible, angle

__all__ = ["GradientAngle"]

Loss = Callable[[Tensor, Tensor | None], Tensor]
Grads = dict[nn.Parameter, Tensor]
_CLOSE = 1e-5  # radians: so close, nobody asks for kinks


_USES = ("reversible-gradients",)


class GradientAngle(Probe):
    r"""The angle between stored gradients and memory-saving ones, whole network and block by block.

    Memory-saving means `bilip.Reversible(model, guard=None)`: activations recomputed from outputs, unwatched. Both gradients are computed
    in evaluation mode and in the model's own dtype, because in float64 the effect disappears; only the angle itself,
    $2\,\mathrm{atan2}(|u - v|, |u + v|)$ of the unit vectors, is computed in float64.

    Rounding on the way back may put a pre-activation on the other side of a ReLU's kink. That is no drift: either slope is right at a point
    that the dtype cannot tell from the true one. `angle_remaining` is the angle with all piecewise activations held on the side where the
    forward pass had them; what is missing from `angle` is kinks.

    A batch whose stored gradient is finite and whose memory-saving one is not has the angle NaN, and then so has the model. A
    batch whose stored gradient is not finite is only counted. If no parameter asks for gradients, all are asked for the time of the
    measurement.

    Args:
        samples: Number of samples.
        batch: Samples in one batch, which has one gradient.
        loss: From z and log-determinant of a batch to a scalar; by default the mean of $|z|^2/2 - \log|\det J_F(x)|$. The
            log-determinant is `None` for a model that states none.

    Example:
        >>> from bilip.models import real_nvp
        >>> _ = torch.manual_seed(0)
        >>> m = GradientAngle(samples=64).measure(real_nvp(2, blocks=4), torch.randn(64, 2))
        >>> m["angle"] < 1e-4, m["share_non_finite"], m["batches"], m.rows[0]["kind"]
        (True, 0.0, 4, 'AffineCoupling')
    """

    name = "gradient_angle"
    scope = "data"
    place = 92
    load = 1
    quantities = (
        Quantity(
            "share_non_finite",
            "share of batches whose memory-saving gradient is not finite while the stored one is",
            "share",
            "lower",
            "non_finite",
            _USES,
        ),
        Quantity("angle", "largest angle between memory-saving and stored gradients", "rad", "lower"),
        Quantity(
            "angle_remaining",
            "largest angle between memory-saving and stored gradients that no kink explains",
            "rad",
            "lower",
            "angle",
            _USES,
        ),
        Quantity("batches", "batches", "count"),
        Quantity("stored_non_finite", "batches without a finite stored gradient", "count"),
    )

    def __init__(self, samples: int = 128, *, batch: int = 16, loss: Loss | None = None) -> None:
        for label, value in (("samples", samples), ("batch", batch)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"GradientAngle({label}={value!r}): expected a whole number, 1 or more.")
        if loss is not None and not callable(loss):
            raise InputError(f"GradientAngle(loss={loss!r}): expected a function of z and log_det, or None.")
        self.samples, self.batch, self.loss = samples, batch, loss

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object] | None:
        return {"samples": budget.gradients, "batch": min(32, budget.gradients)} if budget.gradients else None

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        bijection = subject.bijection
        while isinstance(bijection, Reversible):
            bijection = bijection.bijection
        log_det = all(getattr(part, "has_log_det", True) for _, part in bijection.parts())
        notes = () if log_det else ("the model states no log-determinant, so the loss is |z|^2/2",)
        whole: list[float] = []
        remaining: list[float] = []
        blocks = {name: _Block(part) for name, part in bijection.parts()}
        unusable, seen, total = 0, 0, min(source.count, self.samples)
        with _asked(bijection) as parameters, torch.enable_grad():
            unguarded, with_signs = Reversible(bijection, None), Reversible(bijection, None, keep_signs=True)
            for batch in source.batches(self.batch, limit=self.samples, dtype=subject.dtype, device=subject.device):
                stored = self._gradients(bijection, batch, parameters, log_det=log_det)
                seen += len(batch)
                self.progress(seen / total)
                if not _finite(stored.values()):
                    unusable += 1
                    continue
                found = self._gradients(unguarded, batch, parameters, log_det=log_det)
                whole.append(_whole(found, stored))
                if not whole[-1] <= _CLOSE:
                    again = self._gradients(with_signs, batch, parameters, log_det=log_det)
                    remaining.append(_whole(again, stored))
                else:
                    remaining.append(whole[-1])
                for block, value in zip(
                    blocks.values(), _angles(found, stored, [b.own for b in blocks.values()]), strict=True
                ):
                    if value is not None:
                        block.angles.append(value)
        return Measurement(
            self.name,
            source.name,
            values={
                "angle": _largest(whole),
                "angle_median": _median(whole),
                "angle_remaining": _largest(remaining),
                "share_non_finite": sum(map(math.isnan, whole)) / len(whole) if whole else math.nan,
                "stored_non_finite": unusable,
                "batches": len(whole) + unusable,
                "samples": seen,
                "loss": "given" if self.loss else ("likelihood" if log_det else "latent"),
            },
            rows=tuple(
                {"block": name, "kind": kind_of(block.part), "angle": _largest(block.angles)}
                for name, block in blocks.items()
                if block.angles
            ),
            notes=notes,
        )

    def _gradients(self, model: Bijection, batch: Batch, parameters: Sequence[nn.Parameter], *, log_det: bool) -> Grads:
        try:
            if log_det:
                z, logs = model.forward_and_log_det(batch.x, batch.context)
            else:
                z, logs = model(batch.x, batch.context), None
            value = self._value(z, logs)
            if not value.requires_grad:
                raise NotMeasured("the model lets no gradients through")
            found = torch.autograd.grad(value, parameters, allow_unused=True)
        except BilipError:
            raise
        except Exception as error:  # a foreign model may raise anything
            how = "memory-saving" if isinstance(model, Reversible) else "stored"
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise NotMeasured(f"the {how} gradient cannot be computed ({text[:300]})") from error
        grads = {p: g for p, g in zip(parameters, found, strict=True) if g is not None}
        if not grads:
            raise NotMeasured("the model lets no gradients through")
        return grads

    def _value(self, z: Tensor, log_det: Tensor | None) -> Tensor:
        if self.loss is not None:
            value = self.loss(z, log_det)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise InputError("GradientAngle: the loss of a batch is expected to be one number, a tensor.")
            return value
        terms = 0.5 * z.flatten(1).square().sum(1)
        return (terms if log_det is None else terms - log_det).mean()


class _Block:
    """One block and its angles, batch by batch."""

    def __init__(self, part: Bijection) -> None:
        self.part, self.angles = part, list[float]()
        self.own = list(part.parameters())


@contextlib.contextmanager
def _asked(bijection: Bijection) -> Iterator[list[nn.Parameter]]:
    """The parameters that ask for gradients; all of them for a while, if none does."""
    every = [p for p in bijection.parameters() if p.is_floating_point()]
    chosen = [p for p in every if p.requires_grad]
    if not every:
        raise NotMeasured("the model has no parameters")
    if chosen:
        yield chosen
        return
    try:
        for p in every:
            p.requires_grad_(True)
        yield every
    finally:
        for p in every:
            p.requires_grad_(False)


def _finite(grads: Iterable[Tensor]) -> bool:
    found = [torch.isfinite(g).all() for g in grads]
    return all(torch.stack([one.to(found[0].device) for one in found]).tolist()) if found else True


def _angle(found: Grads, stored: Grads, chosen: Sequence[nn.Parameter]) -> float:
    """The angle; NaN where the memory-saving gradient is not finite. Two zeros point the same way."""
    u = [found[p] if p in found else torch.zeros_like(p) for p in chosen]
    v = [stored[p] for p in chosen]
    if not _finite(u):
        return math.nan
    sizes = [max(float(g.abs().max()) if g.numel() else 0.0 for g in grads) for grads in (u, v)]
    if min(sizes) == 0.0:
        return 0.0 if max(sizes) == 0.0 else math.pi
    return angle([g.double() / sizes[0] for g in u], [g.double() / sizes[1] for g in v])


def _whole(found: Grads, stored: Grads) -> float:
    return _angles(found, stored, [list(stored)])[0] or 0.0


def _angles(found: Grads, stored: Grads, blocks: Sequence[Sequence[nn.Parameter]]) -> list[float | None]:
    """`_angle` of each block, `None` for one without gradients; on a GPU with as many launches and waits as for one block."""
    chosen = [[p for p in own if p in stored] for own in blocks]
    if not stored or not next(iter(stored.values())).is_cuda:
        return [_angle(found, stored, here) if here else None for here in chosen]
    return angles_together(found, stored, chosen)


def angles_together(found: Grads, stored: Grads, chosen: Sequence[Sequence[nn.Parameter]]) -> list[float | None]:
    """The angles of all blocks from lengths of single gradients, those of all parameters at once."""
    pairs = [(k, p) for k, here in enumerate(chosen) for p in here if p.numel()]
    if not pairs:
        return [0.0 if here else None for here in chosen]
    block, counts = torch.tensor([[k, p.numel()] for k, p in pairs], device="cpu").T

    def flat(grads: Grads) -> Tensor:
        parts = [(grads[p] if p in grads else torch.zeros_like(p)).detach().double().flatten() for _, p in pairs]
        return torch.cat(parts)

    def lengths(values: Tensor, order: float = 2.0) -> Tensor:
        """Euclidean, or the largest entries, block by block on the CPU."""
        each = torch.stack(torch._foreach_norm(values.split(counts.tolist()), order)).cpu()
        none = torch.zeros(len(chosen), dtype=each.dtype, device="cpu")
        if order == math.inf:
            return none.scatter_reduce(0, block, each, "amax")
        return none.index_add(0, block, each.square()).sqrt()

    def divided(values: Tensor, sizes: Tensor) -> Tensor:
        sizes = torch.where(sizes > 0, sizes, 1.0)[block].to(values.device)
        return values / sizes.repeat_interleave(counts.to(values.device), output_size=len(values))

    u, v = flat(found), flat(stored)
    first, second = lengths(u, math.inf), lengths(v, math.inf)
    u, v = divided(u, first), divided(v, second)  # so that no square overflows
    u, v = divided(u, lengths(u)), divided(v, lengths(v))
    angles = 2 * torch.atan2(lengths(u - v), lengths(u + v))
    angles = torch.where((first == 0) & (second == 0), 0.0, torch.where((first == 0) | (second == 0), math.pi, angles))
    angles = torch.where(torch.isfinite(first), angles, torch.nan)
    return [float(value) if here else None for value, here in zip(angles, chosen, strict=True)]


def _largest(angles: Sequence[float]) -> float:
    return math.nan if not angles or any(map(math.isnan, angles)) else max(angles)


def _median(angles: Sequence[float]) -> float:
    """NaN counts as the largest."""
    found = median(math.inf if math.isnan(a) else a for a in angles) if angles else math.nan
    return found if math.isfinite(found) else math.nan
