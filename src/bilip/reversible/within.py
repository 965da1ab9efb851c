"""What cancels within one call: where a loss subtracts samples of a batch, or positions of a sample, as f(x) - f(x + e), little is left of
their gradients, and all of their errors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MARGIN", "NOTHING", "ODD", "Within", "cancelled", "places", "sizes", "usual", "weights"]

ODD = 3.0  # gradients seldom are so many times larger than their sum, as independent ones add up, by chance
NOTHING = 1e5  # gradients so many times larger than their sum leave nothing but rounding
CALLS = 8  # so many calls that were looked at tell what to expect of others
ALIKE, TAKEN_OVER = 1.4, 15  # what cancels within a call is taken over from one like it, for so many calls
PARTS = 64  # a place has so many numbers at most
NEAR = 0.5  # cosine between the places of two gradients; below, what is known of one says nothing about the other
MARGIN = 10.0  # what is expected may be too low by this factor; of 23 losses of one flow, some of which subtract, it was 3.4 at most


class Within:
    """What cancelled within the calls of one direction, where some parameters or others are trained.

    Of calls that were looked at: how many times larger the gradients of the parameters would be than those of the outputs if samples
    were independent. It says, without a look, about how much cancels in another call, by what is left of its gradients; if the loss
    looks at the same outputs, in whatever units these are.
    """

    def __init__(self) -> None:
        self.gains: deque[float] = deque(maxlen=CALLS)
        self.places: deque[list[float]] = deque(maxlen=CALLS)  # where the gradients of these calls were
        self.known: tuple[float, float] | None = None
        self.since = 0
        self.gain: Tensor | None = None  # the largest of them, where captured steps read it
        self.captured = False  # whether some do

    def state(self) -> list[Any]:
        """What is carried from step to step, as JSON values."""
        return [list(self.gains), self.known and list(self.known), self.since, list(self.places)]

    @classmethod
    def of(
        cls,
        gains: Sequence[float],
        known: Sequence[float] | None,
        since: int,
        places: Sequence[Sequence[float]] = (),
    ) -> Within:
        """From a state; older ones have no places, so that the next call is looked at."""
        made = cls()
        made.gains.extend(map(float, gains))
        if known is not None:
            share, lost = map(float, known)
            made.known = share, lost
        made.since = int(since)
        made.places.extend([float(n) for n in place] for place in places)
        return made

    def knows(self, place: Sequence[float]) -> bool:
        """Whether a call was looked at whose gradients were at the same outputs."""
        return any(_are_near(place, other) for other in self.places)

    def read_from(self, gain: Tensor | None) -> None:
        """Keep the largest on the device in this number, since captured steps read it already."""
        self.gain = gain
        if gain is not None:
            gain.fill_(max(self.gains, default=0.0))

    def on(self, device: torch.device) -> Tensor:
        """The largest gain; made before a step is captured, since what is made inside is made anew by every replay."""
        if self.gain is None or self.gain.device != device:
            self.gain = torch.full((), max(self.gains, default=0.0), dtype=torch.float64, device=device)
        return self.gain

    def expected(self, left: Tensor, size: Tensor, unknown: float = 1.0) -> Tensor:
        """How much cancels at the parameters of a call, at most, going by those that were looked at: 1 where that is usual.

        Args:
            left: The size of its gradients of the parameters.
            size: That of its gradients of the outputs.
            unknown: What is expected where none was looked at.
        """
        gain = self.on(left.device)
        return torch.where(gain > 0, usual(gain * size / left), unknown)

    def like(self, share: float, place: Sequence[float]) -> float | None:
        """What was measured in a call not long ago, if this one is alike: if as much is left, or more where nothing was lost.

        Args:
            share: How large its gradients of the parameters are, relative to those of the outputs.
            place: Where those of the outputs are.
        """
        self.since += 1
        if self.known is None or self.since > TAKEN_OVER or not self.places or not _are_near(place, self.places[-1]):
            return None
        share_then, lost = self.known
        most = ALIKE if lost > 1 else math.inf
        return lost if 1 / ALIKE <= share / share_then <= most else None

    def measured(self, share: float, gain: float, place: Sequence[float]) -> float:
        """Take note of a call that was looked at, and say how much cancels in it.

        Args:
            share: How large its gradients of the parameters are, relative to those of the outputs.
            gain: How large they would be, if samples were independent.
            place: Where those of the outputs are.
        """
        self.places.append([*place])
        if 0 < gain < math.inf:
            self.gains.append(gain)
            if self.gain is not None:
                self.gain.fill_(max(self.gains))
        lost = gain / share if share else math.nan if not gain else math.inf
        lost = lost if lost > ODD else 1.0
        self.known, self.since = (share, lost) if share else None, 0
        return lost


def usual(lost: Tensor) -> Tensor:
    """What is lost by chance, or is no number, counts as nothing."""
    return torch.where(lost > ODD, lost, 1.0)


def places(grad: Tensor, grad_log: Tensor | None) -> Tensor:
    """Where gradients of the outputs are: their share at each coordinate, or at each of 64 parts, and at the log-determinant.

    Example:
        >>> places(torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([4.0, 0.0])).tolist()
        [0.6, 0.0, 0.8]
    """
    each = torch.linalg.vector_norm(grad.flatten(1), dim=0, dtype=torch.float64)
    length = math.ceil(len(each) / PARTS)
    each = torch.linalg.vector_norm(torch.nn.functional.pad(each, (0, -len(each) % length)).view(-1, length), dim=1)
    log = each.new_zeros(()) if grad_log is None else torch.linalg.vector_norm(grad_log, dtype=torch.float64)
    found = torch.cat((each, log[None]))
    return found / torch.linalg.vector_norm(found)


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    """NaN is near nothing."""
    return len(one) == len(other) and sum(a * b for a, b in zip(one, other, strict=True)) >= NEAR


def sizes(grads: Sequence[Tensor]) -> Tensor:
    """Their norms, in float64: squares of large gradients are no float32."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    return torch.stack(torch._foreach_norm(dense, dtype=torch.float64))


def cancelled(*grads: Tensor | None) -> Tensor:
    """How many times larger gradients are, as independent ones add up, than their sum over the samples, or over positions too; the largest.

    Positions are what is neither a sample nor a channel; channels are the first dimension behind the samples, or the last.

    Example:
        >>> float(cancelled(torch.tensor([[1.0, 0.0], [-1.0, 0.5]])))
        3.0
    """
    found = []
    for g in grads:
        if g is not None:
            exact = g.double()
            left = exact.sum(0)
            sums = [left, left.flatten(1).sum(1), left.flatten(0, -2).sum(0)] if left.ndim > 1 else [left]
            size, *rest = sizes([exact, *sums]).split([1, len(sums)])
            found += [size / one for one in rest]
    return torch.cat(found).nan_to_num(nan=0.0).amax()


def weights(grad: Tensor, seed: int, *, entries: bool) -> tuple[Tensor, Tensor]:
    """Random numbers for each sample, and others for each entry of a gradient: those of the samples, and some for positions.

    All have mean 0 and mean square 1 before they are added, so that a sum of gradients that are weighed by them has, on average, the size
    that independent ones add up to.

    Args:
        grad: Samples, then channels and positions in any order.
        seed: Of a generator of their own.
        entries: Each entry of a sample may be a position, as where a net looks at the parts of a flat state one by one.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
        values -= values.mean()
        return values / values.square().mean().sqrt().clamp_min(1e-9)

    count, shape = len(grad), grad.shape[1:]
    samples = drawn(count)
    each = samples.reshape(-1, *[1] * len(shape))
    if len(shape) > 1:
        each = each + drawn(count, 1, *shape[1:]) + drawn(count, *shape[:-1], 1)
    elif entries:
        each = each + drawn(count, *shape)
    return samples, each
