"""What cancels within one call: where a loss subtracts samples of a batch, or positions of a sample, as f(x) - f(x + e), little is left of
their gradients, and all of their errors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["NOTHING", "ODD", "Within", "cancelled", "sizes", "weights"]

ODD = 3.0  # gradients seldom are so many times larger than their sum, as independent ones add up, by chance
NOTHING = 1e5  # gradients so many times larger than their sum leave nothing but rounding
CALLS = 8  # so many calls are remembered, for captured steps, which cannot stop to look
ALIKE, TAKEN_OVER = 1.4, 15  # what cancels within a call is taken over from one like it, for so many calls


class Within:
    """What cancelled within the calls of one direction.

    Of each call four numbers: how many times larger its gradients were than their sum, at the output, at the input, and at the
    parameters, and how large the last sum was beside the gradient of the output. The third costs a walk, and is taken over for some
    calls from one that was alike.
    """

    def __init__(self) -> None:
        self.calls: deque[tuple[float, float, float]] = deque(maxlen=CALLS)
        self.known: tuple[Sequence[float], float, float] | None = None
        self.since = 0

    @property
    def lost(self) -> float:
        """The largest of the last calls, at the parameters."""
        return max((lost for *_, lost in self.calls), default=1.0)

    @property
    def allowed(self) -> tuple[float, float]:
        """What may cancel at the two ends of a captured step before it is run again: at least twice as much as in any of the last calls, a
        power of two; infinite where nothing but rounding was left.
        """
        most = (max((call[k] for call in self.calls), default=ODD) for k in range(2))
        first, last = (2.0 ** math.ceil(math.log2(2 * end)) if end < NOTHING else math.inf for end in most)
        return first, last

    def like(self, ends: Sequence[float], left: float) -> float | None:
        """What was measured at the parameters of a call not long ago, if this one is alike: if nothing was lost there, no more cancels
        here and as much is left.
        """
        self.since += 1
        if self.known is None or self.since > TAKEN_OVER:
            return None
        before, left_then, lost = self.known
        more = [*(now / then for now, then in zip(ends, before, strict=True)), left_then / left if left else math.inf]
        least = 1 / ALIKE if lost > 1 else 0.0
        return lost if all(least <= ratio <= ALIKE for ratio in more) else None

    def measured(self, ends: Sequence[float], left: float, lost: float) -> None:
        """Take note of what was measured at the parameters."""
        self.known, self.since = (ends, left, lost), 0

    def add(self, ends: Sequence[float], lost: float) -> None:
        """Take note of a call."""
        self.calls.append((ends[0], ends[1], lost))


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
        entries: Each entry of a sample is a position, as in a latent that has been made flat.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, dtype=torch.float64, generator=generator)
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
