"""What is measured of an image flow: how images come back, what samples are worth, condition numbers, and which likelihoods hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from bilip import Flow, _linalg
from bilip._linalg import inv_ex
from bilip.auditing.probes.precision import condition_numbers
from bilip.auditing.reference import Reference, tolerance
from bilip.auditing.round_trip import norms
from bilip.data import Images, dequantize, seed_of
from bilip.errors import NotMeasured
from bilip.linalg.lanczos import largest_singular_value
from bilip.probes import Subject, jacobian
from bilip.recipes.images import as_bytes
from bilip.recipes.residual_flows import decode, is_residual

CHUNK = 500
NOISE = ("uniform", "gaussian", "rademacher")
# Dimensions up to which the whole Jacobian of a residual flow is built, by the kind of device, and up to which all of its
# singular values are computed.
WHOLE = {"cpu": 4096, "cuda": 16384}
EVERY = 4096
VISIBLE = 4 / 256  # the largest error of a pixel that nobody sees: four of 256 grey levels
CONSISTENT = 0.01  # bits per dimension by which a sample's likelihood may change when it is encoded again
PART = 1e-3  # of d + |log p|: how far a likelihood may be from its float64 reference


class Inputs:
    """Images and noise by name, in [-1/2, 1/2], the same on every call and device.

    Images are dequantized. Noise is as in the original code: uniform, standard normal or ±1/2, clipped to ±0.49.

    Args:
        images: Image sets by name, as bytes.
        shape: Of one image.
        bits: Of the dequantization.
        seed: Of noise and dequantization.
        device: Where inputs go.

    Example:
        >>> inputs = Inputs({}, (3, 4, 4), bits=8, seed=0, device="cpu")
        >>> inputs.first("rademacher", 2).abs().unique()
        tensor([0.4900])
    """

    def __init__(
        self, images: Mapping[str, Images], shape: Sequence[int], *, bits: int, seed: int, device: str
    ) -> None:
        self.images, self.shape, self.bits, self.seed, self.device = images, tuple(shape), bits, seed, device

    def count(self, name: str, most: int) -> int:
        """How many there are, at most so many."""
        return most if name in NOISE else min(most, len(self.images[name]))

    def chunks(self, name: str, most: int) -> Iterator[Tensor]:
        """The first so many, some hundred at a time."""
        count = self.count(name, most)
        for start in range(0, count, CHUNK):
            yield self._chunk(name, start)[: count - start].to(self.device)

    def first(self, name: str, most: int) -> Tensor:
        """The first so many, at once."""
        return torch.cat(list(self.chunks(name, most)))

    def _chunk(self, name: str, start: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed_of(self.seed, start, name))
        size = (CHUNK, *self.shape)
        if name == "uniform":
            x = torch.rand(size, generator=generator) - 0.5
        elif name == "gaussian":
            x = torch.randn(size, generator=generator)
        elif name == "rademacher":
            x = torch.randint(2, size, generator=generator) - 0.5
        else:
            levels = self.images[name].x[start : start + CHUNK]
            return dequantize(levels >> (8 - self.bits), self.bits, generator) - 0.5
        return x.clamp(-0.49, 0.49)


@dataclass(frozen=True)
class Trip:
    """How images come back from a flow, one entry for each."""

    nan: Tensor  # whether the reconstruction holds NaN
    inf: Tensor  # whether it holds Inf, and no NaN
    wrong: Tensor  # whether it is finite, and visibly off: by more than `VISIBLE` in a pixel, both cut to [-1/2, 1/2]
    l2: Tensor  # norm of its error, float64; not finite where it is not
    square: Tensor  # mean squared error of a pixel, likewise
    log_prob: Tensor  # as the flow computes it, float64

    @property
    def finite(self) -> Tensor:
        return ~(self.nan | self.inf)

    @property
    def back(self) -> Tensor:
        """Which images came back."""
        return self.finite & ~self.wrong

    @classmethod
    def cat(cls, trips: Sequence[Trip]) -> Trip:
        return cls(*(torch.cat([getattr(trip, field.name) for trip in trips]) for field in fields(cls)))

    def first(self, count: int) -> Trip:
        return Trip(*(getattr(self, field.name)[:count] for field in fields(self)))


@contextmanager
def fixed_draws(seed: int = 0) -> Iterator[None]:
    """Inside, the random probes of an estimated log-determinant are those of a seed; outside, nothing was drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def round_trip(flow: Flow, x: Tensor) -> Trip:
    """Encode and decode."""
    with fixed_draws():
        z, log_det = flow.bijection.forward_and_log_det(x)
    log_prob = flow.base_log_prob(z).double() + log_det.double()
    return _trip(x, decode(flow.bijection, z), log_prob)


def _trip(x: Tensor, back: Tensor, log_prob: Tensor) -> Trip:
    difference = (back.double() - x.double()).flatten(1)
    nan = torch.isnan(difference).any(1)
    inf = ~torch.isfinite(difference).all(1) & ~nan
    seen = (back.clamp(-0.5, 0.5) - x.clamp(-0.5, 0.5)).flatten(1).abs().amax(1)
    found = (nan, inf, ~(nan | inf) & ~(seen <= VISIBLE), norms(difference), difference.square().mean(1), log_prob)
    return Trip(*(value.cpu() for value in found))


def summary(trip: Trip) -> dict[str, float]:
    """Shares and errors.

    Returns:
        `count`; `share_nan`, `share_inf`, `share_wrong` (finite, and visibly off), which exclude each other; `share_non_finite`, the
        first two; `error`, the mean L2 norm of an image's error over those that come back; `error_finite`, over all that are finite, as
        the paper has it; `error_worst`, the largest finite one; NaN where there is none. `square` is the median over the images of the
        mean squared error of a pixel, Inf once half of them are not finite.
    """
    finite = trip.finite
    return {
        "count": len(finite),
        "share_nan": _share(trip.nan),
        "share_inf": _share(trip.inf),
        "share_wrong": _share(trip.wrong),
        "share_non_finite": _share(~finite),
        "error": _mean(trip.l2[trip.back]),
        "error_finite": _mean(trip.l2[finite]),
        "error_worst": float(trip.l2[finite].max()) if bool(finite.any()) else math.nan,
        "square": float(torch.where(finite, trip.square, math.inf).median()),
    }


@dataclass(frozen=True)
class Sampled:
    """Samples of a flow."""

    trip: Trip  # how they come back; NaN or Inf where the sample itself is not finite
    # Bits per dimension of each as it is drawn, log p of its latent and the log-determinant of the inverse.
    drawn: Tensor
    again: Tensor  # bits per dimension when it is encoded again

    def numbers(self) -> dict[str, float]:
        """`reliable` is the share of samples that are finite and whose bits per dimension change by at most `CONSISTENT`; `visible` that of
        those that come back visibly off, or not finite. Medians in bits per dimension, over the finite ones.
        """
        apart = (self.drawn - self.again).abs()
        reliable = self.trip.finite & (apart <= CONSISTENT)
        return summary(self.trip) | {
            "reliable": _share(reliable),
            "visible": _share(~self.trip.back),
            "bits_drawn": _median(self.drawn),
            "bits_again": _median(self.again),
            "bits_apart": _median(apart),
        }


@torch.no_grad()
def sampled(flow: Flow, count: int, *, bits: int, seed: int) -> tuple[Sampled, Tensor]:
    """Draw samples, encode them again, and decode that; and the first samples themselves."""
    trips, drawn, again, kept = [], [], [], []
    device = next(flow.parameters()).device
    for start in range(0, count, CHUNK):
        generator = torch.Generator().manual_seed(seed_of(seed, start, "samples"))
        z = torch.randn(CHUNK, *(flow.latent_shape or ()), generator=generator)[: count - start].to(device)
        if is_residual(flow.bijection):
            x = decode(flow.bijection, z)
            with fixed_draws():  # the same random probe as when the sample is encoded again
                log_det = -flow.bijection.forward_and_log_det(x)[1]
        else:
            x, log_det = flow.bijection.inverse_and_log_det(z)
        trip = round_trip(flow, x)
        size = math.log(2) * math.prod(x.shape[1:])
        drawn.append((bits - (flow.base_log_prob(z).double() - log_det.double()) / size).cpu())
        again.append(bits - trip.log_prob / size)
        trips.append(trip)
        kept.append(x if not kept else x[:0])
    return Sampled(Trip.cat(trips), torch.cat(drawn), torch.cat(again)), torch.cat(kept)


@torch.no_grad()
def bits_per_dim(flow: Flow, inputs: Inputs, name: str, most: int) -> float:
    """The mean over some images; NaN or Inf if one is."""
    with fixed_draws():
        found = [flow.bits_per_dim(x, bits=inputs.bits).double().sum() for x in inputs.chunks(name, most)]
    return float(sum(found)) / inputs.count(name, most)


def conditions(flow: Flow, x: Tensor, *, steps: int) -> list[float]:
    """Condition numbers in float64, found from below by so many steps of Lanczos' method; Inf where the forward pass is not finite there,
    NaN where float64 is not enough to linearise the flow. Those of residual flows are of the whole Jacobian where it is not too large:
    each of Lanczos' steps would have to invert every block by iteration.
    """
    if is_residual(flow.bijection) and x[0].numel() <= WHOLE.get(x.device.type, EVERY):
        return [condition_of(jacobian(flow.bijection, x[k : k + 1])) for k in range(len(x))]
    subject = Subject.of(flow)
    finite = torch.isfinite(subject.copy_in(torch.float64).forward(x.double()).value.flatten(1)).all(1)
    found = torch.full((len(x),), math.inf, dtype=torch.float64, device=x.device)
    chosen = finite.nonzero().flatten()
    # One is enough to spoil the others: find it before the costly part.
    if len(chosen) and not _can_be_solved(subject, x[chosen]):
        good = [k for k in chosen.tolist() if _can_be_solved(subject, x[k : k + 1])]
        found[finite], chosen = math.nan, torch.tensor(good, dtype=torch.long, device=x.device)
    if len(chosen):
        found[chosen] = condition_numbers(subject, x[chosen], steps=steps)
    return found.tolist()


def condition_of(matrix: Tensor, *, most: int = EVERY) -> float:
    """The condition number of a square matrix: from all singular values up to `most` rows; beyond, from below, by Lanczos' method with the
    matrix and with its inverse, which takes seconds where the singular values would take minutes.

    Example:
        >>> matrix = torch.diag(torch.linspace(1, 50, 50, dtype=torch.float64))
        >>> round(condition_of(matrix), 6), round(condition_of(matrix, most=10), 6)
        (50.0, 50.0)
    """
    if not bool(torch.isfinite(matrix).all()):
        return math.nan
    if len(matrix) <= most:
        values = torch.linalg.svdvals(matrix)
        return float(values[0] / values[-1])
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, len(matrix), generator=generator, dtype=torch.float64).to(matrix)
    inverse, failed = inv_ex(matrix)
    if bool(failed):
        return math.inf
    gains = [
        largest_singular_value(lambda v, a=a: v @ a.mT, lambda u, a=a: u @ a, start).value for a in (matrix, inverse)
    ]
    return float(gains[0] * gains[1])


def _can_be_solved(subject: Subject, x: Tensor) -> bool:
    """Whether float64 is enough for products with the inverse of the Jacobian at these points."""
    try:
        at = subject.linearized(x)
        at.solve(torch.ones(at.count, at.size, dtype=torch.float64, device=x.device))
    except NotMeasured:
        return False
    return True


def log_det_errors(flow: Flow, x: Tensor) -> dict[str, list[float]]:
    """The log-determinant against that of the whole Jacobian, built column by column in float64, at each point.

    Returns:
        Nats per dimension: `float64`, of what the flow computes in float64, and `float32`, in its own dtype.
    """
    subject = Subject.of(flow)
    size, found = x[0].numel(), {"float64": [], "float32": []}
    for k in range(len(x)):
        point = x[k : k + 1]
        exact = float(_linalg.slogdet(jacobian(flow.bijection, point))[1])
        double = subject.copy_in(torch.float64).forward_and_log_det(point.double()).values[1]
        own = subject.forward_and_log_det(point).values[1]
        found["float64"].append(abs(float(double[0]) - exact) / size)
        found["float32"].append(abs(float(own[0]) - exact) / size)
    return found


def log_det_spread(flow: Flow, x: Tensor, repeats: int) -> dict[str, list[float]]:
    """Estimated log-determinants against that of the whole Jacobian, in float64, at each point.

    Returns:
        Nats per dimension: `apart`, the mean of so many estimates less the log-determinant of the Jacobian, and `standard_error` of that
        mean.
    """
    double = Subject.of(flow).copy_in(torch.float64)
    size, found = x[0].numel(), {"apart": [], "standard_error": []}
    for k in range(len(x)):
        exact = float(_linalg.slogdet(jacobian(flow.bijection, x[k : k + 1]))[1])
        several = x[k : k + 1].double().expand(repeats, *x.shape[1:])
        with fixed_draws(k):
            values = double.forward_and_log_det(several).values[1]
        found["apart"].append((float(values.mean()) - exact) / size)
        found["standard_error"].append(float(values.std()) / math.sqrt(repeats) / size)
    return found


@torch.no_grad()
def trusted(flow: Flow, chunks: Iterator[Tensor], log_prob: Tensor) -> Tensor:
    """Which log-likelihoods agree with those that a float64 copy computes, within `PART` of d + |log p|; where they are estimated, both
    are computed here with the same random probes.
    """
    reference, good, start = Reference(Subject.of(flow)), [], 0
    for x in chunks:
        with fixed_draws(start):
            exact = reference.log_prob(x).cpu()
        value = log_prob[start : start + len(x)]
        if is_residual(flow.bijection):
            with fixed_draws(start):
                value = flow.log_prob(x).double().cpu()
        good.append((value - exact).abs() <= tolerance(exact, x[0].numel(), PART))  # False for NaN
        start += len(x)
    return torch.cat(good)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How often a likelihood from inside the distribution is above one from outside, ties counted half; NaN without samples.

    A likelihood that is not finite counts as the lowest, as a detector would take it.

    Example:
        >>> auroc(torch.tensor([3.0, 2.0]), torch.tensor([1.0, float("nan")]))
        1.0
    """
    if not (len(inside) and len(outside)):
        return math.nan
    values = torch.cat((inside, outside)).double()
    values = torch.where(torch.isfinite(values), values, -math.inf).numpy()
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    n, m = len(inside), len(outside)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


@torch.no_grad()
def pictures(flow: Flow, x: Tensor, count: int) -> dict[str, np.ndarray]:
    """Some images and how they come back: the worst of all first, then the first ones.

    Returns:
        `images`, bytes of shape (count, 2, height, width, 3), input and reconstruction, and `broken`, 1 where a pixel is not finite.
    """
    # Once: in a batch of another size rounding, and what is lost, may differ.
    back = decode(flow.bijection, flow.bijection(x))
    trip = _trip(x, back, torch.zeros(len(x)))
    worst = int(torch.where(trip.finite, trip.l2, math.inf).argmax())
    chosen = list(dict.fromkeys([worst, *range(len(x))]))[:count]
    x, back = x[chosen], back[chosen]
    both = torch.stack((x, back), 1).movedim(2, -1).cpu()
    broken = ~torch.isfinite(both).all(-1)
    return {"images": as_bytes(both).numpy(), "broken": broken.to(torch.uint8).numpy()}


def _share(which: Tensor) -> float:
    return float(which.double().mean())


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else math.nan


def _median(values: Tensor) -> float:
    values = values[torch.isfinite(values)]
    return float(values.median()) if len(values) else math.nan
